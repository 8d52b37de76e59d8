"""Generation inside the kernel: greedy, sampling against a slow twin, and everything that ends it."""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator

import kernels
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kernels import Kernels, Weights, precision, running, tiny_spec
from patience import PATIENCE_S

from mkpack import abi
from mkpack.layout import Layout
from mkpack.manifest import Limits

LIMITS = Limits(context=96, tokens_per_step=16)
SPEC = tiny_spec()  # 67 tokens: 13 rows of the last tile are padding
LAYOUT = Layout(SPEC, precision("bf16", experts="nvfp4"))
VOCAB = SPEC.vocab_size
PROMPT = [3, 66, 12, 0, 41, 7, 7, 30, 59, 22, 1, 64, 18, 5, 9, 33, 50, 2]
F32 = np.float32
if not kernels.TARGETS:
    pytest.skip("this machine runs no CPU target", allow_module_level=True)


@pytest.fixture(scope="module")
def kernel(tmp_path_factory):
    return Kernels.of_session(tmp_path_factory).path(LAYOUT, LIMITS)


@pytest.fixture(scope="module")
def blobs(tmp_path_factory):
    return Weights.random(LAYOUT, seed=11).blobs(tmp_path_factory.mktemp("blobs"))


@pytest.fixture(scope="module")
def shared(kernel, blobs):
    with running(kernel, LAYOUT, LIMITS, blobs) as model:
        yield model


@pytest.fixture
def model(shared):
    assert shared.truncate(0) == abi.OK
    return shared


# -- the slow twin of sampling -----------------------------------------------------------------------------------------


def draw(seed: int, position: int) -> float:
    """csrc/common/rng.h in Python's whole numbers."""
    mask = 2**64 - 1
    z = (seed + (position + 1) * 0x9E3779B97F4A7C15) & mask
    for _ in range(2):
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & mask
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB & mask
        z ^= z >> 31
    return (z >> 11) * 2.0**-53


def choices(logits, history, temperature, top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0):
    """(tokens, probabilities) in the order a draw walks them: penalty, temperature, top-k, top-p, min-p."""
    logits = logits.astype(F32).copy()
    for token in set(history):
        penalty = F32(repetition_penalty)
        logits[token] = logits[token] * penalty if logits[token] < 0 else logits[token] / penalty
    if temperature == 0:
        return [int(np.argmax(logits))], np.ones(1)
    heights = (logits - logits.max()) / F32(temperature)
    tokens = sorted(range(len(heights)), key=lambda t: (-heights[t], t))
    if top_k > 0:
        tokens = tokens[:top_k]
    p = np.exp(heights[tokens].astype(np.float64))
    if top_p < 1:
        reached = np.cumsum(p) >= np.float64(F32(top_p)) * p.sum()
        n = int(np.argmax(reached)) + 1
        tokens, p = tokens[:n], p[:n]
    if min_p > 0:
        kept = p >= np.float64(F32(min_p)) * (1 - 1e-7)
        tokens, p = [t for t, k in zip(tokens, kept, strict=True) if k], p[kept]
    if top_p >= 1:  # without a nucleus the walk goes by token
        order = np.argsort(tokens)
        tokens, p = [tokens[i] for i in order], p[order]
    return tokens, p / p.sum()


def check_sampled(model, prompt, generated, seed, **sampling):
    """Every token of a generation is the one the twin draws from the logits that mk_step gives."""
    model.truncate(0)
    history = list(prompt)
    logits = model.run(history)[-1]
    for token in generated:
        tokens, p = choices(logits, history, **sampling)
        edges = np.cumsum(p)
        at = draw(seed, len(history))
        wanted = tokens[min(int(np.searchsorted(edges, at, side="right")), len(tokens) - 1)]
        # exp differs in the last bit, so a draw on an edge may fall to either side.
        near_edge = np.abs(edges - at).min() < 1e-6
        assert token == wanted or near_edge and token in tokens
        history.append(token)
        logits = model.step([token])[-1]


# -- greedy ------------------------------------------------------------------------------------------------------------


