"""formats.dequantise and formats.source_values of some rows, the same bits, at torch's speed."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from mkpack.formats import BLOCK, Prequantised, QTensor, e2m1_values

if TYPE_CHECKING:
    import torch


def decode(q: QTensor, rows: slice) -> torch.Tensor:
    """formats.dequantise of some rows, the same bits, at torch's speed."""
    import torch

    match q.format:
        case "f32":
            return torch.from_numpy(q.data.reshape(-1, q.shape[-1])[rows])
        case "bf16":
            return torch.from_numpy(q.data[rows].view(np.int16)).view(torch.bfloat16).float()
        case "fp8":
            assert q.scale2 is not None
            values = torch.from_numpy(q.data[rows]).view(torch.float8_e4m3fn).float()
            return values.mul_(torch.from_numpy(q.scale2[rows, None]))
        case "nvfp4":
            assert q.scale is not None and q.scale2 is not None
            scales = torch.from_numpy(q.scale[rows]).view(torch.float8_e4m3fn).float()
            values = e2m1(torch.from_numpy(q.data[rows]), scales).mul_(float(q.scale2[0]))
            return values.view(len(scales), -1)[:, : q.shape[1]]


def source_values(p: Prequantised, rows: slice) -> torch.Tensor:
    """formats.source_values of some rows, the same bits."""
    import torch

    factors = torch.from_numpy(p.factors[rows])
    if p.q.format == "fp8":
        return torch.from_numpy(p.codes[rows]).view(torch.float8_e4m3fn).float().mul_(factors)
    return e2m1(torch.from_numpy(p.codes[rows]), factors).view(len(factors), -1)


def e2m1(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """float32 [n, blocks, 16]: e2m1 codes, uint8 [n, blocks * 8], times the scale [n, blocks] of their block."""
    import torch

    pairs = _e2m1_pairs().to(codes.device).index_select(0, codes.flatten().int())
    return pairs.view(torch.float32).view(*scales.shape, BLOCK).mul_(scales[..., None])


@cache
def _e2m1_pairs() -> torch.Tensor:
    """int64 [256]: for every byte its two e2m1 values, as two float32 in one word so that a look-up moves both."""
    import torch

    byte = np.arange(256)
    pairs = np.stack([e2m1_values()[byte & 15], e2m1_values()[byte >> 4]], axis=-1)
    return torch.from_numpy(pairs.view(np.int64).ravel())
