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
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from mkpack import formats, payload, prequantised
from mkpack.artifact import open_artifact
from mkpack.build import build
from mkpack.checkpoint import Checkpoint
from mkpack.errors import UserError
from mkpack.formats import Prequantised, QTensor, dequantise, e2m1_values, source_values
from mkpack.models import model_spec
from mkpack.pack import unpack
from mkpack.plan import groups, plan
from mkpack.quantize import quantise, tensor_error, tensor_scale
from mkpack.spec import TensorRole, tensors


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


def roles_of(folder: Path) -> list[TensorRole]:
    return list(tensors(*model_spec(Checkpoint.open(folder).config)))


def checked(folder: Path) -> Checkpoint:
    checkpoint = Checkpoint.open(folder)
    checkpoint.check(roles_of(folder))
    return checkpoint


def taken(folder: Path, name: str) -> Prequantised:
    found = checked(folder).read(name)
    assert isinstance(found, Prequantised)
    return found


def values(found: Prequantised | torch.Tensor) -> torch.Tensor:
    """What a build quantises when it wants another format."""
    return torch.from_numpy(dequantise(quantise(found, "f32")).copy())


def stored(path: Path, folder: Path) -> dict[str, QTensor]:
    """Every tensor of an artifact, by its name in the checkpoint."""
    roles = roles_of(folder)
    with open_artifact(path) as artifact:
        layout = builds.layout_of(artifact)
        blobs = [np.frombuffer(artifact.read(w.path), np.uint8) for w in artifact.manifest.weights]
        return {r.source: unpack(layout, blobs, {q.name: q.shape for q in roles}, r.name) for r in roles}


# -- what the libraries say -------------------------------------------------------------------------------------------


def test_modelopt_nvfp4_is_what_modelopt_says(exported):
    state, checkpoint = load_file(exported / "model.safetensors"), checked(exported)
    names = quantised.experts_of(state)
    assert len(names) == 2 * 4 * 3
    for name in names:
        found = checkpoint.read(name)
        assert isinstance(found, Prequantised) and found.codes is found.q.data
        expected = quantised.modelopt_values(state, name)
        assert torch.equal(values(found), expected)
        np.testing.assert_array_equal(source_values(found), expected.numpy())
        # What the artifact computes with is the same but for the order of its two products.
        np.testing.assert_allclose(dequantise(found.q), expected.numpy(), rtol=2**-22, atol=0)
    assert checkpoint.notes(roles_of(exported)) == [
        "24 scales of activations and of the KV cache are not used, since neither is quantised: "
        "model.layers.0.mlp.experts.0.down_proj.input_scale, model.layers.0.mlp.experts.0.gate_proj.input_scale, "
        "model.layers.0.mlp.experts.0.up_proj.input_scale and 21 more"
    ]
    assert checkpoint.unused(roles_of(exported)) == []


@pytest.mark.parametrize(
    ("config", "scheme"), [("FP8_DEFAULT_CFG", "fp8"), ("MXFP4_DEFAULT_CFG", "mxfp4"), ("NVFP4_DEFAULT_CFG", "nvfp4")]
)
def test_other_exports_of_modelopt(plain, tmp_path, config, scheme):
    """Attention too; what is quantised, and that metadata and tensors agree, is seen by the notes."""
    folder = quantised.modelopt(plain, tmp_path / "q", config)
    state, checkpoint, roles = load_file(folder / "model.safetensors"), checked(folder), roles_of(folder)
    names = [r.source for r in roles if r.precision in ("experts", "attention")]
    assert len(names) == 2 * (4 * 3 + 4) and notes(folder) == "" and checkpoint.unused(roles) == []
    for name in names:
        stored = prequantised.find(name, checkpoint.tensors)
        assert stored is not None and stored.scheme == scheme
        assert torch.equal(values(checkpoint.read(name)), quantised.modelopt_values(state, name))


