// decode_kernel's parameters and shared memory, and what a block of it knows. It runs one token a step and is the tuned
// twin of the step kernel, for the shapes that kFastDecode admits: SMs exchange {value, epoch} words instead of meeting at
// barriers of the grid.
#pragma once
#include "step_block.cuh"

namespace mk {

// ---- shape -----------------------------------------------------------------------------------------------------------
// Dense inputs are cut into parts of 1024 columns: 64 a warp, two a lane. A page of bf16 weights takes one part, a page of
// fp8 weights two.
constexpr int kPartColumns = kWarps * 64;
constexpr bool whole_pages(int K, bool fp8) { return K % page_columns(fp8) == 0; }
// What decode_kernel is written for, phase by phase; every other shape is left to the step kernel.
constexpr bool kFastDecode =
    !kStepOnly && kRanks == 1 &&
    // dense products: whole pages, a row unit of QKV and at most one a warp for every SM
    whole_pages(kHidden, kAttentionFp8) && whole_pages(kQRows, kAttentionFp8) && whole_pages(kHidden, kHeadFp8) &&
    kHidden <= 2 * kPartColumns && kQRows <= 4 * kPartColumns && kQkvUnits >= kGrid && kQkvUnits <= kWarps * kGrid &&
    !kQkvBias && !kOutBias && kOwnedUnits == 1 &&
    // attention: 8 rows of an MMA are the query heads of a group, at least 8 KV splits
    kHeadDim == 128 && kRotary == kHeadDim && kQkNorm && kGroup <= 8 && 8 * kKvHeads <= kGrid &&
    // experts: a router row an SM, four experts a lane, two warps an expert in down, three to 16 gate/up tiles an SM
    kExperts <= kGrid && kExperts <= 128 && kExperts % 4 == 0 && !kRouterF32 && kTopK == 8 && kNormTopkProb &&
    kMoeIntermediate % 256 == 0 && kMoeIntermediate <= 768 && 2 * kDownTileBytes <= kPairTileBytes &&
    kTokenPairUnits >= 3 * kGrid && kTokenPairUnits <= kWarps * kGrid;
// Sizes of arrays, which must be there for other shapes too.
constexpr int kHiddenParts = kFastDecode ? kHidden / kPartColumns : 2, kQParts = kFastDecode ? kQRows / kPartColumns : 2;
constexpr int kDownChunks = kFastDecode ? kMoeIntermediate / 128 : 2;  // of 64 columns, of one warp in down

// Everything a layer publishes, as float32, for comparison with a reference. Offsets in floats inside one layer's
// record.
constexpr int kDumpQkv = 0, kDumpAttention = kDumpQkv + kQkvRows, kDumpMid = kDumpAttention + kQRows,
              kDumpLogits = kDumpMid + kHidden, kDumpIds = kDumpLogits + kExperts, kDumpExperts = kDumpIds + kTopK,
              kDumpOut = kDumpExperts + kTopK * kMoeIntermediate, kDumpLayer = kDumpOut + kHidden;

// Names that StepParams has mean the same here.
struct DecodeParams {
  const uint8_t *dense, *head, *experts, *routers;
  const uint16_t* embedding;
  const float* norms;
  const float4* expert_scales;
  const float *dense_scales, *head_scales;
  const float2* rope;
  uint8_t* kv;
  uint64_t* exchange;    // kExchangeWords, zero at first and after a wait has expired
  uint32_t* epochs;      // written at the end: epochs used in these exchange buffers, first_epoch of the next launch
  float* logits;         // [kVocab]; sampled tokens only
  int32_t* history;      // that of `position` is run first, those behind it are written
  Report* report;
  Mailbox* mail;
  float* dump;     // NULL, or [layer] kDumpLayer; kDebug kernels only
  int64_t *trace, *streams;  // NULL, or trace_mask + 1 times what trace.cuh says; the first of kDebug kernels only
  int32_t trace_mask;
  int32_t mute;    // this SM leaves attention out; kDebug kernels only
  uint64_t wait_limit_ns;
  uint32_t first_epoch;     // epochs used so far in these exchange buffers: layers x steps
  int32_t position, steps;  // of the first token; tokens to run, unless one that is chosen ends it
  int32_t made;             // tokens chosen before this launch: the first goes to mail->tokens[made]
  int32_t more_splits[2];   // the KV cache has 8 splits, from these positions on twice and four times as many
  int32_t num_stop_tokens;
  int32_t stop_tokens[kMaxStopTokens];
  Sampling sampling;
  // Copies allowed under way: more than saturates memory only delays the flags behind them.
  int32_t qkv_flight, dense_flight, head_flight, expert_flight;
  // Dense pages that the ring cannot hold brought into L2 while experts compute: 0 none, 1 QKV's, 2 the output
  // projection's too (measured slower on an H200).
  int32_t prefetch;
};
constexpr int kMinLogSplits = 3;
MK_HD int log_splits_at(const DecodeParams& p, int position) {
  return kMinLogSplits + (position >= p.more_splits[0]) + (position >= p.more_splits[1]);
}
constexpr bool splits_fit(int log_splits) { return kKvHeads << log_splits <= (kGrid < kMaxUnits ? kGrid : kMaxUnits); }

constexpr int kExpertSlots = 4, kDenseSlots = 8;
constexpr int kScoreTiles = 8;  // tiles of one attention chunk: half a tile a warp
constexpr int kWeightStride = kScoreTiles * kTile / 2 + 16;  // words; the four lanes of two rows lie in different banks
constexpr int kDecodeQStride = kHeadDim + 32;  // bf16; two rows then lie in different banks
constexpr int kPrefetchTiles = 32;  // of the KV cache, an SM and layer
constexpr int kHeadChunk = 8;       // row units between two reductions of the head
// Partial sums of gate/up, QKV and the head; of the output projection and down.
constexpr int kBigStride = most(most(16 * kMaxPairUnits, 8 * ceil_div(kQkvUnits, kGrid)), 8 * kHeadChunk) + 2;
constexpr int kSmallStride = kOwnedRows + 2;

struct alignas(128) DecodeShared {
  uint8_t dense[kDenseSlots][kPageBytes];
  uint8_t expert[kExpertSlots][kPairTileBytes];
  uint32_t x[kWarps][192];  // bf16 x 2: every warp's own columns of the phase's input
  union {
    float big[kWarps][kBigStride];  // partial sums of QKV, gate/up and the head
    // Of the positions of one attention chunk, bf16 x 2: a lane's MMA operands for two tiles are 16 bytes.
    alignas(16) uint32_t weights[8][kWeightStride];
  };
  float small[kWarps][kSmallStride];  // of the output projection and down: phases alternate between the two, so one
                                      // barrier a phase is enough
  uint16_t q[8][kDecodeQStride], k_new[kHeadDim], v_new[kHeadDim];
  float newest_weight[8];
  float2 weight_scale[kWarps][8];  // of every warp's positions: exponent of the power of two that they lack, their sum
  alignas(16) float squares[2][kWarps];  // sums of squares of QKV's and of the router's input
  alignas(16) uint32_t zeros[8];  // what most lanes give to the MMAs of experts
  float residual[kOwnedRows];
  float router_dot[kWarps];  // of this SM's router row with every warp's columns
  // Of the chosen experts, two layers in turn, written by the expert producer before the last gate/up page is issued.
  float expert_logit[2][kTopK];
  int32_t expert_id[2][kTopK];
  float4 expert_scale[2][kTopK];
  float best_value[2][kWarps];  // of the head, of the token phase: warps enter the second while others read the first
  int32_t best_row[2][kWarps];
  int32_t token;      // chosen by the last step
  int32_t quit;       // set when the consumers leave
  int32_t cancel;     // SM 0: what the host says
  int32_t expired;    // set by the watchdog
  uint32_t progress;  // epoch x kPhases + phase of the consumers
  uint64_t dense_full[kDenseSlots], dense_empty[kDenseSlots], expert_full[kExpertSlots], expert_empty[kExpertSlots];
};
static_assert(!kFastDecode || sizeof(DecodeShared) <= kSharedLimit, "more shared memory than a block can have");

using DenseRing = Ring<kDenseSlots>;
using ExpertRing = Ring<kExpertSlots>;

// Runs a piece of code twice: first a rehearsal without effect, then for real. A layer's code is executed once in 20 us
// and has left the inner instruction caches by then; the rehearsal fetches it while its input is waited for. The
// compiler must not know which run is which, or it would make two copies of the code.
template <class Run>
__device__ __forceinline__ void rehearse(Run&& run) {
#pragma unroll 1
  for (int pass = 0; pass < 2; pass++) {
    int real = pass;
    forget(real);
    run(real != 0);
  }
}

struct DecodeBlock {
  const DecodeParams& p;
  DecodeShared& s;
  int sm, warp, lane, tid;
  uint32_t zero;   // see Ring::release
  uint32_t epoch;  // of the running layer
  int layer;
  int position, log_splits;
  int step;

