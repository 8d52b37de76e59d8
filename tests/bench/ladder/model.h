// Made by tests/test_cuda.py.
#pragma once
#include <cstddef>
#include <cstdint>
#include "abi.h"

namespace mk {
constexpr int kLayers = 48;
constexpr int kHidden = 2048;
constexpr int kRanks = 1;
constexpr int kPerDevice = 1;
constexpr int kHeads = 32;
constexpr int kKvHeads = 4;
constexpr int kModelKvHeads = 4;
constexpr int kHeadDim = 128;
constexpr int kRotary = 128;
constexpr int kExperts = 128;
constexpr int kTopK = 8;
constexpr int kMoeIntermediate = 768;
constexpr int kNarrowHidden = 0;
constexpr int kDenseIntermediate = 0;
constexpr int kVocab = 151936;
constexpr int kMaxContext = 8192;
constexpr int kGrid = 132;
constexpr int kDeviceGrid = 132;
constexpr bool kNormTopkProb = true;
constexpr bool kQkNorm = true;
constexpr bool kQkNormWeight = true;
constexpr bool kQkNormOverProjection = false;
constexpr bool kAttentionSinks = false;
constexpr bool kSigmoidScores = false;
constexpr bool kRouterBias = false;
constexpr bool kChoiceBias = false;
constexpr bool kExpertBias = false;
constexpr bool kClampedSwiglu = false;
constexpr bool kStepOnly = false;
constexpr bool kQkvBias = false;
constexpr bool kOutBias = false;
constexpr bool kAttentionOutNorm = false;
constexpr bool kAttentionGate = false;
constexpr bool kEmbedNorm = false;
constexpr bool kCenteredNorms = false;
constexpr bool kSandwich = false;
constexpr bool kDenseFp8 = false;
constexpr bool kAttentionFp8 = false;
constexpr bool kHeadFp8 = false;
constexpr bool kRouterF32 = false;
constexpr bool kExchangeFlags = false;
constexpr float kRmsEps = static_cast<float>(0x1.0c6f7a0b5ed8dp-20);
constexpr float kNormOffset = static_cast<float>(0x0.0p+0);
constexpr float kQkScale = static_cast<float>(0x1.0000000000000p+0);
constexpr float kRouterScale = static_cast<float>(0x1.0000000000000p+0);
constexpr float kNormTopkEps = static_cast<float>(0x0.0p+0);
constexpr float kRoutedScalingFactor = static_cast<float>(0x1.0000000000000p+0);
constexpr float kSwigluAlpha = static_cast<float>(0x1.0000000000000p+0);
constexpr float kSwigluLimit = static_cast<float>(0x0.0p+0);
constexpr float kSwigluUpOffset = static_cast<float>(0x0.0p+0);
constexpr float kExpertNormEps = static_cast<float>(0x0.0p+0);
constexpr float kSandwichEps = static_cast<float>(0x0.0p+0);
constexpr float kGateTemperature = static_cast<float>(0x1.0000000000000p+0);
constexpr float kGateFloor = static_cast<float>(0x0.0p+0);
constexpr float kLogitScale = static_cast<float>(0x1.0000000000000p+0);
constexpr float kLogitSoftcap = static_cast<float>(0x0.0p+0);
constexpr int kWindows[kLayers] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0};  // positions a query sees, 0: all
constexpr bool kDenseLayers[kLayers] = {false, false, false, false, false, false, false, false, false, false, false, false, false, false, false, false, false, false, false, false, false, false, false, false, false, false, false, false, false, false, false, false, false, false, false, false, false, false, false, false, false, false, false, false, false, false, false, false};
constexpr bool kRotatedLayers[kLayers] = {true, true, true, true, true, true, true, true, true, true, true, true, true, true, true, true, true, true, true, true, true, true, true, true, true, true, true, true, true, true, true, true, true, true, true, true, true, true, true, true, true, true, true, true, true, true, true, true};
}  // namespace mk

