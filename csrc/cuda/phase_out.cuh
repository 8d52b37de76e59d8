// Phase 3: output projection + residual, and this SM's part of the router. Owner SM s computes hidden rows 16 s .. 16 s + 15
// and keeps their residual in shared memory for the whole step, so only the new values travel. It multiplies them with its
// columns of the router at once and publishes 128 partial logits.
#pragma once
#include "phase_qkv.cuh"

namespace mk {

template <bool kDebug>
__device__ __forceinline__ void phase_out(Block& b, DenseRing& ring) {
  b.stamp<kDebug>(kPhaseOut, 0);
  if (!b.owner()) return;
  constexpr int kUnits = kOwnedRows / kPageRows;
  const int row = 8 * (b.warp % kUnits) + (b.lane & 7), expert = b.tid / 4, quarter = b.tid % 4;
  const uint2 r = __ldg((const uint2*)(b.p.routers + b.layer * kRouterBytes +
                                       router_offset(expert, b.sm * kOwnedRows + 4 * quarter)));
  const float g = __ldg(b.p.norms + b.layer * kNormLayer + kNormPost + b.sm * kOwnedRows + row);
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
      b.s.router_input[row] = y * g;
      b.dump<kDebug>(kDumpMid + b.sm * kOwnedRows + row, y);
    }
  }
  team_sync<kTeam>();
  const float4 in = *(const float4*)&b.s.router_input[4 * quarter];
  float part = in.x * bf16_low(r.x) + in.y * bf16_high(r.x) + (in.z * bf16_low(r.y) + in.w * bf16_high(r.y));
  part += __shfl_xor_sync(~0u, part, 1);
  part += __shfl_xor_sync(~0u, part, 2);
  if (quarter == 0) b.publish(kXRouterParts + expert * kOwners + b.sm, part);
  b.stamp<kDebug>(kPhaseOut, 3);
}

}  // namespace mk
