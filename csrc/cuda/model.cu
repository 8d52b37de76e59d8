// The C ABI of a CUDA target: one request at a time on one GPU, around the resident kernel.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>
#include "abi.h"
#include "bandwidth.cuh"
#include "device.cuh"
#include "kernel.cuh"
#include "logits.cuh"

namespace mk {

namespace m = model;

// The blob as mkpack/layout_cuda.py laid it out, against layout.cuh.
static_assert(m::qkv_bytes == kQkvBytes && m::dense_layer_bytes == kDenseLayerBytes && m::head_bytes == kHeadBytes &&
              m::head_rows == kHeadRows && m::pair_bytes == kPairBytes && m::expert_bytes == kExpertBytes &&
              m::dense_scale_layer_floats == kDenseScaleLayer && m::router_bytes == kRouterBytes &&
              m::norm_layer_floats == kNormLayer);
static_assert(m::attn_norm_at == kNormInput && m::mlp_norm_at == kNormPost && m::q_norm_at == kNormQ &&
              m::k_norm_at == kNormK && m::q_bias_at == kBiasQkv &&
              m::k_bias_at == kBiasQkv + (kQkvBias ? kQRows : 0) &&
              m::v_bias_at == kBiasQkv + (kQkvBias ? kQRows + kKvRows : 0) && m::o_bias_at == kBiasOut);
// Every section is as large as the kernel believes, and ends before the next begins.
constexpr bool sections_fit() {
  constexpr uint64_t layers = kLayers, vocab = kVocab, hidden = kHidden;
  const struct {
    uint64_t at, bytes;
  } sections[] = {
      {m::dense_at, layers * kDenseLayerBytes},
      {m::head_at, kHeadBytes},
      {m::experts_at, layers * kExperts * kExpertBytes},
      {m::expert_scales_at, layers * kExperts * 4 * sizeof(float)},
      {m::dense_scales_at, layers * kDenseScaleLayer * sizeof(float)},
      {m::head_scales_at, kHeadFp8 ? kHeadRows * sizeof(float) : 0},
      {m::routers_at, layers * kRouterBytes},
      {m::embedding_at, vocab * hidden * 2},
      {m::norms_at, (layers * kNormLayer + hidden) * sizeof(float)},
  };
  uint64_t end = 0;
  for (const auto& s : sections) {
    if (s.bytes == 0) continue;
    if (s.at < end) return false;
    end = s.at + s.bytes;
  }
  return end <= m::blob_bytes;
}
static_assert(sections_fit());
static_assert(sizeof m::inv_freq == kRotary / 2 * sizeof(float) && m::context <= kMaxContext);
static_assert(sizeof(Shared) <= 227 << 10, "more shared memory than a block can have");

// Steps of one launch. Tokens reach the host, and a stop reaches the kernel, between launches only: 16 are 20 ms.
constexpr int kLaunchSteps = 16;
static_assert(kLaunchSteps >= MK_MAX_STEP_TOKENS);

// Shares that the KV cache is split in at a position, as measured on an H200.
inline int log_splits_at(int position) { return position < 704 ? 3 : position < 5008 ? 4 : 5; }
static_assert((kKvHeads << 5) <= kMaxUnits && (kKvHeads << 5) <= kGrid);

class HostStream {
 public:
  HostStream() { check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "making a stream"); }
  ~HostStream() { cudaStreamDestroy(stream_); }
  HostStream(const HostStream&) = delete;
  HostStream& operator=(const HostStream&) = delete;
  operator cudaStream_t() const { return stream_; }

 private:
  cudaStream_t stream_ = nullptr;
};

}  // namespace mk

using namespace mk;

