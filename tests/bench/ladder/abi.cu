// A CUDA target (csrc/cuda/model.cu) through its C ABI on random weights: every layer against the slow twin, chunkings,
// truncation and stops, then speed beside the bound for 1 to 16 tokens a step and several contexts.
//   nvcc -std=c++20 -O3 -gencode arch=compute_90a,code=sm_90a -I csrc -I csrc/cuda -I tests/bench/ladder
//        -o abi tests/bench/ladder/abi.cu        (one line; -DMK_TRACE adds where the time of a step goes)
//   ./abi [new tokens] [rounds of a timed step] [contexts ...]
#include <algorithm>
#include <cstdlib>
#include <numeric>
#include "model.cu"
#include "reference.cuh"

using namespace ladder;

static bool all_ok = true;
static void expect(bool ok, const char* what) {
  printf("%-72s %s\n", what, ok ? "ok" : "WRONG");
  all_ok = all_ok && ok;
}
static void require(int32_t code) {
  if (code == MK_OK) return;
  printf("code %d: %s\n", code, mk_last_error());
  exit(1);
}
using Tokens = std::vector<int32_t>;

// ---- weights -------------------------------------------------------------------------------------------------------
constexpr float kRouterGain = 3.f;
static void pack_matrix(uint8_t* out, float* scales, bool fp8, uint32_t tensor, int64_t rows, int K) {
  if (fp8)
    pack_fp8<<<1056, 256>>>(out, scales, tensor, rows, K, 1.f);
  else
    pack_bf16<<<1056, 256>>>(out, tensor, rows, K, 1.f, true);
}
// The blob in host memory, packed on the device by layout.cuh's functions, not by mkpack.
static uint8_t* make_blob() {
  DeviceArray<uint8_t> blob(m::blob_bytes);
  uint8_t* w = blob.get();
  check(cudaMemset(w, 0, m::blob_bytes), "clearing");
  auto* dense_scales = (float*)(w + m::dense_scales_at);
  for (int l = 0; l < kLayers; l++) {
    uint8_t* dense = w + m::dense_at + l * kDenseLayerBytes;
    float* scales = dense_scales + l * kDenseScaleLayer;
    pack_matrix(dense, scales, kAttentionFp8, l * kTensors + kQkv, kQkvRows, kHidden);
    pack_matrix(dense + kQkvBytes, scales + kQkvRows, kAttentionFp8, l * kTensors + kOut, kHidden, kQRows);
    pack_bf16<<<1056, 256>>>(w + m::routers_at + l * kRouterBytes, l * kTensors + kRouter, kExperts, kHidden,
                             kRouterGain, false);
    pack_nvfp4<<<1056, 256>>>(w + m::experts_at, l, true);
    pack_nvfp4<<<1056, 256>>>(w + m::experts_at, l, false);
  }
  pack_matrix(w + m::head_at, (float*)(w + m::head_scales_at), kHeadFp8, kHeadTensor, kVocab, kHidden);
  pack_bf16<<<1056, 256>>>(w + m::embedding_at, kEmbedTensor, kVocab, kHidden, sqrtf(kHidden), false);
  fill_norms<<<256, 256>>>((float*)(w + m::norms_at), kLayers * kNormLayer + kHidden);
  fill_expert_scales<<<48, 256>>>((float4*)(w + m::expert_scales_at));
  check(cudaGetLastError(), "packing");
  auto* host = (uint8_t*)aligned_alloc(4096, m::blob_bytes);
  check(cudaMemcpy(host, w, m::blob_bytes, cudaMemcpyDeviceToHost), "copying the blob");
  return host;
}

// ---- right ---------------------------------------------------------------------------------------------------------
static int32_t collect(void* user, int32_t token) {
  ((Tokens*)user)->push_back(token);
  return 0;
}
static Tokens generate(mk_model* model, const Tokens& prompt, int count, mk_result& result, const Tokens& stop = {}) {
  Tokens out;
  const mk_request r{0.f, 1.f, 0.f, 1.f, 0, count, 0, stop.data(), (int32_t)stop.size(), 0};
  require(mk_generate(model, prompt.data(), (int32_t)prompt.size(), &r, collect, &out, &result));
  return out;
}
static std::vector<float> step_logits(mk_model* model, const Tokens& tokens, const std::vector<int>& cuts) {
  require(mk_truncate(model, 0));
  std::vector<float> out;
  size_t at = 0, i = 0;
  while (at < tokens.size()) {
    const int n = std::min<int>(cuts[i++ % cuts.size()], (int)(tokens.size() - at));
    std::vector<float> part((size_t)n * kVocab);
    require(mk_step(model, tokens.data() + at, n, part.data(), n));
    out.insert(out.end(), part.begin(), part.end());
    at += n;
  }
  return out;
}
static double difference(const float* got, const float* want, int n) {  // on the host
  double d = 0, s = 0;
  for (int i = 0; i < n; i++) d += pow((double)got[i] - want[i], 2), s += pow((double)want[i], 2);
  return sqrt(d / s);
}
static std::vector<float> copied(const float* p, size_t n) {
  std::vector<float> v(n);
  check(cudaMemcpy(v.data(), p, n * sizeof(float), cudaMemcpyDeviceToHost), "copying");
  return v;
}

