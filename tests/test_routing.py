"""Routing by sigmoid and bias, bit for bit: the compiled router and its choice against float32 in numpy, and torch."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import kernels
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from kernels import Weights, precision, tiny_spec
from transformers.models.minimax_m2.modeling_minimax_m2 import MiniMaxM2Config, MiniMaxM2TopKRouter

from mkpack import codegen, compile, platform
from mkpack.formats import QTensor
from mkpack.layout import Layout
from mkpack.manifest import Limits

EXPERTS, TOP_K, TARGET = 37, 5, "x86-64-v3"
SPEC = tiny_spec(
    hidden_size=40,
    moe={
        **{"num_experts": EXPERTS, "top_k": TOP_K, "scoring": "sigmoid", "choice_bias": True, "router_bias": True},
        **{"router_scale": 0.1767766952966369, "norm_topk_eps": 1e-15, "routed_scaling_factor": 2.5},
    },
)
# Runs the router phase on a given input and says what is chosen.
PROGRAM = r"""
#include "cpu/mlp.h"
using namespace mk;
extern "C" void choose(const void* blob, const float* x, int* experts, float* weights) {
  const void* blobs[] = {blob};
  Failure failure;
  State s({blobs, 1, 16, 1.0, false}, failure);
  s.step.count = s.step.slots = 1;
  std::copy_n(x, kHiddenBlocks * 16, s.locals[0].normed.data());
  router_phase(s, 0, 0);
  choose_experts(s, 0, 0, experts, weights);
}
"""
if TARGET not in kernels.TARGETS:
    pytest.skip("this machine runs no CPU target", allow_module_level=True)
floats = arrays.arrays(
    np.float32,
    EXPERTS,
    elements=st.one_of(st.floats(-30, 30, width=32), st.sampled_from([0.0, -0.0, 0.5, 300.0, -300.0, 1e-30])),
)


class Router:
    """One compiled router whose matrix is the identity, so that the logits are its input."""

    def __init__(self, folder: Path) -> None:
        self.layout = Layout(SPEC, precision())
        compiler = platform.compiler()
        assert compiler
        (folder / "model.h").write_text(
            codegen.model_header(self.layout, Limits(context=16, tokens_per_step=1), TARGET)
        )
        (folder / "route.cpp").write_text(PROGRAM)
        flags = [f for f in compile.CPU_FLAGS if f != "-fvisibility=hidden"]
        command = [*compiler.command, *flags, f"-march={TARGET}", f"-I{compile.sources()}", "-I.", "route.cpp"]
        subprocess.run([*command, "-o", "route.so"], cwd=folder, check=True)
        self.lib = ctypes.CDLL(str(folder / "route.so"))
        eye = np.eye(EXPERTS, SPEC.hidden_size, dtype=np.float32)
        router = QTensor("f32", eye.shape, eye)
        weights = Weights.random(self.layout, changed={"layers.0.router": router})
        self.blob = np.array(weights.blobs(folder)[0])  # a copy that tests may write to

    def vector(self, name: str) -> np.ndarray:
        """A vector of the first layer, in place."""
        offset = self.layout.section(f"layers.0.{name}").offset
        return self.blob[offset : offset + EXPERTS * 4].view(np.float32)

    def choose(self, logits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        x = np.zeros(48, np.float32)
        x[:EXPERTS] = logits
        experts, weights = np.empty(TOP_K, np.int32), np.empty(TOP_K, np.float32)
        self.lib.choose(*(ctypes.c_void_p(a.ctypes.data) for a in (self.blob, x, experts, weights)))
        return experts, weights


@pytest.fixture(scope="module")
def router(tmp_path_factory) -> Router:
    return Router(tmp_path_factory.mktemp("router"))


def expected(logits: np.ndarray, router_bias: np.ndarray, choice_bias: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The definition: float32 throughout, every operation rounded once."""
    assert SPEC.moe
    moe, f32 = SPEC.moe, np.float32
    scaled = (logits + router_bias) * f32(moe.router_scale)
    score = (1 / (1 + np.exp(-scaled.astype(np.float64)))).astype(f32)
    chosen = np.argsort(-(score + choice_bias), kind="stable")[:TOP_K]
    total = f32(0)
    for e in chosen:
        total = total + score[e]
    weights = score[chosen] / (total + f32(moe.norm_topk_eps)) * f32(moe.routed_scaling_factor)
    return chosen.astype(np.int32), weights.astype(f32)


@settings(max_examples=300)
@given(floats, floats, floats)
def test_routing_is_float32_to_the_bit(router: Router, logits, router_bias, choice_bias) -> None:
    router.vector("router_bias")[:] = router_bias
    router.vector("choice_bias")[:] = choice_bias
    experts, weights = router.choose(logits)
    chosen, shares = expected(logits, router_bias, choice_bias)
    assert experts.tolist() == chosen.tolist()
    assert weights.tobytes() == shares.tobytes()


def test_a_bias_that_bfloat16_would_round_decides(router: Router) -> None:
    router.vector("router_bias")[:] = 0
    bias = router.vector("choice_bias")
    bias[:] = 1.0
    bias[30:35] = 1.0 + 2.0**-20  # in bfloat16: 1.0, and the first five experts would be chosen
    experts, weights = router.choose(np.zeros(EXPERTS, np.float32))
    assert experts.tolist() == [30, 31, 32, 33, 34]
    assert weights.tolist() == [0.5] * TOP_K


def test_choices_are_those_of_transformers(router: Router) -> None:
    rng = np.random.default_rng(0)
    bias = router.vector("choice_bias")
    bias[:] = rng.normal(0, 0.3, EXPERTS)
    router.vector("router_bias")[:] = 0
    theirs = MiniMaxM2TopKRouter(
        MiniMaxM2Config(hidden_size=EXPERTS, num_local_experts=EXPERTS, num_experts_per_tok=TOP_K)
    )
    assert SPEC.moe
    for logits in rng.normal(0, 10, (300, EXPERTS)).astype(np.float32):
        with torch.no_grad():
            theirs.weight.copy_(torch.eye(EXPERTS))
            scaled = torch.tensor(logits[None]) * SPEC.moe.router_scale
            _, weights, chosen = theirs(scaled, torch.tensor(bias))
        experts, ours = router.choose(logits)
        reference = dict(zip(chosen[0].tolist(), weights[0].tolist(), strict=True))
        assert sorted(experts.tolist()) == sorted(reference)
        np.testing.assert_allclose(ours / 2.5, [reference[e] for e in experts], rtol=1e-6)
