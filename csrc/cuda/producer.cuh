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
#pragma unroll 1
    for (uint32_t pages = min(ring.n, (uint32_t)kSlots); pages; pages--) back(pages).wait_full();
  }
};

// Brings this SM's share of a layer's KV cache into L2, so that attention does not meet a cold DRAM read.
__device__ __forceinline__ void prefetch_cache(const Params& p, int unit, int layer, int position) {
  const int splits = 1 << p.log_splits, split = unit & (splits - 1);
  const int count = min((position / kTile - split + splits) >> p.log_splits, kPrefetchTiles);
  const uint8_t* tile = p.kv + kv_tile_offset(layer, unit >> p.log_splits, split);
#pragma unroll 1
  for (int i = 0; i < count; i++, tile += 2 * kTileBytes << p.log_splits) bulk_prefetch(tile, 2 * kTileBytes);
}

// Pages that the ring cannot hold come into L2 in the one part of a layer in which memory is idle: from the moment this
// SM has multiplied its gate/up pages. Earlier they would delay the experts. Not at all when the next slot is free
// already.
__device__ __forceinline__ void prefetch_when_idle(const Stream<kDenseSlots>& out, const Shared& s, const uint8_t* w,
                                                   int pages, uint32_t down) {
  const Ring<kDenseSlots>& ring = out.ring;
  while (*(const volatile uint32_t*)&s.progress < down)
    if (mbarrier_try_wait(ring.empty + 8 * ring.slot(), ring.parity() ^ 1)) return;
  bulk_prefetch(w, pages * kPageBytes);
}

