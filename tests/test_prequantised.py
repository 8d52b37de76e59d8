"""Quantised checkpoints, made by modelopt and compressed-tensors themselves: what is read of them is what they say, to
the bit, and what cannot be read is refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import builds
import families
import numpy as np
import pytest
import quantised
import torch
from safetensors.torch import load_file

from mkpack import prequantised
from mkpack.artifact import open_artifact
from mkpack.build import build
from mkpack.formats import Prequantised, QTensor, dequantise, source_values
from mkpack.pack import unpack
from mkpack.plan import groups, plan
from mkpack.quantize import quantise, tensor_error, tensor_scale


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Path:
    return families.make_checkpoint(tmp_path_factory.mktemp("plain") / "checkpoint", "qwen3_moe", dtype="bfloat16")


@pytest.fixture(scope="module")
def exported(plain, tmp_path_factory) -> Path:
    """modelopt's own export; its experts are NVFP4."""
    return quantised.modelopt(plain, tmp_path_factory.mktemp("modelopt") / "checkpoint")


@pytest.fixture
def compressed(plain, tmp_path) -> Path:
    quantised.compressed_tensors(plain, tmp_path / "compressed", "NVFP4A16")
    return tmp_path / "compressed"


@pytest.fixture
def stub(tmp_path, monkeypatch) -> Path:
    return builds.stub_compiler(tmp_path / "stub-cxx", monkeypatch)


def taken(folder: Path, name: str) -> Prequantised:
    found = quantised.checked(folder).read(name)
    assert isinstance(found, Prequantised)
    return found


def stored(path: Path, folder: Path) -> dict[str, QTensor]:
    """Every tensor of an artifact, by its name in the checkpoint."""
    roles = quantised.roles_of(folder)
    with open_artifact(path) as artifact:
        layout = builds.layout_of(artifact)
        blobs = [np.frombuffer(artifact.read(w.path), np.uint8) for w in artifact.manifest.weights]
        return {r.source: unpack(layout, blobs, {q.name: q.shape for q in roles}, r.name) for r in roles}


# -- what the libraries say -------------------------------------------------------------------------------------------


def test_modelopt_nvfp4_is_what_modelopt_says(exported):
    state, checkpoint = load_file(exported / "model.safetensors"), quantised.checked(exported)
    names = quantised.experts_of(state)
    assert len(names) == 2 * 4 * 3
    for name in names:
        found = checkpoint.read(name)
        assert isinstance(found, Prequantised) and found.codes is found.q.data
        expected = quantised.modelopt_values(state, name)
        assert torch.equal(quantised.values(found), expected)
        np.testing.assert_array_equal(source_values(found), expected.numpy())
        # What the artifact computes with is the same but for the order of its two products.
        np.testing.assert_allclose(dequantise(found.q), expected.numpy(), rtol=2**-22, atol=0)
    assert checkpoint.notes(quantised.roles_of(exported)) == [
        "24 scales of activations and of the KV cache are not used, since neither is quantised: "
        "model.layers.0.mlp.experts.0.down_proj.input_scale, model.layers.0.mlp.experts.0.gate_proj.input_scale, "
        "model.layers.0.mlp.experts.0.up_proj.input_scale and 21 more"
    ]
    assert checkpoint.unused(quantised.roles_of(exported)) == []


@pytest.mark.parametrize(
    ("config", "scheme"), [("FP8_DEFAULT_CFG", "fp8"), ("MXFP4_DEFAULT_CFG", "mxfp4"), ("NVFP4_DEFAULT_CFG", "nvfp4")]
)
def test_other_exports_of_modelopt(plain, tmp_path, config, scheme):
    """Attention too; what is quantised, and that metadata and tensors agree, is seen by the notes."""
    folder = quantised.modelopt(plain, tmp_path / "q", config)
    state = load_file(folder / "model.safetensors")
    checkpoint, roles = quantised.checked(folder), quantised.roles_of(folder)
    names = [r.source for r in roles if r.precision in ("experts", "attention")]
    assert len(names) == 2 * (4 * 3 + 4) and quantised.notes(folder) == "" and checkpoint.unused(roles) == []
    for name in names:
        stored = prequantised.find(name, checkpoint.tensors)
        assert stored is not None and stored.scheme == scheme
        assert torch.equal(quantised.values(checkpoint.read(name)), quantised.modelopt_values(state, name))


