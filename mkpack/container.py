"""The bytes of an artifact file: a zip of stored, aligned entries. Knows zip, nothing of what the entries mean.

Written by hand because zipfile can neither align data nor promise equal bytes over Python versions. Read with zipfile
for the central directory; every local header is then held against it here, since readers that trust one or the other
would see different files.
"""

from __future__ import annotations

import mmap
import stat
import struct
import zipfile
import zlib
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import BinaryIO

from mkpack.errors import UserError
from mkpack.manifest import CHUNK, WEIGHTS_ALIGNMENT, name_problem

BLOCKS_AHEAD = 4  # of a large entry that one thread may be ahead of another
ALIGNMENT = 64  # of entries outside weights/
MAX_ENTRIES = 10_000
MAX_DIRECTORY = 16 << 20  # bytes of the central directory; MAX_ENTRIES of MAX_NAME need less
ZIP64_LIMIT = 0xFFFF_FFFF  # sizes and offsets from here on need 64-bit fields

_LOCAL = struct.Struct("<4sHHHHHIIIHH")
_CENTRAL = struct.Struct("<4sHHHHHHIIIHHHHHII")
_END = struct.Struct("<4sHHHHIIH")
_END64 = struct.Struct("<4sQHHIIQQQQ")
_LOCATOR64 = struct.Struct("<4sIQI")
_CRC_AT = 14  # offset of the CRC-32 in a local header
_UTF8 = 0x800
_DATE = 0x0021  # 1980-01-01, the first date zip can say
_MODE = (stat.S_IFREG | 0o644) << 16
_PAD_ID = 0xD935  # extra field that holds alignment and padding, as Android's packages do
_ZIP64_ID = 1


@dataclass(frozen=True)
class Member:
    """One entry of a zip: its data is bytes [offset, offset + size) of the file."""

    name: str
    offset: int
    size: int
    crc: int


@dataclass(frozen=True)
class Directory:
    """What a zip holds: sound entries, the names of all entries, and what is wrong with the others."""

    members: dict[str, Member]
    names: set[str]
    problems: list[str]


def alignment(name: str) -> int:
    """Bytes that the data of an entry is aligned to."""
    return WEIGHTS_ALIGNMENT if name.startswith("weights/") else ALIGNMENT


def names_problems(names: Iterable[str]) -> Iterator[str]:
    """What keeps `names` from being the entries of one artifact, on any file system."""
    seen: set[str] = set()
    folders: set[str] = set()
    for name in names:
        if problem := name_problem(name):
            yield problem
            continue
        if name.lower() in seen:
            yield f"{name}: duplicate name"
        seen.add(name.lower())
        parts = name.lower().split("/")
        folders.update("/".join(parts[:i]) for i in range(1, len(parts)))
    for name in sorted(seen & folders):
        yield f"{name}: is both a file and a folder"


class _Crc:
    """The CRC-32 of blocks, of a large entry in a thread of its own beside their writing; whole when `with` ends."""

    def __init__(self, size: int) -> None:
        self.value = 0
        self._pool = ThreadPoolExecutor(1) if size > CHUNK else None
        self._under_way: deque[Future[None]] = deque()

    def add(self, block: bytes | memoryview) -> None:
        if self._pool is None:
            self._take(block)
            return
        self._under_way.append(self._pool.submit(self._take, block))
        while len(self._under_way) > BLOCKS_AHEAD:
            self._under_way.popleft().result()

    def _take(self, block: bytes | memoryview) -> None:
        self.value = zlib.crc32(block, self.value)

    def __enter__(self) -> _Crc:
        return self

    def __exit__(self, failed: object, *_: object) -> None:
        if self._pool:
            self._pool.shutdown()
        if failed is None:
            for taken in self._under_way:
                taken.result()


