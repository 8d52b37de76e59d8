// Phase 3: output projection + residual. Owner SM s computes hidden rows 16 s .. 16 s + 15
// and keeps their residual in shared memory for the whole step, so only the new values travel.
#pragma once
#include "phase_qkv.cuh"

namespace mk {

template <bool kDebug>
__device__ __forceinline__ void phase_out(Block& b, DenseRing& ring) {
  b.stamp<kDebug>(kPhaseOut, 0);
  if (!b.owner()) return;
  constexpr int kUnits = kOwnedRows / kPageRows;
  const int row = 8 * (b.warp % kUnits) + (b.lane & 7);
  uint4 x[kOutPagesPerUnit][2];
  uint64_t v[kOutPagesPerUnit];
  b.wait([&] {
    bool ready = true;
#pragma unroll
    for (int h = 0; h < kOutPagesPerUnit; h++) {
      v[h] = load_relaxed(b.copy(kXAttention, kQRows / 2) + dense_column(b, h) / 2);
      ready = ready && b.fresh(v[h]);
    }
    return ready;
  });
#pragma unroll
  for (int h = 0; h < kOutPagesPerUnit; h++) dense_operands(b, h, (uint32_t)v[h], x[h]);
  b.stamp<kDebug>(kPhaseOut, 1);
#pragma unroll 1
  for (int u = 0; u < kUnits; u++) dense_unit(b, ring, b.s.small, u, x);
  b.stamp<kDebug>(kPhaseOut, 2);
  team_sync<kTeam>();
  if (b.warp < kUnits) {
    const float y = sum_partials(b.s.small, row, b.lane >> 3) + b.s.residual[row];
    b.publish(kXMid + (b.lane >> 3) * kHidden + b.sm * kOwnedRows + row, y);
    __syncwarp();
    if (b.lane < 8) {
      b.s.residual[row] = y;
      b.dump<kDebug>(kDumpMid + b.sm * kOwnedRows + row, y);
    }
  }
  b.stamp<kDebug>(kPhaseOut, 3);
}

}  // namespace mk
