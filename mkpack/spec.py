"""What a model is: the plain description every later stage reads.

A family file in `mkpack/models/` turns a checkpoint's config.json into a `ModelSpec`; nothing after it looks
at config.json again. A feature the spec cannot say is refused by the family file, by name.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

Format = Literal["f32", "bf16", "fp8", "nvfp4"]
Carry = Literal["bf16", "nvfp4"]  # how the input of the experts' down projection may be rounded
Algorithm = Literal["max", "mse"]  # how NVFP4 block scales are chosen: by the maximum, or by the least squared error


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class RopeSpec(_Frozen):
    """Rotary embedding, reduced to its table: angle(position, i) = position * inv_freq[i].

    Every scaling that does not depend on the sequence length (linear, llama3, yarn) is a table. `inv_freq` holds
    rotary_dim / 2 float32 values; cos and sin are both multiplied by `attention_factor`.
    """

    inv_freq: tuple[float, ...]
    attention_factor: float = 1.0


class SwigluSpec(_Frozen):
    """Clamped SwiGLU: g * sigmoid(alpha * g) * (u + up_offset), g being min(gate, limit) and u up within +-limit."""

    alpha: float
    limit: float
    up_offset: float


class MoeSpec(_Frozen):
    """Routed experts.

    A token's router logits are (router @ x + router_bias) * router_scale; its scores are their softmax over all experts
    or their sigmoid, in float32. The top_k experts of the highest score + choice_bias are chosen, ties to the lowest
    index; the bias is float32 and serves the choice alone. Weights are the scores of the chosen: with norm_topk_prob
    divided by (their sum + norm_topk_eps), then times routed_scaling_factor.

    hidden_size: experts of another width than the model's (None: the same). pre_proj takes x to it, pre_norm is an
    RMSNorm of that, every expert's output is times (1 + weight of expert_norm) and RMS-normed with expert_norm_eps
    before its routing weight, and post_proj takes the sum back.
    """

    num_experts: int
    top_k: int
    intermediate_size: int
    norm_topk_prob: bool
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    router_bias: bool = False
    choice_bias: bool = False
    router_scale: float = 1.0
    norm_topk_eps: float = 0.0
    routed_scaling_factor: float = 1.0
    expert_bias: bool = False  # of gate, up and down
    swiglu: SwigluSpec | None = None  # None: silu(gate) * up
    hidden_size: int | None = None
    expert_norm_eps: float = 0.0


class SandwichSpec(_Frozen):
    """A norm after each sub-layer, before it meets the residual stream, and a gate per channel where they meet.

    x becomes alpha * x + beta * normed, with w = gate / gate_temperature, beta = sigmoid(w) and
    alpha = sqrt(max(sigmoid(-w) * (1 + beta), gate_floor)). What attention gives is normed without a weight; what the
    MLP gives is multiplied by (1 + weight of mlp_out_norm) first and then normed.
    """

    eps: float
    gate_temperature: float
    gate_floor: float


class LayerSpec(_Frozen):
    """What may differ between layers. `sliding_window` counts the positions a query sees, its own included; `rope` says
    whether q and k are rotated."""

    moe: bool
    sliding_window: int | None = None
    rope: bool = True


class ModelSpec(_Frozen):
    """One decoder. Matrices are [out_features, in_features]. Fields with a default are features that a model may have.

    RMSNorm is x / sqrt(mean(x^2) + eps) * weight; with centered_norms the weights of attn_norm, mlp_norm and pre_norm
    are stored as their difference from 1.
    """

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
    qk_norm_over: Literal["head", "projection"] = "head"  # what one norm of q or k spans: a head, or all heads together
    qk_norm_weight: bool = True
    qk_scale: float = 1.0  # of the scores, besides 1 / sqrt(head_dim)
    attention_sinks: bool = False  # a float32 per head that takes part in the softmax and adds no value
    attention_out_norm: bool = False  # every head's output is RMS-normed, without a weight
    attention_gate: bool = False  # and times sigmoid(attn_gate @ the input of q, k and v)
    embed_norm: bool = False  # embedding rows are RMS-normed, without a weight
    centered_norms: bool = False
    sandwich: SandwichSpec | None = None
    logit_scale: float = 1.0
    logit_softcap: float | None = None  # logits become softcap * tanh(logits * logit_scale / softcap)

    @property
    def q_size(self) -> int:
        return self.num_attention_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_key_value_heads * self.head_dim


# What a tensor is for. `precision` is the recipe key that chooses its format, None for the never quantised.
Precision = Literal["experts", "dense", "attention", "lm_head", "embeddings"]
PrecisionKey = Precision | Literal["down_input"]  # and how activations are carried, where the recipe says it


@dataclass(frozen=True)
class SourcePart:
    """Which part of a fused checkpoint tensor a role is.

    whole: the checkpoint tensor's shape, experts first. index: the expert. transposed: a matrix is stored [in, out].
    rows: those of the expert's [out, in] matrix, or of its vector.
    """

    whole: tuple[int, ...]
    index: int
    rows: range
    transposed: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        rest = self.whole[1:][::-1] if self.transposed else self.whole[1:]
        return (len(self.rows), *rest[1:])

    def of(self, expert: Any) -> Any:
        """The part, as a view, of one expert's entry: a numpy array or a torch tensor of shape whole[1:]."""
        return (expert.T if self.transposed else expert)[self.rows.start : self.rows.stop : self.rows.step]