def test_fused_experts_of_modelopt(tmp_path):
    """gpt-oss: [experts, in, out], and names with underscores."""
    source = families.make_checkpoint(tmp_path / "plain", "gpt_oss", dtype="bfloat16", intermediate_size=64)
    folder = quantised.modelopt(source, tmp_path / "q")
    state, checkpoint, roles = load_file(folder / "model.safetensors"), checked(folder), roles_of(folder)
    experts = [role for role in roles if role.precision == "experts"]
    assert len(experts) == 2 * 4 * 3 and notes(folder) == "" and checkpoint.unused(roles) == []
    for role in experts:
        found, part = checkpoint.read(role.source, role.part), role.part
        assert isinstance(found, Prequantised) and part is not None
        one = {
            "w": state[role.source][part.index].T.contiguous(),
            "w_scale": state[f"{role.source}_weight_scale"][part.index].T.contiguous(),
            "w_scale_2": state[f"{role.source}_weight_scale_2"],
        }
        assert torch.equal(values(found), quantised.modelopt_values(one, "w")[part.rows])
    name = experts[0].source
    quantised.change(folder, **{f"{name}_weight_scale_2": torch.arange(1.0, 5.0)})  # of each expert
    again = [checked(folder).read(r.source, r.part) for r in experts if r.source == name]
    assert [float(p.q.scale2[0]) for p in again] == [1, 1, 2, 2, 3, 3, 4, 4]
    quantised.change(folder, **{f"{name}_weight_scale_2": None})
    assert f'"{name}_weight_scale_2" is missing beside' in refusal(folder)
    quantised.change(folder, **{f"{name}_weight_scale": None})
    assert f'without a scale: expected "{name}_weight_scale"' in refusal(folder)
    quantised.change(folder, **{name: torch.zeros(4, 64, 128).to(torch.float8_e4m3fn)})
    assert "fused experts are read unquantised, in MXFP4 or in NVFP4, found F8_E4M3" in refusal(folder)


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
    checkpoint = checked(folder)
    assert len(expected) == 12 and checkpoint.notes(roles_of(folder)) == checkpoint.unused(roles_of(folder)) == []
    for name, value in expected.items():
        found = checkpoint.read(name)
        assert torch.equal(values(found).to(dtype), value)
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
    checkpoint, roles = checked(tmp_path / "q"), roles_of(tmp_path / "q")
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
            nvfp4 = quantise(checked(folder).read(name), "nvfp4")
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
        ("nvfp4", "nvfp4 in the source, and taken over bit for bit", 2 * 0.8125 + 4 * 0.5625),
        ("bf16", "nvfp4 in the source, but the recipe says bf16: larger, and no better than nvfp4", 2 * 4.8125 + 4 * 2),
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


# -- MXFP4 whose exponents are too far apart --------------------------------------------------------------------------


def nearest(value: float) -> float:
    """The e2m1 value nearest to a value, ties to the even code."""
    grid = e2m1_values()[:8]
    distance = np.abs(grid - abs(value))
    best = [i for i in range(8) if distance[i] == distance.min()]
    return float(np.copysign(grid[next((i for i in best if i % 2 == 0), best[0])], value))


@settings(max_examples=60, deadline=None)
@given(
    exponents=st.lists(st.integers(0, 252), min_size=4, max_size=4)
    | st.lists(st.integers(100, 130), min_size=4, max_size=4),
    zeros=st.sets(st.integers(0, 3)),
    seed=st.integers(0, 99),
)
def test_mxfp4_is_exact_where_the_exponents_allow_and_nearest_below(exponents, zeros, seed):
    codes = np.random.default_rng(seed).integers(0, 256, (2, 32)).astype(np.uint8)  # [2, 64]: four blocks of 32
    codes = codes.reshape(4, 16)
    codes[list(zeros)] &= 0x88
    scales = np.array(exponents, np.uint8).reshape(2, 2)
    found = payload.mxfp4(codes.reshape(2, 32), scales)
    exact = e2m1_values()[np.stack([codes & 15, codes >> 4], -1).reshape(4, 32)].astype(np.float64)
    exact = exact * 2.0 ** (scales.reshape(4, 1).astype(float) - 127)
    stored = dequantise(found.q).reshape(4, 32).astype(np.float64)
    used = [e for i, e in enumerate(exponents) if i not in zeros and (codes[i] & 0x77).any()]
    top = max(used, default=127)
    step = 2.0 ** (max(top - 8, 127 - 116) - 127 - 9)  # the smallest block scale
    for block, exponent in enumerate(exponents):
        if exponent - 127 >= np.log2(step) or not exact[block].any():
            np.testing.assert_array_equal(stored[block], exact[block])
        else:
            np.testing.assert_array_equal(stored[block], [step * nearest(v / step) for v in exact[block]])
    assert (found.codes is found.q.data) == bool((stored == exact).all() or (found.codes == found.q.data).all())


