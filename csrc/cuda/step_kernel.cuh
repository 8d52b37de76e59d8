// One cooperative launch of the step kernel: given tokens up to 16 a step, then chosen ones until something ends it.
#pragma once
#include "step_attention.cuh"
#include "step_experts.cuh"
#include "step_head.cuh"

namespace mk {

// How a phase gets what a thread knows: of itself, and of the ring that it takes pages from. It is asked for anew in
// every phase, and pages are counted in shared memory: kept through all phases it would take registers that some need.
struct Phases {
  const StepParams& p;
  StepShared& s;
  uint32_t zero;

  template <class Phase>
  __device__ __forceinline__ void with(uint64_t* full, uint64_t* empty, uint32_t& pages, Phase&& phase) {
    StepBlock b = consumer(p, s, zero);
    StepRing ring{smem_address(full), smem_address(empty), pages};
    phase(b, ring);
    if (b.tid == 0) pages = ring.n;
    team_sync<kTeam>();
  }
  template <class Phase>
  __device__ __forceinline__ void with_dense(Phase&& phase) {
    with(s.dense_full, s.dense_empty, s.dense_pages, phase);
  }
  template <class Phase>
  __device__ __forceinline__ void with_expert(Phase&& phase) {
    with(s.expert_full, s.expert_empty, s.expert_pages, phase);
  }
  template <class Phase>
  __device__ __forceinline__ void without(Phase&& phase) {
    StepBlock b = consumer(p, s, zero);
    phase(b);
  }
};

// All layers of a step, and its logits.
template <int kTiles>
__device__ __forceinline__ void run_layers(const StepParams& p, StepShared& s, uint32_t zero) {
  Phases phases{p, s, zero};
#pragma unroll 1
  do {
    phases.with_dense([](StepBlock& b, StepRing& ring) { step_qkv<kTiles>(b, ring); });
    phases.with_expert([](StepBlock& b, StepRing& ring) { step_attention(b, ring); });
    phases.without([](StepBlock& b) { step_combine(b); });
    phases.with_dense([](StepBlock& b, StepRing& ring) { step_out<kTiles>(b, ring); });
    if constexpr (kHasDense)
      if (is_dense(s.layer)) {
        phases.with_dense([](StepBlock& b, StepRing& ring) { step_mlp_pair<kTiles>(b, ring); });
        phases.with_dense([](StepBlock& b, StepRing& ring) { step_mlp_down<kTiles>(b, ring); });
        continue;
      }
    if constexpr (kNarrow) phases.with_dense([](StepBlock& b, StepRing& ring) { step_pre_proj<kTiles>(b, ring); });
    phases.without([](StepBlock& b) { step_router(b); });
    phases.without([](StepBlock& b) { step_choose(b); });
    phases.with_expert([](StepBlock& b, StepRing& ring) {
      step_pair(b, ring);
      step_down(b, ring);
    });
    if constexpr (kNarrow) {
      phases.without([](StepBlock& b) { step_mix(b); });
      phases.with_dense([](StepBlock& b, StepRing& ring) { step_post_proj<kTiles>(b, ring); });
    }
  } while (s.layer < kLayers);
  if (step_at(p, s.step).head) phases.with_dense([](StepBlock& b, StepRing& ring) { step_head<kTiles>(b, ring); });
}

// Everything of a step up to its logits.
template <int kTiles>
__device__ __forceinline__ void run_step(const StepParams& p, StepShared& s, uint32_t zero) {
  StepBlock b = consumer(p, s, zero);
  if (b.tid == 0) {
    const Step step = step_at(p, s.step);
    s.layer = 0;
    s.position = p.position + step.first;
    s.tokens = step.tokens;
    s.first = p.new_tokens ? 0 : step.first;
  }
  team_sync<kTeam>();
  step_embed(b, s.step < given_steps(p) ? p.history + b.position() : &s.token);
  run_layers<kTiles>(p, s, zero);
}

// The ranks of a device are one launch, so that all of them are resident: the blocks of one after those of the other.
struct DeviceParams {
  StepParams ranks[kPerDevice];
};
using LaunchParams = std::conditional_t<kPerDevice == 1, StepParams, DeviceParams>;
template <class Launch>
__device__ __forceinline__ const StepParams& own_params(const Launch& launch) {
  if constexpr (kPerDevice == 1)
    return launch;
  else
    return launch.ranks[blockIdx.x / kGrid];
}
template <class Params, class Shared>
__device__ __forceinline__ void begin_ranks(const Params& p, Shared& s) {
  if constexpr (kRanks > 1) s.ranks.awaited = 0, s.ranks.exchanges = p.exchanges;
}

// kTiles: groups of eight tokens that a step may have, 1 or 2. kDrawn: tokens may be drawn.
template <int kTiles, bool kDrawn>
__global__ void __launch_bounds__(kThreads, 1) step_kernel(__grid_constant__ const LaunchParams launch, uint32_t zero) {
  const StepParams& p = own_params(launch);
  MK_DYNAMIC_SHARED(raw);
  StepShared& s = *(StepShared*)raw;
  const int tid = threadIdx.x, warp = __shfl_sync(~0u, tid / 32, 0);
  if (tid == 0) {
    for (int i = 0; i < kStepSlots; i++) {
      mbarrier_init(smem_address(&s.dense_full[i]), 1);
      mbarrier_init(smem_address(&s.dense_empty[i]), kWarps * kReleaseLanes);
      mbarrier_init(smem_address(&s.expert_full[i]), 1);
      mbarrier_init(smem_address(&s.expert_empty[i]), kWarps * kReleaseLanes);
    }
#ifdef MK_RACECHECK
    static_assert(kPairGroups == kSquads, "in this build a named barrier always meets as many threads");
#endif
    named_barrier_init(1, kTeam);
    named_barrier_init(2, kChosenThreads);
    named_barrier_init(3, kListThreads);
    for (int i = 0; i < kSquads; i++) named_barrier_init(kSquadBarrier + i, kTeam / kSquads);
    mbarrier_init_fence();
    s.quit = s.expired = s.ended = s.step = 0;
    s.dense_pages = s.expert_pages = s.expert_issued = 0;
    s.progress = 0;
    s.epoch = p.first_epoch + 1;
    s.arrivals = p.barrier_base;
    begin_ranks(p, s);
  }
  __syncthreads();
  if (tid < kProducers) {
    StepBlock b{p, s, warp, tid, zero};
    registers_decrease<64>();
    if (warp == 0 && b.lane() == 0) step_produce_dense<kTiles>(b);
    if (warp > 0 && warp <= kExpertWarps) step_produce_experts(b, warp - 1);
    if (warp == kExpertWarps + 1) ahead_of_experts(b);
    return;
  }
  registers_increase<104>();
  do {
    run_step<kTiles>(p, s, zero);
    if (p.new_tokens && s.step + 1 >= given_steps(p)) {
      choose_token<kDrawn>(p, s);
      announce_token(p, s);
    }
    team_sync<kTeam>();
    if (consumer_index() == 0) s.ended |= ++s.step >= step_count(p);
    team_sync<kTeam>();
  } while (!s.ended);
  if (consumer_index() == 0) store_unordered(s.quit, s.step);
  barrier_sync<2, kChosenThreads>();  // lets the expert warps see it
}

}  // namespace mk