@dataclass(frozen=True)
class TensorRole:
    """One canonical tensor of the model: the unit of quantisation.

    name: canonical and family-independent: "embed", "layers.3.q", "layers.3.experts.7.gate", "final_norm".
    source: its name in the checkpoint. shape: [out, in] or [n]. precision: the recipe key that picks its format, or
    None for vectors and routers, which are never quantised. group: tensors with an equal group share one NVFP4
    tensor scale (gate and up of an expert). part: where the checkpoint tensor holds more than this one.
    """

    name: str
    source: str
    shape: tuple[int, ...]
    precision: Precision | None
    group: str | None = None
    part: SourcePart | None = None

    @property
    def source_shape(self) -> tuple[int, ...]:
        """The shape of the whole checkpoint tensor."""
        return self.part.whole if self.part else self.shape

    @property
    def label(self) -> str:
        """The source for messages, with the expert where it holds several."""
        return f"{self.source}[{self.part.index}]" if self.part else self.source


@dataclass(frozen=True)
class SourceNames:
    """Checkpoint names of a family; {i} is the layer and {e} the expert.

    fused: whether a tensor holds one projection of all experts. "rows": gate_up [experts, 2 * inner, hidden], gate
    above up, and down [experts, hidden, inner]. "interleaved": gate_up [experts, hidden, 2 * inner], gate and up in
    turn, and down [experts, inner, hidden]; biases are [experts, out].
    """

    attention: str = "model.layers.{i}.self_attn.{part}"
    router: str = "model.layers.{i}.mlp.gate.weight"
    router_bias: str = "model.layers.{i}.mlp.gate.bias"
    choice_bias: str = "model.layers.{i}.mlp.gate.e_score_correction_bias"
    fused: Literal["", "rows", "interleaved"] = ""
    expert_gate: str = "model.layers.{i}.mlp.experts.{e}.gate_proj.weight"
    expert_up: str = "model.layers.{i}.mlp.experts.{e}.up_proj.weight"
    expert_down: str = "model.layers.{i}.mlp.experts.{e}.down_proj.weight"
    fused_gate_up: str = "model.layers.{i}.mlp.experts.gate_up_proj"
    fused_down: str = "model.layers.{i}.mlp.experts.down_proj"
    pre_proj: str = "model.layers.{i}.mlp.pre_expert_proj.weight"
    pre_norm: str = "model.layers.{i}.mlp.pre_expert_norm.weight"
    expert_norm: str = "model.layers.{i}.mlp.experts.post_expert_norm.weight"
    post_proj: str = "model.layers.{i}.mlp.post_expert_proj.weight"
    dense_gate: str = "model.layers.{i}.mlp.gate_proj.weight"
    dense_up: str = "model.layers.{i}.mlp.up_proj.weight"
    dense_down: str = "model.layers.{i}.mlp.down_proj.weight"
    attn_norm: str = "model.layers.{i}.input_layernorm.weight"
    attn_residual_gate: str = "model.layers.{i}.post_attention_residual_gate.gate"
    mlp_norm: str = "model.layers.{i}.post_attention_layernorm.weight"
    mlp_out_norm: str = "model.layers.{i}.post_feedforward_layernorm.weight"
    mlp_residual_gate: str = "model.layers.{i}.post_feedforward_residual_gate.gate"
    embed: str = "model.embed_tokens.weight"
    final_norm: str = "model.norm.weight"
    lm_head: str = "lm_head.weight"

    def under(self, prefix: str) -> SourceNames:
        """These names with `prefix` for the leading "model."."""
        names: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        return replace(self, **{k: prefix + v[6:] for k, v in names.items() if v.startswith("model.")})


