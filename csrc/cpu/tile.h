// Products of one packed tile (16 rows) with up to 16 tokens, weights decoded in registers. Tile bytes: mkpack/pack.py.
//
// Lanes are rows, so nothing is summed across lanes. The order of summation (DESIGN.md, "Numbers") does not depend on the
// number of tokens: a token's result is the same in every group size.
#pragma once
#include <immintrin.h>

#include <cstring>

#include "common/format.h"
#include "cpu/simd.h"

namespace mk {

// The widest register the build has. A tile is worked on in 16 / kLanes parts.
#if defined(__AVX512F__)
using W = __m512;
constexpr int kLanes = 16;
constexpr int kGroup = 16;  // tokens per pass: one accumulator each, of 32 registers
MK_INLINE W wbroadcast(float x) { return _mm512_set1_ps(x); }
MK_INLINE W wfma(W a, W b, W c) { return _mm512_fmadd_ps(a, b, c); }
MK_INLINE W wmul(W a, W b) { return _mm512_mul_ps(a, b); }
MK_INLINE W wadd(W a, W b) { return _mm512_add_ps(a, b); }
MK_INLINE W wload(const float* p) { return _mm512_loadu_ps(p); }
MK_INLINE void wstore(float* p, W a) { _mm512_storeu_ps(p, a); }
using Bits = __m512i;
MK_INLINE Bits bload(const void* p) { return _mm512_loadu_si512(p); }
MK_INLINE Bits bset(uint32_t x) { return _mm512_set1_epi32(static_cast<int>(x)); }
MK_INLINE Bits band(Bits a, Bits b) { return _mm512_and_si512(a, b); }
MK_INLINE Bits bor(Bits a, Bits b) { return _mm512_or_si512(a, b); }
MK_INLINE Bits shl(Bits a, int n) { return _mm512_slli_epi32(a, static_cast<unsigned>(n)); }
MK_INLINE Bits shr(Bits a, int n) { return _mm512_srli_epi32(a, static_cast<unsigned>(n)); }
MK_INLINE W as_float(Bits a) { return _mm512_castsi512_ps(a); }
MK_INLINE Bits widen_bytes(const uint8_t* p) { return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
#else
using W = __m256;
constexpr int kLanes = 8;
constexpr int kGroup = 8;
MK_INLINE W wbroadcast(float x) { return _mm256_set1_ps(x); }
MK_INLINE W wfma(W a, W b, W c) { return _mm256_fmadd_ps(a, b, c); }
MK_INLINE W wmul(W a, W b) { return _mm256_mul_ps(a, b); }
MK_INLINE W wadd(W a, W b) { return _mm256_add_ps(a, b); }
MK_INLINE W wload(const float* p) { return _mm256_loadu_ps(p); }
MK_INLINE void wstore(float* p, W a) { _mm256_storeu_ps(p, a); }
using Bits = __m256i;
MK_INLINE Bits bload(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
MK_INLINE Bits bset(uint32_t x) { return _mm256_set1_epi32(static_cast<int>(x)); }
MK_INLINE Bits band(Bits a, Bits b) { return _mm256_and_si256(a, b); }
MK_INLINE Bits bor(Bits a, Bits b) { return _mm256_or_si256(a, b); }
MK_INLINE Bits shl(Bits a, int n) { return _mm256_slli_epi32(a, n); }
MK_INLINE Bits shr(Bits a, int n) { return _mm256_srli_epi32(a, n); }
MK_INLINE W as_float(Bits a) { return _mm256_castsi256_ps(a); }
MK_INLINE Bits widen_bytes(const uint8_t* p) { return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))); }
#endif

// e4m3 bytes shifted so that their exponent and mantissa sit in float32's fields are the value times 2^-120, subnormals
// included; scales are never negative.
MK_INLINE W e4m3_scales(const uint8_t* p) { return wmul(as_float(shl(widen_bytes(p), 20)), wbroadcast(0x1p120f)); }

