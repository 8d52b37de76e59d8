"""What metadata says of formats is held against the tensors, and every difference is told."""

from __future__ import annotations

import json

import families
import pytest
import quantised
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from mkpack.quant_config import claims, fp8_block
from mkpack.quantize import quantise


def test_lm_head_quantised_although_excluded(compressed):
    state = load_file(compressed / "model.safetensors")
    packed = prequantised_head(state["lm_head.weight"])
    quantised.change(compressed, lm_head__weight=None, **packed)
    assert quantised.notes(compressed) == (
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
    said = "config.json says nvfp4, the tensors are not quantised and are believed: 32 matrices"
    assert quantised.notes(folder).startswith(said)
    section["ignore"] = ["*"]
    quantised.write(plain, folder, families.checkpoint_tensors(plain), quantization_config=section)
    assert quantised.notes(folder) == (
        "config.json says nvfp4 and excludes every matrix of the model: nothing in this checkpoint is quantised"
    )


def test_two_places_that_say_different_things(compressed):
    """modelopt writes one of them, or the other, or both; here the tensors are NVFP4 of experts."""
    config = json.loads((compressed / "config.json").read_text())
    excluded = ["lm_head", "model.embed_tokens", "*self_attn*", "*mlp.gate"]

    def told(algorithm: str | None, section: dict | None) -> str:
        (compressed / "config.json").write_text(json.dumps({**config, "quantization_config": section}))
        (compressed / "hf_quant_config.json").unlink(missing_ok=True)
        if algorithm:
            text = json.dumps({"quantization": {"quant_algo": algorithm, "exclude_modules": excluded}})
            (compressed / "hf_quant_config.json").write_text(text)
        return quantised.notes(compressed)

    right = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": excluded}
    assert told("NVFP4", right) == told("NVFP4", None) == told(None, right) == ""
    assert told("FP8", right).startswith("hf_quant_config.json says fp8, the tensors are nvfp4 and are believed: 24 ")
    assert told("FP8", {**right, "quant_algo": "W4A16_AWQ"}).count("are nvfp4 and are believed: 24 ") == 2
    assert told(None, None).startswith("no quantization_config and no hf_quant_config.json, yet 24 matrices are nvfp4")


def test_layers_of_mixed_precision(compressed, plain):
    config = json.loads((compressed / "config.json").read_text())
    experts = [n.removesuffix(".weight") for n in quantised.experts_of(families.checkpoint_tensors(plain))]
    section = {"quant_algo": "MIXED_PRECISION", "quantized_layers": {n: {"quant_algo": "NVFP4"} for n in experts}}
    (compressed / "config.json").write_text(json.dumps({**config, "quantization_config": section}))
    assert quantised.notes(compressed) == ""
    section["quantized_layers"] |= {"model.layers.0.self_attn.q_proj": {"quant_algo": "FP8"}}
    del section["quantized_layers"][experts[0]]
    (compressed / "config.json").write_text(json.dumps({**config, "quantization_config": section}))
    assert quantised.notes(compressed).splitlines() == [
        "config.json says fp8, the tensors are not quantised and are believed: 1 matrices, "
        "model.layers.0.self_attn.q_proj",
        f"config.json says not quantised, the tensors are nvfp4 and are believed: 1 matrices, {experts[0]}",
    ]


_GROUPS = {
    "a": {"targets": ["Linear"], "weights": {"type": "float", "num_bits": 4, "group_size": 16}},
    "b": {"targets": ["re:.*down"], "weights": {"type": "float", "num_bits": 8}},
    "c": {"targets": ["x.q"], "weights": {"type": "int", "num_bits": 4}},
    "d": {"targets": ["x.k"], "weights": {"type": "float", "num_bits": 4, "group_size": 32}},
}


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ({"quant_method": "fp8", "modules_to_not_convert": ["gate"]}, {"x.up": "fp8", "x.gate": "plain"}),
        ({"quant_method": "fp8"}, {"lm_head": "plain", "model.up": "fp8"}),
        ({"quant_method": "mxfp4", "modules_to_not_convert": ["m.*.attn"]}, {"m.3.attn.q": "plain", "m.3": "mxfp4"}),
        ({"quant_method": "modelopt"}, {"x": "plain"}),
        ({"quant_method": "gptq"}, {"x": "gptq"}),
        ({"quant_algo": "NVFP4", "ignore": ["layers.0"]}, {"layers.0.q": "plain", "layers.01": "nvfp4"}),
        ({"quant_algo": "MXFP8"}, {"x": "mxfp8"}),
        (
            {"config_groups": _GROUPS, "ignore": ["re:.*gate$", "re:("]},
            {"x.up": "nvfp4", "x.down": "fp8", "x.q": "int4", "x.k": "mxfp4", "x.gate": "plain"},
        ),
    ],
)
def test_words_of_the_formats(section, expected):
    (claim,) = claims({"quantization_config": section}, None)
    (inside,) = claims({"text_config": {"quantization_config": section}}, {"quantization": []})
    assert inside == claim and {module: claim.scheme(module) for module in expected} == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [([64, 32], (64, 32)), (None, (128, 128)), ([0, 1], (128, 128)), ([128], (128, 128)), ("128", (128, 128))],
)
def test_the_size_of_fp8_blocks(value, expected):
    assert fp8_block({"quantization_config": {"weight_block_size": value}}) == expected


_KEYS = ("quant_method", "quant_algo", "config_groups", "ignore", "quantized_layers", "weight_block_size", "targets")
_JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda x: st.lists(x, max_size=3) | st.dictionaries(st.text(max_size=3), x, max_size=3),
    max_leaves=6,
)
_GROUP = st.dictionaries(st.sampled_from(["weights", "targets", "quant_algo"]), _JUNK)


@given(st.dictionaries(st.sampled_from(_KEYS), _JUNK | st.dictionaries(st.text(max_size=2), _GROUP)))
def test_junk_claims_nothing_that_crashes(section):
    for claim in claims({"quantization_config": section}, {"quantization": section}):
        assert isinstance(claim.scheme("model.layers.0.mlp.experts.0.up_proj"), str)
    assert len(fp8_block({"quantization_config": section})) == 2
