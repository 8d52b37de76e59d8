"""`model.h` of a CUDA target: the names that csrc/cuda/ reads, and the blob's offsets as this side computes them."""

from __future__ import annotations

from mkpack import abi
from mkpack.codegen import cpp_float, description
from mkpack.layout import align
from mkpack.layout_cuda import CudaLayout, step_only
from mkpack.manifest import Limits
from mkpack.schedule.cuda_decode import Decode
from mkpack.schedule.cuda_step import Step
from mkpack.schedule.shape import THREADS, Shape

SECTIONS = "dense head experts expert_scales dense_scales head_scales routers embedding norms mlp mlp_scales".split()


def _scheduled(shape: Shape) -> dict[str, int]:
    """Numbers that the schedule and the kernels each compute."""
    found = {
        "scheduled_grid": shape.grid,
        "owned_units": shape.owned_units,
        "owners": shape.owners,
        "down_units": shape.down_units,
        "down_owned": shape.down_owned,
        "down_owners": shape.down_owners,
        "qkv_units": shape.qkv_units,
        "head_units": shape.head_units,
        "pair_units": shape.pair_units,
        "pair_tile_bytes": shape.pair_tile,
        "down_tile_bytes": shape.down_tile,
        "max_splits": shape.max_splits,
        "threads": THREADS,
        "step_tokens": shape.step_tokens,
        "slot_bytes": shape.slot_bytes,
        "pair_groups": shape.pair_groups,
        "down_pack": shape.down_pack,
        "down_copies": shape.down_copies,
        "step_shared_bytes": shape.step_machine().shared_bytes,
        "decode_shared_bytes": shape.decode_machine().shared_bytes if shape.fast_decode else 0,
    }
    end = 0
    for words in Decode.exchange(shape):
        found[f"{words.name}_at"] = end
        end += words.elements * words.replicas
    found["exchange_words"] = 2 * align(end, 16)
    return found | {f"{phase}_sends": words for phase, words in Step(shape).sent().items()}


