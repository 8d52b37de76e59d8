"""Matrices that a checkpoint stores quantised: which format its tensors have, and their payload, bit for bit.

The format follows from dtypes, shapes and the presence of scales alone; what config.json says about it is compared in
`quant_config.py` and never believed. Spellings that are read, for a matrix "x.weight" [N, K]:

| from                           | values                       | scales                                     | one for all                     |
|--------------------------------|------------------------------|--------------------------------------------|---------------------------------|
| modelopt NVFP4                 | x.weight U8 [N, K/2]         | x.weight_scale F8_E4M3 [N, K/16]           | x.weight_scale_2, a factor      |
| compressed-tensors NVFP4       | x.weight_packed U8 [N, K/2]  | x.weight_scale F8_E4M3 [N, K/16]           | x.weight_global_scale, a divisor |
| gpt-oss MXFP4 "x"              | x_blocks U8 [.., N, K/32, 16]| x_scales U8 [.., N, K/32], powers of two   |                                 |
| modelopt, compressed-tensors MXFP4 | as their NVFP4           | x.weight_scale U8 or F8_E8M0 [N, K/32]     |                                 |
| fp8                            | x.weight F8_E4M3 [N, K]      | x.weight_scale or x.weight_scale_inv, of the tensor, its rows, or blocks [N/128, K/128] | |
"""  # noqa: E501

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from mkpack.errors import UserError
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
ACTIVATION_SCALES = (".input_scale", ".input_global_scale", ".output_scale", ".k_scale", ".v_scale")
# Tensors beside a weight that change what it computes, with what they are.
_REFUSED = {
    ".pre_quant_scale": "activations are scaled before this matrix (AWQ)",
    ".svdquant_lora_a": "a low-rank part is added to this matrix (SVDQuant)",
    ".svdquant_lora_b": "a low-rank part is added to this matrix (SVDQuant)",
    ".weight_zero_point": "its codes are asymmetric",
    ".weight_g_idx": "its columns are reordered (GPTQ)",
}
_NEVER = ("weight_packed", "qweight")  # names that integer formats give their values

# No factor of a whole tensor is smaller, so that products of small codes are no subnormal float32 (see quantize.py).
_MIN_EXPONENT = -116
# 6 * 2^125 is the largest value that a float32 holds.
_MAX_EXPONENT = 125


@dataclass(frozen=True)
class Stored:
    """Where a checkpoint keeps one matrix (or vector), and how. `divides`: scale2 is a divisor."""

    scheme: Scheme
    weight: TensorInfo
    scale: TensorInfo | None = None
    scale2: TensorInfo | None = None
    divides: bool = False

    def label(self, part: SourcePart | None) -> str:
        """Name of the values for messages, with the expert where the tensor holds several."""
        return f"{self.weight.name}[{part.index}]" if part else self.weight.name

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
    if stored.scheme == "plain":
        if scale is not None:
            yield (
                f'{where} is {weight.dtype}, but a scale "{scale.name}" lies beside it: whether it is to be multiplied '
                "cannot be told; take another export"
            )
        return
    *lead, n, k = shape
    if lead and stored.scheme != "mxfp4":
        yield f"{where}: fused experts are read unquantised or in MXFP4 (x_blocks, x_scales), found {weight.dtype}"
    elif scale is None:
        yield f'{where} is {weight.dtype} without a scale: expected "{base}.weight_scale"'
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
    counts: Counter[tuple[str, Scheme, Format]] = Counter()
    total: Counter[str] = Counter()
    for role, fmt in wanted:
        if role.precision is None:
            continue
        total[role.precision] += 1
        stored = find(role.source, tensors)
        if stored is not None and stored.scheme != "plain":
            counts[role.precision, stored.scheme, fmt] += 1
    lines = []
    for (precision, scheme, fmt), n in counts.items():
        some_of = "" if n == total[precision] else f"{n} of {total[precision]} matrices are "
        if scheme == fmt:
            done = "and stay so, but for fp8 with scales of blocks" if fmt == "fp8" else "and taken over bit for bit"
        elif scheme == "mxfp4" and fmt == "nvfp4":
            done = "and written as nvfp4, without loss where exponents allow it"
        elif scheme != "fp8" and fmt in ("bf16", "fp8"):
            done = f"but the recipe says {fmt}: larger, and no better than {scheme}"
        else:
            done = f"and quantised again, to {fmt}"
        lines.append(f"{precision}: {some_of}{scheme} in the source, {done}")
    return lines


