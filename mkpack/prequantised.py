"""Matrices that a checkpoint stores quantised: which format its tensors have, and their payload, bit for bit.

The format follows from dtypes, shapes and the presence of scales alone; what config.json says about it is compared in
`quant_config.py` and never believed. Spellings that are read, for a matrix "x.weight" [N, K]; fused experts are "x":

- NVFP4 of modelopt: x.weight U8 [N, K/2], x.weight_scale F8_E4M3 [N, K/16], and for the whole x.weight_scale_2
- its fused experts (gpt-oss): x U8 [experts, K/2, N], x_weight_scale [experts, K/16, N], x_weight_scale_2 for all
  experts or for each
- NVFP4 of compressed-tensors: x.weight_packed and x.weight_scale alike, but x.weight_global_scale is a divisor
- MXFP4 of both: the same values with x.weight_scale U8 or F8_E8M0 [N, K/32], powers of two
- MXFP4 of gpt-oss: x_blocks U8 [experts, N, K/32, 16], x_scales U8 [experts, N, K/32]
- fp8: x.weight F8_E4M3 [N, K], x.weight_scale or x.weight_scale_inv of the matrix, of its rows, or of blocks
  [N/128, K/128]
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from mkpack.errors import some
from mkpack.shard import TensorInfo
from mkpack.spec import Format, SourcePart, TensorRole

if TYPE_CHECKING:
    import numpy as np
    import torch

    from mkpack.formats import Prequantised

Scheme = Literal["plain", "nvfp4", "mxfp4", "fp8"]

PLAIN = ("F32", "F16", "BF16")
NV_BLOCK, MX_BLOCK = 16, 32
FP8_BLOCK = (128, 128)
# Scales of activations and of the KV cache: mkpack quantises neither, so they have no part in a build.
INPUT_SCALES = (".input_scale", ".input_global_scale", "_input_scale")
ACTIVATION_SCALES = (*INPUT_SCALES, ".output_scale", ".k_scale", ".v_scale")
# Tensors beside a weight that change what it computes, with what they are.
_REFUSED = {
    ".pre_quant_scale": "activations are scaled before this matrix (AWQ)",
    ".svdquant_lora_a": "a low-rank part is added to this matrix (SVDQuant)",
    ".svdquant_lora_b": "a low-rank part is added to this matrix (SVDQuant)",
    ".weight_zero_point": "its codes are asymmetric",
    ".weight_g_idx": "its columns are reordered (GPTQ)",
}
# Every suffix of the spellings above: what of them is there and has no part in a matrix is of a second one.
_DOTTED = (
    *(".weight", ".weight_packed"),
    *(".weight_scale", ".weight_scale_inv", ".weight_scale_2", ".weight_global_scale"),
)
_UNDERSCORED = ("_blocks", "_scales", "_weight_scale", "_weight_scale_2")
_NEVER = ("weight_packed", "qweight")  # names that integer formats give their values


@dataclass(frozen=True)
class Stored:
    """Where a checkpoint keeps one matrix (or vector), and how. divides: scale2 is a divisor. turned: values and scales
    of fused experts are [in, out]."""

    scheme: Scheme
    weight: TensorInfo
    scale: TensorInfo | None = None
    scale2: TensorInfo | None = None
    divides: bool = False
    turned: bool = False

    def label(self, part: SourcePart | None) -> str:
        """Name of the values for messages, with the expert where the tensor holds several."""
        return f"{self.weight.name}[{part.index}]" if part else self.weight.name

    def rows(self, info: TensorInfo, read: Callable[[TensorInfo], np.ndarray], part: SourcePart | None) -> np.ndarray:
        """uint8 [N, bytes a row] of the values or the scales of a matrix, or of a part of fused experts."""
        import numpy as np

        if part is None:
            return read(info).reshape(info.shape[0], -1)
        # Quantised experts may be [out, in] where unquantised ones are [in, out]; MXFP4's have a dimension of blocks.
        one = info.entry(part.index)
        whole = read(one).reshape(one.shape[0], -1)
        whole = whole.T if self.turned else whole
        return np.ascontiguousarray(whole[part.rows.start : part.rows.stop : part.rows.step])

    def factor(self, read: Callable[[TensorInfo], np.ndarray], part: SourcePart | None) -> np.float32:
        """scale2 of a matrix, or of an expert."""
        assert self.scale2 is not None
        found = read(self.scale2).view("<f4").reshape(-1)
        return found[part.index if part and len(found) > 1 else 0]

    @property
    def takes(self) -> Format | None:
        """The format that takes its payload over, if any does: fp8 with scales of blocks has none."""
        if self.scheme == "plain":
            return None
        if self.scheme != "fp8":
            return "nvfp4"
        assert self.scale is not None
        return "fp8" if math.prod(self.scale.shape) in (1, self.weight.shape[0]) else None

    def parts(self) -> Iterator[TensorInfo]:
        yield from (part for part in (self.weight, self.scale, self.scale2) if part is not None)


def find(name: str, tensors: Mapping[str, TensorInfo]) -> Stored | None:
    """How `tensors` store what a model calls `name` ("x.weight", or "x" of fused experts); None when they do not."""
    base = name.removesuffix(".weight")
    scale = tensors.get(f"{base}.weight_scale") or tensors.get(f"{base}.weight_scale_inv")
    mx: Scheme = "mxfp4" if scale and scale.dtype in ("U8", "F8_E8M0") else "nvfp4"
    if (packed := tensors.get(f"{base}.weight_packed")) and packed.dtype == "U8":
        return Stored(mx, packed, scale, tensors.get(f"{base}.weight_global_scale"), divides=True)
    if blocks := tensors.get(f"{name}_blocks"):
        return Stored("mxfp4", blocks, tensors.get(f"{name}_scales"))
    weight = tensors.get(name)
    if weight is None:
        return None
    if weight.dtype == "U8" and base == name:
        scales, factors = tensors.get(f"{name}_weight_scale"), tensors.get(f"{name}_weight_scale_2")
        return Stored("nvfp4", weight, scales, factors, turned=True)
    if weight.dtype == "U8":
        return Stored(mx, weight, scale, tensors.get(f"{base}.weight_scale_2"))
    return Stored("fp8" if weight.dtype == "F8_E4M3" else "plain", weight, scale)


def found_instead(name: str, tensors: Mapping[str, TensorInfo]) -> str:
    """What to add to "is missing": the spelling of a format that mkpack does not read, or nothing."""
    base = name.removesuffix(".weight")
    for suffix in _NEVER:
        if other := tensors.get(f"{base}.{suffix}"):
            return f', found "{other.name}" of {other.dtype} {list(other.shape)}: integer formats are not read'
    return ""


def faults(
    name: str, stored: Stored, shape: tuple[int, ...], tensors: Mapping[str, TensorInfo], block: tuple[int, int]
) -> Iterator[str]:
    """What of a matrix is missing, has another shape or cannot be built. shape: [N, K], or [experts, N, K] of a fused
    tensor. For a matrix that is not quantised, only what contradicts that."""
    base = name.removesuffix(".weight")
    for suffix, why in _REFUSED.items():
        if other := tensors.get(base + suffix):
            yield f'"{other.name}" in {other.file}: {why}, which this version does not build; take another export'
    weight, scale = stored.weight, stored.scale
    where = f'"{weight.name}" in {weight.file}'
    spelled = {name, *(base + suffix for suffix in _DOTTED), *(name + suffix for suffix in _UNDERSCORED)}
    if more := sorted(spelled & tensors.keys() - {part.name for part in stored.parts()}):
        yield f"{where} is {weight.dtype}, but another format's {some(more)} lies beside it; take another export"
    if stored.scheme == "plain":
        if scale is not None:
            yield (
                f'{where} is {weight.dtype}, but a scale "{scale.name}" lies beside it: whether it is to be multiplied '
                "cannot be told; take another export"
            )
        return
    *lead, n, k = shape
    if lead and not (stored.scheme == "mxfp4" or stored.turned):
        yield f"{where}: fused experts are read unquantised, in MXFP4 or in NVFP4, found {weight.dtype}"
    elif scale is None:
        yield f'{where} is {weight.dtype} without a scale: expected "{base}{"_" if lead else "."}weight_scale"'
    elif stored.turned:
        yield from _columns(where, "NVFP4", k, NV_BLOCK)
        yield from _is(weight, ("U8",), (*lead, k // 2, n))
        yield from _is(scale, ("F8_E4M3",), (*lead, k // NV_BLOCK, n))
        if stored.scale2 is None:
            yield f'"{name}_weight_scale_2" is missing beside {where}'
        else:
            yield from _is(stored.scale2, ("F32",), (), (1,), tuple(lead))
    elif stored.scheme == "nvfp4":
        yield from _columns(where, "NVFP4", k, NV_BLOCK)
        yield from _is(weight, ("U8",), (n, k // 2))
        yield from _is(scale, ("F8_E4M3",), (n, k // NV_BLOCK))
        if stored.scale2 is not None:
            yield from _is(stored.scale2, ("F32",), (), (1,))
        else:
            yield f'"{base}.{"weight_global_scale" if stored.divides else "weight_scale_2"}" is missing beside {where}'
    elif stored.scheme == "mxfp4":
        yield from _columns(where, "MXFP4", k, MX_BLOCK)
        if stored.scale2 is not None:
            yield f'"{stored.scale2.name}" in {stored.scale2.file}: MXFP4 has no scale of the whole tensor'
        yield from _is(weight, ("U8",), (*lead, n, k // 2), (*lead, n, k // MX_BLOCK, MX_BLOCK // 2))
        yield from _is(scale, ("U8", "F8_E8M0"), (*lead, n, k // MX_BLOCK))
    else:
        yield from _is(weight, ("F8_E4M3",), (n, k))
        yield from _is(scale, PLAIN, (), (1,), (n,), (n, 1), _grid(shape, block), _grid(shape, FP8_BLOCK))


def _columns(where: str, format: str, columns: int, block: int) -> Iterator[str]:
    if columns % block:
        yield f"{where}: {format} has a scale for {block} columns, which {columns} is no multiple of"


def _is(info: TensorInfo, dtypes: tuple[str, ...], *shapes: tuple[int, ...]) -> Iterator[str]:
    where = f'"{info.name}" in {info.file}'
    if info.dtype not in dtypes:
        yield f"{where}: expected dtype {' or '.join(dtypes)}, found {info.dtype}"
    if info.shape not in shapes:
        expected = " or ".join(dict.fromkeys(str(list(s)) for s in shapes))
        yield f"{where}: expected shape {expected} by config.json, found {list(info.shape)}"


def _grid(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, ...]:
    """Shape of the scales when blocks of this size share one."""
    return tuple(-(-size // of) for size, of in zip(shape, block, strict=True))


def conversions(wanted: Iterable[tuple[TensorRole, Format]], tensors: Mapping[str, TensorInfo]) -> list[str]:
    """What becomes of quantised matrices in the formats that are wanted of them: a line for every way."""
    counts: Counter[tuple[str, str, str]] = Counter()
    total: Counter[str] = Counter()
    for role, fmt in wanted:
        if role.precision is None:
            continue
        total[role.precision] += 1
        stored = find(role.source, tensors)
        if stored is not None and stored.scheme != "plain":
            what = stored.scheme if stored.takes else f"{stored.scheme} in blocks"
            counts[role.precision, what, _becomes(stored, fmt)] += 1
    lines = []
    for (precision, what, becomes), n in counts.items():
        some_of = "" if n == total[precision] else f"{n} of {total[precision]} matrices are "
        lines.append(f"{precision}: {some_of}{what} in the source, {becomes}")
    return lines


def _becomes(stored: Stored, fmt: Format) -> str:
    if stored.takes == fmt == stored.scheme:
        return "and taken over bit for bit"
    if stored.takes == fmt:
        return f"and written as {fmt}, without loss where exponents allow it"
    if stored.takes == "nvfp4":
        return f"but the recipe says {fmt}: larger, and no better than {stored.scheme}"
    return f"and quantised again, to {fmt}"


def read_bytes(role: TensorRole, formats: Iterable[Format], tensors: Mapping[str, TensorInfo]) -> float:
    """Memory that a matrix takes as it is read, with the float32 values where it has to be quantised again."""
    elements = math.prod(role.shape)
    stored = find(role.source, tensors)
    if stored is None:
        return elements * 4
    if stored.scheme == "plain":
        return elements * stored.weight.nbytes / max(math.prod(stored.weight.shape), 1)
    width = 1.0 if stored.scheme == "fp8" else 0.5 + 1 / 16 + 4 / 16
    return elements * (width + (0 if all(fmt == stored.takes for fmt in formats) else 4))


def load(
    stored: Stored,
    read: Callable[[TensorInfo], np.ndarray],
    block: tuple[int, int],
    part: SourcePart | None = None,
) -> Prequantised | torch.Tensor:
    """A quantised matrix [N, K], or a part of fused experts; fp8 with scales of blocks as its float32 values, since no
    format here has those.

    read: the bytes (uint8 [nbytes]) of a tensor. block: rows and columns of fp8 that share a scale. Raises UserError,
    naming the tensor, for values that are no weights: scales that are NaN, Inf or negative, codes that are NaN, and
    scales of zero whose codes are not.
    """
    from mkpack import payload

    weight, scale = stored.weight, stored.scale
    name = stored.label(part)
    assert scale is not None
    if stored.scheme == "fp8":
        floats = payload.to_floats(read(scale), scale.dtype).reshape(scale.shape)
        size = block if scale.shape == _grid(weight.shape, block) else FP8_BLOCK
        return payload.fp8(read(weight).reshape(weight.shape), floats, size, name)
    codes, scales = (stored.rows(t, read, part) for t in (weight, scale))
    if stored.scheme == "mxfp4":
        return payload.mxfp4(codes, scales, name=name)
    return payload.nvfp4(codes, scales, stored.factor(read, part), divides=stored.divides, name=name)
