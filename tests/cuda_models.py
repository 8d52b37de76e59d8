"""Models in the one shape that the CUDA kernel takes, as small as that allows."""

from __future__ import annotations

from typing import Any

import kernels

from mkpack.spec import LayerSpec, ModelSpec, RopeSpec


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
