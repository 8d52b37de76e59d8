"""`mkpack bench --rank-of N` of artifacts for several ranks, on the emulated GPU: from a recipe to the table, with only
that rank's weights there."""

from __future__ import annotations

import json
import shutil

import builds
import emulator
import families
import pytest
from typer.testing import CliRunner

from mkpack import bench, bench_rank, card
from mkpack import build as builder
from mkpack.artifact import extract
from mkpack.cli import app
from mkpack.errors import UserError
from mkpack.loader import load

SHAPE = {"hidden_size": 64, "head_dim": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 1}


@pytest.fixture(scope="module")
def machine():
    with emulator.machine(4), pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench_rank, "RUNS", 1)
        yield


@pytest.fixture(scope="module")
def folders(machine, tmp_path_factory):
    """Artifacts of a model for two and four ranks, each with one rank's weights alone: of two the other is removed, of
    four the others were never built."""
    folder = tmp_path_factory.mktemp("ranks")
    checkpoint = families.make_checkpoint(folder / "checkpoint", "qwen3_moe", **SHAPE)
    found = {}
    for tp, kept in ((2, 0), (4, 3)):
        keys = {"targets": ["native", "sm_90a"], "parallel": {"tp": tp, "per_device": tp}, "limits": {"context": 48}}
        recipe = builds.write_recipe(folder / f"{tp}.yaml", checkpoint, **keys)
        found[tp] = folder / f"of {tp}"
        rank = kept if tp == 4 else None
        extract(builder.build(recipe, output=folder / f"{tp}.mkpack", rank=rank), found[tp])
        if tp == 2:
            (found[tp] / "weights" / "cuda-1.bin").unlink()
    return found


@pytest.mark.parametrize(("tp", "rank"), [(2, 0), (4, 3)])
def test_a_rank_is_measured_alone(folders, tp, rank):
    result = bench.run(folders[tp], rank_of=tp, rank=rank, contexts=[5])
    assert (result.rank, result.rank_of, result.sms, result.gpu) == (rank, tp, 4 // tp, "emulated")
    assert [(s.context, s.tokens) for s in result.steps] == [(5, t) for t in (1, 4, 8, 16)]
    for step in result.steps:
        assert step.exchanges == 5 and step.ms > 0 and step.without_ms > 0 and step.bound_ms > 0
    # A token's keys and values are those of the rank's KV head.
    with load(folders[tp], rank_of=tp, rank=rank) as model:
        assert model.time_rank([1]).experts == model.spec.moe.top_k
        weights = model.bytes_per_step(1, 0)
    assert result.steps[0].mb * 1e6 == pytest.approx(weights + 5 * 2 * 64 * 2)
    assert result.steps[3].exchange_bytes > 8 * result.steps[0].exchange_bytes
    text = result.render()
    assert f"rank       {rank} of {tp} on {4 // tp} SMs, 0.00" in text and "us each" in text
    assert "check      looped back: speed only, its tokens and logits mean nothing" in text
    with pytest.raises(UserError, match="expected what mkpack bench --json prints"):
        card.read_bench(result.to_json().encode(), "-")


def test_the_command(folders):
    done = CliRunner().invoke(app, ["bench", str(folders[2]), "--rank-of", "2", "--context", "3", "--json"])
    assert done.exit_code == 0, done.output
    assert [s["tokens"] for s in json.loads(done.output)["steps"]] == [1, 4, 8, 16]
    only = CliRunner().invoke(app, ["bench", str(folders[4]), "--rank-of", "4", "--context", "3", "--json"])
    assert json.loads(only.output)["rank"] == 3, "the one that the artifact holds"
    alone = CliRunner().invoke(app, ["bench", str(folders[2]), "--rank", "1"])
    assert str(alone.exception) == "--rank 1: expected --rank-of N with it, the number of the artifact's ranks"


def test_what_cannot_be_measured_so_is_refused(folders):
    with pytest.raises(UserError) as caught:
        bench.run(folders[2], rank_of=4, rank=2, target="cpu", ranks=True)
    for part in (
        "rank_of: expected a GPU target, found x86-64-v",
        "rank_of 4: expected 2, the ranks this artifact was built for",
        "rank 2: expected 0 to 1, the ranks it has",
        "ranks and rank_of contradict each other",
    ):
        assert part in str(caught.value)
    with pytest.raises(UserError, match=r"weights/cuda-1\.bin: missing") as caught:
        bench.run(folders[2], rank_of=2, rank=1)
    assert "cuda-0" not in str(caught.value)
    holds = "this artifact holds rank 3 of 4 alone, for mkpack bench --rank-of 4"
    with pytest.raises(UserError, match=f"rank 0: {holds}"):
        bench.run(folders[4], rank_of=4, rank=0)
    with pytest.raises(UserError, match=f"cannot load {folders[4]}: {holds}"):
        bench.run(folders[4])
    with pytest.raises(UserError, match="a rank by itself generates nothing of meaning"):
        bench.run(folders[2], rank_of=2, new_tokens=4)
    with pytest.raises(UserError, match="context 40: expected at most 32"):
        bench.run(folders[2], rank_of=2, contexts=[40])


def test_the_digest_of_the_rank_is_checked(folders, tmp_path):
    shutil.copytree(folders[4], tmp_path / "of 4")
    path = tmp_path / "of 4" / "weights" / "cuda-3.bin"
    blob = bytearray(path.read_bytes())
    blob[-1] ^= 1
    path.write_bytes(blob)
    with pytest.raises(UserError, match=r"weights/cuda-3\.bin: sha256 expected"):
        bench.run(tmp_path / "of 4", rank_of=4, rank=3)
