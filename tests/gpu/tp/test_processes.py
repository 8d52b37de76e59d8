"""Ranks in several processes, which take turns on one GPU or have one each: the bits of one process, how they end."""

from __future__ import annotations

import importlib.util
import re

import pytest
from models import SMALL
from prebuild_tp import PLACED, bench_kernel, launched_recipe, on_each
from test_tp import EMULATED, made, run  # noqa: F401  (made is a fixture)

from mkpack import abi


@pytest.fixture(params=["one GPU", "a GPU each"])
def devices(request, gpus):
    """Of two processes."""
    if request.param == "one GPU":
        return [0, 0]
    if gpus < 2:
        pytest.skip("needs two GPUs")
    return [0, 1]


@pytest.fixture
def two(made, gpus):  # noqa: F811
    return made(PLACED, 2, on_each(2, gpus))


def test_two_processes_give_the_bits_of_one(two, devices, rehearsal, row, say):
    vocab = SMALL[PLACED].layout.spec.vocab_size
    count, new = (6, 2) if rehearsal else (40, 16)
    prompt = [(7 * i * i + 3 * i + 1) % vocab for i in range(count)]
    one = run("bits", two, prompt, (1, 3), new, True, limit=120)
    several = run("placed_bits", two, prompt, (1, 3), new, devices, limit=240)
    same = {what: several[what] == one[what] for what in one}
    used = len(set(devices))
    row("Two processes against one | GPUs | logits | greedy | drawn | s", used,
        *("equal" if same[w] else "DIFFERENT" for w in ("logits", "greedy", "drawn")),
        f"{several['seconds']:.1f}")  # fmt: skip
    say(f"{count} tokens in, twice {new} out, {used} GPUs: {same}, {several['seconds']:.1f} s")
    assert all(same.values())


@pytest.mark.parametrize("under_way", [False, True], ids=["between", "under way"])
def test_a_process_that_is_killed_is_named(two, devices, under_way, row, say):
    limit = 3.0
    code, text, seconds, again = run("placed_killed", two, [1, 2, 3], devices, under_way, limit, limit=120)
    row("A process that is killed | GPUs | while generating | limit s | ended after s | said", len(set(devices)),
        under_way, limit, f"{seconds:.1f}", text)  # fmt: skip
    say(f"ended after {seconds:.1f} s: {text}")
    assert (code, again) == (abi.ERR_TIMEOUT, (code, text))
    assert re.search(r"of rank 0 made no progress in phase .*, waiting for what rank 1 computes", text)
    assert seconds < 3 * limit + 5


def test_torchrun(rehearsal, prebuilt_kernel, tmp_path, say):
    """An artifact under torchrun, on two GPUs if there are two, says what it says in one process."""
    if importlib.util.find_spec("torch") is None:
        pytest.skip("no torch")
    kernel = prebuilt_kernel("launched.so")
    recipe, artifact = launched_recipe(tmp_path), tmp_path / "launched.mkpack"
    if not rehearsal and kernel is None:
        kernel = bench_kernel(tmp_path, recipe)
    emulated = EMULATED if rehearsal else None
    run("build", recipe, artifact, kernel, emulated, limit=240)
    one = run("launched", artifact, 1, emulated, limit=220)
    several = run("launched", artifact, 2, emulated, limit=220)
    say(f"{several}")
    assert several == one and several["again"]
