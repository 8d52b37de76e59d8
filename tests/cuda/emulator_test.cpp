// Every primitive of the emulator against plain expectations. Without an argument: all checks, exit 1 when one fails.
// With the name of a mistake: a kernel that makes it, which the emulator must report.
#include <cstdio>
#include <cstdlib>
#include <string>
#include <utility>
#include <vector>
#include "ptx.cuh"

using namespace mk;

static int failures = 0;
#define CHECK(x)                                                \
  do {                                                          \
    if (!(x)) {                                                 \
      if (failures++ < 20) printf("line %d: %s\n", __LINE__, #x); \
    }                                                           \
  } while (0)

template <class... P>
static void run(int blocks, int threads, size_t shared, void (*kernel)(P...), std::type_identity_t<P>... values) {
  void* args[] = {&values..., nullptr};
  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared);
  CHECK(cudaLaunchCooperativeKernel(kernel, blocks, threads, args, shared, nullptr) == cudaSuccess);
}
static uint64_t* device_words(size_t n) {
  uint64_t* p;
  CHECK(cudaMalloc(&p, n * 8) == cudaSuccess && cudaMemset(p, 0, n * 8) == cudaSuccess);
  return p;
}

// ---- lanes ---------------------------------------------------------------------------------------------------------
__global__ void shuffles() {
  const int lane = threadIdx.x % 32;
  CHECK(blockDim.x == 64 && gridDim.x == 2 && threadIdx.x < 64 && blockIdx.x < 2);
  CHECK(__shfl_sync(~0u, lane * 3, 7) == 21 && __shfl_sync(~0u, lane, lane + 1) == (lane + 1) % 32);
  CHECK(__shfl_sync(~0u, lane, 1, 8) == lane / 8 * 8 + 1);
  CHECK(__shfl_xor_sync(~0u, (float)lane, 16) == (float)(lane ^ 16));
  CHECK(__shfl_xor_sync(~0u, lane, 9, 8) == (lane / 8 % 2 ? lane ^ 9 : lane));
  CHECK(__shfl_down_sync(~0u, (uint64_t)lane << 40, 3) == (uint64_t)(lane + 3 < 32 ? lane + 3 : lane) << 40);
  CHECK(__shfl_up_sync(~0u, lane, 5) == (lane < 5 ? lane : lane - 5));
  CHECK(__ballot_sync(~0u, lane % 3 == 0) == 0x49249249u);
  CHECK(__any_sync(~0u, lane == 31) && !__any_sync(~0u, 0) && __all_sync(~0u, 2) && !__all_sync(~0u, lane != 4));
  CHECK(__reduce_max_sync(~0u, 0x80000000u + lane) == 0x8000001Fu && __reduce_min_sync(~0u, 5u + lane) == 5u);
  CHECK(__reduce_max_sync(~0u, lane - 40) == -9 && __reduce_min_sync(~0u, lane - 40) == -40);
  CHECK(__reduce_add_sync(~0u, lane) == 496 && __reduce_and_sync(~0u, ~(1u << lane % 4)) == 0xFFFFFFF0u);
  CHECK(__reduce_or_sync(~0u, 1u << lane) == ~0u && __reduce_xor_sync(~0u, (uint32_t)lane) == 0);
  CHECK(__match_any_sync(~0u, lane % 16) == 0x10001u << lane % 16);
  CHECK(warp_sum((float)lane) == 496.f);
  if (lane % 2) {  // halves meet on their own
    CHECK(__shfl_xor_sync(0xAAAAAAAAu, lane, 2) == (lane ^ 2));
    __syncwarp(0xAAAAAAAAu);
  } else {
    CHECK(__ballot_sync(0x55555555u, 1) == 0x55555555u);
  }
}

// One lane writes, all read, without a lane in the way.
__global__ void through_shared() {
  MK_DYNAMIC_SHARED(raw);
  int* word = (int*)raw;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  CHECK(word[warp] == -1);  // not yet written: all bits set
  for (int i = 0; i < 20; i++) {
    __syncwarp();
    if (lane == i) word[warp] = 100 * warp + i;
    __syncwarp();
    CHECK(word[warp] == 100 * warp + i);
  }
  __syncthreads();
  CHECK(word[(warp + 1) % (blockDim.x / 32)] == 100 * ((warp + 1) % (int)(blockDim.x / 32)) + 19);
}

