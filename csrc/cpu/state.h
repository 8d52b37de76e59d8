// What one model holds while it runs: weights, KV cache, and every buffer a step needs, allocated once.
//
// Activations are [block][ld][16]: block is 16 consecutive channels, ld the token slots of this step. A tile's 16 output
// rows are one block, so what one product writes the next one reads in place.
//
// A State is all ranks of a model on memory that they share, or one rank with memory of its own: its blob, its KV heads'
// cache, its activations. What it computes is then its part; exchanges (ranks.h) bring the others' parts of what it reads
// whole. Parts keep the places that they have among all ranks'.
#pragma once
#include <sys/mman.h>

#include <cmath>
#include <memory>
#include <new>
#include <utility>
#include <vector>

#include "common/format.h"
#include "cpu/carry.h"
#include "cpu/exchange.h"
#include "cpu/simd.h"
#include "cpu/team.h"
#include "cpu/tile.h"
#include "model.h"

namespace mk {

namespace m = model;

// Zeroed memory straight from the system, so that an unused context costs nothing until it is written.
template <class T>
class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(int64_t n) : bytes_(static_cast<size_t>(std::max<int64_t>(n, 1)) * sizeof(T)) {
    void* p = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) throw std::bad_alloc();
    madvise(p, bytes_, MADV_HUGEPAGE);
    data_ = static_cast<T*>(p);
  }
  Buffer(Buffer&& o) noexcept : data_(std::exchange(o.data_, nullptr)), bytes_(o.bytes_) {}
  Buffer& operator=(Buffer&& o) noexcept {
    std::swap(data_, o.data_);
    std::swap(bytes_, o.bytes_);
    return *this;
  }
  ~Buffer() {
    if (data_) munmap(data_, bytes_);
  }
  T* data() const { return data_; }
  T& operator[](int64_t i) const { return data_[i]; }

 private:
  T* data_ = nullptr;
  size_t bytes_ = 0;
};

// A buffer whose size is known here, and in the schedule that was proven before this was compiled.
template <class T, int64_t Elements, int64_t Scheduled>
class Fixed : public Buffer<T> {
 public:
  static_assert(Elements == Scheduled, "the size of a buffer differs from mkpack/schedule/cpu_buffers.py");
  Fixed() : Buffer<T>(Elements) {}
};

constexpr int kHiddenBlocks = static_cast<int>(ceil_div(m::hidden_size, 16));
constexpr int kQBlocks = static_cast<int>(ceil_div(m::q_heads * m::ranks * m::head_dim, 16));
constexpr int kInner = std::max(m::moe_intermediate_size, m::dense_intermediate_size);
constexpr int kInnerBlocks = static_cast<int>(ceil_div(kInner, 16));
constexpr int kNarrowBlocks = static_cast<int>(ceil_div(m::moe_hidden_size, 16));  // the experts' width
constexpr int kWideBlocks = std::max(kHiddenBlocks, kNarrowBlocks);
constexpr int kGateTile = m::q_tiles + 2 * m::kv_tiles;  // of a rank's part of qkv: the attention gate's, where there is one
constexpr int kQkvTiles = kGateTile + (m::attention_gate ? m::q_tiles : 0);
constexpr int kExperts = std::max(m::num_experts, 1);
constexpr int kMaxTokens = m::tokens_per_step;
constexpr int kMaxSlots = round_tokens(kMaxTokens);
constexpr int kMaxActive = std::min(kExperts, kMaxTokens * std::max(m::top_k, 1));
constexpr int kChunk = m::attention_chunk;  // positions of one attention work item
constexpr int kHeads = m::ranks * m::q_heads;
constexpr int kKvHeads = m::ranks * m::kv_heads;
constexpr int kGroupHeads = m::q_heads / m::kv_heads;
constexpr int kDimBlocks = static_cast<int>(ceil_div(m::head_dim, 16));
constexpr int kDim = kDimBlocks * 16;  // head_dim padded to whole vectors
constexpr int kVocabTiles = static_cast<int>(ceil_div(m::vocab_size, 16));
constexpr int64_t kActivations = int64_t{kHiddenBlocks} * kMaxSlots * 16;

