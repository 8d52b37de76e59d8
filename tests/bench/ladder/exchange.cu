// What one exchange costs: 128 blocks publish 16 float32 each as {value, epoch} words, every block waits for all 2048,
// round after round; every value is checked. With 1 to 8 copies of the words, each read by a share of the blocks, and
// beside a stream of weights of 0 to 4 bulk copies of 16 KB under way per SM.
//   python tests/bench/ladder/run.py exchange
#include "bench.cuh"

using namespace bench;

// A load that L2 has, measured on an H200; a store takes as long to get there.
constexpr double kHitCycles = 270;

__device__ float expected(int round, int row) { return (float)(round * 7 + row); }

constexpr int kPage = 16384, kSlots = 4;
static_assert(kHidden == 4 * kTeam, "a thread polls four words");
struct Buffers {
  uint8_t pages[kSlots][kPage];
  uint64_t full[kSlots];
  int32_t done;
};
__global__ void __launch_bounds__(kTeam + 32, 1)
    exchange(uint64_t* words, int copies, int rounds, const uint8_t* weights, int64_t bytes, int flight, int* wrong,
             unsigned long long* streamed) {
  MK_DYNAMIC_SHARED(raw);
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
      const uint32_t epoch = round;
      ready = a.x >> 32 == epoch && a.y >> 32 == epoch && b.x >> 32 == epoch && b.y >> 32 == epoch;
    } while (!__all_sync(~0u, ready));
    bad += word_float(a.x) != expected(round, 4 * tid) || word_float(a.y) != expected(round, 4 * tid + 1) ||
           word_float(b.x) != expected(round, 4 * tid + 2) || word_float(b.y) != expected(round, 4 * tid + 3);
    team_sync<kTeam>();
  }
  if (bad) atomicAdd(wrong, bad);
  if (tid == 0) *(volatile int32_t*)&s.done = 1;
}

int main(int argc, char** argv) {
  const int rounds = argc > 1 ? 4 * std::max(1, atoi(argv[1])) : 20000;
  Array<uint8_t> weights(megabytes(argc, argv, 4096) << 20);
  launch(fill_words, 8 * kGrid, 256, 0, false, (uint32_t*)weights.data, weights.size / 4, uint64_t{6});
  Array<uint64_t> words(16 * kHidden);
  Array<int> wrong(1);
  Array<unsigned long long> streamed(1);
  CHECK(cudaMemset(wrong.data, 0, 4));
  allow_shared(exchange, sizeof(Buffers));
  const double bandwidth = read_bandwidth(weights.data, weights.size);
  for (int flight = 0; flight <= kSlots; flight++)
    for (int copies = 1; copies <= 8; copies *= 2) {
      const double t = seconds([&] {
        CHECK(cudaMemset(words.data, 0, words.size * 8));
        CHECK(cudaMemset(streamed.data, 0, 8));
        launch(exchange, kOwners, kTeam + 32, sizeof(Buffers), true, words.data, copies, rounds, weights.data, weights.size,
               flight, wrong.data, streamed.data);
      });
      const double rate = streamed.get(0, 1)[0] / t;
      char what[80];
      snprintf(what, sizeof what, "%d words, %d copies, %d x 16 KB under way", kHidden, copies, flight);
      // The least that seems possible: the words' way to L2 and from there, at 1.98 GHz.
      row("exchange", what, t / rounds * 1e6, 2 * kHitCycles / 1980., "us", true);
      if (flight) row("exchange", "  weights meanwhile", rate / 1e12, bandwidth / 1e12, "TB/s", false);
    }
  expect(wrong.get(0, 1)[0] == 0, "values that came through");
  return finish();
}
