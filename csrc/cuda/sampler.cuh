// Choosing a token from logits inside the resident kernel, by the consumer warps of one block: the twin of
// csrc/cpu/sample.h, with its formulas, its order of steps and its rules for ties.
//
// top_k, top_p and min_p each keep a beginning of one order: the likelier token first, of equals the lower id. An
// element's place in it is a 64-bit number, so what is kept is told by one place, the limit. Weights, exp of the logit
// relative to the highest, are summed in fixed point: integers add up to the same in any order, so two runs agree.
#pragma once
#include "sampler_list.cuh"

namespace mk {

// kSpare: with fewer registers.
template <int kVocab, bool kSpare>
struct TokenSampler {
  const Sampling& r;
  Logits<kVocab> logits;
  Distances distances;
  uint32_t floor;  // the farthest distance that min_p leaves
  int position;
  SamplerScratch& s;
  int tid;

  __device__ __forceinline__ bool top_k() const { return r.top_k > 0 && r.top_k < kVocab; }
  __device__ __forceinline__ bool top_p() const { return r.top_p < 1; }
  // A sum that exceeds this one is what top_p asks for.
  __device__ __forceinline__ uint64_t nucleus(uint64_t sum) const {
    const double goal = ceil((double)r.top_p * (double)sum);
    return goal < 1 ? 0 : min((uint64_t)goal, sum) - 1;
  }
  // floor(draw * sum), exactly: less than the sum.
  __device__ __forceinline__ uint64_t drawn(uint64_t sum) const {
    return (uint64_t)((unsigned __int128)draw_bits(r.seed, (uint64_t)position) * sum >> 53);
  }

  // ---- when what may be chosen is little: a list in shared memory ---------------------------------------------------
  // A distance that at least the `rank` nearest tokens keep: the rank-th of the nearest tokens of 512 or 2048 streams.
  // best: the highest logits of this thread's four.
  __device__ __forceinline__ uint32_t reach(int rank, float4 best) const {
    const bool few = rank <= kTeam / 2;
    team_sync<kTeam>();
    if (few) {
      s.list[tid] = distances.of(fmaxf(fmaxf(best.x, best.y), fmaxf(best.z, best.w)));
    } else {
#pragma unroll
      for (int k = 0; k < kEach; k++) s.list[k * kTeam + tid] = distances.of(component(best, k));
    }
    sort_list(s.list, few ? kTeam : kListTokens, tid);
    return min((uint32_t)s.list[rank - 1], kFar - 1);
  }
  // How many of the first n on the ordered list are not beyond the floor.
  __device__ __forceinline__ int above_floor(int n) const {
    int low = 0;
    while (low < n) {
      const int middle = (low + n) / 2;
      if ((uint32_t)(s.list[middle] >> 32) <= floor)
        low = middle + 1;
      else
        n = middle;
    }
    return low;
  }
  // The token, or -1 when the list cannot hold what may be chosen.
  __device__ __forceinline__ int choose_from_list(float4 best) const {
    uint32_t far = kFar - 1;
    if (kVocab > kListTokens) {
      if (top_k() && r.top_k > kListRank) return -1;
      far = reach(top_k() ? r.top_k : kListRank, best);
    }
    uint64_t sum = 0;  // over all tokens that top_k leaves
    if (!top_k()) {
      far = min(far, floor);
      sum = sum_runs(logits, distances, place_of(kFar - 1, kLastToken), s).all;
    }
    int n = listed<kSpare>(collect<kVocab, kSpare>(logits, distances, 0, place_of(far, kLastToken), s), s);
    if (n > kListTokens) return -1;
    sort_list(s.list, n, tid);
    if (top_k()) n = min(n, r.top_k);
    if (top_p()) {
      const uint64_t listed = list_weight(s.list, n, 32, s.part, tid), target = nucleus(top_k() ? listed : sum);
      if (target < listed)
        n = list_find(s.list, n, 32, target, s, tid) + 1;
      else if (far < floor)
        return -1;  // the nucleus reaches beyond the list
    }
    n = above_floor(n);
    int shift = 32;
    if (!top_p()) {  // the draw walks by id
      team_sync<kTeam>();
#pragma unroll 1
      for (int i = tid; i < n; i += kTeam) s.list[i] = s.list[i] << 32 | s.list[i] >> 32;
      sort_list(s.list, n, tid);
      shift = 0;
    }
    const uint64_t target = drawn(list_weight(s.list, n, shift, s.part, tid));
    return (int)(uint32_t)(s.list[list_find(s.list, n, shift, target, s, tid)] >> (32 - shift));
  }

