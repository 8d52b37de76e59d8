// decode_kernel at the shape of model.h with random weights: correctness of every phase against the slow twins,
// then speed beside the bound, then where the time goes.
//   nvcc -std=c++20 -O3 -gencode arch=compute_90a,code=sm_90a -I csrc -I csrc/cuda -I tests/bench/ladder \
//        -o decode tests/bench/ladder/decode.cu
//   ./decode [context] [log2 of KV splits] [steps]
//   ./decode context splits steps quick    fewer checks, then times and a time line of several settings
//   ./decode context splits steps brief    the same of the first and the last of the settings, both as built
//   ./decode context splits steps flights  the times with other numbers of dense pages under way
#include <string>
#include "bench.cuh"
#include "decode_kernel.cuh"
#include "reference.cuh"

using namespace mk;
using namespace ladder;
using bench::device_array, bench::to_host;

constexpr uint64_t kWaitLimit = 2000000000;  // ns

struct Model {
  DecodeParams p{};
  uint8_t *dense, *head, *experts, *kv;
  float* norms;
  uint32_t epochs = 0;
  Report last{};
};
constexpr float kRouterGain = 3.f;  // so that the eight chosen experts differ clearly in weight

static void pack_matrix(uint8_t* out, float* scales, bool fp8, uint32_t tensor, int64_t rows, int K) {
  if (fp8)
    pack_fp8<<<1056, 256>>>(out, scales, tensor, rows, K, 1.f);
  else
    pack_bf16<<<1056, 256>>>(out, tensor, rows, K, 1.f, true);
}

static Model make_model() {
  Model m;
  m.dense = device_array<uint8_t>(kLayers * kDenseLayerBytes);
  m.head = device_array<uint8_t>(kHeadBytes);
  m.experts = device_array<uint8_t>((size_t)kLayers * kExperts * kExpertBytes);
  m.kv = device_array<uint8_t>(kKvBytes);
  m.norms = device_array<float>(kLayers * kNormLayer + kHidden);
  auto* routers = device_array<uint8_t>((size_t)kLayers * kExperts * kHidden * 2);
  auto* embedding = device_array<uint8_t>((size_t)kVocab * kHidden * 2);
  auto* scales = device_array<float4>(kLayers * kExperts);
  auto* dense_scales = device_array<float>((size_t)kLayers * (kQkvRows + kHidden));
  auto* head_scales = device_array<float>(kHeadRows);
  auto* rope = device_array<float2>((size_t)kMaxContext * kHeadDim / 2);
  for (int l = 0; l < kLayers; l++) {
    uint8_t* w = m.dense + l * kDenseLayerBytes;
    float* s = dense_scales + (size_t)l * kDenseScaleLayer;
    pack_matrix(w, s, kAttentionFp8, l * kTensors + kQkv, kQkvRows, kHidden);
    pack_matrix(w + kQkvBytes, s + kQkvRows, kAttentionFp8, l * kTensors + kOut, kHidden, kQRows);
    pack_bf16<<<1056, 256>>>(routers + (size_t)l * kExperts * kHidden * 2, l * kTensors + kRouter, kExperts, kHidden,
                             kRouterGain, false);
    pack_nvfp4<<<1056, 256>>>(m.experts, l, true);
    pack_nvfp4<<<1056, 256>>>(m.experts, l, false);
  }
  pack_matrix(m.head, head_scales, kHeadFp8, kHeadTensor, kVocab, kHidden);
  pack_bf16<<<1056, 256>>>(embedding, kEmbedTensor, kVocab, kHidden, sqrtf(kHidden), false);
  fill_norms<<<256, 256>>>(m.norms, kLayers * kNormLayer + kHidden);
  fill_expert_scales<<<48, 256>>>(scales);
  fill_rope<<<1056, 256>>>(rope);
  CHECK(cudaGetLastError());
  CHECK(cudaDeviceSynchronize());
  m.p.dense = m.dense;
  m.p.head = m.head;
  m.p.experts = m.experts;
  m.p.routers = routers;
  m.p.embedding = (const uint16_t*)embedding;
  m.p.norms = m.norms;
  m.p.expert_scales = scales;
  m.p.dense_scales = dense_scales;
  m.p.head_scales = head_scales;
  m.p.rope = rope;
  m.p.kv = m.kv;
  m.p.exchange = device_array<uint64_t>(kExchangeWords);
  m.p.epochs = device_array<uint32_t>(1);
  m.p.history = device_array<int32_t>(kMaxContext + 1);
  m.p.mail = (Mailbox*)device_array<uint8_t>(sizeof(Mailbox) + (kMaxContext + 1) * sizeof(int32_t));
  m.p.sampling = {0.f, 1.f, 0.f, 1.f, 0, 0};
  m.p.report = device_array<Report>(1);
  m.p.trace = device_array<int64_t>((size_t)(kLayers + 1) * kPhases * kGrid * 4);
  m.p.mute = -1;
  m.p.wait_limit_ns = kWaitLimit;
  m.p.qkv_flight = 2;
  m.p.dense_flight = 2;
  m.p.head_flight = 4;
  m.p.expert_flight = kExpertSlots;
  m.p.prefetch = 1;
  return m;
}

