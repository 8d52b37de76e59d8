"""The host side of a CUDA target over a fake CUDA runtime: tests/cuda/fake_cudart.cu says what is real and what is not.

The twin here chooses the tokens that the fake kernel must choose, from the tokens that must be in the cache.
"""

from __future__ import annotations

import ctypes
import math
import subprocess
from contextlib import contextmanager
from pathlib import Path

import kernels
import numpy as np
import pytest
from cuda_models import cuda_layout, cuda_spec

from mkpack import abi, compile, platform
from mkpack.codegen_cuda import cuda_header
from mkpack.manifest import Limits
from mkpack.native import Library
from mkpack.spec import RopeSpec

ROPE = RopeSpec(inv_freq=tuple(float(np.float32(1e4 ** -(i / 64))) for i in range(64)), attention_factor=1.25)
SPEC = cuda_spec(vocab_size=1000, rope=ROPE)
LAYOUT = cuda_layout(SPEC)
LIMITS = Limits(context=100, tokens_per_step=16)
TARGET = "sm_90a"


@pytest.fixture(scope="module")
def kernel(tmp_path_factory):
    """Path of the .so: model.cu as it ships, linked with the fake runtime."""
    nvcc = platform.nvcc()
    if nvcc is None:
        pytest.skip("no nvcc in CUDA_HOME, on the PATH or in /usr/local/cuda")
    folder, csrc = tmp_path_factory.mktemp("fake"), compile.sources()
    (folder / "model.h").write_text(cuda_header(LAYOUT, LIMITS, TARGET))
    flags = ["none" if f == "static" else f for f in compile.cuda_flags(TARGET) if f != "-v"]
    flags.remove("-Xptxas")
    sources = [csrc / "cuda" / "model.cu", Path(__file__).parent / "cuda" / "fake_cudart.cu"]
    paths = [f"-I{csrc}", f"-I{csrc / 'cuda'}", f"-I{folder}", "-Xlinker", f"--version-script={csrc / 'exports.map'}"]
    subprocess.run([*nvcc.command, *flags, *paths, *sources, "-o", folder / "kernel.so"], check=True, timeout=300)
    return folder / "kernel.so"


@pytest.fixture(scope="module")
def blob(tmp_path_factory):
    """Zeros, but for one value in the embedding and one in the final norm, which the fake kernel looks for."""
    blob = np.memmap(tmp_path_factory.mktemp("blob") / "blob", np.uint8, "w+", shape=(LAYOUT.nbytes,))
    blob[LAYOUT.offset("embedding") :][:2] = (0x34, 0x12)
    at = LAYOUT.offset("norms") + LAYOUT.norm_layer * 4
    blob[at : at + 4] = np.frombuffer(np.float32(2.5).tobytes(), np.uint8)
    return blob


class Fake(kernels.Model):
    def set(self, what: str, value: int) -> None:
        self.lib.mk_fake_set(what.encode(), ctypes.c_longlong(value))


def create(library: Library, blob, **options):
    return kernels.try_create(library.lib, LAYOUT, [blob], **{"wait_limit_s": 2.5, **options})


@contextmanager
def started(kernel, blob):
    library = Library(kernel.read_bytes(), str(kernel))
    library.lib.mk_fake_problem.restype = ctypes.c_char_p
    code, handle = create(library, blob)
    assert code == abi.OK, library.lib.mk_last_error().decode()
    try:
        yield Fake(library.lib, handle, SPEC.vocab_size, 16)
    finally:
        library.lib.mk_destroy(handle)
        assert library.lib.mk_fake_problem() == b""
        assert library.lib.mk_fake_allocations() == 0
        library.close()


@pytest.fixture(scope="module")
def running(kernel, blob):
    with started(kernel, blob) as model:
        yield model


@pytest.fixture
def model(running):
    """One for all tests that leave it usable, empty."""
    assert running.truncate(0) == abi.OK
    yield running
    assert running.lib.mk_fake_problem() == b""


@pytest.fixture
def fresh(kernel, blob):
    """One to be broken."""
    with started(kernel, blob) as model:
        yield model


def following(cache: list[int]) -> int:
    value = 1
    for token in cache:
        value = (value * 31 + token + 1) % 1000003
    return value % SPEC.vocab_size


def continued(cache: list[int], count: int) -> list[int]:
    cache, found = list(cache), []
    for _ in range(count):
        found.append(following(cache))
        cache.append(found[-1])
    return found


# -- creating ----------------------------------------------------------------------------------------------------------


