"""The CUDA sampler on the emulated machine beside the CPU target's, and both beside a slow one in float64.

Sums differ in their last bits, so a draw may fall on the other side of a boundary between two tokens, and top_p's goal
on the other side of a token. Which choices are right is therefore computed with the draw and the goal moved by 2^-20 of
the sum (the float32 exp of a weight is good to 2^-23) either way: nearly always that is one token, and both give it.
"""

from __future__ import annotations

import ctypes
import math
import os
import struct
import subprocess
from dataclasses import dataclass
from pathlib import Path

import emulator
import numpy as np
import pytest
from cuda_models import cuda_layout, small_spec
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels import TARGETS, precision, tiny_spec
from patience import PATIENCE_S

from mkpack import abi, codegen, compile, platform
from mkpack.codegen_cuda import cuda_header
from mkpack.layout import Layout
from mkpack.manifest import Limits

SOURCE = Path(__file__).parent / "cuda" / "sampler_test.cpp"
LIMITS = Limits(context=64, tokens_per_step=16)
LARGE = (1 << 18) + 6  # more tokens than one bitmap tells of, and not a multiple of four
NEAR = 2.0**-20
MASK = (1 << 64) - 1


@dataclass
class Case:
    logits: np.ndarray  # float32 [vocab]
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    penalty: float = 1.0
    history: tuple[int, ...] = ()
    seed: int = 0
    position: int = 0
    steps: int = 1

    @property
    def positions(self) -> range:
        return range(self.position, self.position + self.steps)


def draw(seed: int, position: int) -> float:
    z = (seed + (position + 1) * 0x9E3779B97F4A7C15) & MASK
    for _ in range(2):
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & MASK
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB & MASK
        z ^= z >> 31
    return (z >> 11) * 2.0**-53


def right(case: Case, position: int) -> set[int]:
    """Every token that may be chosen."""
    logits = case.logits.copy()
    seen = np.unique(np.array(case.history, np.int64))
    penalty, temperature = np.float32(case.penalty), np.float32(case.temperature)
    with np.errstate(all="ignore"):
        logits[seen] = np.where(logits[seen] < 0, logits[seen] * penalty, logits[seen] / penalty)
        if temperature == 0:
            return {int(np.argmax(logits))}
        distance = (logits - logits.max()) / temperature
    order = np.lexsort((np.arange(len(logits)), -distance))
    if 0 < case.top_k < len(logits):
        order = order[: case.top_k]
    weights = np.where(distance < -87, 0, np.exp(distance.astype(np.float64)))
    ends = {len(order)}
    if np.float32(case.top_p) < 1:
        sums = np.cumsum(weights[order])
        goals = float(np.float32(case.top_p)) * sums[-1] * np.array([1 - NEAR, 1, 1 + NEAR])
        ends = {min(int(np.searchsorted(sums, goal)) + 1, len(order)) for goal in goals}
    found: set[int] = set()
    for end in ends:
        kept = order[:end]
        if case.min_p > 0:
            kept = kept[distance[kept] >= np.float32(math.log(np.float32(case.min_p)))]
        if not np.float32(case.top_p) < 1:
            kept = np.sort(kept)
        sums = np.cumsum(weights[kept])
        first, last = (
            np.searchsorted(sums, sums[-1] * (draw(case.seed, position) + by), "right") for by in (-NEAR, NEAR)
        )
        found.update(int(token) for token in kept[first : last + 1] if weights[token] > 0)
    return found


