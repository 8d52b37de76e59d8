"""Kernels and artifacts made again: the same bytes, or a text that says what differs; and nothing compiled from a
manifest that does not add up."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import builds
import fake
import families
import numpy as np
import pytest
from artifacts import digests
from hypothesis import given, settings
from hypothesis import strategies as st
from test_trust import CANARY

from mkpack import build as builder
from mkpack import cli, hub, platform, rebuild, reproduce, trust
from mkpack.artifact import open_artifact, write_artifact
from mkpack.build import build
from mkpack.compile import Kernel, Unit
from mkpack.errors import UserError
from mkpack.hub import SourceSnapshot
from mkpack.loader import load
from mkpack.manifest import Manifest

BF16 = {"experts": "bf16"}  # needs torch but not modelopt, which takes seconds to import
if not platform.cpu_levels():
    pytest.skip("this machine runs no CPU target", allow_module_level=True)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return families.make_case(tmp_path_factory.mktemp("source") / "checkpoint", "mixtral-plain")


@pytest.fixture(scope="module")
def built(tmp_path_factory, checkpoint) -> Path:
    folder = tmp_path_factory.mktemp("built")
    return build(builds.write_recipe(folder / "recipe.yaml", checkpoint, quantise=BF16), output=folder)


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch, request) -> None:
    """Everything was built by another user, on another machine."""
    request.getfixturevalue("built")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def compiled(built, tmp_path, monkeypatch) -> None:
    """Compiling, which takes seconds, gives the kernel that `built` has."""
    with open_artifact(built) as artifact:
        ((target, kernel),) = artifact.manifest.kernels.items()
        (tmp_path / "kernel.so").write_bytes(artifact.read(kernel.path))
    found = Kernel(tmp_path / "kernel.so", kernel.compiler, {})
    monkeypatch.setattr(rebuild, "compile_kernels", lambda units, folder: {unit.name: found for unit in units})


@pytest.fixture
def call(monkeypatch, capsys) -> Any:
    """call(words) of the command line -> (exit code, standard output, standard error)."""

    def run(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["mkpack", *map(str, words)])
        with pytest.raises(SystemExit) as done:
            cli.main()
        return int(done.value.code or 0), *capsys.readouterr()

    return run


def again(path: Path, to: Path, files: dict[str, bytes] | None = None, **changes: Any) -> Path:
    """A copy of an artifact with other entries and other fields of the manifest, its digests right."""
    with open_artifact(path) as artifact:
        entries = {name: artifact.read(name) for name in artifact.manifest.entries} | (files or {})
        fields = json.loads(artifact.read("manifest.json"))

    def manifest(found: Any) -> Manifest:
        listed = {name: entry.model_dump() for name, entry in digests(entries).items()}
        return Manifest.model_validate_json(json.dumps(fields | {"entries": listed} | changes))

    write_artifact(to, list(entries.items()), manifest)
    return to


# -- kernels ----------------------------------------------------------------------------------------------------------


def test_a_kernel_is_rebuilt_to_the_same_bytes_and_then_known(built):
    with pytest.raises(UserError, match="Three ways"):
        load(built)
    with load(built, rebuild_kernel=True) as model:
        assert model.rebuilt and model.rebuilt.same and "the same bytes" in model.rebuilt.render()
        logits = model.step([1, 2, 3])
    assert [note.how for note in trust.read().kernels.values()] == ["rebuilt"]
    with load(built) as model:
        assert model.rebuilt is None
        assert np.array_equal(model.step([1, 2, 3]), logits)


def test_another_kernel_is_not_used_and_not_known(built, compiled, tmp_path, monkeypatch):
    """A stranger's kernel under a manifest that is right: the rebuilt one runs, the answers are those of the model."""
    monkeypatch.setenv("CANARY", str(tmp_path / "canary"))
    with open_artifact(built) as artifact:
        (kernel,) = artifact.manifest.kernels.values()
        stranger = fake.kernel(kernel.description, fake.FAKE + CANARY)
    path = again(built, tmp_path / "other.mkpack", {kernel.path: stranger})
    with load(path, rebuild_kernel=True) as model:
        assert model.rebuilt and not model.rebuilt.same
        text = model.rebuilt.render()
        logits = model.step([1, 2, 3])
    assert "other bytes than the published one" in text and all(w in text for w in ("compiled here by", "published:"))
    assert not (tmp_path / "canary").exists() and not trust.read().kernels
    with load(built, rebuild_kernel=True) as model:
        assert np.array_equal(model.step([1, 2, 3]), logits)
    with pytest.raises(UserError, match="Three ways"):
        load(path)
    # It was kept, so that the next run does not compile; but not when others could have written it.
    monkeypatch.setattr(rebuild, "compile_kernels", None)
    load(path, rebuild_kernel=True).close()
    (kept,) = (tmp_path / "cache/mkpack/kernels").iterdir()
    assert kept.stat().st_mode & 0o077 == 0
    kept.chmod(0o666)
    with pytest.raises(TypeError):
        load(path, rebuild_kernel=True)


