"""csrc/quantize/nvfp4.cpp, compiled for this machine and called: NVFP4 codes and scales of a few rows, bit for bit
modelopt's, four times as fast."""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from mkpack import platform
from mkpack.compile import sources

if TYPE_CHECKING:
    import numpy as np
    import torch

# Contraction off: every operation rounds, as modelopt's do. Nobody reads errno or floating-point flags.
FLAGS = (
    "-std=c++20 -O3 -march=native -mprefer-vector-width=512 -shared -fPIC -fvisibility=hidden "
    "-ffp-contract=off -fno-math-errno -fno-trapping-math"
).split()


@dataclass(frozen=True)
class Nvfp4Kernel:
    """The compiled function; it runs without the interpreter's lock."""

    function: Callable[..., None]

    def __call__(
        self,
        weights: torch.Tensor,
        scale2: float,
        search: tuple[int, int],
        data: np.ndarray,
        scales: np.ndarray,
    ) -> tuple[float, float, float]:
        """Encodes rows, float32 or bfloat16 [n, K] without gaps, into `data` uint8 [n, blocks * 8] and `scales` uint8
        [n, blocks], both without gaps. search: how many e4m3 codes below and above that of the block's maximum are
        tried. Returns sums: squared errors, those under the scales of the maxima alone, squares of the weights."""
        import torch

        assert weights.is_contiguous() and data.flags.c_contiguous and scales.flags.c_contiguous
        sums = (ctypes.c_double * 3)()
        self.function(
            weights.data_ptr(),
            int(weights.dtype == torch.bfloat16),
            *weights.shape,
            scale2,
            *search,
            data.ctypes.data,
            scales.ctypes.data,
            sums,
        )
        return sums[0], sums[1], sums[2]


def nvfp4_kernel() -> Nvfp4Kernel | None:
    """The kernel, compiled once a process; None when this machine's compiler makes none that loads."""
    compiler = platform.compiler()
    return _compiled(compiler.command) if compiler else None


@cache
def _compiled(command: tuple[str, ...]) -> Nvfp4Kernel | None:
    with tempfile.TemporaryDirectory(prefix="mkpack-") as folder:
        library = Path(folder) / "nvfp4.so"
        try:
            subprocess.run(
                [*command, *FLAGS, "-o", library, sources() / "quantize" / "nvfp4.cpp"],
                check=True,
                capture_output=True,
                timeout=120,
            )
            function = ctypes.CDLL(str(library)).mk_nvfp4  # stays loaded when the file is gone
        except (OSError, subprocess.SubprocessError):
            return None
    pointer, count = ctypes.c_void_p, ctypes.c_int64
    function.argtypes = [
        pointer,
        ctypes.c_int,
        count,
        count,
        ctypes.c_float,
        ctypes.c_int,
        ctypes.c_int,
        *[pointer] * 3,
    ]
    function.restype = None
    return Nvfp4Kernel(function)
