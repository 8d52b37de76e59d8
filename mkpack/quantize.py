"""One torch tensor -> `QTensor` with the arithmetic of nvidia-modelopt, and how far the result is from the source.

NVFP4 is encoded on a GPU by modelopt where there is one, else by a kernel of our own (nvfp4_kernel.py), else by
modelopt on the CPU: the same bits. fp8 is modelopt's in any case.

torch and modelopt are imported inside the functions: both are heavy, and the run side has neither. Tensors are CPU
tensors of dtype float32, float16 or bfloat16, or `Prequantised` matrices: their payload is taken over where it has the
format that is asked for, otherwise their values are quantised like any others. Everything works on a few rows at a
time, so the memory needed beside source and result is a few MiB, and the float32 values of what is quantised anew.
"""

from __future__ import annotations

import contextlib
import math
import os
import warnings
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from . import nvfp4_kernel
from .decode import decode, e2m1, source_values
from .errors import UserError
from .formats import BLOCK, E2M1_MAX, E4M3_MAX, Prequantised, QTensor
from .spec import Algorithm, Format

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

# Elements of one call into modelopt: enough to hide the cost of a call, few enough for the cache; the fewer, the
# better the CPUs share a small tensor.
MIN_CHUNK, MAX_CHUNK = 1 << 16, 1 << 18

GPU_CHUNK = 1 << 24  # elements of one call on a GPU, whose two dozen operations take 20 bytes of memory for each

# Block scales that `algorithm: mse` tries: how many e4m3 codes below and above that of the block's maximum. Above, to
# where the maximum becomes the code 4 instead of 6 (six codes are a factor of 1.5 to 1.75); of Gaussian weights, wider
# searches gained less than 0.01% of the error.
SEARCH: dict[Algorithm, tuple[int, int]] = {"max": (0, 0), "mse": (2, 6)}

NVFP4_MAX = E2M1_MAX * E4M3_MAX  # 2688: the largest value of NVFP4 when scale2 is 1

# No scale2 is smaller: the smallest non-zero NVFP4 value, 2^-10 * scale2, is then a normal float32, and no kernel
# sees a difference between flushing subnormals and keeping them. It concerns tensors whose amax is below 3.3e-32.
MIN_SCALE2 = 2.0**-116


@cache
def load_modelopt() -> ModuleType:
    """modelopt's tensor formats, imported quietly and once; it takes seconds, so a build may call it early.

    Raises UserError when torch or modelopt is not installed.
    """
    try:
        with warnings.catch_warnings():
            # It warns about versions of packages that mkpack does not use.
            warnings.simplefilter("ignore")
            import modelopt.torch.quantization.qtensor as qtensor
    except ImportError as e:
        raise UserError(
            f"quantising needs torch and nvidia-modelopt, and importing them failed: {e}\n"
            "install them with: pip install 'mkpack[build]'"
        ) from e
    return qtensor


def load_for(formats: Collection[Format]) -> None:
    """What quantising to these formats needs, imported or compiled now rather than with the first tensor."""
    if "nvfp4" in formats and (has_gpu() or nvfp4_kernel.nvfp4_kernel() is None) or "fp8" in formats:
        load_modelopt()


def tensor_scale(*tensors: torch.Tensor | Prequantised, names: Sequence[str] = ()) -> float:
    """The NVFP4 scale2 of tensors that share one (gate and up of an expert): their joint amax / 2688, a float32 value.

    Always finite and above zero; 1.0 when every tensor is zero. Tensors that are NVFP4 already keep scales of their
    own, which need not be equal, and do not count. Raises UserError for NaN or Inf, naming the tensor by
    its entry in `names`.
    """
    labels = [*names, *("tensor" for _ in tensors[len(names) :])]
    found = zip(tensors, labels, strict=True)
    return _scale2(max((_amax(_floats(t), name) for t, name in found if not _has(t, "nvfp4")), default=0.0))


