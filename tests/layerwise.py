"""A kernel's hidden states and logits, each held against the float64 twin of what went into it.

From a model's input to its logits an error may grow manyfold, at positions that are sensitive or where a rounding
chose another expert. Then no tolerance tells such a position from a wrong kernel. One layer, from the residual that
the kernel itself left before it, amplifies little, and at a near-tie has two right answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import plain_model

from mkpack.spec import ModelSpec

DIRECTIONS = 64


@dataclass(frozen=True)
class Found:
    """errors: [layers + 1, tokens], ||found - twin|| / ||twin|| of every layer's residual, then of the logits; at a
    near-tie of two experts, the smaller error of both choices. ties: (layer, token) where the kernel's was the other
    one."""

    errors: np.ndarray
    ties: list[tuple[int, int]]

    @property
    def worst(self) -> float:
        """Infinite where a NaN is."""
        return float(self.errors.max())

    @property
    def all_but_few(self) -> float:
        """What at most one in a thousand exceeds: of fewer than that the worst."""
        return float(np.quantile(self.errors, 0.999, method="higher"))

    def __str__(self) -> str:
        layer, token = np.unravel_index(self.errors.argmax(), self.errors.shape)
        where = "logits" if layer == len(self.errors) - 1 else f"layer {layer}"
        ties = ", ".join(f"layer {i} of token {t}" for i, t in self.ties)
        return f"at worst {self.worst:.1e}, {where} of token {token}; near-ties chosen otherwise: {ties or 'none'}"


def compare(
    spec: ModelSpec, weights: plain_model.Weights, tokens: Sequence[int], hidden: np.ndarray, logits: np.ndarray
) -> Found:
    """hidden: [layers, tokens, hidden_size], the residual after every layer."""
    w, rows, ties = plain_model.wide(weights), [], []
    x = plain_model.embedded(spec, w, tokens)
    for i, layer in enumerate(spec.layers):
        middle, found = plain_model.after_attention(spec, w, i, x), np.asarray(hidden[i], np.float64)
        errors = _errors(found, plain_model.after_mlp(spec, w, i, middle))
        if layer.moe and spec.moe and spec.moe.top_k < spec.moe.num_experts:
            near = np.flatnonzero(_near_ties(spec, w, i, middle, 2 * float(np.median(errors))))
            others = _errors(found[near], plain_model.after_mlp(spec, w, i, middle[near], other=True))
            ties += [(i, int(t)) for t in near[others < errors[near]]]
            errors[near] = np.minimum(errors[near], others)
        rows.append(errors)
        x = found
    rows.append(_errors(logits, plain_model.head(spec, w, x)))
    return Found(np.stack(rows), ties)


def _errors(found: np.ndarray, twin: np.ndarray) -> np.ndarray:
    errors = np.linalg.norm(found - twin, axis=1) / np.linalg.norm(twin, axis=1)
    return np.where(np.isfinite(errors), errors, np.inf)


def _near_ties(spec: ModelSpec, w: plain_model.Weights, i: int, middle: np.ndarray, error: float) -> np.ndarray:
    """Tokens whose choice lies within the noise: relative errors of this size in what the router reads, in random
    directions, change the gap by so much, at most of all directions, that it may close. The size is twice the median
    error that the kernel was found to make in this layer."""
    gaps, noise = plain_model.choice_gaps(spec, w, i, middle), np.zeros(len(middle))
    rng = np.random.default_rng(0)
    for _ in range(DIRECTIONS):
        step = rng.standard_normal(middle.shape)
        step *= error * np.linalg.norm(middle, axis=1, keepdims=True) / np.linalg.norm(step, axis=1, keepdims=True)
        noise = np.maximum(noise, np.abs(plain_model.choice_gaps(spec, w, i, middle + step) - gaps))
    return gaps < noise
