"""The order of a build, what it refuses, what it makes, and what it costs. Most builds here use a compiler that
compiles nothing, since no kernel of theirs is run."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import builds
import families
import numpy as np
import pytest
from artifacts import damage
from builds import BF16, ROOT, names, process, refusal
from patience import PATIENCE_S
from safetensors.torch import load_file, save_file

from mkpack import build as builder
from mkpack import plan as planner
from mkpack import platform, reproduce
from mkpack.artifact import extract, open_artifact
from mkpack.build import build
from mkpack.checkpoint import Checkpoint
from mkpack.errors import UserError
from mkpack.loader import load


def change(checkpoint: Path, **tensors: Any) -> None:
    """Replaces tensors of model.safetensors; None takes one away."""
    state = {**load_file(checkpoint / "model.safetensors"), **{k.replace("__", "."): v for k, v in tensors.items()}}
    kept = {k: v for k, v in state.items() if v is not None}
    save_file(kept, checkpoint / "model.safetensors", metadata={"format": "pt"})


# -- up to date ---------------------------------------------------------------------------------------------------


def test_an_artifact_that_is_up_to_date_is_left_alone(stub, recipe, checkpoint, out, monkeypatch):
    path = build(recipe, output=out)
    assert path == out / "tiny.mkpack" and names(out) == {"tiny.mkpack", ".tiny.mkpack.lock"}

    def stamp() -> int:
        with open_artifact(path) as artifact:
            assert not artifact.verify()
        return path.stat().st_mtime_ns

    first = stamp()
    assert build(recipe, output=out) == path and stamp() == first
    # A file that says the same in other words, elsewhere, is the same recipe.
    moved = builds.write_recipe(recipe.with_name("other.yaml"), checkpoint, quantise={**BF16, "attention": "bf16"})
    build(moved, output=out)
    assert stamp() == first

    def rebuilt() -> bool:
        nonlocal first
        build(recipe, output=out)
        last, first = first, stamp()
        return first != last

    builds.write_recipe(recipe, checkpoint, quantise={**BF16, "attention": "fp8"})
    assert rebuilt() and not rebuilt()
    with open(checkpoint / "model.safetensors", "r+b") as file:
        file.seek(-3, os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(-3, os.SEEK_END)
        file.write(bytes([byte ^ 1]))
    assert rebuilt() and not rebuilt()
    (checkpoint / "generation_config.json").write_text('{"eos_token_id": 1}')
    assert rebuilt() and not rebuilt()
    stub.write_text(stub.read_text().replace("stub 1.0", "stub 1.1"))
    assert rebuilt() and not rebuilt()
    monkeypatch.setattr(builder.provenance, "sources_digest", lambda: "0" * 64)
    assert rebuilt() and not rebuilt()
    with open(path, "r+b") as file:
        file.seek(path.stat().st_size // 2)
        file.write(b"damage")
    assert rebuilt() and not rebuilt()
    before = first
    build(recipe, output=out, force=True)
    assert stamp() != before


def test_two_builds_at_once_do_the_work_once(stub, recipe, out):
    with process(recipe, out) as a, process(recipe, out) as b:
        for running in (a, b):
            _, errors = running.communicate(timeout=PATIENCE_S)
            assert running.returncode == 0, errors
    assert builds.compilations(stub) == 1
    assert names(out) == {"tiny.mkpack", ".tiny.mkpack.lock"}


# -- same input, same bytes ---------------------------------------------------------------------------------------


def test_equal_input_gives_equal_bytes_in_any_folder_on_any_day_on_any_number_of_cores(source, out, tmp_path):
    paths = []
    for folder in (tmp_path / "a", tmp_path / "another folder"):
        shutil.copytree(source, folder / "checkpoint")
        keys = {"source": {"folder": "./checkpoint"}, "quantise": {"attention": "fp8"}, "quality": {"tokens": 100}}
        paths.append(builds.write_recipe(folder / "recipe.yaml", source, **keys))
    first = build(paths[0], output=out)
    core = str(min(os.sched_getaffinity(0)))
    alone = tmp_path / "another folder"
    env, later = builds.another_day(tmp_path), time.time() + 399 * 86400
    before = f"import os, time; os.umask(0o77); assert time.time() > {later}, 'it is the same day'"
    with process(paths[1], alone, before, launcher=("taskset", "-c", core), cwd=alone, env=env) as running:
        _, errors = running.communicate(timeout=PATIENCE_S)
        assert running.returncode == 0, errors
    with open_artifact(first) as a, open_artifact(alone / "tiny.mkpack") as b:
        assert [line for differs, line in reproduce.compare(a, b) if differs] == []
    assert (alone / "tiny.mkpack").read_bytes() == first.read_bytes()
    text = first.read_bytes()
    for folder in (tmp_path, ROOT):
        assert str(folder).encode() not in text, "a path of this machine is in the artifact"


# -- refused ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "parts"),
    [
        ({"limits": {"context": 257}}, ["limits.context", "257", "max_position_embeddings 256"]),
        ({"targets": ["sm_90a", "native"]}, ["targets: sm_90a: head_dim is 16, the kernel takes 64 or 128"]),
        ({"parallel": {"tp": 3}}, ["parallel.tp", "3 ranks", "4 attention heads", "1, 2, 4 ranks"]),
        ({"source": {"folder": "absent"}}, ["absent", "no such folder"]),
        ({"quality": {"text": "absent.txt"}}, ["absent.txt", "cannot be read"]),
    ],
)
def test_a_recipe_that_this_model_cannot_have_is_refused(stub, checkpoint, tmp_path, out, keys, parts):
    text = refusal(builds.write_recipe(tmp_path / "recipe.yaml", checkpoint, **keys), out)
    assert all(part in text for part in parts), text
    assert "\n" not in text


def test_everything_wrong_with_a_recipe_is_in_one_message(stub, checkpoint, tmp_path, out):
    keys = {"limits": {"context": 999}, "targets": ["sm_100a"], "parallel": {"tp": 1}}
    text = refusal(builds.write_recipe(tmp_path / "recipe.yaml", checkpoint, **keys), out)
    assert "2 problems" in text and "999" in text and "sm_100a" in text


def test_quality_without_a_target_of_this_machine_is_refused_before_the_work(
    stub, checkpoint, tmp_path, out, monkeypatch
):
    monkeypatch.setattr(platform, "cpu_levels", lambda: ["x86-64-v3"])
    keys = {"targets": ["x86-64-v4"], "quality": {"tokens": 50}, "quantise": BF16}
    text = refusal(builds.write_recipe(tmp_path / "recipe.yaml", checkpoint, **keys), out)
    assert "quality" in text and "x86-64-v4" in text and "remove quality" in text and names(out) == set()
    del keys["quality"]
    build(builds.write_recipe(tmp_path / "recipe.yaml", checkpoint, **keys), output=out)


def test_quality_with_a_tokenizer_of_another_model_is_refused(stub, checkpoint, tmp_path, out):
    recipe = builds.write_recipe(tmp_path / "recipe.yaml", checkpoint, quality={"tokens": 50})
    tokenizer = json.loads((checkpoint / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"] = {k: v + 1000 * (v > 5) for k, v in tokenizer["model"]["vocab"].items()}
    (checkpoint / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert "another model" in refusal(recipe, out)
    (checkpoint / "tokenizer.json").unlink()
    assert "tokenizer.json" in refusal(recipe, out)


def test_tensors_that_do_not_fit_are_named(stub, recipe, checkpoint, out):
    name = "model.layers.1.block_sparse_moe.experts.2.w3.weight"
    for wrong, expected in ((None, "is missing"), (families.torch.zeros(3, 5), "found [3, 5]")):
        change(checkpoint, **{name: wrong})
        text = refusal(recipe, out)
        assert name in text and expected in text


@pytest.mark.parametrize("precision", ["bf16", "fp8", "nvfp4"])
def test_nan_in_a_weight_is_refused_by_name(stub, checkpoint, tmp_path, out, precision):
    name = "model.layers.1.block_sparse_moe.experts.2.w3.weight"
    weight = load_file(checkpoint / "model.safetensors")[name]
    weight[3, 5] = float("nan")
    change(checkpoint, **{name: weight})
    recipe = builds.write_recipe(tmp_path / "recipe.yaml", checkpoint, quantise={"experts": precision})
    text = refusal(recipe, out)
    assert name in text and "NaN" in text and "[3, 5]" in text


def test_without_tools_it_is_said_which(recipe, out, monkeypatch):
    monkeypatch.setenv("CXX", "/nonexistent")
    assert "'/nonexistent', which does not run" in refusal(recipe, out)
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", "/nonexistent")
    assert "apt-get install g++" in refusal(recipe, out)


def test_what_is_left_out_is_said(stub, recipe, checkpoint, out, capsys):
    change(checkpoint, rotary__inv_freq=families.torch.ones(8))
    (checkpoint / "stray.safetensors").write_bytes(b"")
    from rich.console import Console

    build(recipe, output=out, console=Console(stderr=True, width=300))
    notes = capsys.readouterr().err
    assert "1 tensors of the checkpoint are not part of the model and left out: rotary.inv_freq" in notes
    assert "files the index does not name are ignored: stray.safetensors" in notes
    with open_artifact(out / "tiny.mkpack") as artifact:
        assert "stray.safetensors" not in artifact.manifest.source.files


def test_everything_that_takes_long_shows_how_far_it_is(stub, recipe, out, capsys, monkeypatch):
    """A pass over all bytes each: of the source, of its tensors, of the artifact."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    from rich.console import Console

    build(recipe, output=out, console=Console(stderr=True, width=300))
    said = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", capsys.readouterr().err)
    for doing in ("hash", "pack", "write"):
        sizes = re.findall(rf"{doing} ━+ ([0-9.]+)/([0-9.]+) kB ", said)
        assert sizes and sizes[-1][0] == sizes[-1][1], doing