  __device__ __forceinline__ bool owner() const { return sm < kOwners; }
  __device__ __forceinline__ uint64_t* exchange(int offset, uint32_t back = 0) const {
    return p.exchange + ((epoch - back) & 1) * kXWords + offset;
  }
  __device__ __forceinline__ void publish(int offset, uint32_t bits) const {
    store_relaxed(exchange(offset), (uint64_t)bits | (uint64_t)epoch << 32);
  }
  // The copy of a `words` long array that this SM reads.
  __device__ __forceinline__ uint64_t* copy(int offset, int words, uint32_t back = 0) const {
    return exchange(offset + sm % kCopies * words, back);
  }
  __device__ __forceinline__ void publish(int offset, float v) const { publish(offset, __float_as_uint(v)); }
  // Two neighbouring words, the first at an even place.
  __device__ __forceinline__ void publish(int offset, float v, float w) const {
    const uint64_t high = (uint64_t)epoch << 32;
    store_relaxed_2(exchange(offset), __float_as_uint(v) | high, __float_as_uint(w) | high);
  }
  __device__ __forceinline__ bool fresh(uint64_t word, uint32_t back = 0) const {
    return (uint32_t)(word >> 32) == epoch - back;
  }
  // kDebug kernels record what they publish, and when; the others contain no trace of it.
  template <bool kDebug>
  __device__ __forceinline__ void dump(int offset, float v) const {
    if constexpr (kDebug)
      if (p.dump) p.dump[layer * kDumpLayer + offset] = v;
  }