def test_fused_experts_of_modelopt(tmp_path):
    """gpt-oss: [experts, in, out], and names with underscores."""
    source = families.make_checkpoint(tmp_path / "plain", "gpt_oss", dtype="bfloat16", intermediate_size=64)
    folder = quantised.modelopt(source, tmp_path / "q")
    state = load_file(folder / "model.safetensors")
    checkpoint, roles = quantised.checked(folder), quantised.roles_of(folder)
    experts = [role for role in roles if role.precision == "experts"]
    assert len(experts) == 2 * 4 * 3 and quantised.notes(folder) == "" and checkpoint.unused(roles) == []
    for role in experts:
        found, part = checkpoint.read(role.source, role.part), role.part
        assert isinstance(found, Prequantised) and part is not None
        one = {
            "w": state[role.source][part.index].T.contiguous(),
            "w_scale": state[f"{role.source}_weight_scale"][part.index].T.contiguous(),
            "w_scale_2": state[f"{role.source}_weight_scale_2"],
        }
        assert torch.equal(quantised.values(found), quantised.modelopt_values(one, "w")[part.rows])
    name = experts[0].source
    quantised.change(folder, **{f"{name}_weight_scale_2": torch.arange(1.0, 5.0)})  # of each expert
    again = [quantised.checked(folder).read(r.source, r.part) for r in experts if r.source == name]
    assert [float(p.q.scale2[0]) for p in again] == [1, 1, 2, 2, 3, 3, 4, 4]
    quantised.change(folder, **{f"{name}_weight_scale_2": None})
    assert f'"{name}_weight_scale_2" is missing beside' in quantised.refusal(folder)
    quantised.change(folder, **{f"{name}_weight_scale": None})
    assert f'without a scale: expected "{name}_weight_scale"' in quantised.refusal(folder)
    quantised.change(folder, **{name: torch.zeros(4, 64, 128).to(torch.float8_e4m3fn)})
    assert "fused experts are read unquantised, in MXFP4 or in NVFP4, found F8_E4M3" in quantised.refusal(folder)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("preset", "scale_name"),
    [
        ("NVFP4", "weight_scale"),
        ("NVFP4A16", "weight_scale"),
        ("MXFP4A16", "weight_scale"),
        ("FP8", "weight_scale"),
        ("FP8_DYNAMIC", "weight_scale"),
        ("FP8_BLOCK", "weight_scale"),
        ("FP8_BLOCK", "weight_scale_inv"),
    ],
)
def test_compressed_tensors_is_what_compressed_tensors_says(tmp_path, preset, scale_name, dtype):
    # 160 rows and columns: a block of fp8 that is not whole.
    source = families.make_checkpoint(
        tmp_path / "plain", "mixtral", dtype="bfloat16", num_hidden_layers=1, intermediate_size=160
    )
    folder = tmp_path / "compressed"
    expected = quantised.compressed_tensors(source, folder, preset, scale_name=scale_name, dtype=dtype)
    checkpoint, roles = quantised.checked(folder), quantised.roles_of(folder)
    assert len(expected) == 12 and checkpoint.notes(roles) == checkpoint.unused(roles) == []
    for name, value in expected.items():
        found = checkpoint.read(name)
        assert torch.equal(quantised.values(found).to(dtype), value)
        if isinstance(found, Prequantised):
            np.testing.assert_array_equal(torch.from_numpy(source_values(found)).to(dtype).float(), value.float())
            artifact = torch.from_numpy(dequantise(found.q))
            if preset.startswith("NVFP4"):  # a divisor has no exact reciprocal in float32
                torch.testing.assert_close(artifact, torch.from_numpy(source_values(found)), rtol=2**-22, atol=0)
            else:
                assert torch.equal(artifact.to(dtype), value)
        else:
            assert preset == "FP8_BLOCK" and found.dtype == torch.float32


def test_mxfp4_of_gpt_oss_is_what_transformers_says_and_nvfp4_holds_it_exactly(tmp_path):
    source = families.make_checkpoint(tmp_path / "plain", "gpt_oss", dtype="bfloat16", intermediate_size=64)
    expected = quantised.mxfp4(source, tmp_path / "q", spread=17)
    checkpoint, roles = quantised.checked(tmp_path / "q"), quantised.roles_of(tmp_path / "q")
    assert checkpoint.notes(roles) == checkpoint.unused(roles) == []
    experts = [role for role in roles if role.precision == "experts"]
    assert len(experts) > 2 * 3 and {role.source for role in experts} == expected.keys()
    for role in experts:
        found = checkpoint.read(role.source, role.part)
        assert isinstance(found, Prequantised) and found.codes is found.q.data
        assert role.part is not None
        value = role.part.of(expected[role.source][role.part.index])
        assert torch.equal(torch.from_numpy(dequantise(found.q)), value)
        np.testing.assert_array_equal(source_values(found), dequantise(found.q))
        assert tensor_error(quantise(found, "nvfp4"), found).error == 0


