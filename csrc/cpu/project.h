// Matrix phases of attention: the QKV projection and the output projection.
#pragma once
#include "cpu/norm.h"

namespace mk {

// Calls use(rank, first tile, count, global first tile) for the runs of neighbouring tiles that are this thread's share
// of what the State computes of a matrix that is split along N, `rank_tiles` a rank.
template <class Use>
inline void for_split_runs(const State& s, int rank_tiles, int tiles, int tid, Use use) {
  const auto [lo, hi] = s.own_share(rank_tiles, tiles, tid);
  for (int i = lo; i < hi;) {
    const int rank = i / rank_tiles, first = i % rank_tiles, count = std::min(rank_tiles - first, hi - i);
    use(rank, first, count, i);
    i += count;
  }
}

// This thread's share of a product with all token slots. done(rank, tile of that rank, tile of all, sums, row scales) gets
// each tile's result.
template <Fmt F, int Blocks, class Done>
inline void product(State& s, uint64_t matrix, uint64_t scales, int rank_tiles, int tiles, const float* x, int tid, Done done) {
  constexpr int64_t size = tile_bytes(F, Blocks);
  for_split_runs(s, rank_tiles, tiles, tid, [&](int rank, int first, int count, int at) {
    const uint8_t* w = s.at<uint8_t>(rank, matrix) + first * size;
    tile_run<F>(s.step.slots, w, count, Blocks, x, [&](int i, const float* sums) {
      done(rank, first + i, at + i, sums, tile_scale<F>(s.at<float>(rank, scales), first + i));
    });
  });
}

// qkv[rank][tile][slot][16] = W * norm(x) (+ bias)
inline void qkv_phase(State& s, int layer, int tid) {
  const m::Layer& l = m::layers[layer];
  const int slots = s.step.slots;
  float* normed = s.locals[tid].normed.data();
  rms_norm(s.x.data(), s.whole<float>(l.attn_norm), m::norm_offset, kHiddenBlocks, m::hidden_size, slots, normed);
  product<m::fmt_attention, kHiddenBlocks>(
      s, l.qkv, l.qkv_scale, kQkvTiles, m::ranks * kQkvTiles, normed, tid,
      [&](int rank, int tile, int at, const float* sums, V scale) {
        const V bias = m::qkv_bias ? load(s.at<float>(rank, l.qkv_bias) + tile * 16) : zero();
        float* out = s.qkv_tile(at);
        for (int t = 0; t < slots; t++) store(out + t * 16, fma(load(sums + t * 16), scale, bias));
      });
}

// x += v, or what a residual phase will bring to x.
MK_INLINE void add_to_x(State& s, int at, V v) {
  if constexpr (m::sandwich) store(s.branch.data() + at, v);
  else store(s.x.data() + at, load(s.x.data() + at) + v);
}

// x += W * attention (+ bias)
inline void output_phase(State& s, int layer, int tid) {
  const m::Layer& l = m::layers[layer];
  const int slots = s.step.slots;
  product<m::fmt_attention, kQBlocks>(
      s, l.o, l.o_scale, m::hidden_tiles, kHiddenBlocks, s.attention.data(), tid,
      [&](int, int, int at, const float* sums, V scale) {
        const V bias = m::o_bias ? load(s.whole<float>(l.o_bias) + at * 16) : zero();
        for (int t = 0; t < slots; t++) add_to_x(s, (at * slots + t) * 16, fma(load(sums + t * 16), scale, bias));
      });
}

}  // namespace mk
