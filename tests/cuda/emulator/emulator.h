// Stands for what nvcc knows without an include: CUDA's words, vector types, built-in variables and functions.
// Force-included (-include emulator.h) when g++ compiles csrc/cuda for the emulator; README.md tells how that works.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>

#define MK_EMULATED 1
#define __device__
#define __host__
#define __global__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(n) __attribute__((aligned(n)))
// Static shared memory exists once, so a kernel that has some runs one block after the other: see launch().
#define __shared__ static

// ---- vector types --------------------------------------------------------------------------------------------------
#define EMULATOR_VECTOR2(name, T)               \
  struct alignas(2 * sizeof(T)) name {          \
    T x, y;                                     \
  };                                            \
  constexpr name make_##name(T x, T y) { return {x, y}; }
#define EMULATOR_VECTOR3(name, T)               \
  struct name {                                 \
    T x, y, z;                                  \
  };                                            \
  constexpr name make_##name(T x, T y, T z) { return {x, y, z}; }
#define EMULATOR_VECTOR4(name, T)                                           \
  struct alignas(4 * sizeof(T) < 16 ? 4 * sizeof(T) : 16) name {            \
    T x, y, z, w;                                                           \
  };                                                                        \
  constexpr name make_##name(T x, T y, T z, T w) { return {x, y, z, w}; }
EMULATOR_VECTOR2(int2, int)
EMULATOR_VECTOR2(uint2, unsigned)
EMULATOR_VECTOR2(float2, float)
EMULATOR_VECTOR2(ulonglong2, unsigned long long)
EMULATOR_VECTOR3(uint3, unsigned)
EMULATOR_VECTOR4(int4, int)
EMULATOR_VECTOR4(uint4, unsigned)
EMULATOR_VECTOR4(float4, float)
struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

// ---- the machine ---------------------------------------------------------------------------------------------------
#ifdef MK_EMULATOR_IMAGE  // where the linked program will lie: a loader may run a copy without a name
extern "C" __attribute__((visibility("hidden"))) constinit const char emulator_image[] = MK_EMULATOR_IMAGE;
#endif
#define EMULATOR_API __attribute__((visibility("hidden"), noinline))
namespace emulator {

struct Place {
  uint3 thread, block;
  dim3 threads, blocks;
  uint8_t* shared;  // dynamic shared memory of the block
};
extern Place* here __attribute__((visibility("hidden")));  // of the lane that runs

enum class Vote { any, all, ballot, equal, max, min, signed_max, signed_min, add, bit_and, bit_or, bit_xor };

EMULATOR_API void sync_warp(uint32_t mask);
EMULATOR_API uint64_t shuffle(uint32_t mask, uint64_t value, int source);
EMULATOR_API uint32_t vote(uint32_t mask, uint32_t value, Vote kind);
EMULATOR_API void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]);
EMULATOR_API void sync_block();
EMULATOR_API void barrier(int id, int threads, bool wait);
EMULATOR_API void sleep(unsigned nanoseconds);
EMULATOR_API void give_way();  // for loops that poll
EMULATOR_API void progress();  // memory that others may wait for has changed
EMULATOR_API uint64_t nanoseconds();
EMULATOR_API uint32_t shared_address(const void* p);
EMULATOR_API void* shared_pointer(uint32_t address);
EMULATOR_API void mbarrier_init(uint32_t bar, uint32_t arrivals);
EMULATOR_API void mbarrier_arrive(uint32_t bar, uint32_t count);
EMULATOR_API void mbarrier_expect(uint32_t bar, uint32_t bytes);
EMULATOR_API bool mbarrier_try_wait(uint32_t bar, uint32_t parity);
EMULATOR_API void bulk_copy(uint32_t to, const void* from, uint32_t bytes, uint32_t bar);
EMULATOR_API void copy_16(void* to, const void* from);  // arrives at the lane's copies_done
EMULATOR_API void copies_done();
EMULATOR_API void bulk_prefetch(const void* from, uint32_t bytes);
EMULATOR_API void store_later(uint64_t* to, uint64_t value);
EMULATOR_API void store_later(uint32_t* to, uint32_t value);
EMULATOR_API void aligned(const void* p, size_t bytes);
EMULATOR_API void release(const void* to);  // before a store or an atomic that publishes what came before it
EMULATOR_API void acquire(const void* from);  // before a load that makes visible what was published with its value
EMULATOR_API void fence();
EMULATOR_API void proxy_fence(bool global);  // global: not of shared memory only
EMULATOR_API void atomic(const void* p);  // a relaxed read and write there
EMULATOR_API void polled(const void* from, size_t bytes);  // before a relaxed load

