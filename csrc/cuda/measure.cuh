// Steps measured: one by itself for mkpack bench, when each phase of a few was done for mkpack trace.
#pragma once
#include "state.cuh"

namespace mk {

class HostEvent {
 public:
  HostEvent() { check(cudaEventCreate(&event_), "making an event"); }
  ~HostEvent() { cudaEventDestroy(event_); }
  HostEvent(const HostEvent&) = delete;
  HostEvent& operator=(const HostEvent&) = delete;
  void record(cudaStream_t stream) { check(cudaEventRecord(event_, stream), "recording an event"); }
  double seconds_until(const HostEvent& later) const {
    float ms = 0;
    check(cudaEventElapsedTime(&ms, event_, later.event_), "asking for the time between two events");
    return ms * 1e-3;
  }

 private:
  cudaEvent_t event_ = nullptr;
};

// Time of one launch for these tokens, with logits of all of them. The model's length stays.
inline mk_timing time_step(mk_model& model, const int32_t* tokens, int count) {
  uint32_t hit = 0;
  HostEvent start, end;
  check(cudaMemsetAsync(model.params.experts_hit, 0, sizeof hit, model.stream), "clearing the count of experts");
  model.give(tokens, count);
  start.record(model.stream);
  model.launch(count, 0, 0, count, nullptr);
  end.record(model.stream);
  check(cudaMemcpyAsync(&hit, model.params.experts_hit, sizeof hit, cudaMemcpyDeviceToHost, model.stream),
        "copying the count of experts from the GPU");
  model.finish();
  const int passes = ceil_div(count, kStepTokens);  // more than one where the kernel's steps are short
  return {start.seconds_until(end), (double)hit / (kMoeCount * passes)};
}

// The same of a rank that is looped back; what its exchanges are is counted in a step of its own before.
inline mk_rank_timing time_rank(mk_model& model, const int32_t* tokens, int count) {
  uint32_t counts[2] = {};
  void* const at = model.work.get() + model.places.loop_counts;
  const auto timed = [&](Loop loop) {
    set_loop(model.params, loop);
    const mk_timing found = time_step(model, tokens, count);
    set_loop(model.params, kLooped);
    return found;
  };
  check(cudaMemsetAsync(at, 0, sizeof counts, model.stream), "clearing the counts of exchanges");
  timed(kCounted);
  check(cudaMemcpy(counts, at, sizeof counts, cudaMemcpyDeviceToHost), "copying the counts of exchanges from the GPU");
  const mk_timing with = timed(kLooped), without = timed(kMuted);
  return {with, without, counts[0], (int64_t)counts[1] * (int64_t)sizeof(uint32_t)};
}

// ---- trace -----------------------------------------------------------------------------------------------------------
constexpr int kTraceBefore = 1;  // steps that run first: weights of a launch's first step are not on their way

constexpr int kTraceRows = (int)kPhases + (int)kStreams;  // phases, then streams

inline mk_trace_shape trace_shape(int count) {
#define MK_FIRST "consumers embed\nconsumers qkv\nconsumers attention\nconsumers combine\nconsumers out\nconsumers router\n"
#define MK_LAST "consumers gate/up\nconsumers down\nconsumers head\nconsumers token\n"
#define MK_STREAMS "dense qkv\ndense out\ndense head\nexperts cache\nexperts gate/up and down"
  static const char* names = MK_FIRST "consumers choose\n" MK_LAST MK_STREAMS;
  static const char* names_of_all =
      MK_FIRST "consumers choose\n" MK_LAST
      "consumers attention residual\nconsumers pre proj\nconsumers mix\nconsumers post proj\nconsumers dense gate/up\n"
      "consumers dense down\nconsumers mlp residual\n" MK_STREAMS "\ndense mlp";
  static const char* names_of_decode = MK_FIRST "experts choose\n" MK_LAST MK_STREAMS;  // it chooses where it streams
#undef MK_FIRST
#undef MK_LAST
#undef MK_STREAMS
  const char* own = kMoreTraced ? names_of_all : kFastDecode && count == 1 ? names_of_decode : names;
  return {kLayers + 1, kTraceRows, kGrid, 0, own};
}

// stamps: [steps][kLayers + 1][kTraceRows][kGrid][4]. One token is followed by those that the kernel chooses, in one
// launch; several are run again and again, a launch each. The model's length stays.
inline void trace_steps(mk_model& model, const int32_t* tokens, int count, int steps, int64_t* stamps) {
  int places = 1;
  while (places < steps) places *= 2;
  DeviceArray<int64_t> phases(kTraceStep * places), streams(kStreamStep * places);
  StepParams& p = model.params;
  const auto trace = [&](int first, int mask) {
    p.trace = phases.get() + first * kTraceStep;
    p.streams = streams.get() + first * kStreamStep;
    p.trace_mask = mask;
  };
  struct Untraced {
    StepParams& p;
    ~Untraced() { p.trace = p.streams = nullptr; }
  } untraced{p};
  model.give(tokens, count);
  int first = 0;  // the place of the first step
  check(cudaMemsetAsync(phases.get(), 0, kTraceStep * places * sizeof(int64_t), model.stream), "clearing the trace");
  check(cudaMemsetAsync(streams.get(), 0, kStreamStep * places * sizeof(int64_t), model.stream), "clearing the trace");
  if (count == 1) {
    trace(0, places - 1);
    const int all = steps + kTraceBefore;
    const mk_request greedy{0, 1, 0, 1, 0, all, 0, nullptr, 0, 0};
    model.mail.clear(all);
    if constexpr (kFastDecode)
      model.launch_decode<kFastDecode>(all, 0, greedy);
    else
      model.launch(1, all, 0, 0, &greedy);
    model.finish();
    first = kTraceBefore;
  } else {
    for (int i = -kTraceBefore; i < steps; i++) {
      trace(std::max(i, 0), 0);
      model.launch(count, 0, 0, count, nullptr);
      model.finish();
    }
  }
  constexpr size_t kStep = (size_t)(kLayers + 1) * kTraceRows * kGrid * 4;
  std::vector<int64_t> a(kTraceStep), b(kStreamStep);
  for (int i = 0; i < steps; i++) {
    const int place = (first + i) % places;
    check(cudaMemcpy(a.data(), phases.get() + place * kTraceStep, a.size() * sizeof(int64_t), cudaMemcpyDeviceToHost),
          "copying the trace from the GPU");
    check(cudaMemcpy(b.data(), streams.get() + place * kStreamStep, b.size() * sizeof(int64_t), cudaMemcpyDeviceToHost),
          "copying the trace from the GPU");
    int64_t* out = stamps + i * kStep;
    for (size_t layer = 0; layer <= kLayers; layer++) {
      out = std::copy_n(a.data() + layer * kPhases * kGrid * 4, kPhases * kGrid * 4, out);
      for (size_t j = 0; j < (size_t)kStreams * kGrid; j++, out += 4) {
        const int64_t* moments = b.data() + (layer * kStreams * kGrid + j) * 2;
        out[0] = moments[0];
        out[1] = out[2] = 0;
        out[3] = moments[1];
      }
    }
  }
}

}  // namespace mk