template <bool kDebug>
static float run(Model& m, int token, int position, int steps, int log_splits, float* dump) {
  DecodeParams p = m.p;
  p.first_epoch = m.epochs;
  m.epochs += steps * kLayers;
  p.position = position;
  p.steps = steps;
  for (int i = 0; i < 2; i++) p.more_splits[i] = log_splits > kMinLogSplits + i ? 0 : INT32_MAX;
  p.dump = dump;
  CHECK(cudaMemcpy(p.history + position, &token, 4, cudaMemcpyHostToDevice));
  const auto kernel = decode_kernel<kDebug, false>;
  CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)sizeof(DecodeShared)));
  cudaEvent_t a, b;
  CHECK(cudaEventCreate(&a));
  CHECK(cudaEventCreate(&b));
  uint32_t zero = 0;
  void* args[] = {&p, &zero};
  CHECK(cudaEventRecord(a));
  CHECK(cudaLaunchCooperativeKernel(kernel, kGrid, kThreads, args, sizeof(DecodeShared), 0));
  CHECK(cudaEventRecord(b));
  CHECK(cudaDeviceSynchronize());
  float ms;
  CHECK(cudaEventElapsedTime(&ms, a, b));
  m.last = to_host(p.report, 1)[0];
  if (m.last.expired && m.p.wait_limit_ns >= kWaitLimit) {
    printf("no progress: phase %u, SM %u, epoch %u (first of this launch %u)\n", m.last.phase, m.last.sm, m.last.epoch,
           p.first_epoch + 1);
    exit(1);
  }
  return ms;
}

static double relative_error(const float* got, const float* want, int n) {
  auto g = to_host(got, n), w = to_host(want, n);
  double d = 0, s = 0;
  for (int i = 0; i < n; i++) d += pow((double)g[i] - w[i], 2), s += pow((double)w[i], 2);
  double e = sqrt(d / s);
  return e == e ? e : INFINITY;
}

// The kernel's logits lack 1/rms of the router's input; x is that input with it.
__global__ void scale_logits(float* out, const float* logits, const float* x, const float* input) {
  int i = 0;
  while (input[i] == 0) i++;
  out[threadIdx.x] = logits[threadIdx.x] * (x[i] / input[i]);
}