def test_bad_options_are_refused(kernel, blob):
    library = Library(kernel.read_bytes(), str(kernel))
    for options, text in (
        ({"num_ranks": 2}, "compiled for 1 rank, given 2"),
        ({"weights_bytes": 17}, f"must be {LAYOUT.nbytes} bytes, given 17"),
        ({"context": 101}, "at most 100, given 101"),
        ({"context": -1}, "at most 100, given -1"),
        ({"wait_limit_s": 0.0}, "wait_limit_s"),
        ({"wait_limit_s": math.nan}, "wait_limit_s"),
    ):
        code, handle = create(library, blob, **options)
        assert code == abi.ERR_ARGUMENT and text in library.lib.mk_last_error().decode()
        assert not handle.value
    library.close()


@pytest.mark.parametrize(
    ("what", "value", "code", "text"),
    [
        ("devices", 0, abi.ERR_DEVICE, "no GPU to run on: this process sees none, or the NVIDIA driver is missing"),
        ("capability", 89, abi.ERR_DEVICE, "(Fake GPU) has compute capability 8.9, this kernel is for 9.0 only"),
        ("capability", 100, abi.ERR_DEVICE, "has compute capability 10.0, this kernel is for 9.0 only"),
        ("sms", 114, abi.ERR_DEVICE, "shows this process 114 SMs, and the kernel needs 132"),
        ("cooperative", 0, abi.ERR_DEVICE, "does not offer cooperative launches"),
        ("resident", 0, abi.ERR_DEVICE, "holds 0 blocks of the kernel at a time, and all 132 must be resident"),
        (
            "free",
            100_000_000,
            abi.ERR_MEMORY,
            "has 0.1 GB of 1099.5 GB free, the model needs 0.3 GB (weights 0.3 GB, KV",
        ),
    ],
)
def test_gpus_that_cannot_run_it_are_refused(kernel, blob, what, value, code, text):
    library = Library(kernel.read_bytes(), str(kernel))
    library.lib.mk_fake_set(what.encode(), ctypes.c_longlong(value))
    found, handle = create(library, blob)
    assert (found, handle.value) == (code, None)
    assert text in library.lib.mk_last_error().decode()
    assert library.lib.mk_fake_allocations() == 0
    library.close()


def test_it_is_unloaded_even_after_an_error(kernel, blob):
    before = Path("/proc/self/maps").read_text().count("mkpack-kernel")
    library = Library(kernel.read_bytes(), str(kernel))
    assert create(library, blob, num_ranks=2)[0] == abi.ERR_ARGUMENT
    library.close()
    assert Path("/proc/self/maps").read_text().count("mkpack-kernel") == before


# -- generating --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", [1, 2, 15, 16, 17, 33])
@pytest.mark.parametrize("new", [1, 2, 16, 17, 18, 50])
def test_tokens_and_cache(model, prompt, new):
    ids = [(7 * i + prompt) % SPEC.vocab_size for i in range(prompt)]
    got = model.generate(ids, max_new_tokens=new)
    assert got.code == abi.OK and got.tokens == continued(ids, new)
    assert (got.result.stop_reason, got.result.num_new_tokens) == (abi.STOP_LENGTH, new)
    assert got.result.num_prompt_tokens == prompt and got.result.prefill_s >= 0 and got.result.decode_s >= 0
    assert model.length() == prompt + new - 1


def test_it_continues_what_the_cache_holds(model):
    first = model.generate([1, 2, 3], max_new_tokens=20).tokens
    held = [1, 2, 3, *first[:-1]]
    assert model.generate([9], max_new_tokens=5).tokens == continued([*held, 9], 5)
    assert model.truncate(10) == abi.OK
    assert model.generate([8, 7], max_new_tokens=30).tokens == continued([*held[:10], 8, 7], 30)
    assert model.truncate(0) == abi.OK and model.length() == 0
    assert model.generate([5], max_new_tokens=2).tokens == continued([5], 2)
    assert model.truncate(7) == abi.ERR_ARGUMENT and "cannot truncate 2 positions to 7" in model.error()


@pytest.mark.parametrize("at", [0, 1, 2, 15, 16, 17, 30])
def test_stop_tokens(model, at):
    expected = continued([4], 40)
    stop = expected[at]
    end = expected.index(stop) + 1
    got = model.generate([4], stop=[stop, 999], max_new_tokens=40)
    assert got.tokens == expected[:end] and got.result.stop_reason == abi.STOP_TOKEN
    # What the launch ran beyond the stop is not in the cache.
    assert model.length() == end
    assert model.generate([6], max_new_tokens=3).tokens == continued([4, *expected[: end - 1], 6], 3)


@pytest.mark.parametrize("at", [1, 2, 9, 17, 20])
def test_cancelled_by_the_callback(model, at):
    calls = iter(range(1, 41))
    got = model.generate([4], lambda _: next(calls) == at, max_new_tokens=40)
    assert got.tokens == continued([4], at) and got.result.stop_reason == abi.STOP_CANCELLED
    assert model.length() == at


