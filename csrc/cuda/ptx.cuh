// The few PTX instructions the megakernel needs, each as one small function. All inline assembly of csrc/cuda is here.
#pragma once
#include <cstdint>

#ifdef MK_EMULATED
#include <emulated_ptx.h>  // tests/cuda/emulator: the same functions in plain C++
#else

// Declares `name` as the dynamic shared memory of the block. A macro, because a function that returned it would hide from
// the compiler which memory it is.
#define MK_DYNAMIC_SHARED(name) extern __shared__ __align__(128) uint8_t name[]

namespace mk {

__device__ __forceinline__ uint32_t smem_address(const void* p) { return (uint32_t)__cvta_generic_to_shared(p); }
__device__ __forceinline__ void* smem_pointer(uint32_t address) { return __cvta_shared_to_generic(address); }

// ---- mbarriers -----------------------------------------------------------------------------------------------------
__device__ __forceinline__ void mbarrier_init(uint32_t bar, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(arrivals) : "memory");
}
// Makes the inits visible to the copy engine; a block barrier must follow before anyone uses them.
__device__ __forceinline__ void mbarrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void mbarrier_arrive(uint32_t bar, uint32_t count = 1) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(count) : "memory");
}
__device__ __forceinline__ void mbarrier_expect_bytes(uint32_t bar, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
__device__ __forceinline__ bool mbarrier_try_wait(uint32_t bar, uint32_t parity) {
  uint32_t done;
  asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
               : "=r"(done)
               : "r"(bar), "r"(parity)
               : "memory");
  return done != 0;
}

// Before bulk copies into shared memory that this thread wrote otherwise.
__device__ __forceinline__ void async_proxy_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// ---- bulk copies ---------------------------------------------------------------------------------------------------
// Weights are read once a step: evict_first keeps them from pushing the activations out of L2.
__device__ __forceinline__ uint64_t evict_first_policy() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
__device__ __forceinline__ void bulk_copy(uint32_t dst, const void* src, uint32_t bytes, uint32_t bar,
                                          uint64_t policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::
          "r"(dst),
      "l"(src), "r"(bytes), "r"(bar), "l"(policy)
      : "memory");
}

// What this thread knows to be written to global memory by ordinary stores is there for its bulk copies afterwards.
__device__ __forceinline__ void fence_copies() { asm volatile("fence.proxy.async;" ::: "memory"); }

__device__ __forceinline__ void bulk_prefetch(const void* src, uint32_t bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(src), "r"(bytes) : "memory");
}

// 16 bytes of global memory, past L1, into shared memory; they are there after copies_done() of the same thread.
__device__ __forceinline__ void copy_16(void* to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(smem_address(to)), "l"(from) : "memory");
}
__device__ __forceinline__ void copies_done() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// ---- global memory without L1, relaxed at GPU scope ----------------------------------------------------------------
__device__ __forceinline__ void store_relaxed(uint64_t* p, uint64_t v) {
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}
__device__ __forceinline__ uint64_t load_relaxed(const uint64_t* p) {
  uint64_t v;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}
// Two neighbouring 8-byte words, each of them read whole; nothing is promised about the pair.
__device__ __forceinline__ ulonglong2 load_relaxed_2(const uint64_t* p) {
  ulonglong2 v;
  asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];" : "=l"(v.x), "=l"(v.y) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ void store_relaxed_2(uint64_t* p, uint64_t v, uint64_t w) {
  asm volatile("st.relaxed.gpu.global.v2.u64 [%0], {%1, %2};" ::"l"(p), "l"(v), "l"(w) : "memory");
}
// Arrival at a barrier of the grid: what this thread wrote or knows to be written is there for who sees it.
__device__ __forceinline__ void add_release(uint32_t* p, uint32_t v) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
__device__ __forceinline__ uint32_t load_acquire(const uint32_t* p) {
  uint32_t v;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
// To memory that the host reads; everything this thread wrote there before is visible then.
__device__ __forceinline__ void store_system(int32_t* p, int32_t v) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}