// Runs the last of `tokens` with the ones before it in the cache and holds what every layer adds to the residual, and the
// logits, against float64 sums over canonical weights, each layer from the kernel's own input.
static void check_layers(mk_model* model, const Tokens& tokens, int chunk) {
  const int last = (int)tokens.size() - 1, row = chunk - 1;
  require(mk_truncate(model, 0));
  for (int at = 0; at + chunk < (int)tokens.size(); at++) require(mk_step(model, &tokens[at], 1, nullptr, 0));
  std::vector<int32_t> layers(kLayers);
  std::iota(layers.begin(), layers.end(), 0);
  std::vector<float> logits((size_t)chunk * kVocab), taps((size_t)kLayers * chunk * kHidden);
  require(mk_step_taps(model, tokens.data() + tokens.size() - chunk, chunk, logits.data(), chunk, layers.data(), kLayers,
                       taps.data()));
  DeviceArray<float> in(kHidden), x(kHidden), qkv(kQkvRows), out(kQRows), mid(kHidden), scores((size_t)kHeads * kMaxContext),
      router(kExperts), ids(kTopK), weights(kTopK), h(kTopK * kMoeIntermediate), y(kHidden), head(kVocab);
  std::vector<float> before(kHidden);
  for (int i = 0; i < kHidden; i++) {
    const int64_t at = (int64_t)tokens[last] * kHidden + i;
    uint16_t bits;
    check(cudaMemcpy(&bits, model->params.embedding + at, 2, cudaMemcpyDeviceToHost), "copying");
    const uint32_t wide = (uint32_t)bits << 16;
    memcpy(&before[i], &wide, 4);
  }
  double worst = 0, sum = 0;
  for (int l = 0; l < kLayers; l++) {
    const float* norms = model->params.norms + l * kNormLayer;
    check(cudaMemcpy(in.get(), before.data(), kHidden * 4, cudaMemcpyHostToDevice), "copying");
    ref_norm<<<1, 128>>>(x.get(), in.get(), norms + kNormInput, kHidden);
    ref_matrix<<<8192, 128>>>(qkv.get(), l * kTensors + kQkv, kAttentionFp8, 1.f, x.get(), kHidden, kQkvRows, nullptr);
    ref_rotate<<<kHeads + kKvHeads, 64>>>(qkv.get(), norms + kNormQ, norms + kNormK, last);
    ref_attention<<<kHeads, 128>>>(out.get(), qkv.get(), model->params.kv, l, last, scores.get());
    ref_matrix<<<8192, 128>>>(mid.get(), l * kTensors + kOut, kAttentionFp8, 1.f, out.get(), kQRows, kHidden, in.get());
    ref_norm<<<1, 128>>>(x.get(), mid.get(), norms + kNormPost, kHidden);
    ref_matrix<<<8192, 128>>>(router.get(), l * kTensors + kRouter, false, kRouterGain, x.get(), kHidden, kExperts, nullptr);
    ref_top_k<<<1, 1>>>(ids.get(), weights.get(), router.get());
    ref_pair<<<8192, 128>>>(h.get(), l, x.get(), ids.get());
    ref_down<<<8192, 128>>>(y.get(), l, h.get(), ids.get(), weights.get(), mid.get());
    const auto want = copied(y.get(), kHidden);
    const auto at = taps.begin() + ((size_t)l * chunk + row) * kHidden;
    const std::vector<float> got(at, at + kHidden);
    std::vector<float> add(kHidden), wanted(kHidden);
    for (int i = 0; i < kHidden; i++) add[i] = got[i] - before[i], wanted[i] = want[i] - before[i];
    const double error = difference(add.data(), wanted.data(), kHidden);
    if (error > 1e-2) printf("  layer %d: %.1e\n", l, error);
    worst = std::max(worst, error), sum += error;
    before = got;
  }
  check(cudaMemcpy(in.get(), before.data(), kHidden * 4, cudaMemcpyHostToDevice), "copying");
  ref_norm<<<1, 128>>>(x.get(), in.get(), model->params.norms + kLayers * kNormLayer, kHidden);
  ref_matrix<<<8192, 128>>>(head.get(), kHeadTensor, kHeadFp8, 1.f, x.get(), kHidden, kVocab, nullptr);
  const auto want = copied(head.get(), kVocab);
  const double error = difference(logits.data() + (size_t)row * kVocab, want.data(), kVocab);
  printf("chunk of %d at %d: a layer's addition differs from the twin by %.1e on average, %.1e at worst; logits by %.1e\n",
         chunk, last, sum / kLayers, worst, error);
  // The choice of experts may differ where the eighth and ninth are nearly equal: then a layer is a few percent off.
  expect(sum / kLayers < 6e-3 && error < 4e-3, "layers and logits against the twin");
}

