"""The artifact file: round trips, equal bytes, atomic writes, locks, and hostile input."""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import shutil
import signal
import stat
import struct
import subprocess
import sys
import textwrap
import threading
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from artifacts import FILES, manifest, write
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mkpack import artifact as artifact_module
from mkpack import container
from mkpack.artifact import build_lock, clean_temporaries, extract, open_artifact, write_artifact
from mkpack.container import ZipWriter
from mkpack.digest import Digester
from mkpack.errors import InternalError, UserError
from mkpack.manifest import CHUNK, MANIFEST_NAME, Entry

ROOT = Path(__file__).resolve().parent.parent
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


def digests(files: dict[str, bytes]) -> dict[str, Entry]:
    entries = {}
    for name, data in files.items():
        digester = Digester(len(data))
        list(digester.through([data]))
        entries[name] = digester.entry()
    return entries


def refused(path: Path, *texts: str) -> str:
    with pytest.raises(UserError) as e:
        open_artifact(path)
    for text in (path.name, *texts):
        assert text in str(e.value)
    return str(e.value)


def left_in(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


# -- what is written is what is read ------------------------------------------------------------------------------


def test_round_trip(either: Path) -> None:
    with open_artifact(either) as a:
        assert a.manifest == manifest(digests(FILES))
        assert a.verify() == [] and a.verify(full=True, threads=3) == []
        for name, data in FILES.items():
            assert a.read(name) == data and a.map(name) == data and a.map(name).readonly
        assert a.read(MANIFEST_NAME) == a.manifest.to_bytes()


def test_file_and_folder_have_the_same_digest(path: Path, tmp_path: Path) -> None:
    extract(path, tmp_path / "unpacked")
    with open_artifact(path) as a, open_artifact(tmp_path / "unpacked") as b:
        assert a.digest == b.digest


def test_addresses_are_aligned_and_hold_the_bytes(either: Path) -> None:
    with open_artifact(either) as a:
        for name in ("weights/rank-0.bin", "weights/rank-1.bin", "kernels/x86-64-v3.so"):
            address = a.address(name)
            assert address % (4096 if name.startswith("weights/") else 64) == 0
            assert ctypes.string_at(address, len(FILES[name])) == FILES[name]


def test_a_view_survives_close(either: Path) -> None:
    with open_artifact(either) as a:
        view = a.map("weights/rank-0.bin")
    assert view == FILES["weights/rank-0.bin"]


def test_unknown_entry_names_the_nearest(path: Path) -> None:
    with open_artifact(path) as a, pytest.raises(UserError, match='did you mean "recipe.yaml"'):
        a.read("recipe.yml")


def test_equal_input_gives_equal_bytes(path: Path, tmp_path: Path) -> None:
    source = tmp_path / "blob"
    source.write_bytes(FILES["weights/rank-1.bin"])
    os.utime(source, (1, 1))
    source.chmod(0o600)
    entries: list[tuple[str, Path | bytes]] = list(reversed(FILES.items()))
    entries = [(name, source if name == "weights/rank-1.bin" else data) for name, data in entries]
    write_artifact(tmp_path / "again.mkpack", entries, manifest)
    assert (tmp_path / "again.mkpack").read_bytes() == path.read_bytes()


def test_zip_rules(path: Path) -> None:
    data = path.read_bytes()
    with zipfile.ZipFile(path) as z:
        assert z.testzip() is None
        assert z.namelist()[-1] == MANIFEST_NAME
        for info in z.infolist():
            name, extra = struct.unpack_from("<HH", data, info.header_offset + 26)
            offset = info.header_offset + 30 + name + extra
            assert offset % (4096 if info.filename.startswith("weights/") else 64) == 0
            assert info.compress_type == zipfile.ZIP_STORED
            assert info.date_time == (1980, 1, 1, 0, 0, 0)
            assert info.external_attr >> 16 == stat.S_IFREG | 0o644
            if info.filename in FILES:
                assert data[offset : offset + info.file_size] == FILES[info.filename]


def unzips(path: Path) -> None:
    """Python's zipfile and, where there is one, the unzip tool accept every byte."""
    with zipfile.ZipFile(path) as z:
        assert z.testzip() is None
        assert {n: z.read(n) for n in z.namelist() if n in FILES} == FILES
    if tool := shutil.which("unzip"):
        run = subprocess.run([tool, "-t", path], capture_output=True, text=True)
        assert run.returncode == 0 and "warning" not in run.stdout + run.stderr, run.stdout + run.stderr


def test_common_tools_accept_it(path: Path) -> None:
    unzips(path)


@pytest.mark.parametrize("limit", [0, 2000, 9000])  # everything, some sizes and most offsets, only the last offsets
def test_zip64(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    monkeypatch.setattr(container, "ZIP64_LIMIT", limit)
    path = write(tmp_path / "big.mkpack")
    unzips(path)
    with open_artifact(path) as a:
        assert a.verify() == []
        assert {name: a.read(name) for name in FILES} == FILES


def test_chunked_entry(tmp_path: Path) -> None:
    """Damage in one chunk is found and named, by the whole digest too, and the file is read in small pieces."""
    source = tmp_path / "blob"
    size = 2 * CHUNK + 8192
    with open(source, "wb") as f:
        f.truncate(size)
        f.seek(CHUNK)
        f.write(b"x")
    path = tmp_path / "big.mkpack"
    steps: list[tuple[int, int]] = []
    write_artifact(path, [("weights/rank-0.bin", source)], manifest, progress=lambda *a: steps.append(a))
    assert steps == [(size, size)]
    with open_artifact(path) as a:
        assert len(a.manifest.entries["weights/rank-0.bin"].chunks) == 3
        seen: list[tuple[int, int]] = []
        assert a.verify(threads=2, full=True, progress=lambda *p: seen.append(p)) == []
        assert [d for d, _ in seen] == sorted(d for d, _ in seen) and seen[-1] == (2 * size, 2 * size)
    with zipfile.ZipFile(path) as z:
        at = z.getinfo("weights/rank-0.bin").header_offset + CHUNK * 2 + 8192
    with open(path, "r+b") as f:
        f.seek(at)
        f.write(b"y")
    with open_artifact(path) as a:
        for full, bad in ((False, 1), (True, 2)):
            (problem,) = a.verify(full=full)
            assert f"weights/rank-0.bin: {bad} of 3 chunks" in problem
        with pytest.raises(UserError, match="sha256"):
            a.read("weights/rank-0.bin")
        assert len(a.read("weights/rank-0.bin", verify=False)) == size


@given(st.lists(st.integers(0, 70)), st.integers(1, 32))
@settings(max_examples=50, deadline=None)
def test_digester_does_not_depend_on_the_pieces(lengths: list[int], chunk: int) -> None:
    data = bytes(i % 251 for i in range(sum(lengths)))
    pieces, at = [], 0
    for n in lengths:
        pieces.append(data[at : at + n])
        at += n
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mkpack.digest.CHUNK", chunk)
        patch.setattr("mkpack.manifest.CHUNK", chunk)
        results = []
        for blocks in (pieces, [data]):
            digester = Digester(len(data))
            assert b"".join(digester.through(blocks)) == data
            results.append(digester.entry())
    assert results[0] == results[1]
    assert len(results[0].chunks) == (-(-len(data) // chunk) if len(data) > chunk else 0)


def test_verification_in_the_background_lists_all_damage(either: Path) -> None:
    names = ["weights/rank-1.bin", "recipe.yaml"]
    for name in names:
        damage(either, name)
    with open_artifact(either) as a:
        handle = a.verify_async()
        with pytest.raises(UserError, match="2 problems") as e:
            handle.result()
        assert all(name in str(e.value) for name in names) and "rank-0" not in str(e.value)
        a.verify_async(["weights/rank-0.bin"]).result()


def test_an_interrupted_check_is_no_pass(path: Path) -> None:
    with open_artifact(path) as a:
        hold, started = threading.Event(), threading.Event()

        def progress(done: int, total: int) -> None:
            started.set()
            hold.wait(10)

        handle = a.verify_async(threads=1, progress=progress)
        started.wait(10)
        handle._tasks.clear()
        hold.set()
        assert len(handle.problems()) == len(FILES) - 1
        assert all("interrupted" in p for p in handle.problems())


def damage(path: Path, name: str) -> None:
    """Flips one bit in an entry of a file or folder."""
    if path.is_dir():
        data = bytearray((path / name).read_bytes())
        data[3] ^= 1
        (path / name).write_bytes(data)
        return
    data = bytearray(path.read_bytes())
    data[data.index(FILES[name]) + 3] ^= 1
    path.write_bytes(data)


# -- writing is all or nothing ------------------------------------------------------------------------------------


def test_nothing_is_left_when_the_manifest_fails(tmp_path: Path) -> None:
    def fails(entries: dict[str, Entry]) -> None:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError):
        write_artifact(tmp_path / "x.mkpack", list(FILES.items()), fails)  # type: ignore[arg-type]
    with pytest.raises(InternalError, match="list exactly"):
        write_artifact(
            tmp_path / "x.mkpack", list(FILES.items()), lambda e: manifest({n: v for n, v in e.items() if n[0] != "e"})
        )
    assert left_in(tmp_path) == []


def test_full_disk(path: Path, tmp_path: Path) -> None:
    """The file system refuses a byte in the middle: the old file stays, the temporary one goes."""
    before = path.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        with pytest.raises(UserError, match="cannot write .*tiny.mkpack.*free some disk space"):
            write(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_bytes() == before and left_in(tmp_path) == ["tiny.mkpack"]


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_errors_at_the_end_leave_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    def fails(*args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(artifact_module.os, call, fails)
    with pytest.raises(UserError, match="No space left on device"):
        write(tmp_path / "x.mkpack")
    assert left_in(tmp_path) == []


def test_disk_space_is_checked_first(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(artifact_module.shutil, "disk_usage", lambda p: shutil._ntuple_diskusage(9, 9, 10_000))
    for write_it in (lambda: write(tmp_path / "y.mkpack"), lambda: extract(path, tmp_path / "y")):
        with pytest.raises(UserError, match="needs 0.00 GB of disk"):
            write_it()
    assert left_in(tmp_path) == ["tiny.mkpack"]


def test_bad_names_and_sources_are_refused(tmp_path: Path) -> None:
    out = tmp_path / "x.mkpack"
    with pytest.raises(UserError, match="4 problems"):
        write_artifact(out, [("../a", b""), ("b", b""), ("B", b""), ("b/c", b""), (MANIFEST_NAME, b"")], manifest)
    with pytest.raises(UserError, match="cannot write .*No such file.*absent"):
        write_artifact(out, [("a", tmp_path / "absent")], manifest)
    with pytest.raises(UserError, match="cannot write .*No such file"):
        write(tmp_path / "absent" / "x.mkpack")
    (tmp_path / "folder.mkpack").mkdir()
    with pytest.raises(UserError, match="in the way"):
        write(tmp_path / "folder.mkpack")
    assert left_in(tmp_path) == ["folder.mkpack"]


@pytest.mark.parametrize("change", [-1, 1])
def test_a_source_that_changes_is_noticed(tmp_path: Path, change: int) -> None:
    source, first = tmp_path / "z", tmp_path / "a"
    source.write_bytes(b"12345")
    first.write_bytes(b"1")

    def progress(done: int, total: int) -> None:
        source.write_bytes(b"x" * (5 + change))

    with pytest.raises(UserError, match="5 bytes when the packing began"):
        write_artifact(tmp_path / "x.mkpack", [("a", first), ("z", source)], manifest, progress)
    assert left_in(tmp_path) == ["a", "z"]


KILLED = """
    import sys, time
    from pathlib import Path
    from artifacts import FILES, manifest
    from mkpack.artifact import build_lock, write_artifact
    path = Path(sys.argv[1])
    def progress(done, total):
        if done > total / 2:
            print("half", flush=True)
            time.sleep(60)
    with build_lock(path):
        write_artifact(path, list(FILES.items()), manifest, progress)
"""


def python(code: str, *args: object) -> subprocess.Popen[str]:
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, args)],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        text=True,
    )


def test_kill_leaves_only_a_temporary_that_is_cleaned(tmp_path: Path) -> None:
    path = tmp_path / "x.mkpack"
    with python(KILLED, path) as killed:
        assert killed.stdout and killed.stdout.readline() == "half\n"
        assert clean_temporaries(path) == []  # its owner lives
        killed.send_signal(signal.SIGKILL)
    temporary = f".x.mkpack.{killed.pid}.tmp"
    assert left_in(tmp_path) == sorted([".x.mkpack.lock", temporary])
    (tmp_path / f".other.mkpack.{killed.pid}.tmp").touch()
    with build_lock(path, waiting=lambda: pytest.fail("the lock of a dead process holds")):
        assert clean_temporaries(path) == [tmp_path / temporary]
        write(path)
    assert left_in(tmp_path) == sorted([f".other.mkpack.{killed.pid}.tmp", ".x.mkpack.lock", "x.mkpack"])


RACER = """
    import sys
    from pathlib import Path
    from artifacts import write
    from mkpack.artifact import build_lock
    path, log = Path(sys.argv[1]), Path(sys.argv[2])
    waited = []
    sys.stdin.readline()
    with build_lock(path, waiting=lambda: waited.append(1)):
        if not path.exists():
            with open(log, "a") as f:
                f.write("built\\n")
            write(path)
    print(len(waited))
"""


def test_two_processes_build_once(tmp_path: Path) -> None:
    path, log = tmp_path / "x.mkpack", tmp_path / "log"
    waiting = threading.Event()
    with build_lock(path):
        racers = [python(RACER.replace("sys.stdin.readline()", "print('up', flush=True)"), path, log) for _ in "ab"]
        for racer in racers:
            assert racer.stdout and racer.stdout.readline() == "up\n"
        time.sleep(0.3)
        assert not path.exists()

        def third() -> None:  # a thread of the same process waits too
            with build_lock(path, waiting.set):
                pass

        thread = threading.Thread(target=third)
        thread.start()
        assert waiting.wait(10)
    thread.join(10)
    outputs = [racer.communicate(timeout=20)[0] for racer in racers]
    assert [racer.returncode for racer in racers] == [0, 0]
    assert outputs == ["1\n", "1\n"]  # each was told once that it waits
    assert log.read_text() == "built\n"
    with open_artifact(path) as a:
        assert a.verify() == []


def test_extract_is_all_or_nothing(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "mine").touch()
    with pytest.raises(UserError, match="it exists"):
        extract(path, folder)
    (folder / "mine").unlink()
    with monkeypatch.context() as patch:
        patch.setattr(artifact_module.os, "rename", lambda *a: (_ for _ in ()).throw(OSError(errno.EIO, "I/O error")))
        with pytest.raises(UserError, match="cannot unpack to .*I/O error"):
            extract(path, folder)
    assert left_in(tmp_path) == ["out", "tiny.mkpack"] and left_in(folder) == []
    extract(path, folder)
    assert left_in(folder) == [
        "LICENSE.txt",
        "empty.txt",
        "kernels",
        MANIFEST_NAME,
        "recipe.yaml",
        "tokenizer",
        "weights",
    ]
    damage(path, "weights/rank-0.bin")
    with pytest.raises(UserError, match="weights/rank-0.bin: sha256 expected"):
        extract(path, tmp_path / "damaged")
    assert left_in(tmp_path) == ["out", "tiny.mkpack"]


# -- hostile input ------------------------------------------------------------------------------------------------


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
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
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
