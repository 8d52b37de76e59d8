// The GPU as the host sees it: errors with a text, memory with an owner, and whether this GPU can run this kernel.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <stdexcept>
#include <string>
#include "abi.h"
#include "decode_kernel.cuh"

namespace mk {

struct Failure : std::runtime_error {
  int32_t code;
  Failure(int32_t code, const std::string& text) : std::runtime_error(text), code(code) {}
};

inline void check(cudaError_t error, const char* doing) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // the next call must not find it again
  throw Failure(error == cudaErrorMemoryAllocation ? MK_ERR_MEMORY : MK_ERR_DEVICE,
                std::string(doing) + ": " + cudaGetErrorString(error) + " (" + cudaGetErrorName(error) + ")");
}

template <class T>
class DeviceArray {
 public:
  explicit DeviceArray(size_t n) { check(cudaMalloc(&data_, n * sizeof(T)), "allocating GPU memory"); }
  ~DeviceArray() { cudaFree(data_); }
  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;
  T* get() const { return data_; }

 private:
  T* data_ = nullptr;
};

inline std::string gigabytes(uint64_t bytes) {
  const uint64_t tenths = (bytes + 50000000) / 100000000;
  return std::to_string(tenths / 10) + "." + std::to_string(tenths % 10) + " GB";
}

// How many GPUs CUDA_VISIBLE_DEVICES leaves, at least one.
inline int count_devices() {
  int count = 0;
  const cudaError_t found = cudaGetDeviceCount(&count);
  if (found == cudaErrorInsufficientDriver || found == cudaErrorNoDevice || (found == cudaSuccess && count == 0))
    throw Failure(MK_ERR_DEVICE,
                  "no GPU to run on: this process sees none, or the NVIDIA driver is missing or older than CUDA " +
                      std::to_string(CUDART_VERSION / 1000) + " (" + cudaGetErrorString(found) +
                      "); nvidia-smi and CUDA_VISIBLE_DEVICES tell more");
  check(found, "looking for a GPU");
  return count;
}

// Ranks that share a device, on so many of them: as few as that allows.
inline int ranks_a_device(int devices) {
  for (int ranks = 1; ranks <= kPerDevice; ranks++)
    if (kRanks % ranks == 0 && kRanks / ranks <= devices) return ranks;
  throw Failure(MK_ERR_DEVICE, "this process sees " + std::to_string(devices) + " GPUs, and the model has " +
                                   std::to_string(kRanks) + " ranks, of which at most " + std::to_string(kPerDevice) +
                                   " may share one; show it more (CUDA_VISIBLE_DEVICES) or build with a larger "
                                   "parallel.per_device");
}

