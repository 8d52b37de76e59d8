// RMSNorm, where a sub-layer meets the residual stream, the embedding, and the rotary tables of a step.
#pragma once
#include "cpu/state.h"

namespace mk {

// A norm's weights of one block: none are ones; `offset` is what they are stored without.
MK_INLINE V norm_weight(const float* weight, float offset, int b) {
  if (!weight) return set1(1.0f);
  return offset == 0.0f ? load(weight + b * 16) : load(weight + b * 16) + set1(offset);
}

// 1 / sqrt(mean(v^2) + eps) of one token's channels, its first block at x and each next `stride` floats further. v is x,
// or x * (1 + weight) where there are weights.
inline float inverse_rms(const float* x, const float* weight, int blocks, int stride, int channels, float eps) {
  V sum = zero();
  for (int b = 0; b < blocks; b++) {
    V v = load(x + b * stride);
    if (weight) v = v * norm_weight(weight, 1.0f, b);
    sum = fma(v, v, sum);
  }
  return 1.0f / std::sqrt(hsum(sum) / static_cast<float>(channels) + eps);
}

// out = x * rsqrt(mean(x^2) + eps) * (weight + offset) for every slot; x and out are [blocks][slots][16]. Every thread
// that needs a norm computes it itself: that is cheaper than meeting at a barrier for it.
inline void rms_norm(const float* x, const float* weight, float offset, int blocks, int channels, int slots, float* out) {
  for (int t = 0; t < slots; t++) {
    const V scale = set1(inverse_rms(x + t * 16, nullptr, blocks, slots * 16, channels, m::rms_norm_eps));
    for (int b = 0; b < blocks; b++) {
      const int at = (b * slots + t) * 16;
      const V v = load(x + at) * scale;
      store(out + at, weight ? v * norm_weight(weight, offset, b) : v);
    }
  }
}

// x = alpha * x + beta * norm(branch * (1 + weight)), alpha and beta of each channel from its gate.
inline void residual_phase(State& s, uint64_t gates, const float* weight, int tid) {
  if constexpr (m::sandwich) {
    const int slots = s.step.slots;
    V scale[kMaxSlots];
    for (int t = 0; t < slots; t++)
      scale[t] = set1(inverse_rms(s.branch.data() + t * 16, weight, kHiddenBlocks, slots * 16, m::hidden_size, m::sandwich_eps));
    const auto [lo, hi] = share(kHiddenBlocks, tid, s.team.size());
    for (int b = static_cast<int>(lo); b < hi; b++) {
      const V w = load(s.whole<float>(gates) + b * 16) / set1(m::gate_temperature);
      const V beta = sigmoid(w);
      const V alpha = vsqrt(vmax(sigmoid(zero() - w) * (set1(1.0f) + beta), set1(m::gate_floor)));
      for (int t = 0; t < slots; t++) {
        const int at = (b * slots + t) * 16;
        const V normed = load(s.branch.data() + at) * norm_weight(weight, 1.0f, b) * scale[t];
        store(s.x.data() + at, fma(alpha, load(s.x.data() + at), beta * normed));
      }
    }
  }
}

// Embedding rows into x, unused slots zero, and this step's cos and sin. Done by one thread: it is a few kilobytes.
inline void begin_step(State& s) {
  const Step& step = s.step;
  float row[kHiddenBlocks * 16];
  const uint8_t* table = s.whole<uint8_t>(m::embed);
  const float* scales = s.whole<float>(m::embed_scale);
  for (int t = 0; t < step.slots; t++) {
    if (t < step.count) {
      decode_row<m::fmt_embed>(table, scales, step.tokens[t], kHiddenBlocks, row);
      if (m::embed_norm) rms_norm(row, nullptr, 0, kHiddenBlocks, m::hidden_size, 1, row);
    }
    for (int b = 0; b < kHiddenBlocks; b++)
      store(s.x.data() + (b * step.slots + t) * 16, t < step.count ? load(row + b * 16) : zero());
  }
  constexpr int half = m::rotary_dim / 2;
  for (int t = 0; t < step.count; t++) {
    s.history[step.start + t] = step.tokens[t];
    for (int i = 0; i < half; i++) {
      // The angle is a float32 product, as the reference has it; its cosine is then taken in double.
      const float angle = static_cast<float>(step.start + t) * m::inv_freq[i];
      s.cosine[t * half + i] = static_cast<float>(std::cos(static_cast<double>(angle))) * m::rope_attention_factor;
      s.sine[t * half + i] = static_cast<float>(std::sin(static_cast<double>(angle))) * m::rope_attention_factor;
    }
  }
}

}  // namespace mk
