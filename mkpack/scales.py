"""Statistics of a checkpoint's scales, read tensor by tensor, and what of them a build would refuse.

Only scales are read; weights are where the answer needs their codes: blocks whose scale is zero, and MXFP4 whose
exponents are so far apart that NVFP4 may not hold them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from mkpack import payload, prequantised
from mkpack.errors import UserError
from mkpack.formats import dequantise, e4m3_to_f32, source_values
from mkpack.payload import to_floats
from mkpack.prequantised import Scheme, Stored
from mkpack.shard import TensorInfo
from mkpack.spec import SourcePart


@dataclass
class Range:
    """Numbers seen: how many, how many of the kinds that matter, and the ends of those that are finite and not zero.
    `subnormal` is meant in the format that the scale is stored in."""

    count: int = 0
    zero: int = 0
    subnormal: int = 0
    negative: int = 0
    inf: int = 0
    nan: int = 0
    least: float = math.inf
    most: float = 0.0

    def add(self, values: np.ndarray, counts: np.ndarray | None = None, smallest_normal: float = 2.0**-126) -> None:
        """values: float32; counts: how often each was seen, by default once."""
        values = values.astype(np.float64).reshape(-1)
        counts = np.ones(len(values), np.int64) if counts is None else counts
        size, finite = np.abs(values), np.isfinite(values)
        self.count += int(counts.sum())
        self.zero += int(counts[values == 0].sum())
        self.subnormal += int(counts[finite & (size > 0) & (size < smallest_normal)].sum())
        self.negative += int(counts[np.signbit(values) & ~np.isnan(values)].sum())
        self.inf += int(counts[np.isinf(values)].sum())
        self.nan += int(counts[np.isnan(values)].sum())
        if (seen := size[finite & (size > 0) & (counts > 0)]).size:
            self.least, self.most = min(self.least, float(seen.min())), max(self.most, float(seen.max()))


@dataclass
class Scales:
    """Scales of matrices that are stored alike. blocks: of blocks, or of whatever an fp8 scale covers; whole: of whole
    matrices, divisors as the factors they mean; activations: input scales. lost: blocks whose scale is zero while their
    codes are not. inexact: MXFP4 matrices that NVFP4 cannot hold without loss."""

    scheme: Scheme
    matrices: int = 0
    blocks: Range = field(default_factory=Range)
    whole: Range = field(default_factory=Range)
    activations: Range = field(default_factory=Range)
    lost: int = 0
    inexact: int = 0

    def add(
        self,
        stored: Stored,
        read: Callable[[TensorInfo], np.ndarray],
        block: tuple[int, int],
        part: SourcePart | None,
    ) -> tuple[list[str], float | None]:
        """Reads the scales of one matrix; block is that of fp8. Returns what a build would refuse, and the factor of
        the whole matrix where there is one."""
        assert stored.scale is not None
        self.matrices += 1
        name = stored.label(part)
        refused: list[str] = []

        def check(test: Callable[[], object]) -> None:
            try:
                test()
            except UserError as e:
                refused.append(str(e))

        if stored.scheme == "fp8":
            floats = to_floats(read(stored.scale), stored.scale.dtype)
            self.blocks.add(floats)
            # A scale of zero is a fault only where codes are not.
            whole_too = (floats == 0).any()
            check(lambda: prequantised.load(stored, read, block) if whole_too else payload.check_factors(floats, name))
            return refused, None

        def codes() -> np.ndarray:
            return stored.rows(stored.weight, read, part)

        scales = stored.rows(stored.scale, read, part)
        histogram = np.bincount(scales.reshape(-1), minlength=256)
        if stored.scheme == "mxfp4":
            values = np.ldexp(1.0, np.arange(256) - 127)
            values[255] = math.nan
            self.blocks.add(values, histogram)
            used = np.flatnonzero(histogram)
            if used[-1] - used[0] > 17 or not 19 <= used[-1] <= 252:  # else any codes are held (payload.mxfp4)
                check(lambda: self._inexact(codes(), scales, name))
            return refused, None
        self.blocks.add(e4m3_to_f32(np.arange(256)), histogram, smallest_normal=2.0**-6)
        weight_codes = codes() if histogram[0] else None
        if weight_codes is not None:
            self.lost += int(payload.lost_blocks(weight_codes, scales).sum())
        check(lambda: payload.check_scales(weight_codes, scales, name))
        factor = stored.factor(read, part)
        check(lambda: payload.check_factor(factor, name))
        with np.errstate(divide="ignore"):
            whole = np.float32(1) / factor if stored.divides else factor
        self.whole.add(np.array([whole]))
        return refused, float(whole)

    def _inexact(self, codes: np.ndarray, exponents: np.ndarray, name: str) -> None:
        found = payload.mxfp4(codes, exponents, name=name)
        self.inexact += bool((dequantise(found.q) != source_values(found)).any())
