// Logits of one token for the host: mk_step gives them, decode_kernel itself keeps only the best. An ordinary kernel
// that runs after it, on the hidden state that the last layer left in the exchange buffer.
#pragma once
#include "block.cuh"

namespace mk {

constexpr int kLogitThreads = 256;

// hidden: words of the last layer's output. The numbers of phase_head (inputs rounded to bf16 before 1/rms, float32
// sums) in another order of summation, so near-ties may fall the other way. One warp a row.
__global__ void __launch_bounds__(kLogitThreads)
    logits_kernel(const uint64_t* hidden, const float* norm, const uint8_t* head, float* logits) {
  __shared__ float x[kHidden], part[kLogitThreads / 32];
  const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32;
  float squares = 0;
  for (int i = tid; i < kHidden; i += kLogitThreads) {
    const float v = word_float(hidden[i]);
    squares += v * v;
    x[i] = bf16_low(pack_bf16x2(v * norm[i], 0.f));
  }
  squares = warp_sum(squares);
  if (lane == 0) part[warp] = squares;
  __syncthreads();
  float all = 0;
  for (int i = 0; i < kLogitThreads / 32; i++) all += part[i];
  const float rms = rsqrtf(all / kHidden + kRmsEps);
  for (int row = blockIdx.x * (kLogitThreads / 32) + warp; row < kVocab; row += gridDim.x * (kLogitThreads / 32)) {
    float sum = 0;
    for (int column = 8 * lane; column < kHidden; column += 256) {  // 8 neighbouring columns are 16 neighbouring bytes
      const uint4 w = __ldg((const uint4*)(head + matrix_offset(row, column, kHidden)));
      const float* v = x + column;
      sum += bf16_low(w.x) * v[0] + bf16_high(w.x) * v[1] + bf16_low(w.y) * v[2] + bf16_high(w.y) * v[3];
      sum += bf16_low(w.z) * v[4] + bf16_high(w.z) * v[5] + bf16_low(w.w) * v[6] + bf16_high(w.w) * v[7];
    }
    sum = warp_sum(sum);
    if (lane == 0) logits[row] = sum * rms;
  }
}

}  // namespace mk
