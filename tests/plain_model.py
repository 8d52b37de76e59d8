"""The slow, obvious twin of a model: a decoder in numpy that knows `ModelSpec` and nothing else.

It says what the fields of the spec mean; where it agrees with transformers, the spec is right.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from mkpack.spec import ModelSpec


def logits(spec: ModelSpec, weights: Mapping[str, np.ndarray], tokens: Sequence[int]) -> np.ndarray:
    """Logits [len(tokens), vocab_size] in float64; weights by canonical tensor name (`TensorRole.name`)."""
    w = {name: np.asarray(array, dtype=np.float64) for name, array in weights.items()}
    x = w["embed"][list(tokens)]
    for i in range(len(spec.layers)):
        p = f"layers.{i}."
        x = x + _attention(spec, w, p, i, _rms_norm(spec, x, w[p + "attn_norm"]))
        h = _rms_norm(spec, x, w[p + "mlp_norm"])
        x = x + (_moe(spec, w, p, h) if spec.layers[i].moe else _swiglu(w, p + "dense.", h))
    x = _rms_norm(spec, x, w["final_norm"])
    return x @ w["embed" if spec.tie_word_embeddings else "lm_head"].T


def _rms_norm(spec: ModelSpec, x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + spec.rms_norm_eps) * weight


def _swiglu(w: Mapping[str, np.ndarray], p: str, x: np.ndarray) -> np.ndarray:
    gate = x @ w[p + "gate"].T
    return (gate / (1 + np.exp(-gate)) * (x @ w[p + "up"].T)) @ w[p + "down"].T


def _moe(spec: ModelSpec, w: Mapping[str, np.ndarray], p: str, x: np.ndarray) -> np.ndarray:
    assert spec.moe is not None
    out = np.zeros_like(x)
    for t, row in enumerate(x):
        probability = np.exp(w[p + "router"] @ row)
        probability /= probability.sum()
        chosen = np.argsort(-probability, kind="stable")[: spec.moe.top_k]
        total = probability[chosen].sum() if spec.moe.norm_topk_prob else 1.0
        for e in chosen:
            out[t] += probability[e] / total * _swiglu(w, f"{p}experts.{e}.", row[None])[0]
    return out


def _attention(spec: ModelSpec, w: Mapping[str, np.ndarray], p: str, i: int, x: np.ndarray) -> np.ndarray:
    n, group = len(x), spec.num_attention_heads // spec.num_key_value_heads

    def heads(part: str) -> np.ndarray:
        y = x @ w[p + part].T + (w[p + part + "_bias"] if spec.qkv_bias else 0)
        y = y.reshape(n, -1, spec.head_dim)
        if part == "v":
            return y
        return _rope(spec, _rms_norm(spec, y, w[p + part + "_norm"]) if spec.qk_norm else y)

    q, k, v = heads("q"), heads("k"), heads("v")
    window = spec.layers[i].sliding_window or n
    distance = np.arange(n)[:, None] - np.arange(n)[None, :]
    seen = (distance >= 0) & (distance < window)
    out = np.empty_like(q)
    for head in range(spec.num_attention_heads):
        scores = np.where(seen, q[:, head] @ k[:, head // group].T / np.sqrt(spec.head_dim), -np.inf)
        probability = np.exp(scores - scores.max(axis=-1, keepdims=True))
        out[:, head] = probability / probability.sum(axis=-1, keepdims=True) @ v[:, head // group]
    y = out.reshape(n, -1) @ w[p + "o"].T
    return y + w[p + "o_bias"] if spec.o_bias else y


def _rope(spec: ModelSpec, x: np.ndarray) -> np.ndarray:
    """Rotates [n, heads, head_dim]; dimension i pairs with i + head_dim / 2."""
    angle = np.arange(len(x))[:, None] * np.asarray(spec.rope.inv_freq)[None, :]
    cos, sin = (f(angle)[:, None, :] * spec.rope.attention_factor for f in (np.cos, np.sin))
    a, b = np.split(x, 2, axis=-1)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
