// The two warps that stream weights. Dense weights do not depend on activations: their ring runs ahead through every
// phase and layer. Expert pages are issued the moment the router's logits are there.
#pragma once
#include "block.cuh"

namespace mk {

struct Stream {
  Ring ring;
  uint32_t base, slot_bytes, flight;
  uint64_t policy;
  const volatile int32_t* quit;
  // Waits for a free slot and for room in flight. False when the consumers left: they may stop while this warp is steps
  // ahead of them.
  __device__ __forceinline__ bool open() {
    while (!mbarrier_try_wait(ring.empty + 8 * ring.slot(), ring.lap_parity() ^ 1))
      if (*quit) return false;
    if (flight < ring.slots && ring.n >= flight) {
      Ring old = ring;
      old.n -= flight;
      old.wait_full();
    }
    return true;
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
    Ring old = ring;
    for (old.n = ring.n > ring.slots ? ring.n - ring.slots : 0; old.n < ring.n; old.n++) old.wait_full();
  }
};

__device__ __forceinline__ bool stream_pages(Stream& out, const uint8_t* w, int first, int last) {
  for (int i = first; i < last; i++)
    if (!out.page(w + (int64_t)i * kPageBytes, kPageBytes)) return false;
  return true;
}

// Brings this SM's share of a layer's KV cache into L2, so that attention does not meet a cold DRAM read.
__device__ __forceinline__ void prefetch_cache(const Params& p, int unit, int layer, int position) {
  const int splits = 1 << p.log_splits, split = unit & (splits - 1);
  const int count = min((position / kTile - split + splits) >> p.log_splits, kPrefetchTiles);
  const uint8_t* tile = p.kv + kv_tile_offset(layer, unit >> p.log_splits, split);
  for (int i = 0; i < count; i++, tile += 2 * kTileBytes << p.log_splits) bulk_prefetch(tile, 2 * kTileBytes);
}

// One thread.
__device__ __forceinline__ void produce_dense(const Params& p, Shared& s, int sm, int unit) {
  Stream out{{smem_address(s.dense_full), smem_address(s.dense_empty), kDenseSlots},
             smem_address(s.dense), kPageBytes, (uint32_t)p.dense_flight, evict_first_policy(), &s.quit};
  const int qkv0 = first_item(kQkvUnits, sm) * kQkvPagesPerUnit, qkv1 = first_item(kQkvUnits, sm + 1) * kQkvPagesPerUnit;
  const int head0 = first_item(kHeadUnits, sm) * kQkvPagesPerUnit,
            head1 = first_item(kHeadUnits, sm + 1) * kQkvPagesPerUnit;
  constexpr int kOutPages = kOwnedRows / kPageRows * kOutPagesPerUnit;
  const int out0 = sm < kOwners ? sm * kOutPages : 0, out1 = sm < kOwners ? out0 + kOutPages : 0;
  bool going = true;
  for (int step = 0; going && step < p.steps; step++) {
    for (int layer = 0; going && layer < kLayers; layer++) {
      const uint8_t* w = p.dense + layer * kDenseLayerBytes;
      if (unit >= 0) prefetch_cache(p, unit, layer, p.position + step);
      going = stream_pages(out, w, qkv0, qkv1) && stream_pages(out, w + kQkvBytes, out0, out1);
    }
    going = going && stream_pages(out, p.head, head0, head1);
  }
  out.drain();
}

// Larger float -> larger unsigned.
__device__ __forceinline__ uint32_t order_key(float v) {
  uint32_t u = __float_as_uint(v);
  return u & 0x80000000u ? ~u : u | 0x80000000u;
}

// The whole warp: waits for the 128 logits, chooses the eight largest (ties to the lower expert), leaves identities and
// softmax weights over the eight in shared memory. False when the consumers left.
__device__ __forceinline__ bool choose_experts(const Block& b) {
  ulonglong2 v0, v1;
  const uint64_t* src = b.exchange(kXLogits) + 4 * b.lane;
  b.wait(kPhaseRouter, [&] {
    v0 = load_relaxed_2(src);
    v1 = load_relaxed_2(src + 2);
    return (b.fresh(v0.x) && b.fresh(v0.y) && b.fresh(v1.x) && b.fresh(v1.y)) || *(const volatile int32_t*)&b.s.quit;
  });
  if (__any_sync(~0u, *(const volatile int32_t*)&b.s.quit)) return false;
  const float logit[4] = {word_float(v0.x), word_float(v0.y), word_float(v1.x), word_float(v1.y)};
  uint32_t key[4];
#pragma unroll
  for (int i = 0; i < 4; i++) key[i] = order_key(logit[i]);
  float chosen = 0, mine = 0;
  int id = 0;
#pragma unroll
  for (int k = 0; k < kTopK; k++) {
    uint32_t local = max(max(key[0], key[1]), max(key[2], key[3]));
    uint32_t best = __reduce_max_sync(~0u, local);
    int from = __ffs(__ballot_sync(~0u, local == best)) - 1;
    int sub = key[0] == best ? 0 : key[1] == best ? 1 : key[2] == best ? 2 : 3;
    float value = sub == 0 ? logit[0] : sub == 1 ? logit[1] : sub == 2 ? logit[2] : logit[3];
    if (b.lane == from) {
#pragma unroll
      for (int i = 0; i < 4; i++)
        if (i == sub) key[i] = 0;
    }
    sub = __shfl_sync(~0u, sub, from);
    value = __shfl_sync(~0u, value, from);
    if (b.lane == k) {
      id = 4 * from + sub;
      mine = value;
    }
    if (k == 0) chosen = value;
  }
  float e = b.lane < kTopK ? __expf(mine - chosen) : 0.f, sum = e;
#pragma unroll
  for (int o = 4; o; o >>= 1) sum += __shfl_xor_sync(~0u, sum, o);
  if (b.lane < kTopK) {
    b.s.expert_id[b.layer & 1][b.lane] = id;
    b.s.expert_weight[b.layer & 1][b.lane] = __fdividef(e, sum);
    if (b.sm == 0) b.dump(kDumpIds + b.lane, (float)id);
  }
  __syncwarp();
  return true;
}

// One warp.
__device__ __forceinline__ void produce_experts(Block b) {
  Stream out{{smem_address(b.s.expert_full), smem_address(b.s.expert_empty), kExpertSlots},
             smem_address(b.s.expert), kPairTileBytes, (uint32_t)b.p.expert_flight, evict_first_policy(), &b.s.quit};
  const int u0 = first_item(kTokenPairUnits, b.sm), u1 = first_item(kTokenPairUnits, b.sm + 1);
  for (int step = 0; step < b.p.steps; step++)
    for (b.layer = 0; b.layer < kLayers; b.layer++, b.epoch++) {
      if (!choose_experts(b)) return;  // nothing is under way then: consumers leave only between steps
      if (b.lane == 0) {
        const int32_t* id = b.s.expert_id[b.layer & 1];
        const uint8_t* w = b.p.experts + (int64_t)b.layer * kExperts * kExpertBytes;
        for (int u = u0; u < u1; u++)
          out.page(w + id[u / kPairUnits] * kExpertBytes + (u % kPairUnits) * kPairTileBytes, kPairTileBytes);
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
    }
}

}  // namespace mk