def quantise(
    tensor: torch.Tensor | Prequantised,
    fmt: Format,
    *,
    name: str = "tensor",
    scale2: float | None = None,
    algorithm: Algorithm = "max",
) -> QTensor:
    """Store a tensor in a format.

    tensor: [N, K], or [n] for f32. scale2: the NVFP4 tensor scale of a group (see `tensor_scale`), by default the
    tensor's own; ValueError when the tensor holds larger values than it can express. It does not concern a tensor that
    is NVFP4 already. algorithm: how NVFP4 block scales are chosen, by the block's maximum, or by the least squared
    error among its neighbours. Arrays of the result may share memory with the tensor when the format does not change
    it.

    Raises UserError, naming the tensor, for another dtype, for NaN or Inf, and for values beyond bfloat16's range.
    """
    return _quantise(tensor, fmt, name, scale2, algorithm)[0]


def quantise_measured(
    tensor: torch.Tensor | Prequantised,
    fmt: Format,
    *,
    name: str = "tensor",
    scale2: float | None = None,
    algorithm: Algorithm = "max",
) -> tuple[QTensor, ErrorStats]:
    """quantise() and tensor_error() of the result, in one pass where NVFP4 is encoded; the error then also says what
    `algorithm: max` would have given."""
    q, error = _quantise(tensor, fmt, name, scale2, algorithm)
    return q, error or tensor_error(q, tensor)


def _quantise(
    tensor: torch.Tensor | Prequantised, fmt: Format, name: str, scale2: float | None, algorithm: Algorithm
) -> tuple[QTensor, ErrorStats | None]:
    if isinstance(tensor, Prequantised):
        if tensor.q.format == fmt:
            return tensor.q, None
        tensor = _floats(tensor)
    if fmt != "f32" and tensor.dim() != 2:
        raise ValueError(f"{name}: {fmt} needs a matrix, found shape {list(tensor.shape)}")
    if scale2 is not None and fmt != "nvfp4":
        raise ValueError(f"{name}: {fmt} has no tensor scale")
    tensor = tensor.detach()
    amax = _amax(tensor, name)
    match fmt:
        case "f32":
            return QTensor("f32", tuple(tensor.shape), tensor.float().contiguous().numpy()), None
        case "bf16":
            return _bf16(tensor, amax, name), None
        case "fp8":
            return _fp8(tensor), None
        case "nvfp4":
            if scale2 is None:
                scale2 = _scale2(amax)
            elif not (scale2 > 0 and amax <= NVFP4_MAX * scale2 * (1 + 2**-20) < math.inf):
                raise ValueError(f"{name}: scale2 {scale2:g} cannot express values up to {amax:g}")
            return _nvfp4(tensor, scale2, SEARCH[algorithm])


def _has(tensor: torch.Tensor | Prequantised, fmt: Format) -> bool:
    return isinstance(tensor, Prequantised) and tensor.q.format == fmt


def floats(tensor: torch.Tensor | Prequantised, rows: Sequence[int] | None = None) -> torch.Tensor:
    """The values of a tensor, or of some of its rows, in float32."""
    values = _floats(tensor)
    return (values if rows is None else values[list(rows)]).float()


def _floats(tensor: torch.Tensor | Prequantised) -> torch.Tensor:
    """The tensor itself, or the values of a quantised one in float32."""
    import torch

    if not isinstance(tensor, Prequantised):
        return tensor
    values = torch.empty(tensor.shape)

    def decode(rows: slice) -> None:
        values[rows] = source_values(tensor, rows)

    _by_rows(decode, values.shape)
    return values


def _amax(tensor: torch.Tensor, name: str) -> float:
    import torch

    if tensor.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        found = str(tensor.dtype).removeprefix("torch.")
        raise UserError(f"{name}: dtype is {found}, expected float32, float16 or bfloat16")
    tensor = tensor.detach()
    matrix = tensor.reshape(-1, tensor.shape[-1])
    # aminmax passes a NaN on
    ends = [float(x) for pair in _by_rows(lambda rows: torch.aminmax(matrix[rows]), matrix.shape) for x in pair]
    if not all(map(math.isfinite, ends)):
        bad = ~torch.isfinite(tensor)
        first = [int(i) for i in torch.nonzero(bad)[0]]
        raise UserError(
            f"{name}: {int(bad.sum())} of {tensor.numel()} values are NaN or Inf, the first at {first}; "
            "every weight must be finite: check the file against its source"
        )
    return max(map(abs, ends))


def _scale2(amax: float) -> float:
    return max(float(np.float32(amax) / np.float32(NVFP4_MAX)), MIN_SCALE2) if amax else 1.0


