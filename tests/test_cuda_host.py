"""The host side of a CUDA target on the emulated machine: refusals, tokens and cache of any request, failures."""

from __future__ import annotations

import ctypes
import math
import re
import subprocess
from pathlib import Path

import emulator
import kernels
import numpy as np
import pytest
from cuda_models import cuda_layout, small_spec
from test_cuda_emulated import LIMITS, TWO_LAYERS

from mkpack import abi
from mkpack.native import Library

LAYOUT, GRID = cuda_layout(small_spec(hidden_size=64, vocab_size=13, layers=TWO_LAYERS)), 3
VOCAB = LAYOUT.spec.vocab_size


@pytest.fixture(scope="module")
def emulated():
    return emulator.Emulated.random(LAYOUT, LIMITS, GRID)


@pytest.fixture
def library(emulated):
    path = emulated.library()
    library = Library(path.read_bytes(), str(path))
    yield library
    library.close()


@pytest.fixture(scope="module")
def blob(emulated):
    return np.memmap(emulated.blob, np.uint8, "r")


@pytest.fixture(scope="module")
def running(emulated):
    with emulated.running(wait_limit_s=1e6) as model:
        yield model


@pytest.fixture
def model(running):
    """One for all tests that leave it usable, empty."""
    assert running.truncate(0) == abi.OK
    return running


@pytest.fixture(scope="module")
def expected(running):
    """Of a cache that holds these tokens, the `count` that follow, chosen by steps of their own."""
    known: dict[tuple[int, ...], int] = {}

    def continued(cache: list[int], count: int) -> list[int]:
        found = list(cache)
        for _ in range(count):
            if tuple(found) not in known:
                known[tuple(found)] = int(running.run(found)[-1].argmax())
            found.append(known[tuple(found)])
        return found[len(cache) :]

    return continued


# -- creating ----------------------------------------------------------------------------------------------------------


def test_bad_options_are_refused(library, blob):
    for options, text in (
        ({"num_ranks": 2}, "compiled for 1 rank, given 2"),
        ({"weights_bytes": 17}, f"must be {LAYOUT.nbytes} bytes, given 17"),
        ({"context": 65}, "at most 64, given 65"),
        ({"context": -1}, "at most 64, given -1"),
        ({"wait_limit_s": 0.0}, "wait_limit_s"),
        ({"wait_limit_s": math.nan}, "wait_limit_s"),
    ):
        code, handle = kernels.try_create(library.lib, LAYOUT, [blob], **options)
        assert code == abi.ERR_ARGUMENT and text in library.lib.mk_last_error().decode()
        assert not handle.value


def virtual_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * 4096


@pytest.mark.parametrize(
    ("what", "value", "code", "text"),
    [
        ("GPUS", 0, abi.ERR_DEVICE, "no GPU to run on: this process sees none, or the NVIDIA driver is missing"),
        ("CAPABILITY", 89, abi.ERR_DEVICE, "(emulated GPU) has compute capability 8.9, this kernel is for 9.0 only"),
        ("CAPABILITY", 100, abi.ERR_DEVICE, "has compute capability 10.0, this kernel is for 9.0 only"),
        ("SMS", 2, abi.ERR_DEVICE, "shows this process 2 SMs, and the kernel needs 3"),
        ("COOPERATIVE", 0, abi.ERR_DEVICE, "does not offer cooperative launches"),
        ("SHARED", 99 << 10, abi.ERR_DEVICE, "gives a block 101376 bytes of shared memory, the kernel needs "),
        ("MEMORY", 1000, abi.ERR_MEMORY, "has 0.0 GB of 0.0 GB free, the model needs 0.1 GB (weights 0.0 GB, KV"),
    ],
)
def test_gpus_that_cannot_run_it_are_refused(library, blob, monkeypatch, what, value, code, text):
    monkeypatch.setenv(f"MK_EMULATOR_{what}", str(value))
    found, handle = kernels.try_create(library.lib, LAYOUT, [blob])
    assert (found, handle.value) == (code, None)
    assert text in library.lib.mk_last_error().decode()


def test_gpu_memory_comes_back(library, blob):
    def create() -> None:
        code, handle = kernels.try_create(library.lib, LAYOUT, [blob])
        assert code == abi.OK
        library.lib.mk_destroy(handle)

    create()
    before = virtual_bytes()
    for _ in range(20):
        create()
    assert virtual_bytes() - before < 20 * LAYOUT.nbytes / 2