def test_towers_of_a_multimodal_checkpoint_are_left_out_by_name(out, tmp_path, stub, capsys, monkeypatch):
    """Nothing of them is read to be packed, and of the text model every byte once: its gate and up are one tensor."""
    checkpoint = families.make_case(tmp_path / "muse", "muse-spark-plain")
    from rich.console import Console

    asked, plain = [], Checkpoint.read_bytes
    monkeypatch.setattr(Checkpoint, "read_bytes", lambda self, info: asked.append(info) or plain(self, info))

    console = Console(stderr=True, width=300)
    build(builds.write_recipe(tmp_path / "muse.yaml", checkpoint, quantise=BF16), output=out, console=console)
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "left out" in line]
    parts = [part.split(" (")[0] for part in line.split("left out: ")[1].split(", ")]
    assert parts == [
        "model.audio_tower",
        "model.vision_adapter",
        "model.vision_projection.weight",
        "model.vision_tower",
    ]
    tensors = Checkpoint.open(checkpoint).tensors.values()
    expected = sum(info.nbytes for info in tensors if not info.name.startswith(tuple(parts)))
    assert sum(info.nbytes for info in asked) == expected


# -- content ------------------------------------------------------------------------------------------------------


def test_the_report_holds_the_error_of_every_matrix(stub, tmp_path, out):
    checkpoint = families.make_case(tmp_path / "checkpoint", "mixtral-tied-vocab-275")
    quantise = {"experts": "nvfp4", "attention": "bf16", "embeddings": "fp8", "lm_head": "nvfp4"}
    path = build(builds.write_recipe(tmp_path / "recipe.yaml", checkpoint, quantise=quantise), output=out)
    with open_artifact(path) as artifact:
        report = json.loads(artifact.read("report.json"))
    stored, state = builds.dequantised(path, checkpoint), families.checkpoint_tensors(checkpoint)
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    error = reference = 0.0
    found = {}
    for name, tensor in state.items():
        if tensor.dim() == 2 and not name.endswith("gate.weight"):
            source = tensor.double().numpy()
            found[name] = float(np.linalg.norm(stored[name] - source) / np.linalg.norm(source))
            error += float(np.square(stored[name] - source).sum())
            reference += float(np.square(source).sum())
    assert len(report["tensors"]) == len(found)
    assert sorted(report["tensors"].values()) == pytest.approx(sorted(found.values()), abs=2e-6)
    assert report["tensors"]["lm_head"] == pytest.approx(found["lm_head.weight"], abs=2e-6)
    assert report["tensors"]["embed"] == pytest.approx(found["model.embed_tokens.weight"], abs=2e-6)
    assert report["relative_error"] == pytest.approx((error / reference) ** 0.5, abs=2e-6)