  // The whole warp polls until ready() in every lane, or until the watchdog gave up: from then on nobody waits any
  // more, the kernel runs through the rest of its step on whatever is there and leaves.
  template <class Ready>
  __device__ __forceinline__ void wait(Ready&& ready) const {
    for (uint32_t spins = 1; !__all_sync(~0u, ready()); spins++)  // together: shuffles need no detours then
      if (spins % 16 == 0 && load_unordered(s.expired)) break;
  }
  // Before a long wait for many words: the warp looks at one of them, the same in every lane, until it is there. Polls
  // of all would stand in L2 before those of the SMs that this one waits for. With fp8 attention that was measured
  // slower on an H200.
  __device__ __forceinline__ void wait_first(const uint64_t* word) const {
    if constexpr (!kAttentionFp8) wait([&] { return fresh(load_relaxed(word)); });
  }
  // Told at the head of every phase: what the watchdog reports, and the sign of life it looks for.
  __device__ __forceinline__ void enter(Phase phase) const {
    if (tid == 0) store_unordered(s.progress, epoch * kPhases + phase);
  }

  // Moments of a phase: 0 entered, 1 input there, 2 last page multiplied, 3 published.
  template <bool kDebug>
  __device__ __forceinline__ void stamp(Phase phase, int moment) const {
    if (moment == 0 && phase != kPhaseChoose) enter(phase);
    if constexpr (kDebug)
      if (lane == 0 && (warp == 0 || phase == kPhaseChoose)) stamp_phase(trace_of(p, step), layer, phase, moment);
  }
};

// This SM's attention unit, KV head major, or -1. Units lie evenly over the grid.
__device__ __forceinline__ int attention_unit(int log_splits, int sm) {
  const int stride = (kGrid / kKvHeads) >> log_splits, units = kKvHeads << log_splits, unit = sm / stride;
  return unit * stride == sm && unit < units ? unit : -1;
}

// Sum of the 16 warps' partials of one row: four lanes a row (lane / 8 is the quarter), fixed order; all four get it.
template <int kStride>
__device__ __forceinline__ float sum_partials(const float (&part)[kWarps][kStride], int row, int quarter) {
  float v =
      (part[4 * quarter][row] + part[4 * quarter + 1][row]) + (part[4 * quarter + 2][row] + part[4 * quarter + 3][row]);
  v += __shfl_xor_sync(~0u, v, 8);
  return v + __shfl_xor_sync(~0u, v, 16);
}
// 1 / rms of the vector whose 16 sums of squares lie in `squares`.
__device__ __forceinline__ float inverse_rms(const float (&squares)[kWarps]) {
  const float4* s = (const float4*)squares;
  const float4 a = s[0], b = s[1], c = s[2], d = s[3];
  const float v =
      ((a.x + a.y) + (a.z + a.w) + (b.x + b.y) + (b.z + b.w)) + ((c.x + c.y) + (c.z + c.w) + (d.x + d.y) + (d.z + d.w));
  return rsqrtf(v / kHidden + kRmsEps);
}

}  // namespace mk