def cuda_header(
    layout: CudaLayout,
    limits: Limits,
    target: str,
    trace: bool = False,
    grid: int | None = None,
    exchange_flags: bool = False,
) -> str:
    """C++ text of model.h for one architecture of layout_cuda.GRID. trace: the kernel keeps times for `mkpack trace`.
    grid: blocks of a device, if not as many as the architecture has. exchange_flags: ranks exchange by flags, as the
    oracle of what they do otherwise.

    csrc/cuda/model.cu asserts the sizes in it against layout.cuh and the kernels' shared memory, so that the two cannot
    drift apart.
    """
    spec, shape = layout.spec, Shape(layout, limits.context, target, grid)
    assert spec.moe
    ints = {
        "kLayers": len(spec.layers),
        "kHidden": spec.hidden_size,
        "kRanks": layout.tp,
        "kPerDevice": layout.per_device,
        "kHeads": layout.heads.q_heads,
        "kKvHeads": layout.heads.kv_heads,
        "kModelKvHeads": spec.num_key_value_heads,
        "kHeadDim": spec.head_dim,
        "kRotary": 2 * len(spec.rope.inv_freq),
        "kExperts": spec.moe.num_experts,
        "kTopK": spec.moe.top_k,
        "kMoeIntermediate": spec.moe.intermediate_size,
        "kNarrowHidden": layout.narrow,
        "kDenseIntermediate": layout.dense_inner,
        "kVocab": spec.vocab_size,
        "kMaxContext": shape.context,
        "kGrid": shape.grid,
        "kDeviceGrid": shape.device_grid,
    }
    moe, swiglu = spec.moe, spec.moe.swiglu
    flags = {
        "kNormTopkProb": spec.moe.norm_topk_prob,
        "kQkNorm": spec.qk_norm,
        "kQkNormWeight": spec.qk_norm_weight,
        "kQkNormOverProjection": spec.qk_norm_over == "projection",
        "kAttentionSinks": spec.attention_sinks,
        "kSigmoidScores": moe.scoring == "sigmoid",
        "kRouterBias": moe.router_bias,
        "kChoiceBias": moe.choice_bias,
        "kExpertBias": moe.expert_bias,
        "kClampedSwiglu": swiglu is not None,
        "kStepOnly": step_only(spec),
        "kQkvBias": spec.qkv_bias,
        "kOutBias": spec.o_bias,
        "kAttentionOutNorm": spec.attention_out_norm,
        "kAttentionGate": spec.attention_gate,
        "kEmbedNorm": spec.embed_norm,
        "kCenteredNorms": spec.centered_norms,
        "kSandwich": spec.sandwich is not None,
        "kDenseFp8": layout.precision["dense"] == "fp8",
        "kAttentionFp8": layout.precision["attention"] == "fp8",
        "kHeadFp8": layout.precision["lm_head"] == "fp8",
        "kRouterF32": layout.router_format == "f32",
        "kExchangeFlags": exchange_flags,
    }
    sandwich = spec.sandwich
    floats = {
        "kRmsEps": spec.rms_norm_eps,
        "kNormOffset": 1.0 if spec.centered_norms else 0.0,
        "kQkScale": spec.qk_scale,
        "kRouterScale": moe.router_scale,
        "kNormTopkEps": moe.norm_topk_eps,
        "kRoutedScalingFactor": moe.routed_scaling_factor,
        "kSwigluAlpha": swiglu.alpha if swiglu else 1.0,
        "kSwigluLimit": swiglu.limit if swiglu else 0.0,
        "kSwigluUpOffset": swiglu.up_offset if swiglu else 0.0,
        "kExpertNormEps": spec.moe.expert_norm_eps,
        "kSandwichEps": sandwich.eps if sandwich else 0.0,
        "kGateTemperature": sandwich.gate_temperature if sandwich else 1.0,
        "kGateFloor": sandwich.gate_floor if sandwich else 0.0,
        "kLogitScale": spec.logit_scale,
        "kLogitSoftcap": spec.logit_softcap or 0.0,
    }
    dense, rotated = (
        ", ".join(str(x).lower() for x in xs)
        for xs in zip(*((not layer.moe, layer.rope) for layer in spec.layers), strict=True)
    )
    windows = ", ".join(str(layer.sliding_window or 0) for layer in spec.layers)
    # Scales that this model does without are at 0.
    offsets = {f"{name}_at": layout.offset(name) if name in layout else 0 for name in SECTIONS}
    sizes = {
        "qkv_bytes": layout.qkv_bytes,
        "dense_layer_bytes": layout.dense_layer_bytes,
        "head_bytes": layout.head_bytes,
        "head_rows": layout.head_rows,
        "pair_bytes": layout.pair_bytes,
        "expert_bytes": layout.expert_bytes,
        "dense_scale_layer_floats": layout.dense_scale_layer,
        "router_bytes": layout.router_bytes,
        "norm_layer_floats": layout.norm_layer,
        "moe_mlp_bytes": layout.mlp[0][0],
        "dense_mlp_bytes": layout.mlp[1][0],
        "moe_mlp_scale_floats": layout.mlp[0][1],
        "dense_mlp_scale_floats": layout.mlp[1][1],
        "blob_bytes": layout.nbytes,
    }
    vectors = {f"{name}_at": at for name, (at, _) in layout.vectors.items()}
    text = description(layout, limits, target, trace)
    return "\n".join(
        [
            "// Generated by mkpack: one model on one target. Do not edit.",
            "#pragma once",
            "#include <cstddef>",
            "#include <cstdint>",
            '#include "abi.h"',
            *(["#define MK_TRACE"] if trace else []),
            "",
            "namespace mk {",
            *(f"constexpr int {name} = {value};" for name, value in ints.items()),
            *(f"constexpr bool {name} = {str(value).lower()};" for name, value in flags.items()),
            *(f"constexpr float {name} = {cpp_float(value)};" for name, value in floats.items()),
            f"constexpr int kWindows[kLayers] = {{{windows}}};  // positions a query sees, 0: all",
            f"constexpr bool kDenseLayers[kLayers] = {{{dense}}};",
            f"constexpr bool kRotatedLayers[kLayers] = {{{rotated}}};",
            "}  // namespace mk",
            "",
            "namespace mk::model {",
            f"constexpr int context = {limits.context};",
            f"constexpr int compute_capability = {int(target.removeprefix('sm_').removesuffix('a'))};  // times ten",
            *(f"constexpr uint64_t {name} = {value};" for name, value in {**offsets, **sizes}.items()),
            "// What the schedule was proven with.",
            *(f"constexpr uint64_t {name} = {value};" for name, value in _scheduled(shape).items()),
            f"constexpr bool fast_decode = {str(shape.fast_decode).lower()};",
            "// Floats into a layer's part of the norms.",
            *(f"constexpr int {name} = {value};" for name, value in vectors.items()),
            f"constexpr float rope_attention_factor = {cpp_float(spec.rope.attention_factor)};",
            f"constexpr float inv_freq[] = {{{', '.join(map(cpp_float, spec.rope.inv_freq))}}};",
            f'constexpr char description[] = R"mk({text})mk";',
            "}  // namespace mk::model",
            "",
            abi.c_asserts(),
        ]
    )
