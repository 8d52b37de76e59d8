// What the sampler is made of: places and weights of tokens, sums over a block's threads, and a list of tokens in shared memory
// that is collected, sorted and searched. sampler.cuh puts them together.
#pragma once
#include "common/rng.h"
#include "layout.cuh"
#include "ptx.cuh"

namespace mk {

struct Sampling {  // as in mk_request
  float temperature, top_p, min_p, repetition_penalty;
  int32_t top_k;
  uint64_t seed;
};

constexpr int kListTokens = 2048;         // tokens that are sorted in shared memory
constexpr int kListRank = 1024;           // so many likeliest tokens are surely on the list
constexpr int kBins = 2048;               // of a histogram of places
constexpr int kSeenTokens = 1 << 18;      // of which one bitmap tells whether the history holds them
constexpr int kRunTokens = 1024;          // neighbouring tokens whose weights are summed by one warp
constexpr int kMaxVocab = kRunTokens * kTeam;
constexpr int kEach = kListTokens / kTeam;  // entries of the list, and bins, of one thread
static_assert(kBins == kListTokens && kEach == 4, "a thread has four of either");

// Fixed point: 2^44 is the weight of the likeliest token, so that a vocabulary of them fits 64 bits. Weights below
// 2^-44 are zero; the first such distance from the highest logit (44 ln 2 = 30.4985), as float bits.
constexpr float kOne = 0x1p44f;
constexpr uint32_t kFar = 0x41F40000;  // 30.5f
static_assert(kMaxVocab <= 1 << 19);

struct SamplerScratch {  // 32.2 KB whatever the vocabulary
  union {
    uint32_t seen[kSeenTokens / 32];
    uint64_t list[kListTokens];
    uint64_t runs[kMaxVocab / kRunTokens];
    struct {
      uint32_t count[kBins], low[kBins], high[kBins];  // elements; halves of the sums of their weights
    } bins;
  };
  uint64_t part[kWarps];
  uint64_t rest;  // of the target, inside what `found` names
  int32_t found;
  uint32_t listed, inside;  // tokens on the list (or more than it holds); tokens in the bin that was found
  float best[kWarps];
};

// Distances from the highest logit over the temperature, rounded like the quotient: this is the division of the CPU
// target without the code for special cases, which nvcc would repeat wherever there is one. The temperature is brought
// to [1, 2), so that nothing on the way leaves float32's range (distances below 2^-100 apart); then a quotient that is
// right to the last bit but one, and the exact remainder, give the rounded one.
struct Distances {
  float top, scale, divisor, reciprocal;