// Sizes that depend on what mk_create() is asked for, and on how many ranks a State has; the schedule has the largest.
constexpr int64_t cache_elements(int context, int ranks) {
  return int64_t{m::num_layers} * ranks * m::kv_heads * align_up(context, 16) * kDim;
}
constexpr int64_t partial_elements(int context, int ranks) {
  return int64_t{kMaxTokens} * ranks * m::q_heads * ceil_div(context, kChunk) * (kDim + 16);
}
constexpr int64_t qkv_elements(int ranks) { return int64_t{ranks} * kQkvTiles * kMaxSlots * 16; }
// Narrow experts are not summed where they are computed; dense layers are.
constexpr bool kSumsDown = !m::narrow_experts || m::dense_intermediate_size > 0;
constexpr int64_t down_elements(int threads, int blocks) {
  return kSumsDown ? (ceil_div(blocks, threads) + 1) * kMaxSlots * 16 : 0;
}
static_assert(cache_elements(m::context, m::ranks) == m::buffer_keys && m::buffer_keys == m::buffer_values);
static_assert(partial_elements(m::context, m::ranks) == m::buffer_partial);
static_assert(qkv_elements(m::ranks) == m::buffer_qkv);
static_assert(down_elements(1, kHiddenBlocks) == m::buffer_down_sum);
// Words of all heads of a rank, for norms over a whole projection.
constexpr int kSquares = m::qk_norm && m::qk_norm_over_projection ? m::q_heads + m::kv_heads : 0;
static_assert(m::context == m::buffer_history);
// Whether ranks tell each other the input of the experts' down projection as it is carried, and a message's words at most.
constexpr bool kSendsCarried = m::ranks > 1 && m::num_experts > 0 && m::fmt_down_input != Fmt::f32;
constexpr int64_t kCarriedBlocks = int64_t{kMaxTokens} * m::top_k * m::moe_inner_tiles;
constexpr int64_t kCarriedWords = kSendsCarried ? carried_words(m::fmt_down_input, kCarriedBlocks) : 0;

// The tokens that chose one expert: token indices and their routing weights, in token order.
struct Active {
  int expert;
  int count;
  int token[kMaxTokens];
  float weight[kMaxTokens];
};

// A thread's own scratch.
struct Local {
  Fixed<float, int64_t{kWideBlocks} * kMaxSlots * 16, m::buffer_normed> normed;
  Fixed<float, int64_t{kWideBlocks} * kMaxSlots * 16, m::buffer_gathered> gathered;
  Buffer<float> down;  // [tiles of this thread][slots][16]
  Fixed<float, kMaxTokens * kGroupHeads * kDim, m::buffer_query> q;
  Fixed<float, kChunk, m::buffer_scores> scores;
  std::vector<Active> active;  // at most kMaxActive
  static_assert(kMaxActive * sizeof(Active) == m::buffer_active * sizeof(int32_t));
  Seat seat;
  alignas(64) float best_value[kMaxTokens];
  int32_t best_token[kMaxTokens];
  int32_t best[2];  // of the rank, as it is sent: the bits of the value, and the token
  static_assert(kMaxTokens == m::buffer_best_value && kMaxTokens == m::buffer_best_token);
};

// One step: `count` tokens at positions start, start + 1, ... 0 tokens end a generation. The first rank tells the others.
struct Step {
  int32_t count = 0;
  int32_t slots = 0;  // round_tokens(count)
  int32_t start = 0;
  int32_t logits = 0;  // of the last this many tokens
  int32_t whole = 0;   // whether those are wanted, and not the best token alone
  int32_t tokens[kMaxTokens] = {};
  static_assert(kMaxTokens == m::buffer_tokens);
};

// Layers after which x is kept for the caller of a step, as [count][tokens][hidden_size]: where it leads.
struct Taps {
  const int32_t* layers = nullptr;
  int count = 0;
  float* hidden = nullptr;
};

#ifdef MK_EXCHANGE_BY_FLAGS
using Link = Exchange<Sync::flags>;
#else
using Link = Exchange<Sync::data>;
#endif

struct Options {
  const void* const* blobs;
  int threads, context;
  double wait_limit_s;
  bool crowded;  // more threads than cores
};

struct State {
  // rank: whose State it is, with `link` to the others; -1: of all ranks.
  State(const Options& o, Failure& failure_of_all, int rank_of_all = -1, Link* link_of_all = nullptr)
      : context(o.context),
        rank(rank_of_all),
        link(link_of_all),
        failure(failure_of_all),
        team(o.threads, o.wait_limit_s, failure, rank < 0 ? "" : "rank " + std::to_string(rank) + ": ", rank > 0, o.crowded) {
    for (int r = first_rank(); r < end_rank(); r++) weights[r] = static_cast<const uint8_t*>(o.blobs[r]);
    const int ranks = end_rank() - first_rank();
    // Keys lie 16 positions to a vector, so that scores need no sum across lanes; values lie 16 channels to a vector.
    keys = Buffer<float>(cache_elements(context, ranks));
    values = Buffer<float>(cache_elements(context, ranks));
    history = Buffer<int32_t>(context);
    chunks = static_cast<int>(ceil_div(context, kChunk));
    partial = Buffer<float>(partial_elements(context, ranks));
    qkv = Buffer<float>(qkv_elements(ranks));
    if (link) carried = Buffer<uint32_t>(m::ranks * kCarriedWords);
    locals = std::vector<Local>(static_cast<size_t>(o.threads));
    const auto [lo, hi] = own(m::hidden_tiles, kHiddenBlocks);
    for (int tid = 0; tid < o.threads; tid++) {
      Local& l = locals[static_cast<size_t>(tid)];
      l.down = Buffer<float>(down_elements(o.threads, hi - lo));
      l.active.reserve(kMaxActive);  // must never grow during a step
      l.seat.rank = rank;
      l.seat.tid = tid;
      l.seat.threads = o.threads;
    }
  }