def test_cancelled_from_outside(model):
    got = model.generate([4], lambda _: model.lib.mk_cancel(model.handle), max_new_tokens=40)
    assert len(got.tokens) == 1 and got.result.stop_reason == abi.STOP_CANCELLED
    assert model.generate([4], max_new_tokens=3).result.stop_reason == abi.STOP_LENGTH  # an old cancel is forgotten


def test_the_context_ends_it(model):
    got = model.generate([1] * 90, max_new_tokens=40)
    assert got.tokens == continued([1] * 90, 11) and got.result.stop_reason == abi.STOP_CONTEXT
    assert model.length() == 100
    got = model.generate([1], max_new_tokens=1)
    assert got.code == abi.ERR_CONTEXT and "1 tokens do not fit: 100 of 100 positions are taken" in got.error


def test_a_smaller_context(kernel, blob):
    library = Library(kernel.read_bytes(), str(kernel))
    code, handle = create(library, blob, context=20)
    assert code == abi.OK
    got = Fake(library.lib, handle, SPEC.vocab_size, 16).generate([1], max_new_tokens=40)
    assert len(got.tokens) == 20 and got.result.stop_reason == abi.STOP_CONTEXT
    library.lib.mk_destroy(handle)
    library.close()


def test_requests_that_are_refused(model):
    for request, text in (
        ({"temperature": 0.7}, "chooses greedily only: temperature must be 0 and repetition_penalty 1, given 0.7"),
        ({"repetition_penalty": 1.1}, "chooses greedily only"),
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1"),
        ({"temperature": math.nan}, "sampling values out of range"),
    ):
        got = model.generate([1], **request)
        assert got.code == abi.ERR_ARGUMENT and text in got.error
    got = model.generate([1, 1000])
    assert got.code == abi.ERR_ARGUMENT and "token 1000 at 1 is outside the vocabulary of 1000" in got.error
    assert model.generate([]).code == abi.ERR_ARGUMENT
    assert model.length() == 0


# -- steps -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cuts", [(1,), (16, 16), (5, 1, 7)])
def test_logits_of_steps(model, cuts):
    tokens = [(3 * i) % SPEC.vocab_size for i in range(40)]
    rows = model.run(tokens, cuts)
    assert rows.argmax(1).tolist() == [following(tokens[: i + 1]) for i in range(40)]
    assert not np.isnan(rows).any() and model.length() == 40


def test_logits_of_the_last_tokens_only(model):
    rows = model.step([5, 6, 7], num_logits=2)
    assert rows.argmax(1).tolist() == [following([5, 6]), following([5, 6, 7])]
    assert model.step([8], num_logits=0).shape == (0, SPEC.vocab_size)
    assert model.step([9]).argmax() == following([5, 6, 7, 8, 9])


def test_steps_that_are_refused(model):
    for tokens, num, text in (
        ([], 0, "1 to 16 tokens, given 0"),
        ([1] * 17, 0, "1 to 16 tokens, given 17"),
        ([1], 2, "num_logits must be 0 to the number of tokens"),
        ([-1], 0, "token -1 at 0 is outside the vocabulary"),
    ):
        code, _ = model.try_step(tokens, num)
        assert code == abi.ERR_ARGUMENT and text in model.error()


def test_read_bandwidth(model):
    found = ctypes.c_double()
    assert model.lib.mk_read_bandwidth(model.handle, ctypes.byref(found)) == abi.OK
    assert found.value == pytest.approx(LAYOUT.nbytes / 1e-4, rel=0.02)


# -- failures ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("phase", "text"),
    [
        (
            3,
            "a wait of 2.5 s ended: SM 17 made no progress in phase output projection of layer 0, waiting for",
        ),
        (9, "SM 17 made no progress in phase token, waiting for the best token of every SM"),
    ],
)
@pytest.mark.parametrize("launch", [0, 3])
def test_a_wait_that_ends_names_phase_and_sm(fresh, phase, text, launch):
    fresh.set("expire_phase", phase)
    fresh.set("expire_at", launch)
    got = fresh.generate([1, 2], max_new_tokens=40)
    assert got.code == abi.ERR_TIMEOUT and text in got.error
    # The cache is lost: every later call says why, without touching the GPU.
    launches = fresh.lib.mk_fake_launches()
    assert fresh.generate([1]).code == abi.ERR_TIMEOUT and text in fresh.error()
    assert fresh.try_step([1], 0)[0] == abi.ERR_TIMEOUT
    assert fresh.lib.mk_fake_launches() == launches


def test_a_launch_that_fails(fresh):
    fresh.set("fail_at", 1)
    got = fresh.generate([1, 2], max_new_tokens=4)
    assert got.code == abi.ERR_DEVICE and got.error == "launching the kernel: fake error (fakeError)"
    assert fresh.generate([1]).code == abi.ERR_DEVICE