  __device__ __forceinline__ Distances(float top, float temperature) : top(top) {
    const int exponent = (int)(__float_as_uint(temperature) >> 23);  // 0 of a subnormal, which gets below 1
    scale = __uint_as_float(exponent < 254    ? (uint32_t)(254 - max(exponent, 1)) << 23
                            : exponent == 254 ? 1u << 22
                                              : 0u);
    divisor = scale == 0 ? 1.f : temperature * scale;  // at an infinite temperature all distances are zero
    reciprocal = 1 / divisor;
  }
  // As float bits, which order as distances do: -0 is 0, and -inf and NaN are beyond every number.
  __device__ __forceinline__ uint32_t of(float logit) const {
    const float d = (logit - top) * scale;
    float q = d * reciprocal;
    q = fmaf(fmaf(-q, divisor, d), reciprocal, q);
    q = fmaf(fmaf(-q, divisor, d), reciprocal, q);
    return __float_as_uint(q) & 0x7FFFFFFF;
  }
  // No logit below this is within the distance.
  __device__ __forceinline__ float logit_at(uint32_t distance) const {
    const float bound = __uint_as_float(distance) * divisor * (1 + 0x1p-20f) / scale + 0x1p-140f / scale;
    return bound < INFINITY ? top - bound - fabsf(top - bound) * 0x1p-22f : -INFINITY;
  }
};
// The weight of a distance.
__device__ __forceinline__ uint64_t weight_of(uint32_t distance) {
  return distance < kFar ? (uint64_t)(expf(-__uint_as_float(distance)) * kOne) : 0;
}
__device__ __forceinline__ uint64_t place_of(uint32_t distance, uint32_t token) {
  return (uint64_t)distance << 32 | token;
}
__device__ __forceinline__ uint64_t weight_within(const Distances& distances, float logit, int token, uint64_t limit) {
  const uint32_t d = distances.of(logit);
  return place_of(d, token) <= limit ? weight_of(d) : 0;
}
constexpr uint32_t kLastToken = ~0u;  // a place with it comes after every token of its distance

// What is used more than once is called, not inlined: a step's code shall stay in the instruction cache.
#define MK_CALLED inline __attribute__((noinline)) __device__

struct Sums {
  uint64_t before, all;
};
// Sums of v over the threads before this one, and over all.
MK_CALLED Sums scan(uint64_t v, uint64_t* part, int tid) {
  const int lane = tid & 31, warp = tid / 32;
  uint64_t upto = v;
#pragma unroll 1
  for (int i = 1; i < 32; i *= 2) {
    const uint64_t other = __shfl_up_sync(~0u, upto, i);
    if (lane >= i) upto += other;
  }
  team_sync<kTeam>();  // the last sums were read
  if (lane == 31) part[warp] = upto;
  team_sync<kTeam>();
  Sums sums{upto - v, 0};
#pragma unroll 4
  for (int w = 0; w < kWarps; w++) {
    if (w < warp) sums.before += part[w];
    sums.all += part[w];
  }
  return sums;
}

// Puts the first n entries in ascending order. Behind them, up to a power of two, it writes some that come last.
// Entries are compared in pairs, 32 neighbouring pairs by one warp: up to a stride of 32 it reads what it has written.
MK_CALLED void sort_list(uint64_t* list, int n, int tid) {
  int all = 64;
  while (all < n) all *= 2;
#pragma unroll 1
  for (int i = n + tid; i < all; i += kTeam) list[i] = ~0ull;
  team_sync<kTeam>();
#pragma unroll 1
  for (int size = 2; size <= all; size *= 2)
#pragma unroll 1
    for (int stride = size / 2; stride; stride /= 2) {
#pragma unroll 1
      for (int pair = tid; pair < all / 2; pair += kTeam) {
        const int i = 2 * pair - (pair & (stride - 1)), j = i + stride;
        const uint64_t a = list[i], b = list[j];
        if ((a > b) == ((i & size) == 0)) {
          list[i] = b;
          list[j] = a;
        }
      }
      if (stride > 32 || (stride == 1 && size >= 64))
        team_sync<kTeam>();
      else
        __syncwarp();
    }
}

// Sum of the weights of the first n on the list. shift: where in an entry its distance is.
MK_CALLED uint64_t list_weight(const uint64_t* list, int n, int shift, uint64_t* part, int tid) {
  uint64_t own = 0;
#pragma unroll 1
  for (int i = tid; i < n; i += kTeam) own += weight_of((uint32_t)(list[i] >> shift));
  return scan(own, part, tid).all;
}
// Index of the first on the list with whom the sum of weights exceeds target, which is less than the sum over n.
MK_CALLED int list_find(const uint64_t* list, int n, int shift, uint64_t target, SamplerScratch& s, int tid) {
  const int first = kEach * tid, end = min(first + kEach, n);
  uint64_t own = 0;
#pragma unroll 1
  for (int i = first; i < end; i++) own += weight_of((uint32_t)(list[i] >> shift));
  uint64_t upto = scan(own, s.part, tid).before;
  if (upto <= target && target < upto + own) {
    int i = first;
    while ((upto += weight_of((uint32_t)(list[i] >> shift))) <= target) i++;
    s.found = i;
  }
  team_sync<kTeam>();
  return s.found;
}

template <int kVocab>
struct Logits {
  const float* p;  // 16-byte aligned
  int tid;