namespace mk::model {
constexpr int context = 8192;
constexpr int compute_capability = 90;  // times ten
constexpr uint64_t dense_at = 0;
constexpr uint64_t head_at = 1811939328;
constexpr uint64_t experts_at = 2434269184;
constexpr uint64_t expert_scales_at = 18741723136;
constexpr uint64_t dense_scales_at = 0;
constexpr uint64_t head_scales_at = 0;
constexpr uint64_t routers_at = 18741821440;
constexpr uint64_t embedding_at = 18766987264;
constexpr uint64_t norms_at = 19389317120;
constexpr uint64_t mlp_at = 0;
constexpr uint64_t mlp_scales_at = 0;
constexpr uint64_t qkv_bytes = 20971520;
constexpr uint64_t dense_layer_bytes = 37748736;
constexpr uint64_t head_bytes = 622329856;
constexpr uint64_t head_rows = 151936;
constexpr uint64_t pair_bytes = 1769472;
constexpr uint64_t expert_bytes = 2654208;
constexpr uint64_t dense_scale_layer_floats = 0;
constexpr uint64_t router_bytes = 524288;
constexpr uint64_t norm_layer_floats = 4352;
constexpr uint64_t moe_mlp_bytes = 0;
constexpr uint64_t dense_mlp_bytes = 0;
constexpr uint64_t moe_mlp_scale_floats = 0;
constexpr uint64_t dense_mlp_scale_floats = 0;
constexpr uint64_t blob_bytes = 19390160896;
// What the schedule was proven with.
constexpr uint64_t scheduled_grid = 132;
constexpr uint64_t owned_units = 1;
constexpr uint64_t owners = 128;
constexpr uint64_t down_units = 128;
constexpr uint64_t down_owned = 1;
constexpr uint64_t down_owners = 128;
constexpr uint64_t qkv_units = 640;
constexpr uint64_t head_units = 18992;
constexpr uint64_t pair_units = 96;
constexpr uint64_t pair_tile_bytes = 18432;
constexpr uint64_t down_tile_bytes = 6912;
constexpr uint64_t max_splits = 32;
constexpr uint64_t threads = 640;
constexpr uint64_t step_tokens = 16;
constexpr uint64_t slot_bytes = 18432;
constexpr uint64_t pair_groups = 4;
constexpr uint64_t down_pack = 2;
constexpr uint64_t down_copies = 2;
constexpr uint64_t step_shared_bytes = 229504;
constexpr uint64_t decode_shared_bytes = 229888;
constexpr uint64_t x_mid_at = 0;
constexpr uint64_t x_out_at = 8192;
constexpr uint64_t x_attention_at = 16384;
constexpr uint64_t x_experts_at = 24576;
constexpr uint64_t x_logits_at = 36864;
constexpr uint64_t x_qkv_at = 37888;
constexpr uint64_t x_partial_at = 43008;
constexpr uint64_t x_best_at = 176128;
constexpr uint64_t x_token_at = 176392;
constexpr uint64_t exchange_words = 352800;
constexpr uint64_t qkv_sends = 0;
constexpr uint64_t combine_sends = 0;
constexpr uint64_t output_sends = 0;
constexpr uint64_t attention_residual_sends = 0;
constexpr uint64_t pre_proj_sends = 0;
constexpr uint64_t gate_up_sends = 0;
constexpr uint64_t down_sends = 0;
constexpr uint64_t mix_sends = 0;
constexpr uint64_t post_proj_sends = 0;
constexpr uint64_t dense_gate_up_sends = 0;
constexpr uint64_t dense_down_sends = 0;
constexpr uint64_t mlp_residual_sends = 0;
constexpr uint64_t head_sends = 0;
constexpr uint64_t gather_logits_sends = 0;
constexpr bool fast_decode = true;
// Floats into a layer's part of the norms.
constexpr int attn_norm_at = 0;
constexpr int mlp_norm_at = 2048;
constexpr int q_norm_at = 4096;
constexpr int k_norm_at = 4224;
constexpr int q_bias_at = 4352;
constexpr int k_bias_at = 4352;
constexpr int v_bias_at = 4352;
constexpr int o_bias_at = 4352;
constexpr int sinks_at = 4352;
constexpr int attn_residual_gate_at = 4352;
constexpr int mlp_out_norm_at = 4352;
constexpr int mlp_residual_gate_at = 4352;
constexpr int pre_norm_at = 4352;
constexpr int expert_norm_at = 4352;
constexpr int router_bias_at = 4352;
constexpr int choice_bias_at = 4352;
constexpr int gate_up_bias_at = 4352;
constexpr int down_bias_at = 4352;
constexpr float rope_attention_factor = static_cast<float>(0x1.0000000000000p+0);
constexpr float inv_freq[] = {static_cast<float>(0x1.0000000000000p+0), static_cast<float>(0x1.9c9758e458666p-1), static_cast<float>(0x1.4c7bbfcc7c63cp-1), static_cast<float>(0x1.0beddc8f2a614p-1), static_cast<float>(0x1.afd1354c40d50p-2), static_cast<float>(0x1.5bf9fe0f1f09bp-2), static_cast<float>(0x1.186a0714c181bp-2), static_cast<float>(0x1.c3f06b4e265cep-3), static_cast<float>(0x1.6c310e3769f3fp-3), static_cast<float>(0x1.257b212323c52p-3), static_cast<float>(0x1.d8ffaadd33b09p-4), static_cast<float>(0x1.7d298d03c8b77p-4), static_cast<float>(0x1.33281b6744ae1p-4), static_cast<float>(0x1.ef0a236a1fa63p-5), static_cast<float>(0x1.8eec7def5d56cp-5), static_cast<float>(0x1.4178395851097p-5), static_cast<float>(0x1.030dc4ea03a72p-5), static_cast<float>(0x1.a1834ffb91514p-6), static_cast<float>(0x1.507315134befap-6), static_cast<float>(0x1.0f200f5013417p-6), static_cast<float>(0x1.b4f7e2b2c2a95p-7), static_cast<float>(0x1.6020a364b1284p-7), static_cast<float>(0x1.1bc25a3dde2acp-7), static_cast<float>(0x1.c9548b66b624bp-8), static_cast<float>(0x1.7089380241edfp-8), static_cast<float>(0x1.28fb5b85c8148p-8), static_cast<float>(0x1.dea41aad97caap-9), static_cast<float>(0x1.81b589f73aa4fp-9), static_cast<float>(0x1.36d219065ac0cp-9), static_cast<float>(0x1.f4f1e22073dabp-10), static_cast<float>(0x1.93aeb8454ade2p-10), static_cast<float>(0x1.454dec652bdb0p-10), static_cast<float>(0x1.0624dd2f1a9fcp-10), static_cast<float>(0x1.a67e4ebcc5047p-11), static_cast<float>(0x1.547686f641ef6p-11), static_cast<float>(0x1.125c04ab2d71fp-11), static_cast<float>(0x1.ba2e4b0e98677p-12), static_cast<float>(0x1.6453f5d20b4d8p-12), static_cast<float>(0x1.1f24e46f5db3ep-12), static_cast<float>(0x1.cec9221ac7070p-13), static_cast<float>(0x1.74eea61c12623p-13), static_cast<float>(0x1.2c8646cbeb48dp-13), static_cast<float>(0x1.e459c57e28a47p-14), static_cast<float>(0x1.864f697cb4f53p-14), static_cast<float>(0x1.3a874711aec6cp-14), static_cast<float>(0x1.faeba9626e3b9p-15), static_cast<float>(0x1.987f7ad03ecfap-15), static_cast<float>(0x1.492f5558635dap-15), static_cast<float>(0x1.09456549be1bdp-15), static_cast<float>(0x1.ab88830de4ad5p-16), static_cast<float>(0x1.58863a71f7be2p-16), static_cast<float>(0x1.15a1da6eab451p-16), static_cast<float>(0x1.bf749e693a057p-17), static_cast<float>(0x1.68941c0cff232p-17), static_cast<float>(0x1.2291c4db002bcp-17), static_cast<float>(0x1.d44e61b0db486p-18), static_cast<float>(0x1.7961810874a9fp-18), static_cast<float>(0x1.301c039b6ca04p-18), static_cast<float>(0x1.ea20dfed26b2dp-19), static_cast<float>(0x1.8af755fb1d54ep-19), static_cast<float>(0x1.3e47c7b496466p-19), static_cast<float>(0x1.007bd820ffecep-19), static_cast<float>(0x1.9d5ef1f0f0812p-20), static_cast<float>(0x1.4d1c97f4e952fp-20)};
constexpr char description[] = "{}";
}  // namespace mk::model

