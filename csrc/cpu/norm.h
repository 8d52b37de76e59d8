// RMSNorm, the embedding, and the rotary tables of a step.
#pragma once
#include "cpu/state.h"

namespace mk {

// out = x * rsqrt(mean(x^2) + eps) * weight for every slot; x and out are [blocks][slots][16]. Every thread that needs a
// norm computes it itself: that is cheaper than meeting at a barrier for it.
inline void rms_norm(const float* x, const float* weight, int blocks, int channels, int slots, float* out) {
  for (int t = 0; t < slots; t++) {
    V sum = zero();
    for (int b = 0; b < blocks; b++) {
      V v = load(x + (b * slots + t) * 16);
      sum = fma(v, v, sum);
    }
    const V scale = set1(1.0f / std::sqrt(hsum(sum) / static_cast<float>(channels) + m::rms_norm_eps));
    for (int b = 0; b < blocks; b++) {
      const int at = (b * slots + t) * 16;
      store(out + at, load(x + at) * scale * load(weight + b * 16));
    }
  }
}

// Embedding rows into x, unused slots zero, and this step's cos and sin. Done by one thread: it is a few kilobytes.
inline void begin_step(State& s) {
  const Step& step = s.step;
  float row[kHiddenBlocks * 16];
  const uint8_t* table = s.at<uint8_t>(0, m::embed);
  const float* scales = s.at<float>(0, m::embed_scale);
  for (int t = 0; t < step.slots; t++) {
    if (t < step.count) decode_row<m::fmt_embed>(table, scales, step.tokens[t], kHiddenBlocks, row);
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
