// The threads that stream the step kernel's weights. Dense weights do not depend on activations: their ring runs ahead
// through every phase, layer and step. Expert pages follow the choice of experts.
#pragma once
#include <utility>
#include "step_dense.cuh"

namespace mk {

// Positions that a query of this layer sees, 0: all. Device code cannot index a constant of the host, so it asks for every
// layer in turn; where none has a window, the compiler sees that.
template <size_t... kLayer>
__device__ __forceinline__ int window_of(int layer, std::index_sequence<kLayer...>) {
  int window = 0;
  ((layer == (int)kLayer ? window = std::integral_constant<int, kWindows[kLayer]>::value : 0), ...);
  return window;
}

// Tiles of a unit that hold only positions of earlier steps, and pages of two of them. Those out of every window are left out.
struct UnitTiles {
  int first, end;  // the unit's tile i is tile i x splits + split of the cache
  __device__ __forceinline__ UnitTiles(int layer, int position, int split, int splits) {
    const int window = window_of(layer, std::make_index_sequence<kLayers>());
    const int oldest = window ? max(0, position + 1 - window) / kTile : 0;  // tile of the first position that is seen
    first = max(0, (oldest - split + splits - 1) / splits);
    end = max(first, (position / kTile - split + splits - 1) / splits);
  }
  __device__ __forceinline__ int pages() const { return ceil_div(end - first, 2); }
};

// KV splits of a step: as many as its context is worth.
__device__ __forceinline__ int step_splits(const StepParams& p, int length) {
  return max(1, min(kMaxSplits, ceil_div(ceil_div(length, kTile), p.tiles_per_split)));
}
__device__ __forceinline__ int step_splits(const StepBlock& b) { return step_splits(b.p, b.position() + b.tokens()); }

// The pages of `units` row units in the order in which dense_product() wants them. False when the consumers left.
template <bool kFp8, int kK, int kTiles>
__device__ __forceinline__ bool dense_pages(Stream<kStepSlots>& out, const uint8_t* w, int units) {
  using Shape = DenseShape<kFp8, kK, kTiles>;
#pragma unroll 1
  for (int first = 0; first < units; first += kDenseChunk)
#pragma unroll 1
    for (int h0 = 0; h0 < Shape::kPages; h0 += Shape::kBlock)
#pragma unroll 1
      for (int u = first; u < min(units, first + kDenseChunk); u++)
#pragma unroll 1
        for (int h = h0; h < min(Shape::kPages, h0 + Shape::kBlock); h++)
          if (!out.page(w + u * unit_bytes(kK, kFp8) + (int64_t)h * kPageBytes, page_bytes(kK, kFp8, h))) return false;
  return true;
}
// Brings what the ring cannot hold of a matrix into L2.
template <bool kFp8, int kK>
__device__ __forceinline__ void prefetch_pages(const uint8_t* w, int units, int skip) {
  const int64_t bytes = units * unit_bytes(kK, kFp8);
#pragma unroll 1
  for (int64_t at = (int64_t)skip * kPageBytes; at < bytes; at += kPageBytes)
    bulk_prefetch(w + at, (uint32_t)min((int64_t)kPageBytes, bytes - at));
}

// One thread, which also watches the time.
template <int kTiles>
__device__ __forceinline__ void step_produce_dense(const StepBlock& b) {
  const StepParams& p = b.p;
  Watch watch{p.wait_limit_ns, p.report, b.s.progress, b.s.expired, b.sm()};
  Stream<kStepSlots> out{{smem_address(b.s.dense_full), smem_address(b.s.dense_empty)},
                         smem_address(b.s.dense),
                         kPageBytes,
                         (uint32_t)p.dense_flight,
                         evict_first_policy(),
                         &b.s.quit,
                         &watch};
  const int qkv0 = first_item(kQkvUnits, b.sm()), qkv = first_item(kQkvUnits, b.sm() + 1) - qkv0;
  const int head0 = first_item(kHeadUnits, b.sm()), head = first_item(kHeadUnits, b.sm() + 1) - head0;
  constexpr int kPerUnit = kUnitRows / kPageRows;
  const int steps = step_count(p);
  const auto stream = [&] {
#pragma unroll 1
    for (int i = 0; i < steps; i++) {
      out.flight = p.dense_flight;
#pragma unroll 1
      for (int layer = 0; layer < kLayers; layer++) {
        const uint8_t* w = p.dense + layer * kDenseLayerBytes;
        stamp_stream(p, i, layer, kStreamQkv, 0);
        if (!dense_pages<kAttentionFp8, kHidden, kTiles>(out, w + qkv0 * unit_bytes(kHidden, kAttentionFp8), qkv)) return;
        stamp_stream(p, i, layer, kStreamQkv, 1);
        stamp_stream(p, i, layer, kStreamOut, 0);
        if (!dense_pages<kAttentionFp8, kQRows, kTiles>(
                out, w + kQkvBytes + b.first_unit() * kPerUnit * unit_bytes(kQRows, kAttentionFp8),
                b.units() * kPerUnit))
          return;
        stamp_stream(p, i, layer, kStreamOut, 1);
      }
      if (!step_at(p, i).head) continue;
      out.flight = p.head_flight;
      stamp_stream(p, i, kLayers, kStreamHead, 0);
      if (!dense_pages<kHeadFp8, kHidden, kTiles>(out, p.head + head0 * unit_bytes(kHidden, kHeadFp8), head)) return;
      stamp_stream(p, i, kLayers, kStreamHead, 1);
    }
    while (*out.quit == 0) {  // the consumers are behind
      __nanosleep(1000);
      watch.tick();
    }
  };
  stream();
  out.drain();
}

// Every SM brings a part of the next layer's router rows into L2; what a division leaves over comes when it is read.
constexpr uint32_t kRouterShare = kRouterBytes / kGrid / 16 * 16;

// Named barrier 2: from the consumers, who choose the experts, to the thread that streams them.
constexpr int kChosenThreads = kTeam + 32;

// The pages of one layer's experts that an SM streams, once the active ones are known: gate/up tiles, then down tiles.
struct ExpertPages {
  const StepBlock& b;
  const uint8_t* w;  // of the layer
  int active, u0, pair_pages, per_unit, total;

