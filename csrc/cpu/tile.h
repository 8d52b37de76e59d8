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

// Calls use(column, stream, weights of that column) for the 16 columns of a block in S streams, `stride` bytes apart.
template <Fmt F, int S, class Use>
MK_INLINE void decode_block(const uint8_t* w, int64_t stride, Use use) {
  constexpr int vectors = static_cast<int>(block_bytes(F) / 64), columns = 16 / vectors;
#if defined(__AVX512F__)
  // Loading from the byte that holds a code costs no shift, and shifts are what limits this decoder. The last loads
  // reach 3 bytes past the tile, which layout.py leaves room for.
  constexpr bool by_offset = F == Fmt::nvfp4;
#else
  constexpr bool by_offset = false;
#endif
#pragma GCC unroll 16
  for (int v = 0; v < vectors; v++) {
    Bits codes[S];
#pragma GCC unroll 8
    for (int j = 0; j < columns; j++) {
#pragma GCC unroll 4
      for (int i = 0; i < S; i++) {
        if (by_offset ? j % 2 == 0 : j == 0) codes[i] = bload(w + i * stride + v * 64 + (by_offset ? j / 2 : 0));
        use(v * columns + j, i, decode<F>(codes[i], by_offset ? j % 2 : j));
      }
    }
  }
}

// Where S streams of kLanes rows lie: the parts of a tile, or one part of several tiles.
struct Streams {
  int64_t scales, weights, ahead;  // bytes from stream to stream, and how far ahead memory is asked for
  int out;                         // floats from stream to stream in the result
};

// One pass: G tokens, S streams. x is [block][LD tokens][16 columns]; out is [token][16 rows] of each stream.
template <Fmt F, int G, int LD, int S>
MK_INLINE void tile_pass(const uint8_t* scales, const uint8_t* w, int blocks, Streams at, const float* x, float* out) {
  constexpr int64_t step = block_bytes(F);
  // A full group's block sums fill the registers, so its row sums live in `out`.
  constexpr bool in_registers = G * S <= kGroup / 2;
  W rows[in_registers ? S : 1][in_registers ? G : 1];
  for (int i = 0; i < S; i++)
    for (int t = 0; t < G; t++) {
      if constexpr (in_registers) rows[i][t] = wbroadcast(0.0f);
      else wstore(out + t * 16 + i * at.out, wbroadcast(0.0f));
    }
  for (int b = 0; b < blocks; b++) {
    // The hardware's own prefetch stops at page boundaries.
    for (int i = 0; i < (at.weights < 64 ? 1 : S); i++)
      for (int64_t line = 0; line < step; line += 64)
        _mm_prefetch(reinterpret_cast<const char*>(w) + i * at.weights + at.ahead + line, _MM_HINT_T0);
    W sum[S][G];
    decode_block<F, S>(w, at.weights, [&](int k, int i, W weights) __attribute__((always_inline)) {
#pragma GCC unroll 16
      for (int t = 0; t < G; t++) {
        W xk = wbroadcast(x[t * 16 + k]);
        sum[i][t] = k == 0 ? wmul(weights, xk) : wfma(weights, xk, sum[i][t]);
      }
    });
#pragma GCC unroll 4
    for (int i = 0; i < S; i++) {
      W s;
      if constexpr (F == Fmt::nvfp4) s = e4m3_scales(scales + b * 16 + i * at.scales);
#pragma GCC unroll 16
      for (int t = 0; t < G; t++) {
        W row;
        if constexpr (in_registers) row = rows[i][t];
        else row = wload(out + t * 16 + i * at.out);
        if constexpr (F == Fmt::nvfp4) row = wfma(s, sum[i][t], row);
        else row = wadd(row, sum[i][t]);
        if constexpr (in_registers) rows[i][t] = row;
        else wstore(out + t * 16 + i * at.out, row);
      }
    }
    w += step;
    x += LD * 16;
  }
  if constexpr (in_registers)
    for (int i = 0; i < S; i++)
      for (int t = 0; t < G; t++) wstore(out + t * 16 + i * at.out, rows[i][t]);
}

constexpr int kParts = 16 / kLanes;

template <Fmt F, int LD>
__attribute__((noinline)) void tile_dot_ld(const uint8_t* tile, int blocks, const float* x, float* out) {
  constexpr int G = LD < kGroup ? LD : kGroup;
  // Few tokens leave a multiply-add chain waiting for itself, so both halves of a tile run side by side where they fit.
  constexpr int S = kParts * G <= kGroup ? kParts : 1;
  constexpr Streams at{kLanes, kLanes * 4, 4096, kLanes};
  const uint8_t* w = tile + scale_bytes(F, blocks);
  for (int t = 0; t < LD; t += G)
    for (int part = 0; part < kParts; part += S)
      tile_pass<F, G, LD, S>(tile + part * kLanes, w + part * kLanes * 4, blocks, at, x + t * 16, out + t * 16 + part * kLanes);
}

// Tiles that one token takes together: enough independent sums to hide the latency of a multiply-add.
constexpr int kTogether = 4;

// One token, kTogether tiles that follow each other; out is [tile][16 rows].
template <Fmt F>
__attribute__((noinline)) void tiles_dot_one(const uint8_t* tile, int blocks, const float* x, float* out) {
  const int64_t size = tile_bytes(F, blocks);
  const uint8_t* w = tile + scale_bytes(F, blocks);
  for (int part = 0; part < kParts; part++)
    tile_pass<F, 1, 1, kTogether>(tile + part * kLanes, w + part * kLanes * 4, blocks,
                                  {size, size, kTogether * size + 2048, 16}, x, out + part * kLanes);
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

// tile_dot for `count` tiles that follow each other: done(i, out) gets each one's result.
template <Fmt F, class Done>
MK_INLINE void tile_run(int ld, const uint8_t* tile, int count, int blocks, const float* x, Done done) {
  alignas(64) float out[16 * 16];
  const int64_t size = tile_bytes(F, blocks);
  int i = 0;
  for (; ld == 1 && i + kTogether <= count; i += kTogether) {
    tiles_dot_one<F>(tile + i * size, blocks, x, out);
    for (int j = 0; j < kTogether; j++) done(i + j, out + j * 16);
  }
  for (; i < count; i++) {
    tile_dot<F>(ld, tile + i * size, blocks, x, out);
    done(i, out);
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
    decode_block<F, 1>(w, 0, [&](int k, int, W weights) {
      wstore(values, wmul(weights, block_scale));
      out[b * 16 + k] = values[r - part] * scale[r];
    });
  }
}

}  // namespace mk
