"""Checkpoints as quantisers write them, made with the libraries themselves, and what those say the weights then are."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import families
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from mkpack.checkpoint import Checkpoint
from mkpack.errors import UserError
from mkpack.formats import Prequantised, dequantise
from mkpack.models import model_spec
from mkpack.quantize import quantise
from mkpack.spec import TensorRole, tensors

EXPERTS = ("gate_proj.weight", "up_proj.weight", "down_proj.weight", ".w1.weight", ".w2.weight", ".w3.weight")


def experts_of(state: dict[str, Any]) -> list[str]:
    return [name for name in state if ".experts." in name and name.endswith(EXPERTS)]


def modelopt(source: Path, folder: Path, config: str = "NVFP4_EXPERTS_ONLY_CFG") -> Path:
    """A checkpoint calibrated, quantised (its experts in NVFP4) and exported by modelopt."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import modelopt.torch.quantization as mtq
        from modelopt.torch.export import export_hf_checkpoint

        model = transformers.AutoModelForCausalLM.from_pretrained(source)
        tokens = torch.arange(4, 260).reshape(4, 64)
        mtq.quantize(model, getattr(mtq, config), lambda m: m(tokens))
        export_hf_checkpoint(model, export_dir=folder)
    return _text_files(source, folder)


def modelopt_values(state: dict[str, torch.Tensor], name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """What modelopt reads out of an exported matrix."""
    from modelopt.torch.quantization.qtensor import FP8QTensor, MXFP4QTensor, NVFP4QTensor

    codes, scale = state[name], state[f"{name}_scale"]
    if codes.dtype == torch.float8_e4m3fn:
        blocks = {-1: 128, -2: 128} if scale.dim() > 1 else None
        return FP8QTensor(codes.shape, dtype, codes).dequantize(dtype, scale=scale, block_sizes=blocks)
    shape = (codes.shape[0], 2 * codes.shape[1])
    if scale.dtype == torch.uint8:
        return MXFP4QTensor(shape, dtype, codes).dequantize(dtype, scale=scale, block_sizes={-1: 32})
    scale2 = state[f"{name}_scale_2"]
    return NVFP4QTensor(shape, dtype, codes).dequantize(dtype, scale=scale, double_scale=scale2, block_sizes={-1: 16})


def compressed_tensors(
    source: Path,
    folder: Path,
    preset: str,
    *,
    take: Callable[[dict[str, Any]], list[str]] = experts_of,
    scale_name: str = "weight_scale",
    dtype: torch.dtype = torch.float32,
) -> dict[str, torch.Tensor]:
    """Some matrices of a checkpoint (its experts) in a preset format of compressed-tensors; returns the values that it
    decompresses them to itself, by name, in `dtype`."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.compressors.format import infer_module_format
    from compressed_tensors.quantization import QuantizationConfig, preset_name_to_scheme
    from compressed_tensors.quantization.lifecycle.forward import dequantize

    scheme = preset_name_to_scheme(preset, ["Linear"])
    kind = infer_module_format(torch.nn.Linear, scheme)
    compressor = BaseCompressor.get_value_from_registry(kind.value)
    state = families.checkpoint_tensors(source)
    taken = take(state)
    values = {}
    for name in taken:
        base = name.removesuffix("weight")
        weight = state.pop(name).to(dtype)
        made = compressor.compress({"weight": weight, **_qparams(weight, scheme.weights)}, scheme)
        if "weight_packed" in made:
            from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8

            unpacked = unpack_fp4_from_uint8(made["weight_packed"], *weight.shape, dtype=dtype)
            scale = compressor._decompress_scale(made["weight_scale"], dtype)
            more = {"global_scale": made.get("weight_global_scale"), "dtype": dtype}
            values[name] = dequantize(x_q=unpacked, scale=scale, args=scheme.weights, **more)
        else:
            values[name] = compressor.decompress(made, scheme)["weight"]
        made[scale_name] = made.pop("weight_scale")
        state |= {base + key: value.contiguous() for key, value in made.items()}
    weights = ((n, t) for n, t in state.items() if n.endswith(".weight"))
    ignored = [n.removesuffix(".weight") for n, t in weights if t.dtype in (torch.bfloat16, torch.float32)]
    config = QuantizationConfig(config_groups={"group_0": scheme}, format=kind.value, ignore=ignored).model_dump()
    write(source, folder, state, quantization_config=json.loads(json.dumps(config, default=str)))
    return values


def _qparams(weight: torch.Tensor, args: Any) -> dict[str, torch.Tensor]:
    """Scales of a weight by the largest value, as compressed-tensors computes them."""
    from compressed_tensors.quantization import QuantizationStrategy
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    n, k = weight.shape
    found = {}
    match args.strategy:
        case QuantizationStrategy.TENSOR_GROUP | QuantizationStrategy.GROUP:
            groups = weight.reshape(n, -1, args.group_size)
        case QuantizationStrategy.CHANNEL:
            groups = weight.reshape(n, 1, k)
        case QuantizationStrategy.TENSOR:
            groups = weight.reshape(1, -1)
        case _:
            height, width = args.block_structure
            padded = torch.nn.functional.pad(weight, (0, -k % width, 0, -n % height))
            blocks = padded.reshape(-(-n // height), height, -(-k // width), width)
            groups = blocks.transpose(1, 2).flatten(2)
    if args.strategy == QuantizationStrategy.TENSOR_GROUP:
        found["weight_global_scale"] = generate_gparam(weight.amin(), weight.amax())
    scale, _ = calculate_qparams(groups.amin(-1), groups.amax(-1), args, global_scale=found.get("weight_global_scale"))
    return {**found, "weight_scale": scale}


def mxfp4(source: Path, folder: Path, *, spread: int = 3) -> dict[str, torch.Tensor]:
    """A gpt-oss checkpoint whose experts are random MXFP4, as the published ones are; returns what transformers makes
    of them, by the names of unquantised experts. Exponents of a matrix are up to `spread` apart."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    generator = torch.Generator().manual_seed(0)
    state = families.checkpoint_tensors(source)
    values = {}
    for name in [n for n in state if n.endswith("experts.gate_up_proj") or n.endswith("experts.down_proj")]:
        experts, cols, rows = state.pop(name).shape
        blocks = torch.randint(0, 256, (experts, rows, cols // 32, 16), generator=generator).to(torch.uint8)
        scales = torch.randint(123 - spread, 124, blocks.shape[:-1], generator=generator).to(torch.uint8)
        state |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        values[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    section = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    write(source, folder, state, quantization_config=section)
    return values


def write(source: Path, folder: Path, state: dict[str, torch.Tensor], **config: Any) -> Path:
    """A checkpoint of other tensors, and with other keys in its config.json (None takes one away)."""
    folder.mkdir(exist_ok=True)
    save_file({k: v.contiguous().clone() for k, v in state.items()}, folder / "model.safetensors", {"format": "pt"})
    old = json.loads((source / "config.json").read_text())
    new = {k: v for k, v in {**old, **config}.items() if v is not None}
    (folder / "config.json").write_text(json.dumps(new))
    return _text_files(source, folder)


def change(folder: Path, **tensors: torch.Tensor | None) -> Path:
    """Replaces or adds tensors of model.safetensors ("__" stands for "."); None takes one away."""
    state = {**load_file(folder / "model.safetensors"), **{k.replace("__", "."): v for k, v in tensors.items()}}
    kept = {k: v.contiguous() for k, v in state.items() if v is not None}
    save_file(kept, folder / "model.safetensors", {"format": "pt"})
    return folder


def _text_files(source: Path, folder: Path) -> Path:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / name, folder)
    return folder


def roles_of(folder: Path) -> list[TensorRole]:
    return list(tensors(*model_spec(Checkpoint.open(folder).config)))


def checked(folder: Path) -> Checkpoint:
    checkpoint = Checkpoint.open(folder)
    checkpoint.check(roles_of(folder))
    return checkpoint


def values(found: Prequantised | torch.Tensor) -> torch.Tensor:
    """What a build quantises when it wants another format."""
    return torch.from_numpy(dequantise(quantise(found, "f32")).copy())


def notes(folder: Path) -> str:
    """Where metadata and tensors disagree."""
    return "\n".join(n for n in checked(folder).notes(roles_of(folder)) if "scales of activations" not in n)


def refusal(folder: Path) -> str:
    """The one line with which a checkpoint is refused, at its check or when it is read."""
    with pytest.raises(UserError) as caught:
        checkpoint = checked(folder)
        for role in roles_of(folder):
            quantise(checkpoint.read(role.source, role.part), "nvfp4" if role.precision == "experts" else "f32")
    assert "\n" not in str(caught.value)
    return str(caught.value)
