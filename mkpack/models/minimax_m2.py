"""MiniMax-M2: q and k normed over all heads together, a part of each head rotated, sigmoid routing with a bias."""

from __future__ import annotations

from typing import Any

from mkpack.models.common import Config, decoder_fields, num_hidden_layers, per_layer, top_k
from mkpack.spec import LayerSpec, ModelSpec, MoeSpec, SourceNames

NAMES = SourceNames(
    router="model.layers.{i}.block_sparse_moe.gate.weight",
    choice_bias="model.layers.{i}.block_sparse_moe.e_score_correction_bias",
    expert_gate="model.layers.{i}.block_sparse_moe.experts.{e}.w1.weight",
    expert_up="model.layers.{i}.block_sparse_moe.experts.{e}.w3.weight",
    expert_down="model.layers.{i}.block_sparse_moe.experts.{e}.w2.weight",
)
# As published, beside code of their own (auto_map) that transformers has taken over; the values it implements.
_FIXED: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False,),
    "layernorm_full_attention_beta": (1,),
    "layernorm_linear_attention_beta": (1,),
    "layernorm_mlp_beta": (1,),
    "norm_topk_prob": (True,),
    "qk_norm_type": ("per_layer",),
    "scoring_func": ("sigmoid",),
    "sliding_window": (),
    "use_qk_norm": (True,),
    "use_routing_bias": (True,),
}


def spec(config: dict[str, Any]) -> tuple[ModelSpec, SourceNames]:
    """`ModelSpec` of a MiniMax-M2 config.json. Raises UserError that names every problem."""
    c = Config(config)
    own = ("auto_map", "partial_rotary_factor", "rotary_dim", "scoring_func")
    fields = decoder_fields(c, default_theta=5e6, own=own, partial_rotary=True)
    for name, accepted in _FIXED.items():
        c.expect(name, *accepted)
    num_layers = num_hidden_layers(c)
    per_layer(c, "attn_type_list", [1] * num_layers, (1,))
    per_layer(c, "layer_types", ["full_attention"] * num_layers, ("full_attention",))
    num_experts = c.size("num_local_experts", "num_experts")
    moe = MoeSpec(
        num_experts=num_experts,
        top_k=top_k(c, num_experts),
        intermediate_size=c.size("intermediate_size"),
        norm_topk_prob=True,
        scoring="sigmoid",
        choice_bias=True,
    )
    result = ModelSpec(
        family="minimax_m2",
        **fields,
        qk_norm=True,
        qk_norm_over="projection",
        qkv_bias=False,
        o_bias=False,
        layers=(LayerSpec(moe=True),) * num_layers,
        moe=moe,
        dense_intermediate_size=None,
    )
    c.check()
    return result, NAMES
