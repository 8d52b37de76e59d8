// The resident kernel: one cooperative launch, one block an SM, all layers of all steps.
#pragma once
#include "phase_attention.cuh"
#include "phase_experts.cuh"
#include "phase_head.cuh"
#include "phase_out.cuh"
#include "phase_qkv.cuh"
#include "producer.cuh"

namespace mk {

// First a warpgroup: one warp streams dense weights, one streams experts, one watches the time, one adds router logits
// up. The scheduler prefers older warps, and these must not starve behind consumers that spin on a barrier. Then 16
// consumer warps. The first four warps exist as a whole because registers move between roles by warpgroups: 640 x 96 at
// launch, then 512 x 104 + 128 x 64 out of the same 61440 (asking for more than the launch took would never return).
constexpr int kProducers = 128, kThreads = kProducers + kTeam;

template <bool kDebug>
__global__ void __launch_bounds__(kThreads, 1) decode_kernel(__grid_constant__ const Params p, uint32_t zero) {
  MK_DYNAMIC_SHARED(raw);
  Shared& s = *(Shared*)raw;
  const int sm = blockIdx.x, tid = threadIdx.x, warp = __shfl_sync(~0u, tid / 32, 0);
  if (tid == 0) {
    for (int i = 0; i < kDenseSlots; i++) {
      mbarrier_init(smem_address(&s.dense_full[i]), 1);
      mbarrier_init(smem_address(&s.dense_empty[i]), kWarps);
    }
    for (int i = 0; i < kExpertSlots; i++) {
      mbarrier_init(smem_address(&s.expert_full[i]), 1);
      mbarrier_init(smem_address(&s.expert_empty[i]), kWarps);
    }
    mbarrier_init_fence();
    s.quit = s.expired = 0;
    s.progress = 0;
    s.token = p.tokens[0];
  }
  __syncthreads();
  Block b{p, s, sm, warp - kProducers / 32, tid % 32, tid - kProducers, zero, p.first_epoch + 1, 0, p.position, false};
  if (tid < kProducers) {
    registers_decrease<64>();
    if (warp == 0 && b.lane == 0) produce_dense(p, s, sm, attention_unit(p, sm));
    if (warp == 1) produce_experts<kDebug>(b);
    if (warp == 2 && b.lane == 0) watch(p, s, sm);
    if (warp == 3) sum_logits<kDebug>(b);
  } else {
    registers_increase<104>();
    DenseRing dense{smem_address(s.dense_full), smem_address(s.dense_empty)};
    ExpertRing expert{smem_address(s.expert_full), smem_address(s.expert_empty)};
    for (int step = 0;; step++, b.position++) {
      b.traced = step + 1 == p.steps;
      for (b.layer = 0; b.layer < kLayers; b.layer++, b.epoch++) {
        forget(b.lane, b.tid);  // or addresses of all phases would be computed ahead and spilled
        uint4 x[4];
        Attention attention{attention_unit(p, sm)};
        phase_qkv<kDebug>(b, dense, attention);
        phase_attention<kDebug>(b, attention);
        phase_combine<kDebug>(b, attention.unit);
        phase_out<kDebug>(b, dense);
        phase_router<kDebug>(b, x);
        phase_pair<kDebug>(b, expert, x);
        phase_down<kDebug>(b, expert);
      }
      phase_head<kDebug>(b, dense);
      if (!phase_token<kDebug>(b, step)) break;
    }
    if (sm < kExperts) router_arrive<kTeam + 32>();  // lets the adding warp see that the consumers leave
  }
}

}  // namespace mk