def test_it_is_unloaded_even_after_an_error(emulated, blob):
    before = Path("/proc/self/maps").read_text().count("mkpack-kernel")
    path = emulated.library()
    library = Library(path.read_bytes(), str(path))
    assert kernels.try_create(library.lib, LAYOUT, [blob], num_ranks=2)[0] == abi.ERR_ARGUMENT
    library.close()
    assert Path("/proc/self/maps").read_text().count("mkpack-kernel") == before


# -- generating --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("prompt", "new"), [(1, 1), (1, 9), (2, 2), (15, 3), (16, 1), (16, 4), (17, 1), (33, 3)])
def test_tokens_and_cache(model, expected, prompt, new):
    ids = [(7 * i + prompt) % VOCAB for i in range(prompt)]
    wanted = expected(ids, new)
    assert model.truncate(0) == abi.OK
    got = model.generate(ids, max_new_tokens=new)
    assert got.code == abi.OK and got.tokens == wanted
    assert (got.result.stop_reason, got.result.num_new_tokens) == (abi.STOP_LENGTH, new)
    assert got.result.num_prompt_tokens == prompt and got.result.prefill_s >= 0 and got.result.decode_s >= 0
    assert model.length() == prompt + new - 1


def test_it_continues_what_the_cache_holds(model, expected):
    first = expected([1, 2, 3], 6)
    held = [1, 2, 3, *first[:-1]]
    wanted = expected([*held, 9], 3), expected([*held[:5], 8, 7], 4), expected([5], 2)
    assert model.truncate(0) == abi.OK
    assert model.generate([1, 2, 3], max_new_tokens=6).tokens == first
    assert model.generate([9], max_new_tokens=3).tokens == wanted[0]
    assert model.truncate(5) == abi.OK
    assert model.generate([8, 7], max_new_tokens=4).tokens == wanted[1]
    assert model.truncate(0) == abi.OK and model.length() == 0
    assert model.generate([5], max_new_tokens=2).tokens == wanted[2]
    assert model.truncate(7) == abi.ERR_ARGUMENT and "cannot truncate 2 positions to 7" in model.error()


@pytest.mark.parametrize("at", [0, 1, 5])
def test_stop_tokens(model, expected, at):
    tokens = expected([4], 8)
    end = tokens.index(tokens[at]) + 1
    wanted = expected([4, *tokens[: end - 1], 6], 2)
    assert model.truncate(0) == abi.OK
    got = model.generate([4], stop=[tokens[at], 999], max_new_tokens=12)
    assert got.tokens == tokens[:end] and got.result.stop_reason == abi.STOP_TOKEN
    assert model.length() == end
    assert model.generate([6], max_new_tokens=2).tokens == wanted


@pytest.mark.parametrize("at", [1, 2, 8])
def test_cancelled_by_the_callback(model, expected, at):
    wanted, then = expected([4], at), expected([4, *expected([4], at)[:-1], 6], 2)
    assert model.truncate(0) == abi.OK
    calls = iter(range(1, 41))
    got = model.generate([4], lambda _: next(calls) == at, max_new_tokens=12)
    assert got.tokens == wanted and got.result.stop_reason == abi.STOP_CANCELLED
    # What the launch ran beyond it is not in the cache.
    assert model.length() == at
    assert model.generate([6], max_new_tokens=2).tokens == then


def test_cancelled_from_outside(model):
    got = model.generate([4], lambda _: model.lib.mk_cancel(model.handle), max_new_tokens=12)
    assert len(got.tokens) == 1 and got.result.stop_reason == abi.STOP_CANCELLED
    assert model.generate([4], max_new_tokens=3).result.stop_reason == abi.STOP_LENGTH  # an old cancel is forgotten


def test_the_context_ends_it(model, expected):
    wanted = expected([1] * 60, 5)
    assert model.truncate(0) == abi.OK
    got = model.generate([1] * 60, max_new_tokens=40)
    assert got.tokens == wanted and got.result.stop_reason == abi.STOP_CONTEXT
    assert model.length() == 64
    got = model.generate([1], max_new_tokens=1)
    assert got.code == abi.ERR_CONTEXT and "1 tokens do not fit: 64 of 64 positions are taken" in got.error


def test_a_smaller_context(emulated):
    with emulated.running(context=6, wait_limit_s=1e6) as model:
        got = model.generate([1], max_new_tokens=40)
        assert len(got.tokens) == 6 and got.result.stop_reason == abi.STOP_CONTEXT