class ZipWriter:
    """Appends entries to `out`, a new seekable binary file. Equal calls give equal bytes."""

    def __init__(self, out: BinaryIO) -> None:
        self._out = out
        self._at = 0
        self._central: list[bytes] = []

    def add(self, name: str, size: int, blocks: Iterable[bytes | memoryview]) -> None:
        """Appends an entry of exactly `size` bytes. UserError when `blocks` holds more or fewer."""
        start, encoded, big = self._at, name.encode("ascii"), size >= ZIP64_LIMIT
        extra = struct.pack("<HHQQ", _ZIP64_ID, 16, size, size) if big else b""
        align = alignment(name)
        padding = -(start + _LOCAL.size + len(encoded) + len(extra) + 6) % align
        extra += struct.pack("<HHH", _PAD_ID, 2 + padding, align) + bytes(padding)
        short, version = (0xFFFF_FFFF if big else size), (45 if big else 10)
        head = _LOCAL.pack(b"PK\3\4", version, 0, 0, 0, _DATE, 0, short, short, len(encoded), len(extra))
        self._write(head + encoded + extra)
        data_at = self._at
        with _Crc(size) as crc:
            for block in blocks:
                crc.add(block)
                self._write(block)
        if self._at - data_at != size:
            raise UserError(
                f"{name}: {size} bytes when the packing began, {self._at - data_at} when it was read; "
                "something else writes to it"
            )
        self._out.seek(start + _CRC_AT)
        self._out.write(struct.pack("<I", crc.value))
        self._out.seek(self._at)
        self._central.append(self._central_record(encoded, crc.value, size, start))

    def finish(self) -> None:
        """Writes the central directory and the end records."""
        start, records = self._at, b"".join(self._central)
        self._write(records)
        count, length = len(self._central), len(records)
        if start >= ZIP64_LIMIT:
            end64 = self._at
            self._write(_END64.pack(b"PK\6\6", _END64.size - 12, 3 << 8 | 45, 45, 0, 0, count, count, length, start))
            self._write(_LOCATOR64.pack(b"PK\6\7", 0, end64, 1))
            start = 0xFFFF_FFFF
        self._write(_END.pack(b"PK\5\6", 0, 0, count, count, length, start, 0))

    def _central_record(self, name: bytes, crc: int, size: int, start: int) -> bytes:
        wide = [size, size] if size >= ZIP64_LIMIT else []
        wide += [start] if start >= ZIP64_LIMIT else []
        extra = struct.pack(f"<HH{len(wide)}Q", _ZIP64_ID, 8 * len(wide), *wide) if wide else b""
        size = 0xFFFF_FFFF if size >= ZIP64_LIMIT else size
        start = 0xFFFF_FFFF if start >= ZIP64_LIMIT else start
        made_by, version = 3 << 8 | 45, 45 if wide else 10
        record = (b"PK\1\2", made_by, version, 0, 0, 0, _DATE, crc, size, size, len(name), len(extra), 0, 0, 0)
        return _CENTRAL.pack(*record, _MODE, start) + name + extra

    def _write(self, data: bytes | memoryview) -> None:
        self._out.write(data)
        self._at += len(data)


def read_zip(file: BinaryIO, data: mmap.mmap) -> Directory:
    """Reads and checks the directory and every local header of a zip. UserError when there is no sound directory.

    `data` maps the whole of `file`. Never reads entry data, and no more of the file than its headers.
    """
    directory_at = _check_end(data)
    try:
        infos = zipfile.ZipFile(file).infolist()
    except Exception as e:  # zipfile lets struct, codec and arithmetic errors through
        raise UserError(f"damaged zip directory: {ascii(str(e))}") from e
    if len(infos) > MAX_ENTRIES:
        raise UserError(f"{len(infos)} entries, at most {MAX_ENTRIES} are allowed")
    problems = list(names_problems(i.orig_filename for i in infos))
    members: dict[str, Member] = {}
    spans: list[tuple[int, int, str]] = []
    for info in infos:
        name = info.orig_filename
        if name_problem(name) or name in members:
            continue
        member, wrong = _check_member(data, info, directory_at)
        problems += [f"{name}: {w}" for w in wrong]
        if member:
            members[name] = member
            spans.append((info.header_offset, member.offset + member.size, name))
    spans.sort()
    for (_, end, a), (start, _, b) in zip(spans, spans[1:], strict=False):
        if start < end:
            problems.append(f"{a} and {b} overlap")
    return Directory(members, {i.orig_filename for i in infos}, problems)


