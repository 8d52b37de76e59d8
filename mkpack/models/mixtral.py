"""Mixtral: grouped-query attention without biases, every layer a mixture with renormalised top-k weights."""

from __future__ import annotations

from typing import Any

from mkpack.models.common import Config, decoder_fields, layers, num_hidden_layers, top_k
from mkpack.spec import ModelSpec, MoeSpec, SourceNames

NAMES = SourceNames(
    router="model.layers.{i}.block_sparse_moe.gate.weight",
    expert_gate="model.layers.{i}.block_sparse_moe.experts.{e}.w1.weight",
    expert_up="model.layers.{i}.block_sparse_moe.experts.{e}.w3.weight",
    expert_down="model.layers.{i}.block_sparse_moe.experts.{e}.w2.weight",
)


def spec(config: dict[str, Any]) -> tuple[ModelSpec, SourceNames]:
    """`ModelSpec` of a Mixtral config.json. Raises UserError that names every problem."""
    # null means one KV head per query head here.
    if "num_key_value_heads" in config and config["num_key_value_heads"] is None:
        config = {**config, "num_key_value_heads": config.get("num_attention_heads")}
    c = Config(config)
    fields = decoder_fields(c, default_theta=1e6)
    c.expect("attention_bias", False)
    c.expect("norm_topk_prob", True)
    c.expect("mlp_only_layers", [])
    c.expect("decoder_sparse_step", 1)
    sliding_window = None if c.get("sliding_window") is None else c.size("sliding_window")
    c.expect("use_sliding_window", sliding_window is not None)
    num_experts = c.size("num_local_experts", "num_experts")
    moe = MoeSpec(
        num_experts=num_experts,
        top_k=top_k(c, num_experts),
        intermediate_size=c.size("intermediate_size"),
        norm_topk_prob=True,
    )
    result = ModelSpec(
        family="mixtral",
        **fields,
        qk_norm=False,
        qkv_bias=False,
        o_bias=False,
        layers=layers(c, [True] * num_hidden_layers(c), sliding_window),
        moe=moe,
        dense_intermediate_size=None,
    )
    c.check()
    return result, NAMES
