// Weights in registers into tensor-core products: bf16 as they are, NVFP4 dequantised on the way.
#pragma once
#include "ptx.cuh"

namespace mk {

// Four bf16 in the exponent range of a subnormal e2m1 code: value = code * 2^-126. bf16 products keep subnormals, so
// 0.5, the only code whose image is subnormal, survives.
__device__ __forceinline__ void unpack_nvfp4(uint32_t w, uint32_t (&a)[4]) {
  constexpr uint32_t kMask = 0x81C081C0u;  // sign and "eem" of both half-words
  a[0] = w & kMask;
  a[1] = (w << 3) & kMask;
  // The other two codes: one select puts the third at home and the fourth where a single shift brings it home.
  uint32_t v = bit_select(0x800E800Eu, w << 1, w >> 3);
  a[2] = v & kMask;
  a[3] = (v << 5) & kMask;
}
constexpr float kNvfp4Scale = 256.f;  // 2^126 of the codes less the 2^118 that the scales carry

// Block scales of rows g (low byte) and g + 8 -> {s, s} pairs times 2^118.
__device__ __forceinline__ void unpack_scales(uint32_t bytes, uint32_t& low_row, uint32_t& high_row) {
  uint32_t p = __byte_perm(bytes, 0, 0x4140) << 4;          // e4m3 bits read as bf16: s * 2^-120, exact, subnormals too
  p = mul_bf16x2(mul_bf16x2(p, 0x7B807B80u), 0x7A807A80u);  // * 2^120 * 2^118: one factor of 2^238 does not exist
  low_row = __byte_perm(p, 0, 0x1010);
  high_row = __byte_perm(p, 0, 0x3232);
}

// One chunk of an NVFP4 tile: 16 rows x 64 columns. Rows are the MMA's rows, tokens its columns; xa and xb are this
// lane's 16 columns of token g.
__device__ __forceinline__ void mma_nvfp4_chunk(float (&acc)[4], uint4 codes, uint32_t scales, uint4 xa, uint4 xb) {
  uint32_t sg, sh, a[4];
  unpack_scales(scales, sg, sh);
  const uint32_t q[4] = {codes.x, codes.y, codes.z, codes.w};
  const uint32_t x[8] = {xa.x, xa.y, xa.z, xa.w, xb.x, xb.y, xb.z, xb.w};
#pragma unroll
  for (int m = 0; m < 4; m++) {
    unpack_nvfp4(q[m], a);
    mma_bf16(acc, mul_bf16x2(a[0], sg), mul_bf16x2(a[1], sh), mul_bf16x2(a[2], sg), mul_bf16x2(a[3], sh), x[2 * m],
             x[2 * m + 1]);
  }
}

// The same for one token alone and kChunks = 1 or 2 neighbouring chunks, with fewer instructions: every block of 16
// weights has a column of the MMA to itself, block t of the first chunk column t, of the second column 4 + t, and
// scales multiply sums instead of weights. A lane's x of a chunk is therefore the token's columns 16 t .. + 15 where g
// is the column of its block, else zeros. It is times 2^64 (kAloneInput), or products would be subnormal. scales: bytes
// {row g, row g + 8} of the blocks of columns 2 t and 2 t + 1. Adds rows g and g + 8 to sum, of these two blocks only.
template <int kChunks>
__device__ __forceinline__ void mma_nvfp4_alone(float (&sum)[2], const uint4 (&codes)[kChunks], uint32_t scales,
                                                const uint4 (&x)[2 * kChunks]) {
  float acc[kChunks][4] = {};
#pragma unroll
  for (int m = 0; m < 4; m++)
#pragma unroll
    for (int c = 0; c < kChunks; c++) {
      const uint32_t q[4] = {codes[c].x, codes[c].y, codes[c].z, codes[c].w};
      const uint4 v = x[2 * c + m / 2];
      uint32_t a[4];
      unpack_nvfp4(q[m], a);
      mma_bf16(acc[c], a[0], a[1], a[2], a[3], m % 2 ? v.z : v.x, m % 2 ? v.w : v.y);
    }
  // e4m3 bits read as float32 are the scale times 2^-120, subnormals too.
  constexpr uint32_t kBits = 0x07F00000u;
  constexpr float kUnit = 0x1p120f;
  const float low0 = __uint_as_float(scales << 20 & kBits) * kUnit;
  const float high0 = __uint_as_float(scales << 12 & kBits) * kUnit;
  const float low1 = __uint_as_float(scales << 4 & kBits) * kUnit;
  const float high1 = __uint_as_float(scales >> 4 & kBits) * kUnit;
  if constexpr (kChunks == 2)
#pragma unroll
    for (int i = 0; i < 4; i++) acc[0][i] += acc[1][i];
  sum[0] += acc[0][0] * low0 + acc[0][1] * low1;
  sum[1] += acc[0][2] * high0 + acc[0][3] * high1;
}
constexpr float kAloneInput = 0x1p64f, kAloneSum = 0x1p62f;  // their product is the 2^126 that unpack_nvfp4 leaves out
// The sums of a row's four lanes: lanes of even t get row g, those of odd t row g + 8.
__device__ __forceinline__ float sum_alone(const float (&sum)[2], int t) {
  const float mine = t % 2 ? sum[1] : sum[0];
  float v = mine + __shfl_xor_sync(~0u, t % 2 ? sum[0] : sum[1], 1);
  return v + __shfl_xor_sync(~0u, v, 2);
}

// Four e4m3 codes to bf16, exactly: bytes 0 and 2 in `even`, 1 and 3 in `odd`. Their bits read as bf16 are the value times
// 2^-120, subnormals too.
__device__ __forceinline__ void unpack_fp8(uint32_t w, uint32_t& even, uint32_t& odd) {
  const uint32_t v = w << 8;
  even = mul_bf16x2((v & 0x80008000u) | (v >> 4 & 0x07F007F0u), 0x7B807B80u);
  odd = mul_bf16x2((w & 0x80008000u) | (w >> 4 & 0x07F007F0u), 0x7B807B80u);
}

// One warp's 8 rows x 64 columns of an fp8 page (half its share), as below.
__device__ __forceinline__ void mma_fp8_run(float (&acc)[2][4], uint4 w, uint4 xa, uint4 xb) {
  uint32_t even[2], odd[2];
  unpack_fp8(w.x, even[0], odd[0]);
  unpack_fp8(w.y, even[1], odd[1]);
  mma_bf16(acc[0], xa.x, xa.y, xa.z, xa.w, even[0], even[1]);
  mma_bf16(acc[1], xa.x, xa.y, xa.z, xa.w, odd[0], odd[1]);
  unpack_fp8(w.z, even[0], odd[0]);
  unpack_fp8(w.w, even[1], odd[1]);
  mma_bf16(acc[0], xb.x, xb.y, xb.z, xb.w, even[0], even[1]);
  mma_bf16(acc[1], xb.x, xb.y, xb.z, xb.w, odd[0], odd[1]);
}

// One warp's 8 rows x 64 columns of a bf16 page. Here tokens are the MMA's rows (so a unit is only 8 weight rows, which
// spreads 5120 rows evenly over 132 SMs) and weights its columns. Rows 0 .. 7 hold half of the token's columns, rows
// 8 .. 15 the other half: the operand is four registers as they were loaded, without zeros between. Of the first
// accumulator rows 0 .. 7 count, of the second rows 8 .. 15.
__device__ __forceinline__ void mma_bf16_page(float (&acc)[2][4], uint4 wa, uint4 wb, uint4 xa, uint4 xb) {
  mma_bf16(acc[0], xa.x, xa.y, xa.z, xa.w, wa.x, wa.z);
  mma_bf16(acc[1], xa.x, xa.y, xa.z, xa.w, wa.y, wa.w);
  mma_bf16(acc[0], xb.x, xb.y, xb.z, xb.w, wb.x, wb.z);
  mma_bf16(acc[1], xb.x, xb.y, xb.z, xb.w, wb.y, wb.w);
}

}  // namespace mk
