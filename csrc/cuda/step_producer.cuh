// The threads that stream the step kernel's weights. Dense weights do not depend on activations: their ring runs ahead
// through every phase, layer and step. Expert pages follow the choice of experts.
#pragma once
#include "step_dense.cuh"

namespace mk {

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

// How attention is dealt out: a unit is a KV head, some of the step's tokens and a split of the positions. Over few
// positions a unit has few tokens, one row block of the model's queries, because what is done once a query would take
// most of its time; over many of them a block for every squad, or the cache would be read too often.
struct AttentionPlan {
  int tokens, groups, splits;  // of a unit; units that share a KV head and a split; KV splits
  __device__ __forceinline__ AttentionPlan(const StepParams& p, int position, int step_tokens) {
    const int tiles = ceil_div(position + step_tokens, kTile);
    tokens = min(step_tokens, tiles <= kFewTiles ? kFewUnitTokens : kManyUnitTokens);
    groups = ceil_div(step_tokens, tokens);
    splits = max(1, min(kMaxSplits / groups, ceil_div(tiles, p.tiles_per_split)));
  }
  __device__ __forceinline__ int units() const { return kKvHeads * splits * groups; }
};
__device__ __forceinline__ AttentionPlan attention_plan(const StepBlock& b) { return {b.p, b.position(), b.tokens()}; }

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
// A layer's dense matrices of its MLP, those around narrow experts or a dense layer's, and their row scales. They lie behind each other,
// whatever kind a layer is of.
__device__ __forceinline__ const uint8_t* mlp_weights(const StepParams& p, int layer) {
  const int moe = moe_layers_before(layer);
  return p.dense + (int64_t)(model::mlp_at - model::dense_at) + moe * kMoeMlpBytes + (layer - moe) * kDenseMlpBytes;
}
__device__ __forceinline__ const float* mlp_scales(const StepParams& p, int layer) {
  const int moe = moe_layers_before(layer);
  return (const float*)(p.dense + (int64_t)(model::mlp_scales_at - model::dense_at)) + moe * kMoeMlpScales +
         (layer - moe) * kDenseMlpScales;
}
// Brings what the ring cannot hold of a matrix into L2.
template <bool kFp8, int kK>
__device__ __forceinline__ void prefetch_pages(const uint8_t* w, int units, int skip) {
  const int64_t bytes = units * unit_bytes(kK, kFp8);
#pragma unroll 1
  for (int64_t at = (int64_t)skip * kPageBytes; at < bytes; at += kPageBytes)
    bulk_prefetch(w + at, (uint32_t)min((int64_t)kPageBytes, bytes - at));
}

// Those of a layer's MLP: step_mlp.cuh.
template <int kTiles>
__device__ __forceinline__ bool mlp_pages(Stream<kStepSlots>& out, const StepBlock& b, const uint8_t* w, bool dense) {
  const int owned = b.first_unit() * kUnitPages, units = b.units() * kUnitPages;
  if constexpr (kHasDense)
    if (dense) {
      const int pair0 = 2 * first_item(kMlpPairs, b.sm()), pairs = 2 * first_item(kMlpPairs, b.sm() + 1) - pair0;
      return dense_pages<kDenseFp8, kHidden, kTiles>(out, w + pair0 * unit_bytes(kHidden, kDenseFp8), pairs) &&
             dense_pages<kDenseFp8, kDenseIntermediate, kTiles>(
                 out, w + kMlpPairBytes + owned * unit_bytes(kDenseIntermediate, kDenseFp8), units);
    }
  if constexpr (kNarrow) {
    const int pre0 = first_item(kPreUnits, b.sm()), pre = first_item(kPreUnits, b.sm() + 1) - pre0;
    return dense_pages<kDenseFp8, kHidden, kTiles>(out, w + pre0 * unit_bytes(kHidden, kDenseFp8), pre) &&
           dense_pages<kDenseFp8, kNarrowHidden, kTiles>(out, w + kPreBytes + owned * unit_bytes(kNarrowHidden, kDenseFp8),
                                                         units);
  }
  return true;
}

// One thread, which also watches the time.
template <int kTiles>
__device__ __forceinline__ void step_produce_dense(const StepBlock& b) {
  const StepParams& p = b.p;
  Watch watch{p.wait_limit_ns, p.report, b.s.progress, b.s.expired, b.sm()};
  watch_peers(watch, b);
  Stream<kStepSlots> out{{smem_address(b.s.dense_full), smem_address(b.s.dense_empty)},
                         smem_address(b.s.dense),
                         kPageBytes,
                         (uint32_t)p.dense_flight,
                         evict_first_policy(),
                         &b.s.quit,
                         &watch};
  const int qkv0 = first_item(kQkvUnits, b.sm()), qkv = first_item(kQkvUnits, b.sm() + 1) - qkv0;
  const int head0 = first_item(kHeadUnits, b.sm()), head = first_item(kHeadUnits, b.sm() + 1) - head0;
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
        if (!dense_pages<kAttentionFp8, kModelQRows, kTiles>(
                out, w + kQkvBytes + b.first_unit() * kUnitPages * unit_bytes(kModelQRows, kAttentionFp8),
                b.units() * kUnitPages))
          return;
        stamp_stream(p, i, layer, kStreamOut, 1);
        if constexpr (kNarrow || kHasDense) {
          stamp_stream(p, i, layer, kStreamMlp, 0);
          if (!mlp_pages<kTiles>(out, b, mlp_weights(p, layer), is_dense(layer))) return;
          stamp_stream(p, i, layer, kStreamMlp, 1);
        }
      }
      if (!step_at(p, i).head) continue;
      out.flight = p.head_flight;
      stamp_stream(p, i, kLayers, kStreamHead, 0);
      if (!dense_pages<kHeadFp8, kHidden, kTiles>(out, p.head + head0 * unit_bytes(kHidden, kHeadFp8), head)) return;
      stamp_stream(p, i, kLayers, kStreamHead, 1);
    }
    while (load_unordered(*out.quit) == 0) {  // the consumers are behind
      __nanosleep(1000);
      watch.tick();
    }
  };
  stream();
  out.drain();
}