def test_requests_that_are_refused(model):
    for request, text in (
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1"),
        ({"temperature": math.nan}, "sampling values out of range"),
        ({"temperature": -1.0}, "sampling values out of range"),
        ({"top_p": 0.0}, "sampling values out of range"),
        ({"min_p": 1.5}, "sampling values out of range"),
        ({"repetition_penalty": 0.0}, "sampling values out of range"),
        ({"stop": list(range(65))}, "at most 64 stop tokens, given 65"),
    ):
        got = model.generate([1], **request)
        assert got.code == abi.ERR_ARGUMENT and text in got.error
    got = model.generate([1, 1000])
    assert got.code == abi.ERR_ARGUMENT and f"token 1000 at 1 is outside the vocabulary of {VOCAB}" in got.error
    got = model.generate([])
    assert got.code == abi.ERR_ARGUMENT and "the prompt is empty" in got.error
    assert model.length() == 0


# -- steps -------------------------------------------------------------------------------------------------------------


def test_logits_of_the_last_tokens_only(model):
    wanted = model.run([5, 6, 7, 8, 9])
    assert model.truncate(0) == abi.OK
    rows = model.step([5, 6, 7], num_logits=2)
    assert rows.tobytes() == wanted[1:3].tobytes()
    assert model.step([8], num_logits=0).shape == (0, VOCAB)
    assert np.array_equal(model.step([9]).argmax(1), wanted[4:].argmax(1)) and model.length() == 5


def test_steps_that_are_refused(model):
    for tokens, num, text in (
        ([], 0, "1 to 16 tokens, given 0"),
        ([1] * 17, 0, "1 to 16 tokens, given 17"),
        ([1], 2, "num_logits must be 0 to the number of tokens"),
        ([-1], 0, "token -1 at 0 is outside the vocabulary"),
    ):
        code, _ = model.try_step(tokens, num)
        assert code == abi.ERR_ARGUMENT and text in model.error()
    assert model.length() == 0


def test_read_bandwidth(model):
    found = ctypes.c_double()
    assert model.lib.mk_read_bandwidth(model.handle, ctypes.byref(found)) == abi.OK
    page = 16384 * GRID
    assert found.value == LAYOUT.nbytes // page * page / 1e-3  # every measurement takes a millisecond


# -- failures ----------------------------------------------------------------------------------------------------------


def test_a_launch_that_fails(emulated, monkeypatch):
    with emulated.running(wait_limit_s=1e6) as model:
        assert model.generate([1, 2], max_new_tokens=2).code == abi.OK
        monkeypatch.setenv("MK_EMULATOR_SMS", str(GRID - 1))
        got = model.generate([1, 2], max_new_tokens=4)
        text = "launching the kernel: the emulator refuses this (cudaErrorCooperativeLaunchTooLarge)"
        assert (got.code, got.error) == (abi.ERR_DEVICE, text)
        # The cache may hold anything: every later call says why, without touching the GPU.
        monkeypatch.delenv("MK_EMULATOR_SMS")
        for again in (model.generate([1]).code, model.try_step([1], 0)[0]):
            assert again == abi.ERR_DEVICE and model.error() == text


def test_waits_that_end_name_phase_and_sm(emulated, tmp_path):
    """Of every phase, as host code words it. That a kernel reports them: test_cuda_emulated.py."""
    (tmp_path / "model.h").write_text(emulated.header)
    (tmp_path / "describe.cpp").write_text(
        '#include <cstdio>\n#include "device.cuh"\nusing namespace mk;\n'
        "int main() {\n"
        "  for (uint32_t phase = 0; phase < kPhases; phase++)\n"
        "    puts(describe({1, phase, 17, kLayers + 2}, 2.5, 0).c_str());\n"
        "}\n"
    )
    program = emulator.build(tmp_path / "describe.cpp", tmp_path / "describe", headers=tmp_path)
    lines = subprocess.run([program], capture_output=True, text=True, check=True).stdout.splitlines()
    form = r"a wait of 2\.5 s ended: SM 17 made no progress in phase ([a-z/ ]+?)( of layer 1)?, waiting for [a-z, /K]+"
    phases = [re.match(form, line) for line in lines]
    assert all(phases) and len({p[1] for p in phases}) == len(lines) > 8
    assert [p[1] for p in phases if not p[2]] == ["head", "token"]
    assert "phase output projection of layer 1, waiting for the attention of all heads, or its weights;" in lines[4]