// ---- fast ----------------------------------------------------------------------------------------------------------
static double step_bytes(int tokens, int context) {
  const double hit = kExperts * (1 - pow(1 - (double)kTopK / kExperts, tokens));
  return kLayers * ((double)kDenseLayerBytes + kRouterBytes + hit * kExpertBytes + 2.0 * 2 * kKvRows * context) + kHeadBytes;
}
static void phase_times(mk_model* model) {
#ifdef MK_TRACE
  static const char* names[] = {"embed", "qkv", "attention", "combine", "out", "router", "choose", "pair", "down", "head", "token"};
  std::vector<int64_t> t((size_t)(kLayers + 1) * kPhases * kGrid * 4);
  check(cudaMemcpy(t.data(), model->params.trace, t.size() * 8, cudaMemcpyDeviceToHost), "copying");
  const auto at = [&](int l, int ph, int sm, int moment) { return t[(((size_t)l * kPhases + ph) * kGrid + sm) * 4 + moment]; };
  printf("  us from a phase's entry (earliest SM) to: first/last SM done, next phase entered\n");
  for (int ph = kPhaseQkv; ph <= kPhaseDown; ph++) {
    double first = 0, last = 0, next = 0, input = 0;
    for (int l = 1; l < kLayers - 1; l++) {
      int64_t e = INT64_MAX, d0 = INT64_MAX, d1 = 0, n = INT64_MAX;
      for (int sm = 0; sm < kGrid; sm++) {
        e = std::min(e, at(l, ph, sm, 0));
        d0 = std::min(d0, at(l, ph, sm, 3)), d1 = std::max(d1, at(l, ph, sm, 3));
        n = std::min(n, ph == kPhaseDown ? at(l + 1, kPhaseQkv, sm, 0) : at(l, ph + 1, sm, 0));
      }
      first += d0 - e, last += d1 - e, next += n - e;
      if (ph == kPhaseAttention) {
        int64_t prepared = 0;
        for (int sm = 0; sm < kGrid; sm++) prepared = std::max(prepared, at(l, ph, sm, 1));
        input += prepared - e;
      }
    }
    const double k = 1e3 * (kLayers - 2);
    printf("  %-10s %6.2f %6.2f %6.2f  prepared %.2f\n", names[ph], first / k, last / k, next / k, input / k);
  }
  int64_t h0 = INT64_MAX, h1 = 0;
  for (int sm = 0; sm < kGrid; sm++) h0 = std::min(h0, at(kLayers, kPhaseHead, sm, 0)), h1 = std::max(h1, at(kLayers, kPhaseHead, sm, 3));
  printf("  head %.1f\n", (h1 - h0) / 1e3);
#endif
}
static void time_steps(mk_model* model, int context, int rounds, double bandwidth) {
  Tokens tokens(kMaxTokens);
  for (int T : {1, 2, 4, 8, 16}) {
    if (context + T > model->context) continue;
    model->length = context;  // whatever the cache holds there
    cudaEvent_t e0, e1;
    cudaEventCreate(&e0), cudaEventCreate(&e1);
    float total = 0;
    for (int i = 0; i < rounds + 3; i++) {
      for (int k = 0; k < kMaxTokens; k++) tokens[k] = (int32_t)(ladder::hash(11, i * 16 + k) % kVocab);
      model->give(tokens.data(), T);
      cudaEventRecord(e0, model->stream);
      model->launch(T, 0, 0, T, nullptr);
      cudaEventRecord(e1, model->stream);
      model->finish();
      float ms = 0;
      cudaEventElapsedTime(&ms, e0, e1);
      if (i >= 3) total += ms;
    }
    const double ms = total / rounds, bound = step_bytes(T, context) / bandwidth * 1e3;
    printf("context %6d  T %2d: %.4f ms a step, bound %.4f ms (%.2f GB, uniform routing), %.1f%%\n", context, T, ms, bound,
           step_bytes(T, context) / 1e9, 100 * bound / ms);
    if (T == 1 || T == 16) phase_times(model);
  }
}

