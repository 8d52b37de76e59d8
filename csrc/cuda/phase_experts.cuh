// Phases 4 to 6: router, gate/up + SwiGLU, down + weighted sum + residual.
#pragma once
#include "block.cuh"
#include "mma.cuh"

namespace mk {

// Router and gate/up share their input: this warp's columns are 128 w .. 128 w + 127, four a lane. SM e computes the logit
// of expert e. Leaves the MMA operands of gate/up in x.
template <bool kTrace>
__device__ __forceinline__ void phase_router(Block& b, uint4 (&x)[4]) {
  b.stamp<kTrace>(kPhaseRouter, 0);
  const int column = 128 * b.warp + 4 * b.lane;
  const float4 g = __ldg((const float4*)(b.p.norms + b.layer * kNormLayer + kNormPost + column));
  uint2 r = make_uint2(0, 0);
  if (b.sm < kExperts)
    r = __ldg((const uint2*)(b.p.routers + ((int64_t)b.layer * kExperts + b.sm) * kHidden + column));
  ulonglong2 v0, v1;
  const uint64_t* src = b.exchange(kXMid) + column;
  b.wait(kPhaseRouter, [&] {
    v0 = load_relaxed_2(src);
    v1 = load_relaxed_2(src + 2);
    return b.fresh(v0.x) && b.fresh(v0.y) && b.fresh(v1.x) && b.fresh(v1.y);
  });
  float a0 = word_float(v0.x), a1 = word_float(v0.y), a2 = word_float(v1.x), a3 = word_float(v1.y);
  float squares = a0 * a0 + a1 * a1 + a2 * a2 + a3 * a3;
  a0 *= g.x, a1 *= g.y, a2 *= g.z, a3 *= g.w;
  float dot = a0 * bf16_low(r.x) + a1 * bf16_high(r.x) + a2 * bf16_low(r.y) + a3 * bf16_high(r.y);
  *(uint2*)&b.s.x[b.warp][2 * b.lane] = make_uint2(pack_bf16x2(a0, a1), pack_bf16x2(a2, a3));
  squares = warp_sum(squares);
  dot = warp_sum(dot);
  if (b.lane == 0) {
    b.s.squares[1][b.warp] = squares;
    b.s.router_dot[b.warp] = dot;
  }
  b.stamp<kTrace>(kPhaseRouter, 1);
  team_sync<kTeam>();
  if (b.sm < kExperts && b.warp == 0) {
    float v = b.lane < kWarps ? b.s.router_dot[b.lane] : 0.f;
    v = warp_sum(v) * inverse_rms(b.s.squares[1]);
    if (b.lane == 0) {
      b.publish(kXLogits + b.sm, v);
      b.dump(kDumpLogits + b.sm, v);
    }
  }
  // chunk c of this warp: columns 64 c + 16 t .. + 15
#pragma unroll
  for (int i = 0; i < 4; i++) x[i] = *(const uint4*)&b.s.x[b.warp][32 * (i / 2) + 8 * (b.lane & 3) + 4 * (i % 2)];
  b.stamp<kTrace>(kPhaseRouter, 3);
}

template <bool kTrace>
__device__ __forceinline__ void phase_pair(Block& b, Ring& ring, const uint4 (&x)[4]) {
  b.stamp<kTrace>(kPhasePair, 0);
  const int u0 = first_item(kTokenPairUnits, b.sm), units = first_item(kTokenPairUnits, b.sm + 1) - u0;
  for (int u = 0; u < units; u++) {
    float acc[4] = {};
    ring.wait_full();
    if (u == 0) b.stamp<kTrace>(kPhasePair, 1);
    const uint8_t* page = b.s.expert[ring.slot()];
    const uint4* codes = (const uint4*)page + 64 * b.warp + b.lane;
    const uint16_t* scales = (const uint16_t*)(page + kHidden / 64 * 512) + 64 * b.warp + b.lane;
    uint4 q0 = codes[0], q1 = codes[32];
    uint32_t s0 = scales[0], s1 = scales[32];
    ring.release(q0.w | q1.w | s0 | s1, b.zero, b.lane);
    mma_nvfp4_chunk(acc, q0, s0, x[0], x[1]);
    mma_nvfp4_chunk(acc, q1, s1, x[2], x[3]);
    if ((b.lane & 3) == 0) {  // token 0 is the MMA's column 0
      b.s.big[b.warp][16 * u + (b.lane >> 2)] = acc[0];
      b.s.big[b.warp][16 * u + 8 + (b.lane >> 2)] = acc[2];
    }
  }
  b.stamp<kTrace>(kPhasePair, 2);
  team_sync<kTeam>();
  if (b.warp < units) {  // warp u finishes tile u
    const int unit = u0 + b.warp, slot = unit / kPairUnits, pair = b.lane & 7;
    const int id = b.s.expert_id[b.layer & 1][slot];
    const float scale = __ldg(&b.p.expert_scales[b.layer * kExperts + id].x) * kNvfp4Scale * inverse_rms(b.s.squares[1]);
    float gate = sum_partials(b.s.big, 16 * b.warp + pair, b.lane >> 3) * scale;
    float up = sum_partials(b.s.big, 16 * b.warp + 8 + pair, b.lane >> 3) * scale;
    float h = __fdividef(gate, 1.f + __expf(-gate)) * up, next = __shfl_down_sync(~0u, h, 1);
    int row = slot * kMoeIntermediate + (unit % kPairUnits) * 8 + pair;
    if (b.lane < 8) {
      if (pair % 2 == 0) b.publish(kXExperts + row / 2, pack_bf16x2(h, next));
      b.dump(kDumpExperts + row, h);
    }
  }
  b.stamp<kTrace>(kPhasePair, 3);
}

// Warp w multiplies expert slot w / 2, half w % 2 of its columns; the weighted sum over the slots is part of the sum over
// the warps, in the fixed order of the slots.
template <bool kTrace>
__device__ __forceinline__ void phase_down(Block& b, Ring& ring) {
  b.stamp<kTrace>(kPhaseDown, 0);
  if (!b.owner()) return;
  constexpr int kChunks = kMoeIntermediate / 128, kWords = kChunks * 32, kPairs = kChunks / 2;
  const uint64_t* src = b.exchange(kXExperts) + b.warp * kWords + 2 * b.lane;
  ulonglong2 v[kPairs];
  b.wait(kPhaseDown, [&] {
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
  b.stamp<kTrace>(kPhaseDown, 1);
  const int slot = b.warp / 2, half = b.warp % 2;
  Ring mine = ring;
  mine.n += slot / 2;
  mine.wait_full();
  const uint8_t* tile = b.s.expert[mine.slot()] + slot % 2 * kDownTileBytes;
  const uint4* codes = (const uint4*)tile + half * kChunks * 32 + b.lane;
  const uint16_t* scales = (const uint16_t*)(tile + kMoeIntermediate / 64 * 512) + half * kChunks * 32 + b.lane;
  uint4 q[kChunks];
  uint32_t s[kChunks], loaded = 0;
#pragma unroll
  for (int c = 0; c < kChunks; c++) {
    q[c] = codes[32 * c];
    s[c] = scales[32 * c];
    loaded |= q[c].w | s[c];
  }
  mine.release(loaded, b.zero, b.lane, 4);  // four warps share the page, sixteen arrivals free it
  ring.n += kTopK / 2;
  float acc[2][4] = {};
#pragma unroll
  for (int c = 0; c < kChunks; c++) {
    const uint4* xs = (const uint4*)&b.s.x[b.warp][32 * c + 8 * (b.lane & 3)];
    mma_nvfp4_chunk(acc[c % 2], q[c], s[c], xs[0], xs[1]);
  }
  if ((b.lane & 3) == 0) {
    const int id = b.s.expert_id[b.layer & 1][slot];
    const float scale = __ldg(&b.p.expert_scales[b.layer * kExperts + id].y) * kNvfp4Scale *
                        b.s.expert_weight[b.layer & 1][slot];
    b.s.small[b.warp][b.lane >> 2] = (acc[0][0] + acc[1][0]) * scale;
    b.s.small[b.warp][8 + (b.lane >> 2)] = (acc[0][2] + acc[1][2]) * scale;
  }
  b.stamp<kTrace>(kPhaseDown, 2);
  team_sync<kTeam>();
  if (b.warp < kOwnedRows / 8) {
    int row = 8 * b.warp + (b.lane & 7);
    float y = sum_partials(b.s.small, row, b.lane >> 3);
    if (b.lane < 8) {
      y += b.s.residual[row];
      b.s.residual[row] = y;
      b.publish(kXOut + b.sm * kOwnedRows + row, y);
      b.dump(kDumpOut + b.sm * kOwnedRows + row, y);
    }
  }
  b.stamp<kTrace>(kPhaseDown, 3);
}

}  // namespace mk
