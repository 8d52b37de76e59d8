// The end of a step: final norm, lm_head, the choice of a token by argmax or sampling, stop tests, news to the host.
#pragma once
#include "abi.h"
#include "decode_dense.cuh"
#include "step_head.cuh"

namespace mk {

// Leaves this SM's best token with everybody, SM 0's with what the host says beside it. kSampled: the logits are wanted
// too. They are plain memory, written before the fence and read after another.
template <bool kDebug, bool kSampled>
__device__ __forceinline__ void decode_head(DecodeBlock& b, DenseRing& ring) {
  b.stamp<kDebug>(kPhaseHead, 0);
  // What this SM wrote into the KV cache is there for whoever reads the word that this thread publishes below, and then
  // fences: barriers of the consumers lie between those writes and here. The wait for the hidden state covers the time.
  if (b.tid == 0) __threadfence();
  const float* norm = b.p.norms + kLayers * kNormLayer;
  uint4 x[kHiddenParts][2];
  float2 v[kHiddenParts];
  float squares = 0;
  wait_hidden<kHeadFp8>(b, v);
#pragma unroll
  for (int h = 0; h < kHiddenParts; h++) {
    float2 g = __ldg((const float2*)(norm + dense_column<kHeadFp8>(b, h)));
    squares += v[h].x * v[h].x + v[h].y * v[h].y;
    dense_operands<kHeadFp8>(b, h, pack_bf16x2(v[h].x * g.x, v[h].y * g.y), x[h]);
  }
  squares = warp_sum(squares);
  if (b.lane == 0) b.s.squares[0][b.warp] = squares;
  b.stamp<kDebug>(kPhaseHead, 1);
  const int u0 = first_item(kHeadUnits, b.sm), u1 = first_item(kHeadUnits, b.sm + 1);
  float best = -INFINITY, rms = 0;
  int best_row = 0;
  for (int u = u0; u < u1; u += kHeadChunk) {
    const int units = min(kHeadChunk, u1 - u);
    float scale = 1;
    if constexpr (kHeadFp8)
      if (b.warp < units) scale = __ldg(b.p.head_scales + 8 * (u + b.warp) + (b.lane & 7));
#pragma unroll 1
    for (int i = 0; i < units; i++) {
      UnitWeights<kHeadFp8, kHiddenParts> weights;
      weights.load(b, ring);
      dense_unit(b, weights, b.s.big, i, x);
    }
    team_sync<kTeam>();
    if (u == u0) rms = inverse_rms(b.s.squares[0]);
    if (b.warp < units) {
      int row = 8 * b.warp + (b.lane & 7);
      float y = sum_partials(b.s.big, row, b.lane >> 3) * rms;
      if constexpr (kHeadFp8) y *= scale;
      if (kHeadRows == kVocab || 8 * u + row < kVocab) {  // behind the vocabulary lie rows of zeros
        keep_best(best, best_row, y, 8 * u + row);
        if constexpr (kSampled)
          if (b.lane < 8) b.p.logits[8 * u + row] = y;
      }
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
      if constexpr (kSampled) __threadfence();
      b.publish(kXBest + 2 * b.sm, best);
      b.publish(kXBest + 2 * b.sm + 1, (uint32_t)best_row | (uint32_t)load_unordered(b.s.cancel) << 31);
    }
  }
  b.stamp<kDebug>(kPhaseHead, 3);
}

// SM 0 draws the token from everybody's logits and publishes it. The scratch lies over the expert ring, which is empty:
// the consumers have multiplied all pages of the last layer, and the next one's are issued when its experts are chosen,
// which needs this SM's part of its router.
__device__ __forceinline__ void sample_token(DecodeBlock& b) {
  static_assert(!kFastDecode || sizeof(SamplerScratch) <= sizeof(b.s.expert));
  if (b.warp < ceil_div(kGrid, 32)) {
    const uint64_t* src = b.exchange(kXBest) + 2 * min(b.tid, kGrid - 1);
    b.wait([&] { return b.fresh(load_relaxed(src)); });
    __threadfence();
  }
  team_sync<kTeam>();
  const int position = b.position + 1;
  const int token = sample<kVocab>(b.p.sampling, b.p.logits, b.p.history, position, position, b.tid,
                                   *(SamplerScratch*)b.s.expert);
  async_proxy_fence();  // bulk copies write there next
  if (b.tid == 0) {
    __threadfence();  // the penalty changed logits
    b.publish(kXToken, (uint32_t)token | (uint32_t)load_unordered(b.s.cancel) << 31);
  }
}

// Chooses the token behind this one's position, tells the host, and decides whether the generation goes on. Every SM finds
// the same: the host's word comes with SM 0's, which is thread 0's to read.
template <bool kDebug, bool kSampled>
__device__ __forceinline__ bool decode_token(DecodeBlock& b, int step) {
  b.stamp<kDebug>(kPhaseToken, 0);
  const DecodeParams& p = b.p;
  float best = -INFINITY;
  uint32_t word = 0;  // the token, and in the last bit whether the host has had enough
  if constexpr (kSampled) {
    if (b.sm == 0) sample_token(b);
    if (b.warp == 0) {
      const uint64_t* src = b.exchange(kXToken);
      b.wait([&] {
        const uint64_t v = load_relaxed(src);
        word = (uint32_t)v;
        return b.fresh(v);
      });
      __threadfence();
    }
  } else {
    int row = 0;
    if (b.warp < ceil_div(kGrid, 32)) {
      ulonglong2 v;
      const uint64_t* src = b.exchange(kXBest) + 2 * min(b.tid, kGrid - 1);
      b.wait([&] {
        v = load_relaxed_2(src);
        return b.fresh(v.x) && b.fresh(v.y);
      });
      best = word_float(v.x);
      word = (uint32_t)v.y;
      row = (int)(word & 0x7FFFFFFF);
      // When the number of KV splits grows, tiles change hands: then what other SMs wrote into the cache before they
      // published must be there. The loads of the new owner come after the barrier below.
      if (log_splits_at(p, b.position + 1) != b.log_splits) __threadfence();
    }
#pragma unroll
    for (int i = 16; i; i >>= 1) keep_best(best, row, __shfl_xor_sync(~0u, best, i), __shfl_xor_sync(~0u, row, i));
    if (b.lane == 0) {
      b.s.best_value[1][b.warp] = best;
      b.s.best_row[1][b.warp] = row;
    }
    team_sync<kTeam>();
    if (b.tid == 0) {
      for (int w = 1; w < kWarps; w++) keep_best(best, row, b.s.best_value[1][w], b.s.best_row[1][w]);
      word = (word & 0x80000000u) | (uint32_t)row;
    }
  }
  if (b.tid == 0) {
    const int token = (int)(word & 0x7FFFFFFF);
    bool ended = step + 1 == p.steps || word >> 31 || load_unordered(b.s.expired);
    for (int i = 0; i < p.num_stop_tokens; i++) ended = ended || p.stop_tokens[i] == token;
    b.s.token = token;
    b.s.quit = ended;
    if (b.sm == 0) {
      p.history[b.position + 1] = token;
      *(volatile int32_t*)&p.mail->tokens[p.made + step] = token + 1;  // the word is all there is to see: no fence
      if (ended) *p.epochs = b.epoch - 1;
    }
  }
  team_sync<kTeam>();
  b.stamp<kDebug>(kPhaseToken, 3);
  return load_unordered(b.s.quit) == 0;
}

}  // namespace mk
