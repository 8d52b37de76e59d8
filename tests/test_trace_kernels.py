"""Times that CUDA kernels keep in builds with --trace, on the emulated machine, whose clock counts its turns."""

from __future__ import annotations

import emulator
import numpy as np
import pytest
from cuda_models import cuda_layout, cuda_spec, small_spec

from mkpack import abi
from mkpack.codegen_cuda import cuda_header
from mkpack.manifest import Limits
from mkpack.trace import Trace, summarise, to_chrome

LIMITS = Limits(context=32, tokens_per_step=16)
PROMPT = [5, 9, 11, 2]
# decode_kernel's at a shape just large enough for it, and the step kernel's.
DECODE = cuda_spec(
    hidden_size=1024,
    num_attention_heads=8,
    num_key_value_heads=2,
    vocab_size=67,
    moe={"num_experts": 32, "intermediate_size": 256},
)
MODELS = {"decode": (cuda_layout(DECODE), 64), "step": (cuda_layout(small_spec(hidden_size=64, vocab_size=13)), 3)}


def traced(name: str, *wanted: emulator.Call, trace: bool = True) -> list:
    layout, grid = MODELS[name]
    return emulator.Emulated.random(layout, LIMITS, grid, trace=trace).calls(*wanted)


def check_order(names: list[str], stamps: np.ndarray) -> None:
    """Every phase that an SM took part in has its moments in order, and each SM its phases one after the other."""
    found = Trace(names, stamps, "")
    last = np.zeros(stamps.shape[3], np.int64)
    phases = found.phases
    for step in range(stamps.shape[0]):
        for layer in range(stamps.shape[1]):
            for row in phases:
                entered, begin, end = (a[step, layer, row] for a in (found.entered, found.begin, found.end))
                there = begin > 0
                assert (entered[there] <= begin[there]).all() and (begin[there] <= end[there]).all(), names[row]
                assert (last[there] <= entered[there]).all(), (step, layer, names[row])
                last[there] = end[there]


def test_decode_kernel():
    calls = [
        ("run", [PROMPT[:3]], {}),
        ("trace", [PROMPT[3:], 2], {}),
        ("trace", [PROMPT, 1], {}),
        ("length", [], {}),
        ("trace", [PROMPT[:1], 40], {}),
    ]
    found = traced("decode", *calls)
    _, (code, names, stamps), (_, step_names, several), length, (too_many, _, _) = found
    assert code == abi.OK and length == 3 and too_many == abi.ERR_CONTEXT
    assert stamps.shape == (2, 2, len(names), 64, 4)
    check_order(names, stamps)
    check_order(step_names, several)
    row = {name: i for i, name in enumerate(names)}
    assert "experts choose" in row and "consumers choose" in step_names
    # One launch: the steps follow each other. Everybody has its share of gate/up, and waits for its input there.
    assert (stamps[1:, 0, row["consumers qkv"], :, 0] >= stamps[:-1, 1, row["consumers token"], :, 3]).all()
    for name in ("consumers qkv", "consumers gate/up", "experts choose"):
        assert (stamps[:, 0, row[name]][..., [0, 1, 3]] > 0).all(), name
    # Weights of the next step come before it begins.
    assert (stamps[1:, 0, row["dense qkv"], :, 0] < stamps[:-1, 1, row["consumers token"], :, 3]).all()
    experts = stamps[:, 0, row["experts gate/up and down"]]
    assert (experts[..., 0] > 0).all() and (experts[..., 3] > experts[..., 0]).all()
    found = summarise(Trace(names, stamps, ""))
    assert {p.name for p in found.phases} >= {"qkv", "attention", "combine", "out", "router", "gate/up", "down", "head"}
    assert found.step_us > 0 and '"experts"' in to_chrome(Trace(names, stamps, ""))


def test_step_kernel():
    found = traced("step", ("run", [PROMPT], {}), ("trace", [PROMPT[:1], 2], {}), ("trace", [PROMPT, 2], {}))
    for code, names, stamps in found[1:]:
        assert code == abi.OK and (stamps[..., 0] > 0).any(axis=(1, 2)).all()
        check_order(names, stamps)
        assert (stamps[1:, 0, 0, :, 0] > stamps[:-1, 0, 0, :, 0]).all()


def test_an_ordinary_build_keeps_no_times():
    ((code, _, _),) = traced("step", ("trace", [PROMPT[:1], 2], {}), trace=False)
    assert code == abi.ERR_ARGUMENT


@pytest.mark.parametrize("name", MODELS)
def test_only_the_header_of_a_traced_build_says_so(name):
    layout, grid = MODELS[name]
    plain, other = (cuda_header(layout, LIMITS, "sm_90a", trace, grid) for trace in (False, True))
    assert "MK_TRACE" not in plain and '"trace"' not in plain
    assert other.replace("#define MK_TRACE\n", "").replace(', "trace": true', "") == plain
