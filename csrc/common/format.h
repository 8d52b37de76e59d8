// Storage formats and the size of a tile: the C++ side of mkpack/layout.py, which the generated header checks against.
#pragma once
#include <cstdint>

namespace mk {

enum class Fmt { f32, bf16, fp8, nvfp4 };

constexpr int kTileRows = 16;

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int64_t align_up(int64_t n, int64_t to) { return ceil_div(n, to) * to; }

// Bytes of one block of 16 rows x 16 columns, scales not counted.
constexpr int64_t block_bytes(Fmt f) {
  switch (f) {
    case Fmt::nvfp4: return 128;
    case Fmt::fp8: return 256;
    case Fmt::bf16: return 512;
    case Fmt::f32: return 1024;
  }
  return 0;
}

// NVFP4 tiles begin with their block scales: one e4m3 byte per row and block.
constexpr int64_t scale_bytes(Fmt f, int64_t blocks) { return f == Fmt::nvfp4 ? align_up(blocks * 16, 64) : 0; }
constexpr int64_t tile_bytes(Fmt f, int64_t blocks) { return scale_bytes(f, blocks) + blocks * block_bytes(f); }

}  // namespace mk
