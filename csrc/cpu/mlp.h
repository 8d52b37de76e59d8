// The feed-forward phases: router, gate/up with SwiGLU, down, and the projections around narrow experts. A dense layer is
// one expert that every token chose.
#pragma once
#include "cpu/carry.h"
#include "cpu/project.h"

namespace mk {

// Leaves norm(x) in this thread's scratch, for the router and for gate/up.
inline void mlp_norm(State& s, int layer, int tid) {
  rms_norm(s.x.data(), s.whole<float>(m::layers[layer].mlp_norm), m::norm_offset, kHiddenBlocks, m::hidden_size,
           s.step.slots, s.locals[tid].normed.data());
}

// Taken in double and rounded once: the float32 nearest to the true value, whatever the machine.
inline float exact_sigmoid(float x) { return static_cast<float>(1.0 / (1.0 + std::exp(-static_cast<double>(x)))); }

// router[tile][slot][16] = logits of 16 experts, or their sigmoids
inline void router_phase(State& s, int layer, int tid) {
  const int slots = s.step.slots;
  const auto [lo, hi] = share(ceil_div(kExperts, 16), tid, s.team.size());
  for (int64_t tile = lo; tile < hi; tile++) {
    constexpr int64_t size = tile_bytes(m::fmt_router, kHiddenBlocks);
    const uint8_t* w = s.whole<uint8_t>(m::layers[layer].router) + tile * size;
    float* out = s.router.data() + tile * slots * 16;
    tile_dot<m::fmt_router>(slots, w, kHiddenBlocks, s.locals[tid].normed.data(), out);
    for (int t = 0; t < slots; t++) {
      V v = load(out + t * 16);
      if (m::router_bias) v = v + load(s.whole<float>(m::layers[layer].router_bias) + tile * 16);
      store(out + t * 16, m::router_scale == 1.0f ? v : v * set1(m::router_scale));
      if (m::sigmoid_scores)
        for (int r = 0; r < 16; r++) out[t * 16 + r] = exact_sigmoid(out[t * 16 + r]);
    }
  }
}

// Softmax over all experts of a token's logits.
inline void softmax_scores(const State& s, int t, float* logit, float* p) {
  constexpr int tiles = static_cast<int>(ceil_div(kExperts, 16));
  V highest = set1(-INFINITY);
  for (int b = 0; b < tiles; b++) {
    V v = keep_lanes(load(s.router.data() + (b * s.step.slots + t) * 16), 0, std::min(kExperts - b * 16, 16), -INFINITY);
    store(logit + b * 16, v);
    highest = vmax(highest, v);
  }
  const V top = set1(hmax(highest));
  V sum = zero();
  for (int b = 0; b < tiles; b++) {
    V e = vexp(load(logit + b * 16) - top);
    store(p + b * 16, e);
    sum = sum + e;
  }
  const V total = set1(hsum(sum));
  for (int b = 0; b < tiles; b++) store(p + b * 16, load(p + b * 16) / total);
}

// The top_k experts of a token and their weights; ties to the lowest index. All in float32, one rounding an operation.
inline void choose_experts(const State& s, int layer, int t, int* experts, float* weights) {
  // Of softmax scores the logits decide: they are as ordered, and do not become equal by rounding.
  alignas(64) float choice[align_up(kExperts, 16)], score[align_up(kExperts, 16)];
  if constexpr (m::sigmoid_scores) {
    for (int e = 0; e < kExperts; e++) choice[e] = score[e] = s.router[(e / 16 * s.step.slots + t) * 16 + e % 16];
  } else {
    softmax_scores(s, t, choice, score);
  }
  if constexpr (m::choice_bias) {
    const float* bias = s.whole<float>(m::layers[layer].choice_bias);
    for (int e = 0; e < kExperts; e++) choice[e] = score[e] + bias[e];
  }
  float sum = 0;
  bool taken[kExperts] = {};
  for (int k = 0; k < m::top_k; k++) {
    // Every choice is another expert, whatever the logits: an infinite or NaN one may be all that is left.
    int best = -1;
    for (int e = 0; e < kExperts; e++)
      if (!taken[e] && (best < 0 || choice[e] > choice[best])) best = e;
    taken[best] = true;
    experts[k] = best;
    weights[k] = score[best];
    sum += weights[k];
  }
  for (int k = 0; k < m::top_k; k++) {
    if (m::norm_topk_prob) weights[k] /= sum + m::norm_topk_eps;
    weights[k] *= m::routed_scaling_factor;
  }
}

// Every thread makes the same list of active experts, ascending, each with its tokens, ascending.
inline void route(const State& s, int layer, Local& local) {
  int experts[kMaxTokens][std::max(m::top_k, 1)];
  float weights[kMaxTokens][std::max(m::top_k, 1)];
  int slot_of[kExperts];
  std::fill(slot_of, slot_of + kExperts, -1);
  for (int t = 0; t < s.step.count; t++) {
    choose_experts(s, layer, t, experts[t], weights[t]);
    for (int k = 0; k < m::top_k; k++) slot_of[experts[t][k]] = 0;
  }
  local.active.clear();
  for (int e = 0; e < kExperts; e++) {
    if (slot_of[e] < 0) continue;
    slot_of[e] = static_cast<int>(local.active.size());
    local.active.push_back(Active{e, 0, {}, {}});
  }
  for (int t = 0; t < s.step.count; t++)
    for (int k = 0; k < m::top_k; k++) {
      Active& a = local.active[static_cast<size_t>(slot_of[experts[t][k]])];
      a.token[a.count] = t;
      a.weight[a.count++] = weights[t][k];
    }
}

inline void route_dense(const State& s, Local& local) {
  local.active.assign(1, Active{0, s.step.count, {}, {}});
  for (int t = 0; t < s.step.count; t++) {
    local.active[0].token[t] = t;
    local.active[0].weight[t] = 1.0f;
  }
}

// silu(gate) * up, or the clamped kind where experts have that; a dense layer never does.
template <bool Clamped>
MK_INLINE V swiglu(V g, V u) {
  if constexpr (!Clamped) return g / (set1(1.0f) + vexp(zero() - g)) * u;
  g = vmin(g, set1(m::swiglu_limit));
  u = vmax(vmin(u, set1(m::swiglu_limit)), set1(-m::swiglu_limit)) + set1(m::swiglu_up_offset);
  return g * sigmoid(g * set1(m::swiglu_alpha)) * u;
}

// narrow[block][slot][16] = W * norm(x): the experts' input, not normed yet.
inline void pre_proj_phase(State& s, int layer, int tid) {
  const m::Layer& l = m::layers[layer];
  const int slots = s.step.slots;
  product<m::fmt_dense, kHiddenBlocks>(
      s, l.pre_proj, l.pre_proj_scale, m::moe_hidden_tiles, kNarrowBlocks, s.locals[tid].normed.data(), tid,
      [&](int, int, int at, const float* sums, V scale) {
        for (int t = 0; t < slots; t++) store(s.narrow.data() + (at * slots + t) * 16, load(sums + t * 16) * scale);
      });
}

// Leaves the normed input of narrow experts in this thread's scratch.
inline void pre_norm(State& s, int layer, int tid) {
  rms_norm(s.narrow.data(), s.whole<float>(m::layers[layer].pre_norm), m::norm_offset, kNarrowBlocks, m::moe_hidden_size,
           s.step.slots, s.locals[tid].normed.data());
}

// inner[active expert][block][its tokens][16] = swiglu(gate, up), of experts as it is carried. The 16 rows of a tile are the
// block of 16 columns that the down projection reads. Blocks: of the input, in `normed`. Experts: whether these are, and not a
// dense layer.
template <Fmt F, int Blocks, int Size, int RankTiles, bool Experts>
inline void gate_up_phase(State& s, int layer, int tid) {
  const m::Layer& l = m::layers[layer];
  Local& local = s.locals[tid];
  const int slots = s.step.slots;
  constexpr int tiles = static_cast<int>(ceil_div(Size, 16));
  constexpr int64_t size = tile_bytes(F, Blocks);
  alignas(64) float gate[kMaxSlots * 16];
  const auto [own_first, own_end] = s.own(RankTiles, tiles);
  const int64_t own = own_end - own_first;
  const auto [lo, hi] = share(static_cast<int64_t>(local.active.size()) * own, tid, s.team.size());
  for (int64_t at = lo; at < hi;) {
    // A run of blocks of one expert on one rank.
    const int which = static_cast<int>(at / own), block = own_first + static_cast<int>(at % own);
    const int rank = block / RankTiles, first = block % RankTiles;
    const int count = static_cast<int>(std::min<int64_t>({RankTiles - first, own_end - block, hi - at}));
    const Active& a = local.active[static_cast<size_t>(which)];
    const int n = round_tokens(a.count);
    const float* x = local.normed.data();
    if (a.count != s.step.count) {
      x = local.gathered.data();
      for (int b = 0; b < Blocks; b++)
        for (int j = 0; j < a.count; j++)
          store(local.gathered.data() + (b * n + j) * 16, load(local.normed.data() + (b * slots + a.token[j]) * 16));
    }
    const int64_t pair = 2 * (int64_t{a.expert} * RankTiles + first);
    const float* scales = s.at<float>(rank, l.gate_up_scale);
    float* inner = s.inner.data() + (int64_t{which} * kInnerBlocks * kMaxSlots + block * n) * 16;
    constexpr Fmt carried = Experts ? m::fmt_down_input : Fmt::f32;
    const float scale2 = carried == Fmt::nvfp4 ? s.whole<float>(l.down_input_scale)[a.expert] : 1.0f;
    int64_t sent = 0;  // where the run begins among the blocks that ranks with memory of their own send, expert by expert
    if constexpr (Experts && kSendsCarried)
      if (s.link) {
        sent = int64_t{block - own_first} * a.count;
        for (int before = 0; before < which; before++) sent += own * local.active[static_cast<size_t>(before)].count;
      }
    tile_run<F>(n, s.at<uint8_t>(rank, l.gate_up) + pair * size, 2 * count, Blocks, x, [&](int i, const float* sums) {
      const V scale = tile_scale<F>(scales, pair + i);
      float* out = inner + i / 2 * n * 16;
      for (int t = 0; t < n; t++) {
        V v = load(sums + t * 16) * scale;
        if (Experts && m::expert_bias) v = v + load(s.at<float>(rank, l.gate_up_bias) + (pair + i) * 16);
        if (i % 2 == 0) {
          store(gate + t * 16, v);
        } else {
          store(out + t * 16, swiglu<Experts && m::clamped_swiglu>(load(gate + t * 16), v));
          if constexpr (Experts && kSendsCarried) {
            if (s.link && t < a.count) {
              carry_into<carried>(out + t * 16, scale2, s.carried_of(s.rank), sent + int64_t{i / 2} * a.count + t);
              continue;
            }
          }
          carry<carried>(out + t * 16, scale2);
        }
      }
    });
    at += count;
  }
}

// x += sum over active experts, in ascending order, of weight * (W_down * inner). Expert by expert, so that each thread
// reads one contiguous run of every expert.
template <Fmt F, int Size, bool Experts>
inline void down_phase(State& s, int layer, int tid) {
  const m::Layer& l = m::layers[layer];
  Local& local = s.locals[tid];
  const int slots = s.step.slots;
  constexpr int blocks = static_cast<int>(ceil_div(Size, 16));
  constexpr int64_t size = tile_bytes(F, blocks);
  const std::pair<int, int> own = s.own_share(m::hidden_tiles, kHiddenBlocks, tid);
  const int mine = own.first, end = own.second;
  for (int i = 0; i < (end - mine) * slots; i++) store(local.down.data() + i * 16, zero());
  for (size_t which = 0; which < local.active.size(); which++) {
    const Active& a = local.active[which];
    const int n = round_tokens(a.count);
    const float* inner = s.inner.data() + static_cast<int64_t>(which) * kInnerBlocks * kMaxSlots * 16;
    for_split_runs(s, m::hidden_tiles, kHiddenBlocks, tid, [&](int rank, int first, int count, int block) {
      const int64_t tile = int64_t{a.expert} * m::hidden_tiles + first;
      const uint8_t* w = s.at<uint8_t>(rank, l.down) + tile * size;
      tile_run<F>(n, w, count, blocks, inner, [&](int i, const float* sums) {
        const V scale = tile_scale<F>(s.at<float>(rank, l.down_scale), tile + i);
        for (int j = 0; j < a.count; j++) {
          float* y = local.down.data() + ((block + i - mine) * slots + a.token[j]) * 16;
          V v = load(sums + j * 16) * scale;
          if (Experts && m::expert_bias) v = v + load(s.at<float>(rank, l.down_bias) + (tile + i) * 16);
          store(y, fma(v, set1(a.weight[j]), load(y)));
        }
      });
    });
  }
  for (int i = 0; i < (end - mine) * slots; i++)
    add_to_x(s, (mine * slots + i) * 16, load(local.down.data() + i * 16));
}

inline float* expert_out(const State& s, size_t which) {
  return s.expert_out.data() + static_cast<int64_t>(which) * kNarrowBlocks * kMaxSlots * 16;
}

// expert_out[active expert][block][its tokens][16] = W_down * inner, of narrow experts: their norm needs all channels.
template <Fmt F, int Size>
inline void narrow_down_phase(State& s, int layer, int tid) {
  const m::Layer& l = m::layers[layer];
  Local& local = s.locals[tid];
  constexpr int blocks = static_cast<int>(ceil_div(Size, 16));
  constexpr int64_t size = tile_bytes(F, blocks);
  for (size_t which = 0; which < local.active.size(); which++) {
    const Active& a = local.active[which];
    const int n = round_tokens(a.count);
    const float* inner = s.inner.data() + static_cast<int64_t>(which) * kInnerBlocks * kMaxSlots * 16;
    for_split_runs(s, m::moe_hidden_tiles, kNarrowBlocks, tid, [&](int rank, int first, int count, int block) {
      const int64_t tile = int64_t{a.expert} * m::moe_hidden_tiles + first;
      tile_run<F>(n, s.at<uint8_t>(rank, l.down) + tile * size, count, blocks, inner, [&](int i, const float* sums) {
        const V scale = tile_scale<F>(s.at<float>(rank, l.down_scale), tile + i);
        const V bias = m::expert_bias ? load(s.at<float>(rank, l.down_bias) + (tile + i) * 16) : zero();
        for (int j = 0; j < n; j++)
          store(expert_out(s, which) + ((block + i) * n + j) * 16, load(sums + j * 16) * scale + bias);
      });
    });
  }
}

// x += W * (sum over active experts, in ascending order, of weight * norm(expert_out * (1 + expert_norm))).
inline void post_proj_phase(State& s, int layer, int tid) {
  const m::Layer& l = m::layers[layer];
  Local& local = s.locals[tid];
  const int slots = s.step.slots;
  const float* weight = s.whole<float>(l.expert_norm);
  float* sum = local.normed.data();
  for (int i = 0; i < kNarrowBlocks * slots; i++) store(sum + i * 16, zero());
  for (size_t which = 0; which < local.active.size(); which++) {
    const Active& a = local.active[which];
    const int n = round_tokens(a.count);
    for (int j = 0; j < a.count; j++) {
      const float* y = expert_out(s, which) + j * 16;
      const float r = inverse_rms(y, weight, kNarrowBlocks, n * 16, m::moe_hidden_size, m::expert_norm_eps);
      for (int b = 0; b < kNarrowBlocks; b++) {
        float* to = sum + (b * slots + a.token[j]) * 16;
        const V normed = load(y + b * n * 16) * norm_weight(weight, 1.0f, b) * set1(r);
        store(to, fma(normed, set1(a.weight[j]), load(to)));
      }
    }
  }
  product<m::fmt_dense, kNarrowBlocks>(
      s, l.post_proj, l.post_proj_scale, m::hidden_tiles, kHiddenBlocks, sum, tid,
      [&](int, int, int at, const float* sums, V scale) {
        for (int t = 0; t < slots; t++) add_to_x(s, (at * slots + t) * 16, load(sums + t * 16) * scale);
      });
}

}  // namespace mk
