"""Ranks with memory of their own on the CPU: the bits that they have in shared memory, and that one rank has, whatever
the shape; what ends them when one of them stops; and the exchange by itself."""

from __future__ import annotations

import ctypes
import re
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import kernels
import numpy as np
import pytest
from kernels import Kernels, Model, Weights, precision, running, tiny_spec, try_create
from test_kernel import LIMITS, NEWER, RICH, RICH_MIX

from mkpack import abi, codegen, compile, platform, schedule
from mkpack.layout import Layout
from mkpack.native import Library
from mkpack.spec import LayerSpec, ModelSpec

HERE = Path(__file__).parent
TARGET = kernels.TARGETS[0] if kernels.TARGETS else ""
if not TARGET:
    pytest.skip("this machine runs no CPU target", allow_module_level=True)

# (model, formats, ranks): all that a spec can say, and a shape that its ranks do not divide. Of eight ranks two have no
# channels of x, one has no vocabulary, and four share a KV head; 101 is prime.
MODELS: dict[str, tuple[ModelSpec, dict, tuple[int, ...]]] = {
    "rich": (RICH, RICH_MIX, (2, 6)),
    "newer": (NEWER, RICH_MIX, (3, 6)),
    "eight": (
        tiny_spec(
            **{"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 4, "hidden_size": 88, "vocab_size": 101},
            **{"tie_word_embeddings": True, "dense_intermediate_size": 768},
            moe={"num_experts": 3, "top_k": 2, "intermediate_size": 640},
            layers=[LayerSpec(moe=True), LayerSpec(moe=False)],
        ),
        precision("bf16") | {"down_input": "nvfp4"},
        (8,),
    ),
    "halves": (tiny_spec(vocab_size=83, layers=1), precision("bf16") | {"down_input": "bf16"}, (2,)),
}


class Built:
    """Kernels and blobs of MODELS, by model and ranks; and one whose exchange is the acquire/release build."""

    def __init__(self, compiled: Kernels, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.folder, self._blobs = folder, {}
        self.layouts = {
            (name, tp): Layout(spec, mix, tp) for name, (spec, mix, ranks) in MODELS.items() for tp in (1, *ranks)
        }
        paths = compiled.paths([(layout, LIMITS, TARGET) for layout in self.layouts.values()], fast=True)
        self.kernels = dict(zip(self.layouts, paths, strict=True))
        model_header = codegen.model_header
        patch.setattr(codegen, "model_header", lambda *a: "#define MK_EXCHANGE_BY_FLAGS\n" + model_header(*a))
        (self.oracle,) = compiled.paths([(self.layouts["eight", 8], LIMITS, TARGET)], fast=True)

    def blobs(self, name: str, tp: int) -> list[np.ndarray]:
        if (name, tp) not in self._blobs:
            (folder := self.folder / f"{name}-{tp}").mkdir()
            self._blobs[name, tp] = Weights.random(self.layouts[name, tp], seed=3).blobs(folder)
        return self._blobs[name, tp]

    @contextmanager
    def run(self, name: str, tp: int, ranks: bool = True, oracle: bool = False, **options: int) -> Iterator[Model]:
        kernel = self.oracle if oracle else self.kernels[name, tp]
        options["flags"] = abi.OPTION_RANKS if ranks else 0
        with running(kernel, self.layouts[name, tp], LIMITS, self.blobs(name, tp), **options) as model:
            yield model


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Iterator[Built]:
    with pytest.MonkeyPatch.context() as patch:
        made = Built(Kernels.of_session(tmp_path_factory), tmp_path_factory.mktemp("ranks"), patch)
    yield made


PROMPT = [int(t) for t in np.random.default_rng(7).integers(0, 83, 290)]  # more than a chunk of attention
KINDS = ({}, {"temperature": 1.0, "seed": 5, "top_p": 0.9}, {"repetition_penalty": 1.5})


def tokens_of(model: Model, prompt: Sequence[int]) -> list[list[int]]:
    """Generations of every kind: greedy, which needs the ranks' best tokens, and those that need their logits."""
    found = []
    for kind in KINDS:
        model.truncate(0)
        got = model.generate(prompt, max_new_tokens=9, **kind)
        assert got.code == abi.OK, got.error
        found.append(got.tokens)
    return found


@pytest.mark.parametrize("name", MODELS)
def test_ranks_have_the_bits_of_one(name, built):
    """Of steps of many sizes, whatever the ranks' threads."""
    with built.run(name, 1, ranks=False) as model:
        logits, tokens = model.run(PROMPT), tokens_of(model, PROMPT[:21])
    assert np.isfinite(logits).all()
    for tp in MODELS[name][2]:
        for ranks, threads, cuts in ((False, 2, []), (True, 1, [1, 5, 2, 16, 3]), (True, 2 * tp + 1, [])):
            with built.run(name, tp, ranks=ranks, threads=threads) as model:
                found = model.run(PROMPT, cuts)
                assert found.tobytes() == logits.tobytes(), (tp, ranks, threads)
                assert tokens_of(model, PROMPT[:21]) == tokens, (tp, ranks, threads)
                model.run(PROMPT[:40])
                model.truncate(20)
                assert model.step(PROMPT[20:27], 2).tobytes() == logits[25:27].tobytes()
                assert model.step(PROMPT[27:30], 0).size == 0  # no logits: no head
                assert model.step(PROMPT[30:31]).tobytes() == logits[30:31].tobytes()


def test_the_oracle_has_the_same_bits(built):
    with built.run("eight", 8) as model, built.run("eight", 8, oracle=True, threads=11) as oracle:
        assert model.run(PROMPT[:40]).tobytes() == oracle.run(PROMPT[:40]).tobytes()
        assert tokens_of(model, PROMPT[:5]) == tokens_of(oracle, PROMPT[:5])


def test_padded_rows_of_the_vocabulary_are_never_chosen(built, tmp_path):
    """Their logit is 0, which would win here; the last rank has nothing but padding."""
    layout, prompt = built.layouts["eight", 8], PROMPT[:3]
    weights = Weights.random(layout, seed=3)
    with built.run("eight", 8) as model:
        positive = model.run(prompt)[-1] > 0
    positive[prompt] = False  # these rows are the prompt's embedding too
    weights.tensors["embed"].data[positive] ^= 0x8000
    kernel = built.kernels["eight", 8]
    with running(kernel, layout, LIMITS, weights.blobs(tmp_path), flags=abi.OPTION_RANKS) as model:
        logits = model.run(prompt)[-1]
        assert (logits < 0).sum() >= logits.size - len(prompt)
        for seed in range(100):
            model.truncate(2)
            (token,) = model.generate(prompt[2:], max_new_tokens=1, temperature=50.0, seed=seed).tokens
            assert token < layout.spec.vocab_size
        model.truncate(0)
        assert model.generate(prompt, max_new_tokens=1).tokens == [int(np.argmax(logits))]


@pytest.mark.parametrize(
    ("tp", "rows"), [(8, 151936), (8, 49152), (8, 640), (8, 768), (8, 2**17 - 1), (8, 1), (3, 49157), (2, 17)]
)
def test_any_number_of_rows_is_dealt_once(tp, rows):
    """In whole tiles, as many to each rank as to any other; what is missing at the end is padding."""
    spec = tiny_spec(
        **{"num_attention_heads": tp, "num_key_value_heads": 1, "vocab_size": rows},
        moe={"intermediate_size": rows, "num_experts": 1, "top_k": 1},
    )
    layout = Layout(spec, precision(), tp)
    for section, tensor in (("lm_head", "lm_head"), ("layers.0.gate_up", "layers.0.experts.0.up")):
        at = 0
        for rank in range(tp):
            (piece,) = (p for p in layout.pieces(section, rank) if p.tensor == tensor)
            assert piece.row == at and piece.rows <= piece.tiles * 16
            at += piece.rows
        assert at == rows and layout.tiles(section) <= 2 * -(-rows // (16 * tp))
    found = {p.name: p for p in schedule.phases(spec, layout.sections, tp, 16, 4)}
    each = layout.rank_tiles(rows) * 16
    assert found["head"].exchange.words == found["gate_up"].exchange.words == 4 * each


# -- a rank that stops -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def failures(tmp_path_factory):
    """tests/cpu/rank_failures.cpp for a model of three ranks, and its blobs."""
    compiler, folder = platform.compiler(), tmp_path_factory.mktemp("failures")
    assert compiler
    layout, limits = Layout(tiny_spec(num_attention_heads=6, num_key_value_heads=3), precision(), 3), LIMITS
    (folder / "model.h").write_text(codegen.model_header(layout, limits, kernels.TARGETS[0]))
    flags = [f for f in compile.CPU_FLAGS if f not in ("-O3", "-shared")]
    command = [*compiler.command, *flags, "-O1", f"-march={kernels.TARGETS[0]}", f"-I{compile.sources()}", "-I."]
    subprocess.run([*command, HERE / "cpu" / "rank_failures.cpp", "-o", "failures"], cwd=folder, check=True)
    Weights.random(layout).blobs(folder)
    blobs = [folder / f"rank-{r}.bin" for r in range(3)]

    def run(how: str, rank: int, thread: int, phase: str, layer: int, threads: int = 6) -> tuple[int, float, str]:
        words = map(str, (how, rank, thread, phase, layer, 0.4, threads))
        done = subprocess.run([folder / "failures", *words, *blobs], capture_output=True, text=True, timeout=100)
        assert done.returncode == 0, f"freeing the model with a thread that came late: {done.returncode}"
        code, spent, *text = done.stdout.splitlines()
        return int(code), float(spent), "\n".join(text)

    return run


@pytest.mark.parametrize("how", ["stall", "die"])
@pytest.mark.parametrize(
    ("rank", "thread", "phase", "layer", "threads"),
    [
        (1, 0, "output", 1, 3),  # the whole rank: only its peers can notice
        (2, 1, "gate_up", 0, 6),  # one of its threads: the other may notice too
        (0, 1, "attention", 1, 6),  # a thread of the rank that leads
        (2, 0, "router", 1, 3),  # a phase that no exchange follows
        (1, 1, "qkv", 0, 6),  # before anything was exchanged
        (1, 0, "head", -1, 3),
    ],
)
def test_a_rank_that_stops_ends_all(how, rank, thread, phase, layer, threads, failures):
    """Within the limit, and with one text that says which rank and where."""
    code, spent, text = failures(how, rank, thread, phase, layer, threads)
    assert code == abi.ERR_TIMEOUT and "\n" not in text
    where = "" if layer < 0 else f" of layer {layer}"
    barrier = rf"rank {rank}: thread \d waited more than 0\.4 s after phase {phase}{where} for thread {thread}"
    seen = rf"rank {rank} \(last seen in {phase}{where}\)"
    exchange = (
        rf"rank [0-2] waited more than 0\.4 s in the exchange after phase \w+{where} for (rank \d \([^)]*\), )?{seen}"
    )
    assert re.match(f"{barrier}$|{exchange}", text), text
    assert spent >= 0.4


def test_ranks_that_do_not_stop_are_fine(failures):
    code, _, text = failures("fine", 0, 0, "head", -1)
    assert (code, text) == (abi.OK, "")


def test_options_that_ranks_refuse(built):
    blobs = built.blobs("rich", 2)
    missing = (ctypes.c_void_p * 2)(blobs[0].ctypes.data, None)
    for tp, options, text in (
        (2, {"weights": missing, "flags": abi.OPTION_RANKS}, "the weights of rank 1 are missing"),
        (2, {"weights": missing}, "the weights of rank 1 are missing"),
        (2, {"flags": 2}, "flags has bits"),
        (1, {"flags": abi.OPTION_RANKS}, "compiled for 1 rank"),
    ):
        kernel = built.kernels["rich", tp]
        library = Library(kernel.read_bytes(), str(kernel))
        code, handle = try_create(library.lib, built.layouts["rich", tp], built.blobs("rich", tp), **options)
        assert code == abi.ERR_ARGUMENT and text in library.lib.mk_last_error().decode() and not handle.value
        library.close()


# -- the exchange by itself --------------------------------------------------------------------------------------------


def stress_program(folder: Path, *flags: str) -> Path:
    compiler = platform.compiler()
    assert compiler
    command = [*compiler.command, "-std=c++20", "-pthread", f"-I{compile.sources()}", *flags]
    subprocess.run([*command, HERE / "cpu" / "exchange_stress.cpp", "-o", folder / "stress"], check=True)
    return folder / "stress"


@pytest.mark.parametrize(("ranks", "threads", "epochs"), [(2, 1, 4000), (3, 2, 1000), (8, 1, 500)])
def test_both_builds_of_the_exchange_bring_the_same_words(ranks, threads, epochs, tmp_path_factory, tmp_path):
    program = tmp_path_factory.getbasetemp() / "stress"
    if not program.exists():
        program = stress_program(tmp_path_factory.getbasetemp(), "-O2")
    done = subprocess.run(
        [program, *map(str, (ranks, threads, epochs, 11))], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stdout


def test_the_oracle_has_no_race(tmp_path):
    """Its words are plain memory, so what orders them is all that keeps the race detector quiet."""
    try:
        program = stress_program(tmp_path, "-O1", "-g", "-fsanitize=thread", "-Wno-tsan")
    except subprocess.CalledProcessError:
        pytest.skip("this compiler has no race detector")
    done = subprocess.run([program, "3", "2", "300", "5", "flags"], capture_output=True, text=True, timeout=100)
    if "unexpected memory mapping" in done.stderr:
        pytest.skip("the race detector does not run on this machine")
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stderr[:2000]
