"""A blob under construction: a sparse file, and seals that say later whether what was written to it is still there."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

_READ = 1 << 20  # bytes read at a time


@dataclass
class Seal:
    """Where one tensor was written, in which order, and the CRC-32 of its bytes in that order.

    extents: [offset, size, stride, count] each, count pieces of size bytes whose offsets are stride apart.
    """

    extents: list[list[int]] = field(default_factory=list)
    crc: int = 0

    def add(self, offset: int, data: memoryview) -> None:
        self.crc = zlib.crc32(data, self.crc)
        size = len(data)
        if self.extents:
            last = self.extents[-1]
            start, length, stride, count = last
            if count == 1 and offset == start + length:
                last[1:3] = [length + size, length + size]
                return
            if length == size and offset > start and (count == 1 or offset == start + stride * count):
                last[2:] = [offset - start if count == 1 else stride, count + 1]
                return
        self.extents.append([offset, size, size, 1])

    def pieces(self) -> Iterator[tuple[int, int]]:
        """(offset, size) of all that was written, in order."""
        for offset, size, stride, count in self.extents:
            for i in range(count):
                yield offset + i * stride, size

    def to_json(self) -> list[Any]:
        return [self.crc, self.extents]

    @classmethod
    def from_json(cls, data: list[Any]) -> Seal:
        crc, extents = data
        return cls([[int(n) for n in extent] for extent in extents], int(crc))


class BlobFile:
    """A file of `nbytes` bytes, zeros where nothing was written. Threads may write to different places at once.

    resume: take over what is there, instead of emptying the file.
    """

    def __init__(self, path: Path, nbytes: int, resume: bool = False) -> None:
        self._nbytes = nbytes
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | (0 if resume else os.O_TRUNC), 0o644)
        os.truncate(self._fd, nbytes)

    def write(self, offset: int, data: np.ndarray, seal: Seal) -> None:
        """The bytes of an array at an offset; the seal takes note of them."""
        view = np.ascontiguousarray(data).reshape(-1).view(np.uint8).data
        seal.add(offset, view)
        while view:
            n = os.pwrite(self._fd, view, offset)
            view, offset = view[n:], offset + n

    def holds(self, seal: Seal) -> bool:
        """Whether the bytes that were sealed are in the file."""
        crc = 0
        for offset, size in seal.pieces():
            if offset < 0 or offset + size > self._nbytes:
                return False
            for start in range(0, size, _READ):
                crc = zlib.crc32(os.pread(self._fd, min(_READ, size - start), offset + start), crc)
        return crc == seal.crc

    def close(self) -> None:
        os.close(self._fd)