// ---- named barriers ------------------------------------------------------------------------------------------------
// Three warps of 4 meet at barrier 1; warp 3 hands them something at barrier 2 and leaves.
__global__ void barriers() {
  MK_DYNAMIC_SHARED(raw);
  int* word = (int*)raw;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  if (warp == 3) {
    if (lane == 0) word[10] = 77;
    __syncwarp();
    barrier_arrive<2, 128>();
    return;
  }
  for (int i = 0; i < 30; i++) {
    if (lane == 0) word[warp] = i;
    barrier_sync<1, 96>();
    for (int w = 0; w < 3; w++) CHECK(word[w] == i);
    barrier_sync<1, 96>();
  }
  barrier_sync<2, 128>();
  CHECK(word[10] == 77);
  __syncthreads();  // of those that are left
}

// ---- mbarriers and copies ------------------------------------------------------------------------------------------
constexpr int kSlots = 4, kPages = 40, kPage = 256;
struct RingShared {
  uint8_t page[kSlots][kPage];
  uint64_t full[kSlots], empty[kSlots];
};
// Warp 0 streams pages, warps 1 and 2 read every one of them.
__global__ void ring(const uint8_t* src) {
  MK_DYNAMIC_SHARED(raw);
  RingShared& s = *(RingShared*)raw;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  if (threadIdx.x == 0)
    for (int i = 0; i < kSlots; i++) {
      mbarrier_init(smem_address(&s.full[i]), 1);
      mbarrier_init(smem_address(&s.empty[i]), 2);
    }
  mbarrier_init_fence();
  __syncthreads();
  for (int i = 0; i < kPages; i++) {
    const int slot = i % kSlots, lap = i / kSlots;
    const uint32_t full = smem_address(&s.full[slot]), empty = smem_address(&s.empty[slot]);
    if (warp == 0) {
      if (lane) continue;
      mbarrier_wait(empty, (lap & 1) ^ 1);
      mbarrier_expect_bytes(full, kPage);
      bulk_copy(smem_address(s.page[slot]), src + i * kPage, kPage / 2, full, 0);
      bulk_copy(smem_address(s.page[slot]) + kPage / 2, src + i * kPage + kPage / 2, kPage / 2, full, 0);
    } else {
      mbarrier_wait(full, lap & 1);
      for (int j = lane; j < kPage; j += 32) CHECK(s.page[slot][j] == (uint8_t)(i + j));
      __syncwarp();
      if (lane == 0) mbarrier_arrive(empty);
    }
  }
}

// Lanes copy 16 bytes each; the bytes are there when a lane has waited for its own.
__global__ void small_copies(const uint8_t* src) {
  MK_DYNAMIC_SHARED(raw);
  emulator::copy_16(raw + 16 * threadIdx.x, src + 16 * threadIdx.x);
  CHECK(((volatile uint8_t*)raw)[16 * threadIdx.x + 3] == 0xFF);
  emulator::copies_done();
  for (int i = 0; i < 16; i++) CHECK(raw[16 * threadIdx.x + i] == src[16 * threadIdx.x + i]);
  __syncthreads();
  const int other = (int)threadIdx.x ^ 33;
  CHECK(raw[16 * other] == src[16 * other]);
}

// A warp writes words of global and of shared memory by ordinary stores, which a copy of the other reads and overwrites.
enum class Fence { writer, copier, early, other_lane, shared_only, none };
__global__ void copy_after_stores(uint64_t* words, Fence fence) {
  MK_DYNAMIC_SHARED(raw);
  const uint32_t full = smem_address(raw), page = full + 128;
  const int lane = threadIdx.x % 32;
  if (threadIdx.x == 0) mbarrier_init(full, 1);
  mbarrier_init_fence();
  if (threadIdx.x >= 32) {
    if (fence == Fence::early) fence_copies();
    if (lane < 16) {
      words[lane] = 100 + (uint64_t)lane;
      ((uint64_t*)(raw + 128))[lane] = 1;
    }
    if (fence == Fence::writer) fence_copies();
    if (fence == Fence::other_lane && lane >= 16) fence_copies();
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    if (fence == Fence::copier) fence_copies();
    if (fence == Fence::shared_only) async_proxy_fence();
    mbarrier_expect_bytes(full, 128);
    bulk_copy(page, words, 128, full, 0);
  }
  mbarrier_wait(full, 0);
  if (threadIdx.x >= 32 && lane < 16) CHECK(((const uint64_t*)(raw + 128))[lane] == 100 + (uint64_t)lane);
}