def test_greedy_is_the_largest_logit_of_each_step(model):
    tokens = model.generate(PROMPT, max_new_tokens=20).tokens
    assert len(tokens) == 20 and len(set(tokens)) > 3
    model.truncate(0)
    logits = model.run(PROMPT)[-1]
    for token in tokens:
        assert token == int(np.argmax(logits))
        logits = model.step([token])[-1]


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_equal_logits_choose_the_lowest_token(threads, kernel, tmp_path):
    """A head of zeros, then one whose rows 20, 40 and 66 are the largest and equal; threads share the vocabulary."""
    weights = Weights.random(LAYOUT, seed=11)
    head = weights.tensors["lm_head"].data
    row = head[1].copy()
    head[:] = 0
    with running(kernel, LAYOUT, LIMITS, weights.blobs(tmp_path), threads=threads) as model:
        assert model.generate(PROMPT, max_new_tokens=3).tokens == [0, 0, 0]
        model.truncate(0)
        logit = None
        head[[20, 40, 66]] = row
    with running(kernel, LAYOUT, LIMITS, weights.blobs(tmp_path), threads=threads) as model:
        logit = model.run(PROMPT)[-1]
        best = 20 if logit[20] > 0 else 0
        model.truncate(0)
        assert model.generate(PROMPT, max_new_tokens=1).tokens == [best]
        assert logit[20] == logit[40] == logit[66] != 0
        head[:] = 0
        head[[20, 40, 66]] = row ^ (0 if best else 0x8000)  # the other sign
    with running(kernel, LAYOUT, LIMITS, weights.blobs(tmp_path), threads=threads) as model:
        assert model.generate(PROMPT, max_new_tokens=1).tokens == [20]


def test_negative_logits_never_lose_to_padding(kernel, tmp_path):
    """Padded vocabulary rows have logit 0, which would win here."""
    weights = Weights.random(LAYOUT, seed=11)
    with running(kernel, LAYOUT, LIMITS, weights.blobs(tmp_path)) as model:
        positive = model.run(PROMPT)[-1] > 0
        weights.tensors["lm_head"].data[positive] ^= 0x8000
    with running(kernel, LAYOUT, LIMITS, weights.blobs(tmp_path)) as model:
        logits = model.run(PROMPT)[-1]
        assert (logits < 0).all()
        model.truncate(0)
        assert model.generate(PROMPT, max_new_tokens=1).tokens == [int(np.argmax(logits))]
        for seed in range(300):
            model.truncate(len(PROMPT) - 1)
            (token,) = model.generate(PROMPT[-1:], max_new_tokens=1, temperature=50.0, seed=seed).tokens
            assert token < VOCAB


# -- sampling ----------------------------------------------------------------------------------------------------------


@settings(max_examples=80)
@given(
    seed=st.integers(0, 2**64 - 1),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 1.7, 10.0]),
    top_k=st.sampled_from([0, 1, 2, 5, 40, VOCAB - 1, VOCAB, VOCAB + 9]),
    top_p=st.sampled_from([1.0, 0.999, 0.9, 0.5, 0.01, 1e-6]),
    min_p=st.sampled_from([0.0, 0.02, 0.3, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.7, 5.0]),
    n=st.integers(1, len(PROMPT)),
)
@example(seed=2**64 - 1, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0, n=1)
@example(seed=5, temperature=1.0, top_k=VOCAB - 1, top_p=0.999, min_p=0.0, repetition_penalty=1.3, n=18)
def test_sampling_is_the_slow_twins(model, seed, n, **sampling):
    model.truncate(0)
    got = model.generate(PROMPT[:n], max_new_tokens=6, seed=seed, **sampling)
    assert got.code == abi.OK and len(got.tokens) == 6
    check_sampled(model, PROMPT[:n], got.tokens, seed, **sampling)


def test_draws_follow_the_probabilities(model):
    tokens, p = choices(model.run(PROMPT)[-1], PROMPT, temperature=2.0, top_k=12)
    n, found = 4000, Counter()
    for seed in range(n):
        model.truncate(len(PROMPT) - 1)
        found[model.generate(PROMPT[-1:], max_new_tokens=1, temperature=2.0, top_k=12, seed=seed).tokens[0]] += 1
    assert found.keys() <= set(tokens)
    chi2 = sum((found[t] - n * q) ** 2 / (n * q) for t, q in zip(tokens, p, strict=True))
    assert chi2 < 45  # 11 degrees of freedom: one in a million


def test_a_draw_depends_on_seed_and_position_only(model):
    whole = model.generate(PROMPT, max_new_tokens=10, temperature=1.5, seed=99).tokens
    model.truncate(0)
    first = model.generate(PROMPT, max_new_tokens=4, temperature=1.5, seed=99).tokens
    second = model.generate(first[-1:], max_new_tokens=6, temperature=1.5, seed=99).tokens
    assert first + second == whole
    model.truncate(0)
    assert model.generate(PROMPT, max_new_tokens=10, temperature=1.5, seed=100).tokens != whole


@pytest.mark.parametrize("temperature", [1e-45, 1e-38, 1e-6])
def test_a_tiny_temperature_is_greedy(model, temperature):
    greedy = model.generate(PROMPT).tokens
    for top_p in (1.0, 0.9):
        model.truncate(0)
        assert model.generate(PROMPT, temperature=temperature, top_p=top_p, seed=3).tokens == greedy


