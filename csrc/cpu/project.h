// Matrix phases of attention: the QKV projection and the output projection.
#pragma once
#include "cpu/norm.h"

namespace mk {

// Calls use(rank, first tile, count, global first tile) for the runs of neighbouring tiles that are this thread's share
// of a matrix that is split along N, `rank_tiles` a rank.
template <class Use>
inline void for_split_runs(int rank_tiles, int tiles, int tid, int threads, Use use) {
  const auto [lo, hi] = share(tiles, tid, threads);
  for (int i = static_cast<int>(lo); i < hi;) {
    const int rank = i / rank_tiles, first = i % rank_tiles, count = std::min(rank_tiles - first, static_cast<int>(hi) - i);
    use(rank, first, count, i);
    i += count;
  }
}

// qkv[rank][tile][slot][16] = W * norm(x) (+ bias)
inline void qkv_phase(State& s, int layer, int tid) {
  const m::Layer& l = m::layers[layer];
  const int slots = s.step.slots;
  float* normed = s.locals[tid].normed.data();
  rms_norm(s.x.data(), s.at<float>(0, l.attn_norm), kHiddenBlocks, m::hidden_size, slots, normed);
  constexpr int64_t size = tile_bytes(m::fmt_attention, kHiddenBlocks);
  for_split_runs(kQkvTiles, m::ranks * kQkvTiles, tid, s.team.size(), [&](int rank, int first, int count, int at) {
    const uint8_t* w = s.at<uint8_t>(rank, l.qkv) + first * size;
    tile_run<m::fmt_attention>(slots, w, count, kHiddenBlocks, normed, [&](int i, const float* sums) {
      const V scale = tile_scale<m::fmt_attention>(s.at<float>(rank, l.qkv_scale), first + i);
      const V bias = m::qkv_bias ? load(s.at<float>(rank, l.qkv_bias) + (first + i) * 16) : zero();
      float* out = s.qkv.data() + int64_t{at + i} * slots * 16;
      for (int t = 0; t < slots; t++) store(out + t * 16, fma(load(sums + t * 16), scale, bias));
    });
  });
}

// x += W * attention (+ bias)
inline void output_phase(State& s, int layer, int tid) {
  const m::Layer& l = m::layers[layer];
  const int slots = s.step.slots;
  constexpr int64_t size = tile_bytes(m::fmt_attention, kQBlocks);
  for_split_runs(m::hidden_tiles, kHiddenBlocks, tid, s.team.size(), [&](int rank, int first, int count, int at) {
    const uint8_t* w = s.at<uint8_t>(rank, l.o) + first * size;
    tile_run<m::fmt_attention>(slots, w, count, kQBlocks, s.attention.data(), [&](int i, const float* sums) {
      const V scale = tile_scale<m::fmt_attention>(s.at<float>(rank, l.o_scale), first + i);
      const V bias = m::o_bias ? load(s.at<float>(0, l.o_bias) + (at + i) * 16) : zero();
      for (int t = 0; t < slots; t++) {
        float* x = s.x.data() + ((at + i) * slots + t) * 16;
        store(x, load(x) + fma(load(sums + t * 16), scale, bias));
      }
    });
  });
}

}  // namespace mk