def test_a_number_of_ranks_changes_no_bit(tmp_path, out):
    """12 heads share one KV head, which every rank holds; experts of 40 rows leave the last rank without any."""
    heads = {"num_attention_heads": 12, "num_key_value_heads": 1, "head_dim": 8, "intermediate_size": 40}
    checkpoint = families.make_checkpoint(tmp_path / "checkpoint", "mixtral", vocab_size=275, **heads)
    prompt = list(range(5, 30))
    found = {}
    for tp in (1, 2, 3, 4):
        keys = {"name": f"tp{tp}", "parallel": {"tp": tp}, "quantise": {"attention": "fp8"}}
        path = build(builds.write_recipe(tmp_path / "recipe.yaml", checkpoint, **keys), output=out)
        with load(path) as model:
            assert model.manifest.tp == tp == len(model.manifest.weights)
            tokens = builds.generated(model, prompt, 40)
            model.reset()
            found[tp] = (tokens, model.step([*prompt, *tokens], 65).tobytes())
        if tp == 1:
            with pytest.raises(
                UserError, match="ranks: this artifact was built for one rank; build it with parallel.tp"
            ):
                load(path, ranks=True)
        else:
            with load(path, ranks=True, threads=tp) as model:
                apart = builds.generated(model, prompt, 40)
                model.reset()
                assert (apart, model.step([*prompt, *tokens], 65).tobytes()) == found[tp]
    assert found[2] == found[3] == found[4] == found[1]
    with open_artifact(path) as artifact:
        name = next(w.path for w in artifact.manifest.weights if w.rank == 2)
    extract(path, folder := tmp_path / "folder")
    damage(folder, name)
    with load(folder, ranks=True) as model, pytest.raises(UserError, match=rf"{name}: sha256 expected"):
        model.step(prompt)