@pytest.mark.parametrize("bad", [range(1, VOCAB, 2), range(20, 50), range(VOCAB)], ids=["every other", "many", "all"])
def test_logits_that_are_no_numbers_are_not_chosen(kernel, tmp_path, bad):
    """Weights are data of whoever made them; some make NaN, which no comparison puts anywhere."""
    weights = Weights.random(LAYOUT, seed=11)
    weights.tensors["lm_head"].data[bad] = 0x7FC0  # NaN in bf16
    with running(kernel, LAYOUT, LIMITS, weights.blobs(tmp_path)) as model:
        for n in range(1, len(PROMPT)):
            model.truncate(0)
            logits = model.run(PROMPT[:n])[-1]
            assert sorted(np.flatnonzero(np.isnan(logits))) == list(bad)
            best = np.nan_to_num(logits, nan=-np.inf).argmax()
            for sampling in ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}, {"top_k": 40, "top_p": 1e-6}):
                model.truncate(n - 1)
                (token,) = model.generate(PROMPT[n - 1 : n], max_new_tokens=1, temperature=3.0, **sampling).tokens
                assert token == best if len(bad) < VOCAB else 0 <= token < VOCAB


# -- what ends it ------------------------------------------------------------------------------------------------------


def test_a_stop_token_ends_it_and_is_reported(model):
    free = model.generate(PROMPT, max_new_tokens=12).tokens
    stop = free[5]
    n = free.index(stop) + 1
    model.truncate(0)
    got = model.generate(PROMPT, stop=[VOCAB + 5, stop], max_new_tokens=12)
    assert got.tokens == free[:n] and got.result.stop_reason == abi.STOP_TOKEN and got.result.num_new_tokens == n
    assert model.length() == len(PROMPT) + n - 1  # the last token is not in the cache
    assert got.result.num_prompt_tokens == len(PROMPT)


def test_max_new_tokens(model):
    for n in (1, 2, 7):
        model.truncate(0)
        got = model.generate(PROMPT, max_new_tokens=n)
        assert len(got.tokens) == got.result.num_new_tokens == n
        assert got.result.stop_reason == abi.STOP_LENGTH
        assert got.result.prefill_s > 0 and got.result.decode_s >= 0


@pytest.mark.parametrize("n", [1, 50, 95, 96])
def test_a_full_context_ends_it(model, n):
    prompt = [PROMPT[i % len(PROMPT)] for i in range(n)]
    got = model.generate(prompt, max_new_tokens=1000)
    assert got.code == abi.OK and got.result.stop_reason == abi.STOP_CONTEXT
    assert len(got.tokens) == LIMITS.context - n + 1 and model.length() == LIMITS.context
    more = model.generate([1])
    assert more.code == abi.ERR_CONTEXT and "1 tokens do not fit: 96 of 96" in more.error


def test_a_stop_token_wins_over_the_other_reasons(model):
    got = model.generate(PROMPT, lambda _: True, max_new_tokens=1, stop=list(range(VOCAB)))
    assert got.result.stop_reason == abi.STOP_TOKEN and len(got.tokens) == 1


def test_the_callback_cancels(model):
    seen: list[int] = []
    got = model.generate(PROMPT, lambda t: seen.append(t) or len(seen) == 4, max_new_tokens=50)
    assert got.result.stop_reason == abi.STOP_CANCELLED and len(got.tokens) == 4
    assert model.length() == len(PROMPT) + 3


def test_mk_cancel_from_another_thread(model):
    started, cancelled = threading.Event(), threading.Event()
    seen: list[int] = []

    def callback(token: int) -> bool:
        started.set()
        seen.append(token)
        if len(seen) == 50:  # of the 90 that fit: the cancel has come by then, mostly in the middle of a step
            assert cancelled.wait(PATIENCE_S)
        return False

    def cancel() -> None:
        started.wait()
        model.lib.mk_cancel(model.handle)
        cancelled.set()

    thread = threading.Thread(target=cancel)
    thread.start()
    got = model.generate(PROMPT, callback, max_new_tokens=1000)
    thread.join()
    assert got.result.stop_reason == abi.STOP_CANCELLED
    model.truncate(0)
    assert len(model.generate(PROMPT).tokens) == 8  # a cancel does not outlive its generation


# -- mistakes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "request_", "text"),
    [
        ([], {}, "prompt is empty"),
        ([1, VOCAB], {}, f"token {VOCAB} at 1 is outside the vocabulary of {VOCAB}"),
        ([-1], {}, "token -1 at 0 is outside"),
        ([1], {"max_new_tokens": 0}, "max_new_tokens"),
        ([1], {"temperature": -1.0}, "out of range"),
        ([1], {"temperature": math.nan}, "out of range"),
        ([1], {"top_p": 0.0}, "out of range"),
        ([1], {"top_p": math.nan}, "out of range"),
        ([1], {"min_p": 1.5}, "out of range"),
        ([1], {"min_p": -0.1}, "out of range"),
        ([1], {"repetition_penalty": 0.0}, "out of range"),
    ],
)
def test_bad_generations_are_refused(model, prompt, request_, text):
    model.run(PROMPT)
    got = model.generate(prompt, **request_)
    assert got.code == abi.ERR_ARGUMENT and text in got.error
    assert got.tokens == [] and model.length() == len(PROMPT)


