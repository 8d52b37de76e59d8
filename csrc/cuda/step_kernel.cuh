// One cooperative launch of the step kernel: given tokens up to 16 a step, then chosen ones until something ends it.
#pragma once
#include "step_attention.cuh"
#include "step_experts.cuh"
#include "step_head.cuh"

namespace mk {

// First a warpgroup, of which two warps work: one streams dense weights and watches the time, one streams experts. The
// scheduler prefers older warps, and these must not starve behind consumers that spin on a barrier. Then 16 consumer warps.
// The first four exist as a whole because registers move between the two kinds by warpgroups: 640 x 96 at launch, then
// 512 x 104 + 128 x 64 out of the same 61440 (asking for more than the launch took would never return).
constexpr int kProducers = 128, kThreads = kProducers + kTeam;

// kTiles: groups of eight tokens that a step may have, 1 or 2.
template <int kTiles>
__global__ void __launch_bounds__(kThreads, 1) step_kernel(__grid_constant__ const StepParams p, uint32_t zero) {
  MK_DYNAMIC_SHARED(raw);
  StepShared& s = *(StepShared*)raw;
  const int tid = threadIdx.x, warp = __shfl_sync(~0u, tid / 32, 0);
  if (tid == 0) {
    for (int i = 0; i < kStepSlots; i++) {
      mbarrier_init(smem_address(&s.dense_full[i]), 1);
      mbarrier_init(smem_address(&s.dense_empty[i]), kWarps);
      mbarrier_init(smem_address(&s.expert_full[i]), 1);
      mbarrier_init(smem_address(&s.expert_empty[i]), kWarps);
    }
    mbarrier_init_fence();
    s.quit = s.expired = s.ended = 0;
    s.progress = 0;
    s.epoch = p.first_epoch + 1;
    s.arrivals = p.barrier_base;
  }
  __syncthreads();
  StepBlock b{p, s, warp - kProducers / 32, tid - kProducers, zero};
  if (tid < kProducers) {
    registers_decrease<64>();
    if (warp == 0 && b.lane() == 0) step_produce_dense<kTiles>(b);
    if (warp == 1) step_produce_experts(b);
    return;
  }
  registers_increase<104>();
  StepRing dense{smem_address(s.dense_full), smem_address(s.dense_empty)};
  StepRing expert{smem_address(s.expert_full), smem_address(s.expert_empty)};
#pragma unroll 1
  for (int i = 0; i < step_count(p); i++) {
    const int chunks = ceil_div(p.given, kStepTokens);
    if (b.tid == 0) {
      const Step step = step_at(p, i);
      s.layer = 0;
      s.position = p.position + step.first;
      s.tokens = step.tokens;
      s.first = p.new_tokens ? 0 : step.first;
    }
    team_sync<kTeam>();
    step_embed(b, i < chunks ? p.history + b.position() : &s.token);
#pragma unroll 1
    for (int layer = 0; layer < kLayers; layer++) {
      step_qkv<kTiles>(b, dense);
      step_attention(b);
      step_combine(b);
      step_out<kTiles>(b, dense);
      step_router(b);
      step_choose(b);
      step_pair(b, expert);
      step_down(b, expert);
    }
    if (step_at(p, i).head) step_head<kTiles>(b, dense);
    if (p.new_tokens && i + 1 >= chunks) {
      step_token(b, i + 1 - chunks);
      if (s.ended) break;
    }
  }
  if (b.tid == 0) *(volatile int32_t*)&s.quit = 1;
  barrier_sync<2, kChosenThreads>();  // lets the expert warp see it
}

}  // namespace mk
