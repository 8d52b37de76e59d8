"""GPU ranks on the emulated machine: their exchange by itself; ranks that share a device give the bits of one."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import emulator
import kernels
import numpy as np
import pytest
from cuda_models import cuda_layout, small_spec
from test_cuda_emulated import LIMITS, MUSE, PROMPT, SIGMOID, TWO_LAYERS

from mkpack import abi
from mkpack.layout_cuda import CudaLayout
from mkpack.native import Library
from mkpack.spec import LayerSpec, SwigluSpec

LADDER = Path(__file__).parent / "bench" / "ladder"
# fp8 and bf16, biases, norms, a window; 36 units of hidden rows, 8 of experts, 9 of the vocabulary; 2 KV heads.
SPEC = small_spec(hidden_size=576, qk_norm=True, qkv_bias=True, o_bias=True, layers=TWO_LAYERS)
ONE, GRID = cuda_layout(SPEC, "f32", attention="fp8", lm_head="fp8"), 5
CALLS = (
    ("run", [PROMPT], {"cuts": [1, 16]}),
    ("truncate", [0], {}),
    ("generate", [PROMPT], {"max_new_tokens": 3}),
    ("truncate", [4], {}),
    ("generate", [PROMPT[:3]], {"max_new_tokens": 4, "temperature": 1.5, "top_p": 0.95, "seed": 7}),
    ("truncate", [0], {}),
    ("try_step_taps", [PROMPT[:3], [0, 1], SPEC.hidden_size], {}),
)


# What families have beside that, small: how it is split over ranks.
FAMILIES = {
    "gpt-oss": cuda_layout(
        small_spec(
            vocab_size=13,
            qkv_bias=True,
            o_bias=True,
            attention_sinks=True,
            layers=TWO_LAYERS,
            moe={"router_bias": True, "expert_bias": True, "swiglu": SwigluSpec(alpha=1.702, limit=0.7, up_offset=1.0)},
        )
    ),
    "MiniMax-M2": cuda_layout(SIGMOID),
    "dense layers": cuda_layout(
        small_spec(vocab_size=13, layers=(LayerSpec(moe=True), LayerSpec(moe=False)), dense_intermediate_size=72),
        dense="fp8",
    ),
    "Muse Spark": cuda_layout(MUSE, attention="fp8", dense="fp8"),
}


def several(tp: int, per_device: int, flags: bool = False, of: CudaLayout = ONE, grid: int = GRID) -> emulator.Emulated:
    layout = CudaLayout(of.spec, of.precision, of.router_format, tp, per_device)
    return emulator.Emulated.random(layout, LIMITS, grid, flags=flags)


@pytest.fixture(scope="module")
def stress(tmp_path_factory):
    """2, 4 and 8 ranks that hammer each other, by words and by flags."""
    return emulator.build(LADDER / "ranks.cu", tmp_path_factory.mktemp("ranks") / "ranks", headers=LADDER)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_every_word_of_an_exchange_comes_through(stress, seed):
    environment = {**os.environ, "MK_EMULATOR_SEED": str(seed)}
    done = subprocess.run([stress, "50"], capture_output=True, text=True, env=environment, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "ok\n", "")


@pytest.fixture(scope="module")
def alone():
    """What one rank answers."""
    return emulator.Emulated.random(ONE, LIMITS, GRID).calls(*CALLS)


@pytest.fixture(scope="module")
def two():
    return several(2, 2)


def same(found: object, wanted: object) -> bool:
    """Equal to the bit."""
    if isinstance(found, list | tuple):
        assert isinstance(wanted, list | tuple)
        return all(same(a, b) for a, b in zip(found, wanted, strict=True))
    return found.tobytes() == wanted.tobytes() if isinstance(found, np.ndarray) else found == wanted


def test_two_ranks_give_the_bits_of_one(alone, two):
    assert np.isfinite(alone[0]).all() and alone[2][1] == alone[4][1] == abi.OK
    for seed in (1, 2):
        assert same(two.calls(*CALLS, seed=seed), alone)


def test_four_ranks_of_two_kv_heads_give_the_bits_of_one(alone):
    assert same(several(4, 4).calls(*CALLS), alone)


def test_exchanges_by_flags_give_the_same_bits(alone):
    assert same(several(2, 2, flags=True).calls(*CALLS), alone)


@pytest.mark.parametrize("family", FAMILIES)
def test_families_give_the_bits_of_one_rank(family):
    """Of two ranks, whose races are looked for, and of four, on as many SMs."""
    of = FAMILIES[family]
    calls = (("run", [PROMPT], {"cuts": [1]}), ("truncate", [0], {}), ("generate", [PROMPT[:3]], {"max_new_tokens": 3}))
    one = emulator.Emulated.random(of, LIMITS, 4).calls(*calls)
    assert np.isfinite(one[0]).all() and one[2][1] == abi.OK
    assert same(several(2, 2, of=of, grid=4).calls(*calls, races=True, seed=3), one)
    assert same(several(4, 4, of=of, grid=4).calls(*calls), one)


def test_no_races(two):
    steps, generated = two.calls(
        ("run", [PROMPT], {"cuts": [3]}), ("generate", [PROMPT[:2]], {"max_new_tokens": 2}), races=True, seed=5
    )
    assert np.isfinite(steps).all() and generated[1] == abi.OK


def test_a_rank_that_stalls_ends_all_and_is_named(two):
    """Its last block starts after 2 s; the others give up before."""
    first, second = two.calls(
        ("generate", [PROMPT[:2]], {}), ("try_step", [[1]], {}), wait_limit_s=0.5, late=2 * 10**9, stall=5000
    )
    assert first[1] == second[0] == abi.ERR_TIMEOUT
    form = r"a wait of 0\.5 s ended: SM \d of rank (\d) made no progress in phase [a-z/ ]+"
    found = re.match(form + r"( of layer \d)?, waiting for (.*?);", first[2])
    assert found and (found[1] == "1" or found[3] == "what rank 1 computes"), first[2]


def test_cancelled_by_the_callback(two, alone):
    with two.running(wait_limit_s=1e6) as model:
        got = model.generate(PROMPT, lambda _: True, max_new_tokens=8)
        assert got.tokens == alone[2][0][:1] and got.result.stop_reason == abi.STOP_CANCELLED
        assert model.generate([1], max_new_tokens=2).code == abi.OK


def test_what_cannot_hold_the_ranks_is_refused(two, monkeypatch):
    path = two.library()
    library = Library(path.read_bytes(), str(path))
    blobs = [np.memmap(blob, np.uint8, "r") for blob in two.blobs]

    def refused(code: int, text: str, given: list[np.ndarray]) -> None:
        assert kernels.try_create(library.lib, two.layout, given)[0] == code
        assert text in library.lib.mk_last_error().decode()

    refused(abi.ERR_ARGUMENT, "compiled for 2 ranks, given 1", blobs[:1])
    monkeypatch.setenv("MK_EMULATOR_SMS", "3")
    refused(abi.ERR_DEVICE, "shows this process 3 SMs, and the kernel needs 4 for 2 ranks, one for each", blobs)
    monkeypatch.setenv("MK_EMULATOR_SMS", "4")
    monkeypatch.setenv("MK_EMULATOR_MEMORY", "1000")
    refused(abi.ERR_MEMORY, "(2 times weights 0.0 GB", blobs)
    library.close()
