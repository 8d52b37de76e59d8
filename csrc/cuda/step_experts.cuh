// The expert phases of the step kernel: router, choice, gate/up + SwiGLU, down + weighted sum + residual.
#pragma once
#include "mma.cuh"
#include "step_mlp.cuh"

namespace mk {

// The input of gate/up, which lies at kAt behind p.hidden, into shared memory; it is there after copies_done() and a team_sync.
template <size_t kAt>
__device__ __forceinline__ void copy_input(const StepBlock& b) {
  uint16_t* x = b.scratch<uint16_t>();
  for (int i = b.tid; i < b.tokens() * (kExpertHidden / 8); i += kTeam) {
    const int token = i / (kExpertHidden / 8), column = i % (kExpertHidden / 8) * 8;
    copy_16(x + token * kXStride + column, b.p.hidden + kAt + token * kExpertHidden + column);
  }
}

constexpr bool kPlainLogits = !kRouterBias && kRouterScale == 1.f && !kSigmoidScores;
// What is chosen by, of a router's product: the logit, or its sigmoid. As on CPUs every operation is rounded once; the sigmoid
// is taken in double.
__device__ __forceinline__ float router_score(const StepBlock& b, int expert, float logit) {
  if constexpr (kRouterBias)
    logit = __fadd_rn(logit, __ldg(b.vectors() + kBiasRouter + expert));
  if constexpr (kRouterScale != 1.f) logit = __fmul_rn(logit, kRouterScale);
  if constexpr (kSigmoidScores) return (float)(1.0 / (1.0 + exp(-(double)logit)));
  return __fadd_rn(logit, 0.f);  // the choice orders bits, where negative zero would not be equal to zero
}

// Router logits. An item is up to four tokens and as many experts as there are groups of four tokens, so there are about as
// many items as experts. Warp w multiplies one sixteenth of the columns; the sixteen sums are added in order.
__device__ __forceinline__ void step_router(StepBlock& b) {
  b.stamp(kPhaseRouter, 0);
  if constexpr (!kNarrow) {  // else step_choose() does
    copy_input<0>(b);
    b.load_rms();
  }
  for (int i = b.tid; i < kExperts * kPairWords; i += kTeam) b.masks()[i] = 0;
  constexpr int kSpan = ceil_div(kHidden / 4, kWarps) * 4;  // columns of a warp
  const int begin = b.warp * kSpan, end = min(kHidden, begin + kSpan);
  const int groups = ceil_div(b.tokens(), 4), items = ceil_div(kExperts, groups) * groups;
#pragma unroll 1
  for (int item = b.sm(); item < items; item += kGrid) {
    const int first = item % groups * 4, count = min(4, b.tokens() - first);
    const int e0 = item / groups * groups, experts = min(groups, kExperts - e0);
    float sums[4][4] = {};  // expert, token
#pragma unroll 1
    for (int column = begin + 4 * b.lane(); column < end; column += 128) {
      float4 v[4];
#pragma unroll
      for (int t = 0; t < 4; t++)
        v[t] = __ldcg((const float4*)(b.p.router_input + (first + min(t, count - 1)) * kHidden + column));
#pragma unroll
      for (int e = 0; e < 4; e++)
        if (e < experts) {
          const int64_t at = ((int64_t)b.moe_layer() * kExperts + e0 + e) * kHidden + column;
          float4 w;
          if constexpr (kRouterF32) {
            w = __ldg((const float4*)((const float*)b.p.routers + at));
          } else {
            const uint2 bits = __ldg((const uint2*)((const uint16_t*)b.p.routers + at));
            w = make_float4(bf16_low(bits.x), bf16_high(bits.x), bf16_low(bits.y), bf16_high(bits.y));
          }
#pragma unroll
          for (int t = 0; t < 4; t++) sums[e][t] += (v[t].x * w.x + v[t].y * w.y) + (v[t].z * w.z + v[t].w * w.w);
        }
    }
#pragma unroll
    for (int e = 0; e < 4; e++)
      if (e < experts)
#pragma unroll
        for (int t = 0; t < 4; t++) {
          const float sum = warp_sum(sums[e][t]);
          if (b.lane() == 0) b.s.router_dot[4 * e + t][b.warp] = sum;
        }
    team_sync<kTeam>();
    if (b.tid < 16 && b.tid / 4 < experts && b.tid % 4 < count) {
      float sum = 0;
      for (int w = 0; w < kWarps; w++) sum += b.s.router_dot[b.tid][w];
      const int token = first + b.tid % 4;
      if constexpr (!kPlainLogits) sum = router_score(b, e0 + b.tid / 4, sum * b.s.rms[token]);
      b.p.router_logits[token * kExperts + e0 + b.tid / 4] = kPlainLogits ? sum * b.s.rms[token] : sum;
    }
    if (item + kGrid < items) team_sync<kTeam>();
  }
  copies_done();
  b.stamp(kPhaseRouter, 3);
  b.meet();
}

// Every SM chooses for itself: warp t the experts of token t, largest logit first, ties to the lower expert. Of sigmoids the
// score with its bias decides, and weights are the scores without.
__device__ __forceinline__ void choose_for_token(const StepBlock& b) {
  constexpr int kPerLane = ceil_div(kExperts, 32);
  uint32_t key[kPerLane];
  float top = -INFINITY, all = 0;
#pragma unroll
  for (int i = 0; i < kPerLane; i++) {
    const int e = b.lane() + 32 * i;
    const float logit = e < kExperts ? __ldcg(b.p.router_logits + b.warp * kExperts + e) : -INFINITY;
    float choice = logit;
    if constexpr (kChoiceBias)
      if (e < kExperts) choice = __fadd_rn(logit, __ldg(b.vectors() + kBiasChoice + e));
    key[i] = e < kExperts ? order_key(__float_as_uint(choice)) : 0;
    top = fmaxf(top, logit);
  }
  if constexpr (!kNormTopkProb && !kSigmoidScores) {
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
      mine = kChoiceBias ? __ldcg(b.p.router_logits + b.warp * kExperts + expert) : key_value(best);
      b.s.pair_expert[b.warp * kTopK + k] = (int16_t)expert;
    }
  }
  if constexpr (kSigmoidScores) {
    float sum = 0;  // in the order of the ranks
#pragma unroll
    for (int k = 0; k < kTopK; k++) sum = __fadd_rn(sum, __shfl_sync(~0u, mine, k));
    if constexpr (kNormTopkProb) mine = __fdiv_rn(mine, __fadd_rn(sum, kNormTopkEps));
    if (b.lane() < kTopK) b.s.pair_weight[b.warp * kTopK + b.lane()] = __fmul_rn(mine, kRoutedScalingFactor);
    return;
  }
  const float first = kNormTopkProb ? __shfl_sync(~0u, mine, 0) : top;
  const float weight = b.lane() < kTopK ? __expf(mine - first) : 0.f;
  if constexpr (kNormTopkProb) all = warp_sum(weight);
  const float factor = kRoutedScalingFactor;
  if (b.lane() < kTopK) b.s.pair_weight[b.warp * kTopK + b.lane()] = factor == 1.f ? weight / all : weight / all * factor;
}

