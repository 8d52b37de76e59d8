// Choosing a token from logits, in the order the field uses: repetition penalty, temperature, top-k, top-p, min-p, draw.
#pragma once
#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "abi.h"
#include "common/rng.h"
#include "cpu/head.h"

namespace mk {

class Sampler {
 public:
  Sampler() : seen_(m::vocab_size, 0) {
    candidates_.reserve(m::vocab_size);
    weights_.reserve(m::vocab_size);
  }

  // logits: [vocab_size], may be changed. history: every token so far. position: of the token to be chosen.
  int pick(float* logits, const int32_t* history, int length, const mk_request& r, int position) {
    if (r.repetition_penalty != 1.0f) penalise(logits, history, length, r.repetition_penalty);
    if (r.temperature == 0.0f) return static_cast<int>(std::max_element(logits, logits + m::vocab_size) - logits);
    candidates_.clear();
    // Relative to the highest before the division, or a tiny temperature would make infinities of them.
    const float top = *std::max_element(logits, logits + m::vocab_size);
    for (int i = 0; i < m::vocab_size; i++) {
      // NaN has no place in an order, and the selection below would leave its array on finding one.
      const float logit = (logits[i] - top) / r.temperature;
      candidates_.push_back({std::isnan(logit) ? -INFINITY : logit, i});
    }
    bool ordered = true;
    if (r.top_k > 0 && r.top_k < m::vocab_size) {
      std::nth_element(candidates_.begin(), candidates_.begin() + r.top_k - 1, candidates_.end(), before);
      candidates_.resize(static_cast<size_t>(r.top_k));
      ordered = false;
    }
    if (r.top_p < 1.0f) {
      keep_nucleus(r.top_p);
      ordered = true;
    }
    if (r.min_p > 0.0f) {
      const float floor = std::log(r.min_p);
      std::erase_if(candidates_, [&](const Candidate& c) { return c.logit < floor; });
    }
    // Lowest id first unless a nucleus ordered them: the walk's order decides what a draw means.
    if (!ordered) std::sort(candidates_.begin(), candidates_.end(), [](auto& a, auto& b) { return a.token < b.token; });
    weigh();
    double target = draw(r.seed, static_cast<uint64_t>(position)) * total(candidates_.size());
    for (size_t i = 0; i < candidates_.size(); i++) {
      target -= weights_[i];
      if (target < 0) return candidates_[i].token;
    }
    return candidates_.empty() ? 0 : candidates_.back().token;
  }

 private:
  struct Candidate {
    float logit;  // over the temperature, the highest is 0
    int token;
  };
  static bool before(const Candidate& a, const Candidate& b) {
    return a.logit > b.logit || (a.logit == b.logit && a.token < b.token);
  }

  void penalise(float* logits, const int32_t* history, int length, float penalty) {
    for (int i = 0; i < length; i++) {
      const int32_t token = history[i];
      if (std::exchange(seen_[static_cast<size_t>(token)], 1)) continue;
      logits[token] = logits[token] < 0 ? logits[token] * penalty : logits[token] / penalty;
    }
    for (int i = 0; i < length; i++) seen_[static_cast<size_t>(history[i])] = 0;
  }

  // weights_[i] = exp(logit_i)
  void weigh() {
    weights_.resize(candidates_.size());
    alignas(64) float chunk[16];
    for (size_t i = 0; i < candidates_.size(); i += 16) {
      const size_t n = std::min<size_t>(16, candidates_.size() - i);
      for (size_t j = 0; j < 16; j++) chunk[j] = j < n ? candidates_[i + j].logit : -INFINITY;
      store(chunk, vexp(load(chunk)));
      for (size_t j = 0; j < n; j++) weights_[i + j] = chunk[j];
    }
  }
  double total(size_t n) const {
    double sum = 0;
    for (size_t i = 0; i < n; i++) sum += weights_[i];
    return sum;
  }

  // The most likely tokens, in order, until their probability reaches top_p. Sorting the whole vocabulary would cost
  // milliseconds, so only as much of it as holds the nucleus is sorted.
  void keep_nucleus(float top_p) {
    weigh();
    const double goal = static_cast<double>(top_p) * total(candidates_.size());
    for (float depth = 8.0f;; depth *= 2) {
      auto end = std::partition(candidates_.begin(), candidates_.end(),
                                [&](const Candidate& c) { return c.logit >= -depth; });
      std::sort(candidates_.begin(), end, before);
      const auto n = static_cast<size_t>(end - candidates_.begin());
      weigh();
      double sum = 0;
      for (size_t i = 0; i < n; i++) {
        sum += weights_[i];
        if (sum >= goal || i + 1 == candidates_.size()) {
          candidates_.resize(i + 1);
          return;
        }
      }
      if (depth > 1e6f) return;  // nothing but rounding is missing
    }
  }

  std::vector<uint8_t> seen_;
  std::vector<Candidate> candidates_;
  std::vector<double> weights_;
};

}  // namespace mk