def tensors(spec: ModelSpec, names: SourceNames) -> Iterator[TensorRole]:
    """Every tensor the model needs, in the order the blob holds them."""
    h = spec.hidden_size
    yield TensorRole("embed", names.embed, (spec.vocab_size, h), "embeddings")
    for i, layer in enumerate(spec.layers):
        yield from _attention(spec, names, i)
        yield from _moe(spec, names, i) if layer.moe else _dense(spec, names, i)
        if spec.sandwich:
            for name, source in (("mlp_out_norm", names.mlp_out_norm), ("mlp_residual_gate", names.mlp_residual_gate)):
                yield TensorRole(f"layers.{i}.{name}", source.format(i=i), (h,), None)
    yield TensorRole("final_norm", names.final_norm, (h,), None)
    if not spec.tie_word_embeddings:
        yield TensorRole("lm_head", names.lm_head, (spec.vocab_size, h), "lm_head")


def _attention(spec: ModelSpec, names: SourceNames, i: int) -> Iterator[TensorRole]:
    h, p = spec.hidden_size, f"layers.{i}."

    def attn(part: str) -> str:
        return names.attention.format(i=i, part=part)

    yield TensorRole(p + "attn_norm", names.attn_norm.format(i=i), (h,), None)
    sizes = {"q": spec.q_size, "k": spec.kv_size, "v": spec.kv_size}
    for part, n in sizes.items():
        yield TensorRole(p + part, attn(f"{part}_proj.weight"), (n, h), "attention")
    if spec.attention_gate:
        yield TensorRole(p + "attn_gate", attn("gate_proj.weight"), (spec.q_size, h), "attention")
    if spec.qkv_bias:
        for part, n in sizes.items():
            yield TensorRole(p + part + "_bias", attn(f"{part}_proj.bias"), (n,), None)
    if spec.qk_norm and spec.qk_norm_weight:
        for part in ("q", "k"):
            n = spec.head_dim if spec.qk_norm_over == "head" else sizes[part]
            yield TensorRole(p + part + "_norm", attn(f"{part}_norm.weight"), (n,), None)
    if spec.attention_sinks:
        yield TensorRole(p + "sinks", attn("sinks"), (spec.num_attention_heads,), None)
    yield TensorRole(p + "o", attn("o_proj.weight"), (h, spec.q_size), "attention")
    if spec.o_bias:
        yield TensorRole(p + "o_bias", attn("o_proj.bias"), (h,), None)
    if spec.sandwich:
        yield TensorRole(p + "attn_residual_gate", names.attn_residual_gate.format(i=i), (h,), None)


