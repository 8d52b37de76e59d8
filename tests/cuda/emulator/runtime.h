// The part of the CUDA runtime that csrc/cuda uses. Device memory is the host's, every call is done when it returns.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <utility>

#define CUDART_VERSION 13000

enum cudaError_t {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorMemoryAllocation = 2,
  cudaErrorInvalidConfiguration = 9,
  cudaErrorInsufficientDriver = 35,
  cudaErrorNoDevice = 100,
  cudaErrorNotReady = 600,
  cudaErrorMapBufferObjectFailed = 205,
  cudaErrorPeerAccessAlreadyEnabled = 704,
  cudaErrorCooperativeLaunchTooLarge = 720,
};
enum cudaMemcpyKind { cudaMemcpyHostToDevice = 1, cudaMemcpyDeviceToHost, cudaMemcpyDeviceToDevice };
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize = 8 };
enum { cudaStreamNonBlocking = 1 };
enum { cudaIpcMemLazyEnablePeerAccess = 1 };
enum { cudaHostAllocDefault, cudaHostAllocPortable, cudaHostAllocMapped };
using cudaStream_t = struct EmulatedStream*;
using cudaEvent_t = struct EmulatedEvent*;
struct cudaDeviceProp {
  char name[256];
  int major, minor, multiProcessorCount, cooperativeLaunch;
  size_t sharedMemPerBlockOptin, totalGlobalMem;
};

struct cudaIpcMemHandle_t {
  char reserved[64];
};

EMULATOR_API cudaError_t cudaMalloc(void** p, size_t bytes);
EMULATOR_API cudaError_t cudaFree(void* p);
EMULATOR_API cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind);
EMULATOR_API cudaError_t cudaMemset(void* p, int value, size_t bytes);
EMULATOR_API cudaError_t cudaGetDeviceCount(int* n);
EMULATOR_API cudaError_t cudaGetDeviceProperties(cudaDeviceProp* d, int device);
EMULATOR_API cudaError_t cudaMemGetInfo(size_t* free, size_t* total);
EMULATOR_API cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t* handle, void* p);
EMULATOR_API cudaError_t cudaIpcOpenMemHandle(void** p, cudaIpcMemHandle_t handle, unsigned flags);
EMULATOR_API cudaError_t cudaIpcCloseMemHandle(void* p);
EMULATOR_API const char* cudaGetErrorString(cudaError_t);
EMULATOR_API const char* cudaGetErrorName(cudaError_t);

template <class T>
cudaError_t cudaMalloc(T** p, size_t bytes) {
  return cudaMalloc((void**)p, bytes);
}
inline cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind, cudaStream_t) {
  return cudaMemcpy(to, from, bytes, kind);
}
inline cudaError_t cudaMemsetAsync(void* p, int value, size_t bytes, cudaStream_t) {
  return cudaMemset(p, value, bytes);
}
inline cudaError_t cudaHostAlloc(void** p, size_t bytes, unsigned) { return cudaMalloc(p, bytes); }
template <class T>
cudaError_t cudaHostAlloc(T** p, size_t bytes, unsigned flags) {
  return cudaHostAlloc((void**)p, bytes, flags);
}
inline cudaError_t cudaFreeHost(void* p) { return cudaFree(p); }
template <class T>
cudaError_t cudaHostGetDevicePointer(T** device, void* host, unsigned) {
  *device = (T*)host;
  return cudaSuccess;
}
inline cudaError_t cudaSetDevice(int) { return cudaSuccess; }
inline cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) {
  *can = 1;
  return cudaSuccess;
}
inline cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return cudaSuccess; }
inline cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline cudaError_t cudaStreamCreateWithFlags(cudaStream_t* s, unsigned) {
  *s = (cudaStream_t)s;  // any that is not the default stream
  return cudaSuccess;
}
inline cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
inline cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
inline cudaError_t cudaStreamQuery(cudaStream_t) { return cudaSuccess; }
inline cudaError_t cudaEventCreate(cudaEvent_t* e) {
  *e = nullptr;
  return cudaSuccess;
}
inline cudaError_t cudaEventDestroy(cudaEvent_t) { return cudaSuccess; }
inline cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t = nullptr) { return cudaSuccess; }
inline cudaError_t cudaEventSynchronize(cudaEvent_t) { return cudaSuccess; }
inline cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t, cudaEvent_t) {
  *ms = 1.f;
  return cudaSuccess;
}

namespace emulator {
EMULATOR_API cudaError_t allow_shared(const void* kernel, size_t bytes);
// Why a GPU would refuse this launch, or cudaSuccess.
EMULATOR_API cudaError_t launchable(const void* kernel, dim3 blocks, dim3 threads, size_t shared, bool together);

template <class... P, size_t... I>
cudaError_t launch_kernel(void (*kernel)(P...), dim3 blocks, dim3 threads, void** args, size_t shared, bool together,
                          std::index_sequence<I...>) {
  const cudaError_t refused = launchable((const void*)kernel, blocks, threads, shared, together);
  if (refused == cudaSuccess)
    launch((const void*)kernel, blocks, threads, shared, together, [=] { kernel(*(const P*)args[I]...); });
  return refused;
}
}  // namespace emulator

template <class... P>
cudaError_t cudaLaunchKernel(void (*kernel)(P...), dim3 blocks, dim3 threads, void** args, size_t shared,
                             cudaStream_t) {
  return emulator::launch_kernel(kernel, blocks, threads, args, shared, false, std::index_sequence_for<P...>());
}
template <class... P>
cudaError_t cudaLaunchCooperativeKernel(void (*kernel)(P...), dim3 blocks, dim3 threads, void** args, size_t shared,
                                        cudaStream_t) {
  return emulator::launch_kernel(kernel, blocks, threads, args, shared, true, std::index_sequence_for<P...>());
}
template <class... P>
cudaError_t cudaFuncSetAttribute(void (*kernel)(P...), cudaFuncAttribute, int value) {
  return emulator::allow_shared((const void*)kernel, (size_t)value);
}
template <class... P>
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, void (*kernel)(P...), int threads,
                                                          size_t shared) {
  *blocks = emulator::launchable((const void*)kernel, 1, (unsigned)threads, shared, true) == cudaSuccess;
  return cudaSuccess;
}
