// The router of the step kernel, and the choice of experts that every SM makes for itself.
#pragma once
#include "step_producer.cuh"

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
#pragma unroll 1
  for (int item = b.sm();; item += kGrid) {
    const int groups = ceil_div(b.tokens(), 4);
    if (item >= ceil_div(kExperts, groups) * groups) break;
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
    int same = item;
    forget(same);  // or what follows from it would be kept meanwhile
    const int many = ceil_div(b.tokens(), 4);
    const int token = same % many * 4 + b.tid % 4, expert = same / many * many + b.tid / 4;
    if (b.tid < 16 && b.tid / 4 < many && expert < kExperts && token < b.tokens()) {
      float sum = 0;
      for (int w = 0; w < kWarps; w++) sum += b.s.router_dot[b.tid][w];
      if constexpr (!kPlainLogits) sum = router_score(b, expert, sum * b.s.rms[token]);
      b.p.router_logits[token * kExperts + expert] = kPlainLogits ? sum * b.s.rms[token] : sum;
    }
    if (kExperts + 3 > kGrid) team_sync<kTeam>();  // there may be another item
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
  barrier_sync<3, kListThreads>();
  list_active(b);
  if constexpr (kNarrow) copies_done();
  barrier_sync<2, kChosenThreads>();
  b.stamp(kPhaseChoose, 3);
}

}  // namespace mk
