"""GPU ranks on the emulated machine: their exchange by itself."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import emulator
import pytest

LADDER = Path(__file__).parent / "bench" / "ladder"


@pytest.fixture(scope="module")
def stress(tmp_path_factory):
    """2, 4 and 8 ranks that hammer each other, by words and by flags."""
    return emulator.build(LADDER / "ranks.cu", tmp_path_factory.mktemp("ranks") / "ranks", headers=LADDER)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_every_word_of_an_exchange_comes_through(stress, seed):
    environment = {**os.environ, "MK_EMULATOR_SEED": str(seed)}
    done = subprocess.run([stress, "50"], capture_output=True, text=True, env=environment, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "ok\n", "")