def read_bytes(role: TensorRole, formats: Iterable[Format], tensors: Mapping[str, TensorInfo]) -> float:
    """Memory that a matrix takes as it is read, with the float32 values where it has to be quantised again."""
    elements = math.prod(role.shape)
    stored = find(role.source, tensors)
    if stored is None:
        return elements * 4
    if stored.scheme == "plain":
        return elements * stored.weight.nbytes / max(math.prod(stored.weight.shape), 1)
    target, width = ("fp8", 1.0) if stored.scheme == "fp8" else ("nvfp4", 0.5 + 1 / 16 + 4 / 16)
    return elements * (width + (0 if all(fmt == target for fmt in formats) else 4))


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
    import numpy as np

    weight, scale = stored.weight, stored.scale
    name = stored.label(part)
    assert scale is not None
    if part is not None:
        weight, scale = weight.entry(part.index), scale.entry(part.index)
    if stored.scheme == "fp8":
        floats = to_floats(read(scale), scale.dtype).reshape(scale.shape)
        check_factors(floats, name)
        return _fp8(read(weight).reshape(weight.shape), floats, block, name)
    # The blocks of MXFP4 may have a dimension of their own.
    codes, scales = (read(t).reshape(t.shape[0], -1) for t in (weight, scale))
    if part is not None:
        # Quantised experts are [out, in] even where unquantised ones are [in, out].
        rows = slice(part.rows.start, part.rows.stop, part.rows.step)
        codes, scales = np.ascontiguousarray(codes[rows]), np.ascontiguousarray(scales[rows])
    if stored.scheme == "mxfp4":
        return mxfp4(codes, scales, name=name)
    assert stored.scale2 is not None
    factor = read(stored.scale2).view("<f4").reshape(-1)[0]
    return nvfp4(codes, scales, factor, divides=stored.divides, name=name)


_AGAIN = "these are no weights: check the file against its source, or export it again"


def nvfp4(
    codes: np.ndarray, scale: np.ndarray, factor: np.floating, *, divides: bool = False, name: str = "tensor"
) -> Prequantised:
    """codes uint8 [N, K/2], scale uint8 e4m3 [N, K/16]; factor: of the whole matrix, or its divisor."""
    import numpy as np

    from mkpack.formats import Prequantised, QTensor, e4m3_to_f32

    factor = np.float32(factor)
    check_factor(factor, name)
    check_scales(codes, scale, name)
    values = e4m3_to_f32(scale)
    # compressed-tensors divides. The artifact multiplies, by a reciprocal that float32 may have to round.
    factors, scale2 = (values / factor, np.float32(1) / factor) if divides else (values * factor, factor)
    shape = (len(codes), 2 * codes.shape[1])
    return Prequantised(QTensor("nvfp4", shape, codes, scale, scale2.reshape(1)), codes, factors)


def check_factor(factor: np.float32, name: str) -> None:
    """UserError for a scale of a whole NVFP4 matrix (or its divisor) that is NaN, Inf, negative or as good as zero."""
    if not (0 < factor < math.inf and float(factor) >= 2.0**-126):
        raise UserError(f"{name}: its scale for the whole matrix is {factor:g}, expected a number above 0; {_AGAIN}")


def check_factors(factors: np.ndarray, name: str) -> None:
    """UserError for fp8 scales (float32) that are NaN, Inf or negative."""
    import numpy as np

    bad = ~np.isfinite(factors) | (factors < 0)
    if bad.any():
        raise UserError(f"{name}: {int(bad.sum())} of {bad.size} scales are NaN, Inf or negative; {_AGAIN}")


def check_scales(codes: np.ndarray | None, scale: np.ndarray, name: str) -> None:
    """UserError for NVFP4 block scales that are NaN or negative, and for those that lost their block's weights (which
    only matters where a scale is zero; codes may be None elsewhere)."""
    bad = {"NaN": (scale & 0x7F) == 0x7F, "negative": (scale >= 0x80) & (scale != 0xFF)}
    if codes is not None:
        bad["zero although the codes of the block are not, so that its weights are lost"] = lost_blocks(codes, scale)
    found = [
        f"{int(where.sum())} of {scale.size} block scales are {what}" for what, where in bad.items() if where.any()
    ]
    if found:
        raise UserError(f"{name}: {' and '.join(found)}; {_AGAIN}")


