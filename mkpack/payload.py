"""The payload of quantised matrices: bytes as checkpoints hold them in, `Prequantised` out.

Scales and codes that mean no weights are a UserError that names the matrix.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from mkpack.errors import UserError
from mkpack.formats import BLOCK, Prequantised, QTensor, e4m3_to_f32

if TYPE_CHECKING:
    import torch

_MX_BLOCK = 32  # columns that share a power of two

# No factor of a whole tensor is smaller, so that products of small codes are no subnormal float32 (see quantize.py).
_MIN_EXPONENT = -116
# 6 * 2^125 is the largest value that a float32 holds.
_MAX_EXPONENT = 125

_AGAIN = "these are no weights: check the file against its source, or export it again"


def nvfp4(
    codes: np.ndarray, scale: np.ndarray, factor: np.floating, *, divides: bool = False, name: str = "tensor"
) -> Prequantised:
    """codes uint8 [N, K/2], scale uint8 e4m3 [N, K/16]; factor: of the whole matrix, or its divisor."""
    factor = np.float32(factor)
    check_factor(factor, name)
    check_scales(codes, scale, name)
    values = e4m3_to_f32(scale)
    # compressed-tensors divides. The artifact multiplies, by a reciprocal that float32 may have to round.
    factors, scale2 = (values / factor, np.float32(1) / factor) if divides else (values * factor, factor)
    shape = (len(codes), 2 * codes.shape[1])
    return Prequantised(QTensor("nvfp4", shape, codes, scale, scale2.reshape(1)), codes, factors)


def check_factor(factor: np.float32, name: str) -> None:
    """UserError for a scale of a whole NVFP4 matrix (or its divisor) that is NaN, Inf, negative or absurd."""
    # Neither the factor nor a divisor's reciprocal may leave float32, nor may the largest product, 2688 times it.
    if not 2.0**-116 <= factor <= 2.0**116:
        raise UserError(f"{name}: its scale for the whole matrix is {factor:g}, expected a number above 0; {_AGAIN}")


def check_factors(factors: np.ndarray, name: str) -> None:
    """UserError for fp8 scales (float32) that are NaN, Inf or negative."""
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
    k = exponents.astype(np.int32) - 127
    used = (codes.reshape(*exponents.shape, _MX_BLOCK // 2) & 0x77).any(axis=-1)
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
        blocks = data.reshape(*exponents.shape, _MX_BLOCK // 2)
        shift = np.minimum(-9 - above[low], len(_shifted()) - 1)
        blocks[low] = _shifted()[shift[:, None], blocks[low]]
    above = np.clip(above, -9, 8)
    scale = np.where(above >= -6, (above + 7) << 3, 1 << np.clip(above + 9, 0, 3)).astype(np.uint8)
    factors = np.ldexp(np.float32(1), k)
    repeat = _MX_BLOCK // BLOCK
    shape = (len(codes), 2 * codes.shape[1])
    scale2 = np.ldexp(np.float32(1), [whole]).astype(np.float32)
    q = QTensor("nvfp4", shape, data, np.repeat(scale, repeat, axis=1), scale2)
    return Prequantised(q, codes, np.repeat(factors, repeat, axis=1))


def _shifted() -> np.ndarray:
    """uint8 [7, 256]: for a byte of two e2m1 codes, the codes nearest to their values divided by 2^shift (ties to
    even); from the last on everything is zero."""
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


def fp8(codes: np.ndarray, scale: np.ndarray, block: tuple[int, int], name: str) -> Prequantised | torch.Tensor:
    """codes: uint8 e4m3 [N, K]. scale: float32, one for the matrix ([] or [1]), for each row ([N] or [N, 1]), or for
    blocks of `block` rows and columns; the last gives the values themselves, a float32 tensor."""
    check_factors(scale, name)
    nan = (codes & 0x7F) == 0x7F
    if nan.any():
        raise UserError(f"{name}: {int(nan.sum())} of {codes.size} codes are NaN; {_AGAIN}")
    n, k = codes.shape
    if scale.size == 1 or scale.shape in ((n,), (n, 1)):
        rows = np.empty(n, np.float32)
        rows[:] = scale.reshape(-1)
        _check_lost(codes, rows[:, None], name)
        return Prequantised(QTensor("fp8", (n, k), codes, None, rows), codes, rows[:, None])

    import torch

    height, width = block
    values = torch.from_numpy(codes).view(torch.float8_e4m3fn).float()
    columns = torch.from_numpy(scale).repeat_interleave(width, dim=1)[:, :k]
    for i, factors in enumerate(columns):
        rows_of = slice(i * height, (i + 1) * height)
        _check_lost(codes[rows_of], factors.numpy(), name)
        values[rows_of] *= factors
    return values


def _check_lost(codes: np.ndarray, factors: np.ndarray, name: str) -> None:
    """UserError for fp8 codes that are not zero, with a factor that is."""
    if (factors == 0).any() and ((factors == 0) & ((codes & 0x7F) != 0)).any():
        raise UserError(f"{name}: a scale is zero although codes are not, so that weights are lost; {_AGAIN}")


def to_floats(raw: np.ndarray, dtype: str) -> np.ndarray:
    """The bytes of an F32, F16 or BF16 tensor as float32 [n]."""
    if dtype == "BF16":
        return (raw.view("<u2").astype(np.uint32) << 16).view(np.float32)
    return raw.view({"F32": "<f4", "F16": "<f2"}[dtype]).astype(np.float32)