int main(int argc, char** argv) {
  setvbuf(stdout, nullptr, _IOLBF, 0);
  const int count = argc > 1 ? atoi(argv[1]) : 512, rounds = argc > 2 ? atoi(argv[2]) : 20;
  uint8_t* blob = make_blob();
  size_t before = 0, after = 0, total = 0;
  check(cudaMemGetInfo(&before, &total), "memory");
  const void* weights[] = {blob};
  const mk_options options{weights, m::blob_bytes, 1, 0, 0, 0, 2.0};
  mk_model* model = nullptr;
  require(mk_create(&options, &model));
  printf("created: %.1f GB of weights\n", m::blob_bytes / 1e9);
#ifdef MK_TRACE
  DeviceArray<int64_t> trace((size_t)(kLayers + 1) * kPhases * kGrid * 4);
  model->params.trace = trace.get();
#endif
  Tokens prompt(39);
  for (int i = 0; i < 39; i++) prompt[i] = (int32_t)(ladder::hash(7, i) % kVocab);
  check_layers(model, prompt, 1);
  check_layers(model, prompt, 9);
  check_layers(model, prompt, 16);
  const auto whole = step_logits(model, prompt, {16});
  // The order of attention's sums follows the tokens of a step, so bits may differ; experts may too, at near-ties.
  for (const auto& cuts : std::vector<std::vector<int>>{{16}, {1}, {7, 2, 8, 9}}) {
    const auto got = step_logits(model, prompt, cuts), again = step_logits(model, prompt, cuts);
    printf("steps of %d.. tokens: logits differ by %.1e from steps of 16\n", cuts[0],
           difference(got.data(), whole.data(), (int)whole.size()));
    expect(got == again, "the same bits again");
  }

  mk_result result;
  require(mk_truncate(model, 0));
  const auto tokens = generate(model, prompt, count, result);
  const mk_result timed = result;
  expect((int)tokens.size() == count && result.stop_reason == MK_STOP_LENGTH && mk_length(model) == 39 + count - 1,
         "tokens asked for, positions in the cache");
  expect(std::max_element(whole.end() - kVocab, whole.end()) - (whole.end() - kVocab) == tokens[0],
         "the largest logit is the token");
  require(mk_truncate(model, 16));  // the rest of the prompt then comes in the same steps
  expect(generate(model, Tokens(prompt.begin() + 16, prompt.end()), count, result) == tokens,
         "the same tokens after truncation to 16 positions");
  require(mk_truncate(model, 0));
  const size_t end = std::find(tokens.begin(), tokens.end(), tokens[count / 2]) - tokens.begin() + 1;
  expect(generate(model, prompt, count, result, {tokens[count / 2]}).size() == end && result.stop_reason == MK_STOP_TOKEN &&
             mk_length(model) == (int)(39 + end - 1),
         "a stop token");

  double bandwidth = 0;
  require(mk_read_bandwidth(model, &bandwidth));
  const double ms = timed.decode_s * 1e3 / (count - 1), bound = step_bytes(1, 39 + count / 2) / bandwidth * 1e3;
  printf("39-token prompt %.2f ms; %d tokens: %.4f ms/token = %.0f tok/s; read bandwidth %.3f TB/s, bound %.4f ms, %.1f%%\n",
         timed.prefill_s * 1e3, count, ms, 1e3 / ms, bandwidth / 1e12, bound, 100 * bound / ms);
  if (getenv("SWEEP"))
    for (int tiles : {1, 2, 4})
      for (int flight : {2, 4}) {
        printf("%d tiles a split, %d dense pages under way\n", tiles, flight);
        const auto kept = model->params;
        model->params.tiles_per_split = tiles, model->params.dense_flight = flight;
        time_steps(model, 512, rounds, bandwidth);
        model->params = kept;
      }
  for (int i = 3; i < std::max(4, argc); i++) time_steps(model, i < argc ? atoi(argv[i]) : 512, rounds, bandwidth);
  mk_destroy(model);
  check(cudaMemGetInfo(&after, &total), "memory");
  expect(after + (64 << 20) >= before, "GPU memory comes back");
  printf(all_ok ? "ok\n" : "WRONG\n");
  return !all_ok;
}
