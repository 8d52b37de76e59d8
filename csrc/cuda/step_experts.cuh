// The expert phases of the step kernel: router, choice, gate/up + SwiGLU, down + weighted sum + residual.
#pragma once
#include "mma.cuh"
#include "step_producer.cuh"

namespace mk {

// Logits of this SM's experts. Warp w multiplies one sixteenth of the columns for every token; the sixteen sums are added
// in order. Brings the input of gate/up into shared memory on the way.
__device__ __forceinline__ void step_router(StepBlock& b) {
  b.stamp(kPhaseRouter, 0);
  uint16_t* x = b.scratch<uint16_t>();
  for (int i = b.tid; i < b.tokens() * (kHidden / 8); i += kTeam) {
    const int token = i / (kHidden / 8), column = i % (kHidden / 8) * 8;
    *(uint4*)(x + token * kXStride + column) = __ldcg((const uint4*)(b.p.hidden + token * kHidden + column));
  }
  b.load_rms();
  constexpr int kSpan = ceil_div(kHidden / 4, kWarps) * 4;  // columns of a warp
  const int begin = b.warp * kSpan, end = min(kHidden, begin + kSpan);
  const int e0 = first_item(kExperts, b.sm()), e1 = first_item(kExperts, b.sm() + 1);
#pragma unroll 1
  for (int e = e0; e < e1; e++) {
    const int64_t row = ((int64_t)b.layer() * kExperts + e) * kHidden;
    float sums[kMaxTokens] = {};
#pragma unroll 1
    for (int column = begin + 4 * b.lane(); column < end; column += 128) {
      float4 w;
      if constexpr (kRouterF32) {
        w = __ldg((const float4*)((const float*)b.p.routers + row + column));
      } else {
        const uint2 bits = __ldg((const uint2*)((const uint16_t*)b.p.routers + row + column));
        w = make_float4(bf16_low(bits.x), bf16_high(bits.x), bf16_low(bits.y), bf16_high(bits.y));
      }
#pragma unroll
      for (int token = 0; token < kMaxTokens; token++)
        if (token < b.tokens()) {
          const float4 v = __ldcg((const float4*)(b.p.router_input + token * kHidden + column));
          sums[token] += (v.x * w.x + v.y * w.y) + (v.z * w.z + v.w * w.w);
        }
    }
#pragma unroll
    for (int token = 0; token < kMaxTokens; token++)
      if (token < b.tokens()) {
        const float sum = warp_sum(sums[token]);
        if (b.lane() == 0) b.s.router_dot[token][b.warp] = sum;
      }
    team_sync<kTeam>();
    if (b.tid < b.tokens()) {
      float sum = 0;
      for (int w = 0; w < kWarps; w++) sum += b.s.router_dot[b.tid][w];
      b.p.router_logits[b.tid * kExperts + e] = sum * b.s.rms[b.tid];
    }
    team_sync<kTeam>();
  }
  b.stamp(kPhaseRouter, 3);
  b.meet();
}

// Every SM chooses for itself: warp t the experts of token t, largest logit first, ties to the lower expert.
__device__ __forceinline__ void choose_for_token(const StepBlock& b) {
  constexpr int kPerLane = ceil_div(kExperts, 32);
  uint32_t key[kPerLane];
  float top = -INFINITY, all = 0;
#pragma unroll
  for (int i = 0; i < kPerLane; i++) {
    const int e = b.lane() + 32 * i;
    const float logit = e < kExperts ? __ldcg(b.p.router_logits + b.warp * kExperts + e) : -INFINITY;
    key[i] = e < kExperts ? order_key(__float_as_uint(logit)) : 0;
    top = fmaxf(top, logit);
  }
  if constexpr (!kNormTopkProb) {
#pragma unroll
    for (int o = 16; o; o >>= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, o));
#pragma unroll
    for (int i = 0; i < kPerLane; i++)
      if (b.lane() + 32 * i < kExperts) all += __expf(key_value(key[i]) - top);
    all = warp_sum(all);
  }
  float mine = 0;  // the logit of rank `lane`
#pragma unroll 1
  for (int k = 0; k < kTopK; k++) {
    uint32_t best = 0;
#pragma unroll
    for (int i = 0; i < kPerLane; i++) best = max(best, key[i]);
    best = __reduce_max_sync(~0u, best);
    uint32_t expert = kExperts;
#pragma unroll
    for (int i = kPerLane - 1; i >= 0; i--)
      if (key[i] == best) expert = b.lane() + 32 * i;
    expert = __reduce_min_sync(~0u, expert);
#pragma unroll
    for (int i = 0; i < kPerLane; i++)
      if (expert == (uint32_t)(b.lane() + 32 * i)) key[i] = 0;
    if (b.lane() == k) {
      mine = key_value(best);
      b.s.pair_expert[b.warp * kTopK + k] = (int16_t)expert;
    }
  }
  const float first = kNormTopkProb ? __shfl_sync(~0u, mine, 0) : top;
  const float weight = b.lane() < kTopK ? __expf(mine - first) : 0.f;
  if constexpr (kNormTopkProb) all = warp_sum(weight);
  if (b.lane() < kTopK) b.s.pair_weight[b.warp * kTopK + b.lane()] = weight / all;
}

