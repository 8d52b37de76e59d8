"""Several ranks, on GPUs of their own or sharing them: the bits of one rank, what exchanges and steps take, and that
nothing hangs."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import jobs
import pytest
from models import SMALL, pack
from prebuild_tp import BENCH, MODELS, MUSE, bench_recipe, compile_programs, on_each, refusals

from mkpack import abi
from mkpack import plan as planner
from mkpack.errors import UserError
from mkpack.schedule.shape import Shape

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
EMULATED = 4  # blocks of the emulated GPU
REPEATS = 1000
STEP_TOKENS = (1, 4, 8, 16)
# Bytes of a layer's exchanges a token in the shape of Qwen3-30B-A3B, all ranks: docs/TENSOR_PARALLEL.md.
EXCHANGES = {"attention": 8192, "output": 8704, "gate/up": 12288, "down": 4608}


def run(job: str, *arguments: object, limit: float, **environment: str) -> object:
    path = os.pathsep.join([str(HERE), str(ROOT), os.environ.get("PYTHONPATH", "")])
    return jobs.run(f"ranked:{job}", *arguments, limit=limit, PYTHONPATH=path, **environment)


@pytest.fixture(scope="module")
def made(compiled, tmp_path_factory):
    """(name, tp, per_device) -> Built; one rank has the whole of a GPU."""
    known = {}

    def get(name, tp=1, per_device=1):
        key = name, tp, per_device
        if key not in known:
            model = SMALL[name].of_ranks(tp, per_device)
            known[key] = pack(model, compiled.get(model), tmp_path_factory.mktemp("ranks"))[0]
        return known[key]

    return get


@pytest.mark.parametrize("name", MODELS)
def test_the_bits_of_one_rank(made, name, tp, gpus, rehearsal, row, say):
    if tp not in MODELS[name]:
        pytest.skip(f"{tp} ranks cannot share its heads")
    if refused := refusals(name, tp):
        pytest.skip("; ".join(refused))
    if rehearsal and not name.startswith("fp8"):
        pytest.skip("takes minutes on the emulated machine")
    model = SMALL[name]
    # decode_kernel has its own last bits, and draws by them.
    drawn = not Shape(model.layout, model.context, "sm_90a", model.grid).fast_decode
    count, new = (6, 2) if rehearsal else (40, 16)
    prompt = [(7 * i * i + 3 * i + 1) % model.layout.spec.vocab_size for i in range(count)]
    work = prompt, (1, 3), new, drawn
    one = run("bits", made(name), *work, limit=300)
    several = run("bits", made(name, tp, on_each(tp, gpus)), *work, limit=300)
    same = {what: several[what] == one[what] for what in one}
    row("Bits of tp ranks against those of one | model | tp | GPUs | logits | greedy | drawn", name, tp, min(tp, gpus),
        *("equal" if same[w] else "DIFFERENT" for w in ("logits", "greedy")),
        ("equal" if same["drawn"] else "DIFFERENT") if drawn else "not compared")  # fmt: skip
    say(f"{count} tokens in, {new} out, {min(tp, gpus)} GPUs: {same}")
    assert all(same.values())


@pytest.fixture(scope="module")
def ranks_program(request, tmp_path_factory, rehearsal):
    """The ladder's ranks.cu, compiled."""
    prebuilt = request.config.getoption("prebuilt")
    if prebuilt and (prebuilt / "ranks").exists():
        return prebuilt / "ranks"
    out = tmp_path_factory.mktemp("ladder") / "ranks"
    if rehearsal:
        import emulator

        return emulator.build(ROOT / "tests/bench/ladder/ranks.cu", out, headers=ROOT / "tests/bench/ladder")
    compile_programs(out.parent)
    return out


def lines_of(command, limit):
    """{bytes: the other numbers} that a program printed; fails with all that it said."""
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=limit)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    found = re.findall(r"^(\d+)((?: [\d.]+)+)$", done.stdout, re.M)
    return {int(size): [float(x) for x in rest.split()] for size, rest in found}


