"""Random weights: reproducible, well spread, made while building; and that what is built of them says so."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import builds
import families
import numpy as np
import pytest
import torch
import yaml
from patience import PATIENCE_S
from safetensors.torch import save_file

from mkpack import bench, describe, session
from mkpack import plan as planner
from mkpack.artifact import open_artifact
from mkpack.build import build
from mkpack.dummy import CHUNK, Dummy
from mkpack.errors import UserError
from mkpack.formats import bf16_to_f32, dequantise
from mkpack.loader import load
from mkpack.models import model_spec
from mkpack.spec import TensorRole, tensors

ROOT = Path(__file__).parent.parent
WIDE = "model.embed_tokens.weight"  # of 5000 x 64: more values than one random stream makes


def config(path: Path, family: str = "qwen3_moe", **keys: Any) -> Path:
    """A config.json as published checkpoints have it, in bfloat16."""
    made = families.make_config(family, **{"dtype": "bfloat16", **keys})
    path.write_text(json.dumps(made.to_dict()), encoding="utf-8")
    return path


def write_recipe(path: Path, source: dict[str, Any], **keys: Any) -> Path:
    path.write_text(yaml.safe_dump({"name": "tiny", "source": source, "limits": builds.LIMITS, **keys}))
    return path


@pytest.fixture
def dummy(tmp_path) -> Dummy:
    return Dummy.open(config(tmp_path / "config.json", vocab_size=5000, attention_bias=True), seed=0)


# -- values -------------------------------------------------------------------------------------------------------


def digest(dummy: Dummy, names: Any) -> dict[str, str]:
    return {name: hashlib.sha256(dummy.read_bits(name).tobytes()).hexdigest() for name in names}


def test_values_are_those_of_seed_and_name(dummy, tmp_path):
    assert np.prod(dummy.tensors[WIDE].shape) > CHUNK
    first = digest(dummy, dummy.tensors)
    assert digest(dummy, reversed(dummy.tensors)) == first
    assert len(set(first.values())) == len(first)
    other = digest(Dummy.open(dummy.path, seed=1), dummy.tensors)
    assert not set(other.values()) & set(first.values())
    # A model of other sizes has the same tensors wherever shapes agree.
    deeper = Dummy.open(config(tmp_path / "deeper.json", num_hidden_layers=3, attention_bias=True), seed=0)
    same = [name for name in first if name != WIDE and name != "lm_head.weight"]
    assert len(same) > 20 and digest(deeper, same) == {name: first[name] for name in same}


def test_values_are_the_same_on_one_core_in_another_process_and_in_every_version(dummy):
    script = (
        "import hashlib, sys; from pathlib import Path; from mkpack.dummy import Dummy\n"
        "bits = Dummy.open(Path(sys.argv[1]), 0).read_bits(sys.argv[2])\n"
        "print(hashlib.sha256(bits.tobytes()).hexdigest())"
    )
    core = str(min(os.sched_getaffinity(0)))
    command = ["taskset", "-c", core, sys.executable, "-c", script, dummy.path, WIDE]
    alone = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=PATIENCE_S)
    assert alone.stdout.strip() == digest(dummy, [WIDE])[WIDE], alone.stderr
    # What an artifact was built from must not change with a version of mkpack, Python or numpy.
    assert alone.stdout.strip() == "ccd754ef8f0ba858ec3e76c0a4631bf841d641a805203c36b519ba1e6f032acb"


def test_matrices_are_normal_vectors_are_near_one_or_zero(dummy):
    for name, deviation in {
        WIDE: 1.0,
        "lm_head.weight": 64**-0.5,
        "model.layers.1.mlp.gate.weight": 2 * 64**-0.5,
        "model.layers.0.self_attn.q_proj.weight": 64**-0.5,
        "model.layers.0.self_attn.o_proj.weight": 0.5 * 64**-0.5,
        "model.layers.0.mlp.experts.3.down_proj.weight": 64**-0.5,
    }.items():
        x = values(dummy, name).ravel() / deviation
        error = 6 / len(x) ** 0.5
        assert abs(x.mean()) < error and abs(x.std() - 1) < error, name
        assert abs((x**4).mean() - 3) < 24 * error, name
        assert abs(np.mean(np.abs(x) < 1) - 0.6827) < error, name
    x = values(dummy, WIDE)
    assert 4 < np.abs(x).max() < 4.5
    rows = np.corrcoef(x[:1000])
    assert np.abs(rows - np.eye(1000)).max() < 0.75  # six deviations of 64 values
    assert len(np.unique(x)) > 1000
    for name, mean, deviation in (("model.norm", 1, 0.1), ("model.layers.0.self_attn.q_norm", 2, 0.2)):
        vector = values(dummy, f"{name}.weight")
        assert abs(vector.mean() - mean) < 0.1 and 0.5 < vector.std() / deviation < 1.5
    assert 0 < np.abs(values(dummy, "model.layers.0.self_attn.q_proj.bias")).max() < 0.1


def values(dummy: Dummy, name: str) -> np.ndarray:
    return bf16_to_f32(dummy.read_bits(name)).astype(np.float64)


@pytest.mark.parametrize("cols", [128, 37, 21, 16])
@pytest.mark.parametrize("fmt", ["nvfp4", "fp8", "bf16", "f32"])
def test_a_tensor_is_drawn_in_its_storage_format(dummy, fmt, cols):
    """As many values as needed for the deviation, in rows whose last block is not full; deviation as for bf16."""
    role = replace(next(r for r in roles_of(dummy) if r.name == "layers.0.q"), shape=(6000, cols))
    small = replace(dummy, tensors={role.source: replace(dummy.tensors[role.source], shape=role.shape)})
    q = small.draw(role, fmt)
    assert (q.format, q.shape) == (fmt, role.shape)
    x = dequantise(q).astype(np.float64) / dummy.distributions[role.source][1]
    assert abs(x.mean()) < 0.02 and abs(x.std() - 1) < 0.02
    assert 3.5 < np.abs(x).max() < 7
    again = small.draw(role, fmt)
    assert again.data.tobytes() == q.data.tobytes()
    if fmt == "nvfp4":
        blank = np.unpackbits(q.data, axis=1, bitorder="little")[:, 4 * cols :]
        assert not blank.any() and blank.shape[1] == 4 * (-cols % 16)
        assert (q.scale > 0).all() and (q.scale < 0x7F).all() and q.scale.max() > 100


def roles_of(dummy: Dummy) -> list[TensorRole]:
    return list(tensors(*model_spec(dummy.config)))


def test_gate_and_up_share_a_tensor_scale(dummy):
    found = {r.name: dummy.draw(r, "nvfp4") for r in roles_of(dummy) if r.name.startswith("layers.0.experts.1.")}
    gate, up = found["layers.0.experts.1.gate"], found["layers.0.experts.1.up"]
    assert gate.scale2 == up.scale2 and gate.data.tobytes() != up.data.tobytes()


def test_the_dtype_is_that_of_the_config_and_changes_no_value(tmp_path, dummy):
    wide = Dummy.open(config(tmp_path / "wide.json", vocab_size=5000, dtype="float32", attention_bias=True), seed=0)
    assert {t.dtype for t in dummy.tensors.values()} == {"BF16"} and {t.dtype for t in wide.tensors.values()} == {"F32"}
    for name in (WIDE, "model.norm.weight"):
        assert wide.read_bits(name).tobytes() == dummy.read_bits(name).tobytes()
        assert dummy.read_bits(name).shape == dummy.tensors[name].shape
        assert dummy.tensors[name].nbytes * 2 == wide.tensors[name].nbytes
    for path, expected in ((dummy.path, "bf16"), (wide.path, "f32")):
        recipe = write_recipe(tmp_path / "recipe.yaml", {"dummy": str(path)})
        assert planner.plan(recipe).layout.router_format == expected


@pytest.mark.parametrize(
    ("family", "keys"),
    [
        ("qwen3_moe", {"num_experts": 32, "num_experts_per_tok": 4, "num_hidden_layers": 20}),
        ("qwen3_moe", {"num_experts": 16, "num_hidden_layers": 12, "tie_word_embeddings": True}),
        ("mixtral", {"num_local_experts": 8, "intermediate_size": 128, "num_hidden_layers": 12}),
    ],
)
def test_activations_stay_finite_and_tokens_choose_different_experts(tmp_path, family, keys):
    torch.set_num_threads(1)  # several wait for each other, spinning, as soon as the machine has other work
    shape = {"hidden_size": 128, "head_dim": 32, "vocab_size": 2000, "max_position_embeddings": 512, **keys}
    model = families.reference(checkpoint(tmp_path, config(tmp_path / "config.json", family, **shape)))
    tokens = torch.from_numpy(np.random.default_rng(0).integers(0, 2000, 384))[None]
    with torch.inference_mode():
        out = model(tokens, output_router_logits=True, output_hidden_states=True, use_cache=False)
    for hidden in out.hidden_states[1:]:
        assert 0.3 < float(hidden.pow(2).mean().sqrt()) < 10
    k = model.config.num_experts_per_tok
    for logits in out.router_logits:
        experts = logits.shape[1]
        chosen = torch.zeros_like(logits).scatter_(1, logits.topk(k).indices, 1.0)
        share = chosen.mean(0) * experts / k  # of every expert, 1 when all have the same
        assert share.min() > 0.1 and share.max() < 4
        late = chosen[-128:]  # far into a context, where attention averages over many positions
        assert float((late[1:] * late[:-1]).sum(1).mean()) * experts / k**2 < 1.6  # 1 for independent choices
    assert len(out.logits[0].argmax(-1).unique()) > 100
    assert len(set(families.greedy(model, tokens[0, :20].tolist(), 12))) > 6


def checkpoint(folder: Path, path: Path, seed: int = 0) -> Path:
    """What a config and a seed describe, written as a checkpoint."""
    dummy, made = Dummy.open(path, seed), folder / "checkpoint"
    made.mkdir()
    state = {n: torch.from_numpy(dummy.read_bits(n)).view(torch.bfloat16) for n in dummy.tensors}
    state = {n: x if dummy.tensors[n].dtype == "BF16" else x.float() for n, x in state.items()}
    save_file(state, made / "model.safetensors", metadata={"format": "pt"})
    (made / "config.json").write_bytes(path.read_bytes())
    return made


# -- building -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_the_whole_way(tmp_path, monkeypatch, capsys, family):
    """In bf16 the artifact holds the very bytes that a checkpoint of these weights gives; it says what it is, and runs.
    Neither torch nor modelopt is needed."""
    path = config(tmp_path / "shape.json", family)
    keys = {"quantise": {"experts": "bf16"}}
    recipe = write_recipe(tmp_path / "recipe.yaml", {"dummy": "shape.json", "seed": 5}, **keys)
    made = tmp_path / "tiny.mkpack"
    without = (
        "import sys\nfrom pathlib import Path\nfor name in ('torch', 'modelopt', 'safetensors', 'transformers'):\n"
        "    sys.modules[name] = None\nfrom mkpack.build import build\nbuild(Path(sys.argv[1]), output=sys.argv[2])"
    )
    subprocess.run([sys.executable, "-c", without, recipe, tmp_path], cwd=ROOT, check=True, timeout=PATIENCE_S)
    twin = write_recipe(tmp_path / "twin.yaml", {"folder": str(checkpoint(tmp_path, path, 5))}, name="twin", **keys)
    builds.stub_compiler(tmp_path / "stub-cxx", monkeypatch)  # the twin is not run
    with open_artifact(made) as artifact, open_artifact(build(twin, output=tmp_path)) as other:
        m = artifact.manifest
        assert artifact.read("weights/cpu-0.bin") == other.read("weights/cpu-0.bin")
        assert (m.source.kind, m.source.seed, m.source.repo, m.source.commit) == ("dummy", 5, None, None)
        assert m.source.files == {"config.json": hashlib.sha256(path.read_bytes()).hexdigest()}
        assert m.tokenizer_files == ["tokenizer/config.json"] and m.license == "none (random weights)"
        assert str(tmp_path) not in describe.to_json(m)
        assert "source:     random weights of seed 5, drawn in the formats they are stored in" in describe.describe(m)
        assert m.quality is None and m.producer.torch
        assert json.loads(artifact.read("report.json")) == {
            "weights": "random, drawn in the formats they are stored in; nothing was quantised"
        }
        assert "random" not in describe.describe(other.manifest)
    result = bench.run(made, contexts=[16])
    assert "equal bits" in result.check and json.loads(result.to_json())["random_weights"] is True
    assert ", random weights\n" in result.render()
    assert "random" not in replace(result, random_weights=False, artifact="a").render()
    with load(made) as model:
        assert len(set(builds.generated(model, [1, 2, 3], 20))) > 3
        for raw in (False, True):
            with pytest.raises(UserError, match="no tokenizer: this artifact holds random weights"):
                session.answer(model, "hello", session.Options(raw=raw))
        monkeypatch.setattr("builtins.input", lambda prompt: pytest.fail("it asked for a prompt"))
        with pytest.raises(UserError, match="mkpack bench measures its speed"):
            session.converse(model, session.Options())
    assert capsys.readouterr().out == ""


def test_the_build_key_covers_seed_and_config_and_no_path(tmp_path, monkeypatch):
    builds.stub_compiler(tmp_path / "stub-cxx", monkeypatch)
    keys = []
    for folder, seed, change in (("a", 0, {}), ("b", 0, {}), ("a", 1, {}), ("a", 0, {"rms_norm_eps": 1e-3})):
        (tmp_path / folder).mkdir(exist_ok=True)
        config(tmp_path / folder / "c.json", **change)
        recipe = write_recipe(tmp_path / folder / "recipe.yaml", {"dummy": "c.json", "seed": seed})
        with open_artifact(build(recipe, output=tmp_path)) as artifact:
            keys.append(artifact.manifest.build_key)
    assert keys[0] == keys[1] and len(set(keys)) == 3


def test_memory_is_bounded_by_the_largest_tensors(tmp_path, monkeypatch):
    builds.stub_compiler(tmp_path / "stub-cxx", monkeypatch)
    shape = {"hidden_size": 1024, "moe_intermediate_size": 2048, "num_experts": 8, "num_hidden_layers": 2}
    path = config(tmp_path / "config.json", **shape)
    total = sum(t.nbytes for t in Dummy.open(path, 0).tensors.values())
    assert total > 180e6
    recipe = write_recipe(tmp_path / "recipe.yaml", {"dummy": str(path)}, targets=["x86-64-v3"])
    script = (
        "import sys; from pathlib import Path; from mkpack.build import build\n"
        "show = lambda: print(Path('/proc/self/status').read_text().split('VmHWM:')[1].split()[0])\n"
        "show(); build(Path(sys.argv[1]), output=Path(sys.argv[2])); show()"
    )
    command = [sys.executable, "-c", script, recipe, tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    imports, peak = (int(n) * 1024 for n in done.stdout.split())
    planned = planner.plan(recipe).memory_bytes
    assert imports < planner.PYTHON_BYTES and peak < planned + 64e6 < imports + total
    assert {p.name for p in tmp_path.iterdir()} >= {"tiny.mkpack"} and not list(tmp_path.glob("**/*.safetensors"))


def test_a_dry_run_needs_the_config_alone(tmp_path):
    path = config(tmp_path / "config.json")
    (tmp_path / "LICENSE").write_text("of the recipes, not of the weights")
    recipe = write_recipe(tmp_path / "recipe.yaml", {"dummy": "config.json", "seed": 7}, targets=["x86-64-v3"])
    todo = planner.plan(recipe)
    assert f"random weights of seed 7 in the shape of {path}" in todo.render()
    assert json.loads(todo.to_json())["tensors"] == len(todo.roles) > 0
    assert todo.tokenizer_files() == {"config.json": path} and todo.legal_files() == {}
    assert todo.checkpoint is not None and todo.checkpoint.unused(todo.roles[1:]) == [todo.roles[0].source]


def test_the_recipe_of_the_benchmark_is_the_published_shape():
    todo = planner.plan(ROOT / "recipes/bench/qwen3-30b-a3b.yaml")
    assert sum(int(np.prod(role.shape)) for role in todo.roles) == 30_532_122_624
    assert todo.bytes_per_token() == pytest.approx(3.48e9, rel=1e-3)
    assert todo.layout.router_format == "bf16" and todo.memory_bytes < 4e9


@pytest.mark.parametrize(
    ("name", "parameters", "per_token"),
    [
        ("gpt-oss-20b", 20_914_757_184, 3.785e9),
        ("minimax-m2", 228_689_764_864, 10.74e9),
        ("muse-spark-816b-a42b", 819_990_552_064, 52.99e9),
    ],
)
def test_recipes_of_other_families_are_of_the_published_shape(name, parameters, per_token):
    todo = planner.plan(ROOT / f"recipes/bench/{name}.yaml")
    assert sum(int(np.prod(role.shape)) for role in todo.roles) == parameters
    assert todo.bytes_per_token() == pytest.approx(per_token, rel=1e-3)


@pytest.mark.parametrize("family", ["gpt_oss", "minimax_m2", "muse_spark"])
def test_weights_of_every_family_run(family, tmp_path):
    """Fused experts, biases, sinks and gates are drawn; the tokens of a context differ."""
    config(tmp_path / "config.json", family)
    path = build(write_recipe(tmp_path / "recipe.yaml", {"dummy": "config.json"}), output=tmp_path)
    with load(path, threads=1) as model:
        logits = model.step(list(range(20)), 20)
    assert np.isfinite(logits).all() and logits.std() > 0.01
    assert len(set(logits.argmax(axis=1).tolist())) > 5


# -- refusals -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "c.json cannot be read: No such file or directory; expected a config.json"),
        ("folder", "c.json is a folder: expected a config.json"),
        (b"{", "c.json is not readable as JSON"),
        (b"\xff", "c.json is not readable as JSON"),
        (b"[]", "c.json is not a JSON object"),
        (b"version https://git-lfs.github.com/spec/v1\n", "c.json is a Git LFS pointer"),
        (b'{"model_type": "bert"}', "bert"),
    ],
)
def test_a_config_that_is_none_is_refused(tmp_path, content, said):
    path = tmp_path / "c.json"
    if content == "folder":
        path.mkdir()
    elif content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError) as error:
        planner.plan(write_recipe(tmp_path / "recipe.yaml", {"dummy": "c.json"}))
    assert said in str(error.value)


def test_quality_of_random_weights_is_refused_with_everything_else(tmp_path):
    config(tmp_path / "c.json")
    keys = {"quality": {"tokens": 20}, "limits": {"context": 100_000}, "targets": ["x86-64-v3"]}
    with pytest.raises(UserError) as error:
        planner.plan(write_recipe(tmp_path / "recipe.yaml", {"dummy": "c.json"}, **keys))
    assert "2 problems" in str(error.value) and "random weights (source.dummy) have none to measure" in str(error.value)


def test_roles_of_another_model_are_not_tensors_of_this(dummy, tmp_path):
    roles = planner.plan(write_recipe(tmp_path / "recipe.yaml", {"dummy": str(config(tmp_path / "c.json"))})).roles
    with pytest.raises(ValueError, match="embed_tokens"):
        dummy.check(roles)
