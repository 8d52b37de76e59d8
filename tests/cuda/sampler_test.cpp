// Compiled for the emulated machine: chooses tokens with csrc/cuda/sampler.cuh for every request that comes in on
// stdin, or with the argument `distances` compares its division. For the CPU: the CPU target's sampler as a library.
#ifdef MK_EMULATED
#include "cuda/sampler.cuh"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

using namespace mk;

namespace {

struct Request {
  int32_t vocab, length, position, steps;
  Sampling sampling;
};
static_assert(sizeof(Request) == 48);

// As in the resident kernel, other warps come first and have their own things to do. saved: the logits of every step.
template <int kVocab>
__global__ void sample_kernel(Request r, const float* saved, float* logits, const int32_t* history, int32_t* tokens) {
  MK_DYNAMIC_SHARED(raw);
  const int tid = (int)threadIdx.x - 128;
  if (tid < 0) return;
  SamplerScratch& scratch = *(SamplerScratch*)raw;
  for (int step = 0; step < r.steps; step++) {
    for (int i = tid; i < kVocab; i += kTeam) logits[i] = saved[i];
    team_sync<kTeam>();
    tokens[step * kTeam + tid] = sample<kVocab>(r.sampling, logits, history, r.length, r.position + step, tid, scratch);
    scratch.list[tid] = 0;  // may be used at once
    team_sync<kTeam>();
  }
}

void check(bool fine, const char* what) {
  if (fine) return;
  fprintf(stderr, "%s\n", what);
  exit(1);
}
template <class T>
T* device_copy(const std::vector<T>& values) {
  T* p;
  check(cudaMalloc(&p, values.size() * sizeof(T) + 16) == cudaSuccess, "cudaMalloc");
  cudaMemcpy(p, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice);
  return p;
}

// The tokens of all steps; -1 where threads disagree.
template <int kVocab>
std::vector<int32_t> run(Request r, const std::vector<float>& logits, const std::vector<int32_t>& history) {
  std::vector<int32_t> tokens((size_t)r.steps * kTeam, -1), chosen;
  const float* saved = device_copy(logits);
  float* changed = device_copy(logits);
  const int32_t* past = device_copy(history);
  int32_t* out = device_copy(tokens);
  void* args[] = {&r, &saved, &changed, &past, &out};
  auto kernel = sample_kernel<kVocab>;
  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(SamplerScratch));
  constexpr size_t shared = sizeof(SamplerScratch);
  check(cudaLaunchCooperativeKernel(kernel, 1, 128 + kTeam, args, shared, nullptr) == cudaSuccess, "launch");
  cudaMemcpy(tokens.data(), out, tokens.size() * sizeof(int32_t), cudaMemcpyDeviceToHost);
  for (void* p : {(void*)saved, (void*)changed, (void*)past, (void*)out}) cudaFree(p);
  for (int step = 0; step < r.steps; step++) {
    const int32_t* of = tokens.data() + (size_t)step * kTeam;
    chosen.push_back(of[0]);
    for (int i = 1; i < kTeam; i++)
      if (of[i] != of[0]) chosen.back() = -1;
  }
  return chosen;
}

// Distances against the division that they stand for, bit by bit, over every size of logits and temperatures.
int compare_distances() {
  uint64_t x = 1;
  auto random = [&] { return (x = x * 6364136223846793005ull + 1442695040888963407ull) >> 33; };
  auto value = [&](int from, int to) {  // of a size between two powers of two
    return std::ldexp(1.f + (float)(random() & 0x7FFFFF) * 0x1p-23f, from + (int)(random() % (uint64_t)(to - from)));
  };
  int wrong = 0;
  for (int i = 0; i < 1000000; i++) {
    const float top = (random() & 1 ? 1.f : -1.f) * value(-20, 12);
    const float logit = i % 50 == 0 ? top : top - value(i % 2 ? -30 : -4, i % 7 ? 8 : 100);
    const float temperature = i % 10 == 0 ? 1.f : value(i % 3 ? -4 : i % 2 ? -149 : -40, i % 3 ? 4 : 60);
    const float wanted = (logit - top) / temperature;
    const uint32_t found = Distances(top, temperature).of(logit), bits = __float_as_uint(wanted) & 0x7FFFFFFF;
    if (bits < kFar ? found == bits : found >= kFar) continue;
    if (wrong++ < 5) printf("(%a - %a) / %a: %08x, not %08x\n", logit, top, temperature, found, bits);
  }
  printf("%d wrong\n", wrong);
  return wrong != 0;
}

}  // namespace

int main(int count, char** arguments) {
  if (count > 1 && strcmp(arguments[1], "distances") == 0) return compare_distances();
  for (Request r; fread(&r, sizeof r, 1, stdin) == 1;) {
    std::vector<float> logits((size_t)r.vocab);
    std::vector<int32_t> history((size_t)r.length);
    check(fread(logits.data(), sizeof(float), logits.size(), stdin) == logits.size(), "logits");
    check(fread(history.data(), sizeof(int32_t), history.size(), stdin) == history.size(), "history");
    const auto tokens = r.vocab == 5       ? run<5>(r, logits, history)
                        : r.vocab == 257   ? run<257>(r, logits, history)
                        : r.vocab == 49152 ? run<49152>(r, logits, history)
                        : r.vocab == kSeenTokens + 6 ? run<kSeenTokens + 6>(r, logits, history)
                                                     : std::vector<int32_t>{};
    check((int)tokens.size() == r.steps, "a vocabulary that is not compiled in");
    fwrite(tokens.data(), sizeof(int32_t), tokens.size(), stdout);
    fflush(stdout);
  }
}

#else
#include "cpu/sample.h"

extern "C" __attribute__((visibility("default"))) int32_t mk_pick(float* logits, const int32_t* history, int32_t length,
                                                                 const mk_request* request, int32_t position) {
  static mk::Sampler sampler;
  const mk::DefaultFloats floats;
  return sampler.pick(logits, history, length, *request, position);
}
#endif
