// The C ABI of a CUDA target: one request at a time, on one GPU or ranks on several, around the resident kernel.
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
#include "measure.cuh"
#include "processes.cuh"

namespace mk {

// The blob as mkpack/layout_cuda.py laid it out, against layout.cuh.
static_assert(m::qkv_bytes == kQkvBytes && m::dense_layer_bytes == kDenseLayerBytes && m::head_bytes == kHeadBytes &&
              m::head_rows == kHeadRows && m::pair_bytes == kPairBytes && m::expert_bytes == kExpertBytes &&
              m::dense_scale_layer_floats == kDenseScaleLayer && m::router_bytes == kRouterBytes &&
              m::norm_layer_floats == kNormLayer && m::moe_mlp_bytes == kMoeMlpBytes &&
              m::dense_mlp_bytes == kDenseMlpBytes && m::moe_mlp_scale_floats == kMoeMlpScales &&
              m::dense_mlp_scale_floats == kDenseMlpScales);
static_assert(m::attn_norm_at == kNormInput && m::mlp_norm_at == kNormPost && m::q_norm_at == kNormQ &&
              m::k_norm_at == kNormK && m::q_bias_at == kBiasQkv &&
              m::k_bias_at == kBiasQkv + (kQkvBias ? kQRows : 0) &&
              m::v_bias_at == kBiasQkv + (kQkvBias ? kQRows + kKvRows : 0) && m::o_bias_at == kBiasOut &&
              m::sinks_at == kSinks && m::attn_residual_gate_at == kGateAttention && m::mlp_out_norm_at == kNormMlpOut &&
              m::mlp_residual_gate_at == kGateMlp && m::pre_norm_at == kNormPre && m::expert_norm_at == kNormExpert &&
              m::router_bias_at == kBiasRouter && m::choice_bias_at == kBiasChoice && m::gate_up_bias_at == kBiasPair &&
              m::down_bias_at == kBiasDown);
// Every section is as large as the kernel believes, and ends before the next begins.
constexpr bool sections_fit() {
  constexpr uint64_t layers = kLayers, vocab = kVocab, hidden = kHidden;
  const struct {
    uint64_t at, bytes;
  } sections[] = {
      {m::dense_at, layers * kDenseLayerBytes},
      {m::head_at, kHeadBytes},
      {m::experts_at, kMoeCount * kExperts * kExpertBytes},
      {m::expert_scales_at, kMoeCount * kExperts * 4 * sizeof(float)},
      {m::dense_scales_at, layers * kDenseScaleLayer * sizeof(float)},
      {m::head_scales_at, kHeadFp8 ? kHeadRows * sizeof(float) : 0},
      {m::routers_at, kMoeCount * kRouterBytes},
      {m::embedding_at, vocab * hidden * 2},
      {m::norms_at, kNorms * sizeof(float)},
      {m::mlp_at, kMlpBytes},
      {m::mlp_scales_at, kMlpScales * sizeof(float)},
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
// The schedule that mkpack/schedule proved, against the kernels that follow it.
static_assert(m::scheduled_grid == kGrid, "model.h was made for another grid: give cuda_header() this one");
static_assert(m::owned_units == kOwnedUnits && m::owners == kOwners && m::down_units == kDownUnits &&
              m::down_owned == kDownOwned && m::down_owners == kDownOwners && m::qkv_units == kQkvUnits &&
              m::head_units == kHeadUnits && m::pair_units == kPairUnits && m::pair_tile_bytes == kPairTileBytes &&
              m::down_tile_bytes == kDownTileBytes && m::max_splits == kMaxSplits && m::threads == kThreads);
static_assert(m::step_tokens == kStepTokens && m::slot_bytes == kSlotBytes && m::pair_groups == kPairGroups &&
              m::down_pack == kDownPack && m::down_copies == kDownCopies);
static_assert(m::step_shared_bytes == sizeof(StepShared), "Shape.step_machine() lists other members");
static_assert(m::fast_decode == kFastDecode, "Shape.fast_decode admits other models");
static_assert(!kFastDecode || m::decode_shared_bytes == sizeof(DecodeShared), "Shape.decode_machine() lists other members");
static_assert(m::x_mid_at == kXMid && m::x_out_at == kXOut && m::x_attention_at == kXAttention &&
              m::x_experts_at == kXExperts && m::x_logits_at == kXLogits && m::x_qkv_at == kXQkv &&
              m::x_partial_at == kXPartial && m::x_best_at == kXBest && m::x_token_at == kXToken &&
              m::exchange_words == kExchangeWords);
constexpr int kSentEnd = kSentSquares + (kSandwich ? 0 : kSentOut);  // of a layer's last product
constexpr uint64_t sent(int words) { return kRanks > 1 ? words : 0; }
static_assert(m::qkv_sends == sent(kQkWhole ? kStepTokens * kSentQk : 0) && m::combine_sends == sent(kStepTokens * kSentAttention) &&
                  m::output_sends == sent(kStepTokens * (kSentSquares + (kSandwich ? 0 : kSentMid))) &&
                  m::attention_residual_sends == sent(kSandwich ? kStepTokens * (kSentMid + kSentSquares) : 0) &&
                  m::pre_proj_sends == sent(kNarrow ? kStepTokens * (kSentNarrow + kSentNarrowSquares) : 0) &&
                  m::gate_up_sends == sent(kStepTokens * kTopK * kSentSwiglu) &&
                  m::down_sends == sent(kStepTokens * (kNarrow ? kTopK * kSentPairSquares : kSentEnd)) &&
                  m::mix_sends == sent(kNarrow ? kStepTokens * kSentMixed : 0) &&
                  m::post_proj_sends == sent(kNarrow ? kStepTokens * kSentEnd : 0) &&
                  m::dense_gate_up_sends == sent(kHasDense ? kStepTokens * kSentDense : 0) &&
                  m::dense_down_sends == sent(kHasDense ? kStepTokens * kSentEnd : 0) &&
                  m::mlp_residual_sends == sent(kSandwich ? kStepTokens * (kSentOut + kSentSquares) : 0) &&
                  m::head_sends == sent(kSentBest + kSentCancel) && m::gather_logits_sends == sent(kSentLogits),
              "ranks send other words than Step.phases() says");
static_assert(sizeof m::inv_freq == kRotary / 2 * sizeof(float) && m::context <= kMaxContext);

}  // namespace mk

using namespace mk;

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
    check(cudaSetDevice(model->device), "opening the GPU");
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
  if (!model->connected())
    return fail(MK_ERR_ARGUMENT, "its ranks do not know the memory of those in other processes: mk_connect tells them");
  for (int32_t i = 0; i < count; i++)
    if (tokens[i] < 0 || tokens[i] >= kVocab)
      return fail(MK_ERR_ARGUMENT, "token " + std::to_string(tokens[i]) + " at " + std::to_string(i) +
                                       " is outside the vocabulary of " + std::to_string(kVocab));
  if (count > model->context - model->length)
    return fail(MK_ERR_CONTEXT, std::to_string(count) + " tokens do not fit: " + std::to_string(model->length) +
                                    " of " + std::to_string(model->context) + " positions are taken");
  return MK_OK;
}

static int32_t check_step(const mk_model* model, const int32_t* tokens, int32_t count) {
  if (count < 1 || count > MK_MAX_STEP_TOKENS)
    return fail(MK_ERR_ARGUMENT,
                "a step takes 1 to " + std::to_string(MK_MAX_STEP_TOKENS) + " tokens, given " + std::to_string(count));
  return check_tokens(model, tokens, count);
}

// For what only ranks of one process do.
static int32_t check_alone(const mk_model* model, const char* doing) {
  if (model->placement.alone()) return MK_OK;
  return fail(MK_ERR_ARGUMENT, std::string(doing) + " needs all ranks in one process");
}

// Read by the build for its report: the shared memory that the kernels are launched with.
#ifndef __CUDA_ARCH__
__attribute__((section(".mkpack.shared"), used)) static const uint32_t launch_shared[] = {
    sizeof(StepShared), kFastDecode ? sizeof(DecodeShared) : 0};
#endif

#define MK_EXPORT extern "C" __attribute__((visibility("default")))

MK_EXPORT const char* mk_describe(void) { return m::description; }

MK_EXPORT const char* mk_last_error(void) { return last_error; }

// placed: NULL when all ranks are here.
static int32_t create(const mk_options* o, const mk_placement* placed, mk_model** out) {
  if (o->num_ranks != kRanks)
    return fail(MK_ERR_ARGUMENT, "compiled for " + std::to_string(kRanks) + (kRanks == 1 ? " rank" : " ranks") + ", given " +
                                     std::to_string(o->num_ranks));
  if (o->flags & ~MK_OPTION_LOOPED) return fail(MK_ERR_ARGUMENT, "flags has bits that this kernel does not know");
  const bool looped = o->flags & MK_OPTION_LOOPED;
  if (looped && kRanks == 1) return fail(MK_ERR_ARGUMENT, "compiled for 1 rank, which has no peers to loop back");
  if (placed && (looped || placed->num_ranks < 1 || placed->num_ranks > kPerDevice || placed->first_rank < 0 ||
                 placed->first_rank > kRanks - placed->num_ranks || placed->device < 0))
    return fail(MK_ERR_ARGUMENT, "a process has 1 to " + std::to_string(kPerDevice) + " of the " + std::to_string(kRanks) +
                                     " ranks, on one GPU; given " + std::to_string(placed->num_ranks) + " from rank " +
                                     std::to_string(placed->first_rank) + " on");
  if (o->weights_bytes != m::blob_bytes)
    return fail(MK_ERR_ARGUMENT, "the weights must be " + std::to_string(m::blob_bytes) + " bytes, given " +
                                     std::to_string(o->weights_bytes));
  if (o->context < 0 || o->context > m::context)
    return fail(MK_ERR_ARGUMENT,
                "context must be at most " + std::to_string(m::context) + ", given " + std::to_string(o->context));
  if (!(o->wait_limit_s > 0)) return fail(MK_ERR_ARGUMENT, "wait_limit_s must be above 0");
  try {
    const uint64_t small = Workspace().bytes + uint64_t{kMaxContext} * kRotary * sizeof(float) + (64 << 20);
    const int devices = count_devices();
    if (placed && placed->device >= devices)
      throw Failure(MK_ERR_DEVICE, "GPU " + std::to_string(placed->device) + " is not among the " + std::to_string(devices) +
                                       " that this process sees");
    const int per_device = placed ? placed->num_ranks : looped ? 1 : ranks_a_device(devices);
    const Placement placement = placed ? Placement{placed->first_rank, placed->num_ranks, placed->device, per_device}
                                       : Placement{0, kRanks, 0, per_device};
    const int used = placed || looped ? 1 : kRanks / per_device;
    for (int device = placement.device + used - 1; device >= placement.device; device--)  // the first is left open
      open_device<kFastDecode>(device, per_device, per_device * (m::blob_bytes + kKvBytes + small),
                               (per_device == 1 ? "" : std::to_string(per_device) + " times ") + "weights " +
                                   gigabytes(m::blob_bytes) + ", KV cache of " + std::to_string(kMaxContext) +
                                   " positions " + gigabytes(kKvBytes));
    *out = new mk_model(o->weights, placement, o->context ? o->context : m::context, o->wait_limit_s, looped);
    return MK_OK;
  } catch (const Failure& e) {
    return fail(e.code, e.what());
  } catch (const std::exception& e) {
    return fail(MK_ERR_MEMORY, std::string("cannot set the model up: ") + e.what());
  }
}

MK_EXPORT int32_t mk_create(const mk_options* o, mk_model** out) { return create(o, nullptr, out); }

MK_EXPORT int32_t mk_create_placed(const mk_options* o, const mk_placement* placement, mk_model** out) {
  return create(o, placement, out);
}

MK_EXPORT int32_t mk_addresses(mk_model* model, uint8_t* addresses) {
  if (model->placement.alone()) return fail(MK_ERR_ARGUMENT, "all its ranks are in this process");
  return guarded(model, [&] {
    model->addresses(addresses);
    return MK_OK;
  });
}

MK_EXPORT int32_t mk_connect(mk_model* model, const uint8_t* addresses) {
  if (model->placement.alone()) return fail(MK_ERR_ARGUMENT, "all its ranks are in this process");
  if (!addresses) {  // also of a model that failed
    cudaSetDevice(model->device);
    model->disconnect();
    return MK_OK;
  }
  return guarded(model, [&] {
    model->connect(addresses);
    return MK_OK;
  });
}

MK_EXPORT void mk_destroy(mk_model* model) {
  cudaSetDevice(model->device);
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

MK_EXPORT int32_t mk_step_taps(mk_model* model, const int32_t* tokens, int32_t count, float* logits, int32_t num_logits,
                               const int32_t* layers, int32_t num_layers, float* hidden) {
  if (int32_t code = check_step(model, tokens, count)) return code;
  if (num_logits < 0 || num_logits > count)
    return fail(MK_ERR_ARGUMENT, "num_logits must be 0 to the number of tokens");
  for (int32_t i = 0; i < num_layers; i++)
    if (layers[i] < 0 || layers[i] >= kLayers)
      return fail(MK_ERR_ARGUMENT, "layer " + std::to_string(layers[i]) + " is not one of the " + std::to_string(kLayers) +
                                       " layers");
  if (num_layers > 0)
    if (int32_t code = check_alone(model, "telling hidden states")) return code;
  return guarded(model, [&] {
    if (num_layers > 0 && !model->taps)
      model->taps = std::make_unique<DeviceArray<float>>((size_t)kLayers * kMaxTokens * kHidden);
    const bool speaks = model->placement.speaks();
    const int wanted = logits || !speaks ? num_logits : 0;
    model->give(tokens, count);
    model->params.taps = num_layers > 0 ? model->taps->get() : nullptr;
    model->launch(count, 0, 0, wanted, nullptr);
    model->params.taps = nullptr;
    model->finish();
    model->length += count;
    if (wanted && speaks) model->await_others();
    for (int i = 0; i < wanted && speaks; i++)
      model->copy_logits(count - wanted + i, logits + (size_t)i * kVocab);
    for (int i = 0; i < num_layers; i++)
      check(cudaMemcpy(hidden + (size_t)i * count * kHidden, model->taps->get() + (size_t)layers[i] * kMaxTokens * kHidden,
                       (size_t)count * kHidden * sizeof(float), cudaMemcpyDeviceToHost),
            "copying hidden states from the GPU");
    return MK_OK;
  });
}

MK_EXPORT int32_t mk_step(mk_model* model, const int32_t* tokens, int32_t count, float* logits, int32_t num_logits) {
  return mk_step_taps(model, tokens, count, logits, num_logits, nullptr, 0, nullptr);
}

MK_EXPORT int32_t mk_generate(mk_model* model, const int32_t* prompt, int32_t num_prompt, const mk_request* request,
                              mk_token_callback callback, void* user, mk_result* result) {
  using clock = std::chrono::steady_clock;
  const mk_request& r = *request;
  if (num_prompt < 1) return fail(MK_ERR_ARGUMENT, "the prompt is empty");
  if (r.max_new_tokens < 1) return fail(MK_ERR_ARGUMENT, "max_new_tokens must be at least 1");
  if (!(r.temperature >= 0) || !(r.top_p > 0) || !(r.min_p >= 0 && r.min_p <= 1) || !(r.repetition_penalty > 0))
    return fail(MK_ERR_ARGUMENT, "sampling values out of range");
  if (r.num_stop_tokens < 0 || r.num_stop_tokens > kMaxStopTokens)
    return fail(MK_ERR_ARGUMENT, "at most " + std::to_string(kMaxStopTokens) + " stop tokens, given " +
                                     std::to_string(r.num_stop_tokens));
  if (int32_t code = check_tokens(model, prompt, num_prompt)) return code;
  model->cancelled.store(false);
  *result = {};
  result->num_prompt_tokens = num_prompt;
  const auto start = clock::now();
  auto first = start;
  const int32_t code = guarded(model, [&] {
    if (!model->placement.speaks()) {
      follow(model, prompt, num_prompt, r, callback, user, result);
      return MK_OK;
    }
    const int end = model->length + num_prompt;
    // A token more than there are positions left: the last one chosen is not run.
    const int most = std::min(r.max_new_tokens, model->context - end + 1);
    model->mail.clear(most);
    model->give(prompt, num_prompt);
    model->launch(num_prompt, 1, 0, 0, &r);
    bool ended = false;
    for (int i = 0; !ended; i++) {
      const int32_t token = model->await_token(i);
      if (token < 0) break;  // finish() says why
      result->num_new_tokens++;
      if (i == 0) first = clock::now();
      const bool cancel = (callback && callback(user, token) != 0) || model->cancelled.load();
      if (cancel) model->mail->cancel = 1;
      const int32_t reason = reason_to_stop(model, r, end, i, token, cancel);
      ended = reason >= 0;
      if (ended) result->stop_reason = reason;
      // Other processes cannot know that it was cancelled, and launch: see follow().
      if (i == 0 && (!ended || (reason == MK_STOP_CANCELLED && !model->placement.alone() &&
                                reason_to_stop(model, r, end, i, token, false) < 0))) {
        model->finish();
        model->length = end;
        if constexpr (kFastDecode)
          model->launch_decode<kFastDecode>(r.max_new_tokens - 1, 1, r);
        else
          model->launch(1, r.max_new_tokens - 1, 1, 0, &r);
      }
    }
    model->finish();
    // What the kernel ran beyond the token that ended it is forgotten: the cache keeps all but the last chosen token.
    model->length = end + std::max(0, result->num_new_tokens - 1);
    return MK_OK;
  });
  if (result->num_new_tokens == 0) first = clock::now();
  result->prefill_s = std::chrono::duration<double>(first - start).count();
  result->decode_s = std::chrono::duration<double>(clock::now() - first).count();
  return code;
}

MK_EXPORT void mk_cancel(mk_model* model) {
  model->cancelled.store(true);
  model->mail->cancel = 1;
}

MK_EXPORT int32_t mk_read_bandwidth(mk_model* model, double* bytes_per_second) {
  return guarded(model, [&] {
    *bytes_per_second = read_bandwidth(model->weights.get(), std::min<uint64_t>(m::blob_bytes, uint64_t{8} << 30));
    if (*bytes_per_second == 0) check(cudaDeviceSynchronize(), "measuring the read bandwidth");
    return MK_OK;
  });
}

MK_EXPORT int32_t mk_time_step(mk_model* model, const int32_t* tokens, int32_t count, mk_timing* timing) {
  if (int32_t code = check_step(model, tokens, count)) return code;
  return guarded(model, [&] {
    *timing = time_step(*model, tokens, count);
    return MK_OK;
  });
}

MK_EXPORT int32_t mk_time_rank(mk_model* model, const int32_t* tokens, int32_t count, mk_rank_timing* timing) {
  if (!model->looped) return fail(MK_ERR_ARGUMENT, "its ranks are not looped back: MK_OPTION_LOOPED loads one so");
  if (int32_t code = check_step(model, tokens, count)) return code;
  return guarded(model, [&] {
    *timing = time_rank(*model, tokens, count);
    return MK_OK;
  });
}

MK_EXPORT int32_t mk_trace(mk_model* model, const int32_t* tokens, int32_t count, int32_t steps, int64_t* stamps,
                           mk_trace_shape* shape) {
  if constexpr (!kTraced)
    return fail(MK_ERR_ARGUMENT, "this kernel keeps no times; build the artifact again with --trace");
  *shape = trace_shape(count);
  if (!stamps) return MK_OK;
  if (int32_t code = check_alone(model, "tracing")) return code;
  if (int32_t code = check_step(model, tokens, count)) return code;
  if (steps < 1) return fail(MK_ERR_ARGUMENT, "at least one step must be traced");
  if (std::max(count, steps + kTraceBefore) > model->context - model->length)
    return fail(MK_ERR_CONTEXT, "the traced steps do not fit behind " + std::to_string(model->length) + " of " +
                                    std::to_string(model->context) + " positions");
  return guarded(model, [&] {
    trace_steps(*model, tokens, count, steps, stamps);
    return MK_OK;
  });
}