  // ---- the whole vocabulary -----------------------------------------------------------------------------------------
  // Lowest token with which the weights up to the limit, in order of id, exceed target.
  __device__ __forceinline__ int first_by_id(uint64_t limit, const RunSums& sums, uint64_t target) const {
    if (sums.before <= target && target < sums.before + sums.own) {
      s.found = tid;
      s.rest = target - sums.before;
    }
    team_sync<kTeam>();
    target = s.rest;
    constexpr int kOf = kRunTokens / kTeam;
    const int first = s.found * kRunTokens + kOf * tid;
    uint64_t part[kOf], own = 0;
#pragma unroll
    for (int k = 0; k < kOf; k++) {
      const int i = first + k;
      part[k] = i < kVocab ? weight_within(distances, __ldcg(logits.p + i), i, limit) : 0;
      own += part[k];
    }
    uint64_t upto = scan(own, s.part, tid).before;
#pragma unroll
    for (int k = 0; k < kOf; k++) {
      if (upto <= target && target < upto + part[k]) s.found = first + k;
      upto += part[k];
    }
    team_sync<kTeam>();
    return s.found;
  }
  // First place with which the weights (by_weight) or the number of places up to the limit exceed target; the limit
  // when they never do. One digit of the place after the other, by histograms, until the list holds what is left.
  __device__ __forceinline__ uint64_t select(bool by_weight, uint64_t limit, uint64_t target) const {
    uint64_t from = 0, to = limit;
#pragma unroll 1
    for (int level = 0;; level++) {
      // Of the distance 31 bits in digits of 11, 11 and 9, of the token 19 bits in digits of 11 and 8.
      const int low = level == 0 ? 52 : level == 1 ? 41 : level == 2 ? 32 : level == 3 ? 8 : 0;
      team_sync<kTeam>();
#pragma unroll 1
      for (int i = tid; i < kBins; i += kTeam) s.bins.count[i] = s.bins.low[i] = s.bins.high[i] = 0;
      team_sync<kTeam>();
      logits.template each<2>([&](int i, float4 v) {
#pragma unroll 1
        for (int k = 0; k < 4; k++) {
          const uint32_t distance = distances.of(component(v, k));
          const uint64_t place = place_of(distance, i + k);
          if (place < from || place > to) continue;
          const uint32_t bin = (uint32_t)((place - from) >> low);
          atomicAdd(&s.bins.count[bin], 1u);
          if (!by_weight) continue;
          const uint64_t w = weight_of(distance);
          const uint32_t before = atomicAdd(&s.bins.low[bin], (uint32_t)w);
          atomicAdd(&s.bins.high[bin], (uint32_t)(w >> 32) + (before + (uint32_t)w < before));
        }
      });
      team_sync<kTeam>();
      uint64_t part[kEach], own = 0;
#pragma unroll
      for (int k = 0; k < kEach; k++) {
        const int bin = kEach * tid + k;
        part[k] = by_weight ? (uint64_t)s.bins.high[bin] << 32 | s.bins.low[bin] : s.bins.count[bin];
        own += part[k];
      }
      auto [upto, all] = scan(own, s.part, tid);
      if (target >= all) return limit;
#pragma unroll
      for (int k = 0; k < kEach; k++) {
        if (upto <= target && target < upto + part[k]) {
          s.found = kEach * tid + k;
          s.inside = s.bins.count[kEach * tid + k];
          s.rest = target - upto;
        }
        upto += part[k];
      }
      team_sync<kTeam>();
      from += (uint64_t)s.found << low;
      to = min(limit, from | ((uint64_t{1} << low) - 1));
      target = s.rest;
      if (s.inside > kListTokens) continue;  // never after the last digit: a place is there once
      const int n = listed<kSpare>(collect<kVocab, kSpare>(logits, distances, from, to, s), s);
      sort_list(s.list, n, tid);
      return s.list[by_weight ? list_find(s.list, n, 32, target, s, tid) : (int)target];
    }
  }
  __device__ __forceinline__ int choose_from_all() const {
    enum Step { kTopK, kTopP, kDraw };
    uint64_t limit = place_of(kFar - 1, kLastToken);
#pragma unroll 1
    for (int step = top_k() ? kTopK : top_p() ? kTopP : kDraw;; step = step == kTopK && top_p() ? kTopP : kDraw) {
      uint64_t target = (uint64_t)r.top_k - 1;
      if (step == kDraw) limit = min(limit, place_of(floor, kLastToken));
      if (step != kTopK) {
        const RunSums sums = sum_runs(logits, distances, limit, s);
        target = step == kDraw ? drawn(sums.all) : nucleus(sums.all);
        if (step == kDraw && !top_p()) return first_by_id(limit, sums, target);
      }
      limit = select(step != kTopK, limit, target);
      if (step == kDraw) return (int)(uint32_t)limit;
    }
  }
};

// Once for every token of the history, however often it is there.
template <int kVocab>
__device__ __forceinline__ void penalise(float penalty, float* logits, const int32_t* history, int length, int tid,
                                         SamplerScratch& s) {
  constexpr int kAhead = 4;
#pragma unroll 1
  for (int first = 0; first < kVocab; first += kSeenTokens) {
    const uint32_t tokens = min(kVocab - first, kSeenTokens);
    team_sync<kTeam>();
#pragma unroll 1
    for (int i = tid; i < ceil_div(tokens, 32); i += kTeam) s.seen[i] = 0;
    team_sync<kTeam>();
#pragma unroll 1
    for (int base = tid; base < length; base += kAhead * kTeam) {
      int32_t token[kAhead];
      bool fresh[kAhead];
      float v[kAhead];
#pragma unroll
      for (int k = 0; k < kAhead; k++) token[k] = base + k * kTeam < length ? __ldcg(history + base + k * kTeam) : -1;
#pragma unroll
      for (int k = 0; k < kAhead; k++) {
        const uint32_t i = (uint32_t)(token[k] - first), bit = 1u << (i & 31);
        fresh[k] = token[k] >= first && i < tokens && !(atomicOr(&s.seen[i / 32], bit) & bit);
        if (fresh[k] && !kSpareRegisters) v[k] = __ldcg(logits + token[k]);
      }
#pragma unroll
      for (int k = 0; k < kAhead; k++)
        if (fresh[k]) {
          if (kSpareRegisters) v[k] = __ldcg(logits + token[k]);
          logits[token[k]] = v[k] < 0 ? v[k] * penalty : v[k] / penalty;
        }
    }
  }
}

// The highest logit; best: the highest of this thread's, of every fourth.
template <int kVocab>
__device__ __forceinline__ float find_top(Logits<kVocab> logits, SamplerScratch& s, float4& best) {
  best = make_float4(-INFINITY, -INFINITY, -INFINITY, -INFINITY);
  logits.template each<4>([&](int, float4 v) {
    best = make_float4(fmaxf(best.x, v.x), fmaxf(best.y, v.y), fmaxf(best.z, v.z), fmaxf(best.w, v.w));
  });
  float top = fmaxf(fmaxf(best.x, best.y), fmaxf(best.z, best.w));
#pragma unroll
  for (int i = 16; i; i /= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, i));
  if (logits.tid % 32 == 0) s.best[logits.tid / 32] = top;
  team_sync<kTeam>();
#pragma unroll 4
  for (int w = 0; w < kWarps; w++) top = fmaxf(top, s.best[w]);
  return top;
}
template <int kVocab>
__device__ __forceinline__ int first_of(float top, Logits<kVocab> logits, SamplerScratch& s) {
  if (logits.tid == 0) s.found = kVocab;
  team_sync<kTeam>();
  int first = kVocab;
  logits.template each<4>([&](int i, float4 v) {
    first = min(first, v.x == top ? i : v.y == top ? i + 1 : v.z == top ? i + 2 : v.w == top ? i + 3 : kVocab);
  });
  if (first < kVocab) atomicMin(&s.found, first);
  team_sync<kTeam>();
  return s.found < kVocab ? s.found : 0;  // there is none when all are NaN
}

