// The C ABI of a CUDA target (csrc/cuda/model.cu) on random weights, against the kernel that it wraps: the same tokens
// as launches made by hand, logits against the slow twin, the cache after truncation and stops, speed through the ABI.
//   nvcc -std=c++20 -O3 -gencode arch=compute_90a,code=sm_90a -I csrc -I csrc/cuda -I tests/bench/ladder \
//        -o abi tests/bench/ladder/abi.cu
//   ./abi [new tokens]
#include <cstdlib>
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

// The blob in host memory, packed on the device by layout.cuh's functions, not by mkpack.
static uint8_t* make_blob() {
  DeviceArray<uint8_t> blob(m::blob_bytes);
  uint8_t* w = blob.get();
  check(cudaMemset(w, 0, m::blob_bytes), "clearing");
  for (int l = 0; l < kLayers; l++) {
    uint8_t* dense = w + m::dense_at + l * kDenseLayerBytes;
    pack_bf16<<<1056, 256>>>(dense, l * kTensors + kQkv, kQkvRows, kHidden, 1.f, true);
    pack_bf16<<<1056, 256>>>(dense + kQkvBytes, l * kTensors + kOut, kHidden, kQRows, 1.f, true);
    pack_bf16<<<1056, 256>>>(w + m::routers_at + l * kRouterBytes, l * kTensors + kRouter, kExperts, kHidden, 3.f,
                             false);
    pack_nvfp4<<<1056, 256>>>(w + m::experts_at, l, true);
    pack_nvfp4<<<1056, 256>>>(w + m::experts_at, l, false);
  }
  pack_bf16<<<1056, 256>>>(w + m::head_at, kHeadTensor, kVocab, kHidden, 1.f, true);
  pack_bf16<<<1056, 256>>>(w + m::embedding_at, kEmbedTensor, kVocab, kHidden, sqrtf(kHidden), false);
  fill_norms<<<256, 256>>>((float*)(w + m::norms_at), kLayers * kNormLayer + kHidden);
  fill_expert_scales<<<48, 256>>>((float2*)(w + m::expert_scales_at));
  check(cudaGetLastError(), "packing");
  auto* host = (uint8_t*)aligned_alloc(4096, m::blob_bytes);
  check(cudaMemcpy(host, w, m::blob_bytes, cudaMemcpyDeviceToHost), "copying the blob");
  return host;
}

// Launches by hand, with buffers of their own and the model's weights and RoPE table.
struct Direct {
  DeviceArray<uint8_t> kv{(size_t)kKvBytes};
  DeviceArray<uint64_t> exchange{kExchangeWords};
  DeviceArray<int32_t> tokens{kLaunchSteps + 1};
  DeviceArray<Report> report{1};
  Params p;
  explicit Direct(const mk_model* model) : p(model->params) {
    check(cudaMemset(kv.get(), 0, kKvBytes), "clearing");
    check(cudaMemset(exchange.get(), 0, kExchangeWords * sizeof(uint64_t)), "clearing");
    check(cudaMemset(report.get(), 0, sizeof(Report)), "clearing");
    p.kv = kv.get(), p.exchange = exchange.get(), p.tokens = tokens.get(), p.report = report.get();
    p.first_epoch = 0;
  }
  std::vector<int32_t> run(int32_t token, int position, int steps) {
    p.position = position;
    p.steps = steps;
    p.log_splits = log_splits_at(position);
    p.attention_stride = kGrid / (kKvHeads << p.log_splits);
    uint32_t zero = 0;
    void* args[] = {&p, &zero};
    check(cudaMemcpy(p.tokens, &token, 4, cudaMemcpyHostToDevice), "copying");
    check(cudaLaunchCooperativeKernel((const void*)decode_kernel<false>, kGrid, kThreads, args, sizeof(Shared), 0),
          "launch");
    check(cudaDeviceSynchronize(), "running");
    p.first_epoch += steps * kLayers;
    std::vector<int32_t> out(steps);
    check(cudaMemcpy(out.data(), p.tokens + 1, steps * 4, cudaMemcpyDeviceToHost), "copying");
    return out;
  }
  std::vector<int32_t> generate(const std::vector<int32_t>& prompt, int count) {
    std::vector<int32_t> out;
    for (size_t i = 0; i < prompt.size(); i++) out = run(prompt[i], (int)i, 1);
    for (int position = (int)prompt.size(); (int)out.size() < count;) {
      const int steps = std::min(kLaunchSteps, count - (int)out.size());
      const auto next = run(out.back(), position, steps);
      out.insert(out.end(), next.begin(), next.end());
      position += steps;
    }
    return out;
  }
};

static int32_t collect(void* user, int32_t token) {
  ((std::vector<int32_t>*)user)->push_back(token);
  return 0;
}
static std::vector<int32_t> generate(mk_model* model, const std::vector<int32_t>& prompt, int count, mk_result& result,
                                     const std::vector<int32_t>& stop = {}) {
  std::vector<int32_t> out;
  const mk_request r{0.f, 1.f, 0.f, 1.f, 0, count, 0, stop.data(), (int32_t)stop.size(), 0};
  require(mk_generate(model, prompt.data(), (int32_t)prompt.size(), &r, collect, &out, &result));
  return out;
}

