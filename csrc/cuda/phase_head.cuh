// The end of a step: final norm, lm_head, argmax over the grid.
#pragma once
#include "phase_qkv.cuh"

namespace mk {

// Value, then the lower row, decides.
__device__ __forceinline__ void keep_best(float& v, int& row, float v2, int row2) {
  if (v2 > v || (v2 == v && row2 < row)) v = v2, row = row2;
}

template <bool kDebug>
__device__ __forceinline__ void phase_head(Block& b, DenseRing& ring) {
  b.stamp<kDebug>(kPhaseHead, 0);
  const float* norm = b.p.norms + kLayers * kNormLayer;
  uint4 x[kQkvPagesPerUnit][2];
  float2 v[kQkvPagesPerUnit];
  float squares = 0;
  wait_hidden(b, v);
#pragma unroll
  for (int h = 0; h < kQkvPagesPerUnit; h++) {
    float2 g = __ldg((const float2*)(norm + dense_column(b, h)));
    squares += v[h].x * v[h].x + v[h].y * v[h].y;
    dense_operands(b, h, pack_bf16x2(v[h].x * g.x, v[h].y * g.y), x[h]);
  }
  squares = warp_sum(squares);
  if (b.lane == 0) b.s.squares[0][b.warp] = squares;
  b.stamp<kDebug>(kPhaseHead, 1);
  const int u0 = first_item(kHeadUnits, b.sm), u1 = first_item(kHeadUnits, b.sm + 1);
  float best = -INFINITY, rms = 0;
  int best_row = 0;
  for (int u = u0; u < u1; u += kHeadChunk) {
    const int units = min(kHeadChunk, u1 - u);
#pragma unroll 1
    for (int i = 0; i < units; i++) dense_unit(b, ring, b.s.big, i, x);
    team_sync<kTeam>();
    if (u == u0) rms = inverse_rms(b.s.squares[0]);
    if (b.warp < units) {
      int row = 8 * b.warp + (b.lane & 7);
      keep_best(best, best_row, sum_partials(b.s.big, row, b.lane >> 3) * rms, 8 * u + row);
    }
    team_sync<kTeam>();  // the partial sums were read
  }
  b.stamp<kDebug>(kPhaseHead, 2);
#pragma unroll
  for (int i = 4; i; i >>= 1)
    keep_best(best, best_row, __shfl_xor_sync(~0u, best, i), __shfl_xor_sync(~0u, best_row, i));
  if (b.lane == 0) {
    b.s.best_value[0][b.warp] = best;
    b.s.best_row[0][b.warp] = best_row;
  }
  team_sync<kTeam>();
  if (b.warp == 0) {
    best = b.s.best_value[0][b.lane % kWarps];
    best_row = b.s.best_row[0][b.lane % kWarps];
#pragma unroll
    for (int i = kWarps / 2; i; i >>= 1)
      keep_best(best, best_row, __shfl_xor_sync(~0u, best, i), __shfl_xor_sync(~0u, best_row, i));
    if (b.lane == 0) {
      b.publish(kXBest + 2 * b.sm, best);
      b.publish(kXBest + 2 * b.sm + 1, (uint32_t)best_row);
    }
  }
  b.stamp<kDebug>(kPhaseHead, 3);
}

// Every SM finds the same winner. Returns false when a wait of this step expired: the kernel then ends.
template <bool kDebug>
__device__ __forceinline__ bool phase_token(Block& b, int step) {
  b.stamp<kDebug>(kPhaseToken, 0);
  float best = -INFINITY;
  int best_row = 0;
  if (b.warp < (kGrid + 31) / 32) {
    ulonglong2 v;
    const int sm = min(b.tid, kGrid - 1);
    const uint64_t* src = b.exchange(kXBest) + 2 * sm;
    b.wait([&] {
      v = load_relaxed_2(src);
      return b.fresh(v.x) && b.fresh(v.y);
    });
    best = word_float(v.x);
    best_row = (int)(uint32_t)v.y;
  }
#pragma unroll
  for (int i = 16; i; i >>= 1)
    keep_best(best, best_row, __shfl_xor_sync(~0u, best, i), __shfl_xor_sync(~0u, best_row, i));
  if (b.lane == 0) {
    b.s.best_value[1][b.warp] = best;
    b.s.best_row[1][b.warp] = best_row;
  }
  team_sync<kTeam>();
  if (b.tid == 0) {
    for (int w = 1; w < kWarps; w++) keep_best(best, best_row, b.s.best_value[1][w], b.s.best_row[1][w]);
    b.s.token = best_row;
    b.s.quit = step + 1 == b.p.steps || *(volatile int32_t*)&b.s.expired;
    if (b.sm == 0) b.p.tokens[step + 1] = best_row;
  }
  team_sync<kTeam>();
  b.stamp<kDebug>(kPhaseToken, 3);
  return *(volatile int32_t*)&b.s.quit == 0;
}

}  // namespace mk