struct Reference {
  float *x, *qkv, *attention, *mid, *logits, *ids, *weights, *h, *out, *scores, *head, *scaled, *ones;
};
static Reference make_reference() {
  auto* ones = device_array<float>(kHidden);
  const std::vector<float> one(kHidden, 1.f);
  CHECK(cudaMemcpy(ones, one.data(), kHidden * 4, cudaMemcpyHostToDevice));
  return {device_array<float>(kHidden),  device_array<float>(kQkvRows),
          device_array<float>(kQRows),   device_array<float>(kHidden),
          device_array<float>(kExperts), device_array<float>(kTopK),
          device_array<float>(kTopK),    device_array<float>(kTopK * kMoeIntermediate),
          device_array<float>(kHidden),  device_array<float>((size_t)kHeads * kMaxContext),
          device_array<float>(kVocab),   device_array<float>(kExperts),
          ones};
}
// One layer. `in` and, when forced, every phase's input come from `forced` (what the kernel published); else from here.
static void reference_layer(Model& m, Reference& r, int l, int position, const float* in, const float* forced,
                            double* worst) {
  const float* norm = m.norms + l * kNormLayer;
  auto compare = [&](int phase, int offset, const float* mine, int n) {
    if (forced) worst[phase] = std::max(worst[phase], relative_error(forced + offset, mine, n));
    return forced ? forced + offset : mine;
  };
  ref_norm<<<1, 128>>>(r.x, in, norm + kNormInput, kHidden);
  ref_matrix<<<4096, 128>>>(r.qkv, l * kTensors + kQkv, kAttentionFp8, 1.f, r.x, kHidden, kQkvRows, nullptr);
  if (forced) {
    compare(0, kDumpQkv, r.qkv, kQkvRows);
    CHECK(cudaMemcpy(r.qkv, forced + kDumpQkv, kQkvRows * 4, cudaMemcpyDeviceToDevice));
  }
  ref_rotate<<<kHeads + kKvHeads, 64>>>(r.qkv, norm + kNormQ, norm + kNormK, position);
  ref_attention<<<kHeads, 128>>>(r.attention, r.qkv, m.kv, l, position, r.scores);
  const float* attention = compare(1, kDumpAttention, r.attention, kQRows);
  ref_matrix<<<4096, 128>>>(r.mid, l * kTensors + kOut, kAttentionFp8, 1.f, attention, kQRows, kHidden, in);
  const float* mid = compare(2, kDumpMid, r.mid, kHidden);
  ref_norm<<<1, 128>>>(r.x, mid, norm + kNormPost, kHidden, false);
  ref_matrix<<<4096, 128>>>(r.logits, l * kTensors + kRouter, false, kRouterGain, r.x, kHidden, kExperts, nullptr);
  const float* logits = compare(3, kDumpLogits, r.logits, kExperts);
  ref_norm<<<1, 128>>>(r.x, mid, norm + kNormPost, kHidden);
  ref_norm<<<1, 128>>>(r.out, mid, r.ones, kHidden);
  scale_logits<<<1, kExperts>>>(r.scaled, logits, r.out, mid);
  ref_top_k<<<1, 1>>>(r.ids, r.weights, r.scaled);
  compare(4, kDumpIds, r.ids, kTopK);
  ref_pair<<<4096, 128>>>(r.h, l, r.x, r.ids);
  const float* h = compare(5, kDumpExperts, r.h, kTopK * kMoeIntermediate);
  ref_down<<<4096, 128>>>(r.out, l, h, r.ids, r.weights, mid);
  compare(6, kDumpOut, r.out, kHidden);
  CHECK(cudaGetLastError());
}
// Argmax of the head over hidden state `in`, and the gap to the runner-up.
static int reference_head(Model& m, Reference& r, const float* in, float& gap) {
  ref_norm<<<1, 128>>>(r.x, in, m.norms + kLayers * kNormLayer, kHidden);
  ref_matrix<<<8192, 128>>>(r.head, kHeadTensor, kHeadFp8, 1.f, r.x, kHidden, kVocab, nullptr);
  CHECK(cudaGetLastError());
  auto v = to_host(r.head, kVocab);
  int best = (int)(std::max_element(v.begin(), v.end()) - v.begin());
  float top = v[best];
  v[best] = -INFINITY;
  gap = top - *std::max_element(v.begin(), v.end());
  return best;
}

