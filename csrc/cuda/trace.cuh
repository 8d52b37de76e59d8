// Time stamps of phases and of weight streams, for `mkpack trace`. model.h of a build with --trace defines MK_TRACE; in other
// builds nothing of this is left.
#pragma once
#include <cstdint>
#include "layout.cuh"
#include "ptx.cuh"

namespace mk {

enum Phase {
  kPhaseEmbed,
  kPhaseQkv,
  kPhaseAttention,
  kPhaseCombine,
  kPhaseOut,
  kPhaseRouter,
  kPhaseChoose,
  kPhasePair,
  kPhaseDown,
  kPhaseHead,
  kPhaseToken,
  // Of the models that have them.
  kPhaseAttentionResidual,
  kPhasePreProj,
  kPhaseMix,
  kPhasePostProj,
  kPhaseMlpPair,
  kPhaseMlpDown,
  kPhaseMlpResidual,
  kPhasesOfAll
};
// Of a model that has any of them, all are kept.
constexpr bool kMoreTraced = kSandwich || kNarrow || kHasDense;
constexpr int kPhases = kMoreTraced ? kPhasesOfAll : kPhaseToken + 1;

// What the producers stream: all but the cache and the experts by the dense one.
enum WeightStream { kStreamQkv, kStreamOut, kStreamHead, kStreamCache, kStreamExperts, kStreamMlp };
constexpr int kStreams = kMoreTraced ? kStreamMlp + 1 : kStreamMlp;

#ifdef MK_TRACE
constexpr bool kTraced = true;
#else
constexpr bool kTraced = false;
#endif

// Nanoseconds that one step leaves: of phases [kLayers + 1][kPhases][kGrid][4], of streams [kLayers + 1][kStreams][kGrid][2].
// The last layer stands for what follows the layers. Step i is kept in place i & trace_mask.
constexpr int64_t kTraceStep = (int64_t)(kLayers + 1) * kPhases * kGrid * 4;
constexpr int64_t kStreamStep = (int64_t)(kLayers + 1) * kStreams * kGrid * 2;

// Of the rank's blocks this one. Ranks that share a device are one launch.
__device__ __forceinline__ int rank_block() { return kPerDevice == 1 ? blockIdx.x : blockIdx.x % kGrid; }

// Where the phases of a step are kept, or NULL.
template <class P>
__device__ __forceinline__ int64_t* trace_of(const P& p, int step) {
  return p.trace ? p.trace + (step & p.trace_mask) * kTraceStep : nullptr;
}
// Moments of a phase: 0 entered, 1 input there (where the phase waits for it), 2 products done, 3 published.
__device__ __forceinline__ void stamp_phase(int64_t* trace, int layer, Phase phase, int moment) {
  if (trace) trace[((layer * kPhases + phase) * kGrid + rank_block()) * 4 + moment] = global_nanoseconds();
}
// Moments of a stream: 0 its first page may be issued, 1 its last was.
template <class P>
__device__ __forceinline__ void stamp_stream(const P& p, int step, int layer, WeightStream stream, int moment) {
  if constexpr (kTraced)
    if (p.streams)
      p.streams[(step & p.trace_mask) * kStreamStep + ((layer * kStreams + stream) * kGrid + rank_block()) * 2 +
                moment] = global_nanoseconds();
}

}  // namespace mk
