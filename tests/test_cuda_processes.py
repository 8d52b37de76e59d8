"""GPU ranks in several processes, on emulated machines that share memory: the bits of one rank, and how it ends."""

from __future__ import annotations

import re
import time

import emulator
import numpy as np
import placed
import pytest
from cuda_models import cuda_layout, small_spec
from test_cuda_emulated import LIMITS, TWO_LAYERS
from test_cuda_ranks import same

from mkpack import abi
from mkpack.layout_cuda import CudaLayout

# Logits of more rows than one rank's, and a step that is cut in two.
ONE = cuda_layout(small_spec(hidden_size=64, vocab_size=37, layers=TWO_LAYERS, moe={"intermediate_size": 64}))
GRID, PROMPT = 3, [3, 1, 4, 15, 9, 2, 6]
CALLS = (
    ("run", [PROMPT], {"cuts": [1, 3]}),
    ("truncate", [0], {}),
    ("generate", [PROMPT], {"max_new_tokens": 4}),
    ("truncate", [4], {}),
    ("generate", [PROMPT[:3]], {"max_new_tokens": 4, "temperature": 1.5, "top_p": 0.95, "seed": 7}),
    ("length", [], {}),
)


def several(tp: int, per_device: int, **options) -> emulator.Emulated:
    layout = CudaLayout(ONE.spec, ONE.precision, ONE.router_format, tp, per_device)
    return emulator.Emulated.random(layout, LIMITS, GRID * per_device, **options)


@pytest.fixture(scope="module")
def two():
    return several(2, 2)


def running(model, processes, **options):
    return placed.running(model.library(), model, processes, **options)


@pytest.fixture(scope="module")
def alone(two):
    """What the ranks answer in one process, and so one rank (test_cuda_ranks.py)."""
    answers = two.calls(*CALLS)
    assert np.isfinite(answers[0]).all() and answers[2][1] == answers[4][1] == abi.OK
    return answers


def answers(parts, calls=CALLS):
    """Of every process, with what calls() above gives of a generation."""
    found = [placed.each(parts, "call", name, *given, **named) for name, given, named in calls]
    return [[a[:3] if isinstance(a, tuple) and len(a) == 4 else a for a in part] for part in zip(*found, strict=True)]


def test_two_processes_give_the_bits_of_one(two, alone):
    with running(two, 2) as parts:
        first, second = answers(parts)
        assert same(first, alone)
        assert np.isnan(second[0]).all() and second[1:] == alone[1:]


def test_processes_of_several_ranks_by_flags(alone):
    with running(several(4, 4, flags=True), 2) as parts:
        first, second = answers(parts)
    assert same(first, alone) and second[1:] == alone[1:]


@pytest.mark.parametrize("after", [1, 2])
def test_a_cancelled_generation_ends_everywhere(two, alone, after):
    """The others may have run further (an emulated launch is over before its host looks); from a length that is told to
    them they go on as before."""
    with running(two, 2) as parts:
        wanted = {"max_new_tokens": 8}
        parts[0].ask("call", "generate", PROMPT, cancel_after=after, **wanted)
        parts[1].ask("call", "generate", PROMPT, **wanted)
        (tokens, code, error, reason), other = (part.answer() for part in parts)
        assert (code, error, reason) == (abi.OK, "", abi.STOP_CANCELLED)
        assert (
            tokens == alone[2][0][:after] and other[0][:after] == tokens and len(other[0]) == (2 if after == 1 else 8)
        )
        length = placed.each(parts, "call", "length")
        assert length[0] == len(PROMPT) + after - 1 <= length[1]
        assert placed.each(parts, "call", "truncate", 4) == [abi.OK] * 2
        found = placed.each(parts, "call", "generate", *CALLS[4][1], **CALLS[4][2])
        assert found[0][:3] == found[1][:3] == alone[4]


NAMED = r"a wait of 1 s ended: SM \d of rank \d made no progress in phase [a-z/ ]+( of layer \d)?, waiting for (.*?);"


@pytest.mark.parametrize("running_", [False, True], ids=["between", "in a generation"])
def test_a_process_that_is_killed_ends_the_others_and_is_named(two, running_):
    with running(two, 2, wait_limit_s=1.0) as parts:
        placed.each(parts, "call", "generate", PROMPT, max_new_tokens=2)
        if running_:
            for part in parts:
                part.ask("call", "generate", PROMPT, max_new_tokens=40)
            time.sleep(0.5)
        else:
            parts[0].ask("call", "generate", PROMPT, max_new_tokens=40)
        parts[1].end()
        _, code, error, _ = parts[0].answer()
        found = re.match(NAMED, error)
        assert code == abi.ERR_TIMEOUT and found and found[2] == "what rank 1 computes", error
        parts[0].ask("failed_step")
        assert parts[0].answer() == (code, error)


def test_a_process_that_stalls_is_named_in_all(two):
    """It does not make the others' call, and then one of its own."""
    with running(two, 2, wait_limit_s=0.5) as parts:
        parts[0].ask("call", "generate", PROMPT)
        _, code, error, _ = parts[0].answer()
        assert code == abi.ERR_TIMEOUT and "of rank 0 made no progress" in error and "what rank 1 computes" in error
        parts[1].ask("failed_step")
        assert parts[1].answer() == (code, error), "it tells what rank 0 reported"


def test_what_does_not_fit_is_refused(two):
    kernel, parts = two.library(), [placed.Part() for _ in range(2)]
    try:
        made = placed.create(parts[:1], kernel, two, [1], num_ranks=2)
        assert made == [(abi.ERR_DEVICE, "GPU 1 is not among the 1 that this process sees")]
        ((code, error),) = placed.create(parts[:1], kernel, two, [0], num_ranks=3)
        assert code == abi.ERR_ARGUMENT and error == "compiled for 2 ranks, given 3"
        placed.create(parts, kernel, two, [0, 0])
        code, error = placed.each(parts, "failed_step")[0]
        assert code == abi.ERR_ARGUMENT and error.startswith("its ranks do not know the memory of those in other proc")
        first, second = placed.each(parts, "addresses")
        for part, given, rank in ((parts[0], first + first, 1), (parts[1], second + second, 0)):
            part.ask("connect", given)
            code, error = part.answer()
            assert code == abi.ERR_ARGUMENT and error.startswith(f"rank {rank}: expected the address of this rank")
    finally:
        for part in parts:
            part.end()
