// q/k norm, RoPE, KV write, attention over this SM's share of the cache, combination of the shares.
//
// kKvHeads x splits SMs take part, each with one KV head and the tiles of 16 positions t = split, split + splits, ...; a
// position is therefore written and read by the same SM, except when the number of splits grows (decode_token). For
// scores and weights every warp takes 8 positions (K), then all warps meet and each takes 8 of the 128 head dimensions
// over all tiles (V), so the outputs need no sum across warps.
// The first 8 tiles are loaded into registers before q arrives; more would spill.
#pragma once
#include "decode_tiles.cuh"
#include "mma.cuh"

namespace mk {

// Warps 0 .. kGroup - 1: query heads of the group, the next k, the next v. Normed and rotated vectors go to shared memory as bf16.
__device__ __forceinline__ void attention_inputs(const DecodeBlock& b, int kv_head) {
  const int row = b.warp < kGroup ? (kv_head * kGroup + b.warp) * kHeadDim
                                  : kQRows + (b.warp - kGroup) * kKvRows + kv_head * kHeadDim;
  const int d = 2 * b.lane;  // this lane's dimensions: d, d + 1 and their rotation partners d + 64, d + 65
  const bool is_v = b.warp == kGroup + 1;
  float2 c0 = make_float2(1, 0), c1 = c0, g0 = make_float2(1, 1), g1 = g0;
  if (!is_v) {
    const float* norm = b.p.norms + b.layer * kNormLayer + (b.warp < kGroup ? kNormQ : kNormK);
    g0 = __ldg((const float2*)(norm + d));
    g1 = __ldg((const float2*)(norm + d + 64));
    const float2* r = b.p.rope + (int64_t)b.position * (kHeadDim / 2) + d;
    c0 = __ldg(r);
    c1 = __ldg(r + 1);
  }
  ulonglong2 va, vb;
  const uint64_t* src = b.exchange(kXQkv) + row + d;
  b.wait([&] {
    va = load_relaxed_2(src);
    vb = load_relaxed_2(src + 64);
    return b.fresh(va.x) && b.fresh(va.y) && b.fresh(vb.x) && b.fresh(vb.y);
  });
  float x0 = word_float(va.x), x1 = word_float(va.y), y0 = word_float(vb.x), y1 = word_float(vb.y);
  if (!is_v) {
    float r = rsqrtf(warp_sum(x0 * x0 + x1 * x1 + y0 * y0 + y1 * y1) / kHeadDim + kRmsEps);
    x0 *= r * g0.x, x1 *= r * g0.y, y0 *= r * g1.x, y1 *= r * g1.y;
    float u0 = x0 * c0.x - y0 * c0.y, u1 = x1 * c1.x - y1 * c1.y;
    y0 = y0 * c0.x + x0 * c0.y, y1 = y1 * c1.x + x1 * c1.y;
    x0 = u0, x1 = u1;
  }
  uint16_t* dst = b.warp < kGroup ? b.s.q[b.warp] : is_v ? b.s.v_new : b.s.k_new;
  uint32_t lo = pack_bf16x2(x0, x1), hi = pack_bf16x2(y0, y1);
  *(uint32_t*)(dst + d) = lo;
  *(uint32_t*)(dst + d + 64) = hi;
}

// The new position goes into the cache after its attention is published: nobody waits for it there before the next
// step.
__device__ __forceinline__ void write_cache(const DecodeBlock& b, int kv_head) {
  uint8_t* tile = b.p.kv + kv_tile_offset(b.layer, kv_head, b.position / kTile);
  const int d = 4 * b.lane;
  if (b.warp == kGroup) *(uint2*)(tile + k_offset(b.position, d)) = *(const uint2*)&b.s.k_new[d];
  if (b.warp == kGroup + 1)
#pragma unroll
    for (int i = 0; i < 4; i++) *(uint16_t*)(tile + kTileBytes + v_offset(b.position, d + i)) = b.s.v_new[d + i];
}

// The newest position's k and v may not have reached the cache when the tiles were loaded: its k is taken from shared
// memory here, its v where the weighted values are summed up.
__device__ __forceinline__ void patch_newest_key(const DecodeBlock& b, int first, int newest, Attention& r) {
  const int p = b.position % kTile, g = b.lane >> 2, t = b.lane & 3;
  if (first + b.warp / 2 == newest && b.warp % 2 == p / 8 && g == p % 8) {
#pragma unroll
    for (int i = 0; i < 4; i++) r.k[i] = *(const uint4*)&b.s.k_new[32 * i + 8 * t];
  }
}

template <bool kDebug>
__device__ __forceinline__ void decode_attention(DecodeBlock& b, Attention& r) {
  if (r.unit < 0) return;
  b.stamp<kDebug>(kPhaseAttention, 0);
  if constexpr (kDebug)
    if (b.sm == b.p.mute) return;
  const int log_splits = b.log_splits, splits = 1 << log_splits, kv_head = r.unit >> log_splits;
  const int split = r.unit & (splits - 1), g = b.lane >> 2, t = b.lane & 3, count = r.count(b);
  const bool owns_position = (b.position / kTile & (splits - 1)) == split;
  const int newest = owns_position ? count - 1 : -1;
  if (b.warp < kGroup + 2) attention_inputs(b, kv_head);
  b.stamp<kDebug>(kPhaseAttention, 1);
  team_sync<kTeam>();
  uint4 q[4];
#pragma unroll
  for (int i = 0; i < 4; i++) q[i] = *(const uint4*)&b.s.q[g][32 * i + 8 * t];
  constexpr float kScale = 0.08838834764831845f * 1.4426950408889634f;  // 1 / sqrt(128), and exponents of two
  float out[4] = {}, out2[4] = {}, top = -INFINITY, sum = 0;  // of out2 rows 8 .. 15 count
  for (int first = 0; first < count || first == 0; first += kScoreTiles) {
    if (first) load_tiles(b, r, first);
    patch_newest_key(b, first, newest, r);
    float acc[4] = {}, acc2[4] = {};
#pragma unroll
    for (int i = 0; i < 4; i++) {
      mma_bf16(acc, q[i].x, q[i].y, q[i].z, q[i].w, r.k[i].x, r.k[i].z);  // rows 0 .. 7 count
      mma_bf16(acc2, q[i].x, q[i].y, q[i].z, q[i].w, r.k[i].y, r.k[i].w);  // rows 8 .. 15
    }
    // A warp weighs its positions by itself, with the power of two above its own largest score: what brings all warps
    // to one scale is then a power of two too, and exact.
    const int p0 = ((first + b.warp / 2 << log_splits) + split) * kTile + 8 * (b.warp % 2) + 2 * t;
    const float s0 = p0 <= b.position ? (acc[0] + acc2[2]) * kScale : -INFINITY;
    const float s1 = p0 + 1 <= b.position ? (acc[1] + acc2[3]) * kScale : -INFINITY;
    float warp_top = fmaxf(s0, s1);
    warp_top = fmaxf(warp_top, __shfl_xor_sync(~0u, warp_top, 1));
    warp_top = ceilf(fmaxf(warp_top, __shfl_xor_sync(~0u, warp_top, 2)));
    const float base = warp_top == -INFINITY ? 0.f : warp_top;
    const uint32_t weights = pack_bf16x2(exp2_approx(s0 - base), exp2_approx(s1 - base));
    // The newest position's weight goes apart, as its v is not in the registers.
    const bool newest0 = p0 == b.position, newest1 = p0 + 1 == b.position;
    b.s.weights[g][16 * (b.warp / 4) + 8 * (b.warp % 2) + 4 * (t / 2) + 2 * (t % 2) + b.warp / 2 % 2] =
        newest0 ? 0 : newest1 ? weights & 0xFFFFu : weights;
    if (newest0 || newest1) b.s.newest_weight[g] = newest0 ? bf16_low(weights) : bf16_high(weights);
    float warp_sum = bf16_low(weights) + bf16_high(weights);
    warp_sum += __shfl_xor_sync(~0u, warp_sum, 1);
    warp_sum += __shfl_xor_sync(~0u, warp_sum, 2);
    if (t == 0) b.s.weight_scale[b.warp][g] = make_float2(warp_top, warp_sum);
    team_sync<kTeam>();
    float factor[kScoreTiles], next = top;  // of this lane's half of every tile
#pragma unroll
    for (int i = 0; i < kScoreTiles; i++) {
      factor[i] = b.s.weight_scale[2 * i + t / 2][g].x;
      next = fmaxf(next, factor[i]);
    }
    next = fmaxf(next, __shfl_xor_sync(~0u, next, 2));
    const float offset = next == -INFINITY ? 0.f : next, shrink = exp2_approx(top - offset);
    top = next;
#pragma unroll
    for (int i = 0; i < kScoreTiles; i++) factor[i] = exp2_approx(factor[i] - offset);
    if (b.warp == 0) {  // the one that publishes it
      sum *= shrink;
#pragma unroll
      for (int i = 0; i < kScoreTiles; i++) sum += b.s.weight_scale[2 * i + t / 2][g].y * factor[i];
    }
    out[0] *= shrink, out[1] *= shrink, out2[2] *= shrink, out2[3] *= shrink;
#pragma unroll
    for (int i = 0; i < kScoreTiles; i += 2) {  // rows 0 .. 7 of the MMA are one tile, rows 8 .. 15 the next
      if (first + i >= count) break;
      uint4 w = *(const uint4*)&b.s.weights[g][8 * i + 4 * t];
      const uint32_t f0 = pack_bf16x2(factor[i], factor[i]), f1 = pack_bf16x2(factor[i + 1], factor[i + 1]);
      w = make_uint4(mul_bf16x2(w.x, f0), mul_bf16x2(w.y, f1), mul_bf16x2(w.z, f0), mul_bf16x2(w.w, f1));
      mma_bf16(out, w.x, w.y, w.z, w.w, r.v[i].x, r.v[i].y);
      mma_bf16(out2, w.x, w.y, w.z, w.w, r.v[i + 1].x, r.v[i + 1].y);
    }
    if (first <= newest && newest < first + kScoreTiles) {
      const int w = 2 * (newest - first) + b.position % kTile / 8;
      const uint32_t v = *(const uint32_t*)&b.s.v_new[8 * b.warp + 2 * t];
      const float f = b.s.newest_weight[g] * exp2_approx(b.s.weight_scale[w][g].x - offset);
      out[0] += f * bf16_low(v), out[1] += f * bf16_high(v);
    }
    if (first + kScoreTiles < count) team_sync<kTeam>();  // the next chunk overwrites the weights
  }
  b.stamp<kDebug>(kPhaseAttention, 2);
  const int mine = kXPartial + r.unit * kPartialWords;
  if (kGroup == 8 || g < kGroup)  // the other rows of the MMA hold nothing
    b.publish(mine + g * kHeadDim + 8 * b.warp + 2 * t, out[0] + out2[2], out[1] + out2[3]);
  if (b.warp == 0) {
    sum += __shfl_xor_sync(~0u, sum, 2);
    if (t == 0 && (kGroup == 8 || g < kGroup)) b.publish(mine + kGroup * kHeadDim + 2 * g, top, sum);
  }
  if (owns_position) write_cache(b, kv_head);
  b.stamp<kDebug>(kPhaseAttention, 3);
}

// Every attention SM combines its share of the outputs of its KV head: one thread reads two outputs of one split.
template <bool kDebug>
__device__ __forceinline__ void decode_combine(DecodeBlock& b, int unit) {
  if (unit < 0) return;
  const int log_splits = b.log_splits, splits = 1 << log_splits;
  b.stamp<kDebug>(kPhaseCombine, 0);
  if (kGroup < 8 && b.warp >= 2 * kGroup) return;
  const int kv_head = unit >> log_splits, from = b.tid & (splits - 1),
            head_row = ((unit & (splits - 1)) * kGroup * kHeadDim) >> log_splits;
  const int o = head_row + (b.tid >> log_splits) * 2, head = o / kHeadDim;
  const uint64_t* src = b.exchange(kXPartial) + ((kv_head << log_splits) + from) * kPartialWords;
  ulonglong2 v, m;
  b.wait([&] {
    v = load_relaxed_2(src + o);
    m = load_relaxed_2(src + kGroup * kHeadDim + 2 * head);
    return b.fresh(v.x) && b.fresh(v.y) && b.fresh(m.x) && b.fresh(m.y);
  });
  b.stamp<kDebug>(kPhaseCombine, 1);
  float top = word_float(m.x), all = top;
  for (int i = 1; i < splits; i *= 2) all = fmaxf(all, __shfl_xor_sync(~0u, all, i));
  float f = exp2_approx(top - all), sum = word_float(m.y) * f, x = word_float(v.x) * f, y = word_float(v.y) * f;
  for (int i = 1; i < splits; i *= 2) {
    sum += __shfl_xor_sync(~0u, sum, i);
    x += __shfl_xor_sync(~0u, x, i);
    y += __shfl_xor_sync(~0u, y, i);
  }
  const float inverse = __fdividef(1.f, sum);
  const int row = kv_head * kGroup * kHeadDim + o;
  for (int copy = from; copy < kCopies; copy += splits)
    b.publish(kXAttention + copy * (kQRows / 2) + row / 2, pack_bf16x2(x * inverse, y * inverse));
  if (from == 0) {
    b.dump<kDebug>(kDumpAttention + row, x * inverse);
    b.dump<kDebug>(kDumpAttention + row + 1, y * inverse);
  }
  b.stamp<kDebug>(kPhaseCombine, 3);
}

}  // namespace mk
