"""What a model is: the plain description every later stage reads.

A family file in `mkpack/models/` turns a checkpoint's config.json into a `ModelSpec`; nothing after it looks
at config.json again. A feature the spec cannot say is refused by the family file, by name.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel, ConfigDict

Format = Literal["f32", "bf16", "fp8", "nvfp4"]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class RopeSpec(_Frozen):
    """Rotary embedding, reduced to its table: angle(position, i) = position * inv_freq[i].

    Every scaling that does not depend on the sequence length (linear, llama3, yarn) is a table. `inv_freq` holds
    rotary_dim / 2 float32 values; cos and sin are both multiplied by `attention_factor`.
    """

    inv_freq: tuple[float, ...]
    attention_factor: float = 1.0


class MoeSpec(_Frozen):
    """Routed experts: softmax over all experts, top_k (ties to the lowest index), optional renormalisation."""

    num_experts: int
    top_k: int
    intermediate_size: int
    norm_topk_prob: bool


class LayerSpec(_Frozen):
    """What may differ between layers. `sliding_window` counts the positions a query sees, its own included."""

    moe: bool
    sliding_window: int | None = None


class ModelSpec(_Frozen):
    """One decoder. Matrices are [out_features, in_features] as in the checkpoint."""

    family: str
    vocab_size: int
    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    rope: RopeSpec
    qk_norm: bool
    qkv_bias: bool
    o_bias: bool
    layers: tuple[LayerSpec, ...]
    moe: MoeSpec | None
    dense_intermediate_size: int | None

    @property
    def q_size(self) -> int:
        return self.num_attention_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_key_value_heads * self.head_dim


# What a tensor is for. `precision` is the recipe key that chooses its format, None for the never quantised.
Precision = Literal["experts", "dense", "attention", "lm_head", "embeddings"]


@dataclass(frozen=True)
class TensorRole:
    """One canonical tensor of the model: the unit of quantisation.

    name: canonical and family-independent: "embed", "layers.3.q", "layers.3.experts.7.gate", "final_norm".
    source: its name in the checkpoint. shape: [out, in] or [n]. precision: the recipe key that picks its format, or
    None for vectors and routers, which are never quantised. group: tensors with an equal group share one NVFP4
    tensor scale (gate and up of an expert).
    """

    name: str
    source: str
    shape: tuple[int, ...]
    precision: Precision | None
    group: str | None = None


@dataclass(frozen=True)
class SourceNames:
    """Checkpoint names of a family; {i} is the layer and {e} the expert."""

    attention: str = "model.layers.{i}.self_attn.{part}"
    router: str = "model.layers.{i}.mlp.gate.weight"
    expert_gate: str = "model.layers.{i}.mlp.experts.{e}.gate_proj.weight"
    expert_up: str = "model.layers.{i}.mlp.experts.{e}.up_proj.weight"
    expert_down: str = "model.layers.{i}.mlp.experts.{e}.down_proj.weight"
    dense_gate: str = "model.layers.{i}.mlp.gate_proj.weight"
    dense_up: str = "model.layers.{i}.mlp.up_proj.weight"
    dense_down: str = "model.layers.{i}.mlp.down_proj.weight"
    attn_norm: str = "model.layers.{i}.input_layernorm.weight"
    mlp_norm: str = "model.layers.{i}.post_attention_layernorm.weight"
    embed: str = "model.embed_tokens.weight"
    final_norm: str = "model.norm.weight"
    lm_head: str = "lm_head.weight"


def tensors(spec: ModelSpec, names: SourceNames) -> Iterator[TensorRole]:
    """Every tensor the model needs, in the order the blob holds them."""
    h = spec.hidden_size
    yield TensorRole("embed", names.embed, (spec.vocab_size, h), "embeddings")
    for i, layer in enumerate(spec.layers):
        yield from _layer(spec, names, i, layer)
    yield TensorRole("final_norm", names.final_norm, (h,), None)
    if not spec.tie_word_embeddings:
        yield TensorRole("lm_head", names.lm_head, (spec.vocab_size, h), "lm_head")


def _layer(spec: ModelSpec, names: SourceNames, i: int, layer: LayerSpec) -> Iterator[TensorRole]:
    h, p = spec.hidden_size, f"layers.{i}."

    def attn(part: str) -> str:
        return names.attention.format(i=i, part=part)

    yield TensorRole(p + "attn_norm", names.attn_norm.format(i=i), (h,), None)
    sizes = {"q": spec.q_size, "k": spec.kv_size, "v": spec.kv_size}
    for part, n in sizes.items():
        yield TensorRole(p + part, attn(f"{part}_proj.weight"), (n, h), "attention")
    if spec.qkv_bias:
        for part, n in sizes.items():
            yield TensorRole(p + part + "_bias", attn(f"{part}_proj.bias"), (n,), None)
    if spec.qk_norm:
        for part in ("q_norm", "k_norm"):
            yield TensorRole(p + part, attn(f"{part}.weight"), (spec.head_dim,), None)
    yield TensorRole(p + "o", attn("o_proj.weight"), (h, spec.q_size), "attention")
    if spec.o_bias:
        yield TensorRole(p + "o_bias", attn("o_proj.bias"), (h,), None)
    yield TensorRole(p + "mlp_norm", names.mlp_norm.format(i=i), (h,), None)
    if layer.moe:
        assert spec.moe is not None
        n = spec.moe.intermediate_size
        yield TensorRole(p + "router", names.router.format(i=i), (spec.moe.num_experts, h), None)
        for e in range(spec.moe.num_experts):
            x = f"{p}experts.{e}."
            yield TensorRole(x + "gate", names.expert_gate.format(i=i, e=e), (n, h), "experts", x + "gate_up")
            yield TensorRole(x + "up", names.expert_up.format(i=i, e=e), (n, h), "experts", x + "gate_up")
            yield TensorRole(x + "down", names.expert_down.format(i=i, e=e), (h, n), "experts")
    else:
        assert spec.dense_intermediate_size is not None
        n, x = spec.dense_intermediate_size, p + "dense."
        yield TensorRole(x + "gate", names.dense_gate.format(i=i), (n, h), "dense", x + "gate_up")
        yield TensorRole(x + "up", names.dense_up.format(i=i), (n, h), "dense", x + "gate_up")
        yield TensorRole(x + "down", names.dense_down.format(i=i), (h, n), "dense")
