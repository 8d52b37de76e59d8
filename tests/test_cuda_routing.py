"""Routing of the step kernel on the emulated machine, from router products on: that of csrc/cpu/mlp.h, to the bit where
scores are sigmoids."""

from __future__ import annotations

import subprocess
from pathlib import Path

import emulator
import numpy as np
from cuda_models import cuda_layout, small_spec
from test_routing import EXPERTS, SPEC, TOP_K, expected

from mkpack.codegen_cuda import cuda_header
from mkpack.manifest import Limits
from mkpack.spec import MoeSpec

SOURCE = Path(__file__).parent / "cuda" / "routing_test.cpp"
TOKENS, LAUNCHES = 16, 12
assert SPEC.moe
SIGMOID = SPEC.moe.model_copy(update={"intermediate_size": 64})
SOFTMAX = SIGMOID.model_copy(
    update={"scoring": "softmax", "choice_bias": False, "router_scale": 1.0, "norm_topk_eps": 0.0}
)


def products(rng: np.random.Generator) -> np.ndarray:
    """float32 [launches, tokens, experts]: of any size, many of them equal, zeros of both signs."""
    x = rng.normal(0, 1, (LAUNCHES, TOKENS, EXPERTS)) * rng.choice([0.01, 1, 10, 100], (LAUNCHES, TOKENS, 1))
    odd = rng.choice([0.0, -0.0, 0.5, 300.0, -300.0, 1e-30], x.shape)
    return np.where(rng.random(x.shape) < rng.choice([0.0, 0.2, 0.9], (LAUNCHES, TOKENS, 1)), odd, x).astype(np.float32)


class Router:
    def __init__(self, moe: MoeSpec, folder: Path) -> None:
        self.layout = cuda_layout(small_spec(hidden_size=64, layers=1, moe=moe.model_dump()))
        (folder / "model.h").write_text(
            cuda_header(self.layout, Limits(context=16, tokens_per_step=16), "sm_90a", grid=1)
        )
        self.program = emulator.build(SOURCE, folder / "route", headers=folder)

    def choose(self, given: np.ndarray, **biases: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Experts and weights [launches, tokens, top_k]."""
        vectors = np.zeros(self.layout.norm_layer, np.float32)
        for name, bias in biases.items():
            at, size = self.layout.vectors[name]
            vectors[at : at + size] = bias
        done = subprocess.run(
            [self.program], input=vectors.tobytes() + given.tobytes(), capture_output=True, timeout=300
        )
        assert done.returncode == 0, done.stderr.decode()
        raw = np.frombuffer(done.stdout, np.uint8).reshape(len(given), -1)
        split = TOKENS * TOP_K * 2
        shape = (len(given), TOKENS, TOP_K)
        return tuple(
            np.ascontiguousarray(part).view(kind).reshape(shape)
            for part, kind in ((raw[:, :split], np.int16), (raw[:, split:], np.float32))
        )  # type: ignore[return-value]


def test_sigmoids_with_a_bias_of_the_choice_to_the_bit(tmp_path):
    rng = np.random.default_rng(0)
    router, given = Router(SIGMOID, tmp_path), products(rng)
    near = np.float32(1) + rng.integers(0, 2, EXPERTS).astype(np.float32) * np.float32(2.0**-20)  # equal in bfloat16
    for choice_bias in (rng.normal(0, 0.3, EXPERTS).astype(np.float32), near):
        router_bias = rng.choice([0.0, -0.0, 0.25, -1.5], EXPERTS).astype(np.float32)
        experts, weights = router.choose(given, router_bias=router_bias, choice_bias=choice_bias)
        for index in np.ndindex(LAUNCHES, TOKENS):
            chosen, shares = expected(given[index], router_bias, choice_bias)
            assert experts[index].tolist() == chosen.tolist()
            assert weights[index].tobytes() == shares.tobytes()


def test_softmax_of_logits_with_a_bias(tmp_path):
    rng = np.random.default_rng(1)
    router, given = Router(SOFTMAX, tmp_path), products(rng)
    bias = rng.choice([0.0, -0.0, 0.25], EXPERTS).astype(np.float32)
    experts, weights = router.choose(given, router_bias=bias)
    logits = given + bias
    chosen = np.argsort(-logits, axis=-1, kind="stable")[..., :TOP_K]
    assert np.array_equal(experts, chosen)
    score = np.exp(np.take_along_axis(logits, chosen, -1).astype(np.float64) - logits.max(-1, keepdims=True))
    np.testing.assert_allclose(
        weights, score / score.sum(-1, keepdims=True) * SOFTMAX.routed_scaling_factor, rtol=1e-5, atol=1e-30
    )