def test_exchanges_beside_nccl(ranks_program, tp, gpus, rehearsal, row, say):
    """Both from the host's events; mkpack's hold a barrier of the rank's blocks besides, as after a phase."""
    used = min(tp, gpus)
    tokens = (1,) if rehearsal else (1, 2, 4, 8, 16)
    kinds = {"down": 64} if rehearsal else EXCHANGES  # words enough for every rank
    sizes = sorted({n * t for n in kinds.values() for t in tokens})
    ours = lines_of([ranks_program, used, tp, 2 if rehearsal else 20000, *sizes], 300)
    assert set(ours) == set(sizes)
    theirs, without = {}, nccl_missing(tp, gpus)
    if not without:
        theirs = lines_of([sys.executable, HERE / "nccl.py", tp, *sizes], 300)
    for kind, n in kinds.items():
        for t in tokens:
            words, flags = ours[n * t]
            row("Exchanges, us | after | T | tp | GPUs | bytes of all ranks | words | flags | NCCL all-gather",
                kind, t, tp, used, n * t, words, flags, theirs.get(n * t, [without])[0])  # fmt: skip
    say(f"{tp} ranks on {used} GPUs: {min(w for w, _ in ours.values()):.2f} us at least")


def nccl_missing(tp, gpus):
    """Why there is no all-gather of NCCL to compare with; "" when there is."""
    if gpus < tp:
        return "needs a GPU a rank"
    try:
        import torch
        import torch.distributed as dist
    except ImportError:
        return "no torch"
    return "" if torch.cuda.is_available() and dist.is_nccl_available() else "torch without NCCL"


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_steps_of_qwen3_30b_a3b(ranks, gpus, rehearsal, prebuilt_kernel, tmp_path, row, say):
    """Artifacts are built here one after the other, 20 GB each."""
    if rehearsal and ranks > 2:
        pytest.skip("takes minutes on the emulated machine")
    if not rehearsal and (free := shutil.disk_usage(tmp_path).free) < 45e9:
        pytest.skip(f"{free / 1e9:.0f} GB of disk are free, and building takes 45 (--basetemp chooses another place)")
    recipe = (tiny_recipe if rehearsal else bench_recipe)(tmp_path, ranks, on_each(ranks, gpus))
    try:
        planner.plan(recipe)
    except UserError as e:
        pytest.skip(f"{ranks} ranks on {gpus} GPUs: {e}")
    artifact, kernel = tmp_path / "bench.mkpack", prebuilt_kernel(f"qwen3-{ranks}-{on_each(ranks, gpus)}.so")
    emulated = EMULATED if rehearsal else None
    run("build", recipe, artifact, kernel, emulated, limit=590)
    counts, context, new = ((1, 16), 5, 3) if rehearsal else (STEP_TOKENS, 512, 64)
    found = run("steps", artifact, counts, context, new, emulated, limit=300)
    artifact.unlink()
    for s in found["steps"]:
        bound = s["mb"] / found["bandwidth"]
        row(f"{BENCH.name}, steps at context {context} | tp | GPUs | T | ms | MB a GPU | bound ms | of bound | GB/s",
            ranks, found["gpus"], s["T"], f"{s['ms']:.3f}", f"{s['mb']:.0f}", f"{bound:.3f}",
            f"{bound / s['ms']:.1%}", f"{found['bandwidth']:.0f}")  # fmt: skip
    say(f"{ranks} ranks on {found['gpus']} GPUs: " + ", ".join(f"T={s['T']} {s['ms']:.3f} ms" for s in found["steps"]))


