// The two warps that stream weights. Dense weights do not depend on activations: their ring runs ahead through every
// phase and layer. Expert pages are issued the moment the router's logits are there.
#pragma once
#include "block.cuh"

namespace mk {

template <int kSlots>
struct Stream {
  Ring<kSlots> ring;
  uint32_t base, slot_bytes, flight;
  uint64_t policy;
  const volatile int32_t* quit;
  // Waits for a free slot and for room in flight. False when the consumers left: they may stop while this warp is steps
  // ahead of them.
  __device__ __forceinline__ bool open() {
    while (!mbarrier_try_wait(ring.empty + 8 * ring.slot(), ring.parity() ^ 1))
      if (*quit) return false;
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
    mbarrier_expect_bytes(barrier(), bytes);
    bulk_copy(address(), src, bytes, barrier(), policy);
    ring.n++;
    return true;
  }
  // A block must not end under a copy into its shared memory.
  __device__ __forceinline__ void drain() {
    for (uint32_t pages = min(ring.n, (uint32_t)kSlots); pages; pages--) back(pages).wait_full();
  }
};

// The dense pages of one SM in the order it reads them, step after step without an end: QKV and output projection of every
// layer, then lm_head.
struct DenseCursor {
  const Params& p;
  int sm, run = -1;
  const uint8_t *at = nullptr, *end = nullptr;
  __device__ __forceinline__ bool next(const uint8_t*& page) {  // true at the first page of a run
    const bool enter = at == end;
    while (at == end) {
      run = run == 2 * kLayers ? 0 : run + 1;
      const uint8_t* layer = p.dense + (run / 2) * kDenseLayerBytes;
      if (run == 2 * kLayers) {
        at = p.head + (int64_t)first_item(kHeadUnits, sm) * kQkvPagesPerUnit * kPageBytes;
        end = p.head + (int64_t)first_item(kHeadUnits, sm + 1) * kQkvPagesPerUnit * kPageBytes;
      } else if (run % 2 == 0) {
        at = layer + (int64_t)first_item(kQkvUnits, sm) * kQkvPagesPerUnit * kPageBytes;
        end = layer + (int64_t)first_item(kQkvUnits, sm + 1) * kQkvPagesPerUnit * kPageBytes;
      } else {
        at = layer + kQkvBytes + (int64_t)min(sm, kOwners) * kOutPages * kPageBytes;
        end = layer + kQkvBytes + (int64_t)min(sm + 1, kOwners) * kOutPages * kPageBytes;
      }
    }
    page = at;
    at += kPageBytes;
    return enter;
  }
  __device__ __forceinline__ int pages_per_step() const {
    return (kLayers * (first_item(kQkvUnits, sm + 1) - first_item(kQkvUnits, sm)) + first_item(kHeadUnits, sm + 1) -
            first_item(kHeadUnits, sm)) * kQkvPagesPerUnit + (sm < kOwners ? kLayers * kOutPages : 0);
  }
};

// Brings this SM's share of a layer's KV cache into L2, so that attention does not meet a cold DRAM read.
__device__ __forceinline__ void prefetch_cache(const Params& p, int unit, int layer, int position) {
  const int splits = 1 << p.log_splits, split = unit & (splits - 1);
  const int count = min((position / kTile - split + splits) >> p.log_splits, kPrefetchTiles);
  const uint8_t* tile = p.kv + kv_tile_offset(layer, unit >> p.log_splits, split);
  for (int i = 0; i < count; i++, tile += 2 * kTileBytes << p.log_splits) bulk_prefetch(tile, 2 * kTileBytes);
}

// One thread.
__device__ __forceinline__ void produce_dense(const Params& p, Shared& s, int sm, int unit) {
  Stream<kDenseSlots> out{{smem_address(s.dense_full), smem_address(s.dense_empty)},
                          smem_address(s.dense), kPageBytes, (uint32_t)p.dense_flight, evict_first_policy(), &s.quit};
  DenseCursor now{p, sm}, later{p, sm};
  const uint8_t* page;
  for (int i = 0; i < p.ahead; i++) later.next(page);
  const int pages = now.pages_per_step();
  for (int step = 0; step < p.steps; step++)
    for (int i = 0; i < pages; i++) {
      if (p.ahead) {
        later.next(page);
        bulk_prefetch(page, kPageBytes);
      }
      if (now.next(page) && unit >= 0 && now.run % 2 == 0 && now.run < 2 * kLayers)
        prefetch_cache(p, unit, now.run / 2, p.position + step);
      if (!out.page(page, kPageBytes)) return out.drain();
    }
  out.drain();
}

// One thread: gives up when the consumers of this SM make no step forward for the wait limit, or when another SM did.
__device__ __forceinline__ void watch(const Params& p, Shared& s, int sm) {
  uint32_t seen = 0;
  uint64_t since = global_nanoseconds();
  while (*(volatile int32_t*)&s.quit == 0) {
    __nanosleep(20000);
    const uint32_t now = *(volatile uint32_t*)&s.progress;
    const uint64_t time = global_nanoseconds();
    if (now != seen) seen = now, since = time;
    if (time - since >= p.wait_limit_ns && atomicCAS(&p.report->expired, 0, 1) == 0) {
      p.report->phase = now % kPhases;
      p.report->epoch = now / kPhases;
      p.report->sm = sm;
    }
    if (*(volatile uint32_t*)&p.report->expired) *(volatile int32_t*)&s.expired = 1;
  }
}

// Larger float -> larger unsigned.
__device__ __forceinline__ uint32_t order_key(float v) {
  uint32_t u = __float_as_uint(v);
  return u & 0x80000000u ? ~u : u | 0x80000000u;
}

// The whole warp: waits for the 128 sums, chooses the eight largest (ties to the lower expert; 1/rms is positive and does
// not change the order) and leaves them in shared memory. False when the consumers left.
template <bool kDebug>
__device__ __forceinline__ bool choose_experts(const Block& b) {
  b.stamp<kDebug>(kPhaseChoose, 0);
  uint64_t sum[4];
  const uint64_t* src = b.router_words() + 4 * b.lane;
  b.wait([&] {
    ulonglong2 v[2 * kRouterParts];
#pragma unroll
    for (int i = 0; i < 2 * kRouterParts; i++) v[i] = load_relaxed_2(src + i / 2 * kExperts + i % 2 * 2);
#pragma unroll
    for (int i = 0; i < 4; i++) sum[i] = 0;
#pragma unroll
    for (int i = 0; i < 2 * kRouterParts; i++) sum[i % 2 * 2] += v[i].x, sum[i % 2 * 2 + 1] += v[i].y;
    bool complete = true;
#pragma unroll
    for (int i = 0; i < 4; i++) complete = complete && (sum[i] & 255) == kOwners;
    return complete || *(const volatile int32_t*)&b.s.quit;
  });
  if (__any_sync(~0u, *(const volatile int32_t*)&b.s.quit)) return false;
  b.stamp<kDebug>(kPhaseChoose, 1);
  float logit[4];
  uint32_t key[4];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    logit[i] = (float)((int64_t)sum[i] >> 8) * (1.f / kRouterScale);
    key[i] = order_key(logit[i]);
  }
#pragma unroll 1  // rolled: eight cold copies of it would mostly wait for instructions
  for (int k = 0; k < kTopK; k++) {
    const uint32_t local = max(max(key[0], key[1]), max(key[2], key[3]));
    const uint32_t best = __reduce_max_sync(~0u, local);
    if (b.lane == __ffs(__ballot_sync(~0u, local == best)) - 1) {
      const int i = key[0] == best ? 0 : key[1] == best ? 1 : key[2] == best ? 2 : 3;
      b.s.expert_id[b.layer & 1][k] = 4 * b.lane + i;
      b.s.expert_logit[b.layer & 1][k] = i == 0 ? logit[0] : i == 1 ? logit[1] : i == 2 ? logit[2] : logit[3];
#pragma unroll
      for (int j = 0; j < 4; j++) key[j] = i == j ? 0 : key[j];
    }
    __syncwarp();
  }
  __syncwarp();
  b.stamp<kDebug>(kPhaseChoose, 2);
  if (kDebug && b.sm == 0) {
    for (int i = 0; i < 4; i++) b.dump<kDebug>(kDumpLogits + 4 * b.lane + i, logit[i]);
    if (b.lane < kTopK) b.dump<kDebug>(kDumpIds + b.lane, (float)b.s.expert_id[b.layer & 1][b.lane]);
  }
  return true;
}