def _moe(spec: ModelSpec, names: SourceNames, i: int) -> Iterator[TensorRole]:
    moe, h, p = spec.moe, spec.hidden_size, f"layers.{i}."
    assert moe is not None
    yield TensorRole(p + "mlp_norm", names.mlp_norm.format(i=i), (h,), None)
    yield TensorRole(p + "router", names.router.format(i=i), (moe.num_experts, h), None)
    if moe.router_bias:
        yield TensorRole(p + "router_bias", names.router_bias.format(i=i), (moe.num_experts,), None)
    if moe.hidden_size:
        yield TensorRole(p + "pre_proj", names.pre_proj.format(i=i), (moe.hidden_size, h), "dense")
    if moe.choice_bias:
        yield TensorRole(p + "choice_bias", names.choice_bias.format(i=i), (moe.num_experts,), None)
    if moe.hidden_size:
        yield TensorRole(p + "pre_norm", names.pre_norm.format(i=i), (moe.hidden_size,), None)
    for e in range(moe.num_experts):
        yield from _expert(moe, moe.hidden_size or h, names, i, e)
    if moe.hidden_size:
        yield TensorRole(p + "expert_norm", names.expert_norm.format(i=i), (moe.hidden_size,), None)
        yield TensorRole(p + "post_proj", names.post_proj.format(i=i), (h, moe.hidden_size), "dense")


def _expert(moe: MoeSpec, h: int, names: SourceNames, i: int, e: int) -> Iterator[TensorRole]:
    """Expert e of layer i, whose input and output are h wide."""
    n, x = moe.intermediate_size, f"layers.{i}.experts.{e}."
    group = x + "gate_up"
    if not names.fused:
        assert not moe.expert_bias, "no family has biases of experts under names of their own"
        yield TensorRole(x + "gate", names.expert_gate.format(i=i, e=e), (n, h), "experts", group)
        yield TensorRole(x + "up", names.expert_up.format(i=i, e=e), (n, h), "experts", group)
        yield TensorRole(x + "down", names.expert_down.format(i=i, e=e), (h, n), "experts")
        return
    turned = names.fused == "interleaved"
    rows = (
        {"gate": range(0, 2 * n, 2), "up": range(1, 2 * n, 2)} if turned else {"gate": range(n), "up": range(n, 2 * n)}
    )
    parts = [
        ("gate", names.fused_gate_up, 2 * n, h),
        ("up", names.fused_gate_up, 2 * n, h),
        ("down", names.fused_down, h, n),
    ]
    for part, name, out, cols in parts:
        taken = rows.get(part, range(out))
        whole = (moe.num_experts, cols, out) if turned else (moe.num_experts, out, cols)
        source = SourcePart(whole, e, taken, turned)
        shared = None if part == "down" else group
        yield TensorRole(x + part, name.format(i=i), (len(taken), cols), "experts", shared, source)
    if moe.expert_bias:
        for part, name, out, _ in parts:
            taken = rows.get(part, range(out))
            source = SourcePart((moe.num_experts, out), e, taken)
            yield TensorRole(x + part + "_bias", name.format(i=i) + "_bias", (len(taken),), None, None, source)


def _dense(spec: ModelSpec, names: SourceNames, i: int) -> Iterator[TensorRole]:
    h, n, x = spec.hidden_size, spec.dense_intermediate_size, f"layers.{i}.dense."
    assert n is not None
    yield TensorRole(f"layers.{i}.mlp_norm", names.mlp_norm.format(i=i), (h,), None)
    yield TensorRole(x + "gate", names.dense_gate.format(i=i), (n, h), "dense", x + "gate_up")
    yield TensorRole(x + "up", names.dense_up.format(i=i), (n, h), "dense", x + "gate_up")
    yield TensorRole(x + "down", names.dense_down.format(i=i), (h, n), "dense")