# -- what a build makes of them ---------------------------------------------------------------------------------------


def test_a_build_takes_the_payload_over_bit_for_bit(stub, exported, tmp_path):
    recipe = builds.write_recipe(tmp_path / "recipe.yaml", exported, parallel={"tp": 2})
    state, found = load_file(exported / "model.safetensors"), stored(build(recipe, output=tmp_path), exported)
    for name in quantised.experts_of(state):
        np.testing.assert_array_equal(found[name].data, state[name].numpy())
        np.testing.assert_array_equal(found[name].scale, state[f"{name}_scale"].view(torch.uint8).numpy())
        assert found[name].scale2.tolist() == [state[f"{name}_scale_2"].item()]
    with open_artifact(tmp_path / "tiny.mkpack") as artifact:
        report = json.loads(artifact.read("report.json"))
    assert report["relative_error"] == 0


def test_gate_and_up_keep_their_own_tensor_scales(stub, compressed, tmp_path):
    """They lie in alternating tiles of one section; each tile has its matrix's own scale."""
    recipe = builds.write_recipe(tmp_path / "recipe.yaml", compressed)
    state, found = load_file(compressed / "model.safetensors"), stored(build(recipe, output=tmp_path), compressed)
    different = 0
    for name in (n for n in found if n.endswith("gate_proj.weight")):
        gate, up = (n.removesuffix("weight") for n in (name, name.replace("gate_proj", "up_proj")))
        for base in (gate, up):
            q = found[base + "weight"]
            np.testing.assert_array_equal(q.data, state[base + "weight_packed"].numpy())
            np.testing.assert_array_equal(q.scale, state[base + "weight_scale"].view(torch.uint8).numpy())
            divisor = state[base + "weight_global_scale"].numpy()
            assert q.scale2 == np.float32(1) / divisor and q.scale2 != divisor
        different += int(found[gate + "weight"].scale2[0] != found[up + "weight"].scale2[0])
    assert different >= 4
    # Nor do they count for the scale of a neighbour that is quantised here.
    one = taken(compressed, gate + "weight")
    other = torch.ones(2, 16)
    assert tensor_scale(one, other) == tensor_scale(other) and tensor_scale(one, one) == 1.0


def test_another_precision_is_made_of_the_sources_values(stub, compressed, tmp_path):
    recipe = builds.write_recipe(tmp_path / "recipe.yaml", compressed, quantise={"experts": "bf16"})
    found = stored(build(recipe, output=tmp_path), compressed)
    for name in quantised.experts_of(found):
        expected = torch.from_numpy(source_values(taken(compressed, name))).bfloat16()
        assert torch.equal(torch.from_numpy(dequantise(found[name])), expected.float())


def test_fp8_of_rows_stays_and_fp8_of_blocks_is_quantised_again(stub, tmp_path):
    plain = families.make_checkpoint(tmp_path / "plain", "mixtral", dtype="bfloat16", intermediate_size=160)
    for preset in ("FP8_DYNAMIC", "FP8_BLOCK"):
        folder = tmp_path / preset
        expected = quantised.compressed_tensors(plain, folder, preset)
        recipe = builds.write_recipe(tmp_path / "recipe.yaml", folder, quantise={"experts": "fp8"})
        found = stored(build(recipe, output=tmp_path, force=True), folder)
        state = load_file(folder / "model.safetensors")
        for name, value in expected.items():
            if preset == "FP8_DYNAMIC":
                np.testing.assert_array_equal(found[name].data, state[name].view(torch.uint8).numpy())
                assert torch.equal(torch.from_numpy(dequantise(found[name])), value)
            else:
                np.testing.assert_array_equal(found[name].data, quantise(value, "fp8").data)
                assert 0 < tensor_error(found[name], value).relative < 0.04
            nvfp4 = quantise(quantised.checked(folder).read(name), "nvfp4")
            np.testing.assert_array_equal(nvfp4.data, quantise(value, "nvfp4").data)


def test_the_model_computes_what_its_quantised_checkpoint_says(plain, exported, tmp_path):
    """One build with a real kernel, against transformers on the weights that modelopt reads out."""
    from mkpack.loader import load

    state = load_file(exported / "model.safetensors")
    weights = {n: quantised.modelopt_values(state, n).numpy() for n in quantised.experts_of(state)}
    weights |= {n: t.float().numpy() for n, t in state.items() if t.dtype == torch.bfloat16}
    path = build(builds.write_recipe(tmp_path / "recipe.yaml", exported), output=tmp_path)
    prompt = [7, 99, 12, 200, 31]
    with load(path, threads=1) as model:
        logits = model.step(prompt, len(prompt))
    expected = families.reference_logits(families.reference(plain, weights), prompt)
    assert builds.relative_error(logits, expected) < 2e-3


