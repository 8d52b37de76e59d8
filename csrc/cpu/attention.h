// Grouped-query attention over the KV cache, split into (KV head, 256 positions) items that any thread may take.
//
// The item that covers a position also writes that position's key and value, so new tokens need no phase of their own.
// Cuts are at fixed positions and items are combined in position order: results do not depend on threads or chunks.
#pragma once
#include "cpu/norm.h"

namespace mk {

// Channel c of head-local row `row` in qkv: rows of a rank's part are consecutive across its tiles.
MK_INLINE float qkv_at(const State& s, int rank, int first_tile, int row, int t) {
  return s.qkv_tile(int64_t{rank} * kQkvTiles + first_tile + row / 16)[t * 16 + row % 16];
}

// One head as projected; out has kDim values, padding zero.
inline void load_head(const State& s, int rank, int first_tile, int head, int t, float* out) {
  for (int c = 0; c < kDim; c++) out[c] = c < m::head_dim ? qkv_at(s, rank, first_tile, head * m::head_dim + c, t) : 0;
}

// How the heads of q or of k are normed. weight: of this head, null for none. inverse: per token, 1 / RMS of all heads
// together, null where each head is normed by itself.
struct HeadNorm {
  const float* weight;
  const float* inverse;
};

// squares[rank][token][q heads, then k heads] = sum of squares of each head, for norms that span all heads: a rank has
// only its own heads, so that what crosses is one number a head, and the sum over heads is everywhere the same.
inline void squares_phase(State& s, int tid) {
  if constexpr (kSquares > 0) {
    const auto [lo, hi] = share(int64_t{s.end_rank() - s.first_rank()} * kSquares, tid, s.team.size());
    alignas(64) float v[kDim];
    for (int64_t i = lo; i < hi; i++) {
      const int rank = s.first_rank() + static_cast<int>(i / kSquares), head = static_cast<int>(i % kSquares);
      const bool query = head < m::q_heads;
      for (int t = 0; t < s.step.count; t++) {
        load_head(s, rank, query ? 0 : m::q_tiles, query ? head : head - m::q_heads, t, v);
        V sum = zero();
        for (int b = 0; b < kDimBlocks; b++) sum = fma(load(v + b * 16), load(v + b * 16), sum);
        s.squares_of(rank, t)[head] = hsum(sum);
      }
    }
  }
}

// 1 / RMS of token t's q or k over all `heads`, `rank_heads` a rank whose squares begin at `first`. A head that several
// ranks hold counts once.
inline float projection_inverse(const State& s, int first, int heads, int rank_heads, int t) {
  const int replicas = m::ranks * rank_heads / heads;
  float sum = 0;
  for (int h = 0; h < heads; h++) sum += s.squares_of(h * replicas / rank_heads, t)[first + h * replicas % rank_heads];
  return 1.0f / std::sqrt(sum / static_cast<float>(heads * m::head_dim) + m::rms_norm_eps);
}

// One head's vector of token t: q/k norm and rotary applied, times `scale`; out has kDim values, padding zero.
inline void head_vector(const State& s, int rank, int first_tile, int head, int t, HeadNorm norm, bool rotate,
                        float scale, float* out) {
  alignas(64) float v[kDim];
  load_head(s, rank, first_tile, head, t, v);
  if (m::qk_norm) {
    const float r = norm.inverse ? norm.inverse[t] : inverse_rms(v, nullptr, kDimBlocks, 16, m::head_dim, m::rms_norm_eps);
    for (int c = 0; c < m::head_dim; c++) v[c] = norm.weight ? v[c] * r * norm.weight[c] : v[c] * r;
  }
  for (int c = 0; c < kDim; c++) out[c] = v[c] * scale;
  if (!rotate) return;
  constexpr int half = m::rotary_dim / 2;
  const float* cosine = s.cosine.data() + t * half;
  const float* sine = s.sine.data() + t * half;
  for (int i = 0; i < half; i++) {
    const float a = v[i], b = v[i + half];
    out[i] = (a * cosine[i] - b * sine[i]) * scale;
    out[i + half] = (b * cosine[i] + a * sine[i]) * scale;
  }
}

// First position that a query at `position` sees.
constexpr int first_visible(int position, int window) { return window > 0 ? std::max(0, position - window + 1) : 0; }

// Scores, softmax numerators and their weighted sum of values for one query head over one chunk.
// out: [kDim] sums, then the maximum and the sum of numerators.
inline void attend_chunk(const float* keys, const float* values, const float* q, int from, int to, float* scores, float* out) {
  const int first = from / 16, last = (to + 15) / 16;  // vectors of 16 positions
  V highest = set1(-INFINITY);
  for (int b = first; b < last; b++) {
    V sum = zero();
    const float* k = keys + int64_t{b} * kDim * 16;
    for (int c = 0; c < m::head_dim; c++) sum = fma(load(k + c * 16), set1(q[c]), sum);
    sum = keep_lanes(sum, std::max(from - b * 16, 0), std::min(to - b * 16, 16), -INFINITY);
    store(scores + (b - first) * 16, sum);
    highest = vmax(highest, sum);
  }
  const float top = hmax(highest);
  V total = zero();
  for (int b = first; b < last; b++) {
    V e = vexp(load(scores + (b - first) * 16) - set1(top));
    store(scores + (b - first) * 16, e);
    total = total + e;
  }
  V sum[kDimBlocks];
  for (auto& v : sum) v = zero();
  for (int p = from; p < to; p++) {
    const V w = set1(scores[p - first * 16]);
    for (int d = 0; d < kDimBlocks; d++) sum[d] = fma(w, load(values + int64_t{p} * kDim + d * 16), sum[d]);
  }
  for (int d = 0; d < kDimBlocks; d++) store(out + d * 16, sum[d]);
  out[kDim] = top;
  out[kDim + 1] = hsum(total);
}

// Brings a head's chunks together, in position order, and writes it where the output projection reads.
inline void combine_chunks(State& s, int layer, int head, int t, int first, int last) {
  const float* sinks = s.whole<float>(m::layers[layer].sinks);
  float top = m::attention_sinks ? sinks[head] : -INFINITY;
  for (int c = first; c < last; c++) top = std::max(top, s.partial_of(t, head, c)[kDim]);
  V sum[kDimBlocks];
  for (auto& v : sum) v = zero();
  alignas(64) float w[16] = {};
  if (m::attention_sinks) store(w, vexp(set1(sinks[head] - top)));  // a sink takes its share and has no value
  float total = w[0];
  for (int c = first; c < last; c++) {
    const float* p = s.partial_of(t, head, c);
    store(w, vexp(set1(p[kDim] - top)));
    total = std::fma(w[0], p[kDim + 1], total);
    for (int d = 0; d < kDimBlocks; d++) sum[d] = fma(set1(w[0]), load(p + d * 16), sum[d]);
  }
  alignas(64) float out[kDim];
  for (int d = 0; d < kDimBlocks; d++) store(out + d * 16, sum[d] / set1(total));
  if (m::attention_out_norm) {
    const V r = set1(inverse_rms(out, nullptr, kDimBlocks, 16, m::head_dim, m::rms_norm_eps));
    for (int d = 0; d < kDimBlocks; d++) store(out + d * 16, load(out + d * 16) * r);
  }
  if (m::attention_gate) {
    alignas(64) float gate[kDim];
    load_head(s, head / m::q_heads, kGateTile, head % m::q_heads, t, gate);
    for (int d = 0; d < kDimBlocks; d++) store(out + d * 16, load(out + d * 16) * sigmoid(load(gate + d * 16)));
  }
  for (int c = 0; c < m::head_dim; c++) {
    const int channel = head * m::head_dim + c;
    s.attention[(channel / 16 * s.step.slots + t) * 16 + channel % 16] = out[c];
  }
  // The lanes past the last head held other tokens in steps of another size: an infinity there, times the zero weight
  // of a padded column, would be NaN.
  if (constexpr int used = kHeads * m::head_dim % 16; used > 0 && head == s.end_rank() * m::q_heads - 1)
    for (int c = used; c < 16; c++) s.attention[((kQBlocks - 1) * s.step.slots + t) * 16 + c] = 0;
}

// q_inverse, k_inverse: of every token, where norms span the projection, else null.
inline void attention_item(State& s, int layer, int kv_head, int chunk, const float* q_inverse, const float* k_inverse,
                           Local& local) {
  const m::Layer& l = m::layers[layer];
  const Step& step = s.step;
  const int rank = kv_head / m::kv_heads, local_kv = kv_head % m::kv_heads;
  const int begin = chunk * kChunk, end = std::min(begin + kChunk, step.start + step.count);
  float* keys = s.key_cache(layer, kv_head);
  float* values = s.value_cache(layer, kv_head);
  // Weights of head h begin at `dim` * h.
  constexpr int dim = m::qk_norm_over_projection ? m::head_dim : 0;
  const float* q_norm = m::qk_norm && m::qk_norm_weight ? s.whole<float>(l.q_norm) : nullptr;
  const float* k_norm = m::qk_norm && m::qk_norm_weight ? s.whole<float>(l.k_norm) : nullptr;
  if (k_norm) k_norm += kv_head * m::num_key_value_heads / kKvHeads * dim;
  alignas(64) float key[kDim];
  for (int p = std::max(begin, step.start); p < end; p++) {
    const int t = p - step.start;
    head_vector(s, rank, m::q_tiles, local_kv, t, {k_norm, k_inverse}, l.rope, 1.0f, key);
    for (int c = 0; c < m::head_dim; c++) {
      keys[(int64_t{p / 16} * kDim + c) * 16 + p % 16] = key[c];
      values[int64_t{p} * kDim + c] = qkv_at(s, rank, m::q_tiles + m::kv_tiles, local_kv * m::head_dim + c, t);
    }
  }
  for (int t = 0; t < step.count; t++) {
    const int position = step.start + t;
    const int from = std::max(begin, first_visible(position, l.sliding_window)), to = std::min(end, position + 1);
    for (int g = 0; g < kGroupHeads && from < to; g++) {
      const int q_head = local_kv * kGroupHeads + g;
      float* q = local.q.data();
      const float* weight = q_norm ? q_norm + (rank * m::q_heads + q_head) * dim : nullptr;
      head_vector(s, rank, 0, q_head, t, {weight, q_inverse}, l.rope, m::attention_scale, q);
      attend_chunk(keys, values, q, from, to, local.scores.data(), s.partial_of(t, rank * m::q_heads + q_head, chunk));
    }
  }
}

inline void attention_phase(State& s, int layer, int tid) {
  const Step& step = s.step;
  const int window = m::layers[layer].sliding_window;
  const int first = first_visible(step.start, window) / kChunk;
  const int last = static_cast<int>(ceil_div(step.start + step.count, kChunk));
  constexpr bool together = kSquares > 0;
  float q_inverse[kMaxTokens], k_inverse[kMaxTokens];
  for (int t = 0; together && t < step.count; t++) {
    q_inverse[t] = projection_inverse(s, 0, kHeads, m::q_heads, t);
    k_inverse[t] = projection_inverse(s, m::q_heads, m::num_key_value_heads, m::kv_heads, t);
  }
  const auto [kv_first, kv_end] = s.own(m::kv_heads, kKvHeads);
  const auto [lo, hi] = share(int64_t{kv_end - kv_first} * (last - first), tid, s.team.size());
  for (int64_t i = lo; i < hi; i++) {
    const int kv_head = kv_first + static_cast<int>(i / (last - first)), chunk = first + static_cast<int>(i % (last - first));
    attention_item(s, layer, kv_head, chunk, together ? q_inverse : nullptr, together ? k_inverse : nullptr, s.locals[tid]);
    // Whoever finishes a KV head's last item combines its heads.
    auto& done = s.heads_done[kv_head].done;
    if (done.fetch_add(1, std::memory_order_acq_rel) != last - first - 1) continue;
    done.store(0, std::memory_order_relaxed);
    const int rank = kv_head / m::kv_heads, q0 = rank * m::q_heads + kv_head % m::kv_heads * kGroupHeads;
    for (int t = 0; t < step.count; t++) {
      const int position = step.start + t;
      for (int g = 0; g < kGroupHeads; g++)
        combine_chunks(s, layer, q0 + g, t, first_visible(position, window) / kChunk, position / kChunk + 1);
    }
  }
}

}  // namespace mk