def test_the_command_prints_path_or_json(stub, recipe, out):
    command = [Path(sys.executable).with_name("mkpack"), "build", recipe, "--output", out]
    path = out / "tiny.mkpack"

    def printed(*words: str) -> str:
        done = subprocess.run([*command, *words], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert json.loads(printed("--json")) == {"artifact": str(path), "bytes": path.stat().st_size}
    assert printed() == f"{path}\n"


# -- memory -------------------------------------------------------------------------------------------------------


def test_memory_is_bounded_by_the_largest_tensor_and_as_planned(stub, tmp_path, out):
    sizes = {"hidden_size": 1024, "intermediate_size": 2048, "num_local_experts": 8, "num_hidden_layers": 2}
    checkpoint = families.make_checkpoint(tmp_path / "checkpoint", "mixtral", max_shard_size="150MB", **sizes)
    total = sum(path.stat().st_size for path in checkpoint.glob("*.safetensors"))
    assert total > 400e6
    recipe = builds.write_recipe(tmp_path / "recipe.yaml", checkpoint, quantise={"attention": "fp8"})
    # Not ru_maxrss, which remembers the size of the process that this one was forked from. Imports first, so that what
    # comes on top of them is the build alone, whichever torch is installed.
    measure = (
        "import atexit, mkpack.quantize\nmkpack.quantize.load_modelopt()\n"
        "show = lambda: print(Path('/proc/self/status').read_text().split('VmHWM:')[1].split()[0])\n"
        "show()\natexit.register(show)"
    )
    with process(recipe, out, measure) as running:
        printed, errors = running.communicate(timeout=PATIENCE_S)
        assert running.returncode == 0, errors
    imports, peak = (int(printed.split()[i]) * 1024 for i in (0, -1))
    largest = 2048 * 1024 * 4
    planned = planner.plan(recipe).memory_bytes - planner.MODELOPT_BYTES
    assert 2 * largest < planned - planner.THREAD_BYTES * platform.cores() < 4 * largest
    assert 2 * largest < peak - imports < planned and peak - imports < total / 4
