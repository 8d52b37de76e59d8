"""A downloaded part of a repo as an artifact's store: see store.py for what a store offers."""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from collections.abc import Sequence
from pathlib import Path

from mkpack.errors import UserError
from mkpack.repo import RepoFile
from mkpack.store import ADVICE, Use

_MAP_FIXED = 0x10  # Python's mmap has no name for it


class SnapshotStore:
    """Entries of a snapshot folder, each mapped when it is first asked for; one of several files in one piece."""

    def __init__(self, folder: Path, files: Sequence[RepoFile]) -> None:
        self._folder = folder
        self._files: dict[str, list[RepoFile]] = {}
        for file in files:
            self._files.setdefault(file.entry, []).append(file)
        self.names = set(self._files)
        self.problems: list[str] = []
        self.sizes = {name: sum(file.size for file in parts) for name, parts in self._files.items()}
        self._maps: dict[str, Mapping] = {}

    def view(self, name: str) -> memoryview:
        if self.sizes[name] == 0:
            return memoryview(b"")
        if name not in self._maps:
            self._maps[name] = Mapping(self._folder, self._files[name])
        return self._maps[name].view()

    def check_manifest(self, data: bytes) -> None:
        """Whoever downloads the manifest checks it."""

    def advise(self, name: str, use: Use) -> None:
        if name in self._maps:
            self._maps[name].advise(use)

    def close(self) -> None:
        self._maps.clear()


class Mapping:
    """Files of a folder mapped read-only side by side, so that they are one piece of memory; each but the last has a
    multiple of the page size. The memory goes when this object and every view of it are gone."""

    def __init__(self, folder: Path, parts: Sequence[RepoFile]) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        place = libc.mmap
        place.restype = ctypes.c_void_p
        place.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
        libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

        def mapped(at: int | None, length: int, protection: int, flags: int, fd: int) -> int:
            address = place(at, length, protection, flags, fd, 0)
            if address is None or address == ctypes.c_void_p(-1).value:
                code = ctypes.get_errno()
                raise OSError(code, os.strerror(code), str(folder / parts[0].path))
            return int(address)

        # Room for all of it first (nobody may touch it, so it costs nothing), then each file over its place in there.
        size, start = sum(part.size for part in parts), parts[0].start
        base = mapped(None, size, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
        self._memory = (ctypes.c_ubyte * size).from_address(base)
        weakref.finalize(self._memory, libc.munmap, base, size)
        for part in parts:
            fd = _open(folder, part)
            try:
                mapped(base + part.start - start, part.size, mmap.PROT_READ, mmap.MAP_SHARED | _MAP_FIXED, fd)
            finally:
                os.close(fd)
        self._madvise = libc.madvise

    def view(self) -> memoryview:
        return memoryview(self._memory).cast("B").toreadonly()

    def advise(self, use: Use) -> None:
        for advice in ADVICE[use]:  # hints: a kernel that does not know one says so, in vain
            self._madvise(ctypes.addressof(self._memory), len(self._memory), getattr(mmap, advice))


def _open(folder: Path, file: RepoFile) -> int:
    """A descriptor of a file whose size is right: whoever reads a mapping that is longer than its file is killed."""
    fd = os.open(folder / file.path, os.O_RDONLY | os.O_CLOEXEC)
    if (found := os.fstat(fd).st_size) != file.size:
        os.close(fd)
        raise UserError(f"{folder / file.path}: expected {file.size} bytes, found {found}; pull it again")
    return fd