// Makes a device this thread's. Throws Failure with everything that keeps it from running the kernel for so many ranks.
// bytes: of GPU memory that they are going to take. kFast: decode_kernel is wanted too.
template <bool kFast>
void open_device(int device, int ranks, uint64_t bytes, const std::string& what) {
  const int blocks = ranks * kGrid;
  check(cudaSetDevice(device), "opening the GPU, which another process may hold for itself alone");
  cudaDeviceProp d;
  check(cudaGetDeviceProperties(&d, device), "asking the GPU what it is");
  const std::string gpu = "GPU " + std::to_string(device) + " (" + d.name + ")";
  const auto refuse = [&](const std::string& text) { throw Failure(MK_ERR_DEVICE, gpu + " " + text); };
  if (10 * d.major + d.minor != model::compute_capability)
    refuse("has compute capability " + std::to_string(d.major) + "." + std::to_string(d.minor) +
           ", this kernel is for " + std::to_string(model::compute_capability / 10) + "." +
           std::to_string(model::compute_capability % 10) + " only");
  if (d.multiProcessorCount < blocks)
    refuse("shows this process " + std::to_string(d.multiProcessorCount) + " SMs, and the kernel needs " +
           std::to_string(blocks) + (ranks > 1 ? " for " + std::to_string(ranks) + " ranks" : "") +
           ", one for each of its blocks; a MIG slice and an MPS limit (CUDA_MPS_ACTIVE_THREAD_PERCENTAGE) show fewer "
           "than the "
           "GPU has");
  if (!d.cooperativeLaunch) refuse("does not offer cooperative launches, which keep all blocks resident together");
  constexpr size_t kShared = kFast ? std::max(sizeof(StepShared), sizeof(DecodeShared)) : sizeof(StepShared);
  if (d.sharedMemPerBlockOptin < kShared)
    refuse("gives a block " + std::to_string(d.sharedMemPerBlockOptin) + " bytes of shared memory, the kernel needs " +
           std::to_string(kShared));
  const auto admit = [&](auto kernel, size_t shared) {
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared),
          "giving the kernel its shared memory");
    int resident = 0;
    check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, kernel, kThreads, shared),
          "asking how many blocks an SM holds");
    if (resident * d.multiProcessorCount < blocks)
      refuse("holds " + std::to_string(resident * d.multiProcessorCount) + " blocks of the kernel at a time, and all " +
             std::to_string(blocks) + " must be resident");
  };
  admit(step_kernel<1, false>, sizeof(StepShared));
  admit(step_kernel<1, true>, sizeof(StepShared));
  admit(step_kernel<2, false>, sizeof(StepShared));
  admit(step_kernel<2, true>, sizeof(StepShared));
  if constexpr (kFast) {
    admit(decode_kernel<kTraced, false>, sizeof(DecodeShared));
    admit(decode_kernel<kTraced, true>, sizeof(DecodeShared));
  }
  size_t free = 0, total = 0;
  check(cudaMemGetInfo(&free, &total), "asking how much GPU memory is free");
  if (free < bytes)
    throw Failure(MK_ERR_MEMORY, gpu + " has " + gigabytes(free) + " of " + gigabytes(total) +
                                     " free, the model needs " + gigabytes(bytes) + " (" + what +
                                     "); end other programs on the GPU, or build with a smaller limits.context");
}

// What the SM of a rank that reported was waiting for, by phase.
inline std::string describe(const Report& r, double wait_limit_s, int rank) {
  static const struct {
    const char *phase, *awaited;
  } texts[kPhasesOfAll] = {
      {"embedding", "the other SMs"},
      {"qkv", "the hidden state of the layer before, or its weights"},
      {"attention", "q, k and v of its heads"},
      {"combine", "the attention of the other KV splits"},
      {"output projection", "the attention of all heads, or its weights"},
      {"router", "the hidden state after attention"},
      {"choice of experts", "the router's logits"},
      {"gate/up", "the choice of experts, or their weights"},
      {"down", "the SwiGLU outputs of all experts, or its weights"},
      {"head", "the hidden state of the last layer, or its weights"},
      {"token", "the best token of every SM"},
      {"residual after attention", "the output projections of the other SMs"},
      {"projection to the experts' width", "the hidden state after attention, or its weights"},
      {"norm of the experts' outputs", "the down projections of the other SMs"},
      {"projection from the experts' width", "the outputs of all experts, or its weights"},
      {"dense gate/up", "the hidden state after attention, or its weights"},
      {"dense down", "the SwiGLU outputs, or its weights"},
      {"residual after the MLP", "the MLP's outputs of the other SMs"},
  };
  const auto& t = texts[r.phase < kPhases ? r.phase : 0];
  char seconds[32];
  snprintf(seconds, sizeof seconds, "%g", wait_limit_s);
  std::string text = std::string("a wait of ") + seconds + " s ended: SM " + std::to_string(r.sm) +
                     (kRanks > 1 ? " of rank " + std::to_string(rank) : "") + " made no progress in phase " + t.phase;
  // Epochs count layers from 1 on; the head and the token run under the number of the layer that would follow.
  if (r.phase != kPhaseHead && r.phase != kPhaseToken && r.epoch) text += " of layer " + std::to_string((r.epoch - 1) % kLayers);
  const std::string awaited = r.peer ? "what rank " + std::to_string(r.peer - 1) + " computes" : t.awaited;
  return text + ", waiting for " + awaited + "; another program may be using the GPU; load the model again";
}

}  // namespace mk
