// The part of csrc/cuda/ptx.cuh that is inline assembly, in plain C++.
#pragma once
#include <cmath>
#include <cstdint>
#include "emulator.h"

#define MK_DYNAMIC_SHARED(name) uint8_t* const name = emulator::here->shared

namespace mk {

__device__ __forceinline__ uint32_t smem_address(const void* p) { return (uint32_t)__cvta_generic_to_shared(p); }
__device__ __forceinline__ void* smem_pointer(uint32_t address) { return emulator::shared_pointer(address); }

// ---- mbarriers -----------------------------------------------------------------------------------------------------
__device__ __forceinline__ void mbarrier_init(uint32_t bar, uint32_t arrivals) {
  emulator::mbarrier_init(bar, arrivals);
}
__device__ __forceinline__ void mbarrier_init_fence() {}
__device__ __forceinline__ void mbarrier_arrive(uint32_t bar, uint32_t count = 1) {
  emulator::mbarrier_arrive(bar, count);
}
__device__ __forceinline__ void mbarrier_expect_bytes(uint32_t bar, uint32_t bytes) {
  emulator::mbarrier_expect(bar, bytes);
}
__device__ __forceinline__ bool mbarrier_try_wait(uint32_t bar, uint32_t parity) {
  return emulator::mbarrier_try_wait(bar, parity);
}
__device__ __forceinline__ void async_proxy_fence() { emulator::proxy_fence(false); }

// ---- bulk copies ---------------------------------------------------------------------------------------------------
__device__ __forceinline__ uint64_t evict_first_policy() { return 0; }
__device__ __forceinline__ void bulk_copy(uint32_t dst, const void* src, uint32_t bytes, uint32_t bar, uint64_t) {
  emulator::bulk_copy(dst, src, bytes, bar);
}
__device__ __forceinline__ void fence_copies() { emulator::proxy_fence(true); }
__device__ __forceinline__ void bulk_prefetch(const void* src, uint32_t bytes) { emulator::bulk_prefetch(src, bytes); }
__device__ __forceinline__ void copy_16(void* to, const void* from) { emulator::copy_16(to, from); }
__device__ __forceinline__ void copies_done() { emulator::copies_done(); }

// ---- global memory without L1, relaxed at GPU scope ----------------------------------------------------------------
__device__ __forceinline__ void store_relaxed(uint64_t* p, uint64_t v) { emulator::store_later(p, v); }
__device__ __forceinline__ uint64_t load_relaxed(const uint64_t* p) {
  emulator::polled(p, 8);
  return *(const volatile uint64_t*)p;
}
__device__ __forceinline__ ulonglong2 load_relaxed_2(const uint64_t* p) {
  emulator::polled(p, 16);
  const volatile uint64_t* v = p;
  return {v[0], v[1]};
}
__device__ __forceinline__ void store_relaxed_2(uint64_t* p, uint64_t v, uint64_t w) {
  emulator::store_later(p, v);
  emulator::store_later(p + 1, w);
}
__device__ __forceinline__ void add_release(uint32_t* p, uint32_t v) {
  emulator::release(p);
  *(volatile uint32_t*)p = *(volatile uint32_t*)p + v;
}
__device__ __forceinline__ uint32_t load_acquire(const uint32_t* p) {
  emulator::polled(p, 4);
  emulator::acquire(p);
  return *(const volatile uint32_t*)p;
}
__device__ __forceinline__ void store_system(int32_t* p, int32_t v) {
  emulator::release(p);
  *(volatile int32_t*)p = v;
}
__device__ __forceinline__ void store_peer(uint32_t* p, uint32_t v) { emulator::store_later(p, v); }
__device__ __forceinline__ void store_peer(uint32_t* p, uint2 v) {
  emulator::aligned(p, 8);
  emulator::store_later(p, v.x);
  emulator::store_later(p + 1, v.y);
}
__device__ __forceinline__ void store_peer(uint32_t* p, uint4 v) {
  emulator::aligned(p, 16);
  store_peer(p, uint2{v.x, v.y});
  store_peer(p + 2, uint2{v.z, v.w});
}
__device__ __forceinline__ void load_peer(uint32_t& v, const uint32_t* p) {
  emulator::polled(p, 4);
  v = *(const volatile uint32_t*)p;
}
__device__ __forceinline__ void load_peer(uint2& v, const uint32_t* p) {
  emulator::polled(p, 8);
  const volatile uint32_t* w = p;
  v = {w[0], w[1]};
}
__device__ __forceinline__ void load_peer(uint4& v, const uint32_t* p) {
  emulator::polled(p, 16);
  const volatile uint32_t* w = p;
  v = {w[0], w[1], w[2], w[3]};
}
__device__ __forceinline__ void add_peer_release(uint32_t* p, uint32_t v) { add_release(p, v); }
__device__ __forceinline__ uint32_t load_peer_acquire(const uint32_t* p) { return load_acquire(p); }
__device__ __forceinline__ uint64_t global_nanoseconds() { return emulator::nanoseconds(); }

// ---- warps ---------------------------------------------------------------------------------------------------------
template <int kId, int kThreads>
__device__ __forceinline__ void barrier_sync() {
  emulator::barrier(kId, kThreads, true);
}
template <int kId, int kThreads>
__device__ __forceinline__ void barrier_arrive() {
  emulator::barrier(kId, kThreads, false);
}
__device__ __forceinline__ void named_barrier_init(int, int) {}
__device__ __forceinline__ void group_sync(int id, int threads) { emulator::barrier(id, threads, true); }
template <int kRegisters>
__device__ __forceinline__ void registers_decrease() {}
template <int kRegisters>
__device__ __forceinline__ void registers_increase() {}
__device__ __forceinline__ int thread_index() { return (int)threadIdx.x; }
__device__ __forceinline__ void forget(int&) {}
__device__ __forceinline__ void forget(int&, int&) {}

// ---- arithmetic ----------------------------------------------------------------------------------------------------
__device__ __forceinline__ uint32_t bit_select(uint32_t mask, uint32_t a, uint32_t b) {
  return (mask & a) | (~mask & b);
}
// To the nearest bf16, ties to even; every NaN becomes the one that the GPU makes.
__device__ __forceinline__ uint32_t round_to_bf16(float v) {
  const uint32_t u = __float_as_uint(v);
  return v != v ? 0x7FFF : (u + 0x7FFF + (u >> 16 & 1)) >> 16;
}
__device__ __forceinline__ uint32_t pack_bf16x2(float low, float high) {
  return round_to_bf16(high) << 16 | round_to_bf16(low);
}
// A product of two bf16 has 16 significant bits, so float holds it exactly wherever bf16's rounding can tell.
__device__ __forceinline__ uint32_t mul_bf16x2(uint32_t a, uint32_t b) {
  return pack_bf16x2(__uint_as_float(a << 16) * __uint_as_float(b << 16),
                     __uint_as_float(a & 0xFFFF0000u) * __uint_as_float(b & 0xFFFF0000u));
}
// Subnormal arguments and results are zero.
__device__ __forceinline__ float exp2_approx(float x) {
  const float y = exp2f(std::fpclassify(x) == FP_SUBNORMAL ? 0.f : x);
  return y < 0x1p-126f ? 0.f : y;
}
__device__ __forceinline__ void mma_bf16(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                         uint32_t b1) {
  emulator::mma_m16n8k16(d, {a0, a1, a2, a3}, {b0, b1});
}

}  // namespace mk
