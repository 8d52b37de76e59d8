// What one exchange costs: 128 blocks publish 16 float32 each as {value, epoch} words, every block waits for all 2048,
// round after round; every value is checked. With 1 to 8 copies of the words, each read by a share of the blocks, and
// beside a stream of weights of 0 to 4 bulk copies of 16 KB under way per SM.
//   nvcc -std=c++20 -O3 -gencode arch=compute_90a,code=sm_90a -I csrc -I csrc/cuda -I tests/bench/ladder -o exchange \
//        tests/bench/ladder/exchange.cu && ./exchange
#include <cstdio>
#include <cstdlib>
#include "bandwidth.cuh"
#include "layout.cuh"

using namespace mk;

#define CHECK(x)                                                         \
  do {                                                                   \
    cudaError_t e_ = (x);                                                \
    if (e_ != cudaSuccess) {                                             \
      printf("%s, line %d: %s\n", #x, __LINE__, cudaGetErrorString(e_)); \
      exit(1);                                                           \
    }                                                                    \
  } while (0)

__device__ float expected(int round, int row) { return (float)(round * 7 + row); }

constexpr int kPage = 16384, kSlots = 4;
struct Buffers {
  uint8_t pages[kSlots][kPage];
  uint64_t full[kSlots];
  int32_t done;
};
__global__ void __launch_bounds__(kTeam + 32, 1)
    exchange(uint64_t* words, int copies, int rounds, const uint8_t* weights, int64_t bytes, int flight, int* wrong,
             unsigned long long* streamed) {
  extern __shared__ __align__(128) uint8_t raw[];
  Buffers& s = *(Buffers*)raw;
  const int sm = blockIdx.x, tid = threadIdx.x;
  if (tid == 0) {
    for (int i = 0; i < kSlots; i++) mbarrier_init(smem_address(&s.full[i]), 1);
    mbarrier_init_fence();
    s.done = 0;
  }
  __syncthreads();
  if (tid >= kTeam) {
    if (tid > kTeam || flight == 0) return;
    const uint64_t policy = evict_first_policy();
    uint32_t issued = 0, seen = 0;
    for (;; seen++) {
      for (; issued < seen + flight; issued++) {
        const uint32_t bar = smem_address(&s.full[issued % kSlots]);
        const int64_t at = ((int64_t)issued * kOwners + sm) * kPage % (bytes - kPage) / kPage * kPage;
        mbarrier_expect_bytes(bar, kPage);
        bulk_copy(smem_address(s.pages[issued % kSlots]), weights + at, kPage, bar, policy);
      }
      mbarrier_wait(smem_address(&s.full[seen % kSlots]), seen / kSlots & 1);
      if (*(volatile int32_t*)&s.done) break;
    }
    for (seen++; seen < issued; seen++) mbarrier_wait(smem_address(&s.full[seen % kSlots]), seen / kSlots & 1);
    atomicAdd(streamed, (unsigned long long)issued * kPage);
    return;
  }
  int bad = 0;
  for (int round = 1; round <= rounds; round++) {
    uint64_t* base = words + (int64_t)(round & 1) * 8 * kHidden;
    if (tid < kOwnedRows * copies) {
      const int row = sm * kOwnedRows + tid % kOwnedRows;
      store_relaxed(base + tid / kOwnedRows * kHidden + row,
                    (uint64_t)__float_as_uint(expected(round, row)) | (uint64_t)round << 32);
    }
    const uint64_t* src = base + sm % copies * kHidden + 4 * tid;
    ulonglong2 a, b;
    bool ready;
    do {
      a = load_relaxed_2(src);
      b = load_relaxed_2(src + 2);
      ready = a.x >> 32 == round && a.y >> 32 == round && b.x >> 32 == round && b.y >> 32 == round;
    } while (!__all_sync(~0u, ready));
    bad += __uint_as_float((uint32_t)a.x) != expected(round, 4 * tid) ||
           __uint_as_float((uint32_t)b.y) != expected(round, 4 * tid + 3);
    team_sync<kTeam>();
  }
  if (bad) atomicAdd(wrong, bad);
  if (tid == 0) *(volatile int32_t*)&s.done = 1;
}

int main() {
  setvbuf(stdout, nullptr, _IOLBF, 0);
  const int64_t bytes = (int64_t)4 << 30;
  const int rounds = 20000;
  uint64_t* words;
  uint8_t* weights;
  int* wrong;
  unsigned long long* streamed;
  CHECK(cudaMalloc(&words, 16 * kHidden * 8));
  CHECK(cudaMalloc(&weights, bytes));
  CHECK(cudaMemset(weights, 1, bytes));
  CHECK(cudaMalloc(&wrong, 4));
  CHECK(cudaMalloc(&streamed, 8));
  CHECK(cudaMemset(wrong, 0, 4));
  CHECK(cudaFuncSetAttribute(exchange, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)sizeof(Buffers)));
  const double bandwidth = mk::read_bandwidth(weights, bytes);
  printf("read bandwidth %.2f TB/s\n", bandwidth / 1e12);
  for (int flight = 0; flight <= 4; flight++)
    for (int copies = 1; copies <= 8; copies *= 2) {
      CHECK(cudaMemset(words, 0, 16 * kHidden * 8));
      CHECK(cudaMemset(streamed, 0, 8));
      int c = copies, r = rounds, f = flight;
      int64_t n = bytes;
      void* args[] = {&words, &c, &r, &weights, &n, &f, &wrong, &streamed};
      cudaEvent_t a, b;
      CHECK(cudaEventCreate(&a));
      CHECK(cudaEventCreate(&b));
      CHECK(cudaEventRecord(a));
      CHECK(cudaLaunchCooperativeKernel(exchange, kOwners, kTeam + 32, args, sizeof(Buffers), 0));
      CHECK(cudaEventRecord(b));
      CHECK(cudaDeviceSynchronize());
      float ms;
      unsigned long long moved;
      CHECK(cudaEventElapsedTime(&ms, a, b));
      CHECK(cudaMemcpy(&moved, streamed, 8, cudaMemcpyDeviceToHost));
      printf("%d copies under way, %d copies of the words: %.2f us an exchange, weights %.2f TB/s (%.0f%%)\n", flight,
             copies, ms * 1e3 / rounds, moved / (ms * 1e-3) / 1e12, 100 * moved / (ms * 1e-3) / bandwidth);
    }
  int bad;
  CHECK(cudaMemcpy(&bad, wrong, 4, cudaMemcpyDeviceToHost));
  printf(bad ? "WRONG: %d values\n" : "ok\n", bad);
  return bad != 0;
}
