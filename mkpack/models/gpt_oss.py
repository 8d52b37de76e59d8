"""gpt-oss: attention sinks, every other layer a sliding window, biases everywhere, clamped SwiGLU, fused experts."""

from __future__ import annotations

from typing import Any

from mkpack.models.common import Config, decoder_fields, layer_windows, num_hidden_layers, top_k
from mkpack.spec import LayerSpec, ModelSpec, MoeSpec, SourceNames, SwigluSpec

NAMES = SourceNames(
    router="model.layers.{i}.mlp.router.weight",
    router_bias="model.layers.{i}.mlp.router.bias",
    fused="interleaved",
)
# What transformers takes where config.json says nothing about rope.
_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def spec(config: dict[str, Any]) -> tuple[ModelSpec, SourceNames]:
    """`ModelSpec` of a gpt-oss config.json. Raises UserError that names every problem."""
    if not config.get("rope_parameters") and not config.get("rope_scaling"):
        config = {**config, "rope_parameters": _ROPE}
    c = Config(config)
    fields = decoder_fields(c, default_theta=150000.0, own=("swiglu_limit",))
    bias = c.flag("attention_bias", True)
    num_layers = num_hidden_layers(c)
    windows = layer_windows(c, ["full_attention" if i % 2 else "sliding_attention" for i in range(num_layers)])
    num_experts = c.size("num_local_experts", "num_experts")
    # The softmax is of the chosen logits alone, which is the softmax of all, renormalised.
    moe = MoeSpec(
        num_experts=num_experts,
        top_k=top_k(c, num_experts),
        intermediate_size=c.size("intermediate_size"),
        norm_topk_prob=True,
        router_bias=True,
        expert_bias=True,
        swiglu=SwigluSpec(alpha=c.number("swiglu_alpha", 1.702), limit=c.number("swiglu_limit", 7.0), up_offset=1.0),
    )
    result = ModelSpec(
        family="gpt_oss",
        **fields,
        qk_norm=False,
        qkv_bias=bias,
        o_bias=bias,
        attention_sinks=True,
        layers=tuple(LayerSpec(moe=True, sliding_window=window) for window in windows),
        moe=moe,
        dense_intermediate_size=None,
    )
    c.check()
    return result, NAMES