def test_what_mxfp4_lost_is_measured():
    codes = np.full((1, 32), 0x77, np.uint8)  # 6 everywhere
    far = payload.mxfp4(codes, np.array([[127, 109]], np.uint8))  # 18 apart: 6/2 = 3 is a code
    assert tensor_error(far.q, far).error == 0 and far.q.data[0, 16] == 0x55
    far = payload.mxfp4(codes, np.array([[127, 107]], np.uint8))  # 20 apart: 6/8 is none
    assert 0 < tensor_error(far.q, far).relative < 1e-6
    near = payload.mxfp4(codes, np.array([[127, 110]], np.uint8))
    assert tensor_error(near.q, near).error == 0 and near.codes is near.q.data
    assert source_values(far).max() == 6 and source_values(far)[0, -1] == 6 * 2.0**-20


# -- metadata and tensors ---------------------------------------------------------------------------------------------


def notes(folder: Path) -> str:
    return "\n".join(n for n in checked(folder).notes(roles_of(folder)) if "scales of activations" not in n)


def test_lm_head_quantised_although_excluded(compressed):
    state = load_file(compressed / "model.safetensors")
    packed = prequantised_head(state["lm_head.weight"])
    quantised.change(compressed, lm_head__weight=None, **packed)
    assert notes(compressed) == (
        "config.json says not quantised, the tensors are nvfp4 and are believed: 1 matrices, lm_head"
    )


def prequantised_head(head: torch.Tensor) -> dict[str, torch.Tensor]:
    q = quantise(head, "nvfp4")
    return {
        "lm_head__weight_packed": torch.from_numpy(q.data),
        "lm_head__weight_scale": torch.from_numpy(q.scale).view(torch.float8_e4m3fn),
        "lm_head__weight_global_scale": 1 / torch.from_numpy(q.scale2),
    }


def test_an_exclude_list_that_disables_everything(plain, tmp_path):
    section = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["*lm_head*"]}
    folder = quantised.write(plain, tmp_path / "q", families.checkpoint_tensors(plain), quantization_config=section)
    assert notes(folder).startswith(
        "config.json says nvfp4, the tensors are not quantised and are believed: 32 matrices"
    )
    section["ignore"] = ["*"]
    quantised.write(plain, folder, families.checkpoint_tensors(plain), quantization_config=section)
    assert notes(folder) == ""


def test_two_places_that_say_different_things(exported, tmp_path):
    other = {"quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head", "*self_attn*", "*mlp.gate"]}}
    state = load_file(exported / "model.safetensors")
    folder = quantised.write(exported, tmp_path / "q", state)
    (folder / "hf_quant_config.json").write_text(json.dumps(other))
    assert notes(folder).startswith(
        "hf_quant_config.json says fp8, the tensors are nvfp4 and are believed: 24 matrices"
    )
    # One of the two is enough, and none too.
    quantised.write(exported, folder, state, quantization_config=None)
    (folder / "hf_quant_config.json").write_text((exported / "hf_quant_config.json").read_text())
    assert notes(folder) == ""
    (folder / "hf_quant_config.json").unlink()
    assert notes(folder).startswith("no quantization_config and no hf_quant_config.json, yet 24 matrices are nvfp4")


def test_layers_of_mixed_precision(exported, tmp_path):
    mixed = {"quant_algo": "MIXED_PRECISION", "quantized_layers": {}}
    for name in quantised.experts_of(load_file(exported / "model.safetensors")):
        mixed["quantized_layers"][name.removesuffix(".weight")] = {"quant_algo": "NVFP4", "group_size": 16}
    folder = quantised.write(
        exported, tmp_path / "q", load_file(exported / "model.safetensors"), quantization_config=mixed
    )
    assert notes(folder) == ""


def test_input_scales_have_no_part_in_it(exported, tmp_path):
    """An expert that saw no calibration token has Inf or a made-up 0.5 there, or none at all."""
    state = load_file(exported / "model.safetensors")
    scales = [n for n in state if n.endswith("input_scale")]
    broken = {n: torch.tensor(float("inf")) for n in scales[1:]}
    folder = quantised.write(exported, tmp_path / "q", {k: v for k, v in {**state, **broken}.items() if k != scales[0]})
    for name in quantised.experts_of(state):
        np.testing.assert_array_equal(taken(folder, name).q.data, state[name].numpy())


