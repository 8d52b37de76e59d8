"""`source: {dummy: config.json}`: random weights of a model's real shape, drawn tensor by tensor in the formats that
they are stored in.

Nothing is quantised, so neither torch nor modelopt is needed. A tensor's values depend on the seed, on its name and on
its format, never on other tensors, on their order or on the number of CPUs.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections import deque
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import NormalDist
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from mkpack.errors import UserError
from mkpack.formats import BLOCK, E2M1_MAX, E4M3_MAX, QTensor, bf16_to_f32, e2m1_values, e4m3_to_f32, f32_to_bf16
from mkpack.models import model_spec
from mkpack.shard import LFS_POINTER, TensorInfo, lfs_problem, load_json
from mkpack.spec import Format, ModelSpec, SourcePart, TensorRole, tensors

if TYPE_CHECKING:
    from mkpack.digest import Progress

# Values that one random stream makes: enough to hide the cost of its seed, few enough to share a tensor among CPUs. It
# decides which stream a value comes from, so another number gives other weights.
CHUNK = 1 << 18
EVERY = slice(None)
ALONE = 16 * CHUNK  # values up to which a tensor is one CPU's work: a build draws several tensors at a time


@dataclass(frozen=True)
class Dummy:
    """Random weights, with what a build asks of a `Checkpoint`. `tensors` is in the order of the blob.

    Values are normal and exact in bfloat16; their dtype is BF16 when config.json says bfloat16, else F32, so that
    routers are stored as those of the real model are.
    """

    path: Path
    seed: int
    config: dict[str, Any]
    tensors: dict[str, TensorInfo]
    sha256: str
    distributions: dict[str, tuple[float, float]]  # tensor name -> mean and standard deviation

    stray: ClassVar[tuple[str, ...]] = ()
    license_id: ClassVar[str] = "none (random weights)"

    @classmethod
    def open(cls, path: Path, seed: int) -> Dummy:
        """Reads a config.json. Raises UserError when it cannot be read or describes no model that mkpack can build."""
        try:
            text = path.read_bytes()
        except IsADirectoryError:
            raise UserError(f"dummy source {path} is a folder: expected a config.json; name the file in it") from None
        except OSError as e:
            raise UserError(f"dummy source {path} cannot be read: {e.strerror}; expected a config.json") from e
        if text.startswith(LFS_POINTER):
            raise UserError(f"dummy source {lfs_problem(str(path))}")
        try:
            config = load_json(text, [])
        except ValueError as e:
            raise UserError(f"dummy source {path} is not readable as JSON: {e}") from e
        if not isinstance(config, dict):
            raise UserError(f"dummy source {path} is not a JSON object; expected a config.json")
        spec, names = model_spec(config)
        bf16 = (config.get("dtype") or config.get("torch_dtype")) == "bfloat16"
        dtype, width = ("BF16", 2) if bf16 else ("F32", 4)
        roles = list(tensors(spec, names))
        infos = (
            TensorInfo(r.source, dtype, r.source_shape, path.name, 0, math.prod(r.source_shape) * width) for r in roles
        )
        distributions = {r.source: _distribution(r, spec) for r in roles}
        return cls(path, seed, config, {t.name: t for t in infos}, hashlib.sha256(text).hexdigest(), distributions)

    def check(self, roles: Iterable[TensorRole]) -> None:
        """ValueError for a role that this config.json does not have: roles and tensors come from the same one."""
        for role in roles:
            if role.source not in self.tensors or self.tensors[role.source].shape != role.source_shape:
                raise ValueError(f"{role.source} {role.source_shape} is not a tensor of {self.path}")

    def unused(self, roles: Iterable[TensorRole]) -> list[str]:
        """Names of the tensors that no role needs, sorted."""
        return sorted(self.tensors.keys() - {role.source for role in roles})

    def aux_files(self) -> dict[str, Path]:
        """No tokenizer, no chat template, no licence files."""
        return {}

    def digests(self, progress: Progress | None = None, expected: dict[str, str] | None = None) -> dict[str, str]:
        """SHA-256 in hex of config.json, which with the seed decides every weight. It is read already, and nothing
        else knows what to expect of it, so neither argument has an effect."""
        return {"config.json": self.sha256}

    def draw(self, role: TensorRole, fmt: Format, rows: slice = EVERY) -> QTensor:
        """One tensor in a storage format: values of the format, with the mean and deviation of the tensor's kind.

        rows: those that are wanted. The others cost neither time nor memory, and mean nothing.
        """
        if fmt == "f32":  # vectors, and routers, which every rank has whole
            return QTensor(fmt, role.shape, bf16_to_f32(self.read_bits(role.source, role.part)))
        if fmt == "bf16":
            return QTensor(fmt, role.shape, self.read_bits(role.source, role.part, rows))
        (count, cols), (_, std) = role.shape, self.distributions[role.source]
        stream = f"{_stream_name(role.source, role.part)} {fmt}"
        if fmt == "fp8":
            codes, unit = _fp8_table()
            data = self._values(stream, role.shape, codes, rows)
            return QTensor("fp8", role.shape, data, None, np.full(count, std * unit, np.float32))
        pairs, scales, unit = _nvfp4_tables()
        blocks = -(-cols // BLOCK)
        data = self._values(stream, (count, blocks * BLOCK // 2), pairs, rows)
        data[rows, (cols + 1) // 2 :] = 0
        if cols % 2:
            data[rows, cols // 2] &= 15
        scale = self._values(f"{stream} scales", (count, blocks), scales, rows)
        return QTensor("nvfp4", role.shape, data, scale, np.array([std * unit], np.float32))

    def read_bits(self, name: str, part: SourcePart | None = None, rows: slice = EVERY) -> np.ndarray:
        """The bfloat16 bits of one tensor, or of a part of it, which has a stream of its own: uint16, of its shape.
        rows: as draw() takes them."""
        shape = part.shape if part else self.tensors[name].shape
        return self._values(_stream_name(name, part), shape, _table(*self.distributions[name]), rows)

    def _values(self, stream_name: str, shape: tuple[int, ...], table: np.ndarray, rows: slice) -> np.ndarray:
        """Entries of a table of 65536, each chosen by 16 random bits, in an array of which only `rows` are filled, and
        what lies with them in a chunk: untouched memory is none."""
        key = int.from_bytes(hashlib.sha256(f"{self.seed} {stream_name}".encode()).digest(), "little")
        values = np.empty(math.prod(shape), table.dtype)
        width = math.prod(shape[1:])
        first, last = (row * width for row in rows.indices(shape[0])[:2])
        starts = range(first // CHUNK * CHUNK, last, CHUNK)

        def fill(start: int) -> None:
            part = values[start : start + CHUNK]
            stream = np.random.PCG64(np.random.SeedSequence(key, spawn_key=(start // CHUNK,)))
            index = stream.random_raw(-(-len(part) // 4)).view(np.uint16)[: len(part)]
            # No index is out of range; "clip" only spares the check and the wide copy of the indices it would need.
            np.take(table, index, out=part, mode="clip")

        deque((map if last - first <= ALONE else _pool().map)(fill, starts), maxlen=0)
        return values.reshape(shape)


def _stream_name(name: str, part: SourcePart | None) -> str:
    return f"{name} {part.index} {part.rows.start}" if part else name


def _distribution(role: TensorRole, spec: ModelSpec) -> tuple[float, float]:
    """(mean, standard deviation) that keep activations near 1 and let the tokens of a context differ.

    What attention adds is alike for all tokens, and grows from layer to layer until they all choose the same experts,
    if it is an even average or large beside the token's own embedding. Hence embeddings of 1, queries that look at some
    positions far more than at others (doubled, by q_norm where there is one), and outputs of half the usual size. A
    tied head with such embeddings would make every token repeat itself, so these are smaller.
    """
    part = role.name.rsplit(".", 1)[-1]
    if len(role.shape) == 1:
        if part == "sinks" or part.endswith("_residual_gate"):
            return 0.0, 0.1
        # Stored as the difference from 1 where norms are centered, and always by those after the MLP and the experts.
        if part in ("mlp_out_norm", "expert_norm") or (
            spec.centered_norms and part in ("attn_norm", "mlp_norm", "pre_norm")
        ):
            return 0.0, 0.1
        return (0.0, 0.02) if part.endswith("_bias") else (2.0, 0.2) if part == "q_norm" else (1.0, 0.1)
    if part == "embed" and not spec.tie_word_embeddings:
        return 0.0, 1.0
    gains = {"embed": 4.0, "q": 1.0 if spec.qk_norm else 2.0, "o": 0.5, "router": 2.0}
    return 0.0, gains.get(part, 1.0) / math.sqrt(role.shape[1])


@cache
def _quantiles() -> np.ndarray:
    """float64 [65536]: the normal distribution in equal steps of probability, from -4.3 to 4.3, ascending."""
    normal = NormalDist()
    upper = np.array([normal.inv_cdf((i + 0.5) / 65536) for i in range(32768, 65536)])
    return np.concatenate([-upper[::-1], upper])


@cache
def _table(mean: float, std: float) -> np.ndarray:
    """uint16 [65536]: a normal distribution as bfloat16 bits, rounded to nearest even; 16 random bits choose one."""
    return f32_to_bf16((mean + std * _quantiles()).astype(np.float32))


@cache
def _fp8_table() -> tuple[np.ndarray, float]:
    """uint8 [65536]: e4m3 codes of a normal distribution, and the scale that makes its deviation 1."""
    codes = _nearest(_quantiles() * (E4M3_MAX / _quantiles()[-1]), e4m3_to_f32(np.arange(127, dtype=np.uint8)), 128)
    return codes, 1 / _rms(e4m3_to_f32(codes))


@cache
def _nvfp4_tables() -> tuple[np.ndarray, np.ndarray, float]:
    """uint8 [65536] pairs of e2m1 codes; uint8 [65536] e4m3 block scales; the tensor scale that makes the deviation of
    their products 1. Codes are those of normal values in a block whose largest is the usual one, 2.1; scales are those
    of the largest of 16 normal values."""
    normal = NormalDist()
    levels = np.array([normal.inv_cdf((i + 0.5) / 256) for i in range(256)])
    code = _nearest(levels * (E2M1_MAX / 2.1), e2m1_values()[:8], 8)
    pair = np.arange(65536)
    pairs = code[pair & 255] | code[pair >> 8] << 4
    # The largest of 16 is below x with probability (2 F(x) - 1)^16.
    share = ((np.arange(65536) + 0.5) / 65536) ** (1 / 16)
    largest = np.interp((1 + share) / 2, (np.arange(65536) + 0.5) / 65536, _quantiles())
    scales = _nearest(largest * (E4M3_MAX / largest[-1]), e4m3_to_f32(np.arange(127, dtype=np.uint8)), 128)
    return pairs, scales, 1 / (_rms(e2m1_values()[code]) * _rms(e4m3_to_f32(scales)))


def _nearest(values: np.ndarray, magnitudes: np.ndarray, sign: int) -> np.ndarray:
    """uint8 codes: the index of the nearest of ascending magnitudes, with the bit `sign` for values below zero."""
    middle = (magnitudes[1:] + magnitudes[:-1]) / 2
    codes = np.searchsorted(middle, np.abs(values)).astype(np.uint8)
    return codes | np.where(values < 0, sign, 0).astype(np.uint8)


def _rms(values: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(values, dtype=np.float64))))


@cache
def _pool() -> ThreadPoolExecutor:
    # Drawing and looking up both let go of the interpreter lock.
    return ThreadPoolExecutor(len(os.sched_getaffinity(0)), "mkpack-dummy")
