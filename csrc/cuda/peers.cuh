// Several ranks, in one process or more, as the host sets them up: who may write where, and their parts of a launch's
// parameters.
// Templates, because the parameters of one rank have no room for others.
#pragma once
#include <cstring>
#include <memory>
#include <string>
#include <vector>
#include "device.cuh"

namespace mk {

// Which ranks are here.
struct Placement {
  int first, count;  // all of them, unless others are in other processes
  int device, per_device;
  bool alone() const { return count == kRanks; }
  bool speaks() const { return first == 0; }  // with whoever asked for tokens
};

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

// Tells `rank`, which is number `number`, where the memory of all is: of each its workspace, which has the same places in all.
template <class Rank>
void connect(Rank& rank, int number, const std::vector<uint8_t*>& works) {
  if constexpr (kRanks > 1) {
    auto& p = rank.params;
    p.peers.rank = number;
    for (int k = 0; k < kRanks; k++) {
      p.peers.words[k] = (uint32_t*)(works[k] + rank.places.receive);
      p.peers.sent[k] = (uint32_t*)(works[k] + rank.places.sent);
      p.reports[k] = (Report*)(works[k] + rank.places.report);
    }
  }
}

// What mk_addresses tells of a rank.
struct RankAddress {
  uint64_t kernel, bytes;  // what was compiled, and the size of the workspace: both the same in all processes
  int32_t rank, pad;
  cudaIpcMemHandle_t work;
};
static_assert(sizeof(RankAddress) <= MK_ADDRESS_BYTES);
// Allocations of whole units of this size are not parts of larger ones, all of which another process would see.
constexpr size_t kSharedUnit = 2 << 20;

// FNV-1a, to tell kernels apart by what describes them.
inline uint64_t kernel_number() {
  uint64_t h = 0xCBF29CE484222325u;
  for (const char* c = model::description; *c; c++) h = (h ^ (uint8_t)*c) * 0x100000001B3u;
  return h;
}

// A rank's workspace that belongs to another process, as long as this object lives.
class PeerMemory {
 public:
  PeerMemory(const uint8_t* address, int rank, size_t bytes) {
    const std::string name = "rank " + std::to_string(rank);
    RankAddress a;
    memcpy(&a, address, sizeof a);
    if (a.kernel != kernel_number() || a.bytes != bytes || a.rank != rank)
      throw Failure(MK_ERR_ARGUMENT, name + ": expected the address of this rank by the same kernel, found another; all "
                                            "ranks must load the same artifact");
    check(cudaIpcOpenMemHandle(&data_, a.work, cudaIpcMemLazyEnablePeerAccess),
          ("opening the GPU memory of " + name + ", whose GPU must be within reach of this one's").c_str());
  }
  ~PeerMemory() { cudaIpcCloseMemHandle(data_); }
  PeerMemory(const PeerMemory&) = delete;
  PeerMemory& operator=(const PeerMemory&) = delete;
  uint8_t* get() const { return (uint8_t*)data_; }

 private:
  void* data_ = nullptr;
};

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
