"""layerwise.compare() accepts the other expert at a near-tie, and nowhere else."""

from __future__ import annotations

import kernels
import layerwise
import numpy as np
import plain_model
from cuda_models import cuda_layout, small_spec

from mkpack.spec import LayerSpec

SPEC = small_spec(hidden_size=64, vocab_size=13, layers=(LayerSpec(moe=True), LayerSpec(moe=True, sliding_window=7)))
TOKENS = [(7 * i * i + 3 * i + 1) % 13 for i in range(20)]
WEIGHTS = kernels.Weights.random(cuda_layout(SPEC)).plain()
NOISE = 3e-3


def found(otherwise: tuple[int, int] | None = None, wrong: tuple[int, int] | None = None) -> layerwise.Found:
    """A kernel with errors of NOISE. otherwise: (layer, token) where it takes the first expert that is not chosen;
    wrong: where its error is ten times as large."""
    w, rng, hidden = plain_model.wide(WEIGHTS), np.random.default_rng(1), []
    x = plain_model.embedded(SPEC, w, TOKENS)
    for i in range(len(SPEC.layers)):
        middle = plain_model.after_attention(SPEC, w, i, x)
        x = plain_model.after_mlp(SPEC, w, i, middle)
        if otherwise and otherwise[0] == i:
            x[otherwise[1]] = plain_model.after_mlp(SPEC, w, i, middle, other=True)[otherwise[1]]
        error = rng.standard_normal(x.shape)
        error *= NOISE * np.linalg.norm(x, axis=1, keepdims=True) / np.linalg.norm(error, axis=1, keepdims=True)
        if wrong and wrong[0] == i:
            error[wrong[1]] *= 10
        x = x + error
        hidden.append(x.astype(np.float32))
    logits = plain_model.head(SPEC, w, x).astype(np.float32)
    return layerwise.compare(SPEC, WEIGHTS, TOKENS, np.stack(hidden), logits)


def choices(layer: int) -> tuple[np.ndarray, np.ndarray]:
    """Of a layer whose input has no error: gaps, and what the other expert changes."""
    w = plain_model.wide(WEIGHTS)
    x = [plain_model.embedded(SPEC, w, TOKENS), *plain_model.hidden(SPEC, w, TOKENS)][layer]
    middle = plain_model.after_attention(SPEC, w, layer, x)
    one, other = (plain_model.after_mlp(SPEC, w, layer, middle, other=other) for other in (False, True))
    change = np.linalg.norm(other - one, axis=1) / np.linalg.norm(one, axis=1)
    return plain_model.choice_gaps(SPEC, w, layer, middle), change


def test_the_other_expert_at_a_near_tie():
    token = int(choices(0)[0].argmin())
    same, other = found(), found(otherwise=(0, token))
    assert same.ties == [] and same.worst < 2 * NOISE
    assert other.ties == [(0, token)] and other.worst < 2 * NOISE
    assert f"near-ties chosen otherwise: layer 0 of token {token}" in str(other)


def test_the_other_expert_where_the_choice_is_clear():
    gaps, change = choices(1)
    token = int(np.where(gaps > 1, change, 0).argmax())
    clear = found(otherwise=(1, token))
    assert clear.ties == [] and clear.errors[1, token] == clear.worst > 10 * NOISE
    assert f"layer 1 of token {token}" in str(clear)


def test_one_wrong_position_is_not_excused():
    token = int(choices(0)[0].argmin())
    assert found(wrong=(0, token)).errors[0, token] > 9 * NOISE
