"""The two homes of an artifact's entries, a zip and a folder, as read-only memory. Both offer the same few things:

sizes (sound entries), names (every entry seen), problems, view, advise, check_manifest, close.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import zlib
from pathlib import Path
from typing import Literal

from mkpack.container import MAX_ENTRIES, names_problems, read_zip
from mkpack.errors import UserError
from mkpack.manifest import MANIFEST_NAME, MAX_NAME, SIGNATURE_NAME, name_problem, shown

# What becomes of an entry's memory: read again and again; read once from one end to the other; not needed now, so that
# it need not count as this process's (it is read again from the file when somebody looks).
Use = Literal["stay", "pass", "drop"]
ADVICE: dict[Use, tuple[str, ...]] = {
    "stay": ("MADV_HUGEPAGE", "MADV_WILLNEED"),
    "pass": ("MADV_SEQUENTIAL",),
    "drop": ("MADV_DONTNEED",),
}


class ZipStore:
    """Entries of a zip: one read-only mapping of the whole file, so that aligned entries have aligned addresses."""

    def __init__(self, path: Path) -> None:
        with open(path, "rb") as file:
            if os.fstat(file.fileno()).st_size == 0:
                raise UserError("not a zip: the file is empty")
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            try:
                found = read_zip(file, self._map)
            except BaseException:
                self._map.close()
                raise
        self._members, self.names, self.problems = found.members, found.names, found.problems
        self.sizes = {m.name: m.size for m in self._members.values()}

    def view(self, name: str) -> memoryview:
        member = self._members[name]
        return memoryview(self._map)[member.offset : member.offset + member.size]

    def check_manifest(self, data: bytes) -> None:
        # The manifest cannot hold its own digest; in a zip a damaged one still shows.
        if zlib.crc32(data) != self._members[MANIFEST_NAME].crc:
            raise UserError(f"{MANIFEST_NAME} is damaged (CRC-32 differs); copy or download the file again")

    def advise(self, name: str, use: Use) -> None:
        member = self._members[name]
        start = member.offset - member.offset % mmap.PAGESIZE
        _advise(self._map, start, member.offset + member.size - start, use)

    def close(self) -> None:
        _close(self._map)


class FolderStore:
    """Entries of an unpacked folder, each mapped when it is first asked for."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.sizes: dict[str, int] = {}
        self.names: set[str] = set()
        self.problems: list[str] = []
        self._maps: dict[str, mmap.mmap] = {}
        self._seen = 0
        if not os.path.lexists(path / MANIFEST_NAME):
            source = "; it is a checkpoint: name it in a recipe and build that" * (path / "config.json").is_file()
            raise UserError(f"a folder without {MANIFEST_NAME}{source}")
        self._scan(path, "")
        self.problems += names_problems(self.sizes)

    def _scan(self, folder: Path, prefix: str) -> None:
        with os.scandir(folder) as found:
            for item in sorted(found, key=lambda f: f.name):
                name = prefix + item.name
                # No entries: downloads and desktops leave such files; the signature is read by sign.py alone.
                if item.name.startswith(".") or name == SIGNATURE_NAME:
                    continue
                self._seen += 1
                if self._seen > MAX_ENTRIES:
                    raise UserError(f"more than {MAX_ENTRIES} files and folders")
                if not item.is_dir(follow_symlinks=False):
                    self.names.add(name)
                if len(name) > MAX_NAME:
                    self.problems.append(name_problem(name) or name)
                elif item.is_symlink():
                    self.problems.append(f"{shown(name)}: symbolic link, expected the file itself")
                elif item.is_dir():
                    self._scan(folder / item.name, name + "/")
                elif item.is_file():
                    self.sizes[name] = item.stat(follow_symlinks=False).st_size
                else:
                    self.problems.append(f"{shown(name)}: not a plain file")

    def view(self, name: str) -> memoryview:
        if self.sizes[name] == 0:
            return memoryview(b"")
        if name not in self._maps:
            fd = os.open(self._path / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                if os.fstat(fd).st_size != self.sizes[name]:
                    raise UserError(f"{self._path / name}: changed its size after it was opened")
                self._maps[name] = mmap.mmap(fd, self.sizes[name], access=mmap.ACCESS_READ)
            finally:
                os.close(fd)
        return memoryview(self._maps[name])

    def check_manifest(self, data: bytes) -> None:
        """A folder keeps no checksum beside its manifest."""

    def advise(self, name: str, use: Use) -> None:
        if name in self._maps:
            _advise(self._maps[name], 0, self.sizes[name], use)

    def close(self) -> None:
        for mapped in self._maps.values():
            _close(mapped)


def _close(mapped: mmap.mmap) -> None:
    # With views still in use the mapping lives on until the last of them goes.
    with contextlib.suppress(BufferError):
        mapped.close()


def _advise(mapped: mmap.mmap, start: int, length: int, use: Use) -> None:
    for advice in ADVICE[use]:  # hints: a kernel may not know them
        if hasattr(mmap, advice):
            with contextlib.suppress(OSError):
                mapped.madvise(getattr(mmap, advice), start, length)


def address(view: memoryview) -> int:
    """Address of a read-only buffer.

    ctypes' own from_buffer wants a writable one, and a writable private mapping would count against the commit limit
    and let a stray write of native code pass unseen.
    """
    import ctypes

    class PyBuffer(ctypes.Structure):  # Py_buffer of Python's C API
        _fields_ = [
            ("buf", ctypes.c_void_p),
            ("obj", ctypes.c_void_p),
            ("len", ctypes.c_ssize_t),
            ("itemsize", ctypes.c_ssize_t),
            ("readonly", ctypes.c_int),
            ("ndim", ctypes.c_int),
            ("format", ctypes.c_char_p),
            ("shape", ctypes.c_void_p),
            ("strides", ctypes.c_void_p),
            ("suboffsets", ctypes.c_void_p),
            ("internal", ctypes.c_void_p),
        ]

    buffer = PyBuffer()
    ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(view), ctypes.byref(buffer), 0)
    try:
        return buffer.buf or 0
    finally:
        ctypes.pythonapi.PyBuffer_Release(ctypes.byref(buffer))