// decode_kernel's launches and everything they need on the device. The set-up is that of tests/bench/ladder/decode.cu.
struct mk_model {
  const int context;
  const double wait_limit_s;
  DeviceArray<uint8_t> weights{m::blob_bytes};
  DeviceArray<uint8_t> kv{(size_t)kKvBytes};
  DeviceArray<uint64_t> exchange{kExchangeWords};
  DeviceArray<float2> rope{(size_t)kMaxContext * kHeadDim / 2};
  DeviceArray<int32_t> tokens{2 * kLaunchSteps};
  DeviceArray<Report> report{1};
  DeviceArray<float> logits{(size_t)MK_MAX_STEP_TOKENS * kVocab};
  HostStream stream;
  Params params{};
  uint32_t epochs = 0;  // layers done since the exchange buffers were zero
  int32_t length = 0;   // positions in the KV cache
  int32_t failure = MK_OK;
  std::string failure_text;
  std::atomic<bool> cancelled{false};

  mk_model(const void* blob, int context, double wait_limit_s) : context(context), wait_limit_s(wait_limit_s) {
    check(cudaMemcpy(weights.get(), blob, m::blob_bytes, cudaMemcpyHostToDevice), "copying the weights to the GPU");
    // Masked positions are multiplied by zero, so the cache must hold numbers; a zero word belongs to no epoch.
    check(cudaMemset(kv.get(), 0, kKvBytes), "clearing the KV cache");
    check(cudaMemset(exchange.get(), 0, kExchangeWords * sizeof(uint64_t)), "clearing the exchange buffers");
    check(cudaMemset(report.get(), 0, sizeof(Report)), "clearing the report");
    std::vector<float2> table((size_t)kMaxContext * kHeadDim / 2);
    for (size_t i = 0; i < table.size(); i++) {
      const float angle = (float)(i / (kHeadDim / 2)) * m::inv_freq[i % (kHeadDim / 2)];
      table[i] = make_float2(std::cos(angle) * m::rope_attention_factor, std::sin(angle) * m::rope_attention_factor);
    }
    check(cudaMemcpy(rope.get(), table.data(), table.size() * sizeof(float2), cudaMemcpyHostToDevice),
          "copying the RoPE table");
    check(cudaDeviceSynchronize(), "setting the model up");
    const uint8_t* w = weights.get();
    params.dense = w + m::dense_at;
    params.head = w + m::head_at;
    params.experts = w + m::experts_at;
    params.routers = w + m::routers_at;
    params.embedding = (const uint16_t*)(w + m::embedding_at);
    params.norms = (const float*)(w + m::norms_at);
    params.expert_scales = (const float2*)(w + m::expert_scales_at);
    params.rope = rope.get();
    params.kv = kv.get();
    params.exchange = exchange.get();
    params.report = report.get();
    params.wait_limit_ns = (uint64_t)(std::min(wait_limit_s, 1e9) * 1e9);
    params.qkv_flight = 2;
    params.dense_flight = 2;
    params.head_flight = 4;
    params.expert_flight = kExpertSlots;
    params.prefetch = 1;
  }

  // Puts one launch into the stream: `steps` tokens from position `position` on, the first of them at `first`; those
  // chosen follow it there.
  void launch(int32_t* first, int position, int steps) {
    // Progress is counted as epoch x kPhases + phase in 32 bits.
    if (epochs > UINT32_MAX / kPhases - (uint32_t)(kLaunchSteps + 1) * kLayers) {
      check(cudaMemsetAsync(exchange.get(), 0, kExchangeWords * sizeof(uint64_t), stream),
            "clearing the exchange buffers");
      epochs = 0;
    }
    Params p = params;
    p.tokens = first;
    p.first_epoch = epochs;
    p.position = position;
    p.steps = steps;
    p.log_splits = log_splits_at(position);
    p.attention_stride = kGrid / (kKvHeads << p.log_splits);
    uint32_t zero = 0;
    void* args[] = {&p, &zero};
    check(cudaLaunchCooperativeKernel(decode_kernel<false>, kGrid, kThreads, args, sizeof(Shared), stream),
          "launching the kernel");
    epochs += (uint32_t)(steps * kLayers);
  }

