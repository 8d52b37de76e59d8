// Phase 3: output projection + residual. Owner SM s computes hidden rows 16 s .. 16 s + 15 and keeps their residual in
// shared memory for the whole step, so only the new values travel.
#pragma once
#include "phase_qkv.cuh"

namespace mk {

template <bool kTrace>
__device__ __forceinline__ void phase_out(Block& b, Ring& ring) {
  b.stamp<kTrace>(kPhaseOut, 0);
  if (!b.owner()) return;
  constexpr int kUnits = kOwnedRows / kPageRows;
  uint4 x[kOutPagesPerUnit][2];
  uint64_t v[kOutPagesPerUnit];
  b.wait(kPhaseOut, [&] {
    bool ready = true;
#pragma unroll
    for (int h = 0; h < kOutPagesPerUnit; h++) {
      v[h] = load_relaxed(b.exchange(kXAttention) + dense_column(b, h) / 2);
      ready = ready && b.fresh(v[h]);
    }
    return ready;
  });
#pragma unroll
  for (int h = 0; h < kOutPagesPerUnit; h++) dense_operands(b, h, (uint32_t)v[h], x[h]);
  b.stamp<kTrace>(kPhaseOut, 1);
#pragma unroll 1
  for (int u = 0; u < kUnits; u++) {
    float acc[2][4] = {};
#pragma unroll
    for (int h = 0; h < kOutPagesPerUnit; h++) {
      ring.wait_full();
      const uint4* page = (const uint4*)(b.s.dense[ring.slot()] + b.warp * 1024) + b.lane;
      uint4 wa = page[0], wb = page[32];
      ring.release(wa.w | wb.w, b.zero, b.lane);
      mma_bf16_page(acc, wa, wb, x[h][0], x[h][1]);
    }
    if (b.lane < 4) {
      float* out = &b.s.small[b.warp][8 * u + 2 * b.lane];
      out[0] = acc[0][0] + acc[1][0];
      out[1] = acc[0][1] + acc[1][1];
    }
  }
  b.stamp<kTrace>(kPhaseOut, 2);
  team_sync<kTeam>();
  if (b.warp < kUnits) {
    int row = 8 * b.warp + (b.lane & 7);
    float y = sum_partials(b.s.small, row, b.lane >> 3);
    if (b.lane < 8) {
      y += b.s.residual[row];
      b.s.residual[row] = y;
      b.publish(kXMid + b.sm * kOwnedRows + row, y);
      b.dump(kDumpMid + b.sm * kOwnedRows + row, y);
    }
  }
  b.stamp<kTrace>(kPhaseOut, 3);
}

}  // namespace mk