// The experts that any token chose, and of each its pairs. Thread e looks after expert e.
__device__ __forceinline__ void list_active(const StepBlock& b) {
  const int pairs = b.tokens() * kTopK;
  int count = 0;
  if (b.tid < kExperts)
    for (int i = 0; i < pairs; i++) count += b.s.pair_expert[i] == b.tid;
  // One scan of {active, pairs} packed in 32 bits.
  const int own = (count ? 1 << 16 : 0) | count;
  int sum = own;
#pragma unroll
  for (int o = 1; o < 32; o *= 2) {
    const int below = __shfl_up_sync(~0u, sum, o);
    if (b.lane() >= o) sum += below;
  }
  if (b.lane() == 31) b.s.warp_counts[b.warp] = sum;
  team_sync<kTeam>();
  int before = sum - own;
  for (int w = 0; w < b.warp; w++) before += b.s.warp_counts[w];
  if (count) {
    int at = before & 0xFFFF;
    b.s.active[before >> 16] = (int16_t)b.tid;
    b.s.list_start[before >> 16] = (int16_t)at;
    for (int i = 0; i < pairs; i++)
      if (b.s.pair_expert[i] == b.tid) b.s.list[at++] = (int16_t)i;
  }
  if (b.tid == kTeam - 1) {
    const int active = (before + own) >> 16;
    b.s.active_count = active;
    b.s.list_start[active] = (int16_t)pairs;
  }
}

__device__ __forceinline__ void step_choose(StepBlock& b) {
  b.stamp(kPhaseChoose, 0);
  if (b.warp < b.tokens()) choose_for_token(b);
  team_sync<kTeam>();
  list_active(b);
  barrier_sync<2, kChosenThreads>();
  b.stamp(kPhaseChoose, 3);
}

// A lane's columns of one chunk of one token: 16 of them, 32 bytes.
struct ChunkInput {
  uint4 a, b;
};

// acc += a tile's chunks [c0, c1) of one page, times inputs that load(chunk of the page) gives.
template <class Load>
__device__ __forceinline__ uint32_t multiply_chunks(float (&acc)[2][4], const uint8_t* page, int chunks, int c0, int c1,
                                                    int lane, Load&& load) {
  const uint4* codes = (const uint4*)page + lane;
  const uint16_t* scales = (const uint16_t*)(page + chunks * 512) + lane;
  uint32_t loaded = 0;
#pragma unroll 4
  for (int i = 0; i < c1 - c0; i++) {
    const uint4 q = codes[32 * (c0 + i)];
    const uint32_t s = scales[32 * (c0 + i)];
    const ChunkInput x = load(c0 + i);
    loaded |= q.w | s;
    mma_nvfp4_chunk(acc[i & 1], q, s, x.a, x.b);
  }
  return loaded;
}