// The experts that any token chose, and of each its pairs. Thread e looks after expert e, whose pairs are bits of its mask.
__device__ __forceinline__ void list_active(const StepBlock& b) {
  const int pairs = b.tokens() * kTopK;
  for (int i = b.tid; i < pairs; i += kTeam)
    atomicOr(&b.masks()[b.s.pair_expert[i] * kPairWords + i / 32], 1u << i % 32);
  team_sync<kTeam>();
  int count = 0;
  if (b.tid < kExperts)
#pragma unroll
    for (int w = 0; w < kPairWords; w++) count += __popc(b.masks()[b.tid * kPairWords + w]);
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
#pragma unroll
  for (int w = 0; w < kWarps; w++) before += w < b.warp ? b.s.warp_counts[w] : 0;
  if (count) {
    int at = before & 0xFFFF;
    b.s.active[before >> 16] = (int16_t)b.tid;
    b.s.list_start[before >> 16] = (int16_t)at;
#pragma unroll 1
    for (int w = 0; w < kPairWords; w++)
      for (uint32_t mask = b.masks()[b.tid * kPairWords + w]; mask; mask &= mask - 1)
        b.s.list[at++] = (int16_t)(32 * w + __ffs(mask) - 1);
  }
  if (b.tid == kTeam - 1) {
    const int active = (before + own) >> 16;
    b.s.active_count = active;
    if (b.sm() == 0) atomicAdd(b.p.experts_hit, (uint32_t)active);
    b.s.list_start[active] = (int16_t)pairs;
  }
}

