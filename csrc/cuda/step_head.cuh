// The end of a step: lm_head, the choice of a token by argmax or sampling, stop tests, news to the host.
#pragma once
#include "abi.h"
#include "step_producer.cuh"

namespace mk {

// Logits of every token of the step into p.logits, and of every token this SM's best.
template <int kTiles>
__device__ __forceinline__ void step_head(StepBlock& b, StepRing& ring) {
  b.stamp(kPhaseHead, 0);
  b.load_rms();
  const int u0 = first_item(kHeadUnits, b.sm()), units = first_item(kHeadUnits, b.sm() + 1) - u0;
  float best = -INFINITY;
  int best_row = 0;
  // kTeam is a multiple of the tokens in a reduction, so a thread always meets outputs of the same token.
  dense_product<kHeadFp8, kHidden, kTiles>(b, ring, b.p.hidden, units, [&](int first, int count) {
    each_output<kTiles>(b, count, [&](int row, int token) {
      const int out = 8 * (u0 + first) + row;
      if (out >= kVocab) return;
      float y = output_sum<kTiles>(b, row, token) * b.s.rms[token];
      if constexpr (kHeadFp8) y *= __ldg(b.p.head_scales + out);
      b.p.logits[(int64_t)(b.s.first + token) * kVocab + out] = y;
      keep_best(best, best_row, y, out);
    });
  });
  b.stamp(kPhaseHead, 2);
  b.s.best_value[b.tid] = best;
  b.s.best_row[b.tid] = best_row;
  team_sync<kTeam>();
  if (b.warp < b.tokens()) {
    for (int i = b.lane(); i < kTeam / (8 * kTiles); i += 32)
      keep_best(best = i == b.lane() ? -INFINITY : best, best_row, b.s.best_value[i * 8 * kTiles + b.warp],
                b.s.best_row[i * 8 * kTiles + b.warp]);
#pragma unroll
    for (int o = 16; o; o >>= 1)
      keep_best(best, best_row, __shfl_xor_sync(~0u, best, o), __shfl_xor_sync(~0u, best_row, o));
    if (b.lane() == 0) b.p.best[b.warp * kGrid + b.sm()] = make_float2(best, __int_as_float(best_row));
  }
  // One SM asks the host, so that all agree on the answer.
  if (b.sm() == 0 && b.tid == 0) b.p.shared_token[1] = *(volatile int32_t*)&b.p.mail->cancel;
  b.stamp(kPhaseHead, 3);
  b.meet();
}

MK_HD bool is_greedy(const Sampling& r) { return r.temperature == 0.f && r.repetition_penalty == 1.f; }

// Chooses the token behind the step's last, tells the host, and decides whether the generation ends with it. Leaves s.token and s.ended; every SM finds the same.
// Not inlined: with the sampler in it, it would take registers from every phase.
__device__ __attribute__((noinline)) void step_token(const StepParams& p, StepShared& s) {
  StepBlock b = consumer(p, s, 0);
  b.stamp(kPhaseToken, 0);
  const int made = b.s.step + 1 - given_steps(p);  // tokens chosen before
  const int last = b.tokens() - 1, position = b.position() + b.tokens();  // of the token to be chosen
  int token;
  if (is_greedy(p.sampling)) {
    if (b.warp == 0) {
      float best = -INFINITY;
      int row = kVocab;
      for (int i = b.lane(); i < kGrid; i += 32) {
        const float2 v = __ldcg(p.best + last * kGrid + i);
        keep_best(best, row, v.x, __float_as_int(v.y));
      }
#pragma unroll
      for (int o = 16; o; o >>= 1) keep_best(best, row, __shfl_xor_sync(~0u, best, o), __shfl_xor_sync(~0u, row, o));
      if (b.lane() == 0) b.s.token = row < kVocab ? row : 0;  // all logits NaN
    }
  } else {
    if (b.sm() == 0) {
      const int chosen = sample<kVocab>(p.sampling, p.logits + (int64_t)(b.s.first + last) * kVocab, p.history, position, position, b.tid,
                                        *b.scratch<SamplerScratch>());
      if (b.tid == 0) p.shared_token[0] = chosen;
    }
    b.meet();
    if (b.tid == 0) b.s.token = __ldcg(p.shared_token);
  }
  team_sync<kTeam>();
  token = b.s.token;
  if (b.tid == 0) {
    int reason = -1;
    for (int i = 0; i < p.num_stop_tokens; i++)
      if (p.stop_tokens[i] == token) reason = MK_STOP_TOKEN;
    if (reason < 0) {
      if (__ldcg(p.shared_token + 1))
        reason = MK_STOP_CANCELLED;
      else if (made + 1 >= p.new_tokens)
        reason = MK_STOP_LENGTH;
      else if (position >= p.max_length)
        reason = MK_STOP_CONTEXT;
    }
    b.s.ended = reason >= 0 || *(volatile int32_t*)&b.s.expired;
    if (b.sm() == 0) {
      p.history[position] = token;
      if (reason >= 0) *(volatile int32_t*)&p.mail->reason = reason;
      store_system(&p.mail->tokens[p.made + made], token + 1);
    }
  }
  team_sync<kTeam>();
  b.stamp(kPhaseToken, 3);
}

}  // namespace mk