@cache
def _pool() -> ThreadPoolExecutor:
    # A thread per CPU, each with a torch of one thread. torch's own threads meet, spinning, after each of the two
    # dozen operations of a chunk: on a busy machine that took ten times as long. It also makes sums the same on any
    # number of CPUs.
    import torch

    torch.get_num_threads()  # the caller's thread settles on its own number before the pool's threads change it
    cpus = len(os.sched_getaffinity(0))
    return ThreadPoolExecutor(cpus, "mkpack-quantize", initializer=torch.set_num_threads, initargs=(1,))


def _by_rows(f: Callable[[slice], T], shape: Sequence[int], most: int = MAX_CHUNK) -> list[T]:
    """f of every chunk of rows, in parallel; results in order of rows. Chunks of a shape are the same everywhere."""
    rows, elements = shape[0], math.prod(shape)
    size = min(max(elements // 16, MIN_CHUNK), most)
    step = max(1, -(-rows // -(-elements // size)))
    return list(_pool().map(f, (slice(i, i + step) for i in range(0, rows, step))))


def _bf16(tensor: torch.Tensor, amax: float, name: str) -> QTensor:
    import torch

    if torch.tensor(amax, dtype=torch.float32).bfloat16().isinf():
        raise UserError(
            f"{name}: its largest value, {amax:g}, is beyond bfloat16 (3.39e38); choose another precision for it"
        )
    bits = tensor.bfloat16().contiguous().view(torch.int16).numpy().view(np.uint16)
    return QTensor("bf16", tuple(tensor.shape), bits)


def _fp8(tensor: torch.Tensor) -> QTensor:
    import torch

    quantize = load_modelopt().FP8QTensor.quantize
    data = torch.empty(tuple(tensor.shape), dtype=torch.uint8)
    scales = torch.empty(tensor.shape[0])

    def encode(rows: slice) -> None:
        # float32 and our own scales: modelopt would round scale and quotient to bfloat16 first, and its scale of a
        # zero row is 0, which gives NaN.
        values = tensor[rows].float()
        amax = values.abs().amax(dim=1)
        scale = torch.where(amax == 0, 1.0, (amax / E4M3_MAX).clamp(min=MIN_SCALE2))
        quantised, _ = quantize(values, scales=scale[:, None])
        data[rows] = quantised._quantized_data.view(torch.uint8)
        scales[rows] = scale

    _by_rows(encode, tensor.shape)
    return QTensor("fp8", tuple(tensor.shape), data.numpy(), None, scales.numpy())


def has_gpu() -> bool:
    """Whether tensors are quantised on a GPU."""
    import torch

    return torch.cuda.is_available()


def _nvfp4(tensor: torch.Tensor, scale2: float, search: tuple[int, int]) -> tuple[QTensor, ErrorStats]:
    import torch

    n, k = tensor.shape
    blocks = -(-k // BLOCK)
    data = np.empty((n, blocks * BLOCK // 2), np.uint8)
    scales = np.empty((n, blocks), np.uint8)
    s2 = torch.tensor(scale2, dtype=torch.float32)
    gpu = has_gpu()
    cpu_kernel = None if gpu else nvfp4_kernel.nvfp4_kernel()

    def encode(rows: slice) -> ErrorStats:
        values = tensor[rows].contiguous()
        if gpu:
            # Others may fill it, or it is too small for the chunks of all threads: a CPU gives the same bits.
            with contextlib.suppress(torch.OutOfMemoryError):
                return _nvfp4_modelopt(values, s2, search, data[rows], scales[rows], "cuda")
        kernel = nvfp4_kernel.nvfp4_kernel() if gpu else cpu_kernel
        if kernel is None:
            return _nvfp4_modelopt(values, s2, search, data[rows], scales[rows], "cpu")
        values = values if values.dtype == torch.bfloat16 else values.float()
        error, error_max, squares = kernel(values, scale2, search, data[rows], scales[rows])
        return ErrorStats(error, squares, error_max)

    found = _by_rows(encode, tensor.shape, GPU_CHUNK if gpu else MAX_CHUNK)
    return QTensor("nvfp4", (n, k), data, scales, s2.reshape(1).numpy()), sum(found, ErrorStats())


def _nvfp4_modelopt(
    values: torch.Tensor,
    scale2: torch.Tensor,
    search: tuple[int, int],
    data: np.ndarray,
    scales: np.ndarray,
    device: str,
) -> ErrorStats:
    """What the kernel does, by modelopt on a device: `data` and `scales` are filled."""
    import torch

    quantize = load_modelopt().NVFP4QTensor.quantize
    values, scale2 = values.to(device), scale2.to(device)
    # It pads the columns itself, and gives a zero block the scale 1 and no block the scale 0.
    quantised, scale, _ = quantize(values, BLOCK, None, scale2)
    codes, start = quantised._quantized_data, scale.view(torch.uint8)
    wide = torch.nn.functional.pad(values.float(), (0, -values.shape[1] % BLOCK)).view(*start.shape, BLOCK)

    def squared_error(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        found = e2m1(codes, scale.view(torch.float8_e4m3fn).float()).mul_(scale2)
        return _pairwise((found - wide).double().square_())

    best, chosen = squared_error(codes, start), start
    of_max = best
    for step in range(-search[0], search[1] + 1):
        tried = (start.int() + step).clamp(1, 126).to(torch.uint8)
        if step:
            other, _, _ = quantize(values, BLOCK, tried.view(torch.float8_e4m3fn), scale2)
            error = squared_error(other._quantized_data, tried)
            better = error < best
            best, chosen = torch.where(better, error, best), torch.where(better, tried, chosen)
            wider = better.repeat_interleave(BLOCK // 2, dim=1)
            codes = torch.where(wider, other._quantized_data, codes)
    data[...], scales[...] = codes.cpu().numpy(), chosen.cpu().numpy()
    return ErrorStats(float(best.sum()), float(_pairwise(wide.double().square_()).sum()), float(of_max.sum()))


def _pairwise(terms: torch.Tensor) -> torch.Tensor:
    """Sums over the last axis of 16, the second half added to the first until one is left: the kernel's order."""
    while (half := terms.shape[-1] // 2) > 0:
        terms = terms[..., :half] + terms[..., half:]
    return terms[..., 0]


@dataclass
class ErrorStats:
    """Sums of squares, over any number of tensors: `stats += tensor_error(q, t)`. error_max: what the error would be if
    NVFP4 block scales came from maxima alone; None for the error itself."""

    error: float = 0.0
    reference: float = 0.0
    error_max: float | None = None

    @property
    def relative(self) -> float:
        """Frobenius norm of the error over that of the reference; 0 when nothing differs, inf against a zero."""
        return _relative(self.error, self.reference)

    @property
    def relative_max(self) -> float:
        """The same of error_max."""
        return _relative(self._of_max, self.reference)

    @property
    def _of_max(self) -> float:
        return self.error if self.error_max is None else self.error_max

    def __add__(self, other: ErrorStats) -> ErrorStats:
        both = self.error_max is None and other.error_max is None
        return ErrorStats(
            self.error + other.error, self.reference + other.reference, None if both else self._of_max + other._of_max
        )


def _relative(error: float, reference: float) -> float:
    if error == 0:
        return 0.0
    return math.sqrt(error / reference) if reference else math.inf


def tensor_error(q: QTensor, tensor: torch.Tensor | Prequantised) -> ErrorStats:
    """How far a stored tensor is from its source, both of shape q.shape."""
    if tuple(tensor.shape) != q.shape:
        raise ValueError(f"a stored tensor of shape {list(q.shape)} beside a source of shape {list(tensor.shape)}")
    if isinstance(tensor, Prequantised):
        packed = tensor
        return sum(_by_rows(lambda rows: _error(q, rows, source_values(packed, rows)), q.shape), ErrorStats())
    source = tensor.detach().reshape(-1, q.shape[-1])
    return sum(_by_rows(lambda rows: _error(q, rows, source[rows].float()), source.shape), ErrorStats())


def _error(q: QTensor, rows: slice, reference: torch.Tensor) -> ErrorStats:
    return ErrorStats(_square_sum(decode(q, rows) - reference), _square_sum(reference))


def _square_sum(values: torch.Tensor) -> float:
    import torch

    flat = values.flatten()
    total = float(torch.dot(flat, flat))
    if not 1e-20 < total < 1e38:  # the squares of float32 overflow and underflow long before the values do
        flat = flat.double()
        total = float(torch.dot(flat, flat))
    return total