def lost_blocks(codes: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """bool [N, K/16]: blocks whose scale is zero while a code (uint8 [N, K/2], signs aside) is not."""
    zero = scale == 0
    if zero.any():
        rows, blocks = zero.nonzero()
        zero[rows, blocks] = (codes.reshape(*scale.shape, 8)[rows, blocks] & 0x77).any(axis=-1)
    return zero


def mxfp4(codes: np.ndarray, exponents: np.ndarray, *, name: str = "tensor") -> Prequantised:
    """MXFP4 as NVFP4: the same codes, each power of two twice as a block scale. codes uint8 [N, K/2], exponents uint8
    [N, K/32], biased by 127.

    Exact while the exponents of blocks that are not all zero are at most 17 apart. Blocks further below the largest
    are rounded to the smallest block scale; `codes` of the result are the source's, so that the loss can be measured.
    """
    import numpy as np

    from mkpack.formats import BLOCK, Prequantised, QTensor

    k = exponents.astype(np.int32) - 127
    used = (codes.reshape(*exponents.shape, MX_BLOCK // 2) & 0x77).any(axis=-1)
    if (exponents == 255).any():
        raise UserError(f"{name}: {int((exponents == 255).sum())} of {k.size} block scales are NaN; {_AGAIN}")
    top = int(k[used].max()) if used.any() else 0
    if top > _MAX_EXPONENT:
        raise UserError(f"{name}: a block scale is 2^{top}, which float32 cannot hold; {_AGAIN}")
    # The largest power of two in e4m3 is 2^8, the smallest 2^-9.
    whole = max(top - 8, _MIN_EXPONENT)
    above = k - whole
    data = codes
    if (low := used & (above < -9)).any():
        data = codes.copy()
        blocks = data.reshape(*exponents.shape, MX_BLOCK // 2)
        shift = np.minimum(-9 - above[low], len(_shifted()) - 1)
        blocks[low] = _shifted()[shift[:, None], blocks[low]]
    above = np.clip(above, -9, 8)
    scale = np.where(above >= -6, (above + 7) << 3, 1 << np.clip(above + 9, 0, 3)).astype(np.uint8)
    factors = np.ldexp(np.float32(1), k)
    repeat = MX_BLOCK // BLOCK
    shape = (len(codes), 2 * codes.shape[1])
    scale2 = np.ldexp(np.float32(1), [whole]).astype(np.float32)
    q = QTensor("nvfp4", shape, data, np.repeat(scale, repeat, axis=1), scale2)
    return Prequantised(q, codes, np.repeat(factors, repeat, axis=1))


def _shifted() -> np.ndarray:
    """uint8 [7, 256]: for a byte of two e2m1 codes, the codes nearest to their values divided by 2^shift (ties to
    even); from the last on everything is zero."""
    import numpy as np

    magnitude = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    bounds = (magnitude[1:] + magnitude[:-1]) / 2
    table = np.empty((7, 256), np.uint8)
    byte = np.arange(256)
    for shift in range(len(table)):
        value = magnitude / 2**shift
        low = np.searchsorted(bounds, value, side="left")  # a tie goes down,
        code = np.where(low & 1, np.searchsorted(bounds, value, side="right"), low)  # unless that code is odd
        signed = np.concatenate([code, code | 8])
        table[shift] = signed[byte & 15] | signed[byte >> 4] << 4
    return table


def _fp8(codes: np.ndarray, scale: np.ndarray, block: tuple[int, int], name: str) -> Prequantised | torch.Tensor:
    import numpy as np

    from mkpack.formats import Prequantised, QTensor

    nan = (codes & 0x7F) == 0x7F
    if nan.any():
        raise UserError(f"{name}: {int(nan.sum())} of {codes.size} codes are NaN; {_AGAIN}")
    n, k = codes.shape
    rows = (
        np.broadcast_to(scale.reshape(1), (n,)) if scale.size == 1 else scale.reshape(-1) if scale.size == n else None
    )
    if rows is not None and scale.shape in ((), (1,), (1, 1), (n,), (n, 1)):
        _check_lost(codes, np.asarray(rows)[:, None], name)
        rows = np.array(rows, np.float32)  # of its own: a broadcast is read-only
        return Prequantised(QTensor("fp8", (n, k), codes, None, rows), codes, rows[:, None])

    import torch

    height, width = block if scale.shape == _grid(codes.shape, block) else FP8_BLOCK
    values = torch.from_numpy(codes).view(torch.float8_e4m3fn).float()
    columns = torch.from_numpy(scale).repeat_interleave(width, dim=1)[:, :k]
    for i, factors in enumerate(columns):
        _check_lost(codes[i * height : (i + 1) * height], factors.numpy(), name)
        values[i * height : (i + 1) * height] *= factors
    return values


def _check_lost(codes: np.ndarray, factors: np.ndarray, name: str) -> None:
    """UserError for fp8 codes that are not zero, with a factor that is."""
    if (factors == 0).any() and ((factors == 0) & ((codes & 0x7F) != 0)).any():
        raise UserError(f"{name}: a scale is zero although codes are not, so that weights are lost; {_AGAIN}")


def to_floats(raw: np.ndarray, dtype: str) -> np.ndarray:
    """The bytes of an F32, F16 or BF16 tensor as float32 [n]."""
    import numpy as np

    if dtype == "BF16":
        return (raw.view("<u2").astype(np.uint32) << 16).view(np.float32)
    return raw.view({"F32": "<f4", "F16": "<f2"}[dtype]).astype(np.float32)