// ---- between blocks ------------------------------------------------------------------------------------------------
// Every block publishes words {value, epoch}, waits for those of all others, and goes on.
__global__ void exchange(uint64_t* words, int epochs) {
  const int lane = threadIdx.x;
  for (uint32_t epoch = 1; epoch <= (uint32_t)epochs; epoch++) {
    uint64_t* now = words + (epoch & 1) * 2 * gridDim.x;
    if (lane < 2) store_relaxed(now + 2 * blockIdx.x + lane, (uint64_t)epoch << 32 | (100 * blockIdx.x + lane + epoch));
    for (unsigned b = 0; b < gridDim.x; b++) {
      ulonglong2 v;
      do v = load_relaxed_2(now + 2 * b);
      while (!__all_sync(~0u, v.x >> 32 == epoch && v.y >> 32 == epoch));
      CHECK((uint32_t)v.x == 100 * b + epoch && (uint32_t)v.y == 100 * b + 1 + epoch);
    }
  }
}
__global__ void counters(uint32_t* c) {
  atomicAdd(&c[0], 2u);
  atomicMax(&c[1], threadIdx.x);
  while (atomicCAS(&c[2], 0u, 1u)) {  // a lock
  }
  __threadfence();
  c[3] = c[3] + 1;
  __threadfence();
  atomicExch(&c[2], 0u);
  const uint64_t before = global_nanoseconds();
  __nanosleep(5000);
  CHECK(global_nanoseconds() >= before + 5000);
}
__global__ void one_block_after_another(int* log) {
  __shared__ int sum[2];
  if (threadIdx.x == 0) sum[0] = 0;
  __syncthreads();
  if (threadIdx.x % 32 == 0) sum[0] += 1 + (int)blockIdx.x;
  __syncthreads();
  if (threadIdx.x == 0) log[blockIdx.x] = sum[0];
}

// ---- arithmetic ----------------------------------------------------------------------------------------------------
static uint32_t bits(float v) { return __float_as_uint(v); }
static float a_value(int i, int k) { return (float)((i * 7 + k * 3) % 11) - 5; }
static float b_value(int k, int j) { return (float)((k * 5 + j) % 9) / 4 - 1; }
__global__ void products() {
  const int lane = threadIdx.x, g = lane / 4, t = lane % 4;
  auto a = [&](int i, int k) { return pack_bf16x2(a_value(i, k), a_value(i, k + 1)); };
  auto b = [&](int k) { return pack_bf16x2(b_value(k, g), b_value(k + 1, g)); };
  float d[4];
  for (int i = 0; i < 4; i++) d[i] = (float)(1000 * i);
  mma_bf16(d, a(g, 2 * t), a(g + 8, 2 * t), a(g, 2 * t + 8), a(g + 8, 2 * t + 8), b(2 * t), b(2 * t + 8));
  for (int i = 0; i < 4; i++) {
    float want = (float)(1000 * i);
    for (int k = 0; k < 16; k++) want += a_value(g + 8 * (i / 2), k) * b_value(k, 2 * t + i % 2);
    CHECK(d[i] == want);
  }
}
static void arithmetic() {
  CHECK(pack_bf16x2(1.f, -2.f) == 0xC0003F80u);
  CHECK(pack_bf16x2(__uint_as_float(0x3F808000), __uint_as_float(0x3F818000)) == 0x3F823F80u);  // ties to even
  CHECK(pack_bf16x2(NAN, INFINITY) == 0x7F807FFFu && pack_bf16x2(3.4e38f, 0.f) == 0x00007F80u);
  CHECK(mul_bf16x2(0x3F803F80u, 0x40004080u) == 0x40004080u);
  CHECK(mul_bf16x2(0x00010040u, 0x3F803F00u) == 0x00010020u);  // subnormals stay
  CHECK(mul_bf16x2(0x00010003u, 0x3F003F00u) == 0x00000002u);  // half of the smallest: ties to even
  CHECK(bits(bf16_low(0x12343F80u)) == 0x3F800000u && bits(bf16_high(0x40401234u)) == 0x40400000u);
  CHECK(exp2_approx(3.f) == 8.f && exp2_approx(-INFINITY) == 0.f && exp2_approx(-127.f) == 0.f);
  CHECK(bit_select(0x0F0F0F0Fu, 0x12345678u, 0x9ABCDEF0u) == 0x92B4D6F8u);
  CHECK(__byte_perm(0x33221100u, 0x77665544u, 0x7160) == 0x77116600u);
  CHECK(__byte_perm(0x0000F010u, 0, 0x4140) == 0x00F00010u && __byte_perm(0x80u, 0, 0x1118) == 0x000000FFu);
  CHECK(__funnelshift_l(0x80000001u, 0x1u, 4) == 0x18u && __funnelshift_r(0x10u, 0x3u, 4) == 0x30000001u);
  CHECK(__popc(0xF0F1) == 9 && __ffs(0) == 0 && __ffs(0x50) == 5 && __clz(0) == 32 && __clz(0x100) == 23);
  CHECK(min(3u, 5) == 3u && max(-2, 7) == 7 && rsqrtf(4.f) == 0.5f && __fdividef(1.f, 4.f) == 0.25f);
  CHECK(sizeof(uint4) == 16 && alignof(uint4) == 16 && alignof(float2) == 8 && alignof(ulonglong2) == 16);
}