class Cpu:
    """csrc/cpu/sample.h for one vocabulary."""

    def __init__(self, vocab: int, folder: Path) -> None:
        spec = tiny_spec(vocab_size=vocab)
        (folder / "model.h").write_text(codegen.model_header(Layout(spec, precision()), LIMITS, TARGETS[0]))
        compiler = platform.compiler()
        assert compiler is not None
        flags = [*compile.CPU_FLAGS, f"-march={TARGETS[0]}", f"-I{compile.sources()}", f"-I{folder}"]
        command = [*compiler.command, *flags, SOURCE, "-o", folder / "sampler.so"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
        assert done.returncode == 0, done.stderr
        self.lib = ctypes.CDLL(str(folder / "sampler.so"))

    def tokens(self, case: Case) -> list[int]:
        request = abi.Request(
            temperature=case.temperature,
            top_p=case.top_p,
            min_p=case.min_p,
            repetition_penalty=case.penalty,
            top_k=case.top_k,
            seed=case.seed,
        )
        history = (ctypes.c_int32 * len(case.history))(*case.history)
        found = []
        for position in case.positions:
            logits = case.logits.copy()
            pointer = logits.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
            found.append(self.lib.mk_pick(pointer, history, len(history), ctypes.byref(request), position))
        return found


class Gpu:
    """csrc/cuda/sampler.cuh on the emulated machine, in a process of its own: a mistake there ends the process."""

    def __init__(self, program: Path, seed: int = 1) -> None:
        environment = {**os.environ, "MK_EMULATOR_SEED": str(seed)}
        self.process = subprocess.Popen([program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)

    def tokens(self, case: Case) -> list[int]:
        assert self.process.stdin is not None and self.process.stdout is not None
        header = struct.pack(
            "<4i4fi4xQ",
            len(case.logits),
            len(case.history),
            case.position,
            case.steps,
            case.temperature,
            case.top_p,
            case.min_p,
            case.penalty,
            case.top_k,
            case.seed,
        )
        self.process.stdin.write(header + case.logits.tobytes() + np.array(case.history, np.int32).tobytes())
        self.process.stdin.flush()
        answer = self.process.stdout.read(4 * case.steps)
        assert len(answer) == 4 * case.steps, "the emulated kernel ended: see stderr"
        return list(struct.unpack(f"<{case.steps}i", answer))

    def close(self) -> None:
        self.process.communicate()


class Samplers:
    def __init__(self, gpu: Gpu, folder: Path) -> None:
        self.gpu, self.folder = gpu, folder
        self.cpus: dict[int, Cpu] = {}

    def cpu(self, vocab: int) -> Cpu:
        if vocab not in self.cpus:
            folder = self.folder / str(vocab)
            folder.mkdir()
            self.cpus[vocab] = Cpu(vocab, folder)
        return self.cpus[vocab]

    def check(self, case: Case) -> list[int]:
        """The tokens of the GPU, when they and those of the CPU are right."""
        gpu, cpu = self.gpu.tokens(case), self.cpu(len(case.logits)).tokens(case)
        for position, on_gpu, on_cpu in zip(case.positions, gpu, cpu, strict=True):
            wanted = right(case, position)
            assert on_cpu in wanted and on_gpu in wanted, (position, on_gpu, on_cpu, sorted(wanted)[:5])
        return gpu


def build(folder: Path, *, races: bool = False) -> Path:
    (folder / "model.h").write_text(cuda_header(cuda_layout(small_spec()), LIMITS, "sm_90a"))
    return emulator.build(SOURCE, folder / "sampler", headers=folder, races=races)


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    return build(tmp_path_factory.mktemp("sampler"))


@pytest.fixture(scope="module")
def samplers(program, tmp_path_factory):
    gpu = Gpu(program)
    yield Samplers(gpu, tmp_path_factory.mktemp("cpu-samplers"))
    gpu.close()


def test_distances_are_rounded_like_quotients(program):
    done = subprocess.run([program, "distances"], capture_output=True, text=True, timeout=PATIENCE_S)
    assert (done.returncode, done.stdout) == (0, "0 wrong\n")


def logits_of(vocab: int, kind: str, scale: float, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    logits = scale * rng.standard_normal(vocab)
    if kind == "ties":
        logits = np.round(logits)
    elif kind == "equal":
        logits[:] = scale
    elif kind == "masked":
        logits[rng.random(vocab) < 0.9] = -np.inf
        logits[rng.integers(vocab)] = scale
    elif kind == "peaked":
        logits[rng.integers(0, vocab, 3)] += 8 * scale
    return logits.astype(np.float32)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    vocab = draw(st.sampled_from([5, 257, 49152]))
    kind = draw(st.sampled_from(["normal", "ties", "equal", "masked", "peaked"]))
    scale = draw(st.sampled_from([1e-3, 1.0, 3.0, 30.0]))
    seed = draw(st.integers(0, 2**32 - 1))
    length = draw(st.sampled_from([0, 1, 40, 3000]))
    return Case(
        logits_of(vocab, kind, scale, seed),
        temperature=draw(st.sampled_from([0.0, 1e-40, 1e-6, 0.1, 0.7, 1.0, 1.7, 30.0, 1e6, 1e30])),
        top_k=draw(st.sampled_from([0, 1, 2, 5, 50, 256, 257, 1000, 1500, 5000, 49151])),
        top_p=draw(st.just(1.0) | st.sampled_from([1e-6, 0.3, 0.9, 0.999]) | st.floats(2**-7, 1, width=32)),
        min_p=draw(st.just(0.0) | st.sampled_from([1e-6, 0.05, 1.0]) | st.floats(0, 1, width=32)),
        penalty=draw(st.sampled_from([1.0, 1.0, 0.7, 1.3, 10.0])),
        # Most of a text are its frequent tokens, the same again and again.
        history=tuple(int(t) for t in (vocab * np.random.default_rng(seed + 1).random(length) ** 3)),
        seed=draw(st.integers(0, MASK)),
        position=draw(st.integers(0, 1 << 20)),
        steps=2,
    )


@settings(max_examples=40)
@given(cases())
def test_the_tokens_of_the_cpu(samplers, case):
    samplers.check(case)


FLAT = logits_of(49152, "normal", 0.5, 1)
EDGES = {
    # What does not fit the list: both cuts and the draw select in the whole vocabulary.
    "wide_top_k": Case(FLAT, top_k=3000),
    "wide_top_k_and_top_p": Case(FLAT, top_k=30000, top_p=0.7, min_p=0.01),
    "wide_top_p": Case(FLAT, top_p=0.9),
    "wide_top_p_by_min_p": Case(FLAT, top_p=0.9, min_p=0.3),
    "narrow_top_p_by_min_p": Case(FLAT, top_p=0.99, min_p=0.6),
    # Equals by the thousand: the lower ids are kept, which only the last digits of a place tell.
    "equals_top_k": Case(logits_of(49152, "equal", 2.0, 1), top_k=1000),
    "equals_top_k_and_top_p": Case(logits_of(49152, "equal", 2.0, 1), top_k=20001, top_p=0.5),
    "equals_behind_one": Case(np.where(np.arange(49152) == 700, 1, np.zeros(49152)).astype(np.float32), top_p=0.3),
    "all": Case(FLAT),
    "all_min_p": Case(FLAT, min_p=0.2),
    "all_large": Case(logits_of(LARGE, "normal", 2.0, 1), penalty=1.5, history=(*range(0, LARGE, 97), LARGE - 1)),
    "list_large": Case(
        logits_of(LARGE, "normal", 2.0, 1), top_k=50, top_p=0.9, penalty=9.0, history=(*range(LARGE),) * 2
    ),
    "few_finite": Case(np.where(np.arange(49152) % 9000 == 7, 1.5, -np.inf).astype(np.float32), top_k=1000, top_p=0.99),
    "infinite_temperature": Case(FLAT, temperature=math.inf, top_k=3, top_p=0.7),
    "top_p_of_exact_halves": Case(np.array([0, 3, -9, 3, -np.inf], np.float32), top_p=0.5, temperature=0.01),
}


@pytest.mark.parametrize("name", EDGES)
def test_edges(samplers, name):
    case = EDGES[name]
    case.steps, case.seed = 3, 11
    samplers.check(case)


def test_every_token_has_its_share(samplers):
    """Draws of 400 positions, counted."""
    shares = np.array([0.5, 0.25, 0.125, 0.1, 0.025])
    for settings_ in ({}, {"top_p": 0.9999}, {"top_k": 4}):
        tokens = samplers.check(Case(np.log(shares).astype(np.float32), steps=400, seed=5, **settings_))
        counts = np.bincount(tokens, minlength=5)
        kept = shares * (np.arange(5) < settings_.get("top_k", 5))
        assert np.abs(counts - 400 * kept / kept.sum()).max() < 4 * math.sqrt(400 * 0.25)


def test_nan_is_never_chosen(samplers):
    logits = logits_of(257, "normal", 2.0, 3)
    logits[::2] = np.nan
    logits[10] = np.inf
    for temperature in (0.0, 1.0):
        assert samplers.gpu.tokens(Case(logits, temperature=temperature)) == [10]
    logits[10] = np.nan
    for settings_ in ({"temperature": 0.0}, {}, {"top_k": 3}, {"top_p": 0.9}, {"temperature": 50.0}):
        for token in samplers.gpu.tokens(Case(logits, steps=5, **settings_)):
            assert token % 2 == 1
    for nothing in (-np.inf, np.nan):
        assert samplers.gpu.tokens(Case(np.full(257, nothing, np.float32), top_k=3)) == [0]


def test_interleavings_agree(program):
    found = set()
    for seed in (1, 2, 3):
        gpu = Gpu(program, seed)
        found.add(tuple(tuple(gpu.tokens(EDGES[name])) for name in ("wide_top_k_and_top_p", "wide_top_p", "all_min_p")))
        gpu.close()
    assert len(found) == 1


def test_no_races(tmp_path):
    gpu = Gpu(build(tmp_path, races=True))
    short = logits_of(257, "normal", 2.0, 3)
    for case in (
        Case(short, top_k=20, top_p=0.9, penalty=1.3, history=(1, 2, 3, 2), steps=2),
        Case(short, temperature=0.0),
        Case(FLAT, top_k=30000, top_p=0.7),
        Case(FLAT, top_p=0.9, steps=2),
        Case(FLAT, top_k=40, min_p=0.1, steps=2),
        Case(FLAT, min_p=0.1),
    ):
        assert min(gpu.tokens(case)) >= 0
    gpu.close()
