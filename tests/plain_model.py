"""The slow, obvious twin of a model: a decoder in numpy that knows `ModelSpec` and nothing else.

It says what the fields of the spec mean; where it agrees with transformers, the spec is right.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from mkpack.spec import ModelSpec, SwigluSpec

Weights = Mapping[str, np.ndarray]


def logits(spec: ModelSpec, weights: Weights, tokens: Sequence[int]) -> np.ndarray:
    """Logits [len(tokens), vocab_size] in float64; weights by canonical tensor name (`TensorRole.name`)."""
    w = {name: np.asanyarray(array, dtype=np.float64) for name, array in weights.items()}
    x = w["embed"][list(tokens)]
    if spec.embed_norm:
        x = _normed(x, spec.rms_norm_eps)
    for i in range(len(spec.layers)):
        p = f"layers.{i}."
        y = _attention(spec, w, p, i, _norm(spec, x, w[p + "attn_norm"]))
        x = _residual(spec, w, p, "attn", x, y)
        h = _norm(spec, x, w[p + "mlp_norm"])
        y = _moe(spec, w, p, h) if spec.layers[i].moe else _mlp(w, p + "dense.", h, None)
        if spec.sandwich:
            y = y * (1 + w[p + "mlp_out_norm"])
        x = _residual(spec, w, p, "mlp", x, y)
    x = _normed(x, spec.rms_norm_eps) * w["final_norm"]
    y = x @ w["embed" if spec.tie_word_embeddings else "lm_head"].T * spec.logit_scale
    return spec.logit_softcap * np.tanh(y / spec.logit_softcap) if spec.logit_softcap else y


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


def _mlp(w: Weights, p: str, x: np.ndarray, swiglu: SwigluSpec | None) -> np.ndarray:
    def project(part: str, x: np.ndarray) -> np.ndarray:
        return x @ w[p + part].T + w.get(p + part + "_bias", 0)

    gate, up = project("gate", x), project("up", x)
    if swiglu is None:
        return project("down", gate * _sigmoid(gate) * up)
    gate = np.minimum(gate, swiglu.limit)
    up = np.clip(up, -swiglu.limit, swiglu.limit) + swiglu.up_offset
    return project("down", gate * _sigmoid(swiglu.alpha * gate) * up)


def _moe(spec: ModelSpec, w: Weights, p: str, x: np.ndarray) -> np.ndarray:
    moe = spec.moe
    assert moe is not None
    router = (x @ w[p + "router"].T + w.get(p + "router_bias", 0)) * moe.router_scale
    if moe.hidden_size:
        x = _norm(spec, x @ w[p + "pre_proj"].T, w[p + "pre_norm"])
    out = np.zeros_like(x)
    for t, row in enumerate(x):
        if moe.scoring == "softmax":
            score = np.exp(router[t])
            score /= score.sum()
        else:
            score = _sigmoid(router[t])
        chosen = np.argsort(-(score + w.get(p + "choice_bias", 0)), kind="stable")[: moe.top_k]
        total = score[chosen].sum() + moe.norm_topk_eps if moe.norm_topk_prob else 1.0
        for e in chosen:
            y = _mlp(w, f"{p}experts.{e}.", row[None], moe.swiglu)[0]
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
