// What one model holds while it runs: weights, KV cache, and every buffer a step needs, allocated once.
//
// Activations are [block][ld][16]: block is 16 consecutive channels, ld the token slots of this step. A tile's 16 output
// rows are one block, so what one product writes the next one reads in place.
#pragma once
#include <sys/mman.h>

#include <cmath>
#include <memory>
#include <new>
#include <utility>
#include <vector>

#include "common/format.h"
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
  static_assert(Elements == Scheduled, "the size of a buffer differs from mkpack/schedule/cpu.py");
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

// Sizes that depend on what mk_create() is asked for; the schedule has the largest.
constexpr int64_t cache_elements(int context) {
  return int64_t{m::num_layers} * kKvHeads * align_up(context, 16) * kDim;
}
constexpr int64_t partial_elements(int context) {
  return int64_t{kMaxTokens} * kHeads * ceil_div(context, kChunk) * (kDim + 16);
}
// Narrow experts are not summed where they are computed; dense layers are.
constexpr bool kSumsDown = !m::narrow_experts || m::dense_intermediate_size > 0;
constexpr int64_t down_elements(int threads) {
  return kSumsDown ? (ceil_div(kHiddenBlocks, threads) + 1) * kMaxSlots * 16 : 0;
}
static_assert(cache_elements(m::context) == m::buffer_keys && m::buffer_keys == m::buffer_values);
static_assert(partial_elements(m::context) == m::buffer_partial);
static_assert(down_elements(1) == m::buffer_down_sum);
static_assert(m::context == m::buffer_history);

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
  alignas(64) float best_value[kMaxTokens];
  int best_token[kMaxTokens];
  static_assert(kMaxTokens == m::buffer_best_value && kMaxTokens == m::buffer_best_token);
};

// One step: `count` tokens at positions start, start + 1, ...
struct Step {
  int count = 0;
  int slots = 0;  // round_tokens(count)
  int start = 0;
  int logits = 0;  // of the last this many tokens
  // Layers after which x is kept, as [taps][count][hidden_size].
  const int32_t* tapped = nullptr;
  int taps = 0;
  float* hidden = nullptr;
  int32_t tokens[kMaxTokens];
  static_assert(kMaxTokens == m::buffer_tokens);
};

struct State {
  State(const void* const* blobs, int threads, int context_limit, double wait_limit_s)
      : context(context_limit), team(threads, wait_limit_s) {
    for (int r = 0; r < m::ranks; r++) weights[r] = static_cast<const uint8_t*>(blobs[r]);
    // Keys lie 16 positions to a vector, so that scores need no sum across lanes; values lie 16 channels to a vector.
    keys = Buffer<float>(cache_elements(context));
    values = Buffer<float>(cache_elements(context));
    history = Buffer<int32_t>(context);
    chunks = static_cast<int>(ceil_div(context, kChunk));
    partial = Buffer<float>(partial_elements(context));
    locals = std::vector<Local>(static_cast<size_t>(threads));
    for (auto& l : locals) l.down = Buffer<float>(down_elements(threads));
  }

  // A layer's cache of one KV head.
  float* key_cache(int layer, int kv_head) { return keys.data() + cache_offset(layer, kv_head); }
  float* value_cache(int layer, int kv_head) { return values.data() + cache_offset(layer, kv_head); }
  int64_t cache_offset(int layer, int kv_head) const {
    return (int64_t{layer} * kKvHeads + kv_head) * align_up(context, 16) * kDim;
  }
  template <class T>
  const T* at(int rank, uint64_t offset) const {
    return reinterpret_cast<const T*>(weights[rank] + offset);
  }

  const int context;
  int length = 0;
  const uint8_t* weights[m::ranks];
  Team team;
  std::vector<Local> locals;
  Step step;
  int chunks = 0;

  Buffer<float> keys, values, partial;
  Buffer<int32_t> history;
  Fixed<float, kActivations, m::buffer_x> x;
  Fixed<float, int64_t{m::ranks} * kQkvTiles * kMaxSlots * 16, m::buffer_qkv> qkv;
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
};

}  // namespace mk