MK_INLINE W e2m1(Bits codes, int nibble) {
#if defined(__AVX512F__)
  // The permute reads the low four bits of a lane only, so a shift is all the unpacking there is.
  const W values = _mm512_setr_ps(0, .5f, 1, 1.5f, 2, 3, 4, 6, -0.f, -.5f, -1, -1.5f, -2, -3, -4, -6);
  return _mm512_permutexvar_ps(nibble ? shr(codes, 4 * nibble) : codes, values);
#else
  const W magnitudes = _mm256_setr_ps(0, .5f, 1, 1.5f, 2, 3, 4, 6);
  W m = _mm256_permutevar8x32_ps(magnitudes, nibble ? shr(codes, 4 * nibble) : codes);
  return as_float(bor(band(shl(codes, 28 - 4 * nibble), bset(0x80000000u)), _mm256_castps_si256(m)));
#endif
}

// Column `j` of the columns that share a vector of 32-bit lanes.
template <Fmt F>
MK_INLINE W decode(Bits codes, int j) {
  if constexpr (F == Fmt::nvfp4) return e2m1(codes, j);
  if constexpr (F == Fmt::fp8) {
    Bits top = shl(codes, 24 - 8 * j);
    Bits bits = bor(band(top, bset(0x80000000u)), band(shr(top, 4), bset(0x07f00000u)));
    return wmul(as_float(bits), wbroadcast(0x1p120f));
  }
  if constexpr (F == Fmt::bf16) return as_float(j == 0 ? shl(codes, 16) : band(codes, bset(0xffff0000u)));
  return as_float(codes);
}

// Calls use(column, part, weights of that column) for the 16 columns of a block and P parts of its lanes, from `w` on.
template <Fmt F, int P, class Use>
MK_INLINE void decode_block(const uint8_t* w, Use use) {
  constexpr int vectors = static_cast<int>(block_bytes(F) / 64), columns = 16 / vectors;
#pragma GCC unroll 16
  for (int v = 0; v < vectors; v++) {
    Bits codes[P];
    for (int p = 0; p < P; p++) codes[p] = bload(w + v * 64 + p * kLanes * 4);
#pragma GCC unroll 8
    for (int j = 0; j < columns; j++) {
#pragma GCC unroll 2
      for (int p = 0; p < P; p++) use(v * columns + j, p, decode<F>(codes[p], j));
    }
  }
}

// One pass: G tokens and P parts of a tile. x is [block][LD tokens][16 columns]; out is [token][16 rows].
template <Fmt F, int G, int LD, int P>
MK_INLINE void tile_pass(const uint8_t* tile, int blocks, const float* x, float* out, int part) {
  const uint8_t* scales = tile + part * kLanes;
  const uint8_t* w = tile + scale_bytes(F, blocks) + part * kLanes * 4;
  out += part * kLanes;
  constexpr int64_t step = block_bytes(F);
  // A full group's block sums fill the registers, so its row sums live in `out`.
  constexpr bool in_registers = G * P <= kGroup / 2;
  W rows[in_registers ? P : 1][in_registers ? G : 1];
  for (int p = 0; p < P; p++)
    for (int t = 0; t < G; t++) {
      if constexpr (in_registers) rows[p][t] = wbroadcast(0.0f);
      else wstore(out + t * 16 + p * kLanes, wbroadcast(0.0f));
    }
  for (int b = 0; b < blocks; b++) {
    // The hardware's own prefetch stops at page boundaries; a page ahead is far enough for memory.
    for (int64_t line = 0; line < step; line += 64) _mm_prefetch(reinterpret_cast<const char*>(w) + 4096 + line, _MM_HINT_T0);
    W sum[P][G];
    decode_block<F, P>(w, [&](int k, int p, W weights) __attribute__((always_inline)) {
#pragma GCC unroll 16
      for (int t = 0; t < G; t++) {
        W xk = wbroadcast(x[t * 16 + k]);
        sum[p][t] = k == 0 ? wmul(weights, xk) : wfma(weights, xk, sum[p][t]);
      }
    });
#pragma GCC unroll 2
    for (int p = 0; p < P; p++) {
      W s;
      if constexpr (F == Fmt::nvfp4) s = e4m3_scales(scales + b * 16 + p * kLanes);
#pragma GCC unroll 16
      for (int t = 0; t < G; t++) {
        W row;
        if constexpr (in_registers) row = rows[p][t];
        else row = wload(out + t * 16 + p * kLanes);
        if constexpr (F == Fmt::nvfp4) row = wfma(s, sum[p][t], row);
        else row = wadd(row, sum[p][t]);
        if constexpr (in_registers) rows[p][t] = row;
        else wstore(out + t * 16 + p * kLanes, row);
      }
    }
    w += step;
    x += LD * 16;
  }
  if constexpr (in_registers)
    for (int p = 0; p < P; p++)
      for (int t = 0; t < G; t++) wstore(out + t * 16 + p * kLanes, rows[p][t]);
}