__device__ __forceinline__ void step_choose(StepBlock& b) {
  b.stamp(kPhaseChoose, 0);
  if constexpr (kNarrow) {
    copy_input<kNarrowAt>(b);
    b.load_rms<kNarrowSquaresAt, kModelPreUnits, kExpertHidden>(kRmsEps);
  }
  if (b.warp < b.tokens()) choose_for_token(b);
  team_sync<kTeam>();
  list_active(b);
  if constexpr (kNarrow) copies_done();
  barrier_sync<2, kChosenThreads>();
  b.stamp(kPhaseChoose, 3);
}

// silu(gate) * up, or the clamped kind.
__device__ __forceinline__ float swiglu(float gate, float up) {
  if constexpr (!kClampedSwiglu) return __fdividef(gate, 1.f + __expf(-gate)) * up;
  gate = fminf(gate, kSwigluLimit);
  up = fminf(fmaxf(up, -kSwigluLimit), kSwigluLimit) + kSwigluUpOffset;
  return __fdividef(gate, 1.f + __expf(-kSwigluAlpha * gate)) * up;
}

// A lane's columns of one chunk of one token: 16 of them, 32 bytes.
struct ChunkInput {
  uint4 a, b;
};
// Most chunks of a warp in a gate/up page, and those it holds in registers at a time: the page's slot is free again as soon as
// the last of them are.
constexpr int kPairCount = ceil_div(tile_page_chunks(kExpertHidden, 0), kPairWarps), kPairHeld = kPairCount < 2 ? kPairCount : 2;
// Of a row of a tile and one of eight tokens: the warps' sums and SwiGLU of them, where ranks send two rows at a time.
__device__ __forceinline__ float swiglu_sum(const StepBlock& b, const float (*out)[16][8], int r, int column, int pair,
                                            float4 scale, float gate_bias, float up_bias) {
  float gate = 0, up = 0;
#pragma unroll
  for (int w = 0; w < kPairWarps; w++) gate += out[w][r][column], up += out[w][r + 8][column];
  const float rms = b.s.rms[pair / kTopK] * kNvfp4Scale;
  gate *= scale.x * rms, up *= scale.y * rms;
  if constexpr (kExpertBias) gate += gate_bias, up += up_bias;
  return swiglu(gate, up);
}
__device__ __forceinline__ void step_pair(StepBlock& b, StepRing& ring) {
  b.stamp(kPhasePair, 0);
  const int group = b.warp / kPairWarps, part = b.warp % kPairWarps;
  const int u0 = first_item(b.s.active_count * kPairUnits, b.sm()),
            units = first_item(b.s.active_count * kPairUnits, b.sm() + 1) - u0;
  StepRing mine = ring;
  mine.n += group;
  int buffer = 0;
#pragma unroll 1
  for (int j = group; j < units; j += kPairGroups) {
    const int g = b.lane() >> 2, t = b.lane() & 3;
    const int index = (u0 + j) / kPairUnits, unit = (u0 + j) % kPairUnits;
    const int first = b.s.list_start[index], pairs = b.s.list_start[index + 1] - first;
    const float4 scale = __ldg(b.p.expert_scales + b.moe_layer() * kExperts + b.s.active[index]);
    float gate_bias = 0, up_bias = 0;  // of the row that this thread will finish
    float2 gate_biases = {}, up_biases = {};  // of both, where ranks send two
    if constexpr (kExpertBias) {
      const float* bias = b.vectors() + kBiasPair + b.s.active[index] * 2 * kPairBiases + 8 * unit;
      if constexpr (kRanks > 1) {
        bias += b.lane() % 4 * 2;
        gate_biases = __ldg((const float2*)bias), up_biases = __ldg((const float2*)(bias + kPairBiases));
      } else {
        bias += b.lane() % 8;
        gate_bias = __ldg(bias), up_bias = __ldg(bias + kPairBiases);
      }
    }
#pragma unroll 1
    for (int pass = 0; pass < pairs; pass += 8) {  // eight tokens of this expert at a time
      const bool valid = pass + g < pairs;
      const uint16_t* row =
          b.scratch<uint16_t>() + (valid ? b.s.list[first + pass + g] / kTopK : 0) * kXStride + 16 * t;
      float acc[2][4] = {};
      StepRing at = mine;
#pragma unroll 1
      for (int page = 0; page < tile_pages(kExpertHidden); page++) {
        const int chunks = tile_page_chunks(kExpertHidden, page), c1 = chunks * (part + 1) / kPairWarps;
        at.wait_full();
        const uint4* codes = (const uint4*)b.s.expert[at.slot()] + b.lane();
        const uint16_t* scales = (const uint16_t*)(b.s.expert[at.slot()] + chunks * 512) + b.lane();
        uint32_t loaded = 0;
#pragma unroll 1
        for (int c0 = chunks * part / kPairWarps; c0 < c1; c0 += kPairHeld) {
          uint4 q[kPairHeld];
          uint32_t s[kPairHeld];
#pragma unroll
          for (int i = 0; i < kPairHeld; i++)
            if (c0 + i < c1) {
              q[i] = codes[32 * (c0 + i)];
              s[i] = scales[32 * (c0 + i)];
              loaded |= q[i].w | s[i];
            }
          if (c0 + kPairHeld >= c1 && pass + 8 >= pairs) at.release(loaded, b.zero, b.lane(), kWarps / kPairWarps);
#pragma unroll
          for (int i = 0; i < kPairHeld; i++)
            if (c0 + i < c1) {
              const uint4* v = (const uint4*)(row + (page * kPageChunks + c0 + i) * 64);
              const ChunkInput x = valid ? ChunkInput{v[0], v[1]} : ChunkInput{};
              mma_nvfp4_chunk(acc[i & 1], q[i], s[i], x.a, x.b);
            }
        }
        if (chunks * part / kPairWarps == c1 && pass + 8 >= pairs) at.release(0, b.zero, b.lane(), kWarps / kPairWarps);
        if (pass + 8 < pairs) at.n++;
      }
      float(*out)[16][8] = b.s.pair_part[group][buffer];
      *(float2*)&out[part][g][2 * t] = make_float2(acc[0][0] + acc[1][0], acc[0][1] + acc[1][1]);
      *(float2*)&out[part][g + 8][2 * t] = make_float2(acc[0][2] + acc[1][2], acc[0][3] + acc[1][3]);
      group_sync(kSquadBarrier + group, kPairWarps * 32);
      if constexpr (kRanks > 1) {  // two rows a thread: they are sent as one word
        const int i = part * 32 + b.lane(), r = i % 4 * 2, column = i / 4;
        if (column < min(8, pairs - pass)) {
          const int pair = b.s.list[first + pass + column];
          put_swiglu(b, pair, unit, r, swiglu_sum(b, out, r, column, pair, scale, gate_biases.x, up_biases.x),
                     swiglu_sum(b, out, r + 1, column, pair, scale, gate_biases.y, up_biases.y));
        }
        buffer ^= 1;
        continue;
      }
      const int i = part * 32 + b.lane(), r = i % 8, column = i / 8;
      if (column < min(8, pairs - pass)) {
        float gate = 0, up = 0;
#pragma unroll
        for (int w = 0; w < kPairWarps; w++) gate += out[w][r][column], up += out[w][r + 8][column];
        const int pair = b.s.list[first + pass + column];
        const float rms = b.s.rms[pair / kTopK] * kNvfp4Scale;
        gate *= scale.x * rms, up *= scale.y * rms;
        if constexpr (kExpertBias) gate += gate_bias, up += up_bias;
        const float h = swiglu(gate, up);
        b.p.swiglu[pair * kMoeIntermediate + 8 * unit + r] = (uint16_t)pack_bf16x2(h, 0.f);
      }
      buffer ^= 1;
    }
    mine.n += kPairGroups * tile_pages(kExpertHidden);
  }
  ring.n += units * tile_pages(kExpertHidden);
  if constexpr (kRanks > 1) take_swiglu(b);
  b.stamp(kPhasePair, 3);
  b.meet();
}