// One thread.
__device__ __forceinline__ void produce_dense(const Params& p, Shared& s, int sm, int unit) {
  Stream<kDenseSlots> out{{smem_address(s.dense_full), smem_address(s.dense_empty)},
                          smem_address(s.dense),
                          kPageBytes,
                          (uint32_t)p.dense_flight,
                          evict_first_policy(),
                          &s.quit};
  const int qkv0 = first_item(kQkvUnits, sm) * kQkvPagesPerUnit,
            qkv_pages = first_item(kQkvUnits, sm + 1) * kQkvPagesPerUnit - qkv0;
  const int head0 = first_item(kHeadUnits, sm) * kQkvPagesPerUnit,
            head_pages = first_item(kHeadUnits, sm + 1) * kQkvPagesPerUnit - head0;
  const int out_pages = sm < kOwners ? kOutPages : 0;
  uint32_t epoch = p.first_epoch;  // of the layer before
#pragma unroll 1
  for (int step = 0; step < p.steps; step++) {
#pragma unroll 1
    for (int layer = 0; layer < kLayers; layer++, epoch++) {
      const uint8_t* qkv = p.dense + layer * kDenseLayerBytes + (int64_t)qkv0 * kPageBytes;
      const uint8_t* o = p.dense + layer * kDenseLayerBytes + kQkvBytes + (int64_t)sm * kOutPages * kPageBytes;
      if (unit >= 0) prefetch_cache(p, unit, layer, p.position + step);
#pragma unroll 1
      for (int i = 0; i < qkv_pages + out_pages; i++) {
        if (i == kDenseSlots && layer && p.prefetch) {
          if (qkv_pages > i)
            prefetch_when_idle(out, s, qkv + i * kPageBytes, qkv_pages - i, epoch * kPhases + kPhaseDown);
          if (out_pages && p.prefetch > 1) prefetch_when_idle(out, s, o, out_pages, epoch * kPhases + kPhaseDown);
        }
        // What fits into the ring is fetched while the router's exchanges wait behind it, the rest while nobody does.
        out.flight = i < kDenseSlots ? p.qkv_flight : p.dense_flight;
        const uint8_t* w = i < qkv_pages ? qkv + i * kPageBytes : o + (i - qkv_pages) * kPageBytes;
        if (!out.page(w, kPageBytes)) return out.drain();
      }
    }
    out.flight = p.head_flight;  // no exchange waits behind these
#pragma unroll 1
    for (int i = 0; i < head_pages; i++)
      if (!out.page(p.head + (int64_t)(head0 + i) * kPageBytes, kPageBytes)) return out.drain();
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

// Larger float -> larger unsigned, never 0 for a number; and back.
__device__ __forceinline__ uint32_t order_key(uint32_t bits) { return bits & 0x80000000u ? ~bits : bits | 0x80000000u; }
__device__ __forceinline__ float key_value(uint32_t key) {
  return __uint_as_float(key & 0x80000000u ? key ^ 0x80000000u : ~key);
}

// One warp of SM e: adds up the products of router row e that the consumer warps leave, layer after layer, and
// publishes the logit. It lacks 1/rms, which is positive and does not change the order.
template <bool kDebug>
__device__ __forceinline__ void sum_logits(Block b) {
  if (b.sm >= kExperts) return;
  for (;;)
    for (b.layer = 0; b.layer < kLayers; b.layer++, b.epoch++) {
      router_wait<kTeam + 32>();
      if (*(const volatile int32_t*)&b.s.quit) return;
      float sum = b.s.router_dot[b.lane % kWarps];
#pragma unroll
      for (int i = 1; i < kWarps; i *= 2) sum += __shfl_xor_sync(~0u, sum, i);
      if (b.lane < kLogitCopies) b.publish(kXLogits + b.lane * kExperts + b.sm, sum);
      if (b.lane == 0) b.dump<kDebug>(kDumpLogits + b.sm, sum);
    }
}

// The whole warp waits for the 128 logits, chooses the eight largest (ties to the lower expert; 1/rms is positive and
// does not change the order) and leaves them in shared memory. False when the consumers left.
template <bool kDebug>
__device__ __forceinline__ bool choose_experts(const Block& b) {
  const volatile int32_t& quit = b.s.quit;
  int32_t* chosen = b.s.expert_id[b.layer & 1];
  float* logits = b.s.expert_logit[b.layer & 1];
  b.stamp<kDebug>(kPhaseChoose, 0);
  // Rehearsed when this SM has done its part of the router: then the logits are an exchange away.
  while (*(const volatile uint32_t*)&b.s.progress < b.epoch * kPhases + kPhaseRouter && !quit) __nanosleep(20);
  rehearse([&](bool real) {
    ulonglong2 v0, v1;
    const uint64_t* src = b.exchange(kXLogits) + b.sm % kLogitCopies * kExperts + 4 * b.lane;
    b.wait([&] {
      v0 = load_relaxed_2(src);
      v1 = load_relaxed_2(src + 2);
      return (b.fresh(v0.x) && b.fresh(v0.y) && b.fresh(v1.x) && b.fresh(v1.y)) || quit || !real;
    });
    __syncwarp();
    if (real) b.stamp<kDebug>(kPhaseChoose, 1);
    // {order key, expert} of this lane, largest first: after that a round is one reduction, one vote and a shift.
    uint32_t key[4] = {order_key((uint32_t)v0.x), order_key((uint32_t)v0.y), order_key((uint32_t)v1.x),
                       order_key((uint32_t)v1.y)};
    int id[4] = {4 * b.lane, 4 * b.lane + 1, 4 * b.lane + 2, 4 * b.lane + 3};
    auto sort = [&](int i, int j) {  // equal keys keep their order because only neighbours are compared
      const bool swap = key[j] > key[i];
      const uint32_t k = swap ? key[j] : key[i];
      key[j] = swap ? key[i] : key[j];
      key[i] = k;
      const int n = swap ? id[j] : id[i];
      id[j] = swap ? id[i] : id[j];
      id[i] = n;
    };
    sort(0, 1), sort(2, 3), sort(1, 2), sort(0, 1), sort(2, 3), sort(1, 2);
    const uint32_t self = 1u << b.lane, not_higher = self | (self - 1);
    uint32_t head = key[0], next = key[1], third = key[2], fourth = key[3], ranks = 0, shift = 0;
#pragma unroll 1
    for (uint32_t k = 0; k < kTopK; k++) {
      const uint32_t best = __reduce_max_sync(~0u, head);
      const bool win = (__ballot_sync(~0u, head == best) & not_higher) == self;
      ranks |= win ? k << shift : 0;
      shift += win ? 8 : 0;
      head = win ? next : head;
      next = win ? third : next;
      third = win ? fourth : third;
      fourth = win ? 0 : fourth;
    }
#pragma unroll
    for (uint32_t i = 0; i < 4; i++)
      if (8 * i < shift) {
        const uint32_t k = ranks >> 8 * i & 255;
        chosen[k] = id[i];
        logits[k] = key_value(key[i]);
      }
    __syncwarp();
  });
  if (__any_sync(~0u, quit)) return false;
  b.stamp<kDebug>(kPhaseChoose, 2);
  if (b.sm == 0 && b.lane < kTopK) b.dump<kDebug>(kDumpIds + b.lane, (float)chosen[b.lane]);
  return true;
}

// One warp.
template <bool kDebug>
__device__ __forceinline__ void produce_experts(Block b) {
  Stream<kExpertSlots> out{{smem_address(b.s.expert_full), smem_address(b.s.expert_empty)},
                           smem_address(b.s.expert),
                           kPairTileBytes,
                           (uint32_t)b.p.expert_flight,
                           evict_first_policy(),
                           &b.s.quit};
  constexpr int kFirstPages = 2;  // issued before the scales are fetched; a gate/up page must be left for after
  static_assert(kTokenPairUnits / kGrid > kFirstPages);
  const int u0 = first_item(kTokenPairUnits, b.sm), u1 = first_item(kTokenPairUnits, b.sm + 1);
#pragma unroll 1
  for (int step = 0; step < b.p.steps; step++) {
    b.traced = step + 1 == b.p.steps;
    for (b.layer = 0; b.layer < kLayers; b.layer++, b.epoch++) {
      if (!choose_experts<kDebug>(b)) return;  // nothing is under way then: consumers leave only between steps
      const int32_t* id = b.s.expert_id[b.layer & 1];
      const uint8_t* w = b.p.experts + (int64_t)b.layer * kExperts * kExpertBytes;
      auto pair_pages = [&](int first, int last) {
#pragma unroll 1
        for (int u = first; u < last; u++)
          out.page(w + id[u / kPairUnits] * kExpertBytes + (u % kPairUnits) * kPairTileBytes, kPairTileBytes);
      };
      if (b.lane == 0) pair_pages(u0, u0 + kFirstPages);
      __syncwarp();
      chosen_arrive<kTeam + 32>();
      if (b.lane < kTopK)
        b.s.expert_scale[b.layer & 1][b.lane] = __ldg(&b.p.expert_scales[b.layer * kExperts + id[b.lane]]);
      __syncwarp();
      if (b.lane == 0) {
        pair_pages(u0 + kFirstPages, u1);
        if (b.owner())
#pragma unroll 1
          for (int k = 0; k < kTopK; k += 2) {  // two experts' tiles a page
            out.open();
            mbarrier_expect_bytes(out.barrier(), 2 * kDownTileBytes);
#pragma unroll 1
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
