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

// Four e4m3 codes to bf16, exactly: bytes 0 and 2 in `even`, 1 and 3 in `odd`. Their bits read as bf16 are the value times
// 2^-120, subnormals too.
__device__ __forceinline__ void unpack_fp8(uint32_t w, uint32_t& even, uint32_t& odd) {
  const uint32_t v = w << 8;
  even = mul_bf16x2((v & 0x80008000u) | (v >> 4 & 0x07F007F0u), 0x7B807B80u);
  odd = mul_bf16x2((w & 0x80008000u) | (w >> 4 & 0x07F007F0u), 0x7B807B80u);
}

// One warp's 8 rows x 64 columns of an fp8 page (half its share), as below.
__device__ __forceinline__ void mma_fp8_run(float (&acc)[2][4], uint4 w, uint4 xa, uint4 xb) {
  uint32_t even, odd;
  unpack_fp8(w.x, even, odd);
  mma_bf16(acc[0], xa.x, 0, xa.y, 0, even, odd);
  unpack_fp8(w.y, even, odd);
  mma_bf16(acc[1], xa.z, 0, xa.w, 0, even, odd);
  unpack_fp8(w.z, even, odd);
  mma_bf16(acc[0], xb.x, 0, xb.y, 0, even, odd);
  unpack_fp8(w.w, even, odd);
  mma_bf16(acc[1], xb.z, 0, xb.w, 0, even, odd);
}

// One warp's 8 rows x 64 columns of a bf16 page. Here tokens are the MMA's rows (so a unit is only 8 weight rows, which
// spreads 5120 rows evenly over 132 SMs) and weights its columns. Two accumulators halve the dependent chain.
__device__ __forceinline__ void mma_bf16_page(float (&acc)[2][4], uint4 wa, uint4 wb, uint4 xa, uint4 xb) {
  mma_bf16(acc[0], xa.x, 0, xa.y, 0, wa.x, wa.y);
  mma_bf16(acc[1], xa.z, 0, xa.w, 0, wa.z, wa.w);
  mma_bf16(acc[0], xb.x, 0, xb.y, 0, wb.x, wb.y);
  mma_bf16(acc[1], xb.z, 0, xb.w, 0, wb.z, wb.w);
}

}  // namespace mk
