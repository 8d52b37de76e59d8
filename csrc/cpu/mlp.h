// The feed-forward phases: router, gate/up with SwiGLU, and down. A dense layer is one expert that every token chose.
#pragma once
#include "cpu/project.h"

namespace mk {

// Leaves norm(x) in this thread's scratch, for the router and for gate/up.
inline void mlp_norm(State& s, int layer, int tid) {
  rms_norm(s.x.data(), s.at<float>(0, m::layers[layer].mlp_norm), kHiddenBlocks, m::hidden_size, s.step.slots,
           s.locals[tid].normed.data());
}

// router[tile][slot][16] = logits of 16 experts
inline void router_phase(State& s, int layer, int tid) {
  const int slots = s.step.slots;
  const auto [lo, hi] = share(ceil_div(kExperts, 16), tid, s.team.size());
  for (int64_t tile = lo; tile < hi; tile++) {
    constexpr int64_t size = tile_bytes(m::fmt_router, kHiddenBlocks);
    const uint8_t* w = s.at<uint8_t>(0, m::layers[layer].router) + tile * size;
    tile_dot<m::fmt_router>(slots, w, kHiddenBlocks, s.locals[tid].normed.data(), s.router.data() + tile * slots * 16);
  }
}

// The top_k experts of a token and their weights: softmax over all experts, ties to the lowest index.
inline void choose_experts(const State& s, int t, int* experts, float* weights) {
  alignas(64) float logit[align_up(kExperts, 16)], p[align_up(kExperts, 16)];
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
  const float total = hsum(sum);
  float chosen = 0;
  bool taken[kExperts] = {};
  for (int k = 0; k < m::top_k; k++) {
    // Every choice is another expert, whatever the logits: an infinite or NaN one may be all that is left.
    int best = -1;
    for (int e = 0; e < kExperts; e++)
      if (!taken[e] && (best < 0 || logit[e] > logit[best])) best = e;
    taken[best] = true;
    experts[k] = best;
    weights[k] = p[best] / total;
    chosen += weights[k];
  }
  if (m::norm_topk_prob)
    for (int k = 0; k < m::top_k; k++) weights[k] /= chosen;
}

// Every thread makes the same list of active experts, ascending, each with its tokens, ascending.
inline void route(const State& s, Local& local) {
  int experts[kMaxTokens][std::max(m::top_k, 1)];
  float weights[kMaxTokens][std::max(m::top_k, 1)];
  int slot_of[kExperts];
  std::fill(slot_of, slot_of + kExperts, -1);
  for (int t = 0; t < s.step.count; t++) {
    choose_experts(s, t, experts[t], weights[t]);
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

MK_INLINE V silu(V g) { return g / (set1(1.0f) + vexp(zero() - g)); }

// inner[active expert][block][its tokens][16] = silu(gate) * up. The 16 rows of a tile are the block of 16 columns that
// the down projection reads.
template <Fmt F, int Size, int RankTiles>
inline void gate_up_phase(State& s, int layer, int tid) {
  const m::Layer& l = m::layers[layer];
  Local& local = s.locals[tid];
  const int slots = s.step.slots;
  constexpr int tiles = static_cast<int>(ceil_div(Size, 16));
  constexpr int64_t size = tile_bytes(F, kHiddenBlocks);
  alignas(64) float gate[kMaxSlots * 16];
  const auto [lo, hi] = share(static_cast<int64_t>(local.active.size()) * tiles, tid, s.team.size());
  for (int64_t at = lo; at < hi;) {
    // A run of blocks of one expert on one rank.
    const int which = static_cast<int>(at / tiles), block = static_cast<int>(at % tiles);
    const int rank = block / RankTiles, first = block % RankTiles;
    const int count = static_cast<int>(std::min<int64_t>({RankTiles - first, tiles - block, hi - at}));
    const Active& a = local.active[static_cast<size_t>(which)];
    const int n = round_tokens(a.count);
    const float* x = local.normed.data();
    if (a.count != s.step.count) {
      x = local.gathered.data();
      for (int b = 0; b < kHiddenBlocks; b++)
        for (int j = 0; j < a.count; j++)
          store(local.gathered.data() + (b * n + j) * 16, load(local.normed.data() + (b * slots + a.token[j]) * 16));
    }
    const int64_t pair = 2 * (int64_t{a.expert} * RankTiles + first);
    const float* scales = s.at<float>(rank, l.gate_up_scale);
    float* inner = s.inner.data() + (int64_t{which} * kInnerBlocks * kMaxSlots + block * n) * 16;
    tile_run<F>(n, s.at<uint8_t>(rank, l.gate_up) + pair * size, 2 * count, kHiddenBlocks, x, [&](int i, const float* sums) {
      const V scale = tile_scale<F>(scales, pair + i);
      float* out = inner + i / 2 * n * 16;
      for (int t = 0; t < n; t++) {
        const V v = load(sums + t * 16) * scale;
        if (i % 2 == 0) store(gate + t * 16, v);
        else store(out + t * 16, silu(load(gate + t * 16)) * v);
      }
    });
    at += count;
  }
}

// x += sum over active experts, in ascending order, of weight * (W_down * inner). Expert by expert, so that each thread
// reads one contiguous run of every expert.
template <Fmt F, int Size>
inline void down_phase(State& s, int layer, int tid) {
  const m::Layer& l = m::layers[layer];
  Local& local = s.locals[tid];
  const int slots = s.step.slots;
  constexpr int blocks = static_cast<int>(ceil_div(Size, 16));
  constexpr int64_t size = tile_bytes(F, blocks);
  const auto [lo, hi] = share(kHiddenBlocks, tid, s.team.size());
  const int mine = static_cast<int>(lo);
  for (int64_t i = 0; i < (hi - lo) * slots; i++) store(local.down.data() + i * 16, zero());
  for (size_t which = 0; which < local.active.size(); which++) {
    const Active& a = local.active[which];
    const int n = round_tokens(a.count);
    const float* inner = s.inner.data() + static_cast<int64_t>(which) * kInnerBlocks * kMaxSlots * 16;
    for_split_runs(m::hidden_tiles, kHiddenBlocks, tid, s.team.size(), [&](int rank, int first, int count, int block) {
      const int64_t tile = int64_t{a.expert} * m::hidden_tiles + first;
      const uint8_t* w = s.at<uint8_t>(rank, l.down) + tile * size;
      tile_run<F>(n, w, count, blocks, inner, [&](int i, const float* sums) {
        const V scale = tile_scale<F>(s.at<float>(rank, l.down_scale), tile + i);
        for (int j = 0; j < a.count; j++) {
          float* y = local.down.data() + ((block + i - mine) * slots + a.token[j]) * 16;
          store(y, fma(load(sums + j * 16) * scale, set1(a.weight[j]), load(y)));
        }
      });
    });
  }
  float* x = s.x.data() + int64_t{mine} * slots * 16;
  for (int64_t i = 0; i < (hi - lo) * slots; i++) store(x + i * 16, load(x + i * 16) + load(local.down.data() + i * 16));
}

}  // namespace mk
