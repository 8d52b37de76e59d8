// The slow, obvious twin of every phase: one kernel a phase, canonical weights, float32 activations without any
// rounding in between, float64 sums. A block of 128 threads computes one output element.
#pragma once
#include "weights.cuh"

namespace ladder {

__device__ inline double block_sum(double v) {
  __shared__ double part[4];
  for (int o = 16; o; o >>= 1) v += __shfl_xor_sync(~0u, v, o);
  __syncthreads();
  if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = v;
  __syncthreads();
  return part[0] + part[1] + part[2] + part[3];
}
__device__ inline float bf16_value(uint16_t v) { return __uint_as_float((uint32_t)v << 16); }

// y = x / rms(x) * weight, or only x * weight; one block
__global__ void ref_norm(float* y, const float* x, const float* weight, int n, bool normalise = true) {
  double s = 0;
  for (int i = threadIdx.x; i < n; i += blockDim.x) s += (double)x[i] * x[i];
  double r = 1.0 / sqrt(block_sum(s) / n + kRmsEps);
  if (!normalise) r = 1;
  for (int i = threadIdx.x; i < n; i += blockDim.x) y[i] = (float)(x[i] * r * weight[i]);
}
// y[row] = w[row] . x (+ residual[row])
__global__ void ref_matrix(float* y, uint32_t tensor, bool fp8, float gain, const float* x, int K, int rows,
                           const float* residual) {
  for (int row = blockIdx.x; row < rows; row += gridDim.x) {
    double s = 0;
    for (int k = threadIdx.x; k < K; k += blockDim.x)
      s += (double)(fp8 ? e4m3(code_fp8(tensor, row, k, K)) : bf16_value(weight_bf16(tensor, row, k, K, gain))) * x[k];
    s = block_sum(s) * (fp8 ? row_scale(tensor, row, K, gain) : 1.f);
    if (threadIdx.x == 0) y[row] = (float)(s + (residual ? residual[row] : 0.f));
  }
}
// q/k norm + RoPE of one head, in place; one block of 64 threads a head
__global__ void ref_rotate(float* qkv, const float* q_norm, const float* k_norm, int position) {
  float* v = qkv + blockIdx.x * kHeadDim;
  const float* weight = blockIdx.x < kHeads ? q_norm : k_norm;
  int d = threadIdx.x;
  __shared__ double part[64];
  part[d] = (double)v[d] * v[d] + (double)v[d + 64] * v[d + 64];
  __syncthreads();
  double s = 0;
  for (int i = 0; i < 64; i++) s += part[i];
  double r = 1.0 / sqrt(s / kHeadDim + kRmsEps), angle = position * pow((double)kRopeTheta, -2.0 * d / kHeadDim);
  double a = v[d] * r * weight[d], b = v[d + 64] * r * weight[d + 64];
  v[d] = (float)(a * cos(angle) - b * sin(angle));
  v[d + 64] = (float)(b * cos(angle) + a * sin(angle));
}
// One block a query head: scores over cached positions 0 .. position - 1 and the new k, v.
__global__ void ref_attention(float* out, const float* qkv, const uint8_t* kv, int layer, int position, float* scores) {
  const int head = blockIdx.x, kvh = head / kGroup;
  const float *q = qkv + head * kHeadDim, *k_new = qkv + kQRows + kvh * kHeadDim, *v_new = k_new + kKvRows;
  float* s = scores + (int64_t)head * kMaxContext;
  for (int p = threadIdx.x; p <= position; p += blockDim.x) {
    const uint8_t* tile = kv + kv_tile_offset(layer, kvh, p / kTile);
    double dot = 0;
    for (int d = 0; d < kHeadDim; d++)
      dot += (double)q[d] * (p == position ? k_new[d] : bf16_value(*(const uint16_t*)(tile + k_offset(p, d))));
    s[p] = (float)(dot / sqrt((double)kHeadDim));
  }
  __syncthreads();
  float top = -INFINITY;
  for (int p = 0; p <= position; p++) top = fmaxf(top, s[p]);
  double sum = 0, o = 0;
  for (int p = 0; p <= position; p++) {
    const uint8_t* tile = kv + kv_tile_offset(layer, kvh, p / kTile) + kTileBytes;
    double e = exp((double)s[p] - top);
    sum += e;
    o += e * (p == position ? v_new[threadIdx.x] : bf16_value(*(const uint16_t*)(tile + v_offset(p, threadIdx.x))));
  }
  out[head * kHeadDim + threadIdx.x] = (float)(o / sum);
}
// One thread: the eight largest logits (ties to the lower expert) and softmax weights over them.
__global__ void ref_top_k(float* ids, float* weights, const float* logits) {
  bool used[kExperts] = {};
  double sum = 0;
  for (int k = 0; k < kTopK; k++) {
    int best = -1;
    for (int e = 0; e < kExperts; e++)
      if (!used[e] && (best < 0 || logits[e] > logits[best])) best = e;
    used[best] = true;
    ids[k] = best;
    weights[k] = expf(logits[best] - logits[(int)ids[0]]);
    sum += weights[k];
  }
  for (int k = 0; k < kTopK; k++) weights[k] /= (float)sum;
}
__device__ inline double expert_dot(int layer, bool pair, int expert, int row, const float* x) {
  const int K = pair ? kHidden : kMoeIntermediate, rows = pair ? 2 * kMoeIntermediate : kHidden;
  const uint32_t tensor = layer * kTensors + (pair ? kPair : kDown),
                 scales = layer * kTensors + (pair ? kPairScale : kDownScale);
  const uint64_t r = (uint64_t)expert * rows + row;
  double s = 0;
  for (int k = threadIdx.x; k < K; k += blockDim.x)
    s += (double)(e2m1(code(tensor, r, k, K)) * e4m3(block_scale(scales, r, k, K))) * x[k];
  return block_sum(s) * global_scale(layer, expert, pair ? 0 : 1);
}
__global__ void ref_pair(float* h, int layer, const float* x, const float* ids) {
  for (int i = blockIdx.x; i < kTopK * kMoeIntermediate; i += gridDim.x) {
    int expert = (int)ids[i / kMoeIntermediate], row = i % kMoeIntermediate;
    double gate = expert_dot(layer, true, expert, row, x),
           up = expert_dot(layer, true, expert, kMoeIntermediate + row, x);
    if (threadIdx.x == 0) h[i] = (float)(gate / (1.0 + exp(-gate)) * up);
  }
}
__global__ void ref_down(float* y, int layer, const float* h, const float* ids, const float* weights,
                         const float* residual) {
  for (int row = blockIdx.x; row < kHidden; row += gridDim.x) {
    double s = 0;
    for (int k = 0; k < kTopK; k++)
      s += weights[k] * expert_dot(layer, false, (int)ids[k], row, h + k * kMoeIntermediate);
    if (threadIdx.x == 0) y[row] = (float)(s + residual[row]);
  }
}

}  // namespace ladder
