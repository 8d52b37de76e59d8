"""What a build checks before it works, and what it writes over: artifacts, and nothing else."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import builds
import pytest
import yaml
from builds import BF16, names, refusal
from rich.console import Console

from mkpack import build as builder
from mkpack import compile as compiling
from mkpack import platform
from mkpack.artifact import open_artifact
from mkpack.build import build
from mkpack.checkpoint import Checkpoint
from mkpack.errors import UserError
from mkpack.loader import load

# -- tools ---------------------------------------------------------------------------------------------------------


def test_without_ninja_or_torch_it_is_said_before_the_download(stub, recipe, out, monkeypatch):
    monkeypatch.setattr(builder, "plan", None)
    monkeypatch.setattr(compiling.shutil, "which", lambda name: None if name == "ninja" else str(stub))
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    assert "ninja is not installed" in refusal(recipe, out)
    monkeypatch.setattr(builder.importlib.util, "find_spec", lambda name: None)
    text = refusal(recipe, out)
    assert "torch, modelopt" in text and "pip install 'mkpack[build]'" in text and names(out) == set()


def test_a_full_disk_is_said_before_the_hashing(stub, recipe, out, monkeypatch):
    path = build(recipe, output=out)
    monkeypatch.setattr(platform, "free_disk", lambda folder: 1000)
    assert build(recipe, output=out) == path  # up to date: nothing is needed
    monkeypatch.setattr(Checkpoint, "digests", None)
    path.unlink()
    assert "1.0 kB are free" in refusal(recipe, out)


# -- places --------------------------------------------------------------------------------------------------------


def test_places_that_cannot_be_written_are_refused_before_the_work(stub, recipe, out, tmp_path, monkeypatch):
    monkeypatch.setattr(builder, "plan", None)
    assert "does not exist" in refusal(recipe, tmp_path / "absent" / "x.mkpack")
    assert "no such folder; make it first" in refusal(recipe, f"{out / 'new'}/")
    (out / "tiny.mkpack").mkdir()
    assert "a folder of that name is in the way" in refusal(recipe, out)
    (out / "tiny.mkpack" / "manifest.json").write_text("{}")
    assert "an unpacked artifact is in the way" in refusal(recipe, out / "tiny.mkpack")
    text = refusal(recipe, Path("/proc/tiny.mkpack"))  # where not even root can make a file
    assert "cannot write /proc/tiny.mkpack" in text and "--output" in text and "\n" not in text


def test_only_artifacts_are_written_over(stub, recipe, checkpoint, out, tmp_path, monkeypatch):
    text, named, weights = out / "notes.txt", out / "notes.mkpack", checkpoint / "model.safetensors"
    text.write_text("keep me")
    named.write_text("keep me too")
    (out / "photos.zip").write_bytes(b"PK\3\4 of the user")
    (out / "link").symlink_to(recipe)
    kept = {path: path.read_bytes() for path in (recipe, text, named, weights, out / "photos.zip", out / "link")}
    with monkeypatch.context() as patch:
        patch.setattr(builder, "plan", None)
        for path in kept:
            said = "it is the recipe" if path.samefile(recipe) else "not an artifact"
            message = refusal(recipe, path)
            assert f"cannot write {path}" in message and said in message and "\n" not in message
        assert "not a regular file" in refusal(recipe, Path("/dev/null"))
    assert {path: path.read_bytes() for path in kept} == kept
    assert names(out) == {"notes.txt", "notes.mkpack", "photos.zip", "link"}


def test_artifacts_are_written_over_whatever_their_name_and_state(stub, recipe, out):
    other, damaged, empty = out / "model.zip", out / "damaged.mkpack", out / "empty"
    build(recipe, output=other)
    damaged.write_bytes(other.read_bytes()[:5000])
    empty.touch()
    for path in (other, damaged, empty):
        assert build(recipe, output=path, force=True) == path
        with open_artifact(path) as artifact:
            assert not artifact.verify()


def test_the_working_folder_is_kept_under_a_new_name(stub, recipe, out, capfd):
    mine = out / "tiny.mkpack.work"
    mine.mkdir()
    (mine / "thesis.txt").write_text("keep me")
    for i in (2, 3):
        build(recipe, output=out, keep_work=True, force=True)
        work = out / f"tiny.mkpack.work-{i}"
        assert f"work kept in {work}\n" in capfd.readouterr().err
        assert (work / "cpu-0.bin").is_file() and list(work.glob("*/model.h"))
    kept = {f"tiny.mkpack.work{n}" for n in ("", "-2", "-3")}
    assert names(out) == {"tiny.mkpack", ".tiny.mkpack.lock", *kept} and names(mine) == {"thesis.txt"}


# -- files of the source -------------------------------------------------------------------------------------------


def test_the_licence_of_the_source_is_part_of_the_key(stub, recipe, checkpoint, out):
    keys = yaml.safe_load(recipe.read_text())
    del keys["license"]
    recipe.write_text(yaml.safe_dump(keys))
    found = []
    for front in ("", "---\nlicense: mit\n---\n", "---\nlicense: apache-2.0\n---\n"):
        (checkpoint / "README.md").write_text(front)
        with open_artifact(build(recipe, output=out)) as artifact:
            found.append((artifact.manifest.license, artifact.manifest.build_key))
    assert [license for license, _ in found] == ["unknown", "mit", "apache-2.0"]
    assert len({key for _, key in found}) == 3


def test_without_a_tokenizer_the_artifact_takes_token_ids(checkpoint, tmp_path, out):
    (checkpoint / "tokenizer.json").unlink()
    recipe = builds.write_recipe(tmp_path / "recipe.yaml", checkpoint, quantise=BF16)
    printed = io.StringIO()
    path = build(recipe, output=out, console=Console(file=printed, width=300))
    assert "note      no tokenizer.json: the artifact takes token ids only" in printed.getvalue()
    with load(path) as model:
        assert len(builds.generated(model, [5, 6, 7], 4)) == 4
        with pytest.raises(UserError, match="no tokenizer.*token ids only"):
            model.require_text()
