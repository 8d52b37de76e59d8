// A step by itself, measured: for mkpack bench.
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
  return {start.seconds_until(end), (double)hit / (kLayers * passes)};
}

}  // namespace mk