// Runs the kernel's body once for every lane. together: all blocks are resident, as in a cooperative launch; otherwise
// one runs after the other.
EMULATOR_API void launch(const void* kernel, dim3 blocks, dim3 threads, size_t shared, bool together,
                         const std::function<void()>& body);

}  // namespace emulator

#define threadIdx (emulator::here->thread)
#define blockIdx (emulator::here->block)
#define blockDim (emulator::here->threads)
#define gridDim (emulator::here->blocks)

// ---- warps and blocks ----------------------------------------------------------------------------------------------
// Macros and always-inlined functions, so that the machine sees the kernel's address as its caller.
__forceinline__ void __syncthreads() { emulator::sync_block(); }
__forceinline__ void __syncwarp(uint32_t mask = ~0u) { emulator::sync_warp(mask); }
__forceinline__ void __threadfence() { emulator::fence(); }
__forceinline__ void __nanosleep(unsigned ns) { emulator::sleep(ns); }
__forceinline__ uint64_t __cvta_generic_to_shared(const void* p) { return emulator::shared_address(p); }

namespace emulator {
__forceinline__ int lane() {
  return (here->thread.x + here->threads.x * (here->thread.y + here->threads.y * here->thread.z)) % 32;
}
template <class T>
__forceinline__ T shuffle_value(uint32_t mask, T value, int source) {
  static_assert(sizeof(T) <= 8);
  uint64_t bits = 0;
  memcpy(&bits, &value, sizeof value);
  bits = shuffle(mask, bits, source);
  memcpy(&value, &bits, sizeof value);
  return value;
}
}  // namespace emulator
template <class T>
__forceinline__ T __shfl_sync(uint32_t mask, T v, int source, int width = 32) {
  return emulator::shuffle_value(mask, v, (emulator::lane() & ~(width - 1)) + (source & (width - 1)));
}
template <class T>
__forceinline__ T __shfl_xor_sync(uint32_t mask, T v, int bits, int width = 32) {
  const int own = emulator::lane(), source = own ^ bits;
  return emulator::shuffle_value(mask, v, source / width > own / width ? own : source);
}
template <class T>
__forceinline__ T __shfl_down_sync(uint32_t mask, T v, int delta, int width = 32) {
  const int own = emulator::lane();
  return emulator::shuffle_value(mask, v, own % width + delta < width ? own + delta : own);
}
template <class T>
__forceinline__ T __shfl_up_sync(uint32_t mask, T v, int delta, int width = 32) {
  const int own = emulator::lane();
  return emulator::shuffle_value(mask, v, own % width >= delta ? own - delta : own);
}
__forceinline__ int __any_sync(uint32_t mask, int v) { return emulator::vote(mask, v != 0, emulator::Vote::any); }
__forceinline__ int __all_sync(uint32_t mask, int v) { return emulator::vote(mask, v != 0, emulator::Vote::all); }
__forceinline__ uint32_t __ballot_sync(uint32_t mask, int v) {
  return emulator::vote(mask, v != 0, emulator::Vote::ballot);
}
__forceinline__ uint32_t __match_any_sync(uint32_t mask, uint32_t v) {
  return emulator::vote(mask, v, emulator::Vote::equal);
}
__forceinline__ uint32_t __reduce_max_sync(uint32_t mask, uint32_t v) {
  return emulator::vote(mask, v, emulator::Vote::max);
}
__forceinline__ uint32_t __reduce_min_sync(uint32_t mask, uint32_t v) {
  return emulator::vote(mask, v, emulator::Vote::min);
}
__forceinline__ int __reduce_max_sync(uint32_t mask, int v) {
  return (int)emulator::vote(mask, (uint32_t)v, emulator::Vote::signed_max);
}
__forceinline__ int __reduce_min_sync(uint32_t mask, int v) {
  return (int)emulator::vote(mask, (uint32_t)v, emulator::Vote::signed_min);
}
__forceinline__ uint32_t __reduce_add_sync(uint32_t mask, uint32_t v) {
  return emulator::vote(mask, v, emulator::Vote::add);
}
__forceinline__ int __reduce_add_sync(uint32_t mask, int v) {
  return (int)emulator::vote(mask, (uint32_t)v, emulator::Vote::add);
}
__forceinline__ uint32_t __reduce_and_sync(uint32_t mask, uint32_t v) {
  return emulator::vote(mask, v, emulator::Vote::bit_and);
}
__forceinline__ uint32_t __reduce_or_sync(uint32_t mask, uint32_t v) {
  return emulator::vote(mask, v, emulator::Vote::bit_or);
}
__forceinline__ uint32_t __reduce_xor_sync(uint32_t mask, uint32_t v) {
  return emulator::vote(mask, v, emulator::Vote::bit_xor);
}

