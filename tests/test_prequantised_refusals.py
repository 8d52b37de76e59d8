"""Quantised checkpoints that cannot be built are refused by name, at their check or when they are read."""

from __future__ import annotations

import families
import pytest
import quantised
import torch
from safetensors.torch import load_file

from mkpack.errors import UserError

NAME = "model.layers.1.mlp.experts.2.up_proj"
_DOTTED = NAME.replace(".", "__")


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
        (
            "weight",
            lambda t: torch.ones(64, 64),
            ["weight_packed", f"another format's {NAME}.weight lies"],
        ),
        ("weight_scale_2", lambda t: torch.ones(()), ["is U8", f"another format's {NAME}.weight_scale_2 lies"]),
        ("weight_scale_inv", lambda t: torch.ones(1, 1), [f"another format's {NAME}.weight_scale_inv lies"]),
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
        assert part in quantised.refusal(compressed)


def test_scales_of_half_the_size_are_refused(compressed, tmp_path):
    """What modelopt before 0.46 wrote of compressed models."""
    state = load_file(compressed / "model.safetensors")
    state[f"{NAME}.weight_scale"] = state[f"{NAME}.weight_scale"].flatten()[:128].clone()
    text = quantised.refusal(quantised.write(compressed, tmp_path / "q", state))
    assert f'"{NAME}.weight_scale"' in text and "expected shape [64, 4]" in text and "found [128]" in text


def test_a_quantised_router_is_refused(compressed):
    name = "model.layers.0.mlp.gate.weight"
    router = load_file(compressed / "model.safetensors")[name]
    quantised.change(compressed, **{name: router.to(torch.float8_e4m3fn)})
    text = quantised.refusal(compressed)
    assert f'"{name}"' in text and "routers and vectors are never quantised" in text


def test_a_scale_beside_weights_that_are_not_quantised_is_refused(plain, tmp_path):
    state = families.checkpoint_tensors(plain)
    state[f"{NAME}.weight_scale_inv"] = torch.ones(1, 1)
    text = quantised.refusal(quantised.write(plain, tmp_path / "q", state))
    assert f'"{NAME}.weight"' in text and "is BF16" in text and "cannot be told" in text
    state[f"{NAME}.weight_scale_2"] = state.pop(f"{NAME}.weight_scale_inv")
    text = quantised.refusal(quantised.write(plain, tmp_path / "q", state))
    assert "is BF16, but another format's" in text and f"{NAME}.weight_scale_2 lies beside it" in text


@pytest.mark.parametrize(("suffix", "dtype"), [("weight_packed", torch.int32), ("qweight", torch.int32)])
def test_integer_formats_are_refused(plain, tmp_path, suffix, dtype):
    state = families.checkpoint_tensors(plain)
    state[f"{NAME}.{suffix}"] = torch.zeros(state.pop(f"{NAME}.weight").shape[0], 8, dtype=dtype)
    text = quantised.refusal(quantised.write(plain, tmp_path / "q", state))
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
    text = quantised.refusal(quantised.write(plain, tmp_path / "q", state))
    assert f"{NAME}.weight" in text and said.rstrip(", ") in text


def test_a_block_of_fp8_whose_weights_are_lost_is_refused(tmp_path):
    plain = families.make_checkpoint(tmp_path / "plain", "mixtral", dtype="bfloat16", intermediate_size=160)
    quantised.compressed_tensors(plain, tmp_path / "q", "FP8_BLOCK")
    name = "model.layers.1.block_sparse_moe.experts.2.w3"
    scale = load_file(tmp_path / "q" / "model.safetensors")[f"{name}.weight_scale"]
    assert scale.shape == (2, 1)
    scale[1] = 0
    quantised.change(tmp_path / "q", **{f"{name}.weight_scale": scale})
    assert f"{name}.weight: a scale is zero although codes are not" in quantised.refusal(tmp_path / "q")


def test_all_faults_of_a_checkpoint_are_in_one_message(compressed):
    quantised.change(
        compressed, **{f"{NAME}.weight_scale": None, f"{NAME}.pre_quant_scale": torch.ones(1), "lm_head.weight": None}
    )
    with pytest.raises(UserError, match="3 problems"):
        quantised.checked(compressed)