// One warp.
template <bool kDebug>
__device__ __forceinline__ void produce_experts(Block b) {
  Stream<kExpertSlots> out{{smem_address(b.s.expert_full), smem_address(b.s.expert_empty)}, smem_address(b.s.expert),
                           kPairTileBytes, (uint32_t)b.p.expert_flight, evict_first_policy(), &b.s.quit};
  constexpr int kFirstPages = 2;  // issued before the scales are fetched; a gate/up page must be left for after
  static_assert(kTokenPairUnits / kGrid > kFirstPages);
  const int u0 = first_item(kTokenPairUnits, b.sm), u1 = first_item(kTokenPairUnits, b.sm + 1);
  for (int step = 0; step < b.p.steps; step++) {
    b.traced = step + 1 == b.p.steps;
    for (b.layer = 0; b.layer < kLayers; b.layer++, b.epoch++) {
      if (!choose_experts<kDebug>(b)) return;  // nothing is under way then: consumers leave only between steps
      const int32_t* id = b.s.expert_id[b.layer & 1];
      const uint8_t* w = b.p.experts + (int64_t)b.layer * kExperts * kExpertBytes;
      auto pair_pages = [&](int first, int last) {
        for (int u = first; u < last; u++)
          out.page(w + id[u / kPairUnits] * kExpertBytes + (u % kPairUnits) * kPairTileBytes, kPairTileBytes);
      };
      if (b.lane == 0) pair_pages(u0, u0 + kFirstPages);
      if (b.lane < kTopK)
        b.s.expert_scale[b.layer & 1][b.lane] = __ldg(&b.p.expert_scales[b.layer * kExperts + id[b.lane]]);
      __syncwarp();
      if (b.lane == 0) {
        pair_pages(u0 + kFirstPages, u1);
        if (b.owner())
          for (int k = 0; k < kTopK; k += 2) {  // two experts' tiles a page
            out.open();
            mbarrier_expect_bytes(out.barrier(), 2 * kDownTileBytes);
            for (int i = 0; i < 2; i++)
              bulk_copy(out.address() + i * kDownTileBytes,
                        w + id[k + i] * kExpertBytes + kPairBytes + b.sm * kDownTileBytes, kDownTileBytes,
                        out.barrier(), out.policy);
            out.ring.n++;
          }
      }
      __syncwarp();
      b.stamp<kDebug>(kPhaseChoose, 3);
    }
  }
}

}  // namespace mk
