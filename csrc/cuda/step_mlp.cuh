// Dense products of the step kernel's MLP: layers without experts, and the projections around narrow experts.
#pragma once
#include "step_producer.cuh"

namespace mk {

// Scale of a row of a layer's part of the MLP's matrices, 1 where they have none.
__device__ __forceinline__ float mlp_scale(const StepBlock& b, int row) {
  if constexpr (kDenseFp8) return __ldg(mlp_scales(b.p, b.layer()) + row);
  return 1.f;
}

// The input of narrow experts, times the weights of their norm: 1/rms is applied to gate/up's sums. The router comes next and
// needs no barrier before.
template <int kTiles>
__device__ __forceinline__ void step_pre_proj(StepBlock& b, StepRing& ring) {
  b.stamp(kPhasePreProj, 0);
  b.load_rms();
  const int u0 = first_item(kPreUnits, b.sm()), units = first_item(kPreUnits, b.sm() + 1) - u0;
  float squares = 0;
  // kTeam is a multiple of the tokens in a reduction, so a thread always meets outputs of the same token.
  dense_product<kDenseFp8, kHidden, kTiles>(b, ring, b.p.hidden, units, [&](int first, int count) {
    if (first == 0) b.stamp(kPhasePreProj, 2);
    each_output<kTiles>(b, count, [&](int row, int token) {
      const int out = 8 * (u0 + first) + row;
      const float y = output_sum<kTiles>(b, row, token) * b.s.rms[token] * mlp_scale(b, out);
      squares += y * y;
      b.narrow()[token * kNarrowHidden + out] =
          (uint16_t)pack_bf16x2(y * b.weight_of(b.vectors() + kNormPre + out, kNormOffset), 0.f);
    });
  });
  b.s.best_value[b.tid] = squares;
  team_sync<kTeam>();
  if (b.warp < b.tokens()) {
    float sum = 0;
    for (int i = b.lane(); i < kTeam / (8 * kTiles); i += 32) sum += b.s.best_value[i * 8 * kTiles + b.warp];
    sum = warp_sum(sum);
    if (b.lane() == 0) b.narrow_squares()[b.warp * kGrid + b.sm()] = sum;
  }
  b.stamp(kPhasePreProj, 3);
}

// What the experts of a token gave together, back to the model's width.
template <int kTiles>
__device__ __forceinline__ void step_post_proj(StepBlock& b, StepRing& ring) {
  b.stamp(kPhasePostProj, 0);
  constexpr int kPerUnit = kUnitRows / kPageRows;
  dense_product<kDenseFp8, kNarrowHidden, kTiles>(b, ring, b.mixed(), b.units() * kPerUnit, [&](int first, int count) {
    if (first == 0) b.stamp(kPhasePostProj, 2);
    each_output<kTiles>(b, count, [&](int row, int token) {
      const int own = 8 * first + row;
      add_to_residual(b, token, own, output_sum<kTiles>(b, row, token) * mlp_scale(b, kNarrowHidden + b.owned_row() + own));
    });
  });
  finish_layer(b, kPhasePostProj);
}

// Gate and up of a layer without experts, and SwiGLU. Pairs of row units are dealt out, so that their rows meet in a chunk.
template <int kTiles>
__device__ __forceinline__ void step_mlp_pair(StepBlock& b, StepRing& ring) {
  static_assert(kDenseChunk % 2 == 0);
  b.stamp(kPhaseMlpPair, 0);
  b.load_rms();
  barrier_sync<2, kChosenThreads>();  // the warps that stream experts come here once a layer
  const int u0 = first_item(kMlpPairs, b.sm()), units = first_item(kMlpPairs, b.sm() + 1) - u0;
  dense_product<kDenseFp8, kHidden, kTiles>(b, ring, b.p.hidden, 2 * units, [&](int first, int count) {
    if (first == 0) b.stamp(kPhaseMlpPair, 2);
    each_output<kTiles>(b, count, [&](int row, int token) {
      const int at = 2 * 8 * u0 + 8 * first + row, out = at / 16 * 8 + at % 8;  // row of the matrix, channel
      if (at / 8 % 2) return;  // up comes with its gate
      const float gate = output_sum<kTiles>(b, row, token) * b.s.rms[token] * mlp_scale(b, at);
      const float up = output_sum<kTiles>(b, row + 8, token) * b.s.rms[token] * mlp_scale(b, at + 8);
      const float h = __fdividef(gate, 1.f + __expf(-gate)) * up;
      b.p.swiglu[token * kDenseIntermediate + out] = (uint16_t)pack_bf16x2(h, 0.f);
    });
  });
  b.stamp(kPhaseMlpPair, 3);
  b.meet();
}

template <int kTiles>
__device__ __forceinline__ void step_mlp_down(StepBlock& b, StepRing& ring) {
  b.stamp(kPhaseMlpDown, 0);
  constexpr int kPerUnit = kUnitRows / kPageRows;
  dense_product<kDenseFp8, kDenseIntermediate, kTiles>(b, ring, b.p.swiglu, b.units() * kPerUnit, [&](int first, int count) {
    if (first == 0) b.stamp(kPhaseMlpDown, 2);
    each_output<kTiles>(b, count, [&](int row, int token) {
      const int own = 8 * first + row;
      add_to_residual(b, token, own,
                      output_sum<kTiles>(b, row, token) * mlp_scale(b, 2 * kPageRows * kMlpPairs + b.owned_row() + own));
    });
  });
  finish_layer(b, kPhaseMlpDown);
}

}  // namespace mk
