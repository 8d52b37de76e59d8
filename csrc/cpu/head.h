// The last norm, the vocabulary projection and the greedy choice.
#pragma once
#include <bit>

#include "cpu/project.h"

namespace mk {

// softcap * tanh(logits * scale / softcap). Taken in double, so that the bits are those of no library in particular.
MK_INLINE V cap_logits(V v) {
  if (m::logit_scale != 1.0f) v = v * set1(m::logit_scale);
  if (m::logit_softcap == 0.0f) return v;
  alignas(64) float x[16];
  store(x, v / set1(m::logit_softcap));
  for (float& y : x) y = static_cast<float>(std::tanh(static_cast<double>(y)));
  return load(x) * set1(m::logit_softcap);
}

// logits[i][vocab] of the last step.logits tokens, and each thread's best token per row (ties to the lowest id).
inline void head_phase(State& s, int tid) {
  const Step& step = s.step;
  Local& local = s.locals[tid];
  const int n = round_tokens(step.logits), skip = step.count - step.logits;
  for (int b = 0; b < kHiddenBlocks; b++)
    for (int j = 0; j < n; j++) {
      const int t = std::min(skip + j, step.count - 1);
      store(local.gathered.data() + (b * n + j) * 16, load(s.x.data() + (b * step.slots + t) * 16));
    }
  rms_norm(local.gathered.data(), s.whole<float>(m::final_norm), 0, kHiddenBlocks, m::hidden_size, n, local.normed.data());
  for (int j = 0; j < step.logits; j++) {
    local.best_value[j] = -INFINITY;
    local.best_token[j] = m::vocab_size;
  }
  constexpr int64_t size = tile_bytes(m::fmt_head, kHiddenBlocks);
  for_split_runs(s, m::vocab_tiles, kVocabTiles, tid, [&](int rank, int first, int count, int at) {
    // A tied head is a run of the embedding's tiles, which every rank holds whole.
    const int64_t tile = m::head_in_embedding ? at : first;
    const uint8_t* w = s.at<uint8_t>(rank, m::lm_head) + tile * size;
    tile_run<m::fmt_head>(n, w, count, kHiddenBlocks, local.normed.data(), [&](int i, const float* sums) {
      const V scale = tile_scale<m::fmt_head>(s.at<float>(rank, m::lm_head_scale), tile + i);
      const int token = (at + i) * 16, rows = std::min(m::vocab_size - token, 16);
      for (int j = 0; j < step.logits; j++) {
        const V v = cap_logits(load(sums + j * 16) * scale);
        float* row = s.logits.data() + int64_t{j} * kVocabTiles * 16 + token;
        store(row, v);
        if (hmax(keep_lanes(v, 0, rows, -INFINITY)) <= local.best_value[j]) continue;
        for (int r = 0; r < rows; r++)
          if (row[r] > local.best_value[j]) {
            local.best_value[j] = row[r];
            local.best_token[j] = token + r;
          }
      }
    });
  });
}

// The best token of the last row that is this State's. Threads hold ascending vocabulary ranges, so the first of equal
// values is the lowest id.
struct Best {
  float value = -INFINITY;
  int32_t token = 0;
};
inline Best best_of_threads(const State& s) {
  Best best;
  const int row = s.step.logits - 1;
  for (const Local& l : s.locals)
    if (l.best_value[row] > best.value) best = {l.best_value[row], l.best_token[row]};
  return best;
}

// The same of all ranks: they hold ascending ranges too.
inline int greedy_token(const State& s) {
  Best best = best_of_threads(s);
  for (int r = s.end_rank(); r < m::ranks; r++) {
    const float value = std::bit_cast<float>(s.best[r][0]);
    if (value > best.value) best = {value, s.best[r][1]};
  }
  return best.token;
}

}  // namespace mk
