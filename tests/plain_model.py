"""The slow, obvious twin of a model: a decoder in numpy that knows `ModelSpec` and nothing else.

It says what the fields of the spec mean; where it agrees with transformers, the spec is right.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from mkpack.formats import bf16_to_f32, e2m1_values, e4m3_to_f32, f32_to_bf16
from mkpack.spec import Carry, ModelSpec, SwigluSpec

Weights = Mapping[str, np.ndarray]


def logits(spec: ModelSpec, weights: Weights, tokens: Sequence[int], down_input: Carry | None = None) -> np.ndarray:
    """Logits [len(tokens), vocab_size] in float64; weights by canonical tensor name (`TensorRole.name`).

    down_input: how what goes into the experts' down projection is carried; as NVFP4 under the global scales
    weights["layers.3.down_input_scale"], one an expert.
    """
    w = wide(weights)
    return head(spec, w, hidden(spec, w, tokens, down_input)[-1])


def wide(weights: Weights) -> dict[str, np.ndarray]:
    """In float64, as the functions below want them."""
    return {name: np.asanyarray(array, dtype=np.float64) for name, array in weights.items()}


def head(spec: ModelSpec, w: Weights, x: np.ndarray) -> np.ndarray:
    """Logits of the residual after the last layer."""
    x = _normed(x, spec.rms_norm_eps) * w["final_norm"]
    y = x @ w["embed" if spec.tie_word_embeddings else "lm_head"].T * spec.logit_scale
    return spec.logit_softcap * np.tanh(y / spec.logit_softcap) if spec.logit_softcap else y


def hidden(spec: ModelSpec, weights: Weights, tokens: Sequence[int], down_input: Carry | None = None) -> np.ndarray:
    """The residual after every layer, [layers, len(tokens), hidden_size] in float64."""
    w = wide(weights)
    states = []
    x = embedded(spec, w, tokens)
    for i in range(len(spec.layers)):
        x = after_mlp(spec, w, i, after_attention(spec, w, i, x), down_input)
        states.append(x)
    return np.stack(states)


def embedded(spec: ModelSpec, w: Weights, tokens: Sequence[int]) -> np.ndarray:
    """The residual before the first layer."""
    x = w["embed"][list(tokens)]
    return _normed(x, spec.rms_norm_eps) if spec.embed_norm else x


def after_attention(spec: ModelSpec, w: Weights, i: int, x: np.ndarray) -> np.ndarray:
    """The residual [tokens, hidden_size] in the middle of layer i, of that before it."""
    p = f"layers.{i}."
    return _residual(spec, w, p, "attn", x, _attention(spec, w, p, i, _norm(spec, x, w[p + "attn_norm"])))


def after_mlp(
    spec: ModelSpec, w: Weights, i: int, x: np.ndarray, down_input: Carry | None = None, other: bool = False
) -> np.ndarray:
    """The residual behind layer i, of that in its middle. other: the first expert that a token does not choose takes
    the place of the last that it does."""
    p = f"layers.{i}."
    h = _norm(spec, x, w[p + "mlp_norm"])
    y = _moe(spec, w, p, h, down_input, other) if spec.layers[i].moe else _mlp(w, p + "dense.", h, None)
    if spec.sandwich:
        y = y * (1 + w[p + "mlp_out_norm"])
    return _residual(spec, w, p, "mlp", x, y)


def choice_gaps(spec: ModelSpec, w: Weights, i: int, x: np.ndarray) -> np.ndarray:
    """Of every token how far the last chosen expert of layer i is before the first that is not, in what they are chosen
    by: router logits, or sigmoids and their bias. x: the residual in the middle of the layer."""
    moe, p = spec.moe, f"layers.{i}."
    assert moe is not None
    router = _router(spec, w, p, _norm(spec, x, w[p + "mlp_norm"]))
    by = (router if moe.scoring == "softmax" else _sigmoid(router)) + w.get(p + "choice_bias", 0)
    ranked = np.sort(by, axis=-1)[:, ::-1]
    return ranked[:, moe.top_k - 1] - ranked[:, moe.top_k]


def _normed(x: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps)


def _norm(spec: ModelSpec, x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return _normed(x, spec.rms_norm_eps) * (weight + 1 if spec.centered_norms else weight)


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def _residual(spec: ModelSpec, w: Weights, p: str, part: str, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    if spec.sandwich is None:
        return x + y
    gate = w[f"{p}{part}_residual_gate"] / spec.sandwich.gate_temperature
    beta = _sigmoid(gate)
    alpha = np.sqrt(np.maximum(_sigmoid(-gate) * (1 + beta), spec.sandwich.gate_floor))
    return alpha * x + beta * _normed(y, spec.sandwich.eps)


def encode_nvfp4(x: np.ndarray, scale2: np.float32) -> tuple[np.ndarray, np.ndarray]:
    """Codes uint8 of x's shape, and e4m3 scales uint8 [..., channels / 16], of float32 activations [..., channels]."""
    x = np.asarray(x, np.float32)
    blocks = x.reshape(*x.shape[:-1], -1, 16)
    scales, values = np.arange(1, 0x7F, dtype=np.uint8), e4m3_to_f32(np.arange(1, 0x7F))
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        wanted = np.abs(blocks).max(axis=-1) / (np.float32(6) * scale2)  # a NaN among them stays
        wanted = np.where(wanted == 0, np.float32(1), np.clip(wanted, values[0], values[-1]))
        nan = np.isnan(wanted)
        scale = np.where(nan, 0x7F, scales[_nearest(np.where(nan, 1, wanted), values)]).astype(np.uint8)
        a = np.abs(blocks) / (e4m3_to_f32(scale) * scale2)[..., None]
    code = _nearest(np.where(nan[..., None], 6, a), e2m1_values()[:8]).astype(np.uint8)
    code |= np.where((blocks < 0) & (code > 0) & ~nan[..., None], 8, 0).astype(np.uint8)
    return code.reshape(x.shape), scale


