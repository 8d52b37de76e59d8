"""Hostile and damaged artifacts, as files and as folders: one UserError that lists everything, or a failed check."""

from __future__ import annotations

import os
import stat
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from artifacts import FILES, digests, manifest, refused, write
from hypothesis import given, settings
from hypothesis import strategies as st

from mkpack import artifact as artifact_module
from mkpack import container
from mkpack.artifact import extract, open_artifact
from mkpack.container import ZipWriter
from mkpack.errors import UserError
from mkpack.manifest import MANIFEST_NAME

# Offsets of fields in a local header and in a record of the central directory.
LOCAL = {"flags": 6, "method": 8, "crc": 14, "packed": 18, "size": 22, "name": 30}
CENTRAL = {"flags": 8, "method": 10, "crc": 16, "packed": 20, "size": 24, "attributes": 38, "start": 42, "name": 46}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write(tmp_path / "tiny.mkpack")


@pytest.fixture(params=["file", "folder"])
def either(request: pytest.FixtureRequest, path: Path) -> Path:
    """The same artifact as a file and as its unpacked folder."""
    if request.param == "file":
        return path
    extract(path, path.parent / "tiny")
    return path.parent / "tiny"


def craft(path: Path, files: list[tuple[str, bytes]]) -> Path:
    """A zip of any names, with the manifest of FILES."""
    with open(path, "wb") as out:
        writer = ZipWriter(out)
        for name, data in [*files, (MANIFEST_NAME, manifest(digests(FILES)).to_bytes())]:
            writer.add(name, len(data), [data])
        writer.finish()
    return path


def patch(path: Path, name: str, field: str, value: bytes, local: bool = True, central: bool = True) -> None:
    """Overwrites a field of an entry in its local header and in the directory."""
    data = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as z:
        record, start = z.start_dir, z.getinfo(name).header_offset
    while data[record + 46 : record + 46 + len(name)] != name.encode():
        record += 46 + sum(struct.unpack_from("<HHH", data, record + 28))
    places = [start + LOCAL[field]] if local and field in LOCAL else []
    places += [record + CENTRAL[field]] if central else []
    for at in places:
        data[at : at + len(value)] = value
    path.write_bytes(data)


def u16(value: int) -> bytes:
    return struct.pack("<H", value)


def u32(value: int) -> bytes:
    return struct.pack("<I", value)


W = "weights/rank-0.bin"
PATCHES: list[tuple[str, Callable[[Path], None], str]] = [
    ("encrypted", lambda p: patch(p, W, "flags", u16(1)), f"{W}: encrypted"),
    ("streamed", lambda p: patch(p, W, "flags", u16(8)), f"{W}: zip flags 0x8"),
    ("compressed", lambda p: patch(p, W, "method", u16(8)), f"{W}: compressed (method 8)"),
    ("symlink", lambda p: patch(p, W, "attributes", u32((stat.S_IFLNK | 0o777) << 16)), f"{W}: not a plain file"),
    ("packed", lambda p: patch(p, W, "packed", u32(4096)), f"{W}: stored with 4096 bytes but 12288"),
    ("local flags", lambda p: patch(p, W, "flags", u16(1), central=False), f"{W}: its header and the directory"),
    ("local method", lambda p: patch(p, W, "method", u16(8), central=False), f"{W}: its header and the directory"),
    ("local size", lambda p: patch(p, W, "size", u32(4096), central=False), f"{W}: its header and the directory"),
    (
        "local zip64",
        lambda p: patch(p, W, "size", u32(0xFFFFFFFF), central=False),
        f"{W}: its header and the directory",
    ),
    ("local crc", lambda p: patch(p, W, "crc", u32(1), central=False), f"{W}: its header and the directory"),
    ("local name", lambda p: patch(p, W, "name", b"W", central=False), f"{W}: its header and the directory"),
    ("no header", lambda p: patch(p, W, "start", u32(1)), f"{W}: no header at byte 1"),
    ("far header", lambda p: patch(p, W, "start", u32(1 << 31)), "is outside the file"),
    ("manifest", lambda p: patch(p, MANIFEST_NAME, "crc", u32(1)), "manifest.json is damaged (CRC-32"),
]


@pytest.mark.parametrize(("change", "text"), [p[1:] for p in PATCHES], ids=[p[0] for p in PATCHES])
def test_patched_headers(path: Path, change: Callable[[Path], None], text: str) -> None:
    change(path)
    assert "missing" not in refused(path, text)


def test_too_large_entry(path: Path) -> None:
    for field in ("packed", "size"):
        patch(path, W, field, u32(1 << 30))
    refused(path, f"{W}: data at byte 4096, 1073741824 bytes long, is outside the file")