def test_bad_steps_are_refused(model):
    for tokens, logits, text in (
        ([], 0, "1 to 16 tokens, given 0"),
        ([1] * 17, 0, "1 to 16 tokens, given 17"),
        ([1, 2], 3, "num_logits"),
        ([1, 99], 1, "token 99 at 1"),
    ):
        code, _ = model.try_step(tokens, logits)
        assert code == abi.ERR_ARGUMENT and text in model.error()
    assert model.length() == 0
    for length in (-1, 1):
        assert model.truncate(length) == abi.ERR_ARGUMENT and f"0 positions to {length}" in model.error()
    model.run([1] * 90)
    assert model.try_step([1] * 7)[0] == abi.ERR_CONTEXT and "7 tokens do not fit: 90 of 96" in model.error()
    assert model.length() == 90


def test_a_closed_kernel_is_unloaded(tmp_path, blobs, kernel):
    def mapped() -> int:
        return open("/proc/self/maps").read().count("mkpack-kernel")

    before = mapped()
    with running(kernel, LAYOUT, LIMITS, blobs) as model:
        assert mapped() > before
        assert len(model.generate(PROMPT).tokens) == 8
        assert model.truncate(-1) == abi.ERR_ARGUMENT  # an error's text must not hold the library
    assert mapped() == before


@contextlib.contextmanager
def held(worker: int, seconds: float) -> Iterator[None]:
    """A thread of this process stands still, in the handler of a signal that it gets."""
    here = threading.Event()

    @ctypes.CFUNCTYPE(None, ctypes.c_int)
    def handler(_number: int) -> None:
        here.set()
        time.sleep(seconds)

    libc = ctypes.CDLL(None)
    libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
    libc.signal.restype = ctypes.c_void_p
    before = libc.signal(signal.SIGHUP, ctypes.cast(handler, ctypes.c_void_p))
    libc.tgkill(os.getpid(), worker, signal.SIGHUP)
    assert here.wait(PATIENCE_S)
    libc.signal(signal.SIGHUP, before)
    yield


@pytest.mark.parametrize("generating", [False, True])
def test_a_wait_that_takes_too_long_is_given_up(generating, kernel, blobs):
    """A stuck thread: an error that names who waited for whom, and a process that lives."""

    def given_up(stuck_s: float) -> bool:
        before = set(os.listdir("/proc/self/task"))
        with running(kernel, LAYOUT, LIMITS, blobs, threads=3, wait_limit_s=0.25) as model:
            workers = sorted(int(t) for t in set(os.listdir("/proc/self/task")) - before)
            assert len(workers) == 2
            model.run(PROMPT)
            model.truncate(0)
            with held(workers[1], stuck_s):
                if generating:
                    got = model.generate(PROMPT)
                    code, text = got.code, got.error
                else:
                    code, _ = model.try_step([1])
                    text = model.error()
            if code == abi.OK:
                return False
            assert code == abi.ERR_TIMEOUT
            said = r"thread [01] waited more than 0\.25\d* s after phase embed for thread 2"
            assert re.fullmatch(said, text), text
            got = model.generate(PROMPT)
            assert got.code == abi.ERR_TIMEOUT and got.error == text
            assert model.try_step([1])[0] == abi.ERR_TIMEOUT
            return True

    # Who waits counts only the time in which he runs himself, which is little on a busy machine.
    assert any(given_up(stuck_s) for stuck_s in (1, 10, 100))
    with running(kernel, LAYOUT, LIMITS, blobs) as model:
        assert len(model.generate(PROMPT).tokens) == 8


def test_more_threads_than_cores_are_no_timeout(kernel, blobs):
    with running(
        kernel, LAYOUT, LIMITS, blobs, threads=3 * (os.cpu_count() or 1) + 1, wait_limit_s=PATIENCE_S
    ) as model:
        got = model.generate(PROMPT, max_new_tokens=12)
        assert got.code == abi.OK and len(got.tokens) == 12, got.error


def test_a_slow_callback_is_no_timeout(kernel, blobs):
    with running(kernel, LAYOUT, LIMITS, blobs, wait_limit_s=0.75) as model:
        got = model.generate(PROMPT, lambda _: time.sleep(1), max_new_tokens=2)
        assert got.code == abi.OK and len(got.tokens) == 2, got.error