static bool check(Model& m, Reference& r, int context, int log_splits, int steps, int runs = 20) {
  fill_cache<<<1056, 256>>>(m.kv, context);
  float* dump = device_array<float>((size_t)kLayers * kDumpLayer);
  run<true>(m, 1234, context, steps, log_splits, dump);
  auto tokens = to_host(m.p.history + context, steps + 1);
  const int position = context + steps - 1;  // of the last step, the one whose record remains
  std::vector<float> embedding(kHidden);
  auto row = to_host(m.p.embedding + (size_t)tokens[steps - 1] * kHidden, kHidden);
  for (int i = 0; i < kHidden; i++) {
    uint32_t u = (uint32_t)row[i] << 16;
    memcpy(&embedding[i], &u, 4);
  }
  float* x = device_array<float>(kHidden);
  CHECK(cudaMemcpy(x, embedding.data(), kHidden * 4, cudaMemcpyHostToDevice));
  const char* names[7] = {"qkv", "attention", "out", "router", "top-k", "gate/up", "down"};
  const double limits[7] = {4e-3, 6e-3, 4e-3, 1e-5, 0, 6e-3, 4e-3};
  double worst[7] = {};
  for (int l = 0; l < kLayers; l++)
    reference_layer(m, r, l, position, l ? dump + (l - 1) * kDumpLayer + kDumpOut : x, dump + l * kDumpLayer, worst);
  bool ok = true;
  printf(
      "check: context %d, %d KV splits, step %d of %d; worst relative error of 48 layers, each phase from the kernel's "
      "own input:\n ",
      context, 1 << log_splits, steps, steps);
  for (int i = 0; i < 7; i++) {
    printf(" %s %.1e", names[i], worst[i]);
    ok = ok && worst[i] <= limits[i];
  }
  float gap;
  int best = reference_head(m, r, dump + (kLayers - 1) * kDumpLayer + kDumpOut, gap);
  printf("; head: token %d, reference %d (gap %.3f)\n", tokens[steps], best, gap);
  ok = ok && (best == tokens[steps] || gap < 0.02f);
  // The same step by the reference alone.
  std::vector<float> hidden;
  int differing = 0;
  for (int l = 0; l < kLayers; l++) {
    reference_layer(m, r, l, position, x, nullptr, nullptr);
    auto a = to_host(r.ids, kTopK), b = to_host(dump + l * kDumpLayer + kDumpIds, kTopK);
    std::sort(a.begin(), a.end());
    std::sort(b.begin(), b.end());
    differing += a != b;
    CHECK(cudaMemcpy(x, r.out, kHidden * 4, cudaMemcpyDeviceToDevice));
  }
  best = reference_head(m, r, x, gap);
  printf("  reference alone: hidden state differs by %.1e, expert sets differ in %d layers, token %d (gap %.3f)\n",
         relative_error(dump + (kLayers - 1) * kDumpLayer + kDumpOut, x, kHidden), differing, best, gap);
  // Bit-identical run to run, and the same tokens with one launch a step.
  float* again = device_array<float>((size_t)kLayers * kDumpLayer);
  bool identical = true;
  for (int i = 0; i < runs; i++) {
    fill_cache<<<1056, 256>>>(m.kv, context);
    run<true>(m, 1234, context, steps, log_splits, again);
    identical = identical && to_host(again, kLayers * kDumpLayer) == to_host(dump, kLayers * kDumpLayer) &&
                to_host(m.p.history + context, steps + 1) == tokens;
  }
  fill_cache<<<1056, 256>>>(m.kv, context);
  int same = 0;
  for (int s = 0, token = 1234; s < steps; s++) {
    run<false>(m, token, context + s, 1, log_splits, nullptr);
    token = to_host(m.p.history + context + s, 2)[1];
    same += token == tokens[s + 1];
  }
  printf("  %d runs %s; one launch a step: %d of %d tokens the same\n", runs, identical ? "bit-identical" : "DIFFER",
         same, steps);
  CHECK(cudaFree(dump));
  CHECK(cudaFree(again));
  CHECK(cudaFree(x));
  return ok && identical && same == steps;
}

// When some SMs never publish what the others wait for, the kernel must end by itself and say who waited where.
static bool check_watchdog(Model& m, int context, int log_splits) {
  m.p.wait_limit_ns = 50000000;
  m.p.mute = 4;  // which attends, whatever the number of splits
  const float ms = run<true>(m, 1234, context, 3, log_splits, nullptr);
  const bool ok = m.last.expired && ms < 500;
  printf(
      "watchdog: an SM that never publishes ends the kernel after %.0f ms; reported phase %u (combination is %d, output "
      "projection %d), SM %u: %s\n",
      ms, m.last.phase, kPhaseCombine, kPhaseOut, m.last.sm, ok ? "ok" : "WRONG");
  m.p.mute = -1;
  m.p.wait_limit_ns = kWaitLimit;
  m.epochs = 0;
  CHECK(cudaMemset(m.p.exchange, 0, kExchangeWords * sizeof(uint64_t)));
  CHECK(cudaMemset(m.p.report, 0, sizeof(Report)));
  return ok;
}