# -- refusals ---------------------------------------------------------------------------------------------------------

NAME = "model.layers.1.mlp.experts.2.up_proj"
_DOTTED = NAME.replace(".", "__")


def refusal(folder: Path) -> str:
    """The one line with which a checkpoint is refused, at its check or when it is read."""
    with pytest.raises(UserError) as caught:
        checkpoint = checked(folder)
        for role in roles_of(folder):
            quantise(checkpoint.read(role.source, role.part), "nvfp4" if role.precision == "experts" else "f32")
    assert "\n" not in str(caught.value)
    return str(caught.value)


def set_byte(tensor: torch.Tensor, value: int) -> torch.Tensor:
    copy = tensor.clone()
    copy.view(torch.uint8).reshape(-1)[5] = value
    return copy


@pytest.mark.parametrize(
    ("suffix", "change", "said"),
    [
        ("weight_scale", lambda t: None, [f'"{NAME}.weight_packed"', "U8 without a scale", f'"{NAME}.weight_scale"']),
        ("weight_scale", lambda t: t[:, ::2], ["weight_scale", "expected shape [64, 4]", "found [64, 2]"]),
        ("weight_scale", lambda t: t.float(), ["weight_scale", "expected dtype F8_E4M3", "found F32"]),
        ("weight_scale", lambda t: set_byte(t, 0x7F), [NAME, "1 of 256 block scales are NaN"]),
        ("weight_scale", lambda t: set_byte(t, 0xA0), [NAME, "1 of 256 block scales are negative"]),
        ("weight_scale", lambda t: set_byte(t, 0), [NAME, "1 of 256 block scales are zero although the codes"]),
        ("weight_global_scale", lambda t: None, [f'"{NAME}.weight_global_scale" is missing']),
        (
            "weight_global_scale",
            lambda t: t.repeat(2),
            ["weight_global_scale", "expected shape [] or [1]", "found [2]"],
        ),
        ("weight_global_scale", lambda t: t * 0, [NAME, "scale for the whole matrix is 0"]),
        ("weight_global_scale", lambda t: t / 0, [NAME, "scale for the whole matrix is inf"]),
        ("weight_packed", lambda t: t[:, :16], ["weight_packed", "expected shape [64, 32]", "found [64, 16]"]),
        ("weight_packed", lambda t: None, [f'"{NAME}.weight" is missing', "expected shape [64, 64]"]),
        ("pre_quant_scale", lambda t: torch.ones(64), [f'"{NAME}.pre_quant_scale"', "AWQ"]),
        ("weight_zero_point", lambda t: torch.ones(64), [f'"{NAME}.weight_zero_point"', "asymmetric"]),
        ("svdquant_lora_a", lambda t: torch.ones(64), [f'"{NAME}.svdquant_lora_a"', "SVDQuant"]),
    ],
)
def test_a_matrix_that_cannot_be_built_is_refused_by_name(compressed, suffix, change, said):
    state = load_file(compressed / "model.safetensors")
    name = f"{NAME}.{suffix}"
    quantised.change(compressed, **{name: change(state.get(name))})
    for part in said:
        assert part in refusal(compressed)


def test_scales_of_half_the_size_are_refused(exported, tmp_path):
    """What modelopt before 0.46 wrote of compressed models."""
    state = load_file(exported / "model.safetensors")
    state[f"{NAME}.weight_scale"] = state[f"{NAME}.weight_scale"].flatten()[:128].clone()
    text = refusal(quantised.write(exported, tmp_path / "q", state))
    assert f'"{NAME}.weight_scale"' in text and "expected shape [64, 4]" in text and "found [128]" in text


def test_a_quantised_router_is_refused(compressed):
    name = "model.layers.0.mlp.gate.weight"
    router = load_file(compressed / "model.safetensors")[name]
    quantised.change(compressed, **{name: router.to(torch.float8_e4m3fn)})
    assert f'"{name}"' in refusal(compressed) and "routers and vectors are never quantised" in refusal(compressed)


