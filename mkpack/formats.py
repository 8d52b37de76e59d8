"""Storage formats: what the bytes of a tensor mean, decoded slowly and obviously.

These numpy decoders are the twins that the kernels, the packer and the quantiser are compared with. The table of
formats is in docs/DESIGN.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import get_args

import numpy as np

from .spec import Format

BLOCK = 16  # columns that share one NVFP4 scale
E2M1_MAX = 6.0
E4M3_MAX = 448.0


@dataclass(frozen=True)
class QTensor:
    """One tensor as the artifact stores it.

    shape: the true shape, [N, K] or [n] (f32 only). data, scale and scale2 are numpy arrays:

    | format | data                                       | scale                       | scale2      |
    |--------|--------------------------------------------|-----------------------------|-------------|
    | f32    | float32, `shape`                           | None                        | None        |
    | bf16   | uint16 [N, K], the upper half of a float32 | None                        | None        |
    | fp8    | uint8 [N, K], e4m3                         | None                        | float32 [N] |
    | nvfp4  | uint8 [N, ceil(K/16)*8], two e2m1 a byte   | uint8 [N, ceil(K/16)], e4m3 | float32 [1] |

    An NVFP4 byte holds the even column in its low nibble. When K is no multiple of 16, the missing columns of the
    last block are there as zeros and `shape` keeps the true K. Raises ValueError when an array does not fit.
    """

    format: Format
    shape: tuple[int, ...]
    data: np.ndarray
    scale: np.ndarray | None = None
    scale2: np.ndarray | None = None

    def __post_init__(self) -> None:
        if self.format not in get_args(Format):
            raise ValueError(f"unknown format {self.format!r}, expected one of {', '.join(get_args(Format))}")
        dims = (1, 2) if self.format == "f32" else (2,)
        if len(self.shape) not in dims:
            allowed = "[n] or [N, K]" if self.format == "f32" else "[N, K]"
            raise ValueError(f"{self.format} tensor: shape {list(self.shape)}, expected {allowed}")
        for field, expected in expected_arrays(self.format, self.shape).items():
            _check(f"{self.format} tensor {list(self.shape)}: {field}", getattr(self, field), expected)


@dataclass(frozen=True)
class Prequantised:
    """A matrix that its checkpoint stores quantised, with the arithmetic that the checkpoint means.

    q: what an artifact takes over, the source's own bytes. Its source value is value(code) * factor, rounded once:
    codes is the source's payload, uint8 [N, K/2] of e2m1 when q is nvfp4 and [N, K] of e4m3 when q is fp8; factors is
    float32, one for 16 columns [N, K/16] or one a row [N, 1]. `codes` is q.data itself wherever nothing was lost.
    """

    q: QTensor
    codes: np.ndarray
    factors: np.ndarray

    @property
    def shape(self) -> tuple[int, ...]:
        return self.q.shape


def expected_arrays(format: Format, shape: tuple[int, ...]) -> dict[str, tuple[str, tuple[int, ...]] | None]:
    """dtype name and shape of data, scale and scale2 of a tensor, None for an absent array."""
    match format:
        case "f32":
            return {"data": ("float32", shape), "scale": None, "scale2": None}
        case "bf16":
            return {"data": ("uint16", shape), "scale": None, "scale2": None}
        case "fp8":
            return {"data": ("uint8", shape), "scale": None, "scale2": ("float32", shape[:1])}
        case "nvfp4":
            n, blocks = shape[0], -(-shape[1] // BLOCK)
            return {
                "data": ("uint8", (n, blocks * BLOCK // 2)),
                "scale": ("uint8", (n, blocks)),
                "scale2": ("float32", (1,)),
            }


def _check(what: str, array: np.ndarray | None, expected: tuple[str, tuple[int, ...]] | None) -> None:
    if expected is None:
        if array is not None:
            raise ValueError(f"{what} must be None, found {array.dtype.name} {list(array.shape)}")
        return
    dtype, shape = expected
    if array is None:
        raise ValueError(f"{what} must be {dtype} {list(shape)}, found None")
    if array.dtype != np.dtype(dtype) or array.shape != shape:
        raise ValueError(f"{what} must be {dtype} {list(shape)}, found {array.dtype.name} {list(array.shape)}")


def e2m1_values() -> np.ndarray:
    """float32 [16]: the value of every e2m1 code; bit 3 is the sign, so code 8 is -0.0."""
    magnitudes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    return np.concatenate([magnitudes, -magnitudes])


def e4m3_to_f32(codes: np.ndarray) -> np.ndarray:
    """uint8 e4m3 codes -> float32 of the same shape. e4m3 has no infinity; 0x7f and 0xff are NaN."""
    return _e4m3_values()[codes]


@cache
def _e4m3_values() -> np.ndarray:
    codes = np.arange(256)
    exponent, mantissa = (codes >> 3) & 15, (codes & 7).astype(np.float32)
    # Exponent 0 holds the subnormals: mantissa/8 * 2^-6, without the implicit one.
    magnitude = np.where(exponent == 0, np.ldexp(mantissa, -9), np.ldexp(mantissa + 8, exponent - 10))
    magnitude[[0x7F, 0xFF]] = np.nan
    values = np.where(codes & 0x80, -magnitude, magnitude).astype(np.float32)
    values.flags.writeable = False
    return values


def bf16_to_f32(bits: np.ndarray) -> np.ndarray:
    """uint16 bfloat16 bits -> float32 of the same shape, exactly."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def f32_to_bf16(values: np.ndarray) -> np.ndarray:
    """float32 -> uint16 bfloat16 bits of the same shape, round to nearest even.

    Values beyond the largest bfloat16 become infinity; a NaN keeps its sign and upper payload and is made quiet.
    """
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32).reshape(np.shape(values))
    # uint32 wraps only for NaN patterns, which are replaced below.
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1)).astype(np.uint32)) >> 16
    quiet_nan = (bits >> 16) | 0x40
    return np.where((bits & 0x7FFFFFFF) > 0x7F800000, quiet_nan, rounded).astype(np.uint16)


def dequantise(q: QTensor) -> np.ndarray:
    """float32 array of q.shape: the values the kernels compute with (read-only use: f32 data is not copied)."""
    match q.format:
        case "f32":
            return q.data
        case "bf16":
            return bf16_to_f32(q.data)
        case "fp8":
            assert q.scale2 is not None
            return e4m3_to_f32(q.data) * q.scale2[:, None]
        case "nvfp4":
            assert q.scale is not None and q.scale2 is not None
            n, blocks = q.scale.shape
            codes = np.stack([q.data & 15, q.data >> 4], axis=-1).reshape(n, blocks, BLOCK)
            # e2m1 * e4m3 has 6 significant bits at most, so only the product with scale2 rounds.
            values = e2m1_values()[codes] * e4m3_to_f32(q.scale)[..., None] * q.scale2[0]
            return np.ascontiguousarray(values.reshape(n, blocks * BLOCK)[:, : q.shape[1]])


def source_values(p: Prequantised) -> np.ndarray:
    """float32 [N, K]: the values of the checkpoint a matrix comes from, rounded as its own library rounds them."""
    n, k = p.shape
    if p.q.format == "fp8":
        return e4m3_to_f32(p.codes) * p.factors
    codes = np.stack([p.codes & 15, p.codes >> 4], axis=-1).reshape(n, -1, BLOCK)
    return (e2m1_values()[codes] * p.factors[..., None]).reshape(n, k)


def nbytes(q: QTensor) -> int:
    """Bytes of the tensor's arrays, without the padding that tiles add."""
    return sum(a.nbytes for a in (q.data, q.scale, q.scale2) if a is not None)
