// The step kernel's parameters, its shared memory, and what a block of it knows. A step is 1 to 16 tokens; the whole grid
// meets at a barrier after every phase, so activations are plain memory and any shape of the family runs. decode_kernel
// (decode_kernel.cuh) is the tuned way for one token a step.
#pragma once
#include <utility>
#include "exchange.cuh"
#include "layers.cuh"
#include "ring.cuh"
#include "sampler.cuh"

namespace mk {

// What the host sees and says while the kernel runs, in memory that both can reach.
struct Mailbox {
  int32_t cancel;    // host: end after this token
  int32_t tokens[];  // kernel: chosen token i is tokens[i] - 1, 0 while it is not there
};

constexpr int kMaxStopTokens = 64;

// What a rank knows of the others; nothing where there are none.
template <bool kSeveral>
struct RankParams {};
template <>
struct RankParams<true> {
  Peers<kRanks> peers;
  Report* reports[kRanks];  // of every rank
  uint32_t exchanges;       // before this launch; by flag only
};

struct StepParams : RankParams<(kRanks > 1)> {
  // Weights: the blob's sections.
  const uint8_t *dense, *head, *experts, *routers;
  const uint16_t* embedding;
  const float* norms;
  const float4* expert_scales;
  const float *dense_scales, *head_scales;  // fp8 only
  const float2* rope;                       // [position][kRotary / 2]: cosine, sine
  uint8_t* kv;
  // Activations, written in one phase and read in the next. bf16 where nothing else is said.
  // Of the first three there is more behind what is said here: StepBlock knows it.
  uint16_t* hidden;      // [kMaxTokens][kHidden] residual x the next norm's weights; 1/rms is applied to the sums
  float* router_input;   // [kMaxTokens][kHidden] the same in float32
  float* squares;        // [kMaxTokens][kSquaresStride] every unit's share of the sum of squares
  float* qkv;            // [kMaxTokens][kQkvRows] before norm and RoPE
  float* partial;        // [unit][kAttentionRows][kHeadDim] attention of a KV split
  float2* partial_sums;  // [unit][kAttentionRows] its maximum and denominator
  uint16_t* attention;   // [kMaxTokens][kModelQRows]
  float* router_logits;  // [kMaxTokens][kExperts]
  uint16_t* swiglu;      // [kMaxTokens x kTopK][kMoeIntermediate], or [kMaxTokens][kDenseIntermediate]
  float* logits;         // [kMaxTokens][kModelHeadRows], aligned for the sampler; rows count on over the steps of a launch without new tokens
  float2* best;          // [kMaxTokens][kBests] {largest logit, its row as an integer's bits}
  int32_t* shared_token; // [2] what SM 0 decided: the token, 1 when the generation was cancelled
  float* taps;           // NULL, or [layer][kMaxTokens][kHidden]: the residual after every layer
  int32_t* history;      // [kMaxContext + 1]: token at every position; the given ones are there already
  uint32_t* barrier;     // counts arrivals of blocks, across launches
  uint32_t* experts_hit; // distinct experts that a layer's tokens chose, added up over layers with experts and launches
  Report* report;
  Mailbox* mail;
  int64_t *trace, *streams;  // NULL, or trace_mask + 1 times what trace.cuh says; traced builds only
  int32_t trace_mask;
  uint64_t wait_limit_ns;
  uint32_t barrier_base;  // arrivals before this launch
  uint32_t first_epoch;   // that decode_kernel used before this launch; of several ranks 0, whose images are empty then
  int32_t position;       // of the first given token
  int32_t given;          // tokens to run first, at least one
  int32_t new_tokens;     // tokens to choose after them; all but the last are run too
  int32_t made;           // tokens chosen before this launch: the first goes to mail->tokens[made]
  int32_t num_logits;     // without new tokens: logits wanted of so many last given tokens
  int32_t tiles_per_split;  // KV tiles that are worth an SM of their own
  int32_t max_length;       // positions that the cache may take
  int32_t num_stop_tokens;
  int32_t stop_tokens[kMaxStopTokens];
  Sampling sampling;
  int32_t dense_flight, head_flight;  // pages under way
};

MK_HD int most(int a, int b) { return a > b ? a : b; }

// ---- shape of the step kernel ----------------------------------------------------------------------------------------
constexpr int kStepSlots = 4;  // of each ring
// Squads of four warps, with a named barrier each: they share a row block in attention, a tile in gate/up.
constexpr int kSquads = 4, kSquadBarrier = 4;
constexpr int kExpertPageBytes =
    (tile_page_chunks(kExpertHidden, 0) > tile_page_chunks(kMoeIntermediate, 0) ? tile_page_chunks(kExpertHidden, 0)
                                                                               : tile_page_chunks(kMoeIntermediate, 0)) *
    kChunkBytes;
// Warps that share one gate/up tile, each with a part of its columns. Four groups work on four tiles at a time where a
// tile is one page: then a group meets the same slot of the ring again and again. Otherwise all warps share a tile.
constexpr int kPairGroups = tile_pages(kExpertHidden) == 1 ? kSquads : 1, kPairWarps = kWarps / kPairGroups;
constexpr int kPairWords = ceil_div(kMaxTokens * kTopK, 32);  // of a mask of pairs
static_assert(kExperts * kPairWords <= kWarps * 2 * 16 * 8, "masks of pairs lie where the partial sums of gate/up will");
// Down tiles in a page, and the parts of a page's columns: the four warps of a slot share its page.
constexpr int kDownPages = tile_pages(kMoeIntermediate);
constexpr int kDownFit = kExpertPageBytes / (kDownPages == 1 ? kDownTileBytes : kExpertPageBytes);
constexpr int kDownPack = kDownFit > 3 ? 4 : kDownFit > 1 ? 2 : 1, kDownSplit = 4 / kDownPack;
constexpr int kDownCopies = kDownPages * kDownSplit;  // partial sums of a down product
constexpr int kDenseChunk = 8;                        // row units between two reductions
constexpr int kQkUnits = (kQRows + kKvRows) / kPageRows;  // row units of q and k
constexpr int kModelQkUnits = kRanks * kQkUnits;          // of all ranks, of which several may have the same of k
constexpr int kQStride = kHeadDim + 8, kXStride = kExpertHidden + 8;
// What orders a sum depends on the model and the whole device, not on the number of ranks.
constexpr int kDeviceSplits = kDeviceGrid / kModelKvHeads;
constexpr int kMaxSplits = kDeviceSplits < 1 ? 1 : kDeviceSplits > 32 ? 32 : kDeviceSplits;
// Sums of squares are kept by units of hidden rows; where every SM has just one, by SMs.
constexpr bool kUnitsAreSms = kOwnedUnits == 1 && kRanks == 1;
constexpr int kSquaresStride = kUnitsAreSms ? kGrid : kModelUnits;
constexpr int kBests = kRanks * kGrid;
constexpr bool kQkWhole = kQkNorm && kQkNormOverProjection;  // q and k are normed over all heads
constexpr int kAttentionRows = ceil_div(kMaxTokens * kGroup, 16) * 16;

// Workspace of activations that most models do without, behind that of others.
constexpr size_t kNarrowAt = (size_t)kMaxTokens * kHidden, kMixedAt = kNarrowAt + (size_t)kMaxTokens * kNarrowHidden;
constexpr size_t kHiddenSize = kMixedAt + (size_t)kMaxTokens * kNarrowHidden;
constexpr size_t kBranchAt = (size_t)kMaxTokens * kHidden, kRouterInputSize = kBranchAt * (kSandwich ? 2 : 1);
constexpr size_t kBranchSquaresAt = (size_t)kMaxTokens * kSquaresStride;
constexpr size_t kNarrowSquaresAt = kBranchSquaresAt + (kSandwich ? (size_t)kMaxTokens * kModelUnits : 0);
constexpr size_t kPairSquaresAt = kNarrowSquaresAt + (kNarrow ? (size_t)kMaxTokens * kModelPreUnits : 0);
constexpr size_t kQkSquaresAt = kPairSquaresAt + (kNarrow ? (size_t)kMaxTokens * kTopK * kModelDownUnits : 0);
constexpr size_t kSquaresSize = kQkSquaresAt + (kQkWhole ? (size_t)kMaxTokens * kModelQkUnits : 0);
constexpr int kSwigluSize = kMaxTokens * most(kTopK * kMoeIntermediate, kDenseIntermediate);

// What a squad exchanges about a block of 16 rows and 32 positions in attention.
struct alignas(16) SquadScores {
  float top[16][4];    // of each warp's positions
  uint16_t p[16][36];  // weights of the positions, bf16; rows in different banks
};

MK_HD int attention_blocks(int tokens) { return ceil_div(tokens * kModelGroup, 16); }
// Most tokens of a unit of attention: one row block of the model's queries, or one for every squad. Up to kFewTiles
// tiles of the cache units have few.
constexpr int kFewUnitTokens = 16 / kModelGroup, kManyUnitTokens = kSquads * 16 / kModelGroup, kFewTiles = 64;
static_assert(kModelGroup <= 16, "a token's queries of a KV head are a row block at most");
// Row blocks of queries in shared memory. Where three are in use the fourth squad reads a block that is never looked at.
MK_HD int query_blocks(int tokens) {
  const int blocks = attention_blocks(tokens < kManyUnitTokens ? tokens : kManyUnitTokens);
  return blocks > 2 ? kSquads : blocks;
}
// A page is a tile of weights, several of them, or two tiles of the KV cache.
constexpr int kSlotBytes = most(kExpertPageBytes, 2 * 2 * kTileBytes);
// Bytes of the part of shared memory that phases use in turn, at most `tokens` tokens a step, on an SM that has so many
// rows of the experts' outputs.
MK_HD int step_scratch(int tokens, int down_rows) {
  const int x = tokens * kXStride * 2;  // input of gate/up
  const int queries = query_blocks(tokens) * 16 * kQStride * 2 + kSquads * (int)sizeof(SquadScores) + 2 * 2 * kTileBytes +
                      (kRotary == kHeadDim ? 0 : kWarps * 2 * kHeadDim * 4) + 48;
  const int outputs = kSquads * 16 * (kHeadDim * 4 + 8);
  const int dense = kDenseChunk * kWarps * kPageRows * (tokens > 8 ? 16 : 8) * 4;  // partial sums
  const int down = kDownCopies * tokens * kTopK * down_rows * 4;
  return most(most(most(x, queries), most(outputs, dense)), most(down, (int)sizeof(SamplerScratch)));
}
constexpr int kSharedLimit = 227 << 10;
MK_HD int step_fixed(int tokens, int owned_rows) {  // everything else, rounded up
  return kStepSlots * (kPageBytes + kSlotBytes) + kWarps * 2 * 16 * 8 * 4 + tokens * owned_rows * 4 +
         16 * kWarps * 4 + kMaxTokens * kTopK * 12 + kExperts * 6 + 4096;
}
// Most tokens that a step of this model takes: shared memory ends somewhere. As one rank with the device for itself:
// how a prompt is cut into steps decides its last bits.
MK_HD int step_tokens() {
  const int owned = ceil_div(kModelUnits, kDeviceGrid) * kUnitRows, down = ceil_div(kModelDownUnits, kDeviceGrid) * kUnitRows;
  int tokens = kMaxTokens;
  while (tokens > 1 && step_fixed(tokens, owned) + step_scratch(tokens, down) > kSharedLimit) tokens /= 2;
  return tokens;
}
constexpr int kStepTokens = step_tokens();
constexpr int kUnitQueries = query_blocks(kStepTokens) * 16;

// What a block knows of other ranks.
template <bool kSeveral>
struct RankShared {};
template <>
struct RankShared<true> {
  int32_t awaited;     // 1 + the rank that a thread waits for
  uint32_t exchanges;  // so far, over launches; by flag only
};

struct alignas(128) StepShared {
  uint8_t dense[kStepSlots][kPageBytes];
  uint8_t expert[kStepSlots][kSlotBytes];
  alignas(128) uint8_t scratch[step_scratch(kStepTokens, kDownRows)];
  float pair_part[kPairGroups][2][kPairWarps][16][8];
  float residual[kStepTokens][kOwnedRows];
  float router_dot[16][kWarps];
  float rms[kMaxTokens];  // 1/rms of the phase's input
  // The choice of experts: pair p = token x kTopK + rank.
  int16_t pair_expert[kMaxTokens * kTopK];
  float pair_weight[kMaxTokens * kTopK];
  int16_t active[kExperts];           // experts that any token chose, ascending
  int16_t list_start[kExperts + 1];   // of every active expert its pairs in `list`
  int16_t list[kMaxTokens * kTopK];
  int32_t warp_counts[kWarps];
  int32_t active_count;
  float best_value[kTeam];
  int32_t best_row[kTeam];
  // The running step, the same for all threads. In shared memory, because registers are scarce: whoever needs one of them
  // loads it again after a barrier. Written by thread 0 between the two barriers of meet().
  int32_t step, layer, position, tokens;
  uint32_t dense_pages, expert_pages;  // passed through the rings before this step
  uint32_t expert_issued;  // low byte of the number of layers streamed, 24 bits of pages: ahead_of_experts()
  int32_t first;      // row of the first token in logits and taps
  uint32_t epoch;     // of the running layer
  uint32_t arrivals;  // at the grid barrier when all have come to the last one
  int32_t token;      // to run next
  int32_t ended;      // the generation is over
  int32_t quit;       // the consumers leave: steps that ran
  int32_t expired;    // set by the watchdog
  uint32_t progress;  // epoch x kPhases + phase of the consumers
  uint64_t dense_full[kStepSlots], dense_empty[kStepSlots], expert_full[kStepSlots], expert_empty[kStepSlots];
  [[no_unique_address]] RankShared<(kRanks > 1)> ranks;
};
static_assert(sizeof(StepShared) <= kSharedLimit, "more shared memory than a block can have");
using StepRing = Ring<kStepSlots>;

// Given tokens come first, kStepTokens a step; then the chosen ones, one a step.
struct Step {
  int first, tokens;  // of the given ones; first counts on behind them
  bool head;          // this step computes logits
};
__device__ __forceinline__ int given_steps(const StepParams& p) { return ceil_div(p.given, kStepTokens); }
__device__ __forceinline__ int step_count(const StepParams& p) {
  return given_steps(p) + (p.new_tokens > 1 ? p.new_tokens - 1 : 0);
}
__device__ __forceinline__ Step step_at(const StepParams& p, int i) {
  const int chunks = given_steps(p);
  if (i >= chunks) return {p.given + i - chunks, 1, true};
  const int first = i * kStepTokens, tokens = min(kStepTokens, p.given - first);
  return {first, tokens, p.new_tokens ? i + 1 == chunks : first + tokens > p.given - p.num_logits};
}

template <class Params>
__device__ __forceinline__ int rank_of(const Params& p) {
  if constexpr (kRanks > 1)
    return p.peers.rank;
  else
    return 0;
}
template <class Shared>
__device__ __forceinline__ void awaits_nobody(Shared& s) {
  if constexpr (kRanks > 1) store_unordered(s.ranks.awaited, 0);
}

struct StepBlock {
  const StepParams& p;
  StepShared& s;
  int warp, tid;
  uint32_t zero;  // see Ring::release