// ---- memory --------------------------------------------------------------------------------------------------------
template <class T>
__forceinline__ T __ldg(const T* p) {
  return *p;
}
template <class T>
__forceinline__ T __ldcg(const T* p) {
  return *p;
}
namespace emulator {
template <class T>
__forceinline__ T replace(T* p, T v) {
  const T old = *(volatile T*)p;
  atomic(p);
  *(volatile T*)p = v;
  if (old == v)
    give_way();
  else
    progress();
  return old;
}
}  // namespace emulator
template <class T>
__forceinline__ T atomicCAS(T* p, std::type_identity_t<T> expected, std::type_identity_t<T> v) {
  const T old = *(volatile T*)p;
  return emulator::replace(p, old == expected ? v : old);
}
template <class T>
__forceinline__ T atomicExch(T* p, std::type_identity_t<T> v) {
  return emulator::replace(p, v);
}
template <class T>
__forceinline__ T atomicAdd(T* p, std::type_identity_t<T> v) {
  return emulator::replace(p, (T)(*(volatile T*)p + v));
}
template <class T>
__forceinline__ T atomicMax(T* p, std::type_identity_t<T> v) {
  const T old = *(volatile T*)p;
  return emulator::replace(p, old < v ? v : old);
}
template <class T>
__forceinline__ T atomicMin(T* p, std::type_identity_t<T> v) {
  const T old = *(volatile T*)p;
  return emulator::replace(p, v < old ? v : old);
}
template <class T>
__forceinline__ T atomicOr(T* p, std::type_identity_t<T> v) {
  return emulator::replace(p, (T)(*(volatile T*)p | v));
}

// ---- arithmetic ----------------------------------------------------------------------------------------------------
__forceinline__ float __uint_as_float(uint32_t u) { return __builtin_bit_cast(float, u); }
__forceinline__ uint32_t __float_as_uint(float f) { return __builtin_bit_cast(uint32_t, f); }
__forceinline__ float __int_as_float(int u) { return __builtin_bit_cast(float, u); }
__forceinline__ int __float_as_int(float f) { return __builtin_bit_cast(int, f); }
__forceinline__ uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t selector) {
  const uint64_t bytes = (uint64_t)b << 32 | a;
  uint32_t out = 0;
  for (int i = 0; i < 4; i++) {
    const uint32_t s = selector >> 4 * i & 15;
    uint32_t byte = (uint32_t)(bytes >> 8 * (s & 7)) & 255;
    if (s & 8) byte = byte & 128 ? 255 : 0;
    out |= byte << 8 * i;
  }
  return out;
}
__forceinline__ uint32_t __funnelshift_l(uint32_t low, uint32_t high, uint32_t n) {
  return (uint32_t)(((uint64_t)high << 32 | low) << (n & 31) >> 32);
}
__forceinline__ uint32_t __funnelshift_r(uint32_t low, uint32_t high, uint32_t n) {
  return (uint32_t)(((uint64_t)high << 32 | low) >> (n & 31));
}
__forceinline__ int __ffs(int v) { return __builtin_ffs(v); }
__forceinline__ int __clz(int v) { return v ? __builtin_clz((unsigned)v) : 32; }
__forceinline__ int __popc(uint32_t v) { return __builtin_popcount(v); }
__forceinline__ float rsqrtf(float x) { return 1.f / sqrtf(x); }
__forceinline__ float __expf(float x) { return expf(x); }
__forceinline__ float __fdividef(float a, float b) { return a / b; }
__forceinline__ float __fadd_rn(float a, float b) { return a + b; }
__forceinline__ float __fmul_rn(float a, float b) { return a * b; }
__forceinline__ float __fdiv_rn(float a, float b) { return a / b; }
#define EMULATOR_MIN_MAX(T, A, B)                                          \
  constexpr T min(A a, B b) { return (T)a < (T)b ? (T)a : (T)b; }          \
  constexpr T max(A a, B b) { return (T)a < (T)b ? (T)b : (T)a; }
EMULATOR_MIN_MAX(int, int, int)
EMULATOR_MIN_MAX(unsigned, unsigned, unsigned)
EMULATOR_MIN_MAX(unsigned, int, unsigned)
EMULATOR_MIN_MAX(unsigned, unsigned, int)
EMULATOR_MIN_MAX(long, long, long)
EMULATOR_MIN_MAX(long, int, long)
EMULATOR_MIN_MAX(long, long, int)
EMULATOR_MIN_MAX(unsigned long, unsigned long, unsigned long)
EMULATOR_MIN_MAX(long long, long long, long long)
EMULATOR_MIN_MAX(unsigned long long, unsigned long long, unsigned long long)
EMULATOR_MIN_MAX(float, float, float)
EMULATOR_MIN_MAX(double, double, double)

#include "runtime.h"
