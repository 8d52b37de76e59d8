"""Small models for the CUDA kernel, in its shape of Qwen3-30B-A3B or any other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import kernels

from mkpack.layout_cuda import CudaLayout
from mkpack.spec import Format, LayerSpec, ModelSpec, RopeSpec, SandwichSpec

MIX: Mapping[str, Format] = kernels.precision("bf16", experts="nvfp4")


def cuda_spec(**changes: Any) -> ModelSpec:
    """hidden 2048, 32/4 heads of 128, 128 experts top-8; one layer, experts 512 wide, 64 tokens unless changed."""
    fields: dict[str, Any] = {
        "hidden_size": 2048,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "vocab_size": 64,
        "qk_norm": True,
        "layers": (LayerSpec(moe=True),),
        "rope": RopeSpec(inv_freq=tuple(float(1e6 ** -(i / 64)) for i in range(64))),
    }
    moe = {"num_experts": 128, "top_k": 8, "intermediate_size": 512, **changes.pop("moe", {})}
    return kernels.tiny_spec(**{**fields, **changes}, moe=moe)


def small_spec(**changes: Any) -> ModelSpec:
    """hidden 192, 4/2 heads of 64 with 32 rotary dimensions, 3 experts top-2 of 64, 67 tokens, unless changed."""
    fields: dict[str, Any] = {
        "hidden_size": 192,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "rope": RopeSpec(inv_freq=tuple(float(1e4 ** -(i / 16)) for i in range(16))),
    }
    moe = {"num_experts": 3, "top_k": 2, "intermediate_size": 64, **changes.pop("moe", {})}
    return kernels.tiny_spec(**{**fields, **changes}, moe=moe)


def muse_spec(**changes: Any) -> ModelSpec:
    """small_spec() with everything that Muse Spark has: experts of 128 channels, a dense layer of 72 between two with
    experts, the first without rope."""
    fields: dict[str, Any] = {
        "qk_norm": True,
        "qk_norm_weight": False,
        "qk_scale": 2.0,
        "attention_out_norm": True,
        "attention_gate": True,
        "embed_norm": True,
        "centered_norms": True,
        "sandwich": SandwichSpec(eps=1e-8, gate_temperature=0.3, gate_floor=1e-3),
        "logit_scale": 0.2,
        "logit_softcap": 20.0,
        "layers": (
            LayerSpec(moe=True, rope=False),
            LayerSpec(moe=False, sliding_window=7),
            LayerSpec(moe=True, sliding_window=7),
        ),
        "dense_intermediate_size": 72,
    }
    moe = {
        **{"hidden_size": 128, "expert_norm_eps": 1e-8, "scoring": "sigmoid", "choice_bias": True, "router_scale": 0.2},
        **{"norm_topk_eps": 1e-15, "routed_scaling_factor": 2.5, **changes.pop("moe", {})},
    }
    return small_spec(**{**fields, **changes}, moe=moe)


def cuda_layout(spec: ModelSpec, router_format: Format = "bf16", **precision: Format) -> CudaLayout:
    """Experts NVFP4 and the rest bf16 unless `precision` says otherwise."""
    return CudaLayout(spec, {**MIX, **precision}, router_format)
