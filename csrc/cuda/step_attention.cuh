// Attention of the step kernel: q/k norm, RoPE, KV write, attention over a split of the cache, combination of the splits.
//
// A unit is one KV head and the tiles of 16 positions t = split, split + splits, ...; its rows are the query heads of the
// group for every token, token major, 16 rows to an MMA. Squads of four warps work on one block of 16 rows and 32 positions
// at a time: each warp scores eight of the positions, then all weigh a quarter of the head's dimensions each (more of either
// would not fit the registers). Where there are fewer row blocks than squads, several squads share one and divide its
// positions.
#pragma once
#include <utility>
#include "step_producer.cuh"

namespace mk {

// Positions that a query of this layer sees, 0: all. Device code cannot index a constant of the host, so it asks for every
// layer in turn; where none has a window, the compiler sees that.
template <size_t... kLayer>
__device__ __forceinline__ int window_of(int layer, std::index_sequence<kLayer...>) {
  int window = 0;
  ((layer == (int)kLayer ? window = std::integral_constant<int, kWindows[kLayer]>::value : 0), ...);
  return window;
}

// A vector of one head of one token, as one warp holds it: lane l has the dimensions l, l + 32, ...
struct HeadVector {
  static constexpr int kLane = kHeadDim / 32;
  float v[kLane];