  __device__ __forceinline__ float4 load(int i) const {  // four neighbours; behind the last one -inf
    if (i + 4 <= kVocab) return __ldcg((const float4*)(p + i));
    const auto at = [&](int j) { return kVocab % 4 && j < kVocab ? __ldcg(p + j) : -INFINITY; };
    return make_float4(at(i), at(i + 1), at(i + 2), -INFINITY);
  }
  // use(i, logits i .. i + 3) for the whole vocabulary; all threads make the same number of calls.
  template <int kAhead, class Use>
  __device__ __forceinline__ void each(Use&& use) const {
#pragma unroll 1
    for (int base = 0; base < kVocab; base += kAhead * 4 * kTeam) {
      float4 v[kAhead];
#pragma unroll
      for (int k = 0; k < kAhead; k++) v[k] = load(base + 4 * (k * kTeam + tid));
#pragma unroll
      for (int k = 0; k < kAhead; k++) use(base + 4 * (k * kTeam + tid), v[k]);
    }
  }
};
__device__ __forceinline__ float component(float4 v, int k) { return k == 0 ? v.x : k == 1 ? v.y : k == 2 ? v.z : v.w; }

// Lists the places in [from, to] and returns their number: exact up to kListTokens, else any above. Where registers are
// spared the caller has it from listed(): what a called function returns may be handed over in the stack.
template <int kVocab, bool kSpare>
MK_CALLED int collect(Logits<kVocab> logits, Distances distances, uint64_t from, uint64_t to, SamplerScratch& s) {
  const int lane = logits.tid & 31;
  const float low = distances.logit_at((uint32_t)(to >> 32));
  if (logits.tid == 0) s.listed = 0;
  team_sync<kTeam>();  // what was on the list was read
  logits.template each<4>([&](int i, float4 v) {
    if (!__any_sync(~0u, fmaxf(fmaxf(v.x, v.y), fmaxf(v.z, v.w)) >= low)) return;
#pragma unroll 1
    for (int k = 0; k < 4; k++) {
      const float logit = component(v, k);
      if (!__any_sync(~0u, logit >= low)) continue;  // nearly always; the rest takes ten times as long
      const uint64_t place = place_of(distances.of(logit), i + k);
      const bool hit = place >= from && place <= to;
      const uint32_t hits = __ballot_sync(~0u, hit);
      if (hits == 0) continue;
      // No more once the list is over: thousands of equals would queue up at the counter.
      uint32_t at = kListTokens;
      if (lane == 0 && load_unordered(s.listed) <= kListTokens) at = atomicAdd(&s.listed, __popc(hits));
      at = __shfl_sync(~0u, at, 0) + __popc(hits & ((1u << lane) - 1));
      if (hit && at < kListTokens) s.list[at] = place;
    }
  });
  team_sync<kTeam>();
  return kSpare ? 0 : min(s.listed, kListTokens + 1);
}
template <bool kSpare>
__device__ __forceinline__ int listed(int collected, const SamplerScratch& s) {
  return kSpare ? min((int)s.listed, kListTokens + 1) : collected;
}

// Sums of the weights up to the limit: every thread's own of one run of tokens, those of the runs before, all.
struct RunSums {
  uint64_t own, before, all;
};
template <int kVocab>
MK_CALLED RunSums sum_runs(Logits<kVocab> logits, Distances distances, uint64_t limit, SamplerScratch& s) {
  constexpr int kRuns = ceil_div(kVocab, kRunTokens);
  static_assert(kRuns <= kTeam, "the sum of every run of tokens has a thread");
  const int lane = logits.tid & 31;
  team_sync<kTeam>();
#pragma unroll 1
  for (int run = logits.tid / 32; run < kRuns; run += kWarps) {
    uint64_t sum = 0;
#pragma unroll 2
    for (int i = run * kRunTokens + 4 * lane; i < (run + 1) * kRunTokens; i += 128) {
      const float4 v = logits.load(i);
#pragma unroll
      for (int k = 0; k < 4; k++) sum += weight_within(distances, component(v, k), i + k, limit);
    }
#pragma unroll 1
    for (int k = 16; k; k /= 2) sum += __shfl_xor_sync(~0u, sum, k);
    if (lane == 0) s.runs[run] = sum;
  }
  team_sync<kTeam>();
  const uint64_t own = logits.tid < kRuns ? s.runs[logits.tid] : 0;
  const Sums sums = scan(own, s.part, logits.tid);
  return {own, sums.before, sums.all};
}

}  // namespace mk
