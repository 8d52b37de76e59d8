// Where a sub-layer of the step kernel meets the residual stream, and the end of a layer.
#pragma once
#include "step_ranks.cuh"

namespace mk {

// One value that a sub-layer gives, row `own` of this SM's: into the residual, or where it waits for its norm.
__device__ __forceinline__ void add_to_residual(const StepBlock& b, int token, int own, float y) {
  if constexpr (kSandwich)
    b.branch()[token * kHidden + b.owned_row() + own] = y;
  else
    b.s.residual[token][own] += y;
}

// What a sub-layer gave is normed over all hidden rows, which the grid has to meet for, and then gated into the residual by
// channels. kMlp: what the MLP gave, which is multiplied by (1 + weight) before its norm; attention's has no weight. The phase
// that made it ends here; a team_sync must come before, and one has come afterwards.
template <bool kMlp>
__device__ __forceinline__ void meet_residual(StepBlock& b, Phase made) {
  const auto value = [&](int token, int row) {
    const float v = __ldcg(b.branch() + token * kHidden + b.owned_row() + row);
    return kMlp ? v * b.weight_of(b.vectors() + kNormMlpOut + b.owned_row() + row, 1.f) : v;
  };
  constexpr int kImage = kImageBranch + (kMlp ? kMaxTokens * kModelUnits : 0);
#pragma unroll 1
  for (int i = b.tid; i < b.tokens() * b.units(); i += kTeam) {
    const int token = i / b.units(), unit = i % b.units();
    float sum = 0;
    for (int row = 0; row < kUnitRows; row++) {
      const float v = value(token, unit * kUnitRows + row);
      sum += v * v;
    }
    put_float(b, b.branch_squares(), kImage, token * kModelUnits + b.owned_row() / kUnitRows + unit, sum);
  }
  if constexpr (kRanks > 1) {
    begin_takes(b);
    take_floats<kModelUnits, kSentSquares>(b, b.branch_squares(), kImage, b.tokens());
  }
  b.stamp(made, 3);
  b.meet();
  b.stamp(kMlp ? kPhaseMlpResidual : kPhaseAttentionResidual, 0);
  b.load_rms<kBranchSquaresAt, kModelUnits, kHidden>(kSandwichEps);
  team_sync<kTeam>();
  const int rows = b.units() * kUnitRows;
#pragma unroll 1
  for (int i = b.tid; i < b.tokens() * rows; i += kTeam) {
    const int token = i / rows, row = i % rows;
    const float w = __ldg(b.vectors() + (kMlp ? kGateMlp : kGateAttention) + b.owned_row() + row) / kGateTemperature;
    const float beta = 1.f / (1.f + __expf(-w)), rest = 1.f / (1.f + __expf(w));
    const float alpha = sqrtf(fmaxf(rest * (1.f + beta), kGateFloor));
    b.s.residual[token][row] = alpha * b.s.residual[token][row] + beta * value(token, row) * b.s.rms[token];
  }
  team_sync<kTeam>();
}

// The residual is that of the next layer. phase: this one's last.
__device__ __forceinline__ void end_layer(StepBlock& b, Phase phase) {
  // behind the last layer's vectors lies the final norm
  publish<false>(b, b.next_vectors() + kNormInput, b.layer() + 1 < kLayers ? kNormOffset : 0.f);
  b.stamp(phase, 3);
  b.meet(1);
}

// The MLP's outputs are in the residual, or in the branch: the layer ends. phase: the MLP's last.
__device__ __forceinline__ void finish_layer(StepBlock& b, Phase phase) {
  team_sync<kTeam>();
  if constexpr (kSandwich) meet_residual<true>(b, phase);
  const int rows = b.units() * kUnitRows;
  if (b.p.taps)
#pragma unroll 1
    for (int i = b.tid; i < b.tokens() * rows; i += kTeam)
      b.p.taps[((int64_t)b.layer() * kMaxTokens + b.s.first + i / rows) * kHidden + b.owned_row() + i % rows] =
          b.s.residual[i / rows][i % rows];
  end_layer(b, kSandwich ? kPhaseMlpResidual : phase);
}

}  // namespace mk