// Every SM brings a part of the next layer's router rows into L2; what a division leaves over comes when it is read.
constexpr uint32_t kRouterShare = kRouterBytes / kGrid / 16 * 16;

// Named barrier 2: from the consumers, who choose the experts, to the warps that stream these and the one ahead.
constexpr int kExpertWarps = 2, kChosenThreads = kTeam + 32 * (kExpertWarps + 1);

// Named barrier 3: from these warps, which have read the list of active experts, to the consumers, who make another.
constexpr int kListThreads = kChosenThreads;

// Whether the consumers left before step i, asked behind barrier 2. A warp that has no page in the last layer may ask
// there when they have left already. It must come to the barrier once more, so the word says after which step that was.
__device__ __forceinline__ bool consumers_left(const StepBlock& b, int i) {
  const int32_t quit = load_unordered(b.s.quit);
  return quit && quit <= i;
}

// The pages of the active experts that this SM wants, in their order: gate/up tiles, then down tiles, of which a page
// may hold several. each(tiles, bytes of one, tile(k): where the k-th lies).
template <class Each>
__device__ __forceinline__ void each_expert_page(const StepBlock& b, const uint8_t* w, int active, Each&& each) {
  const int u0 = first_item(active * kPairUnits, b.sm()), u1 = first_item(active * kPairUnits, b.sm() + 1);
  int index = u0 / kPairUnits, unit = u0 % kPairUnits;
#pragma unroll 1
  for (int u = u0; u < u1; u++) {
#pragma unroll 1
    for (int page = 0; page < tile_pages(kExpertHidden); page++)
      each(1, tile_page_chunks(kExpertHidden, page) * kChunkBytes, [&](int) {
        const uint32_t at = unit * kPairTileBytes + page * kPageChunks * kChunkBytes;
        return w + b.s.active[index] * kExpertBytes + at;
      });
    if (++unit == kPairUnits) unit = 0, index++;
  }
#pragma unroll 1
  for (int unit = 0; unit < b.down_units(); unit++) {
    const uint8_t* tile = w + kPairBytes + (int64_t)(b.first_down_unit() + unit) * kDownTileBytes;
#pragma unroll 1
    for (int i = 0; i < active; i += kDownPack)
#pragma unroll 1
      for (int page = 0; page < kDownPages; page++)
        each(min(kDownPack, active - i), tile_page_chunks(kMoeIntermediate, page) * kChunkBytes, [&](int k) {
          return tile + b.s.active[i + k] * kExpertBytes + page * kPageChunks * kChunkBytes;
        });
  }
}

