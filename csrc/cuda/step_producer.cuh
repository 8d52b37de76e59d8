// The threads that stream the step kernel's weights. Dense weights do not depend on activations: their ring runs ahead
// through every phase, layer and step. Expert pages follow the choice of experts.
#pragma once
#include "step_dense.cuh"

namespace mk {

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
        if (!dense_pages<kAttentionFp8, kHidden, kTiles>(out, w + qkv0 * unit_bytes(kHidden, kAttentionFp8), qkv) ||
            !dense_pages<kAttentionFp8, kQRows, kTiles>(
                out, w + kQkvBytes + b.first_unit() * kPerUnit * unit_bytes(kQRows, kAttentionFp8),
                b.units() * kPerUnit))
          return;
      }
      if (!step_at(p, i).head) continue;
      out.flight = p.head_flight;
      if (!dense_pages<kHeadFp8, kHidden, kTiles>(out, p.head + head0 * unit_bytes(kHidden, kHeadFp8), head)) return;
    }
    while (*out.quit == 0) {  // the consumers are behind
      __nanosleep(1000);
      watch.tick();
    }
  };
  stream();
  out.drain();
}

// Named barrier 2: from the consumers, who choose the experts, to the thread that streams them.
constexpr int kChosenThreads = kTeam + 32;

// One warp, of which one lane issues.
__device__ __forceinline__ void step_produce_experts(StepBlock b) {
  const StepParams& p = b.p;
  Stream<kStepSlots> out{{smem_address(b.s.expert_full), smem_address(b.s.expert_empty)},
                         smem_address(b.s.expert),
                         kExpertPageBytes,
                         (uint32_t)p.expert_flight,
                         evict_first_policy(),
                         &b.s.quit,
                         nullptr};
#pragma unroll 1
  for (;;)
#pragma unroll 1
    for (int layer = 0; layer < kLayers; layer++) {
      barrier_sync<2, kChosenThreads>();
      if (*(const volatile int32_t*)&b.s.quit) return;  // nothing is under way then
      if (b.lane() == 0) {
        const int active = b.s.active_count, u0 = first_item(active * kPairUnits, b.sm()),
                  u1 = first_item(active * kPairUnits, b.sm() + 1);
        const uint8_t* w = p.experts + (int64_t)layer * kExperts * kExpertBytes;
#pragma unroll 1
        for (int u = u0; u < u1; u++)
#pragma unroll 1
          for (int page = 0; page < tile_pages(kHidden); page++)
            out.page(w + b.s.active[u / kPairUnits] * kExpertBytes + (int64_t)(u % kPairUnits) * kPairTileBytes +
                         page * kPageChunks * kChunkBytes,
                     tile_page_chunks(kHidden, page) * kChunkBytes);
#pragma unroll 1
        for (int unit = 0; unit < b.units(); unit++) {
          const int64_t tile = kPairBytes + (int64_t)(b.first_unit() + unit) * kDownTileBytes;
#pragma unroll 1
          for (int i = 0; i < active; i += kDownPack)
#pragma unroll 1
            for (int page = 0; page < kDownPages; page++) {
              const int tiles = min(kDownPack, active - i), bytes = tile_page_chunks(kMoeIntermediate, page) * kChunkBytes;
              if (!out.open()) return;
              mbarrier_expect_bytes(out.barrier(), tiles * bytes);
#pragma unroll 1
              for (int k = 0; k < tiles; k++)
                bulk_copy(out.address() + k * bytes,
                          w + b.s.active[i + k] * kExpertBytes + tile + page * kPageChunks * kChunkBytes, bytes,
                          out.barrier(), out.policy);
              out.ring.n++;
            }
        }
      }
      __syncwarp();
    }
}

}  // namespace mk