  // Tokens that are given, not chosen: a launch each, all in the stream at once. The token chosen after the last one is
  // returned. With logits, those of the last num_logits tokens are computed into `logits`.
  int32_t feed(const int32_t* given, int count, int num_logits) {
    // A launch writes the token it chooses behind the one it reads, so the given ones lie at even places.
    int32_t host[2 * kLaunchSteps] = {};
    for (int i = 0; i < count; i++) host[2 * i] = given[i];
    check(cudaMemcpyAsync(tokens.get(), host, sizeof host, cudaMemcpyHostToDevice, stream),
          "copying tokens to the GPU");
    for (int i = 0; i < count; i++) {
      launch(tokens.get() + 2 * i, length + i, 1);
      if (i < count - num_logits) continue;
      const uint64_t* hidden = exchange.get() + (epochs & 1) * kXWords + kXOut;  // epochs is that of the last layer now
      const float* norm = params.norms + kLayers * kNormLayer;
      float* out = logits.get() + (size_t)(i - count + num_logits) * kVocab;
      void* args[] = {&hidden, &norm, &params.head, &out};
      check(cudaLaunchKernel(logits_kernel, 4 * kGrid, kLogitThreads, args, 0, stream), "launching the logits kernel");
    }
    int32_t next = 0;
    finish(&next, tokens.get() + 2 * count - 1, 1);
    length += count;
    return next;
  }

  // Chooses `steps` tokens after `token`, which is at position `length`. The caller moves `length`.
  void decode(int32_t token, int steps, int32_t* chosen) {
    check(cudaMemcpyAsync(tokens.get(), &token, sizeof token, cudaMemcpyHostToDevice, stream),
          "copying a token to the GPU");
    launch(tokens.get(), length, steps);
    finish(chosen, tokens.get() + 1, steps);
  }

  // Waits for the stream, then takes `count` tokens. Throws what the kernel reported.
  void finish(int32_t* out, const int32_t* from, int count) {
    Report r;
    check(cudaMemcpyAsync(out, from, count * sizeof(int32_t), cudaMemcpyDeviceToHost, stream),
          "copying tokens from the GPU");
    check(cudaMemcpyAsync(&r, report.get(), sizeof r, cudaMemcpyDeviceToHost, stream),
          "copying the report from the GPU");
    check(cudaStreamSynchronize(stream), "running the kernel");
    if (r.expired) throw Failure(MK_ERR_TIMEOUT, describe(r, wait_limit_s));
  }
};

// Static functions, no unnamed namespace: nvcc names that after the full path of this file, and the bytes of the .so
// would depend on it.

// Plain memory: an object with a destructor would keep the library loaded until this thread ends.
static thread_local char last_error[1024];

static int32_t fail(int32_t code, const std::string& text) {
  snprintf(last_error, sizeof last_error, "%s", text.c_str());
  return code;
}

// Runs what works on the device. After a failure there the cache and the exchange buffers hold anything, so the model
// is of no further use and says so again.
template <class Work>
static int32_t guarded(mk_model* model, Work&& work) {
  if (model->failure != MK_OK) return fail(model->failure, model->failure_text);
  try {
    check(cudaSetDevice(0), "opening the GPU");
    return work();
  } catch (const Failure& e) {
    model->failure = e.code;
    model->failure_text = e.what();
    return fail(e.code, e.what());
  } catch (const std::exception& e) {
    return fail(MK_ERR_MEMORY, e.what());
  }
}

static int32_t check_tokens(const mk_model* model, const int32_t* tokens, int32_t count) {
  for (int32_t i = 0; i < count; i++)
    if (tokens[i] < 0 || tokens[i] >= kVocab)
      return fail(MK_ERR_ARGUMENT, "token " + std::to_string(tokens[i]) + " at " + std::to_string(i) +
                                       " is outside the vocabulary of " + std::to_string(kVocab));
  if (count > model->context - model->length)
    return fail(MK_ERR_CONTEXT, std::to_string(count) + " tokens do not fit: " + std::to_string(model->length) +
                                    " of " + std::to_string(model->context) + " positions are taken");
  return MK_OK;
}