template <Fmt F, int LD>
__attribute__((noinline)) void tile_dot_ld(const uint8_t* tile, int blocks, const float* x, float* out) {
  constexpr int G = LD < kGroup ? LD : kGroup;
  // Few tokens leave a multiply-add chain waiting for itself, so both halves of a tile run side by side where they fit.
  constexpr int parts = 16 / kLanes, P = parts * G <= kGroup ? parts : 1;
  for (int t = 0; t < LD; t += G)
    for (int part = 0; part < parts; part += P) tile_pass<F, G, LD, P>(tile, blocks, x + t * 16, out + t * 16, part);
}

// Token slots of activations: buffers are [block][ld][16], ld being the token count rounded up to one of these.
constexpr int round_tokens(int n) { return n <= 1 ? 1 : n <= 2 ? 2 : n <= 4 ? 4 : n <= 8 ? 8 : 16; }

// out[t][row] = sum over columns of tile[row][column] * x[t][column], unscaled by the `.scale` section.
template <Fmt F>
MK_INLINE void tile_dot(int ld, const uint8_t* tile, int blocks, const float* x, float* out) {
  switch (ld) {
    case 1: return tile_dot_ld<F, 1>(tile, blocks, x, out);
    case 2: return tile_dot_ld<F, 2>(tile, blocks, x, out);
    case 4: return tile_dot_ld<F, 4>(tile, blocks, x, out);
    case 8: return tile_dot_ld<F, 8>(tile, blocks, x, out);
    default: return tile_dot_ld<F, 16>(tile, blocks, x, out);
  }
}

// The row scales of a tile; `scales` is the matrix's `.scale` section.
template <Fmt F>
MK_INLINE V tile_scale(const float* scales, int64_t tile) {
  if constexpr (F == Fmt::nvfp4) return set1(scales[tile]);
  else if constexpr (F == Fmt::fp8) return load(scales + tile * kTileRows);
  else return set1(1.0f);
}

// One row of a matrix as float32, for the embedding: out receives blocks * 16 values.
template <Fmt F>
void decode_row(const uint8_t* matrix, const float* scales, int64_t row, int blocks, float* out) {
  const int64_t t = row / kTileRows, r = row % kTileRows;
  const uint8_t* tile = matrix + t * tile_bytes(F, blocks);
  const uint8_t* body = tile + scale_bytes(F, blocks);
  alignas(64) float scale[16], values[16];
  store(scale, tile_scale<F>(scales, t));
  for (int b = 0; b < blocks; b++) {
    const int part = static_cast<int>(r) / kLanes * kLanes;
    const uint8_t* w = body + b * block_bytes(F) + part * 4;
    W block_scale = wbroadcast(1.0f);
    if constexpr (F == Fmt::nvfp4) block_scale = e4m3_scales(tile + b * 16 + part);
    decode_block<F, 1>(w, [&](int k, int, W weights) {
      wstore(values, wmul(weights, block_scale));
      out[b * 16 + k] = values[r - part] * scale[r];
    });
  }
}

}  // namespace mk