// The token of `position`, in every thread. logits: float32 [kVocab], 16-byte aligned, changed by the penalty. history:
// [length] tokens so far. tid: 0 .. kTeam - 1; all threads of the team call it, and meet nobody else. The scratch may
// serve something else before the call and after it. NaN is never chosen; without a finite highest logit the token is
// the first that has it.
template <int kVocab, bool kSpare = kSpareRegisters>
__device__ __forceinline__ int sample(const Sampling& r, float* logits, const int32_t* history, int length,
                                      int position, int tid, SamplerScratch& scratch) {
  const Logits<kVocab> view{logits, tid};
  if (r.repetition_penalty != 1) penalise<kVocab>(r.repetition_penalty, logits, history, length, tid, scratch);
  team_sync<kTeam>();
  float4 best;
  const float top = find_top(view, scratch, best);
  int token = -1;
  if (r.temperature == 0 || !(fabsf(top) < INFINITY)) {
    token = first_of(top, view, scratch);
  } else {
    const uint32_t floor = r.min_p > 0 ? __float_as_uint(logf(r.min_p)) & 0x7FFFFFFF : kFar;
    const TokenSampler<kVocab, kSpare> sampler{
        r, view, Distances(top, r.temperature), min(floor, kFar - 1), position, scratch, tid};
    if (sampler.top_k() || sampler.top_p()) token = sampler.choose_from_list(best);
    if (token < 0) token = sampler.choose_from_all();
  }
  team_sync<kTeam>();
  return token;
}

}  // namespace mk