static bool is_stop(const mk_request& r, int32_t token) {
  return std::find(r.stop_tokens, r.stop_tokens + r.num_stop_tokens, token) != r.stop_tokens + r.num_stop_tokens;
}

// Read by the build for its report: the shared memory that decode_kernel is launched with.
#ifndef __CUDA_ARCH__
__attribute__((section(".mkpack.shared"), used)) static const uint32_t launch_shared = sizeof(Shared);
#endif

#define MK_EXPORT extern "C" __attribute__((visibility("default")))

MK_EXPORT const char* mk_describe(void) { return m::description; }

MK_EXPORT const char* mk_last_error(void) { return last_error; }

MK_EXPORT int32_t mk_create(const mk_options* o, mk_model** out) {
  if (o->num_ranks != 1) return fail(MK_ERR_ARGUMENT, "compiled for 1 rank, given " + std::to_string(o->num_ranks));
  if (o->weights_bytes != m::blob_bytes)
    return fail(MK_ERR_ARGUMENT, "the weights must be " + std::to_string(m::blob_bytes) + " bytes, given " +
                                     std::to_string(o->weights_bytes));
  if (o->context < 0 || o->context > m::context)
    return fail(MK_ERR_ARGUMENT,
                "context must be at most " + std::to_string(m::context) + ", given " + std::to_string(o->context));
  if (!(o->wait_limit_s > 0)) return fail(MK_ERR_ARGUMENT, "wait_limit_s must be above 0");
  try {
    const uint64_t small = kExchangeWords * sizeof(uint64_t) + uint64_t{kMaxContext} * kHeadDim * sizeof(float) +
                           uint64_t{MK_MAX_STEP_TOKENS} * kVocab * sizeof(float) + (64 << 20);
    open_device(m::blob_bytes + kKvBytes + small, "weights " + gigabytes(m::blob_bytes) + ", KV cache of " +
                                                      std::to_string(kMaxContext) + " positions " +
                                                      gigabytes(kKvBytes));
    *out = new mk_model(o->weights[0], o->context ? o->context : m::context, o->wait_limit_s);
    return MK_OK;
  } catch (const Failure& e) {
    return fail(e.code, e.what());
  } catch (const std::exception& e) {
    return fail(MK_ERR_MEMORY, std::string("cannot set the model up: ") + e.what());
  }
}

MK_EXPORT void mk_destroy(mk_model* model) {
  cudaSetDevice(0);
  delete model;
}

MK_EXPORT int32_t mk_length(const mk_model* model) { return model->length; }

MK_EXPORT int32_t mk_truncate(mk_model* model, int32_t length) {
  if (length < 0 || length > model->length)
    return fail(MK_ERR_ARGUMENT,
                "cannot truncate " + std::to_string(model->length) + " positions to " + std::to_string(length));
  model->length = length;  // what lies behind it is masked until it is written again
  return MK_OK;
}

MK_EXPORT int32_t mk_step(mk_model* model, const int32_t* tokens, int32_t count, float* logits, int32_t num_logits) {
  if (count < 1 || count > MK_MAX_STEP_TOKENS)
    return fail(MK_ERR_ARGUMENT,
                "a step takes 1 to " + std::to_string(MK_MAX_STEP_TOKENS) + " tokens, given " + std::to_string(count));
  if (num_logits < 0 || num_logits > count)
    return fail(MK_ERR_ARGUMENT, "num_logits must be 0 to the number of tokens");
  if (int32_t code = check_tokens(model, tokens, count)) return code;
  return guarded(model, [&] {
    const int wanted = logits ? num_logits : 0;
    model->feed(tokens, count, wanted);
    if (wanted)
      check(cudaMemcpy(logits, model->logits.get(), (size_t)wanted * kVocab * sizeof(float), cudaMemcpyDeviceToHost),
            "copying logits from the GPU");
    return MK_OK;
  });
}