def test_a_scale_beside_weights_that_are_not_quantised_is_refused(plain, tmp_path):
    state = families.checkpoint_tensors(plain)
    state[f"{NAME}.weight_scale_inv"] = torch.ones(1, 1)
    text = refusal(quantised.write(plain, tmp_path / "q", state))
    assert f'"{NAME}.weight"' in text and "is BF16" in text and "cannot be told" in text


@pytest.mark.parametrize(("suffix", "dtype"), [("weight_packed", torch.int32), ("qweight", torch.int32)])
def test_integer_formats_are_refused(plain, tmp_path, suffix, dtype):
    state = families.checkpoint_tensors(plain)
    state[f"{NAME}.{suffix}"] = torch.zeros(state.pop(f"{NAME}.weight").shape[0], 8, dtype=dtype)
    text = refusal(quantised.write(plain, tmp_path / "q", state))
    assert f'"{NAME}.weight" is missing' in text and f'found "{NAME}.{suffix}" of I32 [64, 8]: integer' in text


@pytest.mark.parametrize(
    ("codes", "scale", "said"),
    [
        (0x7F, None, "codes are NaN"),
        (0x30, None, "without a scale"),
        (0x30, torch.full((64, 1), float("nan")), "NaN, Inf or negative"),
        (0x30, -torch.ones(1), "NaN, Inf or negative"),
        (0x30, torch.zeros(64), "a scale is zero although codes are not"),
        (0x30, torch.ones(3, 1), "expected shape [] or [1] or [64] or [64, 1] or [1, 1], "),
    ],
)
def test_fp8_that_cannot_be_built_is_refused(plain, tmp_path, codes, scale, said):
    state = families.checkpoint_tensors(plain)
    state[f"{NAME}.weight"] = torch.full((64, 64), codes, dtype=torch.uint8).view(torch.float8_e4m3fn)
    if "without" not in said:
        state[f"{NAME}.weight_scale"] = torch.ones(()) if scale is None else scale
    text = refusal(quantised.write(plain, tmp_path / "q", state))
    assert f"{NAME}.weight" in text and said.rstrip(", ") in text


def test_a_block_of_fp8_whose_weights_are_lost_is_refused(tmp_path):
    plain = families.make_checkpoint(tmp_path / "plain", "mixtral", dtype="bfloat16", intermediate_size=160)
    quantised.compressed_tensors(plain, tmp_path / "q", "FP8_BLOCK")
    name = "model.layers.1.block_sparse_moe.experts.2.w3"
    scale = load_file(tmp_path / "q" / "model.safetensors")[f"{name}.weight_scale"]
    assert scale.shape == (2, 1)
    scale[1] = 0
    quantised.change(tmp_path / "q", **{f"{name}.weight_scale": scale})
    assert f"{name}.weight: a scale is zero although codes are not" in refusal(tmp_path / "q")


def test_mxfp4_that_cannot_be_built_is_refused():
    codes = np.full((1, 16), 0x11, np.uint8)
    for exponent, said in ((255, "1 of 1 block scales are NaN"), (253, "a block scale is 2^126")):
        with pytest.raises(UserError, match=f"w: {said.replace('^', '.')}"):
            payload.mxfp4(codes, np.array([[exponent]], np.uint8), name="w")


def test_all_faults_of_a_checkpoint_are_in_one_message(compressed):
    quantised.change(
        compressed, **{f"{NAME}.weight_scale": None, f"{NAME}.pre_quant_scale": torch.ones(1), "lm_head.weight": None}
    )
    with pytest.raises(UserError, match="3 problems"):
        checked(compressed)


def test_decoders_agree(compressed):
    """The fast and the slow one, on every byte: a matrix [16, 32] whose codes are 0 to 255, scales of all sorts."""
    codes = np.arange(256, dtype=np.uint8).reshape(16, 16)
    scale = np.arange(1, 33, dtype=np.uint8).reshape(16, 2) * 3
    for divides in (False, True):
        found = payload.nvfp4(codes, scale, np.float32(1.7), divides=divides)
        np.testing.assert_array_equal(values(found).numpy(), source_values(found))
        expected = (
            formats.e4m3_to_f32(scale) / np.float32(1.7) if divides else formats.e4m3_to_f32(scale) * np.float32(1.7)
        )
        np.testing.assert_array_equal(found.factors, expected)
