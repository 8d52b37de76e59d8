// Keeps every SM of one GPU busy from inside the process that calls it, so that what is launched there next starts late.
#include <algorithm>
#include <unistd.h>

#include "../spin.cuh"

// Returns when it has them all: 0, or the number of a CUDA error. It lets go after `seconds`.
extern "C" __attribute__((visibility("default"))) int hold(int device, double seconds) {
  int before = 0;
  cudaDeviceProp d;
  cudaStream_t stream;
  int *begun, *there;
  const auto failed = [&](cudaError_t e) { return e != cudaSuccess; };
  if (failed(cudaGetDevice(&before)) || failed(cudaSetDevice(device)) || failed(cudaGetDeviceProperties(&d, device)) ||
      failed(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking)))
    return (int)cudaGetLastError();
  const int blocks = d.multiProcessorCount, shared = (int)d.sharedMemPerBlockOptin;
  if (failed(cudaHostAlloc((void**)&begun, blocks * sizeof(int), cudaHostAllocMapped)) ||
      failed(cudaHostGetDevicePointer((void**)&there, begun, 0)) ||
      failed(cudaFuncSetAttribute(spin, cudaFuncAttributeMaxDynamicSharedMemorySize, shared)))
    return (int)cudaGetLastError();
  std::fill(begun, begun + blocks, 0);
  spin<<<blocks, 1024, shared, stream>>>(there, (long long)(seconds * 1e9));
  if (const cudaError_t e = cudaGetLastError(); e != cudaSuccess) return (int)e;
  const volatile int* seen = begun;
  while (std::count(seen, seen + blocks, 1) < blocks) usleep(200);
  return (int)cudaSetDevice(before);  // its memory stays until the process ends: the kernel may still write there
}