@pytest.mark.parametrize(
    ("experts", "said", "memory"),
    [
        ("nvfp4", "nvfp4 in the source, and taken over bit for bit", 2 * 0.8125 + 0.5625),
        ("bf16", "nvfp4 in the source, but the recipe says bf16: larger, and no better than nvfp4", 2 * 4.8125 + 2),
    ],
)
def test_a_plan_holds_the_recipe_against_what_the_source_is(exported, tmp_path, experts, said, memory):
    recipe = builds.write_recipe(tmp_path / "recipe.yaml", exported, quantise={"experts": experts})
    todo = plan(recipe)
    assert todo.notes()[0] == f"experts: {said}" and f"experts: {said}" in todo.render()
    assert json.loads(todo.to_json())["notes"] == todo.notes()
    assert not any("attention" in note for note in todo.notes())
    pair = next(group for group in groups(todo.roles) if len(group) == 2)
    assert todo.group_bytes(pair) == 64 * 64 * memory


@pytest.mark.parametrize(
    ("preset", "experts", "said"),
    [
        ("MXFP4A16", "nvfp4", "mxfp4 in the source, and written as nvfp4, without loss where exponents allow it"),
        ("MXFP4A16", "fp8", "mxfp4 in the source, but the recipe says fp8: larger, and no better than mxfp4"),
        ("FP8", "fp8", "fp8 in the source, and taken over bit for bit"),
        ("FP8_DYNAMIC", "nvfp4", "fp8 in the source, and quantised again, to nvfp4"),
        ("FP8_BLOCK", "fp8", "fp8 in blocks in the source, and quantised again, to fp8"),
    ],
)
def test_a_plan_says_what_becomes_of_every_format(tmp_path, preset, experts, said):
    source = families.make_checkpoint(
        tmp_path / "plain", "mixtral", dtype="bfloat16", num_hidden_layers=1, intermediate_size=160
    )
    quantised.compressed_tensors(source, tmp_path / "q", preset)
    recipe = builds.write_recipe(tmp_path / "recipe.yaml", tmp_path / "q", quantise={"experts": experts})
    assert plan(recipe).notes() == [f"experts: {said}"]


def test_a_plan_tells_of_layers_that_differ(exported, tmp_path):
    state = load_file(exported / "model.safetensors")
    base = "model.layers.0.self_attn.q_proj"
    q = quantise(state[f"{base}.weight"], "nvfp4")
    state[f"{base}.weight"] = torch.from_numpy(q.data)
    state[f"{base}.weight_scale"] = torch.from_numpy(q.scale).view(torch.float8_e4m3fn)
    state[f"{base}.weight_scale_2"] = torch.from_numpy(q.scale2)
    folder = quantised.write(exported, tmp_path / "q", state)
    notes = plan(builds.write_recipe(tmp_path / "recipe.yaml", folder)).notes()
    assert notes[0].startswith("attention: 1 of 8 matrices are nvfp4 in the source, but the recipe says bf16")
    assert f"config.json says not quantised, the tensors are nvfp4 and are believed: 1 matrices, {base}" in notes


def test_gpt_oss_computes_what_its_mxfp4_says(tmp_path):
    from mkpack.loader import load

    source = families.make_checkpoint(tmp_path / "plain", "gpt_oss", dtype="bfloat16", intermediate_size=64)
    weights = {name: value.numpy() for name, value in quantised.mxfp4(source, tmp_path / "q").items()}
    path = build(builds.write_recipe(tmp_path / "recipe.yaml", tmp_path / "q"), output=tmp_path)
    with open_artifact(path) as artifact:
        assert json.loads(artifact.read("report.json"))["relative_error"] == 0
    prompt = [7, 99, 12, 200, 31]
    with load(path, threads=1) as model:
        logits = model.step(prompt, len(prompt))
    expected = families.reference_logits(families.reference(source, weights), prompt)
    assert builds.relative_error(logits, expected) < 2e-3


def test_input_scales_have_no_part_in_it(exported, tmp_path):
    """An expert that saw no calibration token has Inf or a made-up 0.5 there, or none at all."""
    state = load_file(exported / "model.safetensors")
    scales = [n for n in state if n.endswith("input_scale")]
    broken = {n: torch.tensor(float("inf")) for n in scales[1:]}
    folder = quantised.write(exported, tmp_path / "q", {k: v for k, v in {**state, **broken}.items() if k != scales[0]})
    for name in quantised.experts_of(state):
        np.testing.assert_array_equal(taken(folder, name).q.data, state[name].numpy())
