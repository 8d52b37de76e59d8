// One cooperative launch of decode_kernel: one token a step, from a token that was chosen before to one that ends it.
#pragma once
#include "decode_attention.cuh"
#include "decode_experts.cuh"
#include "decode_head.cuh"
#include "decode_producer.cuh"
#include "step_kernel.cuh"

namespace mk {

// Warps as in the step kernel, but all of the first four work: one streams dense weights, one streams experts, one watches
// the time, one adds router logits up. kDebug: records what it computes, and when. kSampled: draws tokens; the greedy kernel
// does without that code, which would move the rest about.
template <bool kDebug, bool kSampled>
__global__ void __launch_bounds__(kThreads, 1) decode_kernel(__grid_constant__ const DecodeParams p, uint32_t zero) {
  MK_DYNAMIC_SHARED(raw);
  DecodeShared& s = *(DecodeShared*)raw;
  const int sm = blockIdx.x, tid = threadIdx.x, warp = __shfl_sync(~0u, tid / 32, 0);
  if (tid == 0) {
    for (int i = 0; i < kDenseSlots; i++) {
      mbarrier_init(smem_address(&s.dense_full[i]), 1);
      mbarrier_init(smem_address(&s.dense_empty[i]), kWarps * kReleaseLanes);
    }
    for (int i = 0; i < kExpertSlots; i++) {
      mbarrier_init(smem_address(&s.expert_full[i]), 1);
      mbarrier_init(smem_address(&s.expert_empty[i]), kWarps * kReleaseLanes);
    }
    named_barrier_init(1, kTeam);
    named_barrier_init(2, kTeam + 32);
    named_barrier_init(3, kTeam + 32);
    mbarrier_init_fence();
    s.quit = s.expired = s.cancel = 0;
    s.progress = 0;
    s.token = p.history[p.position];
    for (uint32_t& zero : s.zeros) zero = 0;
  }
  __syncthreads();
  DecodeBlock b{p, s, sm, warp - kProducers / 32, tid % 32, tid - kProducers, zero, p.first_epoch + 1, 0, p.position, 0, 0};
  if (tid < kProducers) {
    registers_decrease<64>();
    if (warp == 0 && b.lane == 0) decode_produce_dense(p, s, sm);
    if (warp == 1) decode_produce_experts<kDebug>(b);
    if (warp == 2 && b.lane == 0) decode_watch(p, s, sm);
    if (warp == 3) sum_logits<kDebug>(b);
  } else {
    registers_increase<104>();
    DenseRing dense{smem_address(s.dense_full), smem_address(s.dense_empty)};
    ExpertRing expert{smem_address(s.expert_full), smem_address(s.expert_empty)};
    for (;; b.step++, b.position++) {
      b.log_splits = log_splits_at(p, b.position);
      const int unit = attention_unit(b.log_splits, sm);
      for (b.layer = 0; b.layer < kLayers; b.layer++, b.epoch++) {
        forget(b.lane, b.tid);  // or addresses of all phases would be computed ahead and spilled
        uint4 x[2 * kHiddenParts];
        Attention attention{unit};
        decode_qkv<kDebug>(b, dense, attention);
        decode_attention<kDebug>(b, attention);
        decode_combine<kDebug>(b, attention.unit);
        decode_out<kDebug>(b, dense);
        decode_router<kDebug>(b, x);
        decode_pair<kDebug>(b, expert, x);
        decode_down<kDebug>(b, expert);
      }
      decode_head<kDebug, kSampled>(b, dense);
      if (!decode_token<kDebug, kSampled>(b, b.step)) break;
    }
    if (sm < kExperts) router_arrive<kTeam + 32>();  // lets the adding warp see that the consumers leave
  }
}

}  // namespace mk