// One thread of each of the warps that stream experts and the KV cache. They take turns at the pages: one alone would need
// longer to find a page and issue it than memory to bring it.
struct ExpertStream {
  const StepBlock& b;
  const uint32_t turn;  // of this warp
  Stream<kStepSlots> out;
  uint32_t last = 0;  // page issued last, plus one

  __device__ __forceinline__ ExpertStream(const StepBlock& b, int turn)
      : b(b),
        turn(turn),
        out{{smem_address(b.s.expert_full), smem_address(b.s.expert_empty)},
            smem_address(b.s.expert),
            kSlotBytes,
            kStepSlots,
            evict_first_policy(),
            &b.s.quit,
            nullptr} {}
  // Goes on to the next page; true when it is this warp's and its slot is free, so that `bytes` of it may be copied.
  __device__ __forceinline__ bool next(uint32_t bytes) {
    out.ring.n++;
    if (((out.ring.n - 1) & (kExpertWarps - 1)) != turn) return false;
    out.ring.n--;
    const bool open = out.open();
    if (open) page_expects(out.barrier(), bytes), last = out.ring.n + 1;
    out.ring.n++;
    return open;
  }
  // Into the page that next() opened.
  __device__ __forceinline__ void copy(uint32_t at, const uint8_t* src, uint32_t bytes) const {
    const Ring<kStepSlots> page = out.back(1);
    page_copy(out.base + page.slot() * kSlotBytes + at, src, bytes, page.full + 8 * page.slot(), out.policy);
  }
  // All copies into it are issued.
  __device__ __forceinline__ void issued() const {
    const Ring<kStepSlots> page = out.back(1);
    page_issued(page.full + 8 * page.slot());
  }
  // A block must not end under a copy into its shared memory.
  __device__ __forceinline__ void drain() const {
    for (uint32_t back = 0; back < kStepSlots && back < last; back += kExpertWarps) {
      Ring<kStepSlots> page = out.ring;
      page.n = last - 1 - back;
      page.wait_full();
    }
  }

  // What attention wants of the KV cache. Tiles were written a step ago: barriers of the grid and the one below lie between,
  // and a fence, because copies read past the path that stores took.
  __device__ __forceinline__ void cache(int layer, const Step& step) {
    const int position = b.p.position + step.first;
    const AttentionPlan plan(b.p, position, step.tokens);
    const int splits = plan.splits;
    fence_copies();
#pragma unroll 1
    for (int unit = b.sm(); unit < plan.units(); unit += kGrid) {
      const int part = unit / plan.groups, split = part % splits;
      const UnitTiles tiles(layer, position, split, splits);
      const uint8_t* tile = b.p.kv + kv_tile_offset(layer, part / splits, tiles.first * splits + split);
      const uint32_t stride = splits * 2 * kTileBytes;
#pragma unroll 1
      for (int i = tiles.first; i < tiles.end; i += 2, tile += 2 * stride) {
        const bool second = i + 1 < tiles.end;
        if (!next(second ? 4 * kTileBytes : 2 * kTileBytes)) continue;
        copy(0, tile, 2 * kTileBytes);
        if (second) copy(2 * kTileBytes, tile + stride, 2 * kTileBytes);
        issued();
      }
    }
  }
  // What the consumers want of the active experts, of the layer that is the `layer`th streamed.
  __device__ __forceinline__ void experts(const uint8_t* w, int active, uint32_t layer) {
    const uint32_t first = out.ring.n;
    each_expert_page(b, w, active, [&](int tiles, uint32_t bytes, auto&& tile) {
      if (!next(tiles * bytes)) return;
#pragma unroll
      for (int k = 0; k < kDownPack; k++)
        if (k < tiles) copy(k * bytes, tile(k), bytes);
      issued();
      if (turn == 0) store_unordered(b.s.expert_issued, layer << 24 | (out.ring.n - first));
    });
  }
};

