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
// needs no barrier before, except where ranks exchange what this gives.
template <int kTiles>
__device__ __forceinline__ void step_pre_proj(StepBlock& b, StepRing& ring) {
  b.stamp(kPhasePreProj, 0);
  b.load_rms();
  const int u0 = first_item(kPreUnits, b.sm()), units = first_item(kPreUnits, b.sm() + 1) - u0;
  dense_product<kDenseFp8, kHidden, kTiles>(b, ring, b.p.hidden, units, [&](int first, int count) {
    if (first == 0) b.stamp(kPhasePreProj, 2);
    each_two_outputs<kTiles>(b, count, [&](int row, int token) {
      const int held = 8 * (u0 + first) + row, out = b.rank() * kPreUnits * kPageRows + held;
      if (out >= kNarrowHidden) return;
      float v[2];
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const float y = output_sum<kTiles>(b, row + i, token) * b.s.rms[token] * mlp_scale(b, held + i);
        v[i] = y * b.weight_of(b.vectors() + kNormPre + out + i, kNormOffset);
        *output_place<kTiles>(b, row + i, token) = y * y;
      }
      put_two(b, b.narrow(), kImageNarrow, token * kNarrowHidden + out, pack_bf16x2(v[0], v[1]));
    });
    each_unit_sum<kTiles>(b, count, [&](int unit, int token, float sum) {
      const int place = b.rank() * kPreUnits + u0 + first + unit;
      if (place >= kModelPreUnits) return;
      put_float(b, b.narrow_squares(), kImageNarrowSquares, token * kModelPreUnits + place, sum);
    });
  });
  if constexpr (kRanks > 1) {
    begin_takes(b);
    take_rows<kNarrowHidden, 2 * kSentNarrow>(b, b.narrow(), kImageNarrow, b.tokens());
    take_floats<kModelPreUnits, kSentNarrowSquares>(b, b.narrow_squares(), kImageNarrowSquares, b.tokens());
    b.stamp(kPhasePreProj, 3);
    b.meet();
    return;
  }
  b.stamp(kPhasePreProj, 3);
}

// The last product of an MLP, of x [tokens][kColumns], into the residual. Row scales of its matrix begin at `scales`.
template <int kTiles, int kColumns>
__device__ __forceinline__ void mlp_end(StepBlock& b, StepRing& ring, Phase phase, const uint16_t* x, int scales) {
  b.stamp(phase, 0);
  dense_product<kDenseFp8, kColumns, kTiles>(b, ring, x, b.units() * kUnitPages, [&](int first, int count) {
    if (first == 0) b.stamp(phase, 2);
    each_output<kTiles>(b, count, [&](int row, int token) {
      const int own = 8 * first + row;
      const float scale = mlp_scale(b, scales + b.first_unit() * kUnitRows + own);
      add_to_residual(b, token, own, output_sum<kTiles>(b, row, token) * scale);
    });
  });
  finish_layer(b, phase);
}

// What the experts of a token gave together, back to the model's width.
template <int kTiles>
__device__ __forceinline__ void step_post_proj(StepBlock& b, StepRing& ring) {
  mlp_end<kTiles, kNarrowHidden>(b, ring, kPhasePostProj, b.mixed(), kPreUnits * kPageRows);
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
    each_two_outputs<kTiles>(b, count, [&](int row, int token) {
      const int at = 2 * 8 * u0 + 8 * first + row;                                      // row of this rank's matrix
      const int out = b.rank() * kMlpPairs * kPageRows + at / 16 * 8 + at % 8;           // channel
      if (at / 8 % 2 || out >= kDenseIntermediate) return;  // up comes with its gate
      float h[2];
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const float gate = output_sum<kTiles>(b, row + i, token) * b.s.rms[token] * mlp_scale(b, at + i);
        const float up = output_sum<kTiles>(b, row + i + 8, token) * b.s.rms[token] * mlp_scale(b, at + i + 8);
        h[i] = __fdividef(gate, 1.f + __expf(-gate)) * up;
      }
      put_two(b, b.p.swiglu, kImageDense, token * kDenseIntermediate + out, pack_bf16x2(h[0], h[1]));
    });
  });
  if constexpr (kRanks > 1) {
    begin_takes(b);
    take_rows<kDenseIntermediate, 2 * kSentDense>(b, b.p.swiglu, kImageDense, b.tokens());
  }
  b.stamp(kPhaseMlpPair, 3);
  b.meet();
}

template <int kTiles>
__device__ __forceinline__ void step_mlp_down(StepBlock& b, StepRing& ring) {
  mlp_end<kTiles, kDenseIntermediate>(b, ring, kPhaseMlpDown, b.p.swiglu, 2 * kPageRows * kMlpPairs);
}

}  // namespace mk
