// The end of a step: lm_head, the choice of a token by argmax or sampling, stop tests, news to the host.
#pragma once
#include "step_producer.cuh"

namespace mk {

constexpr float kSoftcap = kLogitSoftcap != 0.f ? kLogitSoftcap : 1.f;

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
      const int held = 8 * (u0 + first) + row, out = b.rank() * kHeadRows + held;
      if (out >= kVocab) return;
      float y = output_sum<kTiles>(b, row, token) * b.s.rms[token];
      if constexpr (kHeadFp8) y *= __ldg(b.p.head_scales + held);
      if constexpr (kLogitScale != 1.f) y *= kLogitScale;
      if constexpr (kLogitSoftcap != 0.f) y = kSoftcap * tanhf(y / kSoftcap);
      b.p.logits[(int64_t)(b.s.first + token) * kModelHeadRows + out] = y;
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
    if (b.lane() == 0) b.p.best[b.warp * kBests + b.rank() * kGrid + b.sm()] = make_float2(best, __int_as_float(best_row));
  }
  // One SM asks the host, so that all agree on the answer.
  if (b.sm() == 0 && b.rank() == 0 && b.tid == 0) b.p.shared_token[1] = *(volatile int32_t*)&b.p.mail->cancel;
  if constexpr (kRanks > 1) share_best(b);
  b.stamp(kPhaseHead, 3);
  b.meet();
}

MK_HD bool is_greedy(const Sampling& r) { return r.temperature == 0.f && r.repetition_penalty == 1.f; }

// Position of the token that this step chooses: behind its last one.
__device__ __forceinline__ int next_position(const StepBlock& b) { return b.position() + b.tokens(); }

// The token behind the step's last into s.token; every SM finds the same. kDrawn: by the sampler, which greedy kernels do
// without: their code is smaller.
template <bool kDrawn>
__device__ __forceinline__ void choose_token(const StepParams& p, StepShared& s) {
  const int last = s.tokens - 1;
  if constexpr (!kDrawn) {
    StepBlock b = consumer(p, s, 0);
    if (b.warp == 0) {
      float best = -INFINITY;
      int row = kVocab;
      for (int i = b.lane(); i < kBests; i += 32) {
        const float2 v = __ldcg(p.best + last * kBests + i);
        keep_best(best, row, v.x, __float_as_int(v.y));
      }
#pragma unroll
      for (int o = 16; o; o >>= 1) keep_best(best, row, __shfl_xor_sync(~0u, best, o), __shfl_xor_sync(~0u, row, o));
      if (b.lane() == 0) s.token = row < kVocab ? row : 0;  // all logits NaN
    }
  }
  if constexpr (kDrawn) {
    if constexpr (kRanks > 1) {
      StepBlock b = consumer(p, s, 0);
      share_logits(b, p.logits + (int64_t)(s.first + last) * kModelHeadRows);
      b.meet();
    }
    if (rank_block() == 0) {
      StepBlock b = consumer(p, s, 0);
      float* logits = p.logits + (int64_t)(s.first + last) * kModelHeadRows;
      const int chosen = sample<kVocab, true>(p.sampling, logits, p.history, next_position(b), next_position(b), b.tid,
                                              *b.scratch<SamplerScratch>());
      if (consumer_index() == 0) p.shared_token[0] = chosen;
    }
    StepBlock b = consumer(p, s, 0);
    b.meet();
    if (b.tid == 0) s.token = __ldcg(p.shared_token);
  }
}

// Tells the host of s.token and decides whether the generation ends with it: s.ended.
__device__ __forceinline__ void announce_token(const StepParams& p, StepShared& s) {
  StepBlock b = consumer(p, s, 0);
  b.stamp(kPhaseToken, 0);
  team_sync<kTeam>();
  if (b.tid == 0) {
    const int token = s.token, position = next_position(b), made = s.step + 1 - given_steps(p);  // tokens chosen before
    // The host finds out in the same order why it ended.
    bool ended = made + 1 >= p.new_tokens || position >= p.max_length || __ldcg(p.shared_token + 1);
    for (int i = 0; i < p.num_stop_tokens; i++) ended = ended || p.stop_tokens[i] == token;
    s.ended = ended || load_unordered(s.expired);
    if (b.sm() == 0) {
      p.history[position] = token;
      if (b.rank() == 0) store_system(&p.mail->tokens[p.made + made], token + 1);
    }
  }
  team_sync<kTeam>();
  b.stamp(kPhaseToken, 3);
}

}  // namespace mk
