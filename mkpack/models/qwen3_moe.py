"""Qwen3-MoE: RMSNorm on every query and key head, optional attention biases, some layers dense."""

from __future__ import annotations

from typing import Any

from mkpack.models.common import Config, decoder_fields, layers, num_hidden_layers, top_k
from mkpack.spec import ModelSpec, MoeSpec, SourceNames

NAMES = SourceNames()


def spec(config: dict[str, Any]) -> tuple[ModelSpec, SourceNames]:
    """`ModelSpec` of a Qwen3-MoE config.json. Raises UserError that names every problem."""
    c = Config(config)
    fields = decoder_fields(c, default_theta=1e4)
    bias = c.flag("attention_bias", False)
    # A window beside use_sliding_window: false is not used; Qwen publishes configs like that.
    window = c.size("sliding_window", default=4096) if c.flag("use_sliding_window", False) else None
    is_moe = _moe_layers(c)
    moe = None
    if any(is_moe):
        num_experts = c.size("num_experts", "num_local_experts")
        moe = MoeSpec(
            num_experts=num_experts,
            top_k=top_k(c, num_experts),
            intermediate_size=c.size("moe_intermediate_size"),
            norm_topk_prob=c.flag("norm_topk_prob", False),
        )
    result = ModelSpec(
        family="qwen3_moe",
        **fields,
        qk_norm=True,
        qkv_bias=bias,
        o_bias=bias,
        layers=layers(c, is_moe, window),
        moe=moe,
        dense_intermediate_size=None if all(is_moe) else c.size("intermediate_size"),
    )
    c.check()
    return result, NAMES


def _moe_layers(c: Config) -> list[bool]:
    """Which layers route to experts: every decoder_sparse_step-th, counted from 1, unless in mlp_only_layers."""
    num_layers, step = num_hidden_layers(c), c.size("decoder_sparse_step", default=1)
    dense = c.get("mlp_only_layers") or []
    known = range(num_layers)
    if not isinstance(dense, list) or any(type(i) is not int or i not in known for i in dense):
        c.refuse(f"mlp_only_layers: expected layer numbers from 0 to {num_layers - 1}, found {dense!r}")
        dense = []
    return [i not in dense and (i + 1) % step == 0 for i in known]
