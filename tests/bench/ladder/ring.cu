// How fast weights come through a ring of shared-memory pages to 16 warps that read them: the producer and the ring of the
// kernels, by page size, slots and bulk copies under way. Bound: the same bytes read by bulk copies alone.
//   python tests/bench/ladder/run.py ring
#include "bench.cuh"

using namespace bench;

template <int kSlots, int kPage>
struct alignas(128) RingShared {
  uint8_t page[kSlots][kPage];
  uint64_t full[kSlots], empty[kSlots];
  int32_t quit;
};

template <int kSlots, int kPage>
__global__ void __launch_bounds__(kTeam + 32, 1)
    through_ring(const uint8_t* src, int64_t pages, uint32_t flight, uint32_t zero, uint32_t* sum) {
  MK_DYNAMIC_SHARED(raw);
  auto& s = *(RingShared<kSlots, kPage>*)raw;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 - 1;
  if (threadIdx.x == 0) {
    for (int i = 0; i < kSlots; i++) {
      mbarrier_init(smem_address(&s.full[i]), 1);
      mbarrier_init(smem_address(&s.empty[i]), kWarps);
    }
    mbarrier_init_fence();
    s.quit = 0;
  }
  __syncthreads();
  const int64_t first = pages * blockIdx.x / gridDim.x, end = pages * (blockIdx.x + 1) / gridDim.x;
  Ring<kSlots> ring{smem_address(s.full), smem_address(s.empty)};
  if (warp < 0) {
    if (lane) return;
    Stream<kSlots> out{ring, smem_address(s.page), kPage, flight, evict_first_policy(), &s.quit, nullptr};
    for (int64_t i = first; i < end; i++) out.page(src + i * kPage, kPage);
    out.drain();
    return;
  }
  uint32_t total = 0;
  constexpr int kShare = kPage / 16 / kWarps;  // 16-byte words of a warp
  for (int64_t i = first; i < end; i++) {
    ring.wait_full();
    const uint4* page = (const uint4*)s.page[ring.slot()] + warp * kShare;
    uint32_t loaded = 0;
#pragma unroll
    for (int j = 0; j < kShare; j += 32)
      if (j + lane < kShare) {
        const uint4 v = page[j + lane];
        total += v.x + 3 * v.y + 5 * v.z + 7 * v.w;
        loaded |= v.w;
      }
    ring.release(loaded, zero, lane);
  }
  atomicAdd(sum, total);
}

__global__ void plain_sum(const uint4* src, int64_t n, uint32_t* sum) {
  uint32_t total = 0;
  for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < n; i += (int64_t)gridDim.x * blockDim.x)
    total += src[i].x + 3 * src[i].y + 5 * src[i].z + 7 * src[i].w;
  atomicAdd(sum, total);
}

template <int kSlots, int kPage>
void measure(const Array<uint8_t>& weights, double bound) {
  const int64_t pages = weights.size / kPage;
  constexpr size_t kShared = sizeof(RingShared<kSlots, kPage>);
  const auto kernel = through_ring<kSlots, kPage>;
  allow_shared(kernel, kShared);
  Array<uint32_t> sums(2);
  CHECK(cudaMemset(sums.data, 0, 8));
  launch(plain_sum, 4 * kGrid, 256, 0, false, (const uint4*)weights.data, pages * kPage / 16, sums.data);
  const uint32_t wanted = sums.get(0, 1)[0];
  for (int flight = 1; flight <= kSlots; flight = flight < 4 ? flight + 1 : 2 * flight) {
    CHECK(cudaMemset(sums.data, 0, 8));
    launch(kernel, kGrid, kTeam + 32, kShared, false, weights.data, pages, (uint32_t)flight, 0u, sums.data + 1);
    expect(sums.get(1, 1)[0] == wanted, "the sum of all bytes");
    const double t = seconds([&] {
      launch(kernel, kGrid, kTeam + 32, kShared, false, weights.data, pages, (uint32_t)flight, 0u, sums.data + 1);
    });
    char what[80];
    snprintf(what, sizeof what, "%d x %d KB, %d under way", kSlots, kPage >> 10, flight);
    row("ring", what, pages * (double)kPage / t / 1e12, bound / 1e12, "TB/s", false);
  }
}

int main(int argc, char** argv) {
  Array<uint8_t> weights(megabytes(argc, argv, 4096) << 20);
  launch(fill_words, 8 * kGrid, 256, 0, false, (uint32_t*)weights.data, weights.size / 4, uint64_t{1});
  const double bound = read_bandwidth(weights.data, weights.size);
  measure<4, kPageBytes>(weights, bound);
  measure<8, kPageBytes>(weights, bound);
  measure<4, kPageChunks * kChunkBytes>(weights, bound);
  measure<16, 8192>(weights, bound);
  return finish();
}