__device__ __forceinline__ void step_pair(StepBlock& b, StepRing& ring) {
  b.stamp(kPhasePair, 0);
  const int group = b.warp / kPairWarps, part = b.warp % kPairWarps, g = b.lane() >> 2, t = b.lane() & 3;
  const int active = b.s.active_count, u0 = first_item(active * kPairUnits, b.sm()),
            units = first_item(active * kPairUnits, b.sm() + 1) - u0;
  const uint16_t* x = b.scratch<uint16_t>() + 16 * t;
  StepRing mine = ring;
  mine.n += group;
  int buffer = 0;
#pragma unroll 1
  for (int j = group; j < units; j += kPairGroups) {
    const int index = (u0 + j) / kPairUnits, unit = (u0 + j) % kPairUnits, expert = b.s.active[index];
    const int first = b.s.list_start[index], pairs = b.s.list_start[index + 1] - first;
    const float4 scale = __ldg(b.p.expert_scales + b.layer() * kExperts + expert);
#pragma unroll 1
    for (int pass = 0; pass < pairs; pass += 8) {  // eight tokens of this expert at a time
      const bool last = pass + 8 >= pairs;
      const bool valid = pass + g < pairs;
      const uint16_t* row = x + (valid ? b.s.list[first + pass + g] / kTopK : 0) * kXStride;
      float acc[2][4] = {};
      StepRing at = mine;
#pragma unroll 1
      for (int page = 0; page < tile_pages(kHidden); page++) {
        const int chunks = tile_page_chunks(kHidden, page);
        at.wait_full();
        const uint32_t loaded = multiply_chunks(
            acc, b.s.expert[at.slot()], chunks, chunks * part / kPairWarps, chunks * (part + 1) / kPairWarps, b.lane(),
            [&](int c) -> ChunkInput {
              const uint4* v = (const uint4*)(row + (page * kPageChunks + c) * 64);
              return valid ? ChunkInput{v[0], v[1]} : ChunkInput{};
            });
        if (last)
          at.release(loaded, b.zero, b.lane(), kWarps / kPairWarps);
        else
          at.n++;
      }
      float(*out)[16][8] = b.s.pair_part[group][buffer];
      out[part][g][2 * t] = acc[0][0] + acc[1][0];
      out[part][g][2 * t + 1] = acc[0][1] + acc[1][1];
      out[part][g + 8][2 * t] = acc[0][2] + acc[1][2];
      out[part][g + 8][2 * t + 1] = acc[0][3] + acc[1][3];
      group_sync(kSquadBarrier + group, kPairWarps * 32);
      const int i = part * 32 + b.lane(), r = i % 8, column = i / 8;
      if (column < min(8, pairs - pass)) {
        float gate = 0, up = 0;
#pragma unroll
        for (int w = 0; w < kPairWarps; w++) gate += out[w][r][column], up += out[w][r + 8][column];
        const int pair = b.s.list[first + pass + column];
        const float rms = b.s.rms[pair / kTopK] * kNvfp4Scale;
        gate *= scale.x * rms, up *= scale.y * rms;
        const float h = __fdividef(gate, 1.f + __expf(-gate)) * up;
        b.p.swiglu[pair * kMoeIntermediate + 8 * unit + r] = (uint16_t)pack_bf16x2(h, 0.f);
      }
      buffer ^= 1;
    }
    mine.n += kPairGroups * tile_pages(kHidden);
  }
  ring.n += units * tile_pages(kHidden);
  b.stamp(kPhasePair, 3);
  b.meet();
}