@pytest.mark.parametrize("recipe", MUSE, ids=["bf16", "fp8"])
def test_a_rank_of_muse_spark_alone(recipe, rehearsal, prebuilt_kernel, tmp_path, row, say):
    """Rank 0 of eight: its weights are made here, 65 GB, and it is timed on the first GPU, its peers looped back."""
    name, tp = recipe.stem, 2 if rehearsal else 8
    if rehearsal:
        if recipe != MUSE[0]:
            pytest.skip("the emulated machine has its own model")
        recipe = tiny_recipe(tmp_path, tp, 1)
    needed = planner.plan(recipe, rank=0).disk_bytes
    if (free := shutil.disk_usage(tmp_path).free) < needed:
        pytest.skip(f"{free / 1e9:.0f} GB of disk are free, and building takes {needed / 1e9:.0f} (--basetemp)")
    artifact, kernel = tmp_path / "rank.mkpack", prebuilt_kernel(f"{name}.so")
    emulated = EMULATED if rehearsal else None
    start = time.monotonic()
    run("build", recipe, artifact, kernel, emulated, 0, limit=590)
    built, size = time.monotonic() - start, artifact.stat().st_size
    found = json.loads(run("one_rank", artifact, tp, 5 if rehearsal else 512, emulated, limit=400))
    artifact.unlink()
    for s in found["steps"]:
        row(f"{recipe.stem}, rank 0 of {tp} alone, peers looped back, context {s['context']} | T | ms | experts | MB | "
            "bound ms | of bound | exchanges | B each | us each | ms without",
            s["tokens"], f"{s['ms']:.3f}", f"{s['experts']:.1f}", f"{s['mb']:.0f}", f"{s['bound_ms']:.3f}",
            f"{s['bound_ms'] / s['ms']:.1%}", s["exchanges"], f"{s['exchange_bytes']:.0f}", f"{s['exchange_us']:.2f}",
            f"{s['without_ms']:.3f}")  # fmt: skip
    say(f"{size / 1e9:.1f} GB built in {built:.0f} s, loaded in {found['load_s']:.0f} s, "
        f"{found['bandwidth_gb_s']:.0f} GB/s; {found['check']}")  # fmt: skip


def tiny_recipe(folder, tp, per_device):
    import builds
    import families

    shape = {"hidden_size": 64, "head_dim": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    checkpoint = families.make_checkpoint(folder / "checkpoint", "qwen3_moe", **shape)
    keys = {"targets": ["sm_90a"], "limits": {"context": 48}, "parallel": {"tp": tp, "per_device": per_device}}
    return builds.write_recipe(folder / "recipe.yaml", checkpoint, **keys)


def test_many_generations(made, tp, gpus, rehearsal, row, say):
    name = next(n for n, ranks in MODELS.items() if tp in ranks)
    built = made(name, tp, on_each(tp, gpus))
    vocab, count = SMALL[name].layout.spec.vocab_size, 4 if rehearsal else REPEATS
    prompts = [[(5 * i + 3 * k + 1) % vocab for i in range(2 + 5 * k)] for k in range(1 if rehearsal else 4)]
    wrong, seconds, grown = jobs.run("many", built, prompts, count, limit=300)
    row("Generations in a row | tp | GPUs | generations | other tokens than the first of their kind | s",
        tp, min(tp, gpus), count, wrong, f"{seconds:.1f}")  # fmt: skip
    say(f"{count} in {seconds:.1f} s, {wrong} with other tokens, memory grew by {grown / 1e6:.1f} MB")
    assert wrong == 0 and grown < 20e6


def test_a_rank_that_stalls_is_named(made, tp, gpus, rehearsal, request, tmp_path, row, say):
    """The SMs of the last GPU are taken after the first token; what runs there next starts after a wait's limit."""
    name = next(n for n, ranks in MODELS.items() if tp in ranks)
    each = on_each(tp, gpus)
    if gpus == 1 and not rehearsal:
        pytest.skip("ranks of one GPU are one launch, which starts and ends as a whole; needs two GPUs")
    built, limit = made(name, tp, each), 0.5 if rehearsal else 2.0
    spinner, late = None, {"MK_EMULATOR_LATE": str(2 * 10**9), "MK_EMULATOR_STALL": "5000"} if rehearsal else {}
    if not rehearsal:
        prebuilt = request.config.getoption("prebuilt")
        spinner = prebuilt / "spinner.so" if prebuilt else None
        if not spinner or not spinner.exists():
            compile_programs(tmp_path)
            spinner = tmp_path / "spinner.so"
    used = min(tp, gpus)
    code, text, seconds, again = run("stalled", built, [1, 2, 3], spinner, used - 1, limit, limit=120, **late)
    row("A rank that stalls | tp | GPUs | limit s | ended after s | said", tp, used, limit, f"{seconds:.1f}", text)
    say(f"ended after {seconds:.1f} s: {text}")
    named = re.search(r"waiting for what rank (\d) computes", text) or re.search(r"of rank (\d) made no progress", text)
    assert code == abi.ERR_TIMEOUT and again == (code, text)
    stalls = tp - 1 if rehearsal else tp - each  # or one after it
    assert named and int(named[1]) >= stalls, "the stalled rank is one of the last GPU's"
    assert rehearsal or seconds < 4 * limit + 10
