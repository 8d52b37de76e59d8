// K and V of one chunk of the cache in registers. They are loaded while the QKV phase multiplies: loads return in
// order, so started later they would stand before the polls that wait for q.
#pragma once
#include "decode_block.cuh"

namespace mk {

struct Attention {
  int unit;              // of this SM, KV head major, or -1
  uint4 k[4];            // 8 positions x 128 dimensions: half of tile warp / 2 of the chunk
  uint2 v[kScoreTiles];  // 8 dimensions of every tile of the chunk
  // Tiles of this SM: those of the whole cache that are its split modulo the number of splits.
  __device__ __forceinline__ int count(const DecodeBlock& b) const {
    const int splits = 1 << b.log_splits;
    return (b.position / kTile - (unit & (splits - 1)) + splits) >> b.log_splits;
  }
};

// Chunk of kScoreTiles tiles from tile `first` of this SM on. Past L1: other warps wrote the newest positions.
__device__ __forceinline__ void load_tiles(const DecodeBlock& b, Attention& a, int first) {
  const int log_splits = b.log_splits, left = a.count(b) - first;
  const uint32_t stride = 2 * kTileBytes << log_splits;
  const uint8_t* cache = b.p.kv + kv_tile_offset(b.layer, a.unit >> log_splits, a.unit & ((1 << log_splits) - 1)) +
                         (int64_t)first * stride;
  const uint4* k = (const uint4*)(cache + b.warp / 2 * stride) + 128 * (b.warp % 2) + b.lane;
  const bool mine = b.warp / 2 < left;
#pragma unroll
  for (int i = 0; i < 4; i++) a.k[i] = mine ? __ldcg(k + 32 * i) : make_uint4(0, 0, 0, 0);
  const uint8_t* v = cache + kTileBytes + (32 * b.warp + b.lane) * 8;
#pragma unroll
  for (int i = 0; i < kScoreTiles; i++, v += stride) a.v[i] = i < left ? __ldcg((const uint2*)v) : make_uint2(0, 0);
}

}  // namespace mk