// ---- memory of another rank, which may be another GPU's: relaxed at system scope -------------------------------------
__device__ __forceinline__ void store_peer(uint32_t* p, uint32_t v) {
  asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
// Neighbouring words, each written and read whole; nothing is promised about several.
__device__ __forceinline__ void store_peer(uint32_t* p, uint2 v) {
  asm volatile("st.relaxed.sys.global.v2.u32 [%0], {%1, %2};" ::"l"(p), "r"(v.x), "r"(v.y) : "memory");
}
__device__ __forceinline__ void store_peer(uint32_t* p, uint4 v) {
  asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}
__device__ __forceinline__ void load_peer(uint32_t& v, const uint32_t* p) {
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
}
__device__ __forceinline__ void load_peer(uint2& v, const uint32_t* p) {
  asm volatile("ld.relaxed.sys.global.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p) : "memory");
}
__device__ __forceinline__ void load_peer(uint4& v, const uint32_t* p) {
  asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p)
               : "memory");
}
// What this thread wrote to the peer, or knows to be written, is there for whoever acquires the sum.
__device__ __forceinline__ void add_peer_release(uint32_t* p, uint32_t v) {
  asm volatile("red.release.sys.global.add.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
__device__ __forceinline__ uint32_t load_peer_acquire(const uint32_t* p) {
  uint32_t v;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}

__device__ __forceinline__ uint64_t global_nanoseconds() {
  uint64_t t;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
  return t;
}

// ---- warps ---------------------------------------------------------------------------------------------------------
#ifdef MK_RACECHECK
// For compute-sanitizer's racecheck: named barriers as mbarriers, on which every thread arrives. The tool follows these between
// any threads; of a barrier for some of a block's threads only its later versions know whom it orders.
__device__ __forceinline__ uint32_t named_barrier(int id) {
  __shared__ uint64_t named[16];
  return smem_address(named + id);
}
__device__ __forceinline__ void named_barrier_init(int id, int threads) { mbarrier_init(named_barrier(id), threads); }
__device__ __forceinline__ void group_sync(int id, int) {
  const uint32_t bar = named_barrier(id);
  uint64_t phase;
  uint32_t done = 0;
  __syncwarp();
  asm volatile("mbarrier.arrive.shared::cta.b64 %0, [%1];" : "=l"(phase) : "r"(bar) : "memory");
  while (!done)
    asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
                 : "=r"(done)
                 : "r"(bar), "l"(phase)
                 : "memory");
  __syncwarp();
}
template <int kId, int kThreads>
__device__ __forceinline__ void barrier_sync() {
  group_sync(kId, kThreads);
}
template <int kId, int kThreads>
__device__ __forceinline__ void barrier_arrive() {
  mbarrier_arrive(named_barrier(kId));
}
#else
// Named barriers, each warp counts as 32 threads. They need no init.
__device__ __forceinline__ void named_barrier_init(int, int) {}
template <int kId, int kThreads>
__device__ __forceinline__ void barrier_sync() {
  asm volatile("bar.sync %0, %1;" ::"n"(kId), "n"(kThreads) : "memory");
}
template <int kId, int kThreads>
__device__ __forceinline__ void barrier_arrive() {
  asm volatile("bar.arrive %0, %1;" ::"n"(kId), "n"(kThreads) : "memory");
}
__device__ __forceinline__ void group_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
#endif
// Registers a thread, from here on; all four warps of a warpgroup.
template <int kRegisters>
__device__ __forceinline__ void registers_decrease() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void registers_increase() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
// threadIdx.x, read again at every call, where the compiler would keep it.
__device__ __forceinline__ int thread_index() {
  int i;
  asm volatile("mov.u32 %0, %tid.x;" : "=r"(i));
  return i;
}
// The compiler forgets what it knows of these values.
__device__ __forceinline__ void forget(int& v) { asm volatile("" : "+r"(v)); }
__device__ __forceinline__ void forget(int& v, int& w) { asm volatile("" : "+r"(v), "+r"(w)); }

// ---- arithmetic ----------------------------------------------------------------------------------------------------
// mask ? a : b, bit by bit
__device__ __forceinline__ uint32_t bit_select(uint32_t mask, uint32_t a, uint32_t b) {
  uint32_t d;
  asm("lop3.b32 %0, %1, %2, %3, 0xCA;" : "=r"(d) : "r"(mask), "r"(a), "r"(b));
  return d;
}
__device__ __forceinline__ uint32_t mul_bf16x2(uint32_t a, uint32_t b) {
  uint32_t d;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}
__device__ __forceinline__ uint32_t pack_bf16x2(float low, float high) {
  uint32_t d;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
  return d;
}
__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// d[16 x 8] += a[16 x 16] b[16 x 8]. Lane (g = lane / 4, t = lane % 4) holds rows g (a0, a2) and g + 8 (a1, a3),
// columns 2t, 2t+1 (a0, a1) and 2t+8, 2t+9 (a2, a3) of a; rows likewise and column g of b; rows g, g + 8, columns 2t,
// 2t+1 of d.
__device__ __forceinline__ void mma_bf16(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                         uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

}  // namespace mk
#endif

// ---- what follows from them ----------------------------------------------------------------------------------------
namespace mk {

__device__ __forceinline__ void mbarrier_wait(uint32_t bar, uint32_t parity) {
  while (!mbarrier_try_wait(bar, parity)) {
  }
}
// Single words of shared memory that warps tell each other without a barrier: quit, expired, cancel, progress and the like. No
// order is needed, because a reader concludes nothing about other memory from them: it stops waiting, leaves after its own
// copies, or looks again, and what it misses now it sees the next time. For racecheck, which cannot know that, they are atomics.
#ifdef MK_RACECHECK
template <class T>
__device__ __forceinline__ T load_unordered(const T& word) {
  return atomicAdd((T*)&word, T(0));
}
template <class T>
__device__ __forceinline__ void store_unordered(T& word, T value) {
  atomicExch(&word, value);
}
#else
template <class T>
__device__ __forceinline__ T load_unordered(const T& word) {
  return *(const volatile T*)&word;
}
template <class T>
__device__ __forceinline__ void store_unordered(T& word, T value) {
  *(volatile T*)&word = value;
}
#endif
// Named barrier 1: the consumer warps only.
template <int kThreads>
__device__ __forceinline__ void team_sync() {
  barrier_sync<1, kThreads>();
}
// Named barrier 2 of decode_kernel: from the warp that chooses the experts to the consumers. Unlike a spin on an mbarrier it costs the
// waiting warps no instructions, which the choosing warp would have to share with them.
template <int kThreads>
__device__ __forceinline__ void chosen_arrive() {
  barrier_arrive<2, kThreads>();
}
template <int kThreads>
__device__ __forceinline__ void chosen_wait() {
  barrier_sync<2, kThreads>();
}
// Named barrier 3 of decode_kernel: from the consumers to the warp that adds their router products up.
template <int kThreads>
__device__ __forceinline__ void router_arrive() {
  barrier_arrive<3, kThreads>();
}
template <int kThreads>
__device__ __forceinline__ void router_wait() {
  barrier_sync<3, kThreads>();
}
__device__ __forceinline__ float bf16_low(uint32_t v) { return __uint_as_float(v << 16); }
__device__ __forceinline__ float bf16_high(uint32_t v) { return __uint_as_float(v & 0xFFFF0000u); }
__device__ __forceinline__ float warp_sum(float v) {
#pragma unroll
  for (int o = 16; o; o >>= 1) v += __shfl_xor_sync(~0u, v, o);
  return v;
}

}  // namespace mk
