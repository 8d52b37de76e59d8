// What the micro-benchmarks share: memory, launches, times, random bytes, and a line a measurement beside its bound.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <type_traits>
#include <utility>
#include <vector>
#include "bandwidth.cuh"
#include "ring.cuh"

namespace bench {
using namespace mk;

#define CHECK(x)                                                         \
  do {                                                                   \
    cudaError_t e_ = (x);                                                \
    if (e_ != cudaSuccess) {                                             \
      printf("%s, line %d: %s\n", #x, __LINE__, cudaGetErrorString(e_)); \
      exit(1);                                                           \
    }                                                                    \
  } while (0)

template <class T>
T* device_array(int64_t n, int byte = 0) {
  T* p;
  CHECK(cudaMalloc(&p, n * sizeof(T)));
  CHECK(cudaMemset(p, byte, n * sizeof(T)));
  return p;
}
template <class T>
std::vector<T> to_host(const T* p, int64_t n) {
  std::vector<T> v(n);
  CHECK(cudaMemcpy(v.data(), p, n * sizeof(T), cudaMemcpyDeviceToHost));
  return v;
}

template <class T>
struct Array {
  T* data;
  int64_t size;
  explicit Array(int64_t n) : data(device_array<T>(n, 0xFF)), size(n) {}  // NaNs: what nobody writes shows
  ~Array() { cudaFree(data); }
  Array(const Array&) = delete;
  void put(const std::vector<T>& v) { CHECK(cudaMemcpy(data, v.data(), v.size() * sizeof(T), cudaMemcpyHostToDevice)); }
  std::vector<T> get(int64_t at, int64_t n) const { return to_host(data + at, n); }
};

template <class... P>
void launch(void (*kernel)(P...), int grid, int threads, size_t shared, bool together, std::type_identity_t<P>... args) {
  void* list[] = {(void*)&args...};
  if (together)
    CHECK(cudaLaunchCooperativeKernel(kernel, dim3(grid), dim3(threads), list, shared, 0));
  else
    CHECK(cudaLaunchKernel(kernel, dim3(grid), dim3(threads), list, shared, 0));
}
template <class... P>
void allow_shared(void (*kernel)(P...), size_t bytes) {
  CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes));
}

// Seconds that work() takes on the device, median of five after one for warming up.
template <class Work>
double seconds(Work&& work) {
  std::vector<float> all;
  cudaEvent_t a, b;
  CHECK(cudaEventCreate(&a));
  CHECK(cudaEventCreate(&b));
  for (int i = 0; i < 6; i++) {
    CHECK(cudaEventRecord(a));
    work();
    CHECK(cudaEventRecord(b));
    CHECK(cudaEventSynchronize(b));
    float ms;
    CHECK(cudaEventElapsedTime(&ms, a, b));
    if (i) all.push_back(ms);
  }
  CHECK(cudaEventDestroy(a));
  CHECK(cudaEventDestroy(b));
  std::sort(all.begin(), all.end());
  return all[2] * 1e-3;
}

__host__ __device__ inline uint32_t hash(uint64_t i) {
  uint64_t z = (i + 1) * 0x9E3779B97F4A7C15ull;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return (uint32_t)((z ^ (z >> 31)) >> 16);
}
__host__ __device__ inline float uniform(uint64_t i) {  // mean 0, standard deviation 1
  return ((hash(i) >> 8) * (2.f / 16777216.f) - 1.f) * 1.7320508f;
}
__host__ __device__ inline uint16_t to_bf16(float v) {  // towards zero: random numbers need no better
  uint32_t bits;
  memcpy(&bits, &v, 4);
  return (uint16_t)(bits >> 16);
}
__host__ __device__ inline float from_bf16(uint16_t v) {
  const uint32_t bits = (uint32_t)v << 16;
  float f;
  memcpy(&f, &bits, 4);
  return f;
}

__global__ void fill_words(uint32_t* out, int64_t n, uint64_t seed) {
  for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < n; i += (int64_t)gridDim.x * blockDim.x)
    out[i] = hash(seed * 0x100000001ull + i);
}
__global__ void fill_bf16(uint16_t* out, int64_t n, uint64_t seed, float size) {
  for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < n; i += (int64_t)gridDim.x * blockDim.x)
    out[i] = to_bf16(size * uniform(seed * 0x100000001ull + i));
}

// ---- report --------------------------------------------------------------------------------------------------------
inline bool all_ok = true;
inline void expect(bool ok, const char* what) {
  if (!ok) printf("WRONG: %s\n", what);
  all_ok = all_ok && ok;
}
// One line of the table. Times are better when they are small, rates when they are large.
inline void row(const char* program, const char* what, double measured, double bound, const char* unit, bool is_time) {
  printf("| %-9s | %-46s | %9.3f | %9.3f | %-4s | %4.0f%% |\n", program, what, measured, bound, unit,
         100 * (is_time ? bound / measured : measured / bound));
}
inline int finish() {
  printf(all_ok ? "ok\n" : "WRONG\n");
  return all_ok ? 0 : 1;
}
// Megabytes to work on: the first argument, else `most`. A small number is for trying the program, not for times.
inline int64_t megabytes(int argc, char** argv, int64_t most) { return argc > 1 ? std::max(1, atoi(argv[1])) : most; }

}  // namespace bench