// Narrow experts: their outputs are normed over all their rows, which the grid has to meet for, and then summed with their
// weights. In scratch lie products [copy][pair][this SM's row].
__device__ __forceinline__ void end_narrow_down(StepBlock& b) {
  float* products = b.scratch<float>();
  const int rows = b.down_units() * kUnitRows, pairs = b.tokens() * kTopK;
#pragma unroll 1
  for (int i = b.tid; i < pairs * rows; i += kTeam) {
    float* at = products + i / rows * kDownRows + i % rows;
    float v = 0;
    for (int copy = 0; copy < kDownCopies; copy++) v += at[copy * pairs * kDownRows];
    *at = v * b.weight_of(b.vectors() + kNormExpert + b.down_row() + i % rows, 1.f);
  }
  team_sync<kTeam>();
#pragma unroll 1
  for (int i = b.tid; i < pairs * b.down_units(); i += kTeam) {
    const int pair = i / b.down_units(), unit = i % b.down_units();
    const float* v = products + pair * kDownRows + unit * kUnitRows;
    float sum = 0;
    for (int row = 0; row < kUnitRows; row++) sum += v[row] * v[row];
    put_float(b, b.pair_squares(), kImagePairSquares, pair * kModelDownUnits + b.down_row() / kUnitRows + unit, sum);
  }
  if constexpr (kRanks > 1) {
    begin_takes(b);
    take_floats<kModelDownUnits, kSentPairSquares>(b, b.pair_squares(), kImagePairSquares, pairs);
  }
  b.stamp(kPhaseDown, 3);
  b.meet();
}
__device__ __forceinline__ void step_mix(StepBlock& b) {
  b.stamp(kPhaseMix, 0);
#pragma unroll 1
  for (int pair = b.warp; pair < b.tokens() * kTopK; pair += kWarps) {
    float sum = 0;
    for (int i = b.lane(); i < kModelDownUnits; i += 32) sum += __ldcg(b.pair_squares() + pair * kModelDownUnits + i);
    sum = warp_sum(sum);
    if (b.lane() == 0) b.s.pair_weight[pair] *= rsqrtf(sum / kExpertHidden + kExpertNormEps);
  }
  team_sync<kTeam>();
  const int twos = b.down_units() * (kUnitRows / 2);
#pragma unroll 1
  for (int i = b.tid; i < b.tokens() * twos; i += kTeam) {
    const int token = i / twos, row = i % twos * 2;
    float2 sum = {};
    for (int k = 0; k < kTopK; k++) {
      const float weight = b.s.pair_weight[token * kTopK + k];
      const float* product = b.scratch<float>() + (token * kTopK + k) * kDownRows + row;
      sum.x += weight * product[0], sum.y += weight * product[1];
    }
    put_two(b, b.mixed(), kImageMixed, token * kNarrowHidden + b.down_row() + row, pack_bf16x2(sum.x, sum.y));
  }
  if constexpr (kRanks > 1) {
    begin_takes(b);
    take_rows<kNarrowHidden, 2 * kSentMixed>(b, b.mixed(), kImageMixed, b.tokens());
  }
  b.stamp(kPhaseMix, 3);
  b.meet();
}

