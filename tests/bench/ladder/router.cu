// The router of a layer for 1 to 16 tokens: every expert's logit on one SM, the logits to all SMs in {value, epoch} words,
// the choice of the largest on every SM. Inputs are there from the beginning; layer follows layer. Bound: the routers'
// bytes at the read bandwidth, which is far below the price of an exchange (exchange.cu).
//   python tests/bench/ladder/run.py router
#include "bench.cuh"

using namespace bench;

constexpr int kTexts = 8;  // copies of the words, each polled by a share of the SMs
constexpr int kWords = kMaxTokens * kExperts;
// Every SM has an expert: one without might still read words of the last layer but one when they are written again.
constexpr int kBlocks = kGrid < kExperts ? kGrid : kExperts;
constexpr int kColumns = ceil_div(kHidden / 4, kWarps) * 4;  // of a warp

struct Shared {
  float dot[kMaxTokens][kWarps];
};

// x: float32 [kMaxTokens][kHidden]; chosen: [layer][token][kTopK] expert, weight
__global__ void __launch_bounds__(kTeam, 1)
    route(const uint16_t* routers, int layers, const float* x, int tokens, uint32_t first_epoch, uint64_t* words,
          float2* chosen) {
  MK_DYNAMIC_SHARED(raw);
  Shared& s = *(Shared*)raw;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int begin = warp * kColumns, end = min(kHidden, begin + kColumns);
#pragma unroll 1
  for (int layer = 0; layer < layers; layer++) {
    const uint32_t epoch = first_epoch + layer;
    uint64_t* mine = words + (epoch & 1) * kTexts * kWords;
#pragma unroll 1
    for (int expert = blockIdx.x; expert < kExperts; expert += gridDim.x) {
      const uint16_t* w = routers + ((int64_t)layer * kExperts + expert) * kHidden;
#pragma unroll 1
      for (int token0 = 0; token0 < tokens; token0 += 4) {
        float sums[4] = {};
#pragma unroll 1
        for (int column = begin + 4 * lane; column < end; column += 128) {
          const uint2 bits = __ldg((const uint2*)(w + column));
          const float4 v = make_float4(bf16_low(bits.x), bf16_high(bits.x), bf16_low(bits.y), bf16_high(bits.y));
#pragma unroll
          for (int i = 0; i < 4; i++) {
            const float4 y = __ldcg((const float4*)(x + min(token0 + i, tokens - 1) * kHidden + column));
            sums[i] += (v.x * y.x + v.y * y.y) + (v.z * y.z + v.w * y.w);
          }
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
          const float sum = warp_sum(sums[i]);
          if (lane == 0 && token0 + i < tokens) s.dot[token0 + i][warp] = sum;
        }
      }
      __syncthreads();
      if ((int)threadIdx.x < tokens * kTexts) {
        const int token = (int)threadIdx.x / kTexts;
        float sum = 0;
        for (int i = 0; i < kWarps; i++) sum += s.dot[token][i];
        store_relaxed(mine + threadIdx.x % kTexts * kWords + token * kExperts + expert,
                      (uint64_t)__float_as_uint(sum) | (uint64_t)epoch << 32);
      }
      __syncthreads();
    }
    if (warp < tokens) {
      const uint64_t* src = mine + blockIdx.x % kTexts * kWords + warp * kExperts;
      constexpr int kPerLane = ceil_div(kExperts, 32);
      uint32_t key[kPerLane];
#pragma unroll
      for (int i = 0; i < kPerLane; i++) {
        const int e = lane + 32 * i;
        uint64_t word;
        do word = load_relaxed(src + min(e, kExperts - 1));
        while (!__all_sync(~0u, word >> 32 == epoch));
        key[i] = e < kExperts ? order_key((uint32_t)word) : 0;
      }
      float logit = 0;
      int expert = 0;
#pragma unroll 1
      for (int k = 0; k < kTopK; k++) {
        uint32_t best = 0;
#pragma unroll
        for (int i = 0; i < kPerLane; i++) best = max(best, key[i]);
        best = __reduce_max_sync(~0u, best);
        uint32_t at = kExperts;
#pragma unroll
        for (int i = kPerLane - 1; i >= 0; i--)
          if (key[i] == best) at = lane + 32 * i;
        at = __reduce_min_sync(~0u, at);
#pragma unroll
        for (int i = 0; i < kPerLane; i++)
          if (at == (uint32_t)(lane + 32 * i)) key[i] = 0;
        if (lane == k) logit = key_value(best), expert = (int)at;
      }
      const float first = __shfl_sync(~0u, logit, 0), weight = lane < kTopK ? __expf(logit - first) : 0.f;
      const float all = warp_sum(weight);
      if (blockIdx.x == gridDim.x - 1 && lane < kTopK)
        chosen[((int64_t)layer * tokens + warp) * kTopK + lane] = make_float2(__int_as_float(expert), weight / all);
    }
    __syncthreads();
  }
}

