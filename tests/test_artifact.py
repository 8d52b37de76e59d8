"""The artifact file: round trips, equal bytes, atomic writes, locks. test_container.py has the hostile input."""

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
import zipfile
from pathlib import Path

import pytest
from artifacts import FILES, damage, digests, manifest, write
from hypothesis import given, settings
from hypothesis import strategies as st
from patience import PATIENCE_S

from mkpack import artifact as artifact_module
from mkpack import container, platform
from mkpack.artifact import Given, build_lock, clean_temporaries, extract, open_artifact, write_artifact
from mkpack.digest import Digester
from mkpack.errors import InternalError, UserError
from mkpack.manifest import CHUNK, MANIFEST_NAME, Entry

ROOT = Path(__file__).resolve().parent.parent


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
    assert steps == sorted(steps) and len(steps) > 2 and steps[-1] == (size, size)
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
        for full in (False, True):
            (problem,) = a.verify(full=full)
            assert f"weights/rank-0.bin: 1 of 3 chunks, the first at byte {2 * CHUNK}" in problem
        with pytest.raises(UserError, match="sha256"):
            a.read("weights/rank-0.bin")
        assert len(a.read("weights/rank-0.bin", verify=False)) == size


@given(st.lists(st.integers(0, 70)), st.integers(1, 32))
@settings(max_examples=50)
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
            hold.wait(PATIENCE_S)

        handle = a.verify_async(threads=1, progress=progress)
        assert started.wait(PATIENCE_S)
        handle._tasks.clear()
        hold.set()
        assert len(handle.problems()) == len(FILES) - 1
        assert all("interrupted" in p for p in handle.problems())


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
        with pytest.raises(UserError, match="needs .* of disk, 10.0 kB are free"):
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
            time.sleep(600)
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
    def waiting():
        waited.append(1)
        print("waits", flush=True)
    with build_lock(path, waiting):
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
        racers = [python(RACER, path, log) for _ in "ab"]
        for racer in racers:
            assert racer.stdout and racer.stdout.readline() == "waits\n"
        assert not path.exists()

        def third() -> None:  # a thread of the same process waits too
            with build_lock(path, waiting.set):
                pass

        thread = threading.Thread(target=third)
        thread.start()
        assert waiting.wait(PATIENCE_S)
    thread.join(PATIENCE_S)
    outputs = [racer.communicate(timeout=PATIENCE_S)[0] for racer in racers]
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


@pytest.mark.parametrize("unpacked", [False, True])
def test_memory_of_an_entry_can_be_given_back(tmp_path: Path, unpacked: bool) -> None:
    """What was read once, into a GPU, need not stay in this process."""
    blob = bytes(range(256)) * (32 << 10)
    path = write(tmp_path / "a.mkpack", {**FILES, "weights/rank-0.bin": blob, "weights/rank-1.bin": blob})
    if unpacked:
        extract(path, tmp_path / "folder")
        path = tmp_path / "folder"

    def resident() -> int:
        size, ours = 0, False
        for line in Path("/proc/self/smaps").read_text().splitlines():
            if line.split(" ")[0].count("-") == 1:
                ours = str(path) in line
            elif ours and line.startswith("Rss:"):
                size += int(line.split()[1]) << 10
        return size

    with open_artifact(path) as a:
        view = a.map("weights/rank-0.bin", "pass")
        assert view == blob and resident() >= len(blob)
        a.drop("weights/rank-0.bin")
        assert resident() < len(blob) // 8
        assert view[-256:] == blob[-256:]


@pytest.mark.parametrize("punched", [True, False])
def test_a_file_that_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, punched: bool) -> None:
    """The artifact is the same; the disk never holds the bytes twice where the file system can help that."""
    blob = bytes(range(256)) * (32 << 10)
    source = tmp_path / "blob"
    source.write_bytes(blob)
    kept, given = tmp_path / "kept.mkpack", tmp_path / "given.mkpack"
    write_artifact(kept, [("weights/rank-0.bin", source)], manifest)
    if punched and not platform.can_punch_holes(tmp_path):
        pytest.skip("this file system keeps every block of a file")
    if not punched:
        monkeypatch.setattr(artifact_module, "can_punch_holes", lambda folder: False)
        monkeypatch.setattr(artifact_module, "punch_hole", lambda fd, offset, length: False)
    usage = shutil.disk_usage(tmp_path)._replace(free=len(blob))
    monkeypatch.setattr(artifact_module.shutil, "disk_usage", lambda path: usage)
    entries = [("weights/rank-0.bin", Given(source))]
    if not punched:
        with pytest.raises(UserError, match="of disk, .* are free"):
            write_artifact(given, entries, manifest)
        monkeypatch.setattr(artifact_module.shutil, "disk_usage", lambda path: usage._replace(free=2 * len(blob)))
    write_artifact(given, entries, manifest)
    assert given.read_bytes() == kept.read_bytes()
    assert (source.stat().st_blocks == 0) == punched
