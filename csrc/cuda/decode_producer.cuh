// The warps that stream weights, watch and add up. Dense weights do not depend on activations: their ring runs ahead through every
// phase and layer. Expert pages are issued the moment the router's logits are there.
#pragma once
#include "decode_block.cuh"

namespace mk {

// Brings this SM's share of a layer's KV cache into L2, so that attention does not meet a cold DRAM read.
__device__ __forceinline__ void prefetch_cache(const DecodeParams& p, int unit, int layer, int position) {
  const int log_splits = log_splits_at(p, position), splits = 1 << log_splits, split = unit & (splits - 1);
  const int count = min((position / kTile - split + splits) >> log_splits, kPrefetchTiles);
  const uint8_t* tile = p.kv + kv_tile_offset(layer, unit >> log_splits, split);
#pragma unroll 1
  for (int i = 0; i < count; i++, tile += 2 * kTileBytes << log_splits) bulk_prefetch(tile, 2 * kTileBytes);
}

// Pages that the ring cannot hold come into L2 in the one part of a layer in which memory is idle: from the moment this
// SM has multiplied its gate/up pages. Earlier they would delay the experts. Not at all when the next slot is free
// already.
__device__ __forceinline__ void prefetch_when_idle(const Stream<kDenseSlots>& out, const DecodeShared& s, const uint8_t* w,
                                                   int pages, uint32_t down) {
  const Ring<kDenseSlots>& ring = out.ring;
  while (load_unordered(s.progress) < down)
    if (mbarrier_try_wait(ring.empty + 8 * ring.slot(), ring.parity() ^ 1)) return;
  bulk_prefetch(w, pages * kPageBytes);
}

// One thread.
__device__ __forceinline__ void decode_produce_dense(const DecodeParams& p, DecodeShared& s, int sm) {
  Stream<kDenseSlots> out{{smem_address(s.dense_full), smem_address(s.dense_empty)},
                          smem_address(s.dense),
                          kPageBytes,
                          (uint32_t)p.dense_flight,
                          evict_first_policy(),
                          &s.quit,
                          nullptr};
  constexpr int kQkvPages = unit_pages(kHidden, kAttentionFp8), kHeadPages = unit_pages(kHidden, kHeadFp8);  // of a unit
  constexpr int kOutPages = kOwnedRows / kPageRows * unit_pages(kQRows, kAttentionFp8);                      // of an owner
  const int qkv0 = first_item(kQkvUnits, sm) * kQkvPages,
            qkv_pages = first_item(kQkvUnits, sm + 1) * kQkvPages - qkv0;
  const int head0 = first_item(kHeadUnits, sm) * kHeadPages,
            head_pages = first_item(kHeadUnits, sm + 1) * kHeadPages - head0;
  const int out_pages = sm < kOwners ? kOutPages : 0;
  uint32_t epoch = p.first_epoch;  // of the layer before
#pragma unroll 1
  for (int step = 0; step < p.steps; step++) {
    const int unit = attention_unit(log_splits_at(p, p.position + step), sm);
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
        // What fits into the ring is fetched while exchanges wait behind it, the rest while nobody does.
        out.flight = i < kDenseSlots ? p.qkv_flight : p.dense_flight;
        const uint8_t* w = i < qkv_pages ? qkv + i * kPageBytes : o + (i - qkv_pages) * kPageBytes;
        if (i == 0) stamp_stream(p, step, layer, kStreamQkv, 0);
        if (i == qkv_pages) stamp_stream(p, step, layer, kStreamOut, 0);
        if (!out.page(w, kPageBytes)) return out.drain();
        if (i + 1 == qkv_pages) stamp_stream(p, step, layer, kStreamQkv, 1);
        if (i + 1 == qkv_pages + out_pages && out_pages) stamp_stream(p, step, layer, kStreamOut, 1);
      }
    }
    out.flight = p.head_flight;  // no exchange waits behind these
    stamp_stream(p, step, kLayers, kStreamHead, 0);
#pragma unroll 1
    for (int i = 0; i < head_pages; i++)
      if (!out.page(p.head + (int64_t)(head0 + i) * kPageBytes, kPageBytes)) return out.drain();
    stamp_stream(p, step, kLayers, kStreamHead, 1);
  }
  out.drain();
}

// One thread. Of SM 0 also the ear for the host: everybody learns from there.
__device__ __forceinline__ void decode_watch(const DecodeParams& p, DecodeShared& s, int sm) {
  Watch watch{p.wait_limit_ns, p.report, s.progress, s.expired, sm};
  while (load_unordered(s.quit) == 0) {
    __nanosleep(5000);
    watch.tick();
    if (sm == 0) store_unordered(s.cancel, int32_t(*(volatile int32_t*)&p.mail->cancel != 0));
  }
}

// One warp of SM e: adds up the products of router row e that the consumer warps leave, layer after layer, and
// publishes the logit. It lacks 1/rms, which is positive and does not change the order.
template <bool kDebug>
__device__ __forceinline__ void sum_logits(DecodeBlock b) {
  if (b.sm >= kExperts) return;
  for (;;)
    for (b.layer = 0; b.layer < kLayers; b.layer++, b.epoch++) {
      router_wait<kTeam + 32>();
      if (load_unordered(b.s.quit)) return;
      float sum = b.s.router_dot[b.lane % kWarps];
#pragma unroll
      for (int i = 1; i < kWarps; i *= 2) sum += __shfl_xor_sync(~0u, sum, i);
      if (b.lane < kLogitCopies) b.publish(kXLogits + b.lane * kExperts + b.sm, sum);
      if (b.lane == 0) b.dump<kDebug>(kDumpLogits + b.sm, sum);
    }
}