  int first_rank() const { return std::max(rank, 0); }
  int end_rank() const { return rank < 0 ? m::ranks : rank + 1; }
  // Whether this is where steps come from and tokens are chosen.
  bool leads() const { return rank <= 0; }

  // Of `n` tiles (or anything else) that are split along N, `each` a rank: [first, second) are a rank's, or this State's.
  static std::pair<int, int> part(int r, int each, int n) { return {std::min(r * each, n), std::min((r + 1) * each, n)}; }
  std::pair<int, int> own(int each, int n) const {
    return {part(first_rank(), each, n).first, part(end_rank() - 1, each, n).second};
  }
  // Thread tid's share of those.
  std::pair<int, int> own_share(int each, int n, int tid) const {
    const auto [first, end] = own(each, n);
    const auto [lo, hi] = share(end - first, tid, team.size());
    return {first + static_cast<int>(lo), first + static_cast<int>(hi)};
  }

  // A layer's cache of one KV head, counted over all ranks; so are the heads and tiles below.
  float* key_cache(int layer, int kv_head) { return keys.data() + cache_offset(layer, kv_head); }
  float* value_cache(int layer, int kv_head) { return values.data() + cache_offset(layer, kv_head); }
  int64_t cache_offset(int layer, int kv_head) const {
    const int heads = (end_rank() - first_rank()) * m::kv_heads;
    return (int64_t{layer} * heads + kv_head - first_rank() * m::kv_heads) * align_up(context, 16) * kDim;
  }
  float* qkv_tile(int64_t tile) const { return qkv.data() + (tile - first_rank() * kQkvTiles) * step.slots * 16; }
  float* partial_of(int t, int head, int chunk) const {
    const int heads = (end_rank() - first_rank()) * m::q_heads;
    return partial.data() + ((int64_t{t} * heads + head - first_rank() * m::q_heads) * chunks + chunk) * (kDim + 16);
  }
  // What rank r sends, or sent, of inner: messages, as the slots of the exchange are, and no buffer of the schedule.
  uint32_t* carried_of(int r) const { return carried.data() + r * kCarriedWords; }
  // [tokens][heads of the rank]
  float* squares_of(int r, int t) const { return squares.data() + (int64_t{r} * kMaxTokens + t) * kSquares; }

  // Something of one rank's blob; of what every rank holds whole.
  template <class T>
  const T* at(int r, uint64_t offset) const {
    return reinterpret_cast<const T*>(weights[r] + offset);
  }
  template <class T>
  const T* whole(uint64_t offset) const {
    return at<T>(first_rank(), offset);
  }

  const int context;
  const int rank;
  Link* const link;
  int length = 0;  // where it leads
  const uint8_t* weights[m::ranks] = {};  // null where they are another State's
  Failure& failure;
  std::vector<Local> locals;
  Step step;
  Taps taps;
  int chunks = 0;

  Buffer<float> keys, values, partial, qkv;
  Buffer<int32_t> history;
  Buffer<uint32_t> carried;
  Fixed<float, kActivations, m::buffer_x> x;
  Fixed<float, int64_t{m::ranks} * kMaxTokens * kSquares, m::buffer_squares> squares;
  Fixed<float, kQBlocks * kMaxSlots * 16, m::buffer_attention> attention;
  Fixed<float, m::sandwich ? kActivations : 0, m::buffer_branch> branch;
  Fixed<float, ceil_div(m::num_experts, 16) * kMaxSlots * 16, m::buffer_router> router;
  Fixed<float, int64_t{kMaxActive} * kInnerBlocks * kMaxSlots * 16, m::buffer_inner> inner;
  Fixed<float, m::narrow_experts ? int64_t{kNarrowBlocks} * kMaxSlots * 16 : 0, m::buffer_narrow> narrow;
  Fixed<float, m::narrow_experts ? int64_t{kMaxActive} * kNarrowBlocks * kMaxSlots * 16 : 0, m::buffer_expert_out> expert_out;
  Fixed<float, int64_t{kMaxTokens} * kVocabTiles * 16, m::buffer_logits> logits;
  Fixed<float, kMaxTokens * (m::rotary_dim / 2), m::buffer_cosine> cosine;
  Fixed<float, kMaxTokens * (m::rotary_dim / 2), m::buffer_sine> sine;
  struct alignas(64) Counter {
    std::atomic<int> done{0};
  };
  Counter heads_done[kKvHeads];
  int32_t best[m::ranks][2];  // what the other ranks sent of their best tokens
  Team team;  // last: its threads are joined before anything goes that one which was given up may still work on
};

}  // namespace mk
