// Holds a GPU for a while: holder spin|memory SECONDS. Says "ready" when it does.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <unistd.h>

#include "spin.cuh"

#define CHECK(x)                                                        \
  do {                                                                  \
    cudaError_t e_ = (x);                                               \
    if (e_ != cudaSuccess) {                                            \
      fprintf(stderr, "%s: %s\n", #x, cudaGetErrorString(e_));          \
      exit(1);                                                          \
    }                                                                   \
  } while (0)

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  const int seconds = atoi(argv[2]);
  cudaDeviceProp d;
  CHECK(cudaGetDeviceProperties(&d, 0));
  if (strcmp(argv[1], "memory") == 0) {  // all but 700 MB, of which CUDA takes some 500 in every process
    size_t free, total;
    CHECK(cudaMemGetInfo(&free, &total));
    for (size_t piece = size_t{1} << 30; piece >= (16 << 20); piece /= 2)
      for (;;) {
        CHECK(cudaMemGetInfo(&free, &total));
        void* p;
        if (free < piece + (700 << 20) || cudaMalloc(&p, piece) != cudaSuccess) break;
      }
    cudaGetLastError();
    puts("ready");
    fflush(stdout);
    sleep(seconds);
    return 0;
  }
  // A block that takes all shared memory of its SM, again and again: no place is left beside it.
  volatile int* begun;
  const int blocks = d.multiProcessorCount;
  CHECK(cudaHostAlloc((void**)&begun, blocks * sizeof(int), cudaHostAllocMapped));
  std::fill(begun, begun + blocks, 0);
  int* device;
  CHECK(cudaHostGetDevicePointer((void**)&device, (void*)begun, 0));
  const int shared = (int)d.sharedMemPerBlockOptin;
  CHECK(cudaFuncSetAttribute(spin, cudaFuncAttributeMaxDynamicSharedMemorySize, shared));
  spin<<<blocks, 1024, shared>>>(device, seconds * 1000000000ll);
  CHECK(cudaGetLastError());
  while (std::count(begun, begun + blocks, 1) < blocks) usleep(1000);
  puts("ready");
  fflush(stdout);
  CHECK(cudaDeviceSynchronize());
  return 0;
}
