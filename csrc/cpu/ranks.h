// What ranks with memory of their own send each other after which phase: every message as runs of the buffer that both
// sides have. model.h says after which phases, and how many words at most.
#pragma once
#include "cpu/head.h"

namespace mk {

// The message that goes with the start of a step: what to run, as the first rank knows it.
constexpr int64_t kStepWords = sizeof(Step) / 4;
static_assert(sizeof(Step) % 4 == 0 && kStepWords == m::step_words, "mkpack/schedule/cpu.py tells ranks of another Step");
static_assert(m::ranks <= kMaxRanks);

// Blocks of rank r's part of a buffer [block][slots][16] that is split along N, its used tokens.
template <class Use>
inline void walk_blocks(float* buffer, int slots, int count, int r, int each, int n, Use use) {
  const auto [lo, hi] = State::part(r, each, n);
  for (int b = lo; b < hi; b++) use(buffer + int64_t{b} * slots * 16, int64_t{count} * 16);
}

// The channels of rank r's query heads, which need not begin or end with a block.
template <class Use>
inline void walk_heads(State& s, int r, Use use) {
  constexpr int channels = m::q_heads * m::head_dim;
  for (int c = r * channels; c < (r + 1) * channels;) {
    const int lane = c % 16, lanes = std::min(16 - lane, (r + 1) * channels - c);
    float* block = s.attention.data() + int64_t{c / 16} * s.step.slots * 16;
    if (lanes == 16) use(block, int64_t{s.step.count} * 16);
    else for (int t = 0; t < s.step.count; t++) use(block + t * 16 + lane, int64_t{lanes});
    c += lanes;
  }
}

// Rank r's blocks of what every active expert has `n` of, in parts of a buffer that are `apart` blocks from each other.
template <class Use>
inline void walk_experts(const Local& local, float* buffer, int apart, int r, int each, int n, Use use) {
  for (size_t which = 0; which < local.active.size(); which++) {
    const int count = local.active[which].count;
    walk_blocks(buffer + static_cast<int64_t>(which) * apart * kMaxSlots * 16, round_tokens(count), count, r, each, n, use);
  }
}

// Blocks that rank r sends of the experts' inner.
inline int64_t carried_blocks(const State& s, int r) {
  const auto [lo, hi] = State::part(r, m::moe_inner_tiles, static_cast<int>(ceil_div(m::moe_intermediate_size, 16)));
  return int64_t{hi - lo} * s.step.count * m::top_k;
}

// Leaves in inner the blocks [lo, hi) of those that a rank sent as they are carried.
template <Fmt F>
inline void take_blocks(State& s, const Local& local, int layer, int from, int64_t lo, int64_t hi) {
  constexpr int blocks = static_cast<int>(ceil_div(m::moe_intermediate_size, 16));
  const auto [first, end] = State::part(from, m::moe_inner_tiles, blocks);
  int64_t begin = 0;  // of an expert's
  for (size_t which = 0; which < local.active.size(); which++) {
    const Active& a = local.active[which];
    const int64_t after = begin + int64_t{end - first} * a.count;
    const float scale2 = F == Fmt::nvfp4 ? s.whole<float>(m::layers[layer].down_input_scale)[a.expert] : 1.0f;
    float* inner = s.inner.data() + static_cast<int64_t>(which) * kInnerBlocks * kMaxSlots * 16;
    for (int64_t i = std::max(lo, begin); i < std::min(hi, after); i++) {
      const int64_t block = first + (i - begin) / a.count, token = (i - begin) % a.count;
      take_out<F>(s.carried_of(from), i, scale2, inner + (block * round_tokens(a.count) + token) * 16);
    }
    begin = after;
  }
}

// What rank `from` sends to rank `to` of the result of a phase, in this State's buffers: use(address, words) for each run.
template <class Use>
inline void walk_message(State& s, m::Phase phase, int layer, int from, int to, int tid, Use use) {
  const Step& step = s.step;
  Local& local = s.locals[static_cast<size_t>(tid)];
  const auto channels = [&](float* buffer, int each, int n) { walk_blocks(buffer, step.slots, step.count, from, each, n, use); };
  const auto sub_layer = [&] { channels(m::sandwich ? s.branch.data() : s.x.data(), m::hidden_tiles, kHiddenBlocks); };
  switch (phase) {
    case m::Phase::embed:  // the first rank alone knows what comes next
      if (from == 0) use(&s.step.count, kStepWords);
      return;
    case m::Phase::qk_squares: return use(s.squares_of(from, 0), int64_t{step.count} * kSquares);
    case m::Phase::attention: return walk_heads(s, from, use);
    case m::Phase::output:
    case m::Phase::post_proj: return sub_layer();
    case m::Phase::pre_proj: return channels(s.narrow.data(), m::moe_hidden_tiles, kNarrowBlocks);
    case m::Phase::gate_up: {
      const bool moe = m::layers[layer].moe;
      if (kSendsCarried && moe) return use(s.carried_of(from), carried_words(m::fmt_down_input, carried_blocks(s, from)));
      const int size = moe ? m::moe_intermediate_size : m::dense_intermediate_size;
      const int each = moe ? m::moe_inner_tiles : m::dense_inner_tiles;
      return walk_experts(local, s.inner.data(), kInnerBlocks, from, each, static_cast<int>(ceil_div(size, 16)), use);
    }
    case m::Phase::down:
      if (!m::narrow_experts || !m::layers[layer].moe) return sub_layer();
      return walk_experts(local, s.expert_out.data(), kNarrowBlocks, from, m::moe_hidden_tiles, kNarrowBlocks, use);
    case m::Phase::head: {
      if (to != 0) return;  // tokens are chosen by the first rank
      if (!step.whole) {
        if (from != s.rank) return use(s.best[from], 2);
        const Best best = best_of_threads(s);
        local.best[0] = std::bit_cast<int32_t>(best.value);
        local.best[1] = best.token;
        return use(local.best, 2);
      }
      const auto [lo, hi] = State::part(from, m::vocab_tiles, kVocabTiles);
      for (int i = 0; i < step.logits; i++)
        use(s.logits.data() + (int64_t{i} * kVocabTiles + lo) * 16, int64_t{hi - lo} * 16);
      return;
    }
    default: return;
  }
}

// The same in words, at most: of the first rank, which has no fewer than any other, for the most tokens.
constexpr int64_t most_words(m::Phase phase, int layer) {
  constexpr int64_t hidden = int64_t{m::hidden_tiles} * 16, narrow = int64_t{m::moe_hidden_tiles} * 16;
  const bool moe = layer >= 0 && m::layers[layer].moe;
  const int64_t chosen = moe ? m::top_k : 1;
  switch (phase) {
    case m::Phase::embed: return kStepWords;
    case m::Phase::qk_squares: return int64_t{kMaxTokens} * kSquares;
    case m::Phase::attention: return int64_t{kMaxTokens} * m::q_heads * m::head_dim;
    case m::Phase::output:
    case m::Phase::post_proj: return kMaxTokens * hidden;
    case m::Phase::pre_proj: return kMaxTokens * narrow;
    case m::Phase::gate_up:
      return carried_words(moe ? m::fmt_down_input : Fmt::f32,
                           kMaxTokens * chosen * (moe ? m::moe_inner_tiles : m::dense_inner_tiles));
    case m::Phase::down: return kMaxTokens * (m::narrow_experts && moe ? chosen * narrow : hidden);
    case m::Phase::head: return int64_t{kMaxTokens} * m::vocab_tiles * 16;
    default: return 0;
  }
}
constexpr int64_t longest_message() {
  int64_t most = kStepWords;
  for (const m::Stage& stage : m::stages) most = std::max(most, stage.words);
  return most;
}
constexpr bool words_are_those_of_the_schedule() {
  for (const m::Stage& stage : m::stages)
    if (m::ranks > 1 && stage.words != 0 && stage.words != most_words(stage.phase, stage.layer)) return false;
  return true;
}
static_assert(words_are_those_of_the_schedule(), "the words of an exchange differ from mkpack/schedule/cpu.py");

// Ends a phase: the State's threads meet, and where its result is every rank's, each rank sends its part to the others
// and takes theirs. False: given up.
inline bool end_phase(State& s, m::Phase phase, int layer, bool exchange, int tid, bool limited = true) {
  const char* name = m::phase_names[static_cast<size_t>(phase)];
  if (!s.link || !exchange) return s.team.barrier(tid, name, layer, limited);
  Seat& seat = s.locals[static_cast<size_t>(tid)].seat;
  s.link->begin(seat);
  if (!s.team.barrier(tid, name, layer, limited)) return false;
  for (int r = 0; r < m::ranks; r++)
    if (r != s.rank) s.link->send(seat, r, [&](auto use) { walk_message(s, phase, layer, s.rank, r, tid, use); });
  // A step's beginning is the first rank's to choose, and it may be waiting for its caller.
  const bool begins = phase == m::Phase::embed;
  const bool carried = kSendsCarried && phase == m::Phase::gate_up && m::layers[layer].moe;
  const int unit = carried ? group_words(m::fmt_down_input) : 1;
  for (int r = 0; r < m::ranks; r++) {
    if (r == s.rank) continue;
    const auto walk = [&](auto use) { walk_message(s, phase, layer, r, s.rank, tid, use); };
    if (!s.link->take(seat, r, walk, name, layer, !(begins && r == 0), unit)) return false;
    if constexpr (kSendsCarried) {
      if (!carried) continue;
      constexpr Fmt f = m::fmt_down_input;
      const auto [lo, hi] = Link::share_of(seat, carried_words(f, carried_blocks(s, r)), unit);
      const int64_t first = lo / unit * group_blocks(f), end = hi / unit * group_blocks(f);
      take_blocks<f>(s, s.locals[static_cast<size_t>(tid)], layer, r, first, end);
    }
  }
  return s.team.barrier(tid, name, layer, !begins);
}

}  // namespace mk