  __device__ __forceinline__ int lane() const { return tid & 31; }
  // Read again at every use: what is computed from it would otherwise be kept in registers through all phases.
  __device__ __forceinline__ int sm() const {
    int sm = rank_block();
    forget(sm);
    return sm;
  }
  __device__ __forceinline__ int rank() const { return rank_of(p); }
  __device__ __forceinline__ int layer() const { return s.layer; }
  __device__ __forceinline__ int position() const { return s.position; }
  __device__ __forceinline__ int tokens() const { return s.tokens; }
  __device__ __forceinline__ int first_unit() const { return sm() * kOwnedUnits; }
  __device__ __forceinline__ int units() const {  // of 16 hidden rows
    return max(0, min(kOwnedUnits, min(kUnits, kModelUnits - rank() * kUnits) - first_unit()));
  }
  __device__ __forceinline__ int owned_row() const { return (rank() * kUnits + first_unit()) * kUnitRows; }
  __device__ __forceinline__ int first_down_unit() const { return sm() * kDownOwned; }
  __device__ __forceinline__ int down_row() const { return (rank() * kDownUnits + first_down_unit()) * kUnitRows; }
  __device__ __forceinline__ int down_units() const {  // of 16 rows of the experts' outputs
    return max(0, min(kDownOwned, min(kDownUnits, kModelDownUnits - rank() * kDownUnits) - first_down_unit()));
  }
  // Vectors of this layer, or of the next; behind the last one's lies the final norm.
  __device__ __forceinline__ const float* vectors() const { return p.norms + first_vector(layer()); }
  __device__ __forceinline__ const float* next_vectors() const { return p.norms + first_vector(layer() + 1); }
  // The layer's place among those with experts.
  __device__ __forceinline__ int moe_layer() const { return moe_layers_before(layer()); }
  __device__ __forceinline__ uint16_t* narrow() const { return p.hidden + kNarrowAt; }  // [kMaxTokens][kNarrowHidden], as hidden
  __device__ __forceinline__ uint16_t* mixed() const { return p.hidden + kMixedAt; }    // the same, of experts' outputs
  // [kMaxTokens][kHidden] what a sub-layer gives, before its norm. An SM reads its own rows only.
  __device__ __forceinline__ float* branch() const { return p.router_input + kBranchAt; }
  // Shares of sums of squares, by units of rows: [kMaxTokens][kModelUnits], [kMaxTokens][kModelPreUnits],
  // [kMaxTokens x kTopK][kModelDownUnits].
  __device__ __forceinline__ float* branch_squares() const { return p.squares + kBranchSquaresAt; }
  __device__ __forceinline__ float* narrow_squares() const { return p.squares + kNarrowSquaresAt; }
  __device__ __forceinline__ float* pair_squares() const { return p.squares + kPairSquaresAt; }
  // Of every expert the pairs that chose it, a bit each; the partial sums of gate/up come later.
  __device__ __forceinline__ uint32_t* masks() const { return (uint32_t*)s.pair_part; }
  // Norms of q and k over all heads: of every token every row unit's share of the sum of squares, rank after rank, and 1/rms of
  // q or of k.
  __device__ __forceinline__ float* qk_squares() const { return p.squares + kQkSquaresAt; }
  __device__ __forceinline__ float* qk_rms(bool keys) const { return s.router_dot[keys]; }
  template <class T>
  __device__ __forceinline__ T* scratch() const { return (T*)s.scratch; }