def test_overlap(path: Path) -> None:
    with zipfile.ZipFile(path) as z:
        second = z.getinfo("weights/rank-1.bin").header_offset
        first = z.getinfo(W).header_offset
    data = bytearray(path.read_bytes())
    size = 12288 + 4096 + second - first  # reaches over the next header
    data[first + LOCAL["size"] : first + LOCAL["size"] + 4] = u32(size)
    path.write_bytes(data)
    patch(path, W, "packed", u32(size))
    patch(path, W, "size", u32(size))
    refused(path, "weights/rank-0.bin and weights/rank-1.bin overlap", f"{W}: expected 12288 bytes, found {size}")


def test_shared_header(path: Path) -> None:
    """Two entries of equal length that point at the same bytes: the names disagree."""
    with zipfile.ZipFile(path) as z:
        start = z.getinfo("weights/rank-1.bin").header_offset
    patch(path, W, "start", u32(start))
    refused(path, f"{W}: its header and the directory disagree")


@pytest.mark.parametrize(
    "name", ["../up", "a/../../up", "/etc/passwd", "C:\\x", "a\\b", "a//b", "folder/", ".hidden", "a/.b", "nul\0l", "é"]
)
def test_names(tmp_path: Path, name: str) -> None:
    path = craft(tmp_path / "x.mkpack", [*FILES.items(), ("N" * len(name.encode()), b"")])
    data = path.read_bytes().replace(b"N" * len(name.encode()), name.encode())
    path.write_bytes(data)
    refused(path, "is not a plain relative path")


def test_long_and_doubled_names(tmp_path: Path) -> None:
    extra = [("a" * 300, b""), ("recipe.yaml", b"other"), ("Empty.txt", b""), ("recipe.yaml/x", b"")]
    text = refused(craft(tmp_path / "x.mkpack", [*FILES.items(), *extra]), "name of 300 characters", "both a file and")
    assert text.count("duplicate name") == 2


def test_every_difference_in_one_message(either: Path) -> None:
    """Missing, extra and cut entries together."""
    if either.is_dir():
        (either / "recipe.yaml").unlink()
        (either / "weights/rank-1.bin").write_bytes(b"short")
        (either / "extra").touch()
    else:
        files = {n: b"short" if n.endswith("rank-1.bin") else d for n, d in FILES.items() if n != "recipe.yaml"}
        craft(either, [*files.items(), ("extra", b"")])
    texts = ["recipe.yaml: missing", "weights/rank-1.bin: expected 12288 bytes, found 5", "extra: not in the manifest"]
    refused(either, "3 problems", *texts)
    problems: list[str] = ["one of the caller"]
    with open_artifact(either, problems) as a:
        assert problems[1:] == texts
        assert a.verify() == texts[:2]
        assert a.read("LICENSE.txt") == FILES["LICENSE.txt"]
        for name in ("recipe.yaml", "weights/rank-1.bin"):
            with pytest.raises(UserError, match=f"no entry {name}"):
                a.map(name)


def test_not_an_artifact(tmp_path: Path) -> None:
    path = tmp_path / "x.mkpack"
    refused(path, "no such file")
    path.write_bytes(b"")
    refused(path, "empty")
    path.write_bytes(b"PK\3\4")
    refused(path, "not a zip")
    path.write_bytes(b"GGUF" * 100)
    refused(path, "not a zip")
    with zipfile.ZipFile(path, "w") as z:
        z.writestr("model.bin", b"x")
    refused(path, "no manifest.json")
    os.mkfifo(tmp_path / "fifo")
    refused(tmp_path / "fifo", "neither a file nor a folder")
    (tmp_path / "folder").mkdir()
    refused(tmp_path / "folder", "a folder without manifest.json")
    (tmp_path / "folder" / "config.json").write_text("{}")
    refused(tmp_path / "folder", "it is a checkpoint: name it in a recipe and build that")
    refused(Path("org/name"), "no such file or folder; if it is a repo on the hub: mkpack pull org/name downloads")
    with pytest.raises(UserError, match="not a path"):
        open_artifact("a\0b")


def test_rezipped_and_extended_files(path: Path, tmp_path: Path) -> None:
    """What another zip tool made of it is refused with the way out; trailing and leading bytes are refused."""
    other = tmp_path / "other.mkpack"
    with zipfile.ZipFile(path) as z, zipfile.ZipFile(other, "w", zipfile.ZIP_DEFLATED) as out:
        for name in z.namelist():
            out.writestr(name, z.read(name))
    refused(other, "weights/rank-0.bin: compressed (method 8)", "unpack the file and use the folder")
    with zipfile.ZipFile(path) as z, zipfile.ZipFile(other, "w") as out:
        for name in z.namelist():
            out.writestr(name, z.read(name))
    refused(other, "is not aligned to 4096; unpack the file and use the folder")
    with zipfile.ZipFile(other) as z:
        z.extractall(tmp_path / "by-hand")
    with open_artifact(tmp_path / "by-hand") as a:
        assert a.verify() == []
    for data in (path.read_bytes() + b"x", b"x" + path.read_bytes(), path.read_bytes()[:-1]):
        other.write_bytes(data)
        refused(other)


