"""Zips with any fields, and what must hold whatever bytes an artifact has: for test_hostile.py and tests/fuzz/."""

from __future__ import annotations

import shutil
import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from artifacts import FILES, digests, manifest

from mkpack.artifact import extract, open_artifact
from mkpack.errors import UserError
from mkpack.manifest import MANIFEST_NAME, SIGNATURE_NAME

MANIFEST = manifest(digests(FILES)).to_bytes()
LONGEST = 20_000  # characters of an error; a hostile file may have more to say than anybody reads


@dataclass
class Member:
    """One entry of a zip, whose local header and directory record may say anything. None: what is true."""

    name: bytes
    data: bytes
    align: int = 64
    local: dict[str, int | bytes] = field(default_factory=dict)
    central: dict[str, int | bytes] = field(default_factory=dict)


@dataclass
class End:
    """The end records; what is None is true."""

    count: int | None = None
    length: int | None = None
    start: int | None = None
    zip64: bool = False
    tail: bytes = b""


def members(files: dict[str, bytes] | None = None) -> list[Member]:
    """The entries of a good artifact, in the order they are written."""
    files = {**(FILES if files is None else files), MANIFEST_NAME: MANIFEST}
    order = sorted(files, key=lambda n: (n == MANIFEST_NAME, n.startswith("weights/"), n))
    return [Member(n.encode(), files[n], 4096 if n.startswith("weights/") else 64) for n in order]


def make_zip(entries: Sequence[Member], end: End | None = None) -> bytes:
    """The bytes of a zip of these members, written without any check."""
    out, records, end = bytearray(), [], end or End()
    for m in entries:
        start, size, crc = len(out), len(m.data), zlib.crc32(m.data)
        true = {"flags": 0, "method": 0, "crc": crc, "packed": size, "size": size, "name": m.name, "start": start}
        head, record = true | m.local, true | {"attributes": 0o100644 << 16, "extra": b""} | m.central
        name = _bytes(head["name"])
        padding = -(start + 30 + len(name) + 6) % m.align
        extra = _bytes(head.get("extra", struct.pack("<HHH", 0xD935, 2 + padding, m.align) + bytes(padding)))
        out += struct.pack("<4sHHHHH", b"PK\3\4", 10, _u(head["flags"], 2), _u(head["method"], 2), 0, 0x21)
        out += struct.pack("<III", _u(head["crc"], 4), _u(head["packed"], 4), _u(head["size"], 4))
        out += struct.pack("<HH", len(name), len(extra)) + name + extra + m.data
        name, extra = _bytes(record["name"]), _bytes(record["extra"])
        records.append(
            struct.pack("<4sHHHHHH", b"PK\1\2", 0x30A, 10, _u(record["flags"], 2), _u(record["method"], 2), 0, 0x21)
            + struct.pack("<III", _u(record["crc"], 4), _u(record["packed"], 4), _u(record["size"], 4))
            + struct.pack("<HHHHH", len(name), len(extra), 0, 0, 0)
            + struct.pack("<II", _u(record["attributes"], 4), _u(record["start"], 4))
            + name
            + extra
        )
    directory, start = b"".join(records), len(out)
    out += directory
    count = len(entries) if end.count is None else end.count
    length = len(directory) if end.length is None else end.length
    start = start if end.start is None else end.start
    if end.zip64:
        at = len(out)
        wide = struct.pack("<QQQQ", *(_u(n, 8) for n in (count, count, length, start)))
        out += struct.pack("<4sQHHII", b"PK\6\6", 44, 45, 45, 0, 0) + wide
        out += struct.pack("<4sIQI", b"PK\6\7", 0, at, 1)
    short = (_u(count, 2), _u(count, 2), _u(length, 4), _u(start, 4))
    return bytes(out + struct.pack("<4sHHHHIIH", b"PK\5\6", 0, 0, *short, 0) + end.tail)


def _u(value: int | bytes, width: int) -> int:
    return int(value) % (1 << 8 * width) if isinstance(value, int) else 0


def _bytes(value: int | bytes) -> bytes:
    return value[:0xFFFF] if isinstance(value, bytes) else b""


def survives(folder: Path, write: Callable[[Path], object]) -> bool:
    """Opens, checks and unpacks what `write` put at a path, and says whether all of it went through.

    Whatever it is: the end is a UserError of bounded length, or an artifact whose bytes have the digests of its
    manifest, and nothing but the folder it was unpacked to is new.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    path, out = folder / "artifact", folder / "unpacked"
    write(path)
    before = everything(folder)
    try:
        with open_artifact(path) as artifact:
            for name in artifact.manifest.entries:
                assert len(artifact.map(name)) == artifact.manifest.entries[name].size
            damaged = artifact.verify(threads=1)
            if damaged:
                artifact.verify_async(threads=1).result()
        extract(path, out)
    except UserError as e:
        assert len(str(e)) < LONGEST and str(e).replace("\n", "").isprintable()
        assert everything(folder) == before
        return False
    finally:
        assert {p.name for p in folder.iterdir()} <= {"artifact", "unpacked"}
    listed = {str(p.relative_to(out)) for p in out.rglob("*") if not p.is_dir()}
    assert listed == {*artifact.manifest.entries, MANIFEST_NAME} and SIGNATURE_NAME not in listed
    assert not any(p.is_symlink() for p in out.rglob("*"))
    with open_artifact(out) as unpacked:
        assert not unpacked.verify(threads=1) and unpacked.digest == artifact.digest
    return True


def everything(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*"))