MK_EXPORT int32_t mk_generate(mk_model* model, const int32_t* prompt, int32_t num_prompt, const mk_request* request,
                              mk_token_callback callback, void* user, mk_result* result) {
  using clock = std::chrono::steady_clock;
  const mk_request& r = *request;
  if (num_prompt < 1) return fail(MK_ERR_ARGUMENT, "the prompt is empty");
  if (r.max_new_tokens < 1) return fail(MK_ERR_ARGUMENT, "max_new_tokens must be at least 1");
  if (!(r.temperature >= 0) || !(r.top_p > 0) || !(r.min_p >= 0 && r.min_p <= 1) || !(r.repetition_penalty > 0))
    return fail(MK_ERR_ARGUMENT, "sampling values out of range");
  if (r.temperature != 0.0f || r.repetition_penalty != 1.0f)
    return fail(MK_ERR_ARGUMENT,
                "the GPU kernel of this version chooses greedily only: temperature must be 0 and "
                "repetition_penalty 1, given " +
                    std::to_string(r.temperature) + " and " + std::to_string(r.repetition_penalty));
  if (int32_t code = check_tokens(model, prompt, num_prompt)) return code;
  model->cancelled.store(false);
  *result = {};
  result->num_prompt_tokens = num_prompt;
  const auto start = clock::now();
  auto first = start;
  const int32_t code = guarded(model, [&] {
    int32_t token = 0;
    for (int at = 0; at < num_prompt; at += kLaunchSteps) {
      if (model->cancelled.load()) {
        result->stop_reason = MK_STOP_CANCELLED;
        return MK_OK;
      }
      token = model->feed(prompt + at, std::min(num_prompt - at, kLaunchSteps), 0);
    }
    first = clock::now();
    // Tells the host of a chosen token; true when the generation ends with it. `length` positions are taken then.
    const auto ends = [&](int32_t chosen, int32_t length) {
      result->num_new_tokens++;
      const bool cancel = callback && callback(user, chosen) != 0;
      if (is_stop(r, chosen))
        result->stop_reason = MK_STOP_TOKEN;
      else if (cancel || model->cancelled.load())
        result->stop_reason = MK_STOP_CANCELLED;
      else if (result->num_new_tokens >= r.max_new_tokens)
        result->stop_reason = MK_STOP_LENGTH;
      else if (length >= model->context)
        result->stop_reason = MK_STOP_CONTEXT;
      else
        return false;
      return true;
    };
    bool ended = ends(token, model->length);
    while (!ended) {
      int32_t chosen[kLaunchSteps];
      const int steps =
          std::min({kLaunchSteps, r.max_new_tokens - result->num_new_tokens, model->context - model->length});
      model->decode(token, steps, chosen);
      const int32_t before = model->length;
      // What the launch ran beyond the token that ends it is forgotten: the cache keeps all but the last chosen token.
      for (int i = 0; i < steps && !ended; i++) {
        model->length = before + i + 1;
        ended = ends(chosen[i], model->length);
      }
      token = chosen[steps - 1];
    }
    return MK_OK;
  });
  if (result->num_new_tokens == 0) first = clock::now();
  result->prefill_s = std::chrono::duration<double>(first - start).count();
  result->decode_s = std::chrono::duration<double>(clock::now() - first).count();
  return code;
}

MK_EXPORT void mk_cancel(mk_model* model) { model->cancelled.store(true); }

MK_EXPORT int32_t mk_read_bandwidth(mk_model* model, double* bytes_per_second) {
  return guarded(model, [&] {
    *bytes_per_second = read_bandwidth(model->weights.get(), std::min<uint64_t>(m::blob_bytes, uint64_t{8} << 30));
    if (*bytes_per_second == 0) check(cudaDeviceSynchronize(), "measuring the read bandwidth");
    return MK_OK;
  });
}