bool is_right(const std::vector<uint16_t>& w, const std::vector<float>& x, int layer, int tokens,
              const std::vector<float2>& chosen) {
  bool right = true;
  for (int token = 0; token < tokens; token++) {
    std::vector<std::pair<double, int>> logits(kExperts);
    for (int e = 0; e < kExperts; e++) {
      double dot = 0;
      for (int i = 0; i < kHidden; i++) dot += (double)from_bf16(w[(int64_t)e * kHidden + i]) * x[token * kHidden + i];
      logits[e] = {-dot, e};
    }
    std::sort(logits.begin(), logits.end());
    double all = 0;
    for (int k = 0; k < kTopK; k++) all += exp(logits[0].first - logits[k].first);
    for (int k = 0; k < kTopK; k++) {
      const float2 got = chosen[((int64_t)layer * tokens + token) * kTopK + k];
      int32_t expert;
      memcpy(&expert, &got.x, 4);
      const double weight = exp(logits[0].first - logits[k].first) / all;
      // Two experts may change places where float32 cannot tell them apart.
      const double apart = expert >= 0 && expert < kExperts ? fabs(got.y / weight - 1) : INFINITY;
      bool there = expert == logits[k].second;
      for (int n = 0; n < kExperts && !there; n++)
        there = logits[n].second == expert && fabs(logits[n].first - logits[k].first) < 1e-4;
      right = right && there && apart < 1e-3;
    }
  }
  return right;
}

int main(int argc, char** argv) {
  const int layers = (int)std::min<int64_t>(kLayers, megabytes(argc, argv, kLayers));
  Array<uint16_t> routers((int64_t)layers * kExperts * kHidden);
  launch(fill_bf16, 8 * kGrid, 256, 0, false, routers.data, routers.size, uint64_t{4}, 3.f / sqrtf(kHidden));
  Array<float> x(kMaxTokens * kHidden);
  std::vector<float> host(x.size);
  for (int64_t i = 0; i < x.size; i++) host[i] = uniform(9000000 + i);
  x.put(host);
  Array<uint64_t> words(2 * kTexts * kWords);
  CHECK(cudaMemset(words.data, 0, words.size * 8));
  allow_shared(route, sizeof(Shared));
  // The routers lie in L2 after the first pass: the bandwidth is that of memory, measured on something larger.
  Array<uint8_t> large(std::max<int64_t>(megabytes(argc, argv, 1024), 4) << 20);
  launch(fill_words, 8 * kGrid, 256, 0, false, (uint32_t*)large.data, large.size / 4, uint64_t{5});
  const double bound = (double)kExperts * kHidden * 2 / read_bandwidth(large.data, large.size);
  uint32_t epoch = 1;
  for (int tokens : {1, 2, 4, 8, 16}) {
    Array<float2> chosen((int64_t)layers * tokens * kTopK);
    const double t = seconds([&] {
      launch(route, kBlocks, kTeam, sizeof(Shared), true, routers.data, layers, x.data, tokens, epoch, words.data,
             chosen.data);
      epoch += layers;
    });
    const auto found = chosen.get(0, chosen.size);
    for (int layer : {0, layers - 1})
      expect(is_right(routers.get((int64_t)layer * kExperts * kHidden, kExperts * kHidden), host, layer, tokens, found),
             "chosen experts and their weights");
    char what[80];
    snprintf(what, sizeof what, "%d experts, top %d, T = %d", kExperts, kTopK, tokens);
    row("router", what, t / layers * 1e6, bound * 1e6, "us", true);
  }
  return finish();
}