// Logits of the last position against float64 sums over canonical weights, from the model's own hidden state.
static double logits_error(const mk_model* model, const std::vector<float>& got) {
  std::vector<uint64_t> words(kHidden);
  check(cudaMemcpy(words.data(), model->exchange.get() + (model->epochs & 1) * kXWords + kXOut, kHidden * 8,
                   cudaMemcpyDeviceToHost),
        "copying");
  std::vector<float> hidden(kHidden), want(kVocab);
  for (int i = 0; i < kHidden; i++) {
    const uint32_t bits = (uint32_t)words[i];
    memcpy(&hidden[i], &bits, 4);
  }
  DeviceArray<float> in(kHidden), x(kHidden), y(kVocab);
  check(cudaMemcpy(in.get(), hidden.data(), kHidden * 4, cudaMemcpyHostToDevice), "copying");
  ref_norm<<<1, 128>>>(x.get(), in.get(), model->params.norms + kLayers * kNormLayer, kHidden);
  ref_matrix<<<8192, 128>>>(y.get(), kHeadTensor, 1.f, x.get(), kHidden, kVocab, nullptr);
  check(cudaMemcpy(want.data(), y.get(), kVocab * 4, cudaMemcpyDeviceToHost), "copying");
  double d = 0, s = 0;
  for (int i = 0; i < kVocab; i++) d += pow((double)got[i] - want[i], 2), s += pow((double)want[i], 2);
  return sqrt(d / s);
}

int main(int argc, char** argv) {
  setvbuf(stdout, nullptr, _IOLBF, 0);
  const int count = argc > 1 ? atoi(argv[1]) : 800;
  uint8_t* blob = make_blob();
  size_t before = 0, after = 0, total = 0;
  check(cudaMemGetInfo(&before, &total), "memory");
  const void* weights[] = {blob};
  const mk_options options{weights, m::blob_bytes, 1, 0, 0, 0, 2.0};
  mk_model* model = nullptr;
  require(mk_create(&options, &model));
  printf("created: %.1f GB of weights\n", m::blob_bytes / 1e9);

  std::vector<int32_t> prompt(39);
  for (int i = 0; i < 39; i++) prompt[i] = (int32_t)(ladder::hash(7, i) % kVocab);
  mk_result result;
  const auto tokens = generate(model, prompt, count, result);
  expect((int)tokens.size() == count && result.stop_reason == MK_STOP_LENGTH && mk_length(model) == 39 + count - 1,
         "tokens asked for, positions in the cache");
  const mk_result timed = result;
  {
    Direct direct(model);
    expect(direct.generate(prompt, count) == tokens, "the tokens of launches made by hand");
  }
  require(mk_truncate(model, 20));
  const std::vector<int32_t> rest(prompt.begin() + 20, prompt.end());
  expect(generate(model, rest, 40, result) == std::vector<int32_t>(tokens.begin(), tokens.begin() + 40),
         "the same tokens after truncation to 20 positions");
  require(mk_truncate(model, 0));
  const size_t end = std::find(tokens.begin(), tokens.end(), tokens[21]) - tokens.begin() + 1;
  expect(generate(model, prompt, count, result, {tokens[21]}).size() == end && result.stop_reason == MK_STOP_TOKEN &&
             mk_length(model) == (int)(39 + end - 1),
         "a stop token in the middle of a launch");

  require(mk_truncate(model, 0));
  std::vector<float> logits((size_t)kVocab);
  for (int at = 0; at < 39; at += MK_MAX_STEP_TOKENS)
    require(mk_step(model, prompt.data() + at, std::min(39 - at, MK_MAX_STEP_TOKENS), logits.data(), 1));
  expect(std::max_element(logits.begin(), logits.end()) - logits.begin() == tokens[0],
         "the largest logit is the token");
  const double error = logits_error(model, logits);
  printf("relative error of the logits against the slow twin: %.1e\n", error);
  expect(error < 4e-3, "logits");

  double bandwidth = 0;
  require(mk_read_bandwidth(model, &bandwidth));
  const double cached = (double)kLayers * 2 * kKvRows * 2 * (39 + count / 2);
  const double bytes = (double)kLayers * (kDenseLayerBytes + kTopK * (double)kExpertBytes + kRouterBytes) +
                       (double)kVocab * kHidden * 2 + cached;
  const double ms = timed.decode_s * 1e3 / (count - 1), bound = bytes / bandwidth * 1e3;
  printf(
      "39-token prompt %.1f ms; %d tokens: %.4f ms/token = %.0f tok/s; read bandwidth %.3f TB/s, bound %.4f ms, "
      "%.1f%% of it\n",
      timed.prefill_s * 1e3, count, ms, 1e3 / ms, bandwidth / 1e12, bound, 100 * bound / ms);
  mk_destroy(model);
  check(cudaMemGetInfo(&after, &total), "memory");
  expect(after + (64 << 20) >= before, "GPU memory comes back");
  printf(all_ok ? "ok\n" : "WRONG\n");
  return !all_ok;
}
