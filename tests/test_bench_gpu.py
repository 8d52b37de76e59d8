"""What a GPU's bench says of results that are wrong; tests/test_gpu_emulated.py runs it."""

from __future__ import annotations

import json
import math

import pytest

from mkpack import card
from mkpack.bench_gpu import CONTEXTS, ROOM, Generated, GpuPoint, GpuResult, Step, _verdict, contexts_within
from mkpack.errors import UserError

GENERATION = Generated(39, 512, 9.97, 1.25, 3500.0, True, 1.0)


def point(error: float = 1e-3, gap: float = 0.0, repeats: bool = True) -> GpuPoint:
    step = Step(16, 4.0, 9000.0, 82.3, repeats, error, 2.0)
    return GpuPoint(1024, 1.25, 3500.0, 0.1, 0.1, 300.0, True, 1.0, gap, (step,), 1.0, 0.1)


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (point(), "equal bits; steps of all sizes and generations agree to 1.0e-03, within 0.02"),
        (point(error=0.03), "agree to 3.0e-02, ABOVE 0.02"),
        (point(gap=0.5), "agree to 5.0e-01, ABOVE 0.02"),
        (point(error=math.nan), "agree to nan, ABOVE 0.02"),
        (point(repeats=False), "runs repeated: DIFFERENT bits"),
    ],
)
def test_verdict(found, said):
    assert said in _verdict(GENERATION, [found])


@pytest.mark.parametrize("random_weights", [False, True])
def test_tables(random_weights):
    check = _verdict(GENERATION, [point(error=0.03)])
    made = GpuResult(
        "a", "sm_90a", "a GPU", 0, random_weights, 4600.0, 1.0, 0.02, check, GENERATION, (point(error=0.03),)
    )
    text = made.render()
    assert "39 tokens in, 512 out: 800.0 tokens/s, 1.2500 ms/token, bound 1.0000 ms (80.0%)" in text
    (row,) = [line for line in text.splitlines() if " 16 " in line]
    for cell in ("1024", "4000.0", "4.0000", "82.3", "2.0000", "50.0%", "equal bits, error 3e-02 ABOVE"):
        assert cell in row
    assert ("Random weights put experts close together" in text) == random_weights
    assert not any(line.endswith(" ") for line in text.splitlines())
    read = card.read_bench(made.to_json().encode(), "-")
    assert (read.threads, read.bandwidth, read.speeds[0].decode_ms) == (0, 4600.0, 1.25)
    different = json.dumps({**json.loads(made.to_json()), "check": _verdict(GENERATION, [point(repeats=False)])})
    with pytest.raises(UserError, match="do not publish it"):
        card.read_bench(different.encode(), "-")


def test_contexts():
    assert contexts_within(131072, None, CONTEXTS, ROOM) == [512, 1024, 8192, 32768, 131072 - ROOM]
    assert contexts_within(8192, None, CONTEXTS, ROOM) == [512, 1024, 8192 - ROOM]
    assert contexts_within(8100, None, CONTEXTS, ROOM) == [512, 1024]
    assert contexts_within(100, None, CONTEXTS, ROOM) == [100 - ROOM] and min(CONTEXTS) > 100
    assert contexts_within(100, [20, 7, 20], CONTEXTS, ROOM) == [7, 20]
    with pytest.raises(UserError, match="context 37: expected at most 36"):
        contexts_within(100, [1, 37], CONTEXTS, ROOM)