// ---- mistakes ------------------------------------------------------------------------------------------------------
__global__ void forgotten_barrier() {
  if (threadIdx.x / 32 != 1) barrier_sync<4, 96>();
}
__global__ void forgotten_store(uint64_t* words) {
  while (!__all_sync(~0u, load_relaxed(words) == 5)) {
  }
}
__global__ void forgotten_copy() {
  MK_DYNAMIC_SHARED(raw);
  if (threadIdx.x == 0) mbarrier_init(smem_address(raw), 1);
  __syncthreads();
  mbarrier_wait(smem_address(raw), 0);
}
__global__ void diverged() {
  if (threadIdx.x % 32 < 16)
    __syncwarp();
  else
    (void)__ballot_sync(~0u, 1);
}
__global__ void no_mbarrier() {
  MK_DYNAMIC_SHARED(raw);
  mbarrier_arrive(smem_address(raw + 16));
}
__global__ void endless() {
  MK_DYNAMIC_SHARED(raw);
  while (*(volatile int*)raw) {
  }
}
__global__ void behind_shared() {
  MK_DYNAMIC_SHARED(raw);
  raw[4096] = 1;
}
__global__ void behind_memory(const uint8_t* p) {
  if (p[4096] == 5) __nanosleep(1);
}
__global__ void left_copy(const uint8_t* p) {
  MK_DYNAMIC_SHARED(raw);
  mbarrier_init(smem_address(raw), 1);
  mbarrier_expect_bytes(smem_address(raw), 128);
  bulk_copy(smem_address(raw) + 128, p, 128, smem_address(raw), 0);
}

// Races, which only a build with -fsanitize=thread sees.
__global__ void race_of_lanes() {
  MK_DYNAMIC_SHARED(raw);
  ((int*)raw)[threadIdx.x] = 1;
  const int next = __shfl_sync(~0u, (int)threadIdx.x, (int)threadIdx.x + 1);  // orders nothing
  if (((volatile int*)raw)[0] < 9 && ((int*)raw)[next] == 5) __nanosleep(1);
}
__global__ void race_of_warps() {
  MK_DYNAMIC_SHARED(raw);
  int* word = (int*)raw;
  for (int i = 0; i < 2; i++) {
    if (threadIdx.x == 0) word[0] = i;
    __syncthreads();
    if (threadIdx.x == 32 && word[0] == 5) __nanosleep(1);  // and then the next write
  }
}
__global__ void race_of_blocks(uint64_t* words) {
  if (blockIdx.x == 0 && threadIdx.x == 0) words[2] = 7;
  __syncthreads();
  if (threadIdx.x == 0) store_relaxed(words, 1);  // add_release would order it
  while (blockIdx.x && !__all_sync(~0u, load_relaxed(words) == 1)) {
  }
  if (blockIdx.x && words[2] == 5) __nanosleep(1);
}
__global__ void race_with_copy(const uint8_t* p) {
  MK_DYNAMIC_SHARED(raw);
  const uint32_t full = smem_address(raw), empty = full + 8, page = full + 128;
  if (threadIdx.x == 0) {
    mbarrier_init(full, 1);
    mbarrier_init(empty, 1);
  }
  __syncthreads();
  for (uint32_t i = 0; i < 2; i++) {
    if (threadIdx.x == 0) {
      mbarrier_wait(empty, i ^ 1);
      mbarrier_expect_bytes(full, 128);
      bulk_copy(page, p, 128, full, 0);
    } else if (threadIdx.x == 32) {
      mbarrier_wait(full, i);
      mbarrier_arrive(empty);  // too early
      if (raw[130] == 5) __nanosleep(1);
    }
  }
}

