// The expert phases: router, gate/up + SwiGLU, down + weighted sum + residual.
#pragma once
#include <type_traits>
#include "decode_block.cuh"
#include "mma.cuh"

namespace mk {

// The 32 bytes that this lane gives to the MMAs of chunk c (0 or 1): its own columns, or zeros.
__device__ __forceinline__ const uint32_t* alone_operand(const DecodeBlock& b, int c, const uint32_t* own) {
  return (b.lane >> 2) == 4 * c + (b.lane & 3) ? own : b.s.zeros;
}

// Router and gate/up share their input: a warp's columns are one sixteenth of all, neighbours, four a lane (or two where
// the hidden size is 1024). SM e multiplies them with router row e. Leaves the MMA operands of gate/up in x.
template <bool kDebug>
__device__ __forceinline__ void decode_router(DecodeBlock& b, uint4 (&x)[2 * kHiddenParts]) {
  b.stamp<kDebug>(kPhaseRouter, 0);
  constexpr int kPairs = kHiddenParts;  // of neighbouring columns, of one lane
  using Norm = typename std::conditional<kPairs == 2, float4, float2>::type;
  using Row = typename std::conditional<kPairs == 2, uint2, uint32_t>::type;
  const int column = 2 * kPairs * b.tid;
  const Norm norm = __ldg((const Norm*)(b.p.norms + b.layer * kNormLayer + kNormPost + column));
  Row row{};
  if (b.sm < kExperts)
    row = __ldg((const Row*)(b.p.routers + b.layer * kRouterBytes + ((int64_t)b.sm * kHidden + column) * 2));
  ulonglong2 v[kPairs];
  const uint64_t* src = b.copy(kXMid, kHidden) + column;
  b.wait([&] {
    bool ready = true;
#pragma unroll
    for (int i = 0; i < kPairs; i++) {
      v[i] = load_relaxed_2(src + 2 * i);
      ready = ready && b.fresh(v[i].x) && b.fresh(v[i].y);
    }
    return ready;
  });
  const float2* g = (const float2*)&norm;
  const uint32_t* r = (const uint32_t*)&row;
  float dot = 0, squares = 0;
  Row in;
#pragma unroll
  for (int i = 0; i < kPairs; i++) {
    const float a0 = word_float(v[i].x), a1 = word_float(v[i].y), b0 = a0 * g[i].x, b1 = a1 * g[i].y;
    dot += b0 * bf16_low(r[i]) + b1 * bf16_high(r[i]);
    squares += a0 * a0 + a1 * a1;
    ((uint32_t*)&in)[i] = pack_bf16x2(b0 * kAloneInput, b1 * kAloneInput);
  }
  if (b.sm < kExperts) {
    dot = warp_sum(dot);
    if (b.lane == 0) b.s.router_dot[b.warp] = dot;
    __syncwarp();
    router_arrive<kTeam + 32>();
  }
  *(Row*)&b.s.x[b.warp][kPairs * b.lane] = in;
  squares = warp_sum(squares);
  if (b.lane == 0) b.s.squares[1][b.warp] = squares;
  __syncwarp();
  // chunk c of this warp: columns 64 c + 16 t .. + 15
#pragma unroll
  for (int c = 0; c < kPairs; c++) {
    const uint32_t* operand = alone_operand(b, c, &b.s.x[b.warp][32 * c + 8 * (b.lane & 3)]);
    x[2 * c] = *(const uint4*)operand;
    x[2 * c + 1] = *(const uint4*)(operand + 4);
  }
  b.stamp<kDebug>(kPhaseRouter, 1);
  b.stamp<kDebug>(kPhaseRouter, 3);
}

template <bool kDebug>
__device__ __forceinline__ void decode_pair(DecodeBlock& b, ExpertRing& ring, const uint4 (&x)[2 * kHiddenParts]) {
  b.stamp<kDebug>(kPhasePair, 0);
  const int u0 = first_item(kTokenPairUnits, b.sm), units = first_item(kTokenPairUnits, b.sm + 1) - u0;
  chosen_wait<kTeam + 32>();
  const int g = b.lane >> 2, t = b.lane & 3;
#pragma unroll 1
  for (int u = 0; u < units; u++) {
    ring.wait_full();
    if (u == 0) b.stamp<kDebug>(kPhasePair, 1);
    const uint8_t* page = b.s.expert[ring.slot()];
    const uint4* codes = (const uint4*)page + 32 * kHiddenParts * b.warp + b.lane;
    const uint8_t* scales = page + kHidden / 64 * 512 + 64 * kHiddenParts * b.warp + 8 * g + 4 * (t % 2);
    uint4 q[kHiddenParts];
    const uint32_t s = *(const uint32_t*)(scales + (kHiddenParts == 2 ? 64 * (t / 2) : 0));
    uint32_t loaded = s;
#pragma unroll
    for (int c = 0; c < kHiddenParts; c++) q[c] = codes[32 * c], loaded |= q[c].w;
    ring.release(loaded, b.zero, b.lane);
    float sum[2] = {};
    mma_nvfp4_alone<kHiddenParts>(sum, q, s, x);
    const float row = sum_alone(sum, t);
    if (t < 2) b.s.big[b.warp][16 * u + 8 * t + g] = row;
  }
  b.stamp<kDebug>(kPhasePair, 2);
  team_sync<kTeam>();
  if (b.warp < units) {  // warp u finishes tile u
    const int unit = u0 + b.warp, slot = unit / kPairUnits, pair = b.lane & 7;
    const float2 scales = *(const float2*)&b.s.expert_scale[b.epoch & 1][slot];
    const float rms = kAloneSum * inverse_rms(b.s.squares[1]);
    float gate = sum_partials(b.s.big, 16 * b.warp + pair, b.lane >> 3) * (scales.x * rms);
    float up = sum_partials(b.s.big, 16 * b.warp + 8 + pair, b.lane >> 3) * (scales.y * rms);
    float h = __fdividef(gate, 1.f + __expf(-gate)) * up, next = __shfl_down_sync(~0u, h, 1);
    int row = slot * kMoeIntermediate + (unit % kPairUnits) * 8 + pair;
    const uint32_t input = pack_bf16x2(h * kAloneInput, next * kAloneInput);  // of down
    if (pair % 2 == 0) b.publish(kXExperts + (b.lane >> 3) * kExpertWords + row / 2, input);
    if (b.lane < 8) b.dump<kDebug>(kDumpExperts + row, h);
  }
  b.stamp<kDebug>(kPhasePair, 3);
}

// Warp w multiplies expert slot w / 2, half w % 2 of its columns; the weighted sum over the slots is part of the sum
// over the warps, in the fixed order of the slots.
template <bool kDebug>
__device__ __forceinline__ void decode_down(DecodeBlock& b, ExpertRing& ring) {
  b.stamp<kDebug>(kPhaseDown, 0);
  if (!b.owner()) return;
  constexpr int kChunks = kDownChunks, kWords = kChunks * 32, kPairs = kChunks / 2;
  const uint64_t* src = b.copy(kXExperts, kExpertWords) + b.warp * kWords + 2 * b.lane;
  const int slot = b.warp / 2, half = b.warp % 2;
  // Softmax over the chosen logits, which still lack 1/rms, times the tensor's scale.
  const float* logits = b.s.expert_logit[b.epoch & 1];
  const float weight = __expf((logits[b.lane % kTopK] - logits[0]) * inverse_rms(b.s.squares[1]));
  float sum = weight;
#pragma unroll
  for (int i = 1; i < kTopK; i *= 2) sum += __shfl_xor_sync(~0u, sum, i);
  const float scale =
      __fdividef(__shfl_sync(~0u, weight, slot), sum) * kAloneSum * b.s.expert_scale[b.epoch & 1][slot].z;
  // The weights go into registers while the input is awaited.
  ExpertRing mine = ring;
  mine.n += slot / 2;
  mine.wait_full();
  const uint8_t* tile = b.s.expert[mine.slot()] + slot % 2 * kDownTileBytes;
  const uint4* codes = (const uint4*)tile + half * kChunks * 32 + b.lane;
  const int g = b.lane >> 2, t = b.lane & 3;
  const uint8_t* scales = tile + kMoeIntermediate / 64 * 512 + 64 * (half * kChunks + t / 2) + 8 * g + 4 * (t % 2);
  uint4 q[kPairs][2];
  uint32_t s[kPairs], loaded = 0;
#pragma unroll
  for (int i = 0; i < kPairs; i++) {
    q[i][0] = codes[64 * i], q[i][1] = codes[64 * i + 32];
    s[i] = *(const uint32_t*)(scales + 128 * i);
    loaded |= q[i][0].w | q[i][1].w | s[i];
  }
  static_assert(kChunks % 2 == 0);
  mine.release(loaded, b.zero, b.lane, 4);  // four warps share the page, sixteen arrivals free it
  ring.n += kTopK / 2;
  ulonglong2 v[kPairs];
  b.wait_first(src - 2 * b.lane);
  b.wait([&] {
    bool ready = true;
#pragma unroll
    for (int i = 0; i < kPairs; i++) {
      v[i] = load_relaxed_2(src + 64 * i);
      ready = ready && b.fresh(v[i].x) && b.fresh(v[i].y);
    }
    return ready;
  });
#pragma unroll
  for (int i = 0; i < kPairs; i++)
    *(uint2*)&b.s.x[b.warp][64 * i + 2 * b.lane] = make_uint2((uint32_t)v[i].x, (uint32_t)v[i].y);
  __syncwarp();
  b.stamp<kDebug>(kPhaseDown, 1);
  // Of two chunks this lane's columns are in one at most.
  const uint32_t* x0 = alone_operand(b, 0, &b.s.x[b.warp][8 * t]);
  const uint32_t* x1 = alone_operand(b, 1, &b.s.x[b.warp][8 * t + 32]);
  const int step0 = x0 == b.s.zeros ? 0 : 64, step1 = x1 == b.s.zeros ? 0 : 64;
  float sums[2] = {};
#pragma unroll
  for (int i = 0; i < kPairs; i++, x0 += step0, x1 += step1) {
    const uint4 x[4] = {*(const uint4*)x0, *(const uint4*)(x0 + 4), *(const uint4*)x1, *(const uint4*)(x1 + 4)};
    mma_nvfp4_alone<2>(sums, q[i], s[i], x);
  }
  const float row_sum = sum_alone(sums, t) * scale;
  if (t < 2) b.s.small[b.warp][8 * t + g] = row_sum;
  b.stamp<kDebug>(kPhaseDown, 2);
  team_sync<kTeam>();
  if (b.warp < kOwnedRows / 8) {
    int row = 8 * b.warp + (b.lane & 7);
    const float y = sum_partials(b.s.small, row, b.lane >> 3) + b.s.residual[row];
    b.publish(kXOut + (b.lane >> 3) * kHidden + b.sm * kOwnedRows + row, y);
    __syncwarp();
    if (b.lane < 8) {
      b.s.residual[row] = y;
      b.dump<kDebug>(kDumpOut + b.sm * kOwnedRows + row, y);
    }
  }
  b.stamp<kDebug>(kPhaseDown, 3);
}

}  // namespace mk