#include <cstddef>
#include <type_traits>
static_assert(MK_ABI_VERSION == 2, "MK_ABI_VERSION differs from mkpack/abi.py");
static_assert(MK_MAX_STEP_TOKENS == 16, "MK_MAX_STEP_TOKENS differs from mkpack/abi.py");
static_assert(MK_ADDRESS_BYTES == 128, "MK_ADDRESS_BYTES differs from mkpack/abi.py");
static_assert(sizeof(mk_options) == 40, "size of mk_options differs from mkpack/abi.py");
static_assert(offsetof(mk_options, weights) == 0, "offset of mk_options.weights differs from mkpack/abi.py");
static_assert(std::is_same<decltype(mk_options::weights), const void* const*>::value,
              "type of mk_options.weights differs from mkpack/abi.py");
static_assert(offsetof(mk_options, weights_bytes) == 8, "offset of mk_options.weights_bytes differs from mkpack/abi.py");
static_assert(std::is_same<decltype(mk_options::weights_bytes), uint64_t>::value,
              "type of mk_options.weights_bytes differs from mkpack/abi.py");
static_assert(offsetof(mk_options, num_ranks) == 16, "offset of mk_options.num_ranks differs from mkpack/abi.py");
static_assert(std::is_same<decltype(mk_options::num_ranks), int32_t>::value,
              "type of mk_options.num_ranks differs from mkpack/abi.py");
