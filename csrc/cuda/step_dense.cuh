// bf16 and fp8 products of the step kernel, and the phases around one: embedding, QKV, output projection.
#pragma once
#include "mma.cuh"
#include "step_ranks.cuh"
#include "step_residual.cuh"

namespace mk {

// How a matrix of kK columns is worked through. Its input lies in registers: pages of kBlock at a time.
template <bool kFp8, int kK, int kTiles>
struct DenseShape {
  static constexpr int kPages = unit_pages(kK, kFp8);
  static constexpr int kX = kFp8 ? 4 : 2;  // 16-byte registers of one token's input in a page
  static constexpr int kBlock = 8 / (kX * kTiles) < 1 ? 1 : 8 / (kX * kTiles);
};

// One warp's share of a page: 8 rows x its columns. Tokens are the MMA's rows, weights its columns; two accumulators halve
// the dependent chain. x: this lane's columns of token g, and of g + 8.
template <bool kFp8, int kTiles>
__device__ __forceinline__ void multiply_share(float (&acc)[2][4], const uint4 (&w)[2],
                                               const uint4 (&x)[kTiles][kFp8 ? 4 : 2]) {
  const uint32_t words[8] = {w[0].x, w[0].y, w[0].z, w[0].w, w[1].x, w[1].y, w[1].z, w[1].w};
#pragma unroll
  for (int m = 0; m < (kFp8 ? 8 : 4); m++) {
    uint32_t b0, b1;
    if constexpr (kFp8)
      unpack_fp8(words[m], b0, b1);
    else
      b0 = words[2 * m], b1 = words[2 * m + 1];
    const uint4 lo = x[0][m / 2], hi = x[kTiles - 1][m / 2];
    const uint32_t a0 = m % 2 ? lo.z : lo.x, a2 = m % 2 ? lo.w : lo.y;
    const uint32_t a1 = kTiles == 1 ? 0 : m % 2 ? hi.z : hi.x, a3 = kTiles == 1 ? 0 : m % 2 ? hi.w : hi.y;
    mma_bf16(acc[m % 2], a0, a1, a2, a3, b0, b1);
  }
}

// This lane's input columns of pages h0 .. h0 + kBlock - 1; zeros where there is no token or no column.
template <class Shape, bool kFp8, int kK, int kTiles>
__device__ __forceinline__ void load_input(const StepBlock& b, const uint16_t* x, int h0,
                                           uint4 (&r)[Shape::kBlock][kTiles][Shape::kX]) {
  const int g = b.lane() >> 2, t = b.lane() & 3;
#pragma unroll
  for (int h = 0; h < Shape::kBlock; h++)
#pragma unroll
    for (int half = 0; half < kTiles; half++)
#pragma unroll
      for (int i = 0; i < Shape::kX; i++) {
        const int token = g + 8 * half, column = page_columns(kFp8) * (h0 + h) + share_columns(kFp8) * b.warp +
                                                 (kFp8 ? 64 * (i / 2) + 16 * t + 8 * (i % 2) : 32 * i + 8 * t);
        r[h][half][i] = token < b.tokens() && column < kK ? __ldcg((const uint4*)(x + token * kK + column))
                                                        : make_uint4(0, 0, 0, 0);
      }
}

// Products of `units` row units, whose pages come through the ring in the order of dense_pages(), with x [tokens][kK].
// After every kDenseChunk of them finish(first, count) is called with all partial sums in shared memory: output_sum()
// takes them from there. begin() is called while the first inputs are on their way.
template <bool kFp8, int kK, int kTiles, class Begin, class Finish>
__device__ __forceinline__ void dense_product(const StepBlock& b, StepRing& ring, const uint16_t* x, int units,
                                              Begin&& begin, Finish&& finish) {
  using Shape = DenseShape<kFp8, kK, kTiles>;
  float* part = b.scratch<float>();
  uint4 r[Shape::kBlock][kTiles][Shape::kX];
  if (Shape::kPages <= Shape::kBlock) load_input<Shape, kFp8, kK, kTiles>(b, x, 0, r);
  begin();
#pragma unroll 1
  for (int first = 0; first < units; first += kDenseChunk) {
    const int count = min(kDenseChunk, units - first);
#pragma unroll 1
    for (int h0 = 0; h0 < Shape::kPages; h0 += Shape::kBlock) {
      if (Shape::kPages > Shape::kBlock) load_input<Shape, kFp8, kK, kTiles>(b, x, h0, r);
#pragma unroll 1
      for (int u = 0; u < count; u++) {
        float acc[2][4] = {};
#pragma unroll
        for (int h = 0; h < Shape::kBlock; h++) {
          if (h0 + h >= Shape::kPages) break;
          uint4 w[2] = {};
          ring.wait_full();
          // The last page of a unit may have no columns for this warp.
          if (unit_shares(kK, kFp8) % kWarps == 0 || (h0 + h) * kWarps + b.warp < unit_shares(kK, kFp8)) {
            const uint4* page = (const uint4*)(b.s.dense[ring.slot()] + b.warp * kShareBytes) + b.lane();
            w[0] = page[0];
            w[1] = page[32];
          }
          ring.release(w[0].w | w[1].w, b.zero, b.lane());
          multiply_share<kFp8, kTiles>(acc, w, r[h]);
        }
        const int g = b.lane() >> 2, t = b.lane() & 3;
        float* out = part + ((u * kWarps + b.warp) * kPageRows + 2 * t) * 8 * kTiles + g;
#pragma unroll
        for (int i = 0; i < 2 * kTiles; i++) {  // i / 2: tokens g or g + 8; i % 2: row 2 t or 2 t + 1
          float* o = out + i % 2 * 8 * kTiles + i / 2 * 8;
          const float v = acc[0][i] + acc[1][i];
          *o = h0 ? *o + v : v;
        }
      }
    }
    team_sync<kTeam>();
    finish(first, count);
    if (first + kDenseChunk < units) team_sync<kTeam>();
  }
}
template <bool kFp8, int kK, int kTiles, class Finish>
__device__ __forceinline__ void dense_product(const StepBlock& b, StepRing& ring, const uint16_t* x, int units,
                                              Finish&& finish) {
  dense_product<kFp8, kK, kTiles>(b, ring, x, units, [] {}, finish);
}
// Where the first warp's part of one output of the chunk lies: row of the chunk, token.
template <int kTiles>
__device__ __forceinline__ float* output_place(const StepBlock& b, int row, int token) {
  return b.scratch<float>() + (row / kPageRows * kWarps * kPageRows + row % kPageRows) * 8 * kTiles + token;
}
// Sum over the warps of one output of the chunk. The order is that of decode_kernel.
template <int kTiles>
__device__ __forceinline__ float output_sum(const StepBlock& b, int row, int token) {
  const float* part = output_place<kTiles>(b, row, token);
  float quarter[4];
#pragma unroll
  for (int q = 0; q < 4; q++) {
    const float* v = part + 4 * q * kPageRows * 8 * kTiles;
    constexpr int kStep = kPageRows * 8 * kTiles;
    quarter[q] = (v[0] + v[kStep]) + (v[2 * kStep] + v[3 * kStep]);
  }
  return (quarter[0] + quarter[1]) + (quarter[2] + quarter[3]);
}
// Calls each(row of the chunk, token) once for every output, one thread an output.
template <int kTiles, class Each>
__device__ __forceinline__ void each_output(const StepBlock& b, int count, Each&& each) {
#pragma unroll 1
  for (int i = b.tid; i < count * kPageRows * 8 * kTiles; i += kTeam)
    if (i % (8 * kTiles) < b.tokens()) each(i / (8 * kTiles), i % (8 * kTiles));
}
// The same of two neighbouring rows at a time, of which `row` is the first.
template <int kTiles, class Each>
__device__ __forceinline__ void each_two_outputs(const StepBlock& b, int count, Each&& each) {
#pragma unroll 1
  for (int i = b.tid; i < count * (kPageRows / 2) * 8 * kTiles; i += kTeam)
    if (i % (8 * kTiles) < b.tokens()) each(i / (8 * kTiles) * 2, i % (8 * kTiles));
}
// Once all threads have left what is to be added at output_place() of their outputs: each(row unit of the chunk, token, sum over
// its rows in order).
template <int kTiles, class Each>
__device__ __forceinline__ void each_unit_sum(const StepBlock& b, int count, Each&& each) {
  team_sync<kTeam>();
  const int unit = b.tid / (8 * kTiles), token = b.tid % (8 * kTiles);
  if (unit >= count || token >= b.tokens()) return;
  float sum = 0;
  for (int row = 0; row < kPageRows; row++) sum += *output_place<kTiles>(b, unit * kPageRows + row, token);
  each(unit, token, sum);
}

// Rows of the embedding become the residual.
__device__ __forceinline__ void step_embed(StepBlock& b, const int32_t* tokens) {
  b.stamp(kPhaseEmbed, 0);
  const int rows = b.units() * kUnitRows;
  if constexpr (kEmbedNorm) {  // every SM looks at whole rows, once a step
    if (b.warp < b.tokens()) {
      const uint4* row = (const uint4*)(b.p.embedding + (int64_t)tokens[b.warp] * kHidden);
      float sum = 0;
#pragma unroll 1
      for (int i = b.lane(); i < kHidden / 8; i += 32) {
        const uint4 v = __ldg(row + i);
#pragma unroll
        for (uint32_t w : {v.x, v.y, v.z, v.w}) sum += bf16_low(w) * bf16_low(w) + bf16_high(w) * bf16_high(w);
      }
      sum = warp_sum(sum);
      if (b.lane() == 0) b.s.rms[b.warp] = rsqrtf(sum / kHidden + kRmsEps);
    }
    team_sync<kTeam>();
  }
  for (int i = b.tid; i < b.tokens() * rows; i += kTeam) {
    const int token = i / rows, row = i % rows;
    const float v = bf16_low(__ldg(b.p.embedding + (int64_t)tokens[token] * kHidden + b.owned_row() + row));
    b.s.residual[token][row] = kEmbedNorm ? v * b.s.rms[token] : v;
  }
  if constexpr (kRanks > 1) {
    embed_all(b, tokens);
  } else {
    team_sync<kTeam>();
    b.publish_hidden(b.p.norms + kNormInput, kNormOffset);
  }
  b.stamp(kPhaseEmbed, 3);
  b.meet();
}

template <int kTiles>
__device__ __forceinline__ void step_qkv(StepBlock& b, StepRing& ring) {
  b.stamp(kPhaseQkv, 0);
  const int u0 = first_item(kQkvUnits, b.sm()), units = first_item(kQkvUnits, b.sm() + 1) - u0;
  const auto begin = [&] { b.load_rms(); };
  dense_product<kAttentionFp8, kHidden, kTiles>(b, ring, b.p.hidden, units, begin, [&](int first, int count) {
    if (first == 0) b.stamp(kPhaseQkv, 2);
    each_output<kTiles>(b, count, [&](int row, int token) {
      const int out = 8 * (u0 + first) + row;
      float y = output_sum<kTiles>(b, row, token) * b.s.rms[token];
      if constexpr (kAttentionFp8) y *= __ldg(b.p.dense_scales + b.layer() * kDenseScaleLayer + out);
      if constexpr (kQkvBias && kAttentionGate) {
        if (out < kGateAt) y += __ldg(b.vectors() + kBiasQkv + out);
      } else if constexpr (kQkvBias) {
        y += __ldg(b.vectors() + kBiasQkv + out);
      }
      b.p.qkv[token * kQkvRows + out] = y;
      if constexpr (kQkWhole) *output_place<kTiles>(b, row, token) = y * y;
    });
    if constexpr (kQkWhole)
      each_unit_sum<kTiles>(b, count, [&](int unit, int token, float sum) {
        const int own = u0 + first + unit;
        if (own >= kQkUnits) return;  // of v
        put_float(b, b.qk_squares(), kImageQk, token * kModelQkUnits + b.rank() * kQkUnits + own, sum);
      });
  });
  if constexpr (kRanks > 1 && kQkWhole) {
    begin_takes(b);
    take_floats<kModelQkUnits, kSentQk>(b, b.qk_squares(), kImageQk, b.tokens());
  }
  b.stamp(kPhaseQkv, 3);
  b.meet();
}

template <int kTiles>
__device__ __forceinline__ void step_out(StepBlock& b, StepRing& ring) {
  b.stamp(kPhaseOut, 0);
  dense_product<kAttentionFp8, kModelQRows, kTiles>(b, ring, b.p.attention, b.units() * kUnitPages, [&](int first, int count) {
    if (first == 0) b.stamp(kPhaseOut, 2);
    each_output<kTiles>(b, count, [&](int row, int token) {
      const int own = 8 * first + row, out = b.owned_row() + own, held = out - b.rank() * kUnits * kUnitRows;
      float y = output_sum<kTiles>(b, row, token);
      if constexpr (kAttentionFp8) y *= __ldg(b.p.dense_scales + b.layer() * kDenseScaleLayer + kQkvRows + held);
      if constexpr (kOutBias) y += __ldg(b.vectors() + kBiasOut + out);
      add_to_residual(b, token, own, y);
    });
  });
  team_sync<kTeam>();
  if constexpr (kSandwich) meet_residual<false>(b, kPhaseOut);
  publish<true>(b, b.vectors() + kNormPost, kNormOffset);
  b.stamp(kSandwich ? kPhaseAttentionResidual : kPhaseOut, 3);
  b.meet();
}

}  // namespace mk