static void mistake(const std::string& name) {
  uint64_t* words = device_words(512);
  if (name == "race_of_lanes") run(1, 32, 128, race_of_lanes);
  if (name == "race_of_warps") run(1, 64, 64, race_of_warps);
  if (name == "race_of_blocks") run(2, 32, 0, race_of_blocks, words);
  if (name == "race_with_copy") run(1, 64, 256, race_with_copy, (const uint8_t*)words);
  for (const auto& [fence, which] : {std::pair{"fence_too_early", Fence::early}, {"fence_of_another_lane", Fence::other_lane},
                                     {"fence_of_shared_memory_only", Fence::shared_only}, {"forgotten_fence", Fence::none}})
    if (name == fence) run(1, 64, 256, copy_after_stores, words, which);
  if (name == "forgotten_barrier") run(2, 96, 0, forgotten_barrier);
  if (name == "forgotten_store") run(2, 32, 0, forgotten_store, words);
  if (name == "forgotten_copy") run(1, 64, 64, forgotten_copy);
  if (name == "diverged") run(1, 32, 0, diverged);
  if (name == "no_mbarrier") run(1, 1, 64, no_mbarrier);
  if (name == "endless") run(1, 1, 64, endless);
  if (name == "behind_shared") run(1, 1, 4096, behind_shared);
  if (name == "behind_memory") run(1, 1, 0, behind_memory, (const uint8_t*)words);
  if (name == "left_copy") run(1, 1, 4096, left_copy, (const uint8_t*)words);
}

int main(int argc, char** argv) {
  if (argc > 1) {
    mistake(argv[1]);
    return 0;
  }
  arithmetic();
  run(2, 64, 0, shuffles);
  run(3, 160, 64, through_shared);
  run(3, 128, 64, barriers);
  run(1, 32, 0, products);
  std::vector<uint8_t> pages(kPages * kPage);
  for (int i = 0; i < kPages * kPage; i++) pages[i] = (uint8_t)(i / kPage + i % kPage);
  uint8_t* device_pages = (uint8_t*)device_words(pages.size() / 8);
  CHECK(cudaMemcpy(device_pages, pages.data(), pages.size(), cudaMemcpyHostToDevice) == cudaSuccess);
  run(2, 64, 1024, small_copies, (const uint8_t*)device_pages);
  uint64_t* stored = device_words(16);
  run(1, 64, 256, copy_after_stores, stored, Fence::writer);
  run(1, 64, 256, copy_after_stores, stored, Fence::copier);
  for (int i = 0; i < 10; i++) run(3, 96, sizeof(RingShared), ring, (const uint8_t*)device_pages);
  for (int i = 0; i < 10; i++) {
    uint64_t* words = device_words(4 * 5);
    run(5, 32, 0, exchange, words, 20);
    CHECK(cudaFree(words) == cudaSuccess);
  }
  uint32_t* c = (uint32_t*)device_words(2);
  run(2, 32, 0, counters, c);
  CHECK(c[0] == 128 && c[1] == 31 && c[2] == 0 && c[3] == 64);
  int* log = (int*)device_words(2);
  void* args[] = {&log};
  CHECK(cudaLaunchKernel(one_block_after_another, 4, 32, args, 0, nullptr) == cudaSuccess);
  for (int i = 0; i < 4; i++) CHECK(log[i] == i + 1);
  CHECK(cudaLaunchKernel(one_block_after_another, 1, 32, args, 49 << 10, nullptr) == cudaErrorInvalidValue);
  CHECK(cudaLaunchCooperativeKernel(one_block_after_another, 1 << 10, 32, args, 0, nullptr) ==
        cudaErrorCooperativeLaunchTooLarge);
  CHECK(cudaFree(log + 1) == cudaErrorInvalidValue && cudaFree(log) == cudaSuccess);
  printf("%d failures\n", failures);
  return failures != 0;
}
