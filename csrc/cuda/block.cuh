// What a block of the resident kernel knows: parameters, shared memory, the two rings, waits with a time limit.
#pragma once
#include "layout.cuh"
#include "ptx.cuh"

namespace mk {

enum Phase {
  kPhaseQkv,
  kPhaseAttention,
  kPhaseCombine,
  kPhaseOut,
  kPhaseRouter,
  kPhaseChoose,
  kPhasePair,
  kPhaseDown,
  kPhaseHead,
  kPhaseToken,
  kPhases
};

// Filled by the first SM that makes no progress for the wait limit.
struct Report {
  uint32_t expired;  // 1 once somebody gave up
  uint32_t phase, sm, epoch;
};

// Everything a layer publishes, as float32, for comparison with a reference. Offsets in floats inside one layer's
// record.
constexpr int kDumpQkv = 0, kDumpAttention = kDumpQkv + kQkvRows, kDumpMid = kDumpAttention + kQRows,
              kDumpLogits = kDumpMid + kHidden, kDumpIds = kDumpLogits + kExperts, kDumpExperts = kDumpIds + kTopK,
              kDumpOut = kDumpExperts + kTopK * kMoeIntermediate, kDumpLayer = kDumpOut + kHidden;

struct Params {
  const uint8_t* dense;         // [layer] kDenseLayerBytes: QKV pages, then output projection pages
  const uint8_t* head;          // lm_head pages
  const uint8_t* experts;       // [layer][expert] kExpertBytes
  const uint8_t* routers;       // [layer] kRouterBytes
  const uint16_t* embedding;    // bf16 [vocab][hidden]
  const float* norms;           // [layer] kNormLayer, then the final norm
  const float2* expert_scales;  // [layer][expert]: second-level scale of gate/up, of down
  const float2* rope;           // [position][head_dim / 2]: cosine, sine
  uint8_t* kv;                  // kKvBytes, zero where nothing was written: masked positions are multiplied by zero
  uint64_t* exchange;           // kExchangeWords, zero at first and after a wait has expired
  int32_t* tokens;              // [steps + 1]: tokens[0] is read, the others are written
  Report* report;
  float* dump;     // NULL, or [layer] kDumpLayer; kDebug kernels only
  int64_t* trace;  // NULL, or [layer + 1][kPhases][kGrid][4] nanoseconds, written by the last step
  uint64_t wait_limit_ns;
  uint32_t first_epoch;     // epochs used so far in these exchange buffers: layers x steps
  int32_t position, steps;  // of tokens[0]; tokens to run
  int32_t log_splits;       // the KV cache is split in 2^log_splits shares, at most 32
  // Copies allowed under way: more than saturates memory only delays the flags behind them.
  int32_t qkv_flight, dense_flight, head_flight, expert_flight;
  // Dense pages that the ring cannot hold brought into L2 while experts compute: 0 none, 1 QKV's, 2 the output
  // projection's too (measured slower on an H200).
  int32_t prefetch;
  int32_t attention_stride;  // every how many SMs one computes attention: kGrid / (kKvHeads << log_splits)
};

constexpr int kExpertSlots = 4, kDenseSlots = 8;
constexpr int kScoreTiles = 8;  // tiles of one attention chunk: half a tile a warp
constexpr int kScoreStride = kScoreTiles * kTile + 4;
constexpr int kQStride = kHeadDim + 32;  // bf16; two rows then lie in different banks
constexpr int kBigStride = kMaxPairUnits * 16 + 2, kSmallStride = kOwnedRows + 2;
constexpr int kPrefetchTiles = 32;  // of the KV cache, an SM and layer
constexpr int kHeadChunk = 8;       // row units between two reductions of the head

struct alignas(128) Shared {
  uint8_t dense[kDenseSlots][kPageBytes];
  uint8_t expert[kExpertSlots][kPairTileBytes];
  uint32_t x[kWarps][192];  // bf16 x 2: every warp's own columns of the phase's input
  union {
    float big[kWarps][kBigStride];  // partial sums of QKV, gate/up and the head
    float scores[kGroup][kScoreStride];
  };
  float small[kWarps][kSmallStride];  // of the output projection and down: phases alternate between the two, so one
                                      // barrier a phase is enough
  uint16_t q[kGroup][kQStride], k_new[kHeadDim], v_new[kHeadDim];
  float score_max[kWarps][kGroup];
  alignas(16) float squares[2][kWarps];  // sums of squares of QKV's and of the router's input
  float residual[kOwnedRows];
  float router_dot[kWarps];  // of this SM's router row with every warp's columns
  // Of the chosen experts, two layers in turn, written by the expert producer before the last gate/up page is issued.
  float expert_logit[2][kTopK];
  int32_t expert_id[2][kTopK];
  float2 expert_scale[2][kTopK];
  float best_value[2][kWarps];  // of the head, of the token phase: warps enter the second while others read the first
  int32_t best_row[2][kWarps];
  int32_t token;      // chosen by the last step
  int32_t quit;       // set when the consumers leave
  int32_t expired;    // set by the watchdog
  uint32_t progress;  // epoch x kPhases + phase of the consumers
  uint64_t dense_full[kDenseSlots], dense_empty[kDenseSlots], expert_full[kExpertSlots], expert_empty[kExpertSlots];
};
static_assert(sizeof(float) * kGroup * kScoreStride <= sizeof(float) * kWarps * kBigStride);
static_assert(kHeadChunk * 8 + 2 <= kBigStride && kQkvUnits / kGrid * 8 + 8 <= kBigStride, "partial sums need room");

// One ring of shared-memory pages as its producer or one consumer warp sees it: n pages passed so far.
template <int kSlots>
struct Ring {
  static_assert((kSlots & (kSlots - 1)) == 0, "slot and lap are bit fields of the page count");
  uint32_t full, empty;  // barriers of slot 0
  uint32_t n = 0;
  __device__ __forceinline__ uint32_t slot() const { return n & (kSlots - 1); }
  __device__ __forceinline__ uint32_t parity() const { return n / kSlots & 1; }
  __device__ __forceinline__ void wait_full() const { mbarrier_wait(full + 8 * slot(), parity()); }
  // `loaded` must be or-ed from a register of every shared load of the page: the barrier's address then depends on
  // them, and the slot cannot be refilled under a load that is still under way. zero is a zero the compiler cannot see.
  __device__ __forceinline__ void release(uint32_t loaded, uint32_t zero, int lane, uint32_t count = 1) {
    uint32_t bar = (empty + 8 * slot()) | (loaded & zero);
    __syncwarp();
    if (lane == 0) mbarrier_arrive(bar, count);
    n++;
  }
};
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

struct Block {
  const Params& p;
  Shared& s;
  int sm, warp, lane, tid;
  uint32_t zero;   // see Ring::release
  uint32_t epoch;  // of the running layer
  int layer;
  int position;
  bool traced;  // this step's times are kept

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
      if (spins % 16 == 0 && *(const volatile int32_t*)&s.expired) break;
  }
  // Told at the head of every phase: what the watchdog reports, and the sign of life it looks for.
  __device__ __forceinline__ void enter(Phase phase) const {
    if (tid == 0) *(volatile uint32_t*)&s.progress = epoch * kPhases + phase;
  }

  // Moments of a phase: 0 entered, 1 input there, 2 last page multiplied, 3 published.
  template <bool kDebug>
  __device__ __forceinline__ void stamp(Phase phase, int moment) const {
    if (moment == 0 && phase != kPhaseChoose) enter(phase);
    if constexpr (kDebug)
      if (lane == 0 && (warp == 0 || phase == kPhaseChoose) && traced && p.trace)
        p.trace[(((int64_t)layer * kPhases + phase) * kGrid + sm) * 4 + moment] = global_nanoseconds();
  }
};

// This SM's attention unit, KV head major, or -1. Units lie evenly over the grid.
__device__ __forceinline__ int attention_unit(const Params& p, int sm) {
  const int units = kKvHeads << p.log_splits, unit = sm / p.attention_stride;
  return unit * p.attention_stride == sm && unit < units ? unit : -1;
}

// word {value, epoch}
__device__ __forceinline__ float word_float(uint64_t w) { return __uint_as_float((uint32_t)w); }

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