  __device__ __forceinline__ ExpertPages(const StepBlock& b, int layer)
      : b(b), w(b.p.experts + (int64_t)layer * kExperts * kExpertBytes), active(b.s.active_count) {
    u0 = first_item(active * kPairUnits, b.sm());
    pair_pages = (first_item(active * kPairUnits, b.sm() + 1) - u0) * tile_pages(kHidden);
    per_unit = ceil_div(active, kDownPack) * kDownPages;
    total = pair_pages + b.units() * per_unit;
  }
  // Calls piece(source, bytes) for every tile in page n; they are equally large and lie one after the other in a slot.
  template <class Piece>
  __device__ __forceinline__ void each(int n, Piece&& piece) const {
    if (n < pair_pages) {
      const int u = u0 + n / tile_pages(kHidden), page = n % tile_pages(kHidden);
      piece(w + b.s.active[u / kPairUnits] * kExpertBytes + (int64_t)(u % kPairUnits) * kPairTileBytes +
                page * kPageChunks * kChunkBytes,
            tile_page_chunks(kHidden, page) * kChunkBytes);
      return;
    }
    n -= pair_pages;
    const int unit = n / per_unit, i = n % per_unit / kDownPages * kDownPack, page = n % kDownPages;
    const int64_t tile = kPairBytes + (int64_t)(b.first_unit() + unit) * kDownTileBytes + page * kPageChunks * kChunkBytes;
#pragma unroll 1
    for (int k = i; k < min(active, i + kDownPack); k++)
      piece(w + b.s.active[k] * kExpertBytes + tile, tile_page_chunks(kMoeIntermediate, page) * kChunkBytes);
  }
};

// The pages of one layer's KV cache that an SM's attention units look at. False when the consumers left.
__device__ __forceinline__ bool cache_pages(Stream<kStepSlots>& out, const StepBlock& b, int layer, const Step& step) {
  const int position = b.p.position + step.first, splits = step_splits(b.p, position + step.tokens);
#pragma unroll 1
  for (int unit = b.sm(); unit < kKvHeads * splits; unit += kGrid) {
    const UnitTiles tiles(layer, position, unit % splits, splits);
#pragma unroll 1
    for (int i = tiles.first; i < tiles.end; i += 2) {
      if (!out.open()) return false;
      const int count = min(2, tiles.end - i);
      mbarrier_expect_bytes(out.barrier(), count * 2 * kTileBytes);
#pragma unroll 1
      for (int k = 0; k < count; k++)
        bulk_copy(out.address() + k * 2 * kTileBytes,
                  b.p.kv + kv_tile_offset(layer, unit / splits, (i + k) * splits + unit % splits), 2 * kTileBytes,
                  out.barrier(), out.policy);
      out.ring.n++;
    }
  }
  return true;
}

// One warp, of which one lane issues. Tiles of the cache were written a step ago: the barrier below and those of the grid lie
// between, and a fence, because copies read past the path that stores took. Pages further ahead than the ring come into L2: while the consumers hold the ring's
// slots, memory goes on.
__device__ __forceinline__ void step_produce_experts(StepBlock b) {
  const StepParams& p = b.p;
  Stream<kStepSlots> out{{smem_address(b.s.expert_full), smem_address(b.s.expert_empty)},
                         smem_address(b.s.expert),
                         kSlotBytes,
                         (uint32_t)p.expert_flight,
                         evict_first_policy(),
                         &b.s.quit,
                         nullptr};
#pragma unroll 1
  for (int i = 0;; i++)
#pragma unroll 1
    for (int layer = 0; layer < kLayers; layer++) {
      if (b.lane() == 0 && i < step_count(p)) {
        fence_copies();
        stamp_stream(p, i, layer, kStreamCache, 0);
        cache_pages(out, b, layer, step_at(p, i));
        stamp_stream(p, i, layer, kStreamCache, 1);
      }
      __syncwarp();
      barrier_sync<2, kChosenThreads>();
      if (*(const volatile int32_t*)&b.s.quit) {
        if (b.lane() == 0) out.drain();
        return;
      }
      if (b.lane() == 0) {
        stamp_stream(p, i, layer, kStreamExperts, 0);
        const ExpertPages pages(b, layer);
        int ahead = kStepSlots;
#pragma unroll 1
        for (int n = 0; n < pages.total; n++) {
#pragma unroll 1
          for (; ahead < min(pages.total, n + kStepSlots + p.expert_ahead); ahead++)
            pages.each(ahead, [](const uint8_t* src, uint32_t bytes) { bulk_prefetch(src, bytes); });
          if (!out.open()) return;
          uint32_t bytes = 0;
          pages.each(n, [&](const uint8_t*, uint32_t size) { bytes += size; });
          mbarrier_expect_bytes(out.barrier(), bytes);
          uint32_t to = out.address();
          pages.each(n, [&](const uint8_t* src, uint32_t size) {
            bulk_copy(to, src, size, out.barrier(), out.policy);
            to += size;
          });
          out.ring.n++;
        }
        stamp_stream(p, i, layer, kStreamExperts, 1);
        bulk_prefetch(p.routers + ((layer + 1) % kLayers) * kRouterBytes + b.sm() * kRouterShare, kRouterShare);
        // Memory is idle while this layer ends and the next begins: the dense weights that do not fit the ring.
        if (p.dense_ahead && layer + 1 < kLayers) {
          const uint8_t* next = p.dense + (layer + 1) * kDenseLayerBytes;
          const int qkv0 = first_item(kQkvUnits, b.sm()), qkv = first_item(kQkvUnits, b.sm() + 1) - qkv0;
          constexpr int kPerUnit = kUnitRows / kPageRows;
          prefetch_pages<kAttentionFp8, kHidden>(next + qkv0 * unit_bytes(kHidden, kAttentionFp8), qkv, kStepSlots);
          if (p.dense_ahead > 1)
            prefetch_pages<kAttentionFp8, kQRows>(
                next + kQkvBytes + b.first_unit() * kPerUnit * unit_bytes(kQRows, kAttentionFp8), b.units() * kPerUnit, 0);
        }
      }
      __syncwarp();
    }
}

}  // namespace mk
