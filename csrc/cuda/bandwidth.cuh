// Read bandwidth of this GPU: the ceiling every speed is held to. Bulk copies of 16 KB, 8 under way an SM, nothing
// else.
#pragma once
#include <algorithm>
#include <vector>
#include "model.h"
#include "ptx.cuh"

namespace mk {

constexpr int kCopyBytes = 16384, kCopySlots = 8;
__global__ void read_all(const uint8_t* src, int64_t pages_per_block) {
  MK_DYNAMIC_SHARED(buffer);
  __shared__ uint64_t full[kCopySlots];
  for (int i = 0; i < kCopySlots; i++) mbarrier_init(smem_address(&full[i]), 1);
  mbarrier_init_fence();
  const uint64_t policy = evict_first_policy();
  src += blockIdx.x * pages_per_block * kCopyBytes;
  for (int64_t i = 0; i < pages_per_block + kCopySlots; i++) {
    const int slot = i % kCopySlots;
    const uint32_t bar = smem_address(&full[slot]);
    if (i >= kCopySlots) mbarrier_wait(bar, i / kCopySlots - 1 & 1);
    if (i >= pages_per_block) continue;
    mbarrier_expect_bytes(bar, kCopyBytes);
    bulk_copy(smem_address(buffer + slot * kCopyBytes), src + i * kCopyBytes, kCopyBytes, bar, policy);
  }
}
// Bytes per second, median of five passes over `bytes` bytes; 0 when the device fails.
inline double read_bandwidth(const uint8_t* src, size_t bytes) {
  int64_t pages = bytes / kCopyBytes / kGrid;
  cudaFuncSetAttribute(read_all, cudaFuncAttributeMaxDynamicSharedMemorySize, kCopyBytes * kCopySlots);
  std::vector<float> ms;
  cudaEvent_t a, b;
  cudaEventCreate(&a);
  cudaEventCreate(&b);
  for (int i = 0; i < 6; i++) {
    cudaEventRecord(a);
    void* args[] = {&src, &pages};
    cudaLaunchKernel(read_all, kGrid, 1, args, kCopyBytes * kCopySlots, 0);
    cudaEventRecord(b);
    float t;
    if (cudaEventSynchronize(b) != cudaSuccess || cudaEventElapsedTime(&t, a, b) != cudaSuccess) break;
    if (i) ms.push_back(t);
  }
  cudaEventDestroy(a);
  cudaEventDestroy(b);
  if (ms.size() != 5) return 0;
  std::sort(ms.begin(), ms.end());
  return (double)pages * kGrid * kCopyBytes / (ms[2] * 1e-3);
}

}  // namespace mk
