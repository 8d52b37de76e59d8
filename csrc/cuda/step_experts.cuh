// The phases of experts in the step kernel: gate/up + SwiGLU, down + weighted sum + residual.
#pragma once
#include "mma.cuh"
#include "step_mlp.cuh"
#include "step_router.cuh"

namespace mk {

// silu(gate) * up, or the clamped kind.
__device__ __forceinline__ float swiglu(float gate, float up) {
  if constexpr (!kClampedSwiglu) return __fdividef(gate, 1.f + __expf(-gate)) * up;
  gate = fminf(gate, kSwigluLimit);
  up = fminf(fmaxf(up, -kSwigluLimit), kSwigluLimit) + kSwigluUpOffset;
  return __fdividef(gate, 1.f + __expf(-kSwigluAlpha * gate)) * up;
}

// A lane's columns of one chunk of one token: 16 of them, 32 bytes.
struct ChunkInput {
  uint4 a, b;
};
// Most chunks of a warp in a gate/up page, and those it holds in registers at a time: the page's slot is free again as soon as
// the last of them are.
constexpr int kPairCount = ceil_div(tile_page_chunks(kExpertHidden, 0), kPairWarps), kPairHeld = kPairCount < 2 ? kPairCount : 2;
// Of a row of a tile and one of eight tokens: the warps' sums and SwiGLU of them, where ranks send two rows at a time.
__device__ __forceinline__ float swiglu_sum(const StepBlock& b, const float (*out)[16][8], int r, int column, int pair,
                                            float4 scale, float gate_bias, float up_bias) {
  float gate = 0, up = 0;
#pragma unroll
  for (int w = 0; w < kPairWarps; w++) gate += out[w][r][column], up += out[w][r + 8][column];
  const float rms = b.s.rms[pair / kTopK] * kNvfp4Scale;
  gate *= scale.x * rms, up *= scale.y * rms;
  if constexpr (kExpertBias) gate += gate_bias, up += up_bias;
  return swiglu(gate, up);
}
__device__ __forceinline__ void step_pair(StepBlock& b, StepRing& ring) {
  b.stamp(kPhasePair, 0);
  const int group = b.warp / kPairWarps, part = b.warp % kPairWarps;
  const int u0 = first_item(b.s.active_count * kPairUnits, b.sm()),
            units = first_item(b.s.active_count * kPairUnits, b.sm() + 1) - u0;
  StepRing mine = ring;
  mine.n += group;
  int buffer = 0;
#pragma unroll 1
  for (int j = group; j < units; j += kPairGroups) {
    const int g = b.lane() >> 2, t = b.lane() & 3;
    const int index = (u0 + j) / kPairUnits, unit = (u0 + j) % kPairUnits;
    const int first = b.s.list_start[index], pairs = b.s.list_start[index + 1] - first;
    const float4 scale = __ldg(b.p.expert_scales + b.moe_layer() * kExperts + b.s.active[index]);
    float2 gate_biases = {}, up_biases = {};  // of the row that this thread will finish, or of both
    if constexpr (kExpertBias) {
      const float* bias = b.vectors() + kBiasPair + b.s.active[index] * 2 * kPairBiases + 8 * unit;
      if constexpr (kRanks > 1) {
        bias += b.lane() % 4 * 2;
        gate_biases = __ldg((const float2*)bias), up_biases = __ldg((const float2*)(bias + kPairBiases));
      } else {
        bias += b.lane() % 8;
        gate_biases.x = __ldg(bias), up_biases.x = __ldg(bias + kPairBiases);
      }
    }
#pragma unroll 1
    for (int pass = 0; pass < pairs; pass += 8) {  // eight tokens of this expert at a time
      const bool valid = pass + g < pairs;
      const uint16_t* row =
          b.scratch<uint16_t>() + (valid ? b.s.list[first + pass + g] / kTopK : 0) * kXStride + 16 * t;
      float acc[2][4] = {};
      StepRing at = mine;
#pragma unroll 1
      for (int page = 0; page < tile_pages(kExpertHidden); page++) {
        const int chunks = tile_page_chunks(kExpertHidden, page), c1 = chunks * (part + 1) / kPairWarps;
        at.wait_full();
        const uint4* codes = (const uint4*)b.s.expert[at.slot()] + b.lane();
        const uint16_t* scales = (const uint16_t*)(b.s.expert[at.slot()] + chunks * 512) + b.lane();
        uint32_t loaded = 0;
#pragma unroll 1
        for (int c0 = chunks * part / kPairWarps; c0 < c1; c0 += kPairHeld) {
          uint4 q[kPairHeld];
          uint32_t s[kPairHeld];
#pragma unroll
          for (int i = 0; i < kPairHeld; i++)
            if (c0 + i < c1) {
              q[i] = codes[32 * (c0 + i)];
              s[i] = scales[32 * (c0 + i)];
              loaded |= q[i].w | s[i];
            }
          if (c0 + kPairHeld >= c1 && pass + 8 >= pairs) at.release(loaded, b.zero, b.lane(), kWarps / kPairWarps);
#pragma unroll
          for (int i = 0; i < kPairHeld; i++)
            if (c0 + i < c1) {
              const uint4* v = (const uint4*)(row + (page * kPageChunks + c0 + i) * 64);
              const ChunkInput x = valid ? ChunkInput{v[0], v[1]} : ChunkInput{};
              mma_nvfp4_chunk(acc[i & 1], q[i], s[i], x.a, x.b);
            }
        }
        if (chunks * part / kPairWarps == c1 && pass + 8 >= pairs) at.release(0, b.zero, b.lane(), kWarps / kPairWarps);
        if (pass + 8 < pairs) at.n++;
      }
      float(*out)[16][8] = b.s.pair_part[group][buffer];
      *(float2*)&out[part][g][2 * t] = make_float2(acc[0][0] + acc[1][0], acc[0][1] + acc[1][1]);
      *(float2*)&out[part][g + 8][2 * t] = make_float2(acc[0][2] + acc[1][2], acc[0][3] + acc[1][3]);
      group_sync(kSquadBarrier + group, kPairWarps * 32);
      if constexpr (kRanks > 1) {  // two rows a thread: they are sent as one word
        const int i = part * 32 + b.lane(), r = i % 4 * 2, column = i / 4;
        if (column < min(8, pairs - pass)) {
          const int pair = b.s.list[first + pass + column];
          put_swiglu(b, pair, unit, r, swiglu_sum(b, out, r, column, pair, scale, gate_biases.x, up_biases.x),
                     swiglu_sum(b, out, r + 1, column, pair, scale, gate_biases.y, up_biases.y));
        }
      } else {
        const int i = part * 32 + b.lane(), r = i % 8, column = i / 8;
        if (column < min(8, pairs - pass)) {
          float gate = 0, up = 0;  // swiglu_sum() written out: called, it compiles to other code than was measured
#pragma unroll
          for (int w = 0; w < kPairWarps; w++) gate += out[w][r][column], up += out[w][r + 8][column];
          const int pair = b.s.list[first + pass + column];
          const float rms = b.s.rms[pair / kTopK] * kNvfp4Scale;
          gate *= scale.x * rms, up *= scale.y * rms;
          if constexpr (kExpertBias) gate += gate_biases.x, up += up_biases.x;
          const float h = swiglu(gate, up);
          b.p.swiglu[pair * kMoeIntermediate + 8 * unit + r] = (uint16_t)pack_bf16x2(h, 0.f);
        }
      }
      buffer ^= 1;
    }
    mine.n += kPairGroups * tile_pages(kExpertHidden);
  }
  ring.n += units * tile_pages(kExpertHidden);
  if constexpr (kRanks > 1) take_swiglu(b);
  b.stamp(kPhasePair, 3);
  b.meet();
}

// Narrow experts: their outputs are normed over all their rows, which the grid has to meet for, and then summed with their
// weights. In scratch lie products [copy][pair][this SM's row].
__device__ __forceinline__ void end_narrow_down(StepBlock& b) {
  float* products = b.scratch<float>();
  const int rows = b.down_units() * kUnitRows, pairs = b.tokens() * kTopK;
#pragma unroll 1
  for (int i = b.tid; i < pairs * rows; i += kTeam) {
    float* at = products + i / rows * kDownRows + i % rows;
    float v = 0;
    for (int copy = 0; copy < kDownCopies; copy++) v += at[copy * pairs * kDownRows];
    *at = v * b.weight_of(b.vectors() + kNormExpert + b.down_row() + i % rows, 1.f);
  }
  team_sync<kTeam>();
#pragma unroll 1
  for (int i = b.tid; i < pairs * b.down_units(); i += kTeam) {
    const int pair = i / b.down_units(), unit = i % b.down_units();
    const float* v = products + pair * kDownRows + unit * kUnitRows;
    float sum = 0;
    for (int row = 0; row < kUnitRows; row++) sum += v[row] * v[row];
    put_float(b, b.pair_squares(), kImagePairSquares, pair * kModelDownUnits + b.down_row() / kUnitRows + unit, sum);
  }
  if constexpr (kRanks > 1) {
    begin_takes(b);
    take_floats<kModelDownUnits, kSentPairSquares>(b, b.pair_squares(), kImagePairSquares, pairs);
  }
  b.stamp(kPhaseDown, 3);
  b.meet();
}
__device__ __forceinline__ void step_mix(StepBlock& b) {
  b.stamp(kPhaseMix, 0);
#pragma unroll 1
  for (int pair = b.warp; pair < b.tokens() * kTopK; pair += kWarps) {
    float sum = 0;
    for (int i = b.lane(); i < kModelDownUnits; i += 32) sum += __ldcg(b.pair_squares() + pair * kModelDownUnits + i);
    sum = warp_sum(sum);
    if (b.lane() == 0) b.s.pair_weight[pair] *= rsqrtf(sum / kExpertHidden + kExpertNormEps);
  }
  team_sync<kTeam>();
  const int twos = b.down_units() * (kUnitRows / 2);
#pragma unroll 1
  for (int i = b.tid; i < b.tokens() * twos; i += kTeam) {
    const int token = i / twos, row = i % twos * 2;
    float2 sum = {};
    for (int k = 0; k < kTopK; k++) {
      const float weight = b.s.pair_weight[token * kTopK + k];
      const float* product = b.scratch<float>() + (token * kTopK + k) * kDownRows + row;
      sum.x += weight * product[0], sum.y += weight * product[1];
    }
    put_two(b, b.mixed(), kImageMixed, token * kNarrowHidden + b.down_row() + row, pack_bf16x2(sum.x, sum.y));
  }
  if constexpr (kRanks > 1) {
    begin_takes(b);
    take_rows<kNarrowHidden, 2 * kSentMixed>(b, b.mixed(), kImageMixed, b.tokens());
  }
  b.stamp(kPhaseMix, 3);
  b.meet();
}

// Most chunks of a warp in a page, and inputs in registers at a time.
constexpr int kDownCount = ceil_div(tile_page_chunks(kMoeIntermediate, 0), kDownSplit);
constexpr int kDownMost = kSpareRegisters ? 2 : 4, kDownHeld = kDownCount < kDownMost ? kDownCount : kDownMost;
// Codes and scales of a page in registers, so that its slot is free before they are multiplied.
constexpr bool kDownEarly = kDownCount <= 6 && !kSpareRegisters;
// Every pair's product with its expert's tile goes to shared memory; the sum over a token's experts is taken in the order of
// their ranks, so it does not depend on what the other tokens chose.
__device__ __forceinline__ void step_down(StepBlock& b, StepRing& ring) {
  b.stamp(kPhaseDown, 0);
  const int group = b.warp / 4, tile = b.warp % 4 / kDownSplit, part = b.warp % 4 % kDownSplit;
  // Pages of a row unit, and of all. Loaded where they are used: between them there is no register for these.
  const auto per_unit = [&] { return ceil_div(*(volatile int32_t*)&b.s.active_count, kDownPack) * kDownPages; };
  const auto total = [&] { return per_unit() * b.down_units(); };
  const uint32_t start = ring.n;
  float* products = b.scratch<float>();  // [copy][pair][owned row]
  constexpr bool kEven = kDownPages == 1 && tile_chunks(kMoeIntermediate) % kDownSplit == 0;
  ChunkInput x[kDownHeld];
  // Of page n of this phase: its place in its unit, and the tile's in the list of active experts, or -1.
  const auto page_of = [&](int n) { return kDownOwned == 1 ? n : n % per_unit(); };
  const auto tile_of = [&](int n) {
    const int index = page_of(n) / kDownPages * kDownPack + tile;
    return n < total() && tile < kDownPack && index < b.s.active_count ? index : -1;
  };
  // Where the inputs of page n begin, of this lane's token of eight of its pairs from `pass` on; NULL: there are none.
  const auto input_of = [&](int index, int pass, int c0) {
    const int g = b.lane() >> 2, t = b.lane() & 3;
    if (index < 0) return (const uint4*)nullptr;
    const int at = b.s.list_start[index] + pass + g;
    if (at >= b.s.list_start[index + 1]) return (const uint4*)nullptr;
    return (const uint4*)(b.p.swiglu + b.s.list[at] * kMoeIntermediate + c0 * 64 + 16 * t);
  };
  // Input i lies in x[i % kDownHeld].
  const auto load = [&](const uint4* v, int count, int i0, int i1) {
#pragma unroll
    for (int i = 0; i < kDownCount; i++)
      if (i >= i0 && i < i1)
        x[i % kDownHeld] =
            v && (kEven || i < count) ? ChunkInput{__ldcg(v + 8 * i), __ldcg(v + 8 * i + 1)} : ChunkInput{};
  };
  // A slot's pages are always its four warps'.
  int n = (int)((group - start) & (kStepSlots - 1));
  const auto first_chunk = [&](int page) {
    return kEven ? part * kDownCount : tile_page_chunks(kMoeIntermediate, page) * part / kDownSplit;
  };
  const auto chunk_count = [&](int page) {
    return kEven ? kDownCount : tile_page_chunks(kMoeIntermediate, page) * (part + 1) / kDownSplit - first_chunk(page);
  };
  load(input_of(tile_of(n), 0, n % kDownPages * kPageChunks + first_chunk(n % kDownPages)),
       chunk_count(n % kDownPages), 0, kDownHeld);
#pragma unroll 1
  for (; n < total(); n += kStepSlots) {
    const int index = tile_of(n), g = b.lane() >> 2, t = b.lane() & 3, page = n % kDownPages;
    const int chunks = tile_page_chunks(kMoeIntermediate, page), c0 = first_chunk(page), count = chunk_count(page);
    const int first = index < 0 ? 0 : b.s.list_start[index], pairs = index < 0 ? 0 : b.s.list_start[index + 1] - first;
    const float scale =
        index < 0 ? 0.f : __ldg(&b.p.expert_scales[b.moe_layer() * kExperts + b.s.active[index]].z) * kNvfp4Scale;
    const int row = kDownOwned == 1 ? g : n / per_unit() * kUnitRows + g;
    float bias[2] = {};  // of rows g and g + 8, in one of the parts that are added up
    if constexpr (kExpertBias)
      if (index >= 0 && page == 0 && part == 0) {
        const float* of =
            b.vectors() + kBiasDown + b.s.active[index] * kDownBiases + b.first_down_unit() * kUnitRows + row;
        bias[0] = __ldg(of), bias[1] = __ldg(of + 8);
      }
    ring.n = start + n;
    ring.wait_full();
    const uint8_t* data = b.s.expert[ring.slot()] + tile * chunks * kChunkBytes;
    const uint4* codes = (const uint4*)data + 32 * c0 + b.lane();
    const uint16_t* scales = (const uint16_t*)(data + chunks * 512) + 32 * c0 + b.lane();
    uint4 q[kDownEarly ? kDownCount : 1];
    uint32_t s[kDownEarly ? ceil_div(kDownCount, 2) : 1] = {}, loaded = 0;
    const auto load_codes = [&](int i, int to) {
      q[to] = codes[32 * i];
      const uint32_t scale = scales[32 * i];
      s[to / 2] = to % 2 ? __byte_perm(s[to / 2], scale, 0x5410) : scale;  // two a register
      loaded |= q[to].w | scale;
    };
    if constexpr (kDownEarly) {
      if (pairs)
#pragma unroll
        for (int i = 0; i < kDownCount; i++)
          if (kEven || i < count) load_codes(i, i);
      ring.release(loaded, b.zero, b.lane(), kWarps / 4);
    }
#pragma unroll 1
    for (int pass = 0; pass < pairs; pass += 8) {
      const uint4* input = input_of(index, pass, page * kPageChunks + c0);
      if (pass) load(input, count, 0, kDownHeld);
      float acc[2][4] = {};
#pragma unroll
      for (int i = 0; i < kDownCount; i++) {
        if (kEven || i < count) {
          if constexpr (!kDownEarly) load_codes(i, 0);
          const int at = kDownEarly ? i : 0;
          if constexpr (kDownEarly) {  // or they would be unpacked once for all passes: too many registers
            forget((int&)q[i].x, (int&)q[i].y), forget((int&)q[i].z, (int&)q[i].w);
            if (i % 2 == 0) forget((int&)s[i / 2]);
          }
          mma_nvfp4_chunk(acc[i & 1], q[at], at % 2 ? s[at / 2] >> 16 : s[at / 2], x[i % kDownHeld].a,
                          x[i % kDownHeld].b);
        }
        load(input, count, i + kDownHeld, i + kDownHeld + 1);
      }
      if constexpr (!kDownEarly)
        if (pass + 8 >= pairs) ring.release(loaded, b.zero, b.lane(), kWarps / 4);
#pragma unroll
      for (int k = 0; k < 2; k++) {
        const int column = pass + 2 * t + k;
        if (column < pairs) {
          const int pair = b.s.list[first + column];
          const float weight = kNarrow ? scale : b.s.pair_weight[pair] * scale;
          float* out = products + ((page * kDownSplit + part) * b.tokens() * kTopK + pair) * kDownRows + row;
          out[0] = (acc[0][k] + acc[1][k]) * weight;
          out[8] = (acc[0][k + 2] + acc[1][k + 2]) * weight;
          if constexpr (kExpertBias) {
            const float share = kNarrow ? 1.f : b.s.pair_weight[pair];
            out[0] += share * bias[0];
            out[8] += share * bias[1];
          }
        }
      }
    }
    if constexpr (!kDownEarly)
      if (pairs == 0) ring.release(0, b.zero, b.lane(), kWarps / 4);
    const int next = (n + kStepSlots) % kDownPages;
    load(input_of(tile_of(n + kStepSlots), 0, next * kPageChunks + first_chunk(next)), chunk_count(next), 0,
         kDownHeld);
  }
  ring.n = start + total();
  b.stamp(kPhaseDown, 2);
  team_sync<kTeam>();
  if constexpr (kNarrow) {
    end_narrow_down(b);
    return;
  }
  const int rows = b.units() * kUnitRows;
  for (int i = b.tid; i < b.tokens() * rows; i += kTeam) {
    const int token = i / rows, row = i % rows;
    float sum = 0;
    for (int k = 0; k < kTopK; k++) {
      float product = 0;
      for (int copy = 0; copy < kDownCopies; copy++)
        product += products[(copy * b.tokens() * kTopK + token * kTopK + k) * kDownRows + row];
      sum += product;
    }
    if constexpr (kSandwich) {
      add_to_residual(b, token, row, sum);
      continue;
    }
    const float v = b.s.residual[token][row] + sum;
    b.s.residual[token][row] = v;
    if (b.p.taps) b.p.taps[((int64_t)b.layer() * kMaxTokens + b.s.first + token) * kHidden + b.owned_row() + row] = v;
  }
  if constexpr (kSandwich) {
    finish_layer(b, kPhaseDown);
    return;
  }
  team_sync<kTeam>();
  end_layer(b, kPhaseDown);
}

}  // namespace mk