def test_absurd_counts_and_sizes(tmp_path: Path) -> None:
    path = tmp_path / "x.mkpack"
    path.write_bytes(struct.pack("<4sHHHHIIH", b"PK\5\6", 0, 0, 60000, 60000, 0, 0, 0))
    refused(path, "60000 entries")
    with open(path, "wb") as f:  # a sparse file whose whole length claims to be the directory
        f.truncate(1 << 30)
        f.seek(1 << 30)
        f.write(struct.pack("<4sHHHHIIH", b"PK\5\6", 0, 0, 1, 1, 1 << 30, 0, 0))
    refused(path, "1 entries in 1073741824 bytes of directory")
    with open(path, "wb") as out:
        writer = ZipWriter(out)
        for i in range(container.MAX_ENTRIES):
            writer.add(str(i), 0, [])
        writer.add("last", 0, [])
        writer.finish()
    refused(path, "10001 entries")
    source = tmp_path / MANIFEST_NAME
    with open(source, "wb") as f:
        f.truncate(artifact_module.MAX_MANIFEST + 1)
    refused(tmp_path, "manifest.json has 67108865 bytes")


def test_many_problems_are_cut_short(tmp_path: Path) -> None:
    path = craft(tmp_path / "x.mkpack", [*FILES.items(), *((f"extra-{i}", b"") for i in range(100))])
    assert len(refused(path, "and 80 more").splitlines()) == 22


def test_hostile_folders(path: Path, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    extract(path, folder)
    (folder / ".cache").mkdir()
    (folder / ".cache" / "left by a download").touch()
    with open_artifact(folder) as a:
        assert a.verify() == []
    (folder / "recipe.yaml").unlink()
    (folder / "recipe.yaml").symlink_to("/etc/passwd")
    (folder / "tokenizer" / "up").symlink_to(tmp_path)
    os.mkfifo(folder / "fifo")
    deep = folder
    for _ in range(120):
        deep = deep / "dd"
        deep.mkdir()
    text = refused(folder, "recipe.yaml: symbolic link", "tokenizer/up: symbolic link", "fifo: not a plain file")
    assert "recipe.yaml: missing" not in text and "name of 2" in text


def test_a_folder_that_changes_after_opening(path: Path, tmp_path: Path) -> None:
    extract(path, tmp_path / "folder")
    with open_artifact(tmp_path / "folder") as a:
        (tmp_path / "folder" / "recipe.yaml").write_bytes(b"longer than before")
        with pytest.raises(UserError, match="changed its size"):
            a.read("recipe.yaml")


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    path = write(tmp_path_factory.mktemp("fuzz") / "small.mkpack")
    return path, path.read_bytes()


@given(st.data())
@settings(max_examples=300)
def test_random_damage(small: tuple[Path, bytes], data: st.DataObject) -> None:
    """Bit flips, cuts, insertions: a UserError, or a failed check, or every entry still has its bytes."""
    path, good = small
    bad = bytearray(good)
    headers = good.rindex(b"weights/rank-1.bin", 0, good.index(b"PK\1\2"))  # where the headers are dense
    for _ in range(data.draw(st.integers(1, 3))):
        low = data.draw(st.sampled_from([0, headers, good.index(b"PK\1\2"), len(good) - 60]))
        at = data.draw(st.integers(min(low, len(bad) - 1), len(bad) - 1))
        kind = data.draw(st.sampled_from(["flip", "set", "cut", "insert", "drop"]))
        if kind == "flip":
            bad[at] ^= 1 << data.draw(st.integers(0, 7))
        elif kind == "set":
            bad[at : at + 4] = data.draw(st.binary(min_size=4, max_size=4))
        elif kind == "cut":
            del bad[max(at, 1) :]
        elif kind == "insert":
            bad[at:at] = data.draw(st.binary(min_size=1, max_size=8))
        else:
            del bad[at : at + data.draw(st.integers(1, 64))]
        bad = bad or bytearray(b"x")
    path.write_bytes(bad)
    try:
        with open_artifact(path) as a:
            if a.verify(threads=1) == []:
                assert {name: bytes(a.map(name)) for name in a.manifest.entries} == FILES
                assert a.manifest == manifest(digests(FILES))
    except UserError:
        pass