  __device__ __forceinline__ void load(const StepBlock& b, const float* src) {
#pragma unroll
    for (int j = 0; j < kLane; j++) v[j] = __ldcg(src + b.lane() + 32 * j);
  }
  // Norm and rotation.
  __device__ __forceinline__ void rotate(const StepBlock& b, const float* norm, int position) {
    if constexpr (kQkNorm) {
      float squares = 0;
#pragma unroll
      for (int j = 0; j < kLane; j++) squares += v[j] * v[j];
      const float r = rsqrtf(warp_sum(squares) / kHeadDim + kRmsEps);
#pragma unroll
      for (int j = 0; j < kLane; j++) v[j] *= r * __ldg(norm + b.lane() + 32 * j);
    }
    constexpr int kHalf = kRotary / 2;
    const float2* table = b.p.rope + (int64_t)position * kHalf;
    if constexpr (kHalf % 32 == 0) {  // a dimension and its partner are the same lane's
#pragma unroll
      for (int j = 0; j < kHalf / 32; j++) {
        const float2 c = __ldg(table + b.lane() + 32 * j);
        const float x = v[j], y = v[j + kHalf / 32];
        v[j] = x * c.x - y * c.y;
        v[j + kHalf / 32] = y * c.x + x * c.y;
      }
    } else {
      float turned[kLane];
#pragma unroll
      for (int j = 0; j < kLane; j++) {
        const int d = b.lane() + 32 * j, partner = d < kHalf ? d + kHalf : d - kHalf;
        float y = 0;
#pragma unroll
        for (int k = 0; k < kLane; k++) {
          const float other = __shfl_sync(~0u, v[k], partner & 31);
          if (partner / 32 == k) y = other;
        }
        const float2 c = d < kRotary ? __ldg(table + min(d, partner)) : make_float2(1, 0);
        turned[j] = d < kHalf ? v[j] * c.x - y * c.y : d < kRotary ? v[j] * c.x + y * c.y : v[j];
      }
#pragma unroll
      for (int j = 0; j < kLane; j++) v[j] = turned[j];
    }
  }
};

// Queries of the unit into shared memory; keys and values of new positions whose tiles are the unit's into the cache. A job
// is a vector: the rows of queries, then of every token its key and its value.
__device__ __forceinline__ void prepare_unit(const StepBlock& b, int kv_head, int split, int splits, uint16_t* q) {
  const int rows = b.tokens() * kGroup, jobs = rows + 2 * b.tokens();
  const auto token_of = [&](int job) { return job < rows ? job / kGroup : (job - rows) / 2; };
  constexpr int kAtATime = 2;  // loads of one vector hide behind those of the other
#pragma unroll 1
  for (int first = b.warp; first < jobs; first += kAtATime * kWarps) {
    HeadVector x[kAtATime];
#pragma unroll
    for (int i = 0; i < kAtATime; i++) {
      const int job = min(first + i * kWarps, jobs - 1);
      const int head = job < rows ? kv_head * kGroup + job % kGroup : kHeads + (job - rows) % 2 * kKvHeads + kv_head;
      x[i].load(b, b.p.qkv + token_of(job) * kQkvRows + head * kHeadDim);
    }
#pragma unroll
    for (int i = 0; i < kAtATime; i++) {
      const int job = first + i * kWarps, position = b.position() + token_of(job);
      const bool is_query = job < rows, is_value = !is_query && (job - rows) % 2;
      if (job >= jobs || (!is_query && position / kTile % splits != split)) continue;
      if (!is_value) x[i].rotate(b, b.p.norms + b.layer() * kNormLayer + (is_query ? kNormQ : kNormK), position);
      uint8_t* tile = b.p.kv + kv_tile_offset(b.layer(), kv_head, position / kTile);
#pragma unroll
      for (int j = 0; j < HeadVector::kLane; j++) {
        const int d = b.lane() + 32 * j;
        uint16_t* to = is_query   ? q + job * kQStride + d
                       : is_value ? (uint16_t*)(tile + kTileBytes + v_offset(position, d))
                                  : (uint16_t*)(tile + k_offset(position, d));
        *to = (uint16_t)pack_bf16x2(x[i].v[j], 0.f);
      }
    }
  }
}

// A row block's running softmax: outputs of this warp's quarter of the dimensions for rows g and g + 8. The sums are of this
// warp's positions.
constexpr int kQuarterTiles = kHeadDim / 32;
struct RunningSoftmax {
  float out[kQuarterTiles][4] = {};
  float top[2] = {-INFINITY, -INFINITY}, sum[2] = {};
};

// Two tiles of the cache (the second may be beyond the unit's last: then `second` is false) for one row block. first: the
// first position of this warp's tile.
__device__ __forceinline__ void attend_tiles(const StepBlock& b, RunningSoftmax& r, const uint16_t* q, SquadScores& x,
                                             const uint8_t* cache, uint32_t stride, int first, bool second, int block,
                                             int window) {
  const int member = b.warp & 3, g = b.lane() >> 2, t = b.lane() & 3, barrier = kSquadBarrier + (b.warp >> 2);
  const bool mine = member < 2 || second;
  const uint4* keys = (const uint4*)(cache + member / 2 * stride) + member % 2 * (kHeadDim / 32) * 32 + b.lane();
  uint4 k[kHeadDim / 32];
#pragma unroll
  for (int i = 0; i < kHeadDim / 32; i++) k[i] = mine ? __ldcg(keys + 32 * i) : make_uint4(0, 0, 0, 0);
  // Values arrive while the scores are exchanged.
  const uint8_t* values = cache + kTileBytes + (member * kQuarterTiles * 32 + b.lane()) * sizeof(uint2);
  uint2 v[kQuarterTiles];
#pragma unroll
  for (int j = 0; j < kQuarterTiles; j++) v[j] = __ldcg((const uint2*)values + 32 * j);
  float s[4] = {};  // positions 2 t and 2 t + 1 of rows g and g + 8
#pragma unroll
  for (int i = 0; i < kHeadDim / 32; i++) {
    const uint4 q0 = *(const uint4*)(q + (16 * block + g) * kQStride + 32 * i + 8 * t);
    const uint4 q1 = *(const uint4*)(q + (16 * block + g + 8) * kQStride + 32 * i + 8 * t);
    mma_bf16(s, q0.x, q1.x, q0.y, q1.y, k[i].x, k[i].y);
    mma_bf16(s, q0.z, q1.z, q0.w, q1.w, k[i].z, k[i].w);
  }
  // Masked scores are -inf. Rows behind the last token's are computed and never looked at.
  const float scale = rsqrtf((float)kHeadDim) * 1.4426950408889634f;  // and exponents of two
  float top[2];
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const int self = b.position() + (16 * block + g + 8 * h) / kGroup;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int at = first + 2 * t + i;
      s[2 * h + i] = mine && at <= self && (window == 0 || at > self - window) ? s[2 * h + i] * scale : -INFINITY;
    }
    top[h] = fmaxf(s[2 * h], s[2 * h + 1]);
    top[h] = fmaxf(top[h], __shfl_xor_sync(~0u, top[h], 1));
    top[h] = fmaxf(top[h], __shfl_xor_sync(~0u, top[h], 2));
    if (t == 0) x.top[g + 8 * h][member] = top[h];
  }
  group_sync(barrier, 128);
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const float4 all = *(const float4*)x.top[g + 8 * h];
    top[h] = fmaxf(fmaxf(fmaxf(all.x, all.y), fmaxf(all.z, all.w)), r.top[h]);
    const float base = top[h] == -INFINITY ? 0.f : top[h], fade = exp2_approx(r.top[h] - base);
    r.top[h] = top[h];
    const uint32_t p = pack_bf16x2(exp2_approx(s[2 * h] - base), exp2_approx(s[2 * h + 1] - base));
    *(uint32_t*)&x.p[g + 8 * h][8 * member + 2 * t] = p;
    r.sum[h] = r.sum[h] * fade + (bf16_low(p) + bf16_high(p));
