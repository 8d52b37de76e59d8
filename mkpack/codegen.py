"""`model.h`: everything about one model that its kernel knows at compile time."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from mkpack import abi
from mkpack.digest import digest_of
from mkpack.layout import Layout, ceil_div, tile_bytes
from mkpack.manifest import Limits
from mkpack.schedule import Schedule, cpu

if TYPE_CHECKING:
    from mkpack.layout_cuda import CudaLayout

_LAYER_FIELDS = (
    "attn_norm qkv qkv_scale qkv_bias q_norm k_norm sinks o o_scale o_bias attn_residual_gate mlp_norm router "
    "router_bias pre_proj pre_proj_scale choice_bias pre_norm gate_up gate_up_scale gate_up_bias down_input_scale "
    "down down_scale down_bias expert_norm post_proj post_proj_scale mlp_out_norm mlp_residual_gate"
).split()


def description(layout: Layout | CudaLayout, limits: Limits, target: str, trace: bool = False) -> str:
    """The JSON text compiled into the .so: what must agree between a kernel and the weights it is given. trace: the
    kernel keeps times for `mkpack trace`."""
    facts: dict[str, object] = {
        "abi": abi.ABI_VERSION,
        "target": target,
        "tp": layout.tp,
        "context": limits.context,
        "tokens_per_step": limits.tokens_per_step,
        "weights_bytes": layout.nbytes,
        "spec": digest_of(layout.spec.model_dump(mode="json")),
        "sections": digest_of([s.model_dump(mode="json") for s in layout.sections]),
    }
    if layout.down_input:
        facts["down_input"] = layout.down_input
    if layout.per_device > 1:
        facts["per_device"] = layout.per_device
    return json.dumps({**facts, "trace": True} if trace else facts, sort_keys=True)


def _section(field: str) -> str:
    """The section, within a layer, whose offset a field of `struct Layer` is: scales of a matrix have its name."""
    matrix = field.removesuffix("_scale")
    return f"{matrix}.scale" if matrix != field and matrix in _LAYER_FIELDS else field


def _layers(layout: Layout) -> str:
    rows = []
    for i, layer in enumerate(layout.spec.layers):
        names = [f"layers.{i}.{_section(f)}" for f in _LAYER_FIELDS]
        offsets = [str(layout.section(n).offset) if n in layout else "0" for n in names]
        rows.append(
            f"    {{{', '.join(offsets)}, {layer.sliding_window or 0}, {cpp_bool(layer.moe)}, {cpp_bool(layer.rope)}}},"
        )
    return "\n".join(rows)


def _schedule(schedule: Schedule) -> list[str]:
    """The order of the phases, the barriers between them, and the sizes of the buffers they share."""
    barriers, rows = schedule.barriers(), []
    for i, p in enumerate(schedule.phases):
        if p.items.workers == "first" or any(w.by == "last arriver" for w in p.waits):
            continue
        # What runs where its last item arrives is part of the phase before: the barrier comes after both.
        after = schedule.phases[i + 1]
        end = after if any(w.by == "last arriver" for w in after.waits) else p
        layer, words = -1 if p.layer is None else p.layer, end.exchange.words if end.exchange else 0
        rows.append(f"    {{Phase::{p.name}, {layer}, {cpp_bool(end.key in barriers)}, {words}}},")
    names = ", ".join(f'"{name}"' for name in cpu.PHASES)
    sizes = {b.name: b.elements for b in schedule.buffers}
    return [
        f"enum class Phase {{ {', '.join(cpu.PHASES)} }};",
        f"inline constexpr const char* phase_names[] = {{{names}}};",
        "struct Stage {",
        "  Phase phase;",
        "  int layer;  // -1: none",
        "  bool barrier;  // all threads meet after it",
        "  int64_t words;  // that a rank with memory of its own then sends to each other, at most; 0: none",
        "};",
        "inline constexpr Stage stages[] = {  // what all threads run, between the phases of thread 0",
        *rows,
        "};",
        f"inline constexpr int step_words = {cpu.STEP_WORDS + schedule.tokens_per_step};  // told before every step",
        f"inline constexpr int attention_chunk = {cpu.CHUNK};",
        "// Elements of every buffer, 0 where this model does without.",
        *(f"inline constexpr int64_t buffer_{name} = {sizes.get(name, 0)};" for name in cpu.BUFFERS),
    ]


def cpp_bool(x: bool) -> str:
    return "true" if x else "false"


def cpp_float(x: float) -> str:
    """A C++ literal with every bit of the float."""
    return f"static_cast<float>({float(x).hex()})"


def model_header(layout: Layout, limits: Limits, target: str) -> str:
    """C++ text of model.h for one target. Byte sizes computed here are asserted against csrc/common/format.h, those of
    buffers against csrc/cpu/state.h."""
    spec, tp = layout.spec, layout.tp
    head = "embed" if layout.tied else "lm_head"
    moe, dense, sandwich = spec.moe, spec.dense_intermediate_size, spec.sandwich
    swiglu = moe.swiglu if moe else None
    moe_hidden_size = (moe and moe.hidden_size) or spec.hidden_size
    q_tiles, kv_tiles = layout.qkv_tiles()

    def offset(name: str) -> int:
        return layout.section(name).offset if name in layout else 0

    ints = {
        "ranks": tp,
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "num_layers": len(spec.layers),
        "num_key_value_heads": spec.num_key_value_heads,
        "q_heads": layout.heads.q_heads,
        "kv_heads": layout.heads.kv_heads,
        "head_dim": spec.head_dim,
        "rotary_dim": 2 * len(spec.rope.inv_freq),
        "num_experts": moe.num_experts if moe else 0,
        "top_k": moe.top_k if moe else 0,
        "moe_hidden_size": moe_hidden_size,
        "moe_intermediate_size": moe.intermediate_size if moe else 0,
        "dense_intermediate_size": dense or 0,
        "context": limits.context,
        "tokens_per_step": limits.tokens_per_step,
        "q_tiles": q_tiles,
        "kv_tiles": kv_tiles,
        "hidden_tiles": layout.rank_tiles(spec.hidden_size),
        "moe_hidden_tiles": layout.rank_tiles(moe_hidden_size),
        "moe_inner_tiles": layout.rank_tiles(moe.intermediate_size) if moe else 0,
        "dense_inner_tiles": layout.rank_tiles(dense) if dense else 0,
        "vocab_tiles": layout.rank_tiles(spec.vocab_size),
    }
    flags = {
        "qk_norm": spec.qk_norm,
        "qk_norm_weight": spec.qk_norm_weight,
        "qk_norm_over_projection": spec.qk_norm_over == "projection",
        "attention_sinks": spec.attention_sinks,
        "attention_out_norm": spec.attention_out_norm,
        "attention_gate": spec.attention_gate,
        "embed_norm": spec.embed_norm,
        "sandwich": sandwich is not None,
        "qkv_bias": spec.qkv_bias,
        "o_bias": spec.o_bias,
        "norm_topk_prob": bool(moe and moe.norm_topk_prob),
        "sigmoid_scores": bool(moe and moe.scoring == "sigmoid"),
        "router_bias": bool(moe and moe.router_bias),
        "choice_bias": bool(moe and moe.choice_bias),
        "expert_bias": bool(moe and moe.expert_bias),
        "clamped_swiglu": swiglu is not None,
        "narrow_experts": bool(moe and moe.hidden_size),
        "head_in_embedding": layout.tied,
    }
    formats = {
        "embed": layout.precision["embeddings"],
        "head": layout.precision["lm_head"],
        "attention": layout.precision["attention"],
        "router": layout.router_format,
        "experts": layout.precision["experts"],
        "dense": layout.precision["dense"],
        "down_input": layout.down_input or "f32",
    }
    floats = {
        "rms_norm_eps": spec.rms_norm_eps,
        "norm_offset": 1.0 if spec.centered_norms else 0.0,  # added to the weights of some norms
        "attention_scale": spec.qk_scale * spec.head_dim**-0.5,
        "rope_attention_factor": spec.rope.attention_factor,
        "router_scale": moe.router_scale if moe else 1.0,
        "norm_topk_eps": moe.norm_topk_eps if moe else 0.0,
        "routed_scaling_factor": moe.routed_scaling_factor if moe else 1.0,
        "expert_norm_eps": moe.expert_norm_eps if moe else 0.0,
        "swiglu_alpha": swiglu.alpha if swiglu else 1.0,
        "swiglu_limit": swiglu.limit if swiglu else 0.0,
        "swiglu_up_offset": swiglu.up_offset if swiglu else 0.0,
        "sandwich_eps": sandwich.eps if sandwich else 0.0,
        "gate_temperature": sandwich.gate_temperature if sandwich else 1.0,
        "gate_floor": sandwich.gate_floor if sandwich else 0.0,
        "logit_scale": spec.logit_scale,
        "logit_softcap": spec.logit_softcap or 0.0,  # 0: none
    }
    offsets = {
        "embed": offset("embed"),
        "embed_scale": offset("embed.scale"),
        "final_norm": offset("final_norm"),
        "lm_head": offset(head),
        "lm_head_scale": offset(head + ".scale"),
        "blob_bytes": layout.nbytes,
    }
    schedule = cpu.cpu_schedule(layout, limits.context, limits.tokens_per_step, target)
    text = description(layout, limits, target)
    sizes = {(s.format, s.cols) for s in layout.sections if s.cols > 1}
    asserts = [
        f"static_assert(mk::tile_bytes(mk::Fmt::{f}, {ceil_div(c, 16)}) == {tile_bytes(f, c)});"
        for f, c in sorted(sizes)
    ]
    return "\n".join(
        [
            "// Generated by mkpack: one model on one target. Do not edit.",
            "#pragma once",
            "#include <cstddef>",
            "#include <cstdint>",
            '#include "abi.h"',
            '#include "common/format.h"',
            "",
            "namespace mk::model {",
            *(f"inline constexpr int {k} = {v};" for k, v in ints.items()),
            *(f"inline constexpr bool {k} = {cpp_bool(v)};" for k, v in flags.items()),
            *(f"inline constexpr Fmt fmt_{k} = Fmt::{v};" for k, v in formats.items()),
            *(f"inline constexpr uint64_t {k} = {v};" for k, v in offsets.items()),
            *(f"inline constexpr float {k} = {cpp_float(v)};" for k, v in floats.items()),
            f"inline constexpr float inv_freq[] = {{{', '.join(map(cpp_float, spec.rope.inv_freq))}}};",
            "",
            "struct Layer {",
            f"  uint64_t {', '.join(_LAYER_FIELDS)};",
            "  int sliding_window;  // 0: none",
            "  bool moe, rope;",
            "};",
            "inline constexpr Layer layers[] = {",
            _layers(layout),
            "};",
            "",
            *_schedule(schedule),
            f'inline constexpr char description[] = R"mk({text})mk";',
            "}  // namespace mk::model",
            "",
            *asserts,
            abi.c_asserts(),
        ]
    )