def _check_end(data: mmap.mmap) -> int:
    """Offset of the central directory, from end records that must close the file exactly."""
    size = len(data)
    if size < _END.size:
        raise UserError(f"not a zip: {size} bytes")
    mark, disk, cd_disk, here, count, length, start, comment = _END.unpack_from(data, size - _END.size)
    if mark != b"PK\5\6" or comment:
        raise UserError("not a zip, or cut short: no end record in its last bytes; copy or download it again")
    end = size - _END.size
    locator = end - _LOCATOR64.size
    if locator >= 0 and data[locator : locator + 4] == b"PK\6\7":
        _, _, end, disks = _LOCATOR64.unpack_from(data, locator)
        if disks != 1 or end != locator - _END64.size or data[end : end + 4] != b"PK\6\6":
            raise UserError("damaged zip: the 64-bit end record is not where it should be")
        _, rest, _, _, disk, cd_disk, here, count, length, start = _END64.unpack_from(data, end)
        if rest != _END64.size - 12:
            raise UserError("damaged zip: the 64-bit end record has a wrong size")
    if disk or cd_disk or here != count or start + length != end:
        raise UserError("damaged zip: the end record and the directory do not fit; copy or download it again")
    if count > MAX_ENTRIES or length > MAX_DIRECTORY:
        raise UserError(
            f"{count} entries in {length} bytes of directory, at most {MAX_ENTRIES} in {MAX_DIRECTORY} are allowed"
        )
    return start


def _check_member(data: mmap.mmap, info: zipfile.ZipInfo, directory_at: int) -> tuple[Member | None, list[str]]:
    wrong: list[str] = []
    if info.flag_bits & 0x1:
        wrong.append("encrypted")
    elif info.flag_bits & ~_UTF8:
        wrong.append(f"zip flags {info.flag_bits:#x} are not allowed (streamed, patched or masked entry)")
    if info.compress_type != zipfile.ZIP_STORED:
        wrong.append(f"compressed (method {info.compress_type}), expected stored; unpack the file and use the folder")
    elif info.compress_size != info.file_size:
        wrong.append(f"stored with {info.compress_size} bytes but {info.file_size} bytes long")
    if stat.S_IFMT(info.external_attr >> 16) not in (0, stat.S_IFREG):
        wrong.append("not a plain file (symbolic link, folder or device)")
    if info.filename != info.orig_filename:
        wrong.append(f"has a second name {ascii(info.filename)}")
    start = info.header_offset
    if not 0 <= start <= directory_at - _LOCAL.size:
        return None, [*wrong, f"header at byte {start} is outside the file"]
    mark, _, flags, method, _, _, crc, packed, size, n, m = _LOCAL.unpack_from(data, start)
    name_at = start + _LOCAL.size
    offset = name_at + n + m
    if mark != b"PK\3\4":
        return None, [*wrong, f"no header at byte {start}"]
    if offset + info.file_size > directory_at:
        return None, [*wrong, f"data at byte {offset}, {info.file_size} bytes long, is outside the file"]
    if size == 0xFFFF_FFFF or packed == 0xFFFF_FFFF:
        size, packed = _zip64_sizes(bytes(data[name_at + n : offset]))
    local = (bytes(data[name_at : name_at + n]), flags, method, crc, packed, size)
    central = (
        info.orig_filename.encode(),
        info.flag_bits,
        info.compress_type,
        info.CRC,
        info.compress_size,
        info.file_size,
    )
    if local != central:
        wrong.append("its header and the directory disagree about name, flags, method, CRC or size")
    if offset % alignment(info.orig_filename):
        wrong.append(
            f"data at byte {offset} is not aligned to {alignment(info.orig_filename)}; unpack the file and "
            "use the folder"
        )
    return (None if wrong else Member(info.orig_filename, offset, info.file_size, info.CRC)), wrong


def _zip64_sizes(extra: bytes) -> tuple[int, int]:
    """(size, packed size) of the zip64 extra field of a local header, (-1, -1) when there is none."""
    while len(extra) >= 4:
        kind, length = struct.unpack_from("<HH", extra)
        if kind == _ZIP64_ID and length >= 16 and len(extra) >= 20:
            size, packed = struct.unpack_from("<QQ", extra, 4)
            return size, packed
        extra = extra[4 + length :]
    return -1, -1