// Every pair's product with its expert's tile goes to shared memory; the sum over a token's experts is taken in the order of
// their ranks, so it does not depend on what the other tokens chose.
__device__ __forceinline__ void step_down(StepBlock& b, StepRing& ring) {
  b.stamp(kPhaseDown, 0);
  const int g = b.lane() >> 2, t = b.lane() & 3, active = b.s.active_count;
  const int group = b.warp / 4, tile = b.warp % 4 / kDownSplit, part = b.warp % 4 % kDownSplit;
  float* products = b.scratch<float>();  // [copy][pair][owned row]
  const int copy_floats = b.tokens() * kTopK * kOwnedRows;
#pragma unroll 1
  for (int unit = 0; unit < b.units(); unit++)
#pragma unroll 1
    for (int i = 0; i < active; i += kDownPack)
#pragma unroll 1
      for (int page = 0; page < kDownPages; page++) {
        // A slot's pages are always its four warps'.
        if ((int)ring.slot() != group) {
          ring.n++;
          continue;
        }
        const int index = i + tile, chunks = tile_page_chunks(kMoeIntermediate, page);
        const bool busy = tile < kDownPack && index < active;
        const int first = busy ? b.s.list_start[index] : 0, pairs = busy ? b.s.list_start[index + 1] - first : 0;
        const float scale = busy ? __ldg(&b.p.expert_scales[b.layer() * kExperts + b.s.active[index]].z) * kNvfp4Scale : 0;
        ring.wait_full();
        uint32_t loaded = 0;
#pragma unroll 1
        for (int pass = 0; pass < pairs; pass += 8) {
          const bool valid = pass + g < pairs;
          const uint16_t* row = b.p.swiglu + (valid ? b.s.list[first + pass + g] : 0) * kMoeIntermediate + 16 * t;
          float acc[2][4] = {};
          loaded |= multiply_chunks(acc, b.s.expert[ring.slot()] + tile * chunks * kChunkBytes, chunks,
                                    chunks * part / kDownSplit, chunks * (part + 1) / kDownSplit, b.lane(),
                                    [&](int c) -> ChunkInput {
                                      const uint4* v = (const uint4*)(row + (page * kPageChunks + c) * 64);
                                      return valid ? ChunkInput{__ldcg(v), __ldcg(v + 1)} : ChunkInput{};
                                    });
#pragma unroll
          for (int n = 0; n < 2; n++) {
            const int column = pass + 2 * t + n;
            if (column < pairs) {
              const int pair = b.s.list[first + column];
              const float weight = b.s.pair_weight[pair] * scale;
              float* out = products + (page * kDownSplit + part) * copy_floats + pair * kOwnedRows + unit * kUnitRows + g;
              out[0] = (acc[0][n] + acc[1][n]) * weight;
              out[8] = (acc[0][n + 2] + acc[1][n + 2]) * weight;
            }
          }
        }
        ring.release(loaded, b.zero, b.lane(), kWarps / 4);
      }
  b.stamp(kPhaseDown, 2);
  team_sync<kTeam>();
  const int rows = b.units() * kUnitRows;
  for (int i = b.tid; i < b.tokens() * rows; i += kTeam) {
    const int token = i / rows, row = i % rows;
    float sum = 0;
    for (int k = 0; k < kTopK; k++) {
      float product = 0;
      for (int copy = 0; copy < kDownCopies; copy++)
        product += products[copy * copy_floats + (token * kTopK + k) * kOwnedRows + row];
      sum += product;
    }
    const float v = b.s.residual[token][row] + sum;
    b.s.residual[token][row] = v;
    if (b.p.taps) b.p.taps[((int64_t)b.layer() * kMaxTokens + b.s.first + token) * kHidden + b.owned_row() + row] = v;
  }
  team_sync<kTeam>();
  b.publish_hidden(b.p.norms + (b.layer() + 1) * kNormLayer + kNormInput);  // behind the last layer's lies the final norm
  b.stamp(kPhaseDown, 3);
  b.meet(1);
}

}  // namespace mk