def test_the_commands_report(built, compiled, tmp_path, call):
    code, out, err = call("verify", built, "--rebuild-kernel")
    assert code == 0 and "same     kernel x86-64-v" in out
    code, out, err = call("run", built, "-p", "Hi", "--raw", "-n", 2, "--rebuild-kernel")
    assert code == 0 and "rebuilt here, the same bytes" in err
    with open_artifact(built) as artifact:
        (kernel,) = artifact.manifest.kernels.values()
    path = again(built, tmp_path / "other.mkpack", {kernel.path: b"\x7fELF another"})
    code, out, err = call("verify", path, "--rebuild-kernel")
    assert code == 2 and "differs  kernel" in out and "could not be made again" in err


def spec_with(**changes: Any) -> Any:
    return lambda fields: {"spec": {**fields["spec"], **changes}}


MOE = {"num_experts": 4, "top_k": 5, "intermediate_size": 8, "norm_topk_prob": True}
HOSTILE = {
    "experts": (spec_with(moe=MOE), "top_k 5"),
    "rotary": (spec_with(rope={"inv_freq": [1.0] * 999, "attention_factor": 1.0}), "rotary dimensions"),
    "negative": (spec_with(hidden_size=-64), "spec.hidden_size -64"),
    "no heads": (spec_with(num_attention_heads=0), "spec.num_attention_heads 0"),
    "window": (spec_with(layers=[{"moe": True, "sliding_window": -5}]), "spec.layers[0].sliding_window -5"),
    "no layers": (spec_with(layers=[]), "no layers"),
    "huge": (spec_with(vocab_size=2**40), f"spec.vocab_size {2**40}"),
    "another size": (spec_with(hidden_size=4096), "lays this model out otherwise"),
    "another context": (lambda f: {"limits": {**f["limits"], "context": 10**6}}, "lays this model out otherwise"),
    "huge context": (lambda f: {"limits": {**f["limits"], "context": 2**31}}, f"limits.context {2**31}"),
    "format": (lambda f: {"precision": {**f["precision"], "experts": "fp8"}}, "lays this model out otherwise"),
    "epsilon": (spec_with(rms_norm_eps=0.5), "lays this model out otherwise"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_manifest_that_does_not_add_up_is_not_compiled(built, monkeypatch, case):
    change, text = HOSTILE[case]
    with open_artifact(built) as artifact:
        fields = json.loads(artifact.read("manifest.json"))
    manifest = Manifest.model_validate_json(json.dumps(fields | change(fields)))
    monkeypatch.setattr(rebuild, "compile_kernels", None)
    with pytest.raises(UserError) as e:
        rebuild.rebuild("x.mkpack", manifest, list(manifest.kernels))
    assert "x.mkpack: the kernel x86-64-v" in str(e.value) and text in str(e.value)


def test_kernels_of_every_target_are_rebuilt_from_their_sources(tmp_path, monkeypatch):
    """What is compiled again is the text that was compiled, for CPUs and GPUs; here that text stands for the kernel."""
    asked = []

    def compile_kernels(units: Sequence[Unit], folder: Path, stop: object = None) -> dict[str, Kernel]:
        asked.extend(unit.target for unit in units)
        for unit in units:
            (folder / unit.target).write_text(unit.header)
        return {unit.name: Kernel(folder / unit.target, "stub 1.0", {"system": "linux"}) for unit in units}

    shape = {"hidden_size": 64, "head_dim": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
    source = families.make_checkpoint(tmp_path / "checkpoint", "mixtral", intermediate_size=64, **shape)
    monkeypatch.setattr(platform, "nvcc", lambda: platform.Compiler(("/bin/nvcc",), "13.0"))
    targets = ["x86-64-v3", "x86-64-v4", "sm_90a", "sm_100a"]
    for module in (builder, rebuild):
        monkeypatch.setattr(module, "compile_kernels", compile_kernels)
    path = build(builds.write_recipe(tmp_path / "recipe.yaml", source, targets=targets), output=tmp_path)
    with open_artifact(path) as artifact:
        manifest = artifact.manifest
    made = rebuild.rebuild(str(path), manifest, targets)
    assert asked == targets * 2 and [m.target for m in made if m.same] == targets
    moved = Manifest.model_validate_json(
        json.dumps(json.loads(manifest.to_bytes()) | {"precision": {**manifest.precision, "attention": "fp8"}})
    )
    for target in targets:
        with pytest.raises(UserError, match=f"the kernel {target} cannot be rebuilt"):
            rebuild.rebuild(str(path), moved, [target])


def test_kernels_of_unknown_targets_are_not_compiled(built):
    with open_artifact(built) as artifact:
        manifest = artifact.manifest
    with pytest.raises(UserError, match="no target x; rm -rf /"):
        rebuild.rebuild("x.mkpack", manifest, ["x; rm -rf /"])


@given(st.data())
@settings(max_examples=150)
def test_any_change_of_the_sizes_is_refused(built, monkeypatch, data):
    """Whatever number of spec, limits, precision or description is another, nothing is compiled from it."""
    with open_artifact(built) as artifact:
        fields = json.loads(artifact.read("manifest.json"))
        target = next(iter(artifact.manifest.kernels))
    parts = [fields["spec"], fields["spec"]["moe"], fields["limits"], fields["spec"]["rope"]]
    part = data.draw(st.sampled_from(parts))
    key = data.draw(st.sampled_from([k for k, v in part.items() if isinstance(v, int | float | list)]))
    value = part[key]
    numbers = st.integers(-(2**70), 2**70) | st.integers(-3, 300)
    if isinstance(value, bool):
        part[key] = not value
    elif isinstance(value, int):
        part[key] = data.draw(numbers.filter(lambda n: n != value))
    elif isinstance(value, float):
        part[key] = data.draw(st.floats(allow_nan=False, allow_infinity=False).filter(lambda x: x != value))
    else:
        part[key] = value[:-1]
    try:
        manifest = Manifest.parse(json.dumps(fields).encode(), "manifest.json")
    except UserError:
        return
    with pytest.raises(UserError, match="cannot be rebuilt"):
        rebuild.rebuild("x.mkpack", manifest, [target])


# -- artifacts --------------------------------------------------------------------------------------------------------


@pytest.fixture
def stub(tmp_path, monkeypatch) -> Path:
    return builds.stub_compiler(tmp_path / "stub-cxx", monkeypatch)


def lines(path: Path, recipe: Path | None) -> tuple[list[str], list[str]]:
    """(same, differs)"""
    found = list(reproduce.reproduce(path, recipe=recipe))
    return [line for bad, line in found if not bad], [line for bad, line in found if bad]


def test_the_whole_artifact_is_built_again(stub, checkpoint, tmp_path, call):
    recipe = builds.write_recipe(tmp_path / "recipe.yaml", checkpoint, quantise=BF16)
    path = build(recipe, output=tmp_path)
    before = {p.name for p in tmp_path.iterdir()}
    same, differs = lines(path, recipe)
    assert not differs and "same     manifest.json" in same
    with open_artifact(path) as artifact:
        assert {line.removeprefix("same     ") for line in same} == {*artifact.manifest.entries, "manifest.json"}
    assert {p.name for p in tmp_path.iterdir()} == before
    with pytest.raises(UserError, match="name the recipe beside them with --recipe"):
        lines(path, None)
    code, out, _ = call("verify", path, "--rebuild", "--recipe", recipe)
    assert code == 0 and "same     manifest.json" in out


def test_what_differs_is_named(stub, checkpoint, tmp_path, call):
    source = Path(shutil.copytree(checkpoint, tmp_path / "checkpoint"))
    recipe = builds.write_recipe(tmp_path / "recipe.yaml", source, quantise=BF16)
    path = build(recipe, output=tmp_path)
    with open(source / "model.safetensors", "r+b") as file:
        file.seek(-3, 2)
        file.write(b"\1")
    stub.write_text(stub.read_text().replace("echo kernel", "echo another"))
    (source / "generation_config.json").write_text('{"eos_token_id": 1}')
    code, out, err = call("verify", path, "--rebuild", "--recipe", recipe)
    assert code == 2 and "could not be made again" in err
    with open_artifact(path) as artifact:
        ((kernel,), (weights,)) = (artifact.manifest.kernels.values(), artifact.manifest.weights)
    differs = {line.split(": ")[0] for line in out.splitlines() if line.startswith("differs")}
    must = {f"differs  {name}" for name in (kernel.path, weights.path, "manifest.json")}
    may = {f"differs  {name}" for name in ("report.json", "tokenizer/generation_config.json")}
    assert must <= differs <= must | may
    assert "same     recipe.yaml" in out
    facts = [line for line in out.splitlines() if line.startswith("differs  manifest.json")]
    assert any("source.files.model.safetensors: " in fact and "made again: " in fact for fact in facts)
    assert any("build_key: " in fact for fact in facts)


def test_a_source_on_the_hub_is_read_at_its_commit_and_for_its_targets(stub, checkpoint, tmp_path, monkeypatch):
    asked = []

    def fetch(repo: str, revision: str, **_options: Any) -> SourceSnapshot:
        asked.append((repo, revision))
        return SourceSnapshot(checkpoint, repo, "c" * 40)

    monkeypatch.setattr(hub, "fetch_source", fetch)
    monkeypatch.setattr(platform, "resolve_target", lambda t: {"native": "x86-64-v3"}.get(t, t))
    recipe = builds.write_recipe(tmp_path / "recipe.yaml", checkpoint, source={"repo": "org/name"}, quantise=BF16)
    path = build(recipe, output=tmp_path)
    assert asked == [("org/name", "main"), ("org/name", "c" * 40)]
    recipe.unlink()
    monkeypatch.setattr(platform, "resolve_target", lambda t: {"native": "x86-64-v4"}.get(t, t))
    same, differs = lines(path, None)
    assert asked[2:] == [("org/name", "c" * 40)] * 2
    assert not differs and "same     kernels/x86-64-v3.so" in same


def test_the_manifest_says_what_built_it(built):
    with open_artifact(built) as artifact:
        producer = artifact.manifest.producer
    compiler = platform.compiler()
    assert compiler and producer.compilers[Path(compiler.path).name] == compiler.version
    assert "ld" in producer.compilers and producer.compilers["ld"]
    assert producer.libraries["numpy"] == np.__version__ and producer.libraries["glibc"] == platform.glibc()
    assert {"ninja", "pydantic", "safetensors"} <= producer.libraries.keys()
    assert producer.sources and len(producer.sources) == 64