static_assert(offsetof(mk_options, threads) == 20, "offset of mk_options.threads differs from mkpack/abi.py");
static_assert(std::is_same<decltype(mk_options::threads), int32_t>::value,
              "type of mk_options.threads differs from mkpack/abi.py");
static_assert(offsetof(mk_options, context) == 24, "offset of mk_options.context differs from mkpack/abi.py");
static_assert(std::is_same<decltype(mk_options::context), int32_t>::value,
              "type of mk_options.context differs from mkpack/abi.py");
static_assert(offsetof(mk_options, flags) == 28, "offset of mk_options.flags differs from mkpack/abi.py");
static_assert(std::is_same<decltype(mk_options::flags), int32_t>::value,
              "type of mk_options.flags differs from mkpack/abi.py");
static_assert(offsetof(mk_options, wait_limit_s) == 32, "offset of mk_options.wait_limit_s differs from mkpack/abi.py");
static_assert(std::is_same<decltype(mk_options::wait_limit_s), double>::value,
              "type of mk_options.wait_limit_s differs from mkpack/abi.py");
static_assert(sizeof(mk_placement) == 16, "size of mk_placement differs from mkpack/abi.py");
static_assert(offsetof(mk_placement, first_rank) == 0, "offset of mk_placement.first_rank differs from mkpack/abi.py");
static_assert(std::is_same<decltype(mk_placement::first_rank), int32_t>::value,
              "type of mk_placement.first_rank differs from mkpack/abi.py");
static_assert(offsetof(mk_placement, num_ranks) == 4, "offset of mk_placement.num_ranks differs from mkpack/abi.py");
static_assert(std::is_same<decltype(mk_placement::num_ranks), int32_t>::value,
              "type of mk_placement.num_ranks differs from mkpack/abi.py");
static_assert(offsetof(mk_placement, device) == 8, "offset of mk_placement.device differs from mkpack/abi.py");
static_assert(std::is_same<decltype(mk_placement::device), int32_t>::value,
              "type of mk_placement.device differs from mkpack/abi.py");
static_assert(offsetof(mk_placement, pad) == 12, "offset of mk_placement.pad differs from mkpack/abi.py");
static_assert(std::is_same<decltype(mk_placement::pad), int32_t>::value,
              "type of mk_placement.pad differs from mkpack/abi.py");
