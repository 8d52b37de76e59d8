// Needs no GPU: every layout of layout.cuh is a bijection onto its bytes, and the bit places of the NVFP4 codes are
// those that the kernel's unpacking expects.
//   nvcc -std=c++20 -I csrc -I csrc/cuda -I tests/bench/ladder -o layout_check tests/bench/ladder/layout_check.cu &&
//   ./layout_check
#include <cmath>
#include <cstdio>
#include <cstring>
#include <functional>
#include <vector>
#include "layout.cuh"

using namespace mk;

static int failures = 0;

// offset(i), i < count, must hit every multiple of `unit` below `bytes` exactly `times` times.
static void covers(const char* name, int64_t bytes, int unit, int times, int64_t count,
                   const std::function<int64_t(int64_t)>& offset) {
  std::vector<uint8_t> hits(bytes / unit, 0);
  bool ok = count == bytes / unit * times;
  for (int64_t i = 0; i < count && ok; i++) {
    int64_t at = offset(i);
    ok = at >= 0 && at < bytes && at % unit == 0 && ++hits[at / unit] <= times;
  }
  printf("%-28s %s\n", name, ok ? "ok" : "WRONG");
  failures += !ok;
}

static float bf16(uint32_t bits) {
  uint32_t u = bits << 16;
  float f;
  memcpy(&f, &u, 4);
  return f;
}
static float e2m1(uint32_t c) {
  const float t[8] = {0, .5f, 1, 1.5f, 2, 3, 4, 6};
  return c & 8 ? -t[c & 7] : t[c & 7];
}

int main() {
  for (bool fp8 : {false, true}) {
    const int columns = page_columns(fp8), width = fp8 ? 1 : 2;
    covers(fp8 ? "fp8 page" : "bf16 page", kPageBytes, width, 1, kPageRows * columns,
           [=](int64_t i) { return page_offset((int)(i / columns), (int)(i % columns), fp8); });
    // Whole pages only, and a last page of one share.
    for (int K : {2 * columns, 2 * columns + share_columns(fp8)})
      covers(fp8 ? "fp8 matrix" : "bf16 matrix", matrix_bytes(24, K, fp8), width, 1, 24 * K,
             [=](int64_t i) { return matrix_offset((int)(i / K), (int)(i % K), K, fp8); });
  }
  for (int K : {kHidden, kMoeIntermediate, 2880}) {  // 2880: a page of 32 chunks and one of 13
    const int codes = 8 * K / 4 * 4;  // bytes of words, each of rows g and g + 8 and of four columns
    covers("NVFP4 tile", tile_bytes(K), 1, 1, codes + K, [=](int64_t i) -> int64_t {
      if (i >= codes) return tile_scale_offset((int)(i - codes) / (K / 16), (int)(i - codes) % (K / 16) * 16, K);
      const int word = (int)i / 4;
      return tile_word_offset(word / (K / 4), word % (K / 4) * 4) + i % 4;
    });
    bool together = true;
    for (int row = 0; row < 16; row++)
      for (int column = 0; column < K; column++)
        together = together && tile_word_offset(row, column) == tile_word_offset(row % 8, column / 4 * 4) &&
                   tile_scale_offset(row, column, K) == tile_scale_offset(row, column / 16 * 16, K);
    printf("%-28s %s\n", "codes of an NVFP4 word", together ? "ok" : "WRONG");
    failures += !together;
  }
  covers("K tile", kTileBytes, 2, 1, kTile * kHeadDim,
         [](int64_t i) { return k_offset((int)(i / kHeadDim), (int)(i % kHeadDim)); });
  covers("V tile", kTileBytes, 2, 1, kTile * kHeadDim,
         [](int64_t i) { return v_offset((int)(i / kHeadDim), (int)(i % kHeadDim)); });
  // The same masks, shifts and select as unpack_nvfp4 in mma.cuh, on the host, for every code in every place of a word.
  bool ok = true;
  for (int r : {3, 11})
    for (int column = 0; column < 4; column++)
      for (uint32_t code = 0; code < 16; code++) {
        const uint32_t mask = 0x81C081C0u, select = 0x800E800Eu;
        const uint32_t w = tile_code_bits(r, column, code);
        const uint32_t v = (select & (w << 1)) | (~select & (w >> 3));
        const uint32_t a[4] = {w & mask, (w << 3) & mask, v & mask, (v << 5) & mask};
        for (int place = 0; place < 8; place++) {  // register (place / 2), half-word (place % 2)
          const bool mine = place / 2 == r / 8 + 2 * (column / 2) && place % 2 == column % 2;
          const float got = bf16(a[place / 2] >> 16 * (place % 2) & 0xFFFF) * 0x1p126f;
          ok = ok && got == (mine ? e2m1(code) : 0.f);
        }
      }
  printf("%-28s %s\n", "NVFP4 bits", ok ? "ok" : "WRONG");
  failures += !ok;
  // Work is spread without gaps and evenly.
  for (int items : {kQkvUnits, kHeadUnits, kTokenPairUnits}) {
    bool even = first_item(items, 0) == 0 && first_item(items, kGrid) == items;
    for (int sm = 0; sm < kGrid; sm++) {
      const int n = first_item(items, sm + 1) - first_item(items, sm);
      even = even && n >= items / kGrid && n <= items / kGrid + 1;
    }
    printf("%-28s %s\n", "spread of units", even ? "ok" : "WRONG");
    failures += !even;
  }
  return failures != 0;
}