#pragma unroll
    for (int j = 0; j < kQuarterTiles; j++) r.out[j][2 * h] *= fade, r.out[j][2 * h + 1] *= fade;
  }
  uint2 v1[kQuarterTiles];
#pragma unroll
  for (int j = 0; j < kQuarterTiles; j++)
    v1[j] = second ? __ldcg((const uint2*)(values + stride) + 32 * j) : make_uint2(0, 0);
  group_sync(barrier, 128);
#pragma unroll
  for (int n = 0; n < 2; n++) {
    const uint2 p0 = *(const uint2*)&x.p[g][16 * n + 4 * t], p1 = *(const uint2*)&x.p[g + 8][16 * n + 4 * t];
#pragma unroll
    for (int j = 0; j < kQuarterTiles; j++)
      mma_bf16(r.out[j], p0.x, p1.x, p0.y, p1.y, n ? v1[j].x : v[j].x, n ? v1[j].y : v[j].y);
  }
}

// KV splits of a step: as many as its context is worth.
__device__ __forceinline__ int step_splits(const StepBlock& b) {
  const int tiles = ceil_div(b.position() + b.tokens(), kTile);
  return max(1, min(kMaxSplits, ceil_div(tiles, b.p.tiles_per_split)));
}

// Rows of a unit, blocks of 16 of them, and blocks that the squads take at a time. Functions, so that their values need no
// registers between two uses.
__device__ __forceinline__ int attention_rows(const StepBlock& b) { return b.tokens() * kGroup; }
__device__ __forceinline__ int row_blocks(const StepBlock& b) { return ceil_div(attention_rows(b), 16); }
__device__ __forceinline__ int squad_spread(const StepBlock& b) {
  const int blocks = row_blocks(b);
  return blocks > 2 ? kSquads : blocks;
}

// One row block of a unit against this squad's share of the unit's tiles. Outputs are not yet divided by the sums.
__device__ __forceinline__ void attend_block(const StepBlock& b, RunningSoftmax& r, int unit, int block) {
  const int splits = step_splits(b), split = unit % splits, member = b.warp & 3, shares = kSquads / squad_spread(b);
  const int window = window_of(b.layer(), std::make_index_sequence<kLayers>());
  const int oldest = window ? max(0, b.position() + 1 - window) / kTile : 0;  // tile of the first position that is seen
  const int count = (ceil_div(b.position() + b.tokens(), kTile) - split + splits - 1) / splits;
  const int skip = max(0, (oldest - split + splits - 1) / splits);
  const uint32_t stride = splits * 2 * kTileBytes;
  const uint8_t* cache = b.p.kv + kv_tile_offset(b.layer(), unit / splits, split);
  const uint16_t* q = b.scratch<uint16_t>();
  SquadScores& x = ((SquadScores*)(q + ceil_div(kStepTokens * kGroup, 16) * 16 * kQStride))[b.warp >> 2];
#pragma unroll 1
  for (int i = skip + 2 * ((b.warp >> 2) / squad_spread(b)); i < count; i += 2 * shares)
    attend_tiles(b, r, q, x, cache + (int64_t)i * stride, stride,
                 ((i + member / 2) * splits + split) * kTile + member % 2 * 8, i + 1 < count, block, window);
  const int g = b.lane() >> 2, t = b.lane() & 3;
#pragma unroll
  for (int h = 0; h < 2; h++) {
    r.sum[h] += __shfl_xor_sync(~0u, r.sum[h], 1);
    r.sum[h] += __shfl_xor_sync(~0u, r.sum[h], 2);
    if (t == 0) x.top[g + 8 * h][member] = r.sum[h];
  }
  group_sync(kSquadBarrier + (b.warp >> 2), 128);
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const float4 all = *(const float4*)x.top[g + 8 * h];
    r.sum[h] = (all.x + all.y) + (all.z + all.w);
  }
  group_sync(kSquadBarrier + (b.warp >> 2), 128);
}

// Outputs and sums of one row block to where it is summed up or kept.
__device__ __forceinline__ void store_block(const StepBlock& b, const RunningSoftmax& r, float* out, float2* sums) {
  const int g = b.lane() >> 2, t = b.lane() & 3, member = b.warp & 3;
#pragma unroll
  for (int h = 0; h < 2; h++) {
#pragma unroll
    for (int j = 0; j < kQuarterTiles; j++)
      *(float2*)(out + (g + 8 * h) * kHeadDim + 8 * (member * kQuarterTiles + j) + 2 * t) =
          make_float2(r.out[j][2 * h], r.out[j][2 * h + 1]);
    if (member == 0 && t == 0) sums[g + 8 * h] = make_float2(r.top[h], r.sum[h]);
  }
}

