// Compiled for the emulated machine: what the step kernel chooses, given router products. On standard input a layer's vectors
// [kNormLayer], then again and again products [kMaxTokens][kExperts]; of each the chosen experts, int16, and their weights,
// float32, [kMaxTokens][kTopK].
#include "cuda/step_router.cuh"

#include <cstdio>
#include <cstdlib>
#include <vector>

using namespace mk;

namespace {

constexpr int kPairs = kMaxTokens * kTopK;

__global__ void route(StepParams p, const float* products, int16_t* experts, float* weights) {
  MK_DYNAMIC_SHARED(raw);
  StepShared& s = *(StepShared*)raw;
  const int tid = (int)threadIdx.x - kProducers;
  if (tid < 0) return;
  StepBlock b{p, s, tid / 32, tid, 0};
  if (tid == 0) s.layer = 0, s.tokens = kMaxTokens;
  team_sync<kTeam>();
  for (int i = tid; i < kMaxTokens * kExperts; i += kTeam)
    p.router_logits[i] = kPlainLogits ? products[i] : router_score(b, i % kExperts, products[i]);
  team_sync<kTeam>();
  choose_for_token(b);
  team_sync<kTeam>();
  for (int i = tid; i < kPairs; i += kTeam) experts[i] = s.pair_expert[i], weights[i] = s.pair_weight[i];
}

template <class T>
T* device(size_t n) {
  T* p;
  if (cudaMalloc(&p, n * sizeof(T)) != cudaSuccess) exit(2);
  return p;
}

}  // namespace

int main() {
  std::vector<float> vectors(kNormLayer), products(kMaxTokens * kExperts), weights(kPairs);
  std::vector<int16_t> experts(kPairs);
  if (fread(vectors.data(), sizeof(float), vectors.size(), stdin) != vectors.size()) return 2;
  float *norms = device<float>(vectors.size()), *given = device<float>(products.size()), *out = device<float>(kPairs);
  int16_t* chosen = device<int16_t>(kPairs);
  cudaMemcpy(norms, vectors.data(), vectors.size() * sizeof(float), cudaMemcpyHostToDevice);
  StepParams p{};
  p.norms = norms;
  p.router_logits = device<float>(products.size());
  void* args[] = {&p, &given, &chosen, &out};
  cudaFuncSetAttribute(route, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(StepShared));
  while (fread(products.data(), sizeof(float), products.size(), stdin) == products.size()) {
    cudaMemcpy(given, products.data(), products.size() * sizeof(float), cudaMemcpyHostToDevice);
    if (cudaLaunchCooperativeKernel(route, 1, kThreads, args, sizeof(StepShared), nullptr) != cudaSuccess) return 3;
    cudaMemcpy(experts.data(), chosen, kPairs * sizeof(int16_t), cudaMemcpyDeviceToHost);
    cudaMemcpy(weights.data(), out, kPairs * sizeof(float), cudaMemcpyDeviceToHost);
    fwrite(experts.data(), sizeof(int16_t), kPairs, stdout);
    fwrite(weights.data(), sizeof(float), kPairs, stdout);
  }
}
