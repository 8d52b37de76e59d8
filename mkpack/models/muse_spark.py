"""Muse Spark, the text model of the multimodal checkpoint: gated attention, sandwich norms, narrow experts."""

from __future__ import annotations

from typing import Any

from mkpack.models.common import decoder_fields, layer_windows, num_hidden_layers, per_layer, text_config, top_k
from mkpack.models.rope import rope_theta
from mkpack.spec import LayerSpec, ModelSpec, MoeSpec, SandwichSpec, SourceNames

NAMES = SourceNames(
    mlp_norm="model.layers.{i}.pre_feedforward_layernorm.weight",
    fused="rows",
).under("model.language_model.")


def spec(config: dict[str, Any]) -> tuple[ModelSpec, SourceNames]:
    """`ModelSpec` of the text model in a Muse Spark config.json. Raises UserError that names every problem."""
    c = text_config(config)
    own = (
        "final_logit_softcapping",
        "layer_rope_theta",
        "output_multiplier",
        "qk_scale_factor",
        "routed_scaling_factor",
    )
    fields = decoder_fields(c, default_theta=5e5, own=own, architecture="ForConditionalGeneration")
    if fields["tie_word_embeddings"]:
        c.refuse("tie_word_embeddings = true is not supported; expected false")
    bias = c.flag("attention_bias", False)
    num_layers = num_hidden_layers(c)
    # Every 4th layer counted back from the last sees everything and rotates nothing.
    full = [(num_layers - 1 - i) % 4 == 0 for i in range(num_layers)]
    windows = layer_windows(c, ["full_attention" if f else "sliding_attention" for f in full])
    theta = rope_theta(c, 5e5)
    thetas = per_layer(c, "layer_rope_theta", [0 if f else theta for f in full], (0, theta))
    sparse = per_layer(c, "mlp_layer_types", ["sparse"] * num_layers, ("sparse", "dense"))
    scale, eps = c.number("output_multiplier", 0.1767766952966369), c.number("post_norm_eps", 1e-8)
    num_experts = c.size("num_local_experts", "num_experts")
    moe = MoeSpec(
        num_experts=num_experts,
        top_k=top_k(c, num_experts),
        intermediate_size=c.size("moe_intermediate_size"),
        norm_topk_prob=True,
        scoring="sigmoid",
        choice_bias=True,
        router_scale=scale,
        norm_topk_eps=1e-15,
        routed_scaling_factor=c.number("routed_scaling_factor", 1.0),
        hidden_size=c.size("moe_hidden_size"),
        expert_norm_eps=eps,
    )
    result = ModelSpec(
        family="muse_spark",
        **fields,
        qk_norm=True,
        qk_norm_weight=False,
        qk_scale=c.number("qk_scale_factor", 5.4730064863875),
        qkv_bias=bias,
        o_bias=bias,
        attention_out_norm=True,
        attention_gate=True,
        embed_norm=True,
        centered_norms=True,
        sandwich=SandwichSpec(eps=eps, gate_temperature=c.number("residual_gate_temperature", 0.3), gate_floor=1e-3),
        logit_scale=scale,
        logit_softcap=c.number("final_logit_softcapping", 20.0),
        layers=tuple(
            LayerSpec(moe=s == "sparse", sliding_window=w, rope=bool(t))
            for s, w, t in zip(sparse, windows, thetas, strict=True)
        ),
        moe=moe if "sparse" in sparse else None,
        dense_intermediate_size=c.size("intermediate_size") if "dense" in sparse else None,
    )
    c.check()
    return result, NAMES
