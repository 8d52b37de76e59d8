// Matrix phases of attention: the QKV projection and the output projection.
#pragma once
#include "cpu/norm.h"

namespace mk {

// qkv[rank][tile][slot][16] = W * norm(x) (+ bias)
inline void qkv_phase(State& s, int layer, int tid) {
  const m::Layer& l = m::layers[layer];
  const int slots = s.step.slots;
  float* normed = s.locals[tid].normed.data();
  rms_norm(s.x.data(), s.at<float>(0, l.attn_norm), kHiddenBlocks, m::hidden_size, slots, normed);
  const auto [lo, hi] = share(int64_t{m::ranks} * kQkvTiles, tid, s.team.size());
  for (int64_t i = lo; i < hi; i++) {
    const int rank = static_cast<int>(i / kQkvTiles), tile = static_cast<int>(i % kQkvTiles);
    float* out = s.qkv.data() + i * slots * 16;
    constexpr int64_t size = tile_bytes(m::fmt_attention, kHiddenBlocks);
    tile_dot<m::fmt_attention>(slots, s.at<uint8_t>(rank, l.qkv) + tile * size, kHiddenBlocks, normed, out);
    const V scale = tile_scale<m::fmt_attention>(s.at<float>(rank, l.qkv_scale), tile);
    const V bias = m::qkv_bias ? load(s.at<float>(rank, l.qkv_bias) + tile * 16) : zero();
    for (int t = 0; t < slots; t++) store(out + t * 16, fma(load(out + t * 16), scale, bias));
  }
}

// Calls use(rank, tile, global tile) for this thread's share of the tiles of a matrix that is split along N.
template <class Use>
inline void for_split_tiles(int rank_tiles, int tiles, int tid, int threads, Use use) {
  const auto [lo, hi] = share(tiles, tid, threads);
  for (int64_t i = lo; i < hi; i++) use(static_cast<int>(i / rank_tiles), static_cast<int>(i % rank_tiles), static_cast<int>(i));
}

// x += W * attention (+ bias)
inline void output_phase(State& s, int layer, int tid) {
  const m::Layer& l = m::layers[layer];
  const int slots = s.step.slots;
  alignas(64) float out[kMaxSlots * 16];
  for_split_tiles(m::hidden_tiles, kHiddenBlocks, tid, s.team.size(), [&](int rank, int tile, int block) {
    constexpr int64_t size = tile_bytes(m::fmt_attention, kQBlocks);
    tile_dot<m::fmt_attention>(slots, s.at<uint8_t>(rank, l.o) + tile * size, kQBlocks, s.attention.data(), out);
    const V scale = tile_scale<m::fmt_attention>(s.at<float>(rank, l.o_scale), tile);
    const V bias = m::o_bias ? load(s.at<float>(0, l.o_bias) + block * 16) : zero();
    for (int t = 0; t < slots; t++) {
      float* x = s.x.data() + (block * slots + t) * 16;
      store(x, load(x) + fma(load(out + t * 16), scale, bias));
    }
  });
}

}  // namespace mk
