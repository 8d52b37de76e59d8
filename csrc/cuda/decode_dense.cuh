// Phases that are products with bf16 or fp8 matrices: QKV and the output projection. A norm's 1/rms is one number a token,
// so it is applied to the sums: a warp starts as soon as its own columns are there, without waiting for the whole vector.
#pragma once
#include "decode_tiles.cuh"
#include "mma.cuh"

namespace mk {

// This lane's columns of part h of a dense input: this one and the next. A warp's share of an fp8 page is 128 columns.
template <bool kFp8>
__device__ __forceinline__ int dense_column(const DecodeBlock& b, int h) {
  return kFp8 ? 2 * kPartColumns * (h / 2) + 128 * b.warp + 64 * (h % 2) + 2 * b.lane
              : kPartColumns * h + 64 * b.warp + 2 * b.lane;
}

// MMA operands of part h from the warp's slice, where every lane has put its two columns.
template <bool kFp8>
__device__ __forceinline__ void load_operands(const DecodeBlock& b, int h, uint4 (&x)[2]) {
  const uint32_t* slice = b.s.x[b.warp] + h * 32;
#pragma unroll
  for (int i = 0; i < 2; i++)
    x[i] = *(const uint4*)(slice + (kFp8 ? 4 * i + 8 * (b.lane & 3) : 16 * i + 4 * (b.lane & 3)));
}

// Puts 64 columns (two a lane) into the warp's slice and takes MMA operands from it.
template <bool kFp8>
__device__ __forceinline__ void dense_operands(const DecodeBlock& b, int h, uint32_t pair, uint4 (&x)[2]) {
  b.s.x[b.warp][h * 32 + b.lane] = pair;
  __syncwarp();
  load_operands<kFp8>(b, h, x);
}

// Waits for this lane's columns of the hidden state that the layer before left.
template <bool kFp8>
__device__ __forceinline__ void wait_hidden(const DecodeBlock& b, float2 (&x)[kHiddenParts]) {
  ulonglong2 v[kHiddenParts];
  const uint64_t* src = b.copy(kXOut, kHidden, 1) + dense_column<kFp8>(b, 0);
  b.wait([&] {
    bool ready = true;
#pragma unroll
    for (int h = 0; h < kHiddenParts; h++) {
      v[h] = load_relaxed_2(src + (kFp8 ? 64 : kPartColumns) * h);
      ready = ready && b.fresh(v[h].x, 1) && b.fresh(v[h].y, 1);
    }
    return ready;
  });
#pragma unroll
  for (int h = 0; h < kHiddenParts; h++) x[h] = make_float2(word_float(v[h].x), word_float(v[h].y));
}
static_assert(kHiddenParts <= 2, "fp8: the parts of one page");

// This warp's columns of a row unit of 8 rows, in registers. All pages are loaded before the first product: the loads
// of one hide behind those of the others. A unit loaded before its input is there leaves its slots to pages that would
// else be fetched beside the exchanges and experts of later phases.
template <bool kFp8, int kParts>
struct UnitWeights {
  static constexpr int kPages = kFp8 ? ceil_div(kParts, 2) : kParts;
  uint4 w[kPages][2];
  __device__ __forceinline__ void load(const DecodeBlock& b, DenseRing& ring) {
#pragma unroll
    for (int h = 0; h < kPages; h++) {
      ring.wait_full();
      const uint4* page = (const uint4*)(b.s.dense[ring.slot()] + b.warp * kShareBytes) + b.lane;
      w[h][0] = page[0];
      w[h][1] = page[32];
      ring.release(w[h][0].w | w[h][1].w, b.zero, b.lane);
    }
  }
  // Adds the products with part h of the input.
  __device__ __forceinline__ void multiply(float (&acc)[2][4], int h, const uint4 (&x)[2]) const {
    if constexpr (kFp8)
      mma_fp8_run(acc, w[h / 2][h % 2], x[0], x[1]);
    else
      mma_bf16_page(acc, w[h][0], w[h][1], x[0], x[1]);
  }
};

// The sums of this warp's columns go to part[warp][8 unit + row]: token 0 is the MMA's rows 0 and 8.
template <int kStride>
__device__ __forceinline__ void store_unit(const DecodeBlock& b, float (&part)[kWarps][kStride], int unit,
                                           const float (&acc)[2][4]) {
  if (b.lane < 4) {
    float* out = &part[b.warp][8 * unit + 2 * b.lane];
    out[0] = acc[0][0] + acc[1][2];
    out[1] = acc[0][1] + acc[1][3];
  }
}

// Multiplies one row unit with the input.
template <bool kFp8, int kParts, int kStride>
__device__ __forceinline__ void dense_unit(const DecodeBlock& b, const UnitWeights<kFp8, kParts>& weights,
                                           float (&part)[kWarps][kStride], int unit, const uint4 (&x)[kParts][2]) {
  float acc[2][4] = {};
#pragma unroll
  for (int h = 0; h < kParts; h++) weights.multiply(acc, h, x[h]);
  store_unit(b, part, unit, acc);
}

// Reads the input of layer 0 from the embedding and of the others from the exchange, multiplied by the norm weights,
// not yet by 1/rms. epoch - 1 is the epoch of the layer before.
template <bool kDebug>
__device__ __forceinline__ void decode_qkv(DecodeBlock& b, DenseRing& ring, Attention& attention) {
  b.stamp<kDebug>(kPhaseQkv, 0);
  const float* norm = b.p.norms + b.layer * kNormLayer + kNormInput;
  uint4 x[kHiddenParts][2];
  float2 g[kHiddenParts], v[kHiddenParts];
  float squares = 0;
#pragma unroll
  for (int h = 0; h < kHiddenParts; h++) g[h] = __ldg((const float2*)(norm + dense_column<kAttentionFp8>(b, h)));
  UnitWeights<kAttentionFp8, kHiddenParts> weights;
  weights.load(b, ring);  // the first unit's
  if (b.layer == 0) {
    const uint16_t* row = b.p.embedding + (int64_t)b.s.token * kHidden;
#pragma unroll
    for (int h = 0; h < kHiddenParts; h++) {
      uint32_t e = __ldg((const uint32_t*)(row + dense_column<kAttentionFp8>(b, h)));
      v[h] = make_float2(bf16_low(e), bf16_high(e));
    }
    if (b.owner() && b.tid < kOwnedRows) b.s.residual[b.tid] = bf16_low(__ldg(row + b.sm * kOwnedRows + b.tid));
  } else {
    wait_hidden<kAttentionFp8>(b, v);
  }
#pragma unroll
  for (int h = 0; h < kHiddenParts; h++) {
    squares += v[h].x * v[h].x + v[h].y * v[h].y;
    dense_operands<kAttentionFp8>(b, h, pack_bf16x2(v[h].x * g[h].x, v[h].y * g[h].y), x[h]);
  }
  b.stamp<kDebug>(kPhaseQkv, 1);
  if (attention.unit >= 0) load_tiles(b, attention, 0);  // they arrive while the pages are multiplied
  const int u0 = first_item(kQkvUnits, b.sm), units = first_item(kQkvUnits, b.sm + 1) - u0;
  float scale = 1;
  if constexpr (kAttentionFp8)
    if (b.warp < units)
      scale = __ldg(b.p.dense_scales + b.layer * kDenseScaleLayer + 8 * (u0 + b.warp) + (b.lane & 7));
#pragma unroll 1
  for (int u = 0; u < units; u++) {
    if (u) weights.load(b, ring);
    dense_unit(b, weights, b.s.big, u, x);
  }
  squares = warp_sum(squares);
  if (b.lane == 0) b.s.squares[0][b.warp] = squares;
  b.stamp<kDebug>(kPhaseQkv, 2);
  team_sync<kTeam>();
  if (b.warp < units) {  // warp u finishes unit u
    int row = 8 * b.warp + (b.lane & 7), out = 8 * u0 + row;
    float y = sum_partials(b.s.big, row, b.lane >> 3) * inverse_rms(b.s.squares[0]);
    if constexpr (kAttentionFp8) y *= scale;
    if (b.lane < 8) {
      b.publish(kXQkv + out, y);
      b.dump<kDebug>(kDumpQkv + out, y);
    }
  }
  b.stamp<kDebug>(kPhaseQkv, 3);
}

// SM s computes hidden rows 16 s .. 16 s + 15 and keeps their residual in shared memory for the whole step, so only the new
// values travel.
template <bool kDebug>
__device__ __forceinline__ void decode_out(DecodeBlock& b, DenseRing& ring) {
  b.stamp<kDebug>(kPhaseOut, 0);
  if (!b.owner()) return;
  constexpr int kRowUnits = kOwnedRows / kPageRows;
  constexpr int kHeld = kSpareRegisters ? 1 : kRowUnits;  // units in registers before the input is there: up to 32 each
  const int row = 8 * (b.warp % kRowUnits) + (b.lane & 7);
  float scale = 1;
  if constexpr (kAttentionFp8)
    scale = __ldg(b.p.dense_scales + b.layer * kDenseScaleLayer + kQkvRows + b.sm * kOwnedRows + row);
  uint64_t v[kQParts];
  UnitWeights<kAttentionFp8, kQParts> weights[kHeld];
#pragma unroll
  for (int i = 0; i < kHeld; i++) weights[i].load(b, ring);
  const uint64_t* src = b.copy(kXAttention, kQRows / 2);
  b.wait_first(src + dense_column<kAttentionFp8>(b, 0) / 2 - b.lane);
  b.wait([&] {
    bool ready = true;
#pragma unroll
    for (int h = 0; h < kQParts; h++) {
      v[h] = load_relaxed(src + dense_column<kAttentionFp8>(b, h) / 2);
      ready = ready && b.fresh(v[h]);
    }
    return ready;
  });
#pragma unroll
  for (int h = 0; h < kQParts; h++) b.s.x[b.warp][h * 32 + b.lane] = (uint32_t)v[h];
  __syncwarp();
  b.stamp<kDebug>(kPhaseOut, 1);
#pragma unroll 1
  for (int u = 0; u < kRowUnits; u += kHeld) {
    if (u) {
#pragma unroll
      for (int i = 0; i < kHeld; i++) weights[i].load(b, ring);
    }
    float acc[kHeld][2][4] = {};
#pragma unroll
    for (int h = 0; h < kQParts; h++) {
      uint4 x[2];
      load_operands<kAttentionFp8>(b, h, x);
#pragma unroll
      for (int i = 0; i < kHeld; i++) weights[i].multiply(acc[i], h, x);
    }
#pragma unroll
    for (int i = 0; i < kHeld; i++) store_unit(b, b.s.small, u + i, acc[i]);
  }
  b.stamp<kDebug>(kPhaseOut, 2);
  team_sync<kTeam>();
  if (b.warp < kRowUnits) {
    float y = sum_partials(b.s.small, row, b.lane >> 3);
    if constexpr (kAttentionFp8) y *= scale;
    y += b.s.residual[row];
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
