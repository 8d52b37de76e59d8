// Rings of shared-memory pages between the thread that streams weights and the warps that multiply with them, and the
// report of a wait that ended.
#pragma once
#include <type_traits>
#include "trace.cuh"

namespace mk {

// Filled by the first SM that makes no progress for the wait limit.
struct Report {
  uint32_t expired;  // 1 once somebody gave up
  uint32_t phase, sm, epoch;
  uint32_t peer;       // 1 + the rank that it waited for, 0: none
  uint32_t abandoned;  // 1 + the rank that gave up first, 0: none did
};

// Lanes of a warp that arrive when it gives a page back: for racecheck all, so that none depends on another's arrival.
#ifdef MK_RACECHECK
constexpr int kReleaseLanes = 32;
#else
constexpr int kReleaseLanes = 1;
#endif

// One ring of shared-memory pages as its producer or one consumer warp sees it: n pages passed so far.
template <int kSlots>
struct Ring {
  static_assert((kSlots & (kSlots - 1)) == 0, "slot and lap are bit fields of the page count");
  uint32_t full, empty;  // barriers of slot 0
  uint32_t n = 0;
  __device__ __forceinline__ uint32_t slot() const { return n & (kSlots - 1); }
  __device__ __forceinline__ uint32_t parity() const { return n / kSlots & 1; }
  __device__ __forceinline__ void wait_full() const { mbarrier_wait(full + 8 * slot(), parity()); }
  // `loaded` must be or-ed from a register of every shared load of the page: the barrier's address then depends on
  // them, and the slot cannot be refilled under a load that is still under way. zero is a zero the compiler cannot see.
  __device__ __forceinline__ void release(uint32_t loaded, uint32_t zero, int lane, uint32_t count = 1) {
    uint32_t bar = (empty + 8 * slot()) | (loaded & zero);
    __syncwarp();
    if (lane == 0 || kReleaseLanes > 1) mbarrier_arrive(bar, count);
    n++;
  }
};

// Gives up when the consumers of this SM make no step forward for the wait limit, or when another SM did. progress counts
// epochs x kPhases + phase.
struct BlockWatch {
  uint64_t limit_ns;
  Report* report;
  const uint32_t& progress;
  int32_t& expired;
  int sm;
  uint32_t seen = 0, ticks = 0;
  uint64_t since = 0;
  // Called while its thread has nothing to do; looks at the clock now and then.
  __device__ __forceinline__ void tick() {
    look([&] { return limit_ns; });
  }
  template <class Limit>
  __device__ __forceinline__ void look(Limit&& limit) {
    if (ticks++ % 32) return;
    const uint32_t now = load_unordered(progress);
    const uint64_t time = global_nanoseconds();
    if (now != seen || since == 0) seen = now, since = time;
    if (time - since >= limit() && atomicCAS(&report->expired, 0, 1) == 0) {
      report->phase = now % kPhases;
      report->epoch = now / kPhases;
      report->sm = sm;
    }
    if (*(volatile uint32_t*)&report->expired) store_unordered(expired, 1);
  }
};

// The same where there are other ranks: the first block to give up tells them, so that nobody waits for what will not come. A
// block that waits for its own rank gives up a little later, for the one that knows which peer keeps them both.
struct RankWatch : BlockWatch {
  Report* const* reports = nullptr;  // of every rank
  int rank = 0;                      // this one
  const int32_t* awaited = nullptr;
  bool told = false;
  __device__ __forceinline__ void tick() {
    int32_t peer = 0;  // read before the consumers hear of it and leave their waits
    look([&] {
      peer = load_unordered(*awaited);
      return peer ? limit_ns : limit_ns + limit_ns / 16;
    });
    if (ticks % 32 != 1 || told) return;
    const volatile uint32_t& abandoned = report->abandoned;
    if (abandoned) store_unordered(expired, 1);
    told = load_unordered(expired);
    if (!told || report->sm != (uint32_t)sm) return;
    report->peer = (uint32_t)peer;  // also where another rank gave up at the same moment
    if (abandoned) return;
    for (int k = 0; k < kRanks; k++)
      if (k != rank) store_peer(&reports[k]->abandoned, (uint32_t)rank + 1);
  }
};
using Watch = std::conditional_t<(kRanks > 1), RankWatch, BlockWatch>;

// How the producer fills a page: says how many bytes will come, copies them in one piece or several, and has issued all.
// The page's `full` barrier completes when they are there.
#ifdef MK_RACECHECK
// For compute-sanitizer's racecheck, which does not follow what bulk copies tell an mbarrier: the thread copies by itself and
// arrives. Who waits for whom is the same, and every access to a page is one that the tool can judge.
__device__ __forceinline__ void page_expects(uint32_t, uint32_t) {}
__device__ __forceinline__ void page_copy(uint32_t dst, const void* src, uint32_t bytes, uint32_t, uint64_t) {
  uint4* to = (uint4*)smem_pointer(dst);
#pragma unroll 1
  for (uint32_t i = 0; i < bytes / 16; i++) to[i] = __ldcg((const uint4*)src + i);
}
__device__ __forceinline__ void page_issued(uint32_t bar) { mbarrier_arrive(bar); }
#else
__device__ __forceinline__ void page_expects(uint32_t bar, uint32_t bytes) { mbarrier_expect_bytes(bar, bytes); }
__device__ __forceinline__ void page_copy(uint32_t dst, const void* src, uint32_t bytes, uint32_t bar, uint64_t policy) {
  bulk_copy(dst, src, bytes, bar, policy);
}
__device__ __forceinline__ void page_issued(uint32_t) {}
#endif

// The producer's end of a ring. One thread.
template <int kSlots>
struct Stream {
  Ring<kSlots> ring;
  uint32_t base, slot_bytes, flight;
  uint64_t policy;
  const int32_t* quit;
  Watch* watch;  // kept while this thread waits for a slot, or NULL
  // Waits for a free slot and for room in flight. False when the consumers left: they may stop while this warp is steps
  // ahead of them.
  __device__ __forceinline__ bool open() {
    while (!mbarrier_try_wait(ring.empty + 8 * ring.slot(), ring.parity() ^ 1)) {
      if (load_unordered(*quit)) return false;
      if (watch) watch->tick();
    }
    if (flight < kSlots && ring.n >= flight) back(flight).wait_full();
    return true;
  }
  __device__ __forceinline__ Ring<kSlots> back(uint32_t pages) const {
    Ring<kSlots> old = ring;
    old.n -= pages;
    return old;
  }
  __device__ __forceinline__ uint32_t address() const { return base + ring.slot() * slot_bytes; }
  __device__ __forceinline__ uint32_t barrier() const { return ring.full + 8 * ring.slot(); }
  __device__ __forceinline__ bool page(const uint8_t* src, uint32_t bytes) {
    if (!open()) return false;
    page_expects(barrier(), bytes);
    page_copy(address(), src, bytes, barrier(), policy);
    page_issued(barrier());
    ring.n++;
    return true;
  }
  // A block must not end under a copy into its shared memory.
  __device__ __forceinline__ void drain() {
#pragma unroll 1
    for (uint32_t pages = min(ring.n, (uint32_t)kSlots); pages; pages--) back(pages).wait_full();
  }
};

// word {value, epoch}
__device__ __forceinline__ float word_float(uint64_t w) { return __uint_as_float((uint32_t)w); }

// Larger float -> larger unsigned, never 0 for a number; and back.
__device__ __forceinline__ uint32_t order_key(uint32_t bits) { return bits & 0x80000000u ? ~bits : bits | 0x80000000u; }
__device__ __forceinline__ float key_value(uint32_t key) {
  return __uint_as_float(key & 0x80000000u ? key ^ 0x80000000u : ~key);
}

// Value, then the lower row, decides.
__device__ __forceinline__ void keep_best(float& v, int& row, float v2, int row2) {
  if (v2 > v || (v2 == v && row2 < row)) v = v2, row = row2;
}

}  // namespace mk