static_assert(sizeof(mk_request) == 48, "size of mk_request differs from mkpack/abi.py");
static_assert(offsetof(mk_request, temperature) == 0, "offset of mk_request.temperature differs from mkpack/abi.py");
static_assert(std::is_same<decltype(mk_request::temperature), float>::value,
              "type of mk_request.temperature differs from mkpack/abi.py");
static_assert(offsetof(mk_request, top_p) == 4, "offset of mk_request.top_p differs from mkpack/abi.py");
static_assert(std::is_same<decltype(mk_request::top_p), float>::value,
              "type of mk_request.top_p differs from mkpack/abi.py");
static_assert(offsetof(mk_request, min_p) == 8, "offset of mk_request.min_p differs from mkpack/abi.py");
static_assert(std::is_same<decltype(mk_request::min_p), float>::value,
              "type of mk_request.min_p differs from mkpack/abi.py");
static_assert(offsetof(mk_request, repetition_penalty) == 12, "offset of mk_request.repetition_penalty differs from mkpack/abi.py");
static_assert(std::is_same<decltype(mk_request::repetition_penalty), float>::value,
              "type of mk_request.repetition_penalty differs from mkpack/abi.py");
static_assert(offsetof(mk_request, top_k) == 16, "offset of mk_request.top_k differs from mkpack/abi.py");
static_assert(std::is_same<decltype(mk_request::top_k), int32_t>::value,
              "type of mk_request.top_k differs from mkpack/abi.py");
static_assert(offsetof(mk_request, max_new_tokens) == 20, "offset of mk_request.max_new_tokens differs from mkpack/abi.py");
static_assert(std::is_same<decltype(mk_request::max_new_tokens), int32_t>::value,
              "type of mk_request.max_new_tokens differs from mkpack/abi.py");
static_assert(offsetof(mk_request, seed) == 24, "offset of mk_request.seed differs from mkpack/abi.py");
static_assert(std::is_same<decltype(mk_request::seed), uint64_t>::value,
              "type of mk_request.seed differs from mkpack/abi.py");
static_assert(offsetof(mk_request, stop_tokens) == 32, "offset of mk_request.stop_tokens differs from mkpack/abi.py");
static_assert(std::is_same<decltype(mk_request::stop_tokens), const int32_t*>::value,
              "type of mk_request.stop_tokens differs from mkpack/abi.py");
static_assert(offsetof(mk_request, num_stop_tokens) == 40, "offset of mk_request.num_stop_tokens differs from mkpack/abi.py");
static_assert(std::is_same<decltype(mk_request::num_stop_tokens), int32_t>::value,
              "type of mk_request.num_stop_tokens differs from mkpack/abi.py");
static_assert(offsetof(mk_request, pad) == 44, "offset of mk_request.pad differs from mkpack/abi.py");
static_assert(std::is_same<decltype(mk_request::pad), int32_t>::value,
              "type of mk_request.pad differs from mkpack/abi.py");
static_assert(sizeof(mk_result) == 32, "size of mk_result differs from mkpack/abi.py");
static_assert(offsetof(mk_result, stop_reason) == 0, "offset of mk_result.stop_reason differs from mkpack/abi.py");
static_assert(std::is_same<decltype(mk_result::stop_reason), int32_t>::value,
              "type of mk_result.stop_reason differs from mkpack/abi.py");
static_assert(offsetof(mk_result, num_new_tokens) == 4, "offset of mk_result.num_new_tokens differs from mkpack/abi.py");
static_assert(std::is_same<decltype(mk_result::num_new_tokens), int32_t>::value,
              "type of mk_result.num_new_tokens differs from mkpack/abi.py");
static_assert(offsetof(mk_result, num_prompt_tokens) == 8, "offset of mk_result.num_prompt_tokens differs from mkpack/abi.py");
static_assert(std::is_same<decltype(mk_result::num_prompt_tokens), int32_t>::value,
              "type of mk_result.num_prompt_tokens differs from mkpack/abi.py");
static_assert(offsetof(mk_result, pad) == 12, "offset of mk_result.pad differs from mkpack/abi.py");
static_assert(std::is_same<decltype(mk_result::pad), int32_t>::value,
              "type of mk_result.pad differs from mkpack/abi.py");
