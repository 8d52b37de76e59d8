"""One safetensors file's header, parsed and checked byte by byte.

The format: 8 bytes of header length (little-endian), a JSON header of dtype, shape and offsets a tensor, then the data.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

# Limit of the safetensors format itself.
MAX_HEADER = 100_000_000
# Bits an element. A type that is not here is left to `check`, which refuses what mkpack cannot read.
_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "U16": 16, "I16": 16, "F16": 16, "BF16": 16,
    "U32": 32, "I32": 32, "F32": 32, "U64": 64, "I64": 64, "F64": 64, "C64": 64, "F4": 4,
}  # fmt: skip

LFS_POINTER = b"version https://git-lfs.github.com/spec/"


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies: `nbytes` bytes at `offset` (absolute, in bytes) of `file`, row-major and little-endian."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    offset: int
    nbytes: int

    def entry(self, index: int) -> TensorInfo:
        """One entry of the first dimension: its bytes lie together."""
        size = self.nbytes // self.shape[0]
        return replace(self, shape=self.shape[1:], offset=self.offset + index * size, nbytes=size)


def read_header(folder: Path, name: str, problems: list[str]) -> list[TensorInfo]:
    """Tensors of one shard in file order; [] with a problem added when its header cannot be believed."""
    try:
        with open(folder / name, "rb") as f:
            size = os.fstat(f.fileno()).st_size
            start = f.read(64)
            if start.startswith(LFS_POINTER):
                problems.append(lfs_problem(name))
                return []
            length = int.from_bytes(start[:8], "little")
            if size < 8:
                problems.append(f"{name} is truncated: expected a header of at least 8 bytes, found {size} bytes")
                return []
            if length > MAX_HEADER:
                claim = f"its header would be {length} bytes, the limit is {MAX_HEADER}"
                problems.append(f"{name} is not a safetensors file: {claim}")
                return []
            if 8 + length > size:
                problems.append(f"{name} is truncated: expected {8 + length} bytes of header alone, found {size} bytes")
                return []
            f.seek(8)
            text = f.read(length)
    except OSError as e:
        problems.append(f"{name} cannot be read: {e.strerror}")
        return []

    faults: list[str] = []
    try:
        header = load_json(text, faults)
    except ValueError as e:
        problems.append(f"{name}: its header is not readable as JSON: {e}")
        return []
    if not isinstance(header, dict):
        problems.append(f"{name}: its header is not a JSON object")
        return []
    header.pop("__metadata__", None)
    tensors = [t for key, entry in header.items() if (t := _tensor(name, key, entry, 8 + length, faults))]
    tensors.sort(key=lambda t: (t.offset, t.nbytes))
    last = max([8 + length, *(t.offset + t.nbytes for t in tensors)])
    if size < last:
        problems.append(f"{name} is truncated: expected {last} bytes, found {size}")
    elif size > last and not faults:
        problems.append(f"{name} has bytes after its last tensor: expected {last} bytes, found {size}")
    # The format allows neither holes nor overlaps, so each tensor begins where the one before it ended.
    end, before = 8 + length, "the header"
    for t in tensors if not faults else []:
        if t.offset != end:
            faults.append(f'"{t.name}" begins at byte {t.offset}, expected {end} where {before} ends')
        end, before = t.offset + t.nbytes, f'"{t.name}"'
    problems += [f"{name}: {fault}" for fault in faults]
    return tensors


def _tensor(file: str, name: str, entry: object, data: int, faults: list[str]) -> TensorInfo | None:
    """One header entry, with offsets made absolute (`data` is where tensor data begins); None when malformed."""
    match entry:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [int(begin), int(end)]} if (
            0 <= begin <= end and all(type(n) is int and n >= 0 for n in shape)
        ):
            bits = _BITS.get(dtype)
            expected = None if bits is None else (math.prod(shape) * bits + 7) // 8
            if expected is not None and expected != end - begin:
                faults.append(f'"{name}" of {dtype} {shape} needs {expected} bytes, its offsets hold {end - begin}')
            return TensorInfo(name, dtype, tuple(shape), file, data + begin, end - begin)
    faults.append(f'the header entry of "{name}" is malformed: expected dtype, shape and data_offsets')
    return None


def load_json(text: bytes, problems: list[str]) -> Any:
    """Parsed JSON; a key that an object holds twice becomes a problem. Raises ValueError for anything unreadable."""

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(items)
        if len(found) < len(items):
            counts = Counter(key for key, _ in items)
            problems.extend(f'"{key}" is listed twice' for key, n in counts.items() if n > 1)
        return found

    try:
        return json.loads(text, object_pairs_hook=pairs)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def lfs_problem(name: str) -> str:
    return f"{name} is a Git LFS pointer, not the data: run git lfs pull"