__device__ __forceinline__ void step_produce_experts(const StepBlock& b, int turn) {
  const StepParams& p = b.p;
  ExpertStream stream(b, turn);
  uint32_t layers = 0;  // of all steps
#pragma unroll 1
  for (int i = 0;; i++)
#pragma unroll 1
    for (int layer = 0; layer < kLayers; layer++) {
      layers++;
      if (!is_dense(layer)) barrier_arrive<3, kListThreads>();
      if (b.lane() == 0 && i < step_count(p)) {
        if (turn == 0) stamp_stream(p, i, layer, kStreamCache, 0);
        stream.cache(layer, step_at(p, i));
        if (turn == 0) stamp_stream(p, i, layer, kStreamCache, 1);
        // What the dense ring cannot hold of the output projection, whose turn comes when attention is over.
        if (turn == 1)
          prefetch_pages<kAttentionFp8, kModelQRows>(
              p.dense + layer * kDenseLayerBytes + kQkvBytes +
                  b.first_unit() * kUnitPages * unit_bytes(kModelQRows, kAttentionFp8),
              b.units() * kUnitPages, kStepSlots);
      }
      __syncwarp();
      barrier_sync<2, kChosenThreads>();
      if (consumers_left(b, i)) {
        if (b.lane() == 0) stream.drain();
        return;
      }
      if (b.lane() == 0) {
        const uint8_t* w = p.experts + (int64_t)moe_layers_before(layer) * kExperts * kExpertBytes;
        const int active = is_dense(layer) ? 0 : b.s.active_count;
        if (turn == 0) stamp_stream(p, i, layer, kStreamExperts, 0);
        stream.experts(w, active, layers);
        if (turn == 0) {
          stamp_stream(p, i, layer, kStreamExperts, 1);
          // Memory is idle while this layer ends and the next begins: router rows, and the QKV pages that the ring cannot
          // hold.
          const int next = (layer + 1) % kLayers, qkv0 = first_item(kQkvUnits, b.sm());
          if (!is_dense(next))
            bulk_prefetch(p.routers + moe_layers_before(next) * kRouterBytes + b.sm() * kRouterShare, kRouterShare);
          prefetch_pages<kAttentionFp8, kHidden>(p.dense + next * kDenseLayerBytes + qkv0 * unit_bytes(kHidden, kAttentionFp8),
                                                 first_item(kQkvUnits, b.sm() + 1) - qkv0, kStepSlots);
        }
      }
      __syncwarp();
    }
}

// A warp that brings pages of experts into L2 a few before their turn in the ring: memory goes on while consumers hold
// all slots, and what the ring then asks for is near.
constexpr uint32_t kExpertAhead = 4;
__device__ __forceinline__ void ahead_of_experts(const StepBlock& b) {
  uint32_t layers = 0;  // of all steps
#pragma unroll 1
  for (int i = 0;; i++)
#pragma unroll 1
    for (int layer = 0; layer < kLayers; layer++) {
      layers++;
      if (!is_dense(layer)) barrier_arrive<3, kListThreads>();
      barrier_sync<2, kChosenThreads>();
      if (consumers_left(b, i)) return;
      if (b.lane() == 0 && !is_dense(layer)) {
        const uint8_t* w = b.p.experts + (int64_t)moe_layers_before(layer) * kExperts * kExpertBytes;
        uint32_t page = 0, issued = 0;
        each_expert_page(b, w, b.s.active_count, [&](int tiles, uint32_t bytes, auto&& tile) {
          while (true) {  // ends: the warps that stream pages issue all of this layer before they wait for this one
            const uint32_t seen = load_unordered(b.s.expert_issued);
            if (seen >> 24 == (layers & 0xFF)) issued = seen & 0xFFFFFF;
            if (page < issued + kExpertAhead) break;
            __nanosleep(100);
          }
          if (page >= kStepSlots && page > issued)  // else it is in the ring
#pragma unroll 1
            for (int k = 0; k < tiles; k++) bulk_prefetch(tile(k), bytes);
          page++;
        });
      }
      __syncwarp();
    }
}

}  // namespace mk