// The whole warp waits for the logits, four a lane, chooses the eight largest (ties to the lower expert; 1/rms is positive and
// does not change the order) and leaves them in shared memory. False when the consumers left.
template <bool kDebug>
__device__ __forceinline__ bool choose_experts(const DecodeBlock& b) {
  const int32_t& quit = b.s.quit;
  int32_t* chosen = b.s.expert_id[b.epoch & 1];
  float* logits = b.s.expert_logit[b.epoch & 1];
  b.stamp<kDebug>(kPhaseChoose, 0);
  // Rehearsed when this SM has done its part of the router: then the logits are an exchange away.
  while (load_unordered(b.s.progress) < b.epoch * kPhases + kPhaseRouter && !load_unordered(quit)) __nanosleep(20);
  rehearse([&](bool real) {
    ulonglong2 v0, v1;
    const bool has = kExperts == 128 || 4 * b.lane < kExperts;
    const uint64_t* src = b.exchange(kXLogits) + b.sm % kLogitCopies * kExperts + (has ? 4 * b.lane : 0);
    b.wait([&] {
      v0 = load_relaxed_2(src);
      v1 = load_relaxed_2(src + 2);
      return (b.fresh(v0.x) && b.fresh(v0.y) && b.fresh(v1.x) && b.fresh(v1.y)) || load_unordered(quit) || !real;
    });
    __syncwarp();
    if (real) b.stamp<kDebug>(kPhaseChoose, 1);
    // {order key, expert} of this lane, largest first: after that a round is one reduction and a shift.
    uint32_t key[4] = {order_key((uint32_t)v0.x), order_key((uint32_t)v0.y), order_key((uint32_t)v1.x),
                       order_key((uint32_t)v1.y)};
    if (!has) key[0] = key[1] = key[2] = key[3] = 0;  // below every number's
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
    uint32_t ranks, shift;
    // A round has one winner, unless equal keys meet in it: then all is done again with votes, the lowest expert first.
#pragma unroll 1
    for (bool votes = false;; votes = true) {
      uint32_t head = key[0], next = key[1], third = key[2], fourth = key[3];
      ranks = shift = 0;
#pragma unroll 1
      for (uint32_t k = 0; k < kTopK; k++) {
        bool win = head == __reduce_max_sync(~0u, head);
        if (votes) win = (__ballot_sync(~0u, win) & not_higher) == self;
        ranks |= win ? k << (shift & 31) : 0;
        shift += win ? 8 : 0;
        head = win ? next : head;
        next = win ? third : next;
        third = win ? fourth : third;
        fourth = win ? 0 : fourth;
      }
      if (__reduce_add_sync(~0u, shift) == 8 * kTopK) break;
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
  if (__any_sync(~0u, load_unordered(quit))) return false;
  b.stamp<kDebug>(kPhaseChoose, 2);
  if (b.sm == 0 && b.lane < kTopK) b.dump<kDebug>(kDumpIds + b.lane, (float)chosen[b.lane]);
  return true;
}

// One warp.
template <bool kDebug>
__device__ __forceinline__ void decode_produce_experts(DecodeBlock b) {
  Stream<kExpertSlots> out{{smem_address(b.s.expert_full), smem_address(b.s.expert_empty)},
                           smem_address(b.s.expert),
                           kPairTileBytes,
                           (uint32_t)b.p.expert_flight,
                           evict_first_policy(),
                           &b.s.quit,
                           nullptr};
  constexpr int kFirstPages = 2;  // issued before the scales are fetched; a gate/up page must be left for after
  static_assert(!kFastDecode || kTokenPairUnits / kGrid > kFirstPages);
  const int u0 = first_item(kTokenPairUnits, b.sm), u1 = first_item(kTokenPairUnits, b.sm + 1);
#pragma unroll 1
  for (; b.step < b.p.steps; b.step++) {
    for (b.layer = 0; b.layer < kLayers; b.layer++, b.epoch++) {
      if (!choose_experts<kDebug>(b)) return;  // nothing is under way then: consumers leave only between steps
      const int32_t* id = b.s.expert_id[b.epoch & 1];
      const uint8_t* w = b.p.experts + (int64_t)b.layer * kExperts * kExpertBytes;
      auto pair_pages = [&](int first, int last) {
#pragma unroll 1
        for (int u = first; u < last; u++)
          out.page(w + id[u / kPairUnits] * kExpertBytes + (u % kPairUnits) * kPairTileBytes, kPairTileBytes);
      };
      if (b.lane == 0) {
        stamp_stream(b.p, b.step, b.layer, kStreamExperts, 0);
        pair_pages(u0, u0 + kFirstPages);
      }
      __syncwarp();
      chosen_arrive<kTeam + 32>();
      if (b.lane < kTopK)
        b.s.expert_scale[b.epoch & 1][b.lane] = __ldg(&b.p.expert_scales[b.layer * kExperts + id[b.lane]]);
      __syncwarp();
      if (b.lane == 0) {
        pair_pages(u0 + kFirstPages, u1);
        if (b.owner())
#pragma unroll 1
          for (int k = 0; k < kTopK; k += 2) {  // two experts' tiles a page
            out.open();
            page_expects(out.barrier(), 2 * kDownTileBytes);
#pragma unroll 1
            for (int i = 0; i < 2; i++)
              page_copy(out.address() + i * kDownTileBytes,
                        w + id[k + i] * kExpertBytes + kPairBytes + b.sm * kDownTileBytes, kDownTileBytes,
                        out.barrier(), out.policy);
            page_issued(out.barrier());
            out.ring.n++;
          }
        stamp_stream(b.p, b.step, b.layer, kStreamExperts, 1);
      }
      __syncwarp();
      b.stamp<kDebug>(kPhaseChoose, 3);
    }
  }
}

}  // namespace mk
