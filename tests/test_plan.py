"""What a dry run promises is what a build makes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import builds
import families
import pytest

from mkpack import platform, schedule
from mkpack.artifact import open_artifact
from mkpack.build import build
from mkpack.errors import UserError
from mkpack.plan import TORCH_BYTES, groups, plan
from mkpack.spec import TensorRole

MIXED = {"experts": "fp8", "attention": "nvfp4", "embeddings": "fp8", "lm_head": "nvfp4", "dense": "nvfp4"}


@pytest.fixture
def stub(tmp_path, monkeypatch) -> Path:
    return builds.stub_compiler(tmp_path / "stub-cxx", monkeypatch)


@pytest.mark.parametrize(
    ("case", "options", "keys"),
    [
        ("mixtral-plain", {}, {}),
        ("mixtral-tied-vocab-275", {"dtype": "bfloat16"}, {"quantise": MIXED}),
        ("qwen3-dense-layers", {}, {"quantise": MIXED, "parallel": {"tp": 2}}),
        ("qwen3-3-kv-heads-attention-bias", {}, {"targets": ["x86-64-v3", "x86-64-v4"], "parallel": {"tp": 3}}),
    ],
)
def test_numbers_of_the_plan_are_those_of_the_artifact(stub, tmp_path, case, options, keys):
    checkpoint = families.make_case(tmp_path / "checkpoint", case, **options)
    recipe = builds.write_recipe(tmp_path / "recipe.yaml", checkpoint, **keys)
    todo = plan(recipe)
    assert builds.compilations(stub) == 0
    path = build(recipe, output=tmp_path, keep_work=True)
    with open_artifact(path) as artifact:
        manifest = artifact.manifest
    promised = json.loads(todo.to_json())
    assert promised["artifact_bytes"] == sum(w.nbytes for w in manifest.weights)
    assert promised["artifact_bytes"] <= path.stat().st_size < promised["artifact_bytes"] + 5e6
    assert sum(promised["bytes_by_format"].values()) == manifest.tp * sum(s.nbytes for s in manifest.sections["cpu"])
    assert promised["parameters"] == sum(t.numel() for t in families.checkpoint_tensors(checkpoint).values())
    assert promised["targets"] == list(manifest.kernels) and promised["precision"] == manifest.precision
    read = schedule.bytes_per_step(manifest.spec, manifest.sections["cpu"], manifest.tp, 1)
    assert promised["bytes_per_token"] == round(read) <= promised["artifact_bytes"]
    blobs = sum(blob.stat().st_size for blob in Path(f"{path}.work").glob("*.bin"))
    assert blobs + path.stat().st_size <= promised["disk_bytes"] + promised["artifact_bytes"]  # blobs are kept


def test_disk_for_the_reference_of_the_quality_is_counted(tmp_path):
    checkpoint = families.make_case(tmp_path / "checkpoint", "mixtral-plain")
    without = plan(builds.write_recipe(tmp_path / "recipe.yaml", checkpoint))
    todo = plan(builds.write_recipe(tmp_path / "recipe.yaml", checkpoint, quality={"tokens": 40}))
    assert todo.quality and len(todo.quality.tokens) == 40
    assert todo.disk_bytes == without.disk_bytes + todo.quality.reference.nbytes
    assert todo.quality.target in platform.cpu_levels()


def test_memory_of_the_quality_counts_what_is_mapped(tmp_path):
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_local_experts": 8, "num_hidden_layers": 8}
    checkpoint = families.make_checkpoint(tmp_path / "checkpoint", "mixtral", **sizes)
    without = plan(builds.write_recipe(tmp_path / "recipe.yaml", checkpoint))
    todo = plan(builds.write_recipe(tmp_path / "recipe.yaml", checkpoint, quality={"tokens": 40}))
    assert todo.quality and todo.mapped_bytes == todo.artifact_bytes + todo.quality.reference.nbytes > 200e6
    more = todo.memory_bytes - todo.mapped_bytes - TORCH_BYTES
    assert 2 * 8 * 2 * 40 * 64 < more < 20e6  # at least the keys and values of two models
    assert f"{todo.mapped_bytes / 1e6:,.0f} MB of it the weights mapped to measure the quality" in todo.render()
    assert without.mapped_bytes == 0 and without.memory_bytes < todo.memory_bytes - 100e6
    assert "mapped" not in without.render()


def test_memory_grows_with_the_largest_tensors_and_not_with_their_number(tmp_path):
    def needed(**sizes: int) -> int:
        name = "-".join(map(str, sizes.values())) or "plain"
        checkpoint = families.make_checkpoint(tmp_path / name, "mixtral", **sizes)
        return plan(builds.write_recipe(tmp_path / f"{name}.yaml", checkpoint)).memory_bytes

    plain = needed()
    assert needed(num_hidden_layers=4) == plain
    # gate and up as they are read, and one of them in NVFP4; before, the embedding as it is read and in bf16
    expected = 64 * (2048 * 4 * 2 + round(2048 * 0.5625)) - 64 * 288 * (4 + 2)
    assert needed(intermediate_size=2048) - plain == pytest.approx(expected, rel=0.05)


def test_tensors_that_share_a_scale_are_taken_together(tmp_path):
    checkpoint = families.make_case(tmp_path / "checkpoint", "qwen3-dense-layers")
    found = list(groups(plan(builds.write_recipe(tmp_path / "recipe.yaml", checkpoint)).roles))
    pairs = [[role.name.rsplit(".", 1)[1] for role in group] for group in found if len(group) > 1]
    assert pairs and all(pair == ["gate", "up"] for pair in pairs)
    assert list(groups([TensorRole(n, n, (1,), None) for n in "aab"]))[-1][0].name == "b"


def dry_run(recipe: Path, *words: str) -> str:
    command = [Path(sys.executable).with_name("mkpack"), "build", recipe, "--dry-run", *words]
    done = subprocess.run(command, capture_output=True, text=True, cwd=recipe.parent)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_dry_run_prints_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "/nonexistent")  # not needed for a target that is named
    checkpoint = families.make_case(tmp_path / "checkpoint", "mixtral-tied-vocab-275")
    keys = {"targets": ["x86-64-v3"], "quantise": MIXED}
    recipe = builds.write_recipe(tmp_path / "recipe.yaml", checkpoint, **keys)
    before = set(tmp_path.iterdir())
    text = dry_run(recipe)
    for part in ("tensors", "experts fp8", "artifact", "disk needed", "peak memory", "read per token", "second time"):
        assert part in text
    assert json.loads(dry_run(recipe, "--json")) == json.loads(plan(recipe).to_json())
    assert set(tmp_path.iterdir()) == before


def test_native_needs_a_compiler_and_says_so(tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "/nonexistent")
    checkpoint = families.make_case(tmp_path / "checkpoint", "mixtral-plain")
    with pytest.raises(UserError, match="target native: CXX is '/nonexistent'"):
        plan(builds.write_recipe(tmp_path / "recipe.yaml", checkpoint))


@pytest.mark.parametrize(
    ("keys", "key", "said"),
    [
        ({"limits": {"context": 257}}, "limits.context", "257 positions"),
        ({"targets": ["sm_90a"]}, "targets", "sm_90a: head_dim is 16, the kernel takes 64 or 128"),
        ({"parallel": {"tp": 3}}, "parallel.tp", "3 ranks cannot share"),
        ({"source": {"folder": "absent"}}, "source.folder", "no such folder"),
        ({"quality": {"text": "absent.txt"}}, "quality.text", "cannot be read"),
    ],
)
def test_what_this_model_cannot_have_is_named_by_file_line_and_key(tmp_path, keys, key, said):
    checkpoint = families.make_case(tmp_path / "checkpoint", "mixtral-plain")
    recipe = builds.write_recipe(tmp_path / "recipe.yaml", checkpoint, **{"targets": ["x86-64-v3"], **keys})
    lines = recipe.read_text().splitlines()
    line = 1 + next(i for i, row in enumerate(lines) if row.strip().startswith(key.split(".")[-1] + ":"))
    with pytest.raises(UserError) as caught:
        plan(recipe)
    assert str(caught.value).startswith(f"recipe refused: {recipe}:{line}: {key}: ") and said in str(caught.value)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "generation_config.json"])
def test_a_tokenizer_that_cannot_be_read_is_refused(tmp_path, name):
    checkpoint = families.make_case(tmp_path / "checkpoint", "mixtral-plain")
    recipe = builds.write_recipe(tmp_path / "recipe.yaml", checkpoint)
    (checkpoint / name).write_text("{}" if name == "tokenizer.json" else "[]")
    with pytest.raises(UserError) as caught:
        plan(recipe)
    assert str(checkpoint) in str(caught.value) and name in str(caught.value)
    assert "build the artifact again" not in str(caught.value)


def test_a_source_without_a_tokenizer_is_told(tmp_path):
    checkpoint = families.make_case(tmp_path / "checkpoint", "mixtral-plain")
    recipe = builds.write_recipe(tmp_path / "recipe.yaml", checkpoint)
    note = "no tokenizer.json: the artifact takes token ids only"
    assert note not in plan(recipe).render() and json.loads(plan(recipe).to_json())["tokenizer"] is True
    (checkpoint / "tokenizer.json").unlink()
    assert note in dry_run(recipe) and json.loads(dry_run(recipe, "--json"))["tokenizer"] is False