static_assert(offsetof(mk_result, prefill_s) == 16, "offset of mk_result.prefill_s differs from mkpack/abi.py");
static_assert(std::is_same<decltype(mk_result::prefill_s), double>::value,
              "type of mk_result.prefill_s differs from mkpack/abi.py");
static_assert(offsetof(mk_result, decode_s) == 24, "offset of mk_result.decode_s differs from mkpack/abi.py");
static_assert(std::is_same<decltype(mk_result::decode_s), double>::value,
              "type of mk_result.decode_s differs from mkpack/abi.py");
static_assert(sizeof(mk_timing) == 16, "size of mk_timing differs from mkpack/abi.py");
static_assert(offsetof(mk_timing, step_s) == 0, "offset of mk_timing.step_s differs from mkpack/abi.py");
static_assert(std::is_same<decltype(mk_timing::step_s), double>::value,
              "type of mk_timing.step_s differs from mkpack/abi.py");
static_assert(offsetof(mk_timing, experts) == 8, "offset of mk_timing.experts differs from mkpack/abi.py");
static_assert(std::is_same<decltype(mk_timing::experts), double>::value,
              "type of mk_timing.experts differs from mkpack/abi.py");
static_assert(sizeof(mk_rank_timing) == 48, "size of mk_rank_timing differs from mkpack/abi.py");
static_assert(offsetof(mk_rank_timing, step) == 0, "offset of mk_rank_timing.step differs from mkpack/abi.py");
static_assert(std::is_same<decltype(mk_rank_timing::step), mk_timing>::value,
              "type of mk_rank_timing.step differs from mkpack/abi.py");
static_assert(offsetof(mk_rank_timing, without) == 16, "offset of mk_rank_timing.without differs from mkpack/abi.py");
static_assert(std::is_same<decltype(mk_rank_timing::without), mk_timing>::value,
              "type of mk_rank_timing.without differs from mkpack/abi.py");
static_assert(offsetof(mk_rank_timing, exchanges) == 32, "offset of mk_rank_timing.exchanges differs from mkpack/abi.py");
static_assert(std::is_same<decltype(mk_rank_timing::exchanges), int64_t>::value,
              "type of mk_rank_timing.exchanges differs from mkpack/abi.py");
static_assert(offsetof(mk_rank_timing, bytes) == 40, "offset of mk_rank_timing.bytes differs from mkpack/abi.py");
static_assert(std::is_same<decltype(mk_rank_timing::bytes), int64_t>::value,
              "type of mk_rank_timing.bytes differs from mkpack/abi.py");
static_assert(sizeof(mk_trace_shape) == 24, "size of mk_trace_shape differs from mkpack/abi.py");
static_assert(offsetof(mk_trace_shape, layers) == 0, "offset of mk_trace_shape.layers differs from mkpack/abi.py");
static_assert(std::is_same<decltype(mk_trace_shape::layers), int32_t>::value,
              "type of mk_trace_shape.layers differs from mkpack/abi.py");
static_assert(offsetof(mk_trace_shape, rows) == 4, "offset of mk_trace_shape.rows differs from mkpack/abi.py");
static_assert(std::is_same<decltype(mk_trace_shape::rows), int32_t>::value,
              "type of mk_trace_shape.rows differs from mkpack/abi.py");
static_assert(offsetof(mk_trace_shape, sms) == 8, "offset of mk_trace_shape.sms differs from mkpack/abi.py");
static_assert(std::is_same<decltype(mk_trace_shape::sms), int32_t>::value,
              "type of mk_trace_shape.sms differs from mkpack/abi.py");
static_assert(offsetof(mk_trace_shape, pad) == 12, "offset of mk_trace_shape.pad differs from mkpack/abi.py");
static_assert(std::is_same<decltype(mk_trace_shape::pad), int32_t>::value,
              "type of mk_trace_shape.pad differs from mkpack/abi.py");
static_assert(offsetof(mk_trace_shape, names) == 16, "offset of mk_trace_shape.names differs from mkpack/abi.py");
static_assert(std::is_same<decltype(mk_trace_shape::names), const char*>::value,
              "type of mk_trace_shape.names differs from mkpack/abi.py");