// Where a layer's time goes: for every moment of every phase the time at which the first and the last SM reached it,
// counted from the moment the last SM published the layer before, mean over layers 2 .. 47.
static void print_trace(Model& m) {
  auto t = to_host(m.p.trace, (size_t)(kLayers + 1) * kPhases * kGrid * 4);
  auto at = [&](int l, int ph, int sm, int i) { return (double)t[(((size_t)l * kPhases + ph) * kGrid + sm) * 4 + i]; };
  auto edge = [&](int l, int ph, int i, bool last) {
    double v = 0;
    for (int sm = 0; sm < kGrid; sm++)
      if (at(l, ph, sm, i) && at(l, ph, sm, 3))
        v = v == 0 ? at(l, ph, sm, i) : last ? std::max(v, at(l, ph, sm, i)) : std::min(v, at(l, ph, sm, i));
    return v;
  };
  const char* names[kPhases] = {"embed", "qkv",    "attention", "combine", "out",  "router",
                                "choose", "gate/up",   "down",    "head", "token"};
  printf("us after the layer before was published, [first, last] SM, mean over layers:\n");
  for (int ph = kPhaseQkv; ph <= kPhaseDown; ph++) {
    printf("  %-10s", names[ph]);
    const char* moments[4] = {"entered", "input", "last page", "published"};
    for (int i = 0; i < 4; i++) {
      double first = 0, last = 0;
      for (int l = 2; l < kLayers; l++) {
        double from = edge(l - 1, kPhaseDown, 3, true);
        first += (edge(l, ph, i, false) - from) / 1e3;
        last += (edge(l, ph, i, true) - from) / 1e3;
      }
      if (edge(5, ph, i, true)) printf("  %s [%5.2f %5.2f]", moments[i], first / (kLayers - 2), last / (kLayers - 2));
    }
    printf("\n");
  }
  printf("  head and token: %.1f us after the last layer\n",
         (edge(kLayers, kPhaseToken, 3, true) - edge(kLayers - 1, kPhaseDown, 3, true)) / 1e3);
}

// What a launch may be told, in the order of a line of the sweep.
struct Setting {
  const char* name;
  void (*set)(DecodeParams&);
};
static const Setting kSettings[] = {
    {"as built", [](DecodeParams&) {}},
    {"expert flight 2", [](DecodeParams& p) { p.expert_flight = 2; }},
    {"expert flight 3", [](DecodeParams& p) { p.expert_flight = 3; }},
    {"no L2 prefetch", [](DecodeParams& p) { p.prefetch = 0; }},
    {"flight 1 x 2", [](DecodeParams& p) { p.qkv_flight = 1; }},
    {"as built", [](DecodeParams&) {}},
};
static int quick(Model& m, Reference& r, int context, int log_splits, int steps, double bytes, bool brief) {
  bool ok = check(m, r, context, log_splits, 2, 6);
  const double bandwidth = read_bandwidth(m.experts, (size_t)8 << 30), bound = bytes / bandwidth * 1e3;
  const DecodeParams built = m.p;
  float* dump = device_array<float>((size_t)kLayers * kDumpLayer);
  std::vector<float> as_built;
  const Setting& last = kSettings[sizeof kSettings / sizeof *kSettings - 1];
  for (const Setting& s : kSettings) {
    if (brief && &s != kSettings && &s != &last) continue;
    m.p = built;
    s.set(m.p);
    fill_cache<<<1056, 256>>>(m.kv, context);
    run<true>(m, 1234, context, 2, log_splits, dump);
    const std::vector<float> bits = to_host(dump, (size_t)kLayers * kDumpLayer);
    if (as_built.empty()) as_built = bits;
    const bool same = !memcmp(bits.data(), as_built.data(), bits.size() * sizeof(float));  // no setting changes a sum
    std::vector<float> ms;
    for (int i = 0; i < 5; i++) ms.push_back(run<false>(m, 1234 + i, context, steps, log_splits, nullptr) / steps);
    std::sort(ms.begin(), ms.end());
    printf("RESULT %s context %d, %-48s best %.4f median %.4f ms/token, bound %.4f, %.1f%%\n",
           ok && same ? "ok" : "WRONG", context, s.name, ms[0], ms[2], bound, 100 * bound / ms[2]);
    ok = ok && same;
    run<true>(m, 1234, context, steps, log_splits, nullptr);
    print_trace(m);
  }
  CHECK(cudaFree(dump));
  return !ok;
}