  // Moments of a phase: 0 entered, 1 input there, 2 products done, 3 published.
  __device__ __forceinline__ void stamp(Phase phase, int moment) {
    forget(tid);  // or addresses would be computed a phase ahead, and spilled
    if (moment == 0 && tid == 0) store_unordered(s.progress, s.epoch * kPhases + phase);
#ifdef MK_TRACE
    if (tid == 0) stamp_phase(trace_of(p, s.step), s.layer, phase, moment);
#endif
  }

  // All blocks meet, and what they wrote before is there for loads past L1 afterwards. layers: to go on by. After the
  // watchdog gave up nobody waits any more: the kernel runs through its step on whatever is there and leaves.
  __device__ __forceinline__ void meet(int layers = 0) {
    team_sync<kTeam>();
    if (tid == 0) {
      const uint32_t all = s.arrivals += kGrid;
      s.layer += layers;
      s.epoch += layers;
      awaits_nobody(s);
      add_release(p.barrier, 1);
      for (uint32_t spins = 1; (int32_t)(load_acquire(p.barrier) - all) < 0; spins++)
        if (spins % 16 == 0 && load_unordered(s.expired)) break;
    }
    team_sync<kTeam>();
  }

  // A norm's weight, stored without `offset`.
  __device__ __forceinline__ float weight_of(const float* norm, float offset) const {
    const float w = __ldg(norm);
    if constexpr (kCenteredNorms || kSandwich || kNarrow) return w + offset;
    return w;
  }
  // 1/rms of every token's hidden state into s.rms, by one warp a token; a team_sync must follow. Every SM adds the owners'
  // shares in the same order.
  __device__ __forceinline__ void load_rms() const { load_rms<0, kModelUnits, kHidden, kSquaresStride>(kRmsEps); }
  // Of other activations: where their squares lie, how many shares these have, and channels.
  template <size_t kAt, int kShares, int kChannels, int kStride = kShares>
  __device__ __forceinline__ void load_rms(float eps) const {
    if (warp >= tokens()) return;
    float sum = 0;
    for (int i = lane(); i < kShares; i += 32) sum += __ldcg(p.squares + kAt + warp * kStride + i);
    sum = warp_sum(sum);
    if (lane() == 0) s.rms[warp] = rsqrtf(sum / kChannels + eps);
  }
  // What a phase that changed the residual leaves for the next: the new residual of this SM's rows is in s.residual.
  // norm: weights of the norm that comes next, without `offset`. A team_sync must come before.
  __device__ __forceinline__ void publish_hidden(const float* norm, float offset) const {
    const int rows = units() * kUnitRows;
#pragma unroll 1
    for (int i = tid; i < tokens() * rows; i += kTeam) {
      const int token = i / rows, row = i % rows;
      const float v = s.residual[token][row] * weight_of(norm + owned_row() + row, offset);
      p.hidden[token * kHidden + owned_row() + row] = (uint16_t)pack_bf16x2(v, 0.f);
      p.router_input[token * kHidden + owned_row() + row] = v;
    }
    if constexpr (kUnitsAreSms) {
      if (tid < tokens() && rows) {
        float sum = 0;
        for (int row = 0; row < rows; row++) sum += s.residual[tid][row] * s.residual[tid][row];
        p.squares[tid * kGrid + sm()] = sum;
      }
    } else {
      for (int i = tid; i < tokens() * units(); i += kTeam) {
        const int token = i / units(), unit = i % units();
        p.squares[token * kSquaresStride + owned_row() / kUnitRows + unit] = unit_squares(token, unit);
      }
    }
  }
  // Of a unit of this SM: 16 rows, in their order.
  __device__ __forceinline__ float unit_squares(int token, int unit) const {
    const float* v = s.residual[token] + unit * kUnitRows;
    float sum = 0;
    for (int row = 0; row < kUnitRows; row++) sum += v[row] * v[row];
    return sum;
  }
};

// First a warpgroup: one warp streams dense weights and watches the time, two stream experts, one brings pages of experts into
// L2 ahead of them. The scheduler prefers older warps, and these must not starve behind consumers that spin on a barrier. Then 16 consumer warps.
// The first four exist as a whole because registers move between the two kinds by warpgroups: 640 x 96 at launch, then
// 512 x 104 + 128 x 64 out of the same 61440 (asking for more than the launch took would never return).
constexpr int kProducers = 128, kThreads = kProducers + kTeam;

__device__ __forceinline__ int consumer_index() {
  return (kSpareRegisters ? thread_index() : (int)threadIdx.x) - kProducers;
}
// What a consumer thread knows at the beginning of a step. Made anew for each: what a thread keeps in registers meanwhile
// would have to survive the calls of the sampler.
__device__ __forceinline__ StepBlock consumer(const StepParams& p, StepShared& s, uint32_t zero) {
  int tid = consumer_index();
  forget(tid);
  return {p, s, __shfl_sync(~0u, tid / 32, 0), tid, zero};
}

}  // namespace mk
