"""Models of random weights and awkward shapes on the GPU, against their float64 twins; then under compute-sanitizer."""

from __future__ import annotations

import jobs
import pytest
import sanitizer
from mistakes import MISTAKES
from models import SMALL

NUMBERS = [name for name in SMALL if not name.startswith("few blocks")]
TOLERANCE = 2e-2  # bf16 inputs of every product


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
    # At a single position the model itself may make any error larger, so there every layer answers for its own only. Of
    # thousands of positions a few have a residual that cancels: rounding inputs to bf16, and nothing else, makes
    # 2.05e-2 at the worst of 3000.
    assert error < TOLERANCE and behind < TOLERANCE
    assert layers.all_but_few < TOLERANCE and layers.worst < 1.5 * TOLERANCE


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


def checked(small, name: str, tool: str, rehearsal: bool) -> tuple[object, sanitizer.Report]:
    """What a small run of a model returned under one of compute-sanitizer's tools, and the report."""
    if rehearsal:
        pytest.skip("needs a GPU; the emulated machine looks for races and stray accesses in `make test`")
    program = sanitizer.find()
    if program is None:
        pytest.skip("compute-sanitizer is not here; it comes with the CUDA toolkit")
    before = [program, "--tool", tool, "--print-limit", "1000", "--target-processes", "all"]
    result, output = jobs.run("small_run", small(name)[0], prompt_of("few blocks", False), 3, limit=150, before=before)
    return result, sanitizer.parse(output)


@pytest.mark.parametrize("tool, name", [("memcheck", "few blocks"), ("racecheck", "few blocks, followed")])
def test_sanitizer(small, tool, name, rehearsal, say):
    result, report = checked(small, name, tool, rehearsal)
    say("; ".join(report.summaries) or "no summary")
    assert result == (True, 0, 0)
    assert report.clean, report.render()


@pytest.mark.parametrize("mistake", MISTAKES)
def test_racecheck_finds_a_mistake(small, mistake, rehearsal, say):
    """Else it would mean nothing that it finds none. The build without a mistake has no race at all, so any is the
    mistake's."""
    _, report = checked(small, f"few blocks, {mistake}", "racecheck", rehearsal)
    say("; ".join(report.summaries) or "no summary")
    assert report.races, report.render()
