// The expert phases: router, gate/up + SwiGLU, down + weighted sum + residual.
#pragma once
#include <type_traits>
#include "decode_block.cuh"
#include "mma.cuh"

namespace mk {

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
    ((uint32_t*)&in)[i] = pack_bf16x2(b0, b1);
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
  for (int i = 0; i < 2 * kPairs; i++) x[i] = *(const uint4*)&b.s.x[b.warp][32 * (i / 2) + 8 * (b.lane & 3) + 4 * (i % 2)];
  b.stamp<kDebug>(kPhaseRouter, 1);
  b.stamp<kDebug>(kPhaseRouter, 3);
}

template <bool kDebug>
__device__ __forceinline__ void decode_pair(DecodeBlock& b, ExpertRing& ring, const uint4 (&x)[2 * kHiddenParts]) {
  b.stamp<kDebug>(kPhasePair, 0);
  const int u0 = first_item(kTokenPairUnits, b.sm), units = first_item(kTokenPairUnits, b.sm + 1) - u0;
  chosen_wait<kTeam + 32>();
#pragma unroll 1
  for (int u = 0; u < units; u++) {
    float acc[4] = {};
    ring.wait_full();
    if (u == 0) b.stamp<kDebug>(kPhasePair, 1);
    const uint8_t* page = b.s.expert[ring.slot()];
    const uint4* codes = (const uint4*)page + 32 * kHiddenParts * b.warp + b.lane;
    const uint16_t* scales = (const uint16_t*)(page + kHidden / 64 * 512) + 32 * kHiddenParts * b.warp + b.lane;
    uint4 q[kHiddenParts];
    uint32_t s[kHiddenParts], loaded = 0;
#pragma unroll
    for (int c = 0; c < kHiddenParts; c++) q[c] = codes[32 * c], s[c] = scales[32 * c], loaded |= q[c].w | s[c];
    ring.release(loaded, b.zero, b.lane);
#pragma unroll
    for (int c = 0; c < kHiddenParts; c++) mma_nvfp4_chunk(acc, q[c], s[c], x[2 * c], x[2 * c + 1]);
    if ((b.lane & 3) == 0) {  // token 0 is the MMA's column 0
      b.s.big[b.warp][16 * u + (b.lane >> 2)] = acc[0];
      b.s.big[b.warp][16 * u + 8 + (b.lane >> 2)] = acc[2];
    }
  }
  b.stamp<kDebug>(kPhasePair, 2);
  team_sync<kTeam>();
  if (b.warp < units) {  // warp u finishes tile u
    const int unit = u0 + b.warp, slot = unit / kPairUnits, pair = b.lane & 7;
    const float2 scales = *(const float2*)&b.s.expert_scale[b.epoch & 1][slot];
    const float rms = kNvfp4Scale * inverse_rms(b.s.squares[1]);
    float gate = sum_partials(b.s.big, 16 * b.warp + pair, b.lane >> 3) * (scales.x * rms);
    float up = sum_partials(b.s.big, 16 * b.warp + 8 + pair, b.lane >> 3) * (scales.y * rms);
    float h = __fdividef(gate, 1.f + __expf(-gate)) * up, next = __shfl_down_sync(~0u, h, 1);
    int row = slot * kMoeIntermediate + (unit % kPairUnits) * 8 + pair;
    if (pair % 2 == 0) b.publish(kXExperts + (b.lane >> 3) * kExpertWords + row / 2, pack_bf16x2(h, next));
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
      __fdividef(__shfl_sync(~0u, weight, slot), sum) * kNvfp4Scale * b.s.expert_scale[b.epoch & 1][slot].z;
  ulonglong2 v[kPairs];
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
  ExpertRing mine = ring;
  mine.n += slot / 2;
  mine.wait_full();
  const uint8_t* tile = b.s.expert[mine.slot()] + slot % 2 * kDownTileBytes;
  const uint4* codes = (const uint4*)tile + half * kChunks * 32 + b.lane;
  const uint16_t* scales = (const uint16_t*)(tile + kMoeIntermediate / 64 * 512) + half * kChunks * 32 + b.lane;
  const uint32_t* xs = &b.s.x[b.warp][8 * (b.lane & 3)];
  float acc[2][4] = {};
  uint32_t loaded = 0;
#pragma unroll 1  // a short loop: its code is fetched once and then warm
  for (int c = 0; c < kChunks; c += 2, codes += 64, scales += 64, xs += 64) {
    const uint4 q0 = codes[0], q1 = codes[32];
    const uint32_t s0 = scales[0], s1 = scales[32];
    loaded |= q0.w | q1.w | s0 | s1;
    mma_nvfp4_chunk(acc[0], q0, s0, *(const uint4*)xs, *(const uint4*)(xs + 4));
    mma_nvfp4_chunk(acc[1], q1, s1, *(const uint4*)(xs + 32), *(const uint4*)(xs + 36));
  }
  static_assert(kChunks % 2 == 0);
  mine.release(loaded, b.zero, b.lane, 4);  // four warps share the page, sixteen arrivals free it
  ring.n += kTopK / 2;
  if ((b.lane & 3) == 0) {
    b.s.small[b.warp][b.lane >> 2] = (acc[0][0] + acc[1][0]) * scale;
    b.s.small[b.warp][8 + (b.lane >> 2)] = (acc[0][2] + acc[1][2]) * scale;
  }
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
