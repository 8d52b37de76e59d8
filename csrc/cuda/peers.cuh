// Several ranks in one process, as the host sets them up: who may write where, and their parts of a launch's parameters.
// Templates, because the parameters of one rank have no room for others.
#pragma once
#include <string>
#include <vector>
#include "device.cuh"

namespace mk {

// Lets the first `devices` devices write to each other's memory.
inline void allow_peers(int devices) {
  for (int a = 0; a < devices; a++) {
    check(cudaSetDevice(a), "turning to a GPU");
    for (int b = 0; b < devices; b++) {
      if (a == b) continue;
      int can = 0;
      check(cudaDeviceCanAccessPeer(&can, a, b), "asking which GPUs reach each other's memory");
      if (!can)
        throw Failure(MK_ERR_DEVICE, "GPU " + std::to_string(a) + " cannot reach the memory of GPU " + std::to_string(b) +
                                         ", which ranks on them would write to; choose others (CUDA_VISIBLE_DEVICES)");
      const cudaError_t enabled = cudaDeviceEnablePeerAccess(b, 0);
      if (enabled == cudaErrorPeerAccessAlreadyEnabled)
        cudaGetLastError();
      else
        check(enabled, "opening a GPU's memory to another");
    }
  }
  check(cudaSetDevice(0), "turning to the first GPU");
}

// Tells every rank where the others' memory is.
template <class Rank>
void connect(const std::vector<Rank*>& ranks) {
  if constexpr (kRanks > 1)
    for (int r = 0; r < kRanks; r++) {
      auto& p = ranks[r]->params;
      p.peers.rank = r;
      for (int k = 0; k < kRanks; k++) {
        uint8_t* work = ranks[k]->work.get();
        p.peers.words[k] = (uint32_t*)(work + ranks[k]->places.receive);
        p.peers.sent[k] = (uint32_t*)(work + ranks[k]->places.sent);
        p.reports[k] = ranks[k]->params.report;
      }
    }
}

// Makes a rank its own peers: it acts as rank 0, whatever its weights are, since only that one speaks with the host.
template <class Rank>
void loop_back(Rank& rank) {
  if constexpr (kRanks > 1) {
    auto& p = rank.params;
    p.peers.rank = 0;
    p.peers.loop = kLooped;
    p.peers.counts = (uint32_t*)(rank.work.get() + rank.places.loop_counts);
    for (int k = 0; k < kRanks; k++) {
      p.peers.words[k] = (uint32_t*)(rank.work.get() + rank.places.receive);
      p.peers.sent[k] = (uint32_t*)(rank.work.get() + rank.places.sent) + k;  // what this one adds to is what that one would
      p.reports[k] = p.report;
    }
  }
}
template <class Params>
void set_loop(Params& p, Loop loop) {
  if constexpr (kRanks > 1) p.peers.loop = loop;
}

template <class Params>
void count_exchanges(Params& p, uint32_t exchanges) {
  if constexpr (kRanks > 1) p.exchanges = exchanges;
}
// Parameters of the i-th rank of a launch.
template <class Launch>
StepParams& params_in(Launch& launch, size_t i) {
  if constexpr (kPerDevice == 1)
    return launch;
  else
    return launch.ranks[i];
}

}  // namespace mk
