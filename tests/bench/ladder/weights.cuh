// Random weights as pure functions of (tensor, row, column), so that the packed blob and the slow reference can be made
// independently of each other: a mistake in the byte layout shows as a wrong result.
#pragma once
#include <cuda_bf16.h>
#include "layout.cuh"

namespace ladder {
using namespace mk;

constexpr float kRopeTheta = 1e6f;

enum Tensor { kQkv, kOut, kRouter, kPair, kDown, kPairScale, kDownScale, kGlobal, kTensors };  // of one layer
constexpr int kHeadTensor = kLayers * kTensors, kEmbedTensor = kHeadTensor + 1, kNormTensor = kHeadTensor + 2,
              kCacheTensor = kHeadTensor + 3;

__host__ __device__ inline uint32_t hash(uint32_t tensor, uint64_t i) {
  uint64_t z = (i + 1) * 0x9E3779B97F4A7C15ull + (tensor + 1) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return (uint32_t)((z ^ (z >> 31)) >> 16);
}
__host__ __device__ inline float uniform(uint32_t tensor, uint64_t i) {  // mean 0, standard deviation 1
  return ((hash(tensor, i) >> 8) * (2.f / 16777216.f) - 1.f) * 1.7320508f;
}
__device__ inline uint16_t weight_bf16(uint32_t tensor, uint64_t row, int column, int K, float gain) {
  return __bfloat16_as_ushort(__float2bfloat16_rn(uniform(tensor, row * K + column) * gain * rsqrtf((float)K)));
}
// Element (row, column) of expert e: rows of all experts are numbered through.
__host__ __device__ inline uint32_t code(uint32_t tensor, uint64_t row, int column, int K) {
  uint64_t i = row * K + column;
  return hash(tensor, i / 8) >> (4 * (i % 8)) & 15;
}
// e4m3 from 1 to 15, one in 64 anywhere from 0 (subnormals too) to 448.
__host__ __device__ inline uint32_t block_scale(uint32_t tensor, uint64_t row, int column, int K) {
  uint32_t h = hash(tensor, row * (K / 16) + column / 16);
  return h % 64 ? 0x38 + (h >> 8) % 32 : (h >> 8) % 0x68;
}
__host__ __device__ inline float global_scale(int layer, int expert, int which) {
  int K = which ? kMoeIntermediate : kHidden;
  float spread = 0.5f + (hash(layer * kTensors + kGlobal, expert * 2 + which) & 0xFFFF) / 65536.f;
  return spread / (2.926f * 6.8f * sqrtf((float)K));
}
__host__ __device__ inline float e2m1(uint32_t c) {
  const float t[8] = {0, .5f, 1, 1.5f, 2, 3, 4, 6};
  return c & 8 ? -t[c & 7] : t[c & 7];
}
__host__ __device__ inline float e4m3(uint32_t b) {
  int e = b >> 3 & 15, m = b & 7;
  const float v = e ? ldexpf(1.f + m / 8.f, e - 7) : ldexpf(m / 8.f, -6);
  return b & 128 ? -v : v;
}

// ---- packing, on the device ----------------------------------------------------------------------------------------
__global__ void pack_bf16(uint8_t* out, uint32_t tensor, int64_t rows, int K, float gain, bool paged) {
  for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < rows * K / 8;
       i += (int64_t)gridDim.x * blockDim.x) {
    int64_t row = i / (K / 8);
    int column = i % (K / 8) * 8;
    __align__(16) uint16_t w[8];
    for (int e = 0; e < 8; e++) w[e] = weight_bf16(tensor, row, column + e, K, gain);
    *(uint4*)(out + (paged ? matrix_offset(row, column, K, false) : (row * K + column) * 2)) = *(uint4*)w;
  }
}
// Row of tile `tile`, tile row r, of an expert: gate/up tiles hold 8 gate and 8 up rows, down tiles 16 rows.
__host__ __device__ inline int tile_row(bool pair, int tile, int r) {
  return !pair ? 16 * tile + r : r < 8 ? 8 * tile + r : kMoeIntermediate + 8 * tile + r - 8;
}
__global__ void pack_nvfp4(uint8_t* experts, int layer, bool pair) {
  const int K = pair ? kHidden : kMoeIntermediate, tiles = pair ? kPairUnits : kUnits,
            rows = pair ? 2 * kMoeIntermediate : kHidden;
  const uint32_t tensor = layer * kTensors + (pair ? kPair : kDown),
                 scales = layer * kTensors + (pair ? kPairScale : kDownScale);
  const int64_t words = (int64_t)kExperts * tiles * 8 * (K / 4);
  for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < words; i += (int64_t)gridDim.x * blockDim.x) {
    int column = i % (K / 4) * 4, g = i / (K / 4) % 8, tile = i / (K / 4 * 8) % tiles, expert = i / (K / 4 * 8) / tiles;
    uint8_t* base = experts + ((int64_t)layer * kExperts + expert) * kExpertBytes + (pair ? 0 : kPairBytes) +
                    (int64_t)tile * tile_bytes(K);
    uint32_t word = 0;
    for (int r = g; r < 16; r += 8) {
      uint64_t row = (uint64_t)expert * rows + tile_row(pair, tile, r);
      for (int c = 0; c < 4; c++) word |= tile_code_bits(r, column + c, code(tensor, row, column + c, K));
      if (column % 16 == 0) base[tile_scale_offset(r, column, K)] = block_scale(scales, row, column, K);
    }
    *(uint32_t*)(base + tile_word_offset(g, column)) = word;
  }
}
__global__ void fill_norms(float* norms, int n) {
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x)
    norms[i] = 1.f + 0.25f * uniform(kNormTensor, i);
}
// fp8: codes of any value but NaN, with a scale a row that brings their spread to gain / sqrt(K).
__host__ __device__ inline uint32_t code_fp8(uint32_t tensor, uint64_t row, int column, int K) {
  const uint32_t c = hash(tensor, row * K + column) & 255;
  return c % 128 < 0x60 ? c : c - 0x20;  // no huge ones, which would drown the others
}
constexpr float kFp8Spread = 5.4f;  // of these codes, about
__host__ __device__ inline float row_scale(uint32_t tensor, uint64_t row, int K, float gain) {
  return gain / (kFp8Spread * sqrtf((float)K)) * (0.5f + (hash(tensor, ~row) & 0xFFFF) / 65536.f);
}
__global__ void pack_fp8(uint8_t* out, float* scales, uint32_t tensor, int64_t rows, int K, float gain) {
  for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < rows * K; i += (int64_t)gridDim.x * blockDim.x) {
    const int64_t row = i / K;
    const int column = (int)(i % K);
    out[matrix_offset(row, column, K, true)] = (uint8_t)code_fp8(tensor, row, column, K);
    if (column == 0) scales[row] = row_scale(tensor, row, K, gain);
  }
}
__global__ void fill_expert_scales(float4* s) {
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < kLayers * kExperts; i += gridDim.x * blockDim.x)
  {
    const float pair = global_scale(i / kExperts, i % kExperts, 0);
    s[i] = make_float4(pair, pair, global_scale(i / kExperts, i % kExperts, 1), 0);
  }
}
__global__ void fill_rope(float2* rope) {
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < kMaxContext * kHeadDim / 2; i += gridDim.x * blockDim.x) {
    double angle = i / (kHeadDim / 2) * pow((double)kRopeTheta, -2.0 * (i % (kHeadDim / 2)) / kHeadDim);
    rope[i] = make_float2((float)cos(angle), (float)sin(angle));
  }
}
__global__ void fill_cache(uint8_t* kv, int positions) {
  int64_t n = (int64_t)kLayers * kKvHeads * positions * kHeadDim;
  for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < n; i += (int64_t)gridDim.x * blockDim.x) {
    int d = i % kHeadDim, p = i / kHeadDim % positions, lh = i / kHeadDim / positions;
    uint8_t* tile = kv + kv_tile_offset(lh / kKvHeads, lh % kKvHeads, p / kTile);
    *(__nv_bfloat16*)(tile + k_offset(p, d)) = __float2bfloat16_rn(uniform(kCacheTensor, 2 * i));
    *(__nv_bfloat16*)(tile + kTileBytes + v_offset(p, d)) = __float2bfloat16_rn(uniform(kCacheTensor, 2 * i + 1));
  }
}

}  // namespace ladder
