"""`mkpack build --rank`: one rank's weights, the very bytes that a build of all ranks gives it. Nothing is compiled."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import builds
import families
import numpy as np
import pytest
import yaml
from builds import DIE, ROOT, names
from patience import PATIENCE_S
from typer.testing import CliRunner

from mkpack import build as builder
from mkpack import describe, dummy, platform, push, reproduce
from mkpack import plan as planner
from mkpack.artifact import open_artifact
from mkpack.build import build
from mkpack.cli import app
from mkpack.compat import choose_target
from mkpack.dummy import Dummy
from mkpack.errors import UserError
from mkpack.layout_cuda import CudaLayout
from mkpack.loader import load
from mkpack.models import model_spec
from mkpack.platform import CudaDevice, CudaDriver
from mkpack.repo import ranks_problem
from mkpack.spec import tensors

# Stands for the compiler of GPU targets, in this process or in another.
STUB = """
import mkpack.build, mkpack.platform
from mkpack.compile import Kernel
def ready(units, folder, stop):
    path = folder / "stub.so"
    path.write_bytes(b"kernel")
    return {unit.name: Kernel(path, "nvcc", {"gpu": unit.target, "sms": 1, "system": "linux"}) for unit in units}
mkpack.build.compile_kernels = ready
mkpack.platform.nvcc = lambda: mkpack.platform.Compiler(("nvcc",), "13.0")
"""
HEADS = {"hidden_size": 64, "head_dim": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
# The last ranks have fewer rows than the others of nearly everything, or none.
SHAPES = {
    "muse_spark": (
        {**HEADS, "vocab_size": 275, "moe_hidden_size": 128, "moe_intermediate_size": 192, "intermediate_size": 72},
        {},
    ),
    "qwen3_moe": (
        {**HEADS, "vocab_size": 131, "moe_intermediate_size": 320, "tie_word_embeddings": True},
        {"attention": "fp8", "lm_head": "fp8"},
    ),
    "gpt_oss": ({**HEADS, "vocab_size": 77, "intermediate_size": 128}, {"lm_head": "fp8"}),
}


@pytest.fixture(autouse=True)
def compiler(monkeypatch):
    """Compiles nothing; streams are so short that every tensor takes many."""
    monkeypatch.setattr(builder, "compile_kernels", builder.compile_kernels)
    monkeypatch.setattr(platform, "nvcc", platform.nvcc)
    exec(STUB, {})
    monkeypatch.setattr(dummy, "CHUNK", 256)


def write_recipe(folder: Path, family: str, tp: int, **keys) -> Path:
    shape, quantise = SHAPES[family]
    config = families.make_config(family, **{"dtype": "bfloat16", **shape}).to_dict()
    (folder / "config.json").write_text(json.dumps(config))
    data = {"source": {"dummy": "config.json"}, "quantise": quantise, "targets": ["sm_90a"], "parallel": {"tp": tp}}
    path = folder / f"{tp}.yaml"
    path.write_text(yaml.safe_dump({"name": "tiny", "limits": {"context": 64}, **data, **keys}))
    return path


@pytest.mark.parametrize(("family", "tp"), [("muse_spark", 2), ("muse_spark", 4), ("qwen3_moe", 4), ("gpt_oss", 2)])
def test_a_rank_has_the_bytes_that_a_build_of_all_gives_it(tmp_path, family, tp):
    recipe = write_recipe(tmp_path, family, tp)
    with open_artifact(build(recipe, output=tmp_path)) as artifact:
        whole = [artifact.read(f"weights/cuda-{rank}.bin") for rank in range(tp)]
        keys = {artifact.manifest.build_key}
        assert artifact.manifest.one_rank is None
    assert len(set(whole)) == tp
    for rank in range(tp):
        path = build(recipe, output=tmp_path, rank=rank)
        assert path.name == f"tiny-rank-{rank}-of-{tp}.mkpack"
        with open_artifact(path) as artifact:
            assert [(w.rank, w.path) for w in artifact.manifest.weights] == [(rank, f"weights/cuda-{rank}.bin")]
            assert artifact.manifest.one_rank == rank and artifact.manifest.tp == tp
            assert artifact.read(f"weights/cuda-{rank}.bin") == whole[rank], rank
            keys.add(artifact.manifest.build_key)
    assert len(keys) == 1 + tp


def test_a_checkpoint_gives_its_rank_the_same_bytes_too(tmp_path):
    checkpoint = families.make_checkpoint(tmp_path / "checkpoint", "qwen3_moe", **HEADS)
    keys = {"targets": ["native", "sm_90a"], "parallel": {"tp": 2}, "quality": {"tokens": 20}}
    one = builds.write_recipe(tmp_path / "one.yaml", checkpoint, **keys)
    del keys["quality"]
    both = builds.write_recipe(tmp_path / "both.yaml", checkpoint, **{**keys, "targets": ["sm_90a"]})
    with (
        open_artifact(build(both, output=tmp_path)) as a,
        open_artifact(build(one, output=tmp_path, rank=1)) as b,
    ):
        assert a.read("weights/cuda-1.bin") == b.read("weights/cuda-1.bin")
        assert list(b.manifest.kernels) == ["sm_90a"] and list(b.manifest.sections) == ["cuda"]
        assert b.manifest.recipe != a.manifest.recipe and "native" in b.manifest.recipe
    said = planner.plan(one, rank=1).render()
    assert "left out, for one rank is for GPUs: the targets native" in said
    assert "left out, for one rank is for GPUs: quality" in said


@pytest.mark.parametrize("fmt", ["bf16", "fp8", "nvfp4"])
def test_only_the_rows_of_a_rank_are_drawn(tmp_path, monkeypatch, fmt):
    write_recipe(tmp_path, "muse_spark", 4)
    source = Dummy.open(tmp_path / "config.json", 3)
    role = next(r for r in tensors(*model_spec(source.config)) if r.name.endswith("experts.1.gate"))
    whole, streams, plain = source.draw(role, fmt), [], np.random.PCG64
    monkeypatch.setattr(dummy.np.random, "PCG64", lambda seed: streams.append(seed) or plain(seed))
    source.draw(role, fmt)
    all_streams = len(streams)
    for rows in (slice(0, 48), slice(48, 96), slice(144, 240), slice(240, 288)):
        streams.clear()
        q = source.draw(role, fmt, rows)
        assert q.shape == whole.shape and q.data.shape == whole.data.shape
        for found, expected in ((q.data, whole.data), (q.scale, whole.scale), (q.scale2, whole.scale2)):
            part = rows if expected is not None and len(expected) > 1 else slice(None)
            assert expected is None or np.array_equal(found[part], expected[part])
        share = len(range(role.shape[0])[rows]) / role.shape[0]
        assert len(streams) <= all_streams * share + 4


# -- the plan -----------------------------------------------------------------------------------------------------


def test_the_plan_is_that_of_the_rank():
    recipe = ROOT / "recipes/bench/muse-spark-816b-a42b.yaml"
    todo = planner.plan(recipe, rank=7)
    layout = todo.layouts["cuda"]
    assert isinstance(layout, CudaLayout) and list(todo.layouts) == ["cuda"] and list(todo.ranks) == [7]
    assert todo.artifact_bytes == layout.nbytes == pytest.approx(64.6e9, rel=1e-3)
    assert todo.disk_bytes == layout.nbytes + (128 << 20)
    assert sum(todo.bytes_by_format().values()) == pytest.approx(layout.nbytes, abs=1e6)
    assert todo.bytes_per_token() == pytest.approx(6.862e9, rel=1e-3)
    # In memory the embedding, which every rank has whole, is the largest.
    assert todo.memory_bytes < 2 * 202048 * 8192 + (90 << 20) + platform.cores() * (40 << 20) + 1
    gate = [role for role in todo.roles if role.name.endswith(".0.experts.0.gate")]
    assert todo.group_bytes(gate) < 2.1e6 * (2 + 8 * 0.5625) and todo.source_bytes(gate) == 4096 * 4096 * 2 // 8
    said = todo.render()
    assert "ranks        7 of 8, 64,587.7 MB for GPUs" in said
    assert "rank 7 of 8 alone: made for mkpack bench --rank-of 8, it cannot run" in said
    assert "left out, for one rank is for GPUs: the targets native" in said
    assert json.loads(todo.to_json())["rank"] == 7


@pytest.mark.parametrize(
    ("rank", "keys", "said"),
    [
        (2, {}, "--rank 2: expected 0 to 1, the ranks that parallel.tp 2 gives"),
        (0, {"parallel": {"tp": 1}}, "parallel.tp: 1, but a rank by itself is one of several"),
        (
            0,
            {"targets": ["native"]},
            "a rank by itself is for GPUs; expected sm_90a or sm_100a among them, found native",
        ),
    ],
)
@pytest.mark.parametrize("dry", [["--dry-run"], []])
def test_what_is_no_rank_is_refused_in_one_line(tmp_path, rank, keys, said, dry):
    recipe = write_recipe(tmp_path, "muse_spark", 2, **keys)
    before = names(tmp_path)
    done = CliRunner().invoke(app, ["build", str(recipe), "--rank", str(rank), "--output", str(tmp_path), *dry])
    text = str(done.exception)
    assert isinstance(done.exception, UserError) and said in text and "\n" not in text
    assert names(tmp_path) == before


# -- the artifact -------------------------------------------------------------------------------------------------


@pytest.fixture
def alone(tmp_path) -> Path:
    done = CliRunner().invoke(
        app, ["build", str(write_recipe(tmp_path, "qwen3_moe", 4)), "-o", str(tmp_path), "--rank", "1"]
    )
    assert done.exit_code == 0, done.output
    return tmp_path / "tiny-rank-1-of-4.mkpack"


def test_an_artifact_of_one_rank_says_what_it_is(alone, monkeypatch):
    """Nothing runs it but a rank by itself, and no repo takes it."""
    holds = "this artifact holds rank 1 of 4 alone, for mkpack bench --rank-of 4"
    gpu = CudaDriver("13.0", (CudaDevice("some", "9.0", 160),))
    monkeypatch.setattr(platform, "cuda_driver", lambda: gpu)
    with open_artifact(alone) as artifact:
        manifest = artifact.manifest
        assert not artifact.verify() and choose_target(manifest, None) == ("sm_90a", [])
        assert f"weights ({holds}):\n  cuda, rank 1 of 4  weights/cuda-1.bin" in describe.describe(manifest)
        assert ranks_problem(manifest, [1]) is None and ranks_problem(manifest, [0, 1]) == f"rank 0: {holds}"
    with pytest.raises(UserError) as caught:
        push.plan(alone, "org/name")
    assert str(caught.value) == f"{alone} cannot be a repo: {holds}; a repo takes all ranks"
    with pytest.raises(UserError) as caught:
        load(alone)
    assert str(caught.value) == f"cannot load {alone}: {holds}"
    with pytest.raises(UserError) as caught:
        load(alone, rank_of=4, rank=2)
    assert str(caught.value) == f"cannot load {alone}: rank 2: {holds}"


def test_it_is_made_again(alone):
    before = alone.stat().st_mtime_ns
    recipe = alone.with_name("4.yaml")
    assert build(recipe, output=alone.parent, rank=1) == alone and alone.stat().st_mtime_ns == before
    found = list(reproduce.reproduce(alone, recipe=recipe))
    assert not any(differs for differs, _ in found)
    assert (False, "same     weights/cuda-1.bin") in found and (False, "same     manifest.json") in found


def test_a_build_of_a_rank_that_was_killed_goes_on(tmp_path, capsys):
    from rich.console import Console

    recipe = write_recipe(tmp_path, "qwen3_moe", 2)
    with open_artifact(build(recipe, output=tmp_path)) as artifact:
        expected = artifact.read("weights/cuda-1.bin")
    (tmp_path / "out").mkdir()
    before = f"{STUB}\nimport functools, mkpack.dummy\nmkpack.dummy.CHUNK = 256\n"
    before += "builder.build = functools.partial(builder.build, rank=1)\n"
    before += DIE.format(point=("mkpack.pack_cuda", "pack_nvfp4", 9))
    with builds.process(recipe, tmp_path / "out", before) as running:
        _, errors = running.communicate(timeout=PATIENCE_S)
        assert running.returncode == -signal.SIGKILL, errors
    path = build(recipe, output=tmp_path / "out", rank=1, console=Console(stderr=True, width=300))
    resumed = capsys.readouterr().err.partition("had packed ")[2].split()
    assert 0 < int(resumed[0]) < int(resumed[2])
    with open_artifact(path) as artifact:
        assert artifact.read("weights/cuda-1.bin") == expected
