"""The emulator of tests/cuda/emulator: its primitives, many interleavings, and the mistakes that it must name."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import emulator
import pytest
from patience import PATIENCE_S

TEST = Path(__file__).parent / "cuda" / "emulator_test.cpp"


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    return emulator.build(TEST, tmp_path_factory.mktemp("emulator") / "test")


@pytest.fixture(scope="module")
def watched(tmp_path_factory):
    """The same, with every access looked at for races."""
    return emulator.build(TEST, tmp_path_factory.mktemp("races") / "test", races=True)


def run(program, *arguments, **settings):
    environment = {**os.environ, **{f"MK_EMULATOR_{name.upper()}": str(value) for name, value in settings.items()}}
    return subprocess.run([program, *arguments], capture_output=True, text=True, env=environment, timeout=PATIENCE_S)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_primitives(program, seed):
    done = run(program, seed=seed)
    assert (done.returncode, done.stdout) == (0, "0 failures\n"), done.stdout + done.stderr


MISTAKES = {
    "forgotten_barrier": [
        "deadlock: every lane waits",
        "warps 0 2: bar.sync 4 (64 of 96 threads there)",
        "warps 1: left",
    ],
    "forgotten_store": ["deadlock: nothing has changed for", "block 0 1\n", "polls"],
    "forgotten_copy": ["deadlock: nothing has changed for", "mbarrier wait for parity 0 of the one at byte 0"],
    "diverged": ["lanes of a warp meet at different places", "__ballot_sync", "__syncwarp"],
    "no_mbarrier": ["the mbarrier at shared byte 16 was not made, or was overwritten"],
    "endless": ["a lane runs without giving way"],
    "behind_shared": ["an access to byte 4096 of 4096 bytes of shared memory"],
    "behind_memory": ["byte 4096 of an allocation of 4096 bytes"],
    "left_copy": ["block 0 ends under 1 bulk copies into its memory"],
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_named(program, name):
    done = run(program, name, stall=500, alone=2)
    assert done.returncode != 0
    for text in MISTAKES[name]:
        assert text in done.stderr
    # the kernel and its line are named, by addr2line
    assert f"kernel {name} at emulator_test.cpp:" in done.stderr


def test_no_race_where_there_is_none(watched):
    done = run(watched, seed=4)
    assert (done.returncode, done.stdout, done.stderr) == (0, "0 failures\n", "")


RACES = {
    "race_of_lanes": [
        "the read by block 0, warp 0",
        "is not ordered after the write by block 0, warp 0",
        "shared memory",
    ],
    "race_of_warps": ["byte 0 of shared memory", "is not ordered after the read by block 0, warp 1, lane 0"],
    "race_of_blocks": ["byte 16 of an allocation", "the read by block 1", "after the write by block 0, warp 0, lane 0"],
    "race_with_copy": ["byte 130 of shared memory", "a bulk copy of block 0"],
}


OVER, OUT_OF = "the write by a bulk copy of block 0", "the read by a bulk copy of block 0"
FENCES = {
    "forgotten_fence": (OVER, OUT_OF),
    "fence_too_early": (OVER, OUT_OF),
    "fence_of_another_lane": (OVER, OUT_OF),
    "fence_of_shared_memory_only": (OUT_OF,),
}


@pytest.mark.parametrize("name", FENCES)
def test_missing_proxy_fences_are_named(watched, name):
    done = run(watched, name)
    assert done.returncode != 0 and f"{len(FENCES[name])} races were found" in done.stderr
    for copy in FENCES[name]:
        assert copy in done.stderr
    assert "comes without a proxy fence after the write by block 0, warp 1, lane 0: copy_after_stores" in done.stderr


@pytest.mark.parametrize("name", RACES)
def test_races_are_named(watched, name):
    done = run(watched, name)
    assert done.returncode != 0 and "emulator: race at" in done.stderr
    for text in [*RACES[name], f"{name} at emulator_test.cpp:"]:
        assert text in done.stderr