// Several squads had the same row block: their outputs lie in shared memory.
__device__ __forceinline__ void merge_shares(const StepBlock& b, float* out, float2* sums) {
  const int spread = squad_spread(b), shares = kSquads / spread, rows = attention_rows(b);
  const float* o = b.scratch<float>();
  const float2* s = (const float2*)(o + kSquads * 16 * kHeadDim);
#pragma unroll 1
  for (int i = b.tid; i < rows * kHeadDim; i += kTeam) {
    const int row = i / kHeadDim, d = i % kHeadDim;
    float top = -INFINITY;
#pragma unroll 1
    for (int k = 0; k < shares; k++) top = fmaxf(top, s[k * spread * 16 + row].x);
    float value = 0, sum = 0;
#pragma unroll 1
    for (int k = 0; k < shares; k++) {
      const float2 part = s[k * spread * 16 + row];
      const float f = part.x == -INFINITY ? 0.f : exp2_approx(part.x - top);
      value += f * o[(k * spread * 16 + row) * kHeadDim + d];
      sum += f * part.y;
    }
    out[row * kHeadDim + d] = value;
    if (d == 0) sums[row] = make_float2(top, sum);
  }
}

__device__ __forceinline__ void step_attention(StepBlock& b) {
  b.stamp(kPhaseAttention, 0);
#pragma unroll 1
  for (int unit = b.sm(); unit < kKvHeads * step_splits(b); unit += kGrid) {
    prepare_unit(b, unit / step_splits(b), unit % step_splits(b), step_splits(b), b.scratch<uint16_t>());
    team_sync<kTeam>();
    b.stamp(kPhaseAttention, 1);
#pragma unroll 1
    for (int block = (b.warp >> 2) % squad_spread(b); block < row_blocks(b); block += squad_spread(b)) {
      RunningSoftmax r;
      attend_block(b, r, unit, block);
      if (squad_spread(b) == kSquads) {
        store_block(b, r, b.p.partial + ((int64_t)unit * kAttentionRows + 16 * block) * kHeadDim,
                    b.p.partial_sums + unit * kAttentionRows + 16 * block);
        continue;
      }
      team_sync<kTeam>();  // queries and scores were read; every squad has just this block
      float* out = b.scratch<float>();
      store_block(b, r, out + (b.warp >> 2) * 16 * kHeadDim, (float2*)(out + kSquads * 16 * kHeadDim) + (b.warp >> 2) * 16);
      team_sync<kTeam>();
      merge_shares(b, b.p.partial + (int64_t)unit * kAttentionRows * kHeadDim, b.p.partial_sums + unit * kAttentionRows);
    }
    team_sync<kTeam>();  // the next unit overwrites shared memory
  }
  b.stamp(kPhaseAttention, 3);
  b.meet();
}

// One warp a row of heads x tokens, spread over the grid.
__device__ __forceinline__ void step_combine(StepBlock& b) {
  b.stamp(kPhaseCombine, 0);
  const int splits = step_splits(b);
  constexpr int kLane = kHeadDim / 32;
#pragma unroll 1
  for (int i = b.sm() + kGrid * b.warp; i < b.tokens() * kHeads; i += kGrid * kWarps) {
    const int token = i / kHeads, head = i % kHeads, row = token * kGroup + head % kGroup;
    const int unit = head / kGroup * splits;
    const float2 mine = b.lane() < splits ? __ldcg(b.p.partial_sums + (unit + b.lane()) * kAttentionRows + row)
                                        : make_float2(-INFINITY, 0.f);
    float top = mine.x;
#pragma unroll
    for (int o = 16; o; o >>= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, o));
    const float f = mine.x == -INFINITY ? 0.f : exp2_approx(mine.x - top);
    const float inverse = __fdividef(1.f, warp_sum(f * mine.y));
    float v[kLane] = {};
    const float* src = b.p.partial + ((int64_t)unit * kAttentionRows + row) * kHeadDim + b.lane() * kLane;
#pragma unroll 4
    for (int k = 0; k < splits; k++, src += kAttentionRows * kHeadDim) {
      const float w = __shfl_sync(~0u, f, k);
#pragma unroll
      for (int j = 0; j < kLane; j += 2) {
        const float2 part = __ldcg((const float2*)(src + j));
        v[j] += w * part.x, v[j + 1] += w * part.y;
      }
    }
#pragma unroll
    for (int j = 0; j < kLane; j += 2)
      *(uint32_t*)(b.p.attention + token * kQRows + head * kHeadDim + b.lane() * kLane + j) =
          pack_bf16x2(v[j] * inverse, v[j + 1] * inverse);
  }
  b.stamp(kPhaseCombine, 3);
  b.meet();
}

}  // namespace mk