int main(int argc, char** argv) {
  setvbuf(stdout, nullptr, _IOLBF, 0);
  const int context = argc > 1 ? atoi(argv[1]) : 512, log_splits = argc > 2 ? atoi(argv[2]) : 3,
            steps = argc > 3 ? atoi(argv[3]) : 64;
  cudaDeviceProp d;
  CHECK(cudaGetDeviceProperties(&d, 0));
  printf("%s, %d SMs; kernel: %zu bytes of shared memory\n", d.name, d.multiProcessorCount, sizeof(DecodeShared));
  int resident = 0;
  const auto kernel = decode_kernel<false, false>;
  CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)sizeof(DecodeShared)));
  CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, kernel, kThreads, sizeof(DecodeShared)));
  if (resident * d.multiProcessorCount < kGrid) {
    printf("needs %d resident blocks, this GPU holds %d\n", kGrid, resident * d.multiProcessorCount);
    return 1;
  }
  Model m = make_model();
  Reference r = make_reference();
  printf("weights made\n");
  const double cached = (double)kLayers * 2 * kKvRows * 2 * (context + steps / 2);
  const double bytes = (double)kLayers * (kDenseLayerBytes + kTopK * (double)kExpertBytes + kExperts * kHidden * 2.0) +
                       (double)kHeadBytes + cached;
  const std::string mode = argc > 4 ? argv[4] : "";
  if (mode == "quick" || mode == "brief") return quick(m, r, context, log_splits, steps, bytes, mode == "brief");
  bool ok = check(m, r, context, log_splits, 3);
  ok = check_watchdog(m, context, log_splits) && ok;
  ok = check(m, r, 37, log_splits, 2) && ok;
  const double bandwidth = read_bandwidth(m.experts, (size_t)8 << 30);
  if (mode == "flights") {
    for (int qkv = 1; qkv <= 3; qkv++)
      for (int dense = 1; dense <= 4; dense++) {
        m.p.qkv_flight = qkv;
        m.p.dense_flight = dense;
        float t[2];
        for (float& x : t) x = run<false>(m, 1234, context, steps, log_splits, nullptr) / steps;
        printf("pages under way: QKV %d, output projection %d: %.4f %.4f ms/token\n", qkv, dense, t[0], t[1]);
      }
    return 0;
  }
  std::vector<float> ms;
  for (int i = 0; i < 7; i++) ms.push_back(run<false>(m, 1234 + i, context, steps, log_splits, nullptr) / steps);
  std::sort(ms.begin(), ms.end());
  const double bound = bytes / bandwidth * 1e3;
  printf(
      "context %d, %d KV splits, %d steps: %.4f ms/token (min %.4f max %.4f) = %.0f tok/s; bytes %.3f GB, read "
      "bandwidth %.3f TB/s,"
      " bound %.4f ms, %.1f%% of it\n",
      context, 1 << log_splits, steps, ms[3], ms[0], ms[6], 1e3 / ms[3], bytes / 1e9, bandwidth / 1e12, bound,
      100 * bound / ms[3]);
  double traced = run<true>(m, 1234, context, steps, log_splits, nullptr) / steps;
  printf("with trace %.4f ms/token; ", traced);
  print_trace(m);
  printf(ok ? "ok\n" : "WRONG\n");
  return !ok;
}