def _nearest(x: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Index into ascending `values` of what is nearest to each x, the even one of two that are equally near."""
    x, values = np.minimum(x.astype(np.float64), values[-1]), values.astype(np.float64)
    above = np.clip(np.searchsorted(values, x), 1, len(values) - 1)
    low, high = x - values[above - 1], values[above] - x
    # Codes of e2m1 begin at index 0, those of e4m3 scales at 1: even means an even code.
    even = (above - 1 + (values[0] != 0)) % 2 == 0
    return np.where((low < high) | ((low == high) & even), above - 1, above)


def carried(x: np.ndarray, down_input: Carry | None, scale2: np.float32) -> np.ndarray:
    """What arrives of activations [..., channels] that are carried so; float64 as they are where nothing rounds."""
    if down_input is None:
        return x
    short = np.asarray(x, np.float32)
    if down_input == "bf16":
        return bf16_to_f32(f32_to_bf16(short))
    padded = np.pad(short, [*[(0, 0)] * (short.ndim - 1), (0, -short.shape[-1] % 16)])
    codes, scale = encode_nvfp4(padded, scale2)
    values = e2m1_values()[codes] * np.repeat(e4m3_to_f32(scale) * scale2, 16, axis=-1)
    return np.asarray(values[..., : short.shape[-1]])


def _mlp(
    w: Weights, p: str, x: np.ndarray, swiglu: SwigluSpec | None, down_input: Carry | None = None, scale2: float = 1.0
) -> np.ndarray:
    def project(part: str, x: np.ndarray) -> np.ndarray:
        return x @ w[p + part].T + w.get(p + part + "_bias", 0)

    gate, up = project("gate", x), project("up", x)
    if swiglu is None:
        return project("down", carried(gate * _sigmoid(gate) * up, down_input, np.float32(scale2)))
    gate = np.minimum(gate, swiglu.limit)
    up = np.clip(up, -swiglu.limit, swiglu.limit) + swiglu.up_offset
    return project("down", carried(gate * _sigmoid(swiglu.alpha * gate) * up, down_input, np.float32(scale2)))


def _router(spec: ModelSpec, w: Weights, p: str, x: np.ndarray) -> np.ndarray:
    assert spec.moe is not None
    return (x @ w[p + "router"].T + w.get(p + "router_bias", 0)) * spec.moe.router_scale


def _moe(spec: ModelSpec, w: Weights, p: str, x: np.ndarray, down_input: Carry | None, other: bool) -> np.ndarray:
    moe = spec.moe
    assert moe is not None
    router = _router(spec, w, p, x)
    if moe.hidden_size:
        x = _norm(spec, x @ w[p + "pre_proj"].T, w[p + "pre_norm"])
    out = np.zeros_like(x)
    for t, row in enumerate(x):
        if moe.scoring == "softmax":
            score = np.exp(router[t])
            score /= score.sum()
        else:
            score = _sigmoid(router[t])
        ranked = np.argsort(-(score + w.get(p + "choice_bias", 0)), kind="stable")
        chosen = np.delete(ranked, moe.top_k - 1)[: moe.top_k] if other else ranked[: moe.top_k]
        total = score[chosen].sum() + moe.norm_topk_eps if moe.norm_topk_prob else 1.0
        for e in chosen:
            scale2 = w[p + "down_input_scale"][e] if down_input == "nvfp4" else 1.0
            y = _mlp(w, f"{p}experts.{e}.", row[None], moe.swiglu, down_input, scale2)[0]
            if moe.hidden_size:
                y = _normed(y * (1 + w[p + "expert_norm"]), moe.expert_norm_eps)
            out[t] += score[e] / total * moe.routed_scaling_factor * y
    return out @ w[p + "post_proj"].T if moe.hidden_size else out


def _attention(spec: ModelSpec, w: Weights, p: str, i: int, x: np.ndarray) -> np.ndarray:
    n, group = len(x), spec.num_attention_heads // spec.num_key_value_heads

    def heads(part: str) -> np.ndarray:
        y = x @ w[p + part].T + w.get(p + part + "_bias", 0)
        if part == "v":
            return y.reshape(n, -1, spec.head_dim)
        if spec.qk_norm_over == "head":
            y = y.reshape(n, -1, spec.head_dim)
        if spec.qk_norm:
            y = _normed(y, spec.rms_norm_eps) * w.get(p + part + "_norm", 1)
        y = y.reshape(n, -1, spec.head_dim)
        return _rope(spec, y) if spec.layers[i].rope else y

    q, k, v = heads("q"), heads("k"), heads("v")
    window = spec.layers[i].sliding_window or n
    distance = np.arange(n)[:, None] - np.arange(n)[None, :]
    seen = (distance >= 0) & (distance < window)
    out = np.empty_like(q)
    for head in range(spec.num_attention_heads):
        scores = q[:, head] @ k[:, head // group].T * spec.qk_scale / np.sqrt(spec.head_dim)
        scores = np.where(seen, scores, -np.inf)
        if spec.attention_sinks:
            sink = w[p + "sinks"][head]
            scores = np.concatenate([scores, np.full((n, 1), sink)], axis=-1)
        probability = np.exp(scores - scores.max(axis=-1, keepdims=True))
        probability /= probability.sum(axis=-1, keepdims=True)
        out[:, head] = probability[:, :n] @ v[:, head // group]
    if spec.attention_out_norm:
        out = _normed(out, spec.rms_norm_eps)
    y = out.reshape(n, -1)
    if spec.attention_gate:
        y = y * _sigmoid(x @ w[p + "attn_gate"].T)
    return y @ w[p + "o"].T + w.get(p + "o_bias", 0)


def _rope(spec: ModelSpec, x: np.ndarray) -> np.ndarray:
    """Rotates the first dimensions of [n, heads, head_dim], two for each inv_freq; i pairs with i + len(inv_freq)."""
    half = len(spec.rope.inv_freq)
    angle = np.arange(len(x))[:, None] * np.asarray(spec.rope.inv_freq)[None, :]
    cos, sin = (f(angle)[:, None, :] * spec.rope.attention_factor for f in (np.cos, np.sin))
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=-1)
