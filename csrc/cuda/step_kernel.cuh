// One cooperative launch of the step kernel: given tokens up to 16 a step, then chosen ones until something ends it.
#pragma once
#include "step_attention.cuh"
#include "step_experts.cuh"
#include "step_head.cuh"

namespace mk {

// First a warpgroup: one warp streams dense weights, one streams experts, one watches the time, one idles. Then 16 consumer
// warps. Registers move between the two kinds by warpgroups: 640 x 96 at launch, then 512 x 104 + 128 x 64.
constexpr int kProducers = 128, kThreads = kProducers + kTeam;

// KV splits of a step: as many as the longest context in it is worth.
__device__ __forceinline__ int step_splits(const StepParams& p, int length) {
  return max(1, min(kMaxSplits, ceil_div(ceil_div(length, kTile), p.tiles_per_split)));
}

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
  }
  __syncthreads();
  StepBlock b{p, s, (int)blockIdx.x, warp - kProducers / 32, tid % 32, tid - kProducers, zero, p.first_epoch + 1,
              p.barrier_base, 0, p.position, 0, 0, false};
  if (tid < kProducers) {
    registers_decrease<64>();
    if (warp == 0 && b.lane == 0) step_produce_dense<kTiles>(b);
    if (warp == 1) step_produce_experts(b);
    if (warp == 2 && b.lane == 0) watch(p.wait_limit_ns, p.report, s.progress, s.quit, s.expired, b.sm);
    return;
  }
  registers_increase<104>();
  StepRing dense{smem_address(s.dense_full), smem_address(s.dense_empty)};
  StepRing expert{smem_address(s.expert_full), smem_address(s.expert_empty)};
  const int steps = step_count(p), chunks = ceil_div(p.given, kStepTokens);
#pragma unroll 1
  for (int i = 0; i < steps; i++) {
    const Step step = step_at(p, i);
    b.position = p.position + step.first;
    b.tokens = step.tokens;
    b.first = p.new_tokens ? 0 : step.first;
    b.traced = true;
    b.layer = 0;
    step_embed(b, i < chunks ? p.history + b.position : &s.token);
    const int splits = step_splits(p, b.position + b.tokens);
#pragma unroll 1
    for (b.layer = 0; b.layer < kLayers; b.layer++, b.epoch++) {
      step_qkv<kTiles>(b, dense);
      step_attention(b, splits);
      step_combine(b, splits);
      step_out<kTiles>(b, dense);
      step_router(b);
      step_choose(b);
      step_pair(b, expert);
      step_down(b, expert);
    }
    if (step.head) step_head<kTiles>(b, dense);
    if (p.new_tokens && i + 1 >= chunks) {
      step_token(b, i + 1 - chunks);
      if (s.ended) break;
    }
  }
  if (b.tid == 0) *(volatile int32_t*)&s.quit = 1;
  barrier_sync<2, kChosenThreads>();  // lets the expert warp see it
}

}  // namespace mk