// Every pair's product with its expert's tile goes to shared memory; the sum over a token's experts is taken in the order of
// their ranks, so it does not depend on what the other tokens chose.
// Most chunks of a warp in a page; those whose inputs are loaded a page ahead.
constexpr int kDownCount = ceil_div(tile_page_chunks(kMoeIntermediate, 0), kDownSplit);
constexpr int kDownMost = kSpareRegisters ? 2 : 4, kDownAhead = kDownCount < kDownMost ? kDownCount : kDownMost;
constexpr int kDownHeld = kDownCount <= 6 && !kSpareRegisters ? kDownCount : kDownAhead;  // inputs in registers at a time
__device__ __forceinline__ void step_down(StepBlock& b, StepRing& ring) {
  b.stamp(kPhaseDown, 0);
  const int group = b.warp / 4, tile = b.warp % 4 / kDownSplit, part = b.warp % 4 % kDownSplit;
  const int per_unit = ceil_div(b.s.active_count, kDownPack) * kDownPages, total = per_unit * b.down_units();
  const uint32_t start = ring.n;
  float* products = b.scratch<float>();  // [copy][pair][owned row]
  ChunkInput x[kDownHeld];
  // Of page n of this phase: the tile's place in the list of active experts, or -1.
  const auto tile_of = [&](int n) {
    const int index = n % per_unit / kDownPages * kDownPack + tile;
    return n < total && tile < kDownPack && index < b.s.active_count ? index : -1;
  };
  // Inputs i0 .. i1 - 1 of page n, of eight of its pairs from `pass` on. Input i lies in x[i % kDownHeld].
  const auto load = [&](int n, int pass, int i0, int i1) {
    const int index = tile_of(n), g = b.lane() >> 2, t = b.lane() & 3, page = n % kDownPages;
    const int first = index < 0 ? 0 : b.s.list_start[index] + pass, end = index < 0 ? 0 : b.s.list_start[index + 1];
    const bool valid = first + g < end;
    const int chunks = tile_page_chunks(kMoeIntermediate, page), c0 = chunks * part / kDownSplit,
              c1 = chunks * (part + 1) / kDownSplit;
    const uint4* v = (const uint4*)(b.p.swiglu + (valid ? b.s.list[first + g] : 0) * kMoeIntermediate +
                                    (page * kPageChunks + c0) * 64 + 16 * t);
#pragma unroll
    for (int i = 0; i < kDownCount; i++)
      if (i >= i0 && i < i1)
        x[i % kDownHeld] =
            valid && c0 + i < c1 ? ChunkInput{__ldcg(v + 8 * i), __ldcg(v + 8 * i + 1)} : ChunkInput{};
  };
  // A slot's pages are always its four warps'.
  int n = (int)((group - start) & (kStepSlots - 1));
  load(n, 0, 0, kDownAhead);
#pragma unroll 1
  for (; n < total; n += kStepSlots) {
    const int index = tile_of(n), g = b.lane() >> 2, t = b.lane() & 3, page = n % kDownPages;
    const int chunks = tile_page_chunks(kMoeIntermediate, page), c0 = chunks * part / kDownSplit,
              c1 = chunks * (part + 1) / kDownSplit;
    const int first = index < 0 ? 0 : b.s.list_start[index], pairs = index < 0 ? 0 : b.s.list_start[index + 1] - first;
    const float scale =
        index < 0 ? 0.f : __ldg(&b.p.expert_scales[b.moe_layer() * kExperts + b.s.active[index]].z) * kNvfp4Scale;
    float bias[2] = {};  // of rows g and g + 8, in one of the parts that are added up
    if constexpr (kExpertBias)
      if (index >= 0 && page == 0 && part == 0) {
        const float* of = b.vectors() + kBiasDown + b.s.active[index] * kDownBiases +
                          (b.first_down_unit() + n / per_unit) * kUnitRows + g;
        bias[0] = __ldg(of), bias[1] = __ldg(of + 8);
      }
    load(n, 0, kDownAhead, kDownHeld);
    ring.n = start + n;
    ring.wait_full();
    const uint8_t* data = b.s.expert[ring.slot()] + tile * chunks * kChunkBytes;
    uint32_t loaded = 0;
#pragma unroll 1
    for (int pass = 0; pass < pairs; pass += 8) {
      if (pass) load(n, pass, 0, kDownHeld);
      float acc[2][4] = {};
      const uint4* codes = (const uint4*)data + 32 * c0 + b.lane();
      const uint16_t* scales = (const uint16_t*)(data + chunks * 512) + 32 * c0 + b.lane();
#pragma unroll
      for (int i = 0; i < kDownCount; i++) {
        if (i && i % kDownHeld == 0) load(n, pass, i, i + kDownHeld);
        if (c0 + i < c1) {
          const uint4 q = codes[32 * i];
          const uint32_t s = scales[32 * i];
          loaded |= q.w | s;
          mma_nvfp4_chunk(acc[i & 1], q, s, x[i % kDownHeld].a, x[i % kDownHeld].b);
        }
      }
      if (pass + 8 >= pairs) ring.release(loaded, b.zero, b.lane(), kWarps / 4);
#pragma unroll
      for (int k = 0; k < 2; k++) {
        const int column = pass + 2 * t + k;
        if (column < pairs) {
          const int pair = b.s.list[first + column];
          const float weight = kNarrow ? scale : b.s.pair_weight[pair] * scale;
          float* out = products + ((page * kDownSplit + part) * b.tokens() * kTopK + pair) * kDownRows +
                       n / per_unit * kUnitRows + g;
          out[0] = (acc[0][k] + acc[1][k]) * weight;
          out[8] = (acc[0][k + 2] + acc[1][k + 2]) * weight;
          if constexpr (kExpertBias) {
            const float share = kNarrow ? 1.f : b.s.pair_weight[pair];
            out[0] += share * bias[0];
            out[8] += share * bias[1];
          }
        }
      }
    }
    if (pairs == 0) ring.release(0, b.zero, b.lane(), kWarps / 4);
    load(n + kStepSlots, 0, 0, kDownAhead);
  }
  ring.n = start + total;
  b.stamp(kPhaseDown, 2);
  team_sync<kTeam>();
  if constexpr (kNarrow) {
    end_narrow_down(b);
    return;
  }
  const int rows = b.units() * kUnitRows;
  for (int i = b.tid; i < b.tokens() * rows; i += kTeam) {
    const int token = i / rows, row = i % rows;
    float sum = 0;
    for (int k = 0; k < kTopK; k++) {
      float product = 0;
      for (int copy = 0; copy < kDownCopies; copy++)
        product += products[(copy * b.tokens() * kTopK + token * kTopK + k) * kDownRows + row];
      sum += product;
    }
    if constexpr (kSandwich) {
      add_to_residual(b, token, row, sum);
      continue;
    }
    const float v = b.s.residual[token][row] + sum;
    b.s.residual[token][row] = v;
    if (b.p.taps) b.p.taps[((int64_t)b.layer() * kMaxTokens + b.s.first + token) * kHidden + b.owned_row() + row] = v;
  }
  if constexpr (kSandwich) {
    finish_layer(b, kPhaseDown);
    return;
  }
  team_sync<kTeam>();
  // behind the last layer's lies the final norm
  if constexpr (kRanks > 1)
    share_hidden<false>(b, b.next_vectors() + kNormInput, b.layer() + 1 < kLayers ? kNormOffset : 0.f);
  else
    b.publish_hidden(b.next_vectors() + kNormInput, b.layer() + 1 < kLayers ? kNormOffset : 0.f);
  b.stamp(kPhaseDown, 3);
  b.meet(1);
}

}  // namespace mk
