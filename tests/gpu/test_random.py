"""Models of random weights and awkward shapes on the GPU, against their float64 twins; then under compute-sanitizer."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import jobs
import pytest
from models import SMALL

NUMBERS = [name for name in SMALL if name != "few blocks"]
TOLERANCE = 2e-2  # bf16 inputs of every product
SANITIZER = ("/usr/local/cuda/bin/compute-sanitizer", "/usr/local/cuda/compute-sanitizer/compute-sanitizer")


@pytest.fixture(scope="module", autouse=True)
def side_by_side(compiled, rehearsal):
    """Compiles what is missing at once; on the emulated machine only what a test wants."""
    if not rehearsal:
        compiled.compile(SMALL.values())


def prompt_of(name: str, rehearsal: bool) -> list[int]:
    model = SMALL[name]
    count = min(model.prompt, 20) if rehearsal else model.prompt
    return [(7 * i * i + 3 * i + 1) % model.layout.spec.vocab_size for i in range(count)]


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_of_the_float64_twin(small, name, rehearsal, say):
    if rehearsal and name.startswith(("Qwen3", "512", "sinks")):
        pytest.skip("takes minutes on the emulated machine")
    built, weights = small(name)
    prompt = prompt_of(name, rehearsal)
    given = built, weights.plain(), prompt, SMALL[name].cuts, 8
    (error, worst), layers, behind = jobs.run("random_twin", *given, limit=200)
    say(f"{len(prompt)} tokens: logits differ by {error:.1e}, at one position by {worst:.1e}")
    say(f"layers, each from the kernel's own input: {layers}")
    say(f"greedy tokens at most {behind:.1e} behind the best")
    # At a single position the model itself may make any error larger, so there every layer answers for its own only.
    assert error < TOLERANCE and layers.worst < TOLERANCE and behind < TOLERANCE


@pytest.mark.parametrize("name", ["fp8, biases, windows", "Qwen3's shape, two layers"])
def test_chunkings_and_repetition(small, name, rehearsal, say):
    if rehearsal and name.startswith("Qwen3"):
        pytest.skip("takes minutes on the emulated machine")
    built, _ = small(name)
    prompt = prompt_of(name, rehearsal)
    found = jobs.run("chunkings", built, prompt, (1, 2, 7, 8, 9, 16), 4, limit=100)
    say(f"{len(prompt)} tokens, against T = 1: " + ", ".join(f"{size}: {e:.1e}" for size, ((e, _), _) in found.items()))
    assert all(e < TOLERANCE for (e, _), _ in found.values())
    digests = jobs.run("digests", built, prompt[:12], 4, 2, limit=100)
    assert len(set(digests)) == 1


@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_sanitizer(small, tool, rehearsal, say):
    if rehearsal:
        pytest.skip("needs a GPU; the emulated machine looks for races and stray accesses in `make test`")
    found = next(filter(Path.exists, map(Path, SANITIZER)), None) or shutil.which("compute-sanitizer")
    if found is None:
        pytest.skip("compute-sanitizer is not here; it comes with the CUDA toolkit")
    built, _ = small("few blocks")
    before = [found, "--tool", tool, "--print-limit", "8", "--target-processes", "all"]
    result, output = jobs.run("small_run", built, prompt_of("few blocks", False), 3, limit=100, before=before)
    summaries = re.findall(r"=+ ((?:ERROR|RACECHECK) SUMMARY: .*)", output)
    say("; ".join(summaries) or "no summary")
    assert result == (True, 0, 0)
    assert summaries and all(re.search(r": 0 (errors|hazards)", line) for line in summaries), output[-4000:]
