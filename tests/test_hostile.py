"""Artifacts made to harm: whatever a zip, a folder or a manifest says, a UserError or an artifact that is what it says.

test_container.py has the single cases by name; here hypothesis draws their combinations. tests/fuzz/ does the same with
atheris, which follows the branches of the reader."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import hostile
import pytest
from artifacts import FILES, digests, manifest
from hostile import End, Member, make_zip, members, survives
from hypothesis import example, given, settings
from hypothesis import strategies as st
from patience import PATIENCE_S

from mkpack.artifact import open_artifact
from mkpack.errors import UserError
from mkpack.manifest import MANIFEST_NAME, Manifest

quick = settings(max_examples=400)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("hostile") / "work"


# -- zips -------------------------------------------------------------------------------------------------------------

GOOD = sorted([*FILES, MANIFEST_NAME])
NAMES = st.one_of(
    st.sampled_from([n.encode() for n in GOOD]),
    st.sampled_from(
        [b"../up", b"a/../../up", b"/etc/passwd", b"C:\\x", b"a\\..\\b", b"./a", b"a//b", b"a/", b".hidden", b"", b"\0"]
        + [b"recipe.yaml\0.txt", b"RECIPE.YAML", b"recipe.yaml/x", "é".encode(), b"\xff\xfe", b"a" * 300, b"model.sig"]
        + [b"weights/rank-0.bin/../rank-1.bin", b"~/x", b"$HOME", b"-rf", b"con", b"weights", b"|ls"]
    ),
    st.binary(max_size=12),
)
SIZES = st.one_of(st.integers(-2, 2), st.integers(0, 20_000), st.sampled_from([2**31, 2**32 - 2, 2**32 - 1, 2**40]))
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "flags": st.sampled_from([1, 8, 0x20, 0x40, 0x800, 0x2000, 0xFFFF]),
    "method": st.sampled_from([1, 8, 9, 12, 14, 93, 99]),
    "crc": st.integers(0, 2**32 - 1),
    "packed": SIZES,
    "size": SIZES,
    "start": SIZES,
    "name": NAMES,
    "attributes": st.sampled_from([0o120777 << 16, 0o040755 << 16, 0o020666 << 16, 0x10, 0]),
    "extra": st.binary(max_size=40)
    | st.builds(
        lambda *n: b"\1\0\x20\0" + b"".join(i.to_bytes(8, "little") for i in n), *[st.integers(0, 2**64 - 1)] * 4
    )
    | st.just(b"\1\0\xff\xff"),
}
LIES = st.dictionaries(st.sampled_from(sorted(FIELDS)), st.none(), max_size=2)


def draw_zip(data: st.DataObject) -> bytes:
    """A good artifact with some entries changed, doubled, dropped or invented, and lies about some of them."""
    found = members()
    for _ in range(data.draw(st.integers(0, 3))):
        at = data.draw(st.integers(0, len(found) - 1)) if found else 0
        match data.draw(st.sampled_from(["lie", "double", "drop", "add", "rename", "change", "cut"])):
            case "lie" if found:
                lies = {k: data.draw(FIELDS[k]) for k in data.draw(LIES)}
                for side in data.draw(st.sampled_from([["local"], ["central"], ["local", "central"]])):
                    getattr(found[at], side).update(lies)
            case "double" if found:
                found.insert(data.draw(st.integers(0, len(found))), found[at])
            case "drop" if found:
                del found[at]
            case "add":
                found.insert(at, Member(data.draw(NAMES), data.draw(st.binary(max_size=20))))
            case "rename" if found:
                found[at].name = data.draw(NAMES)
            case "change" if found:
                found[at].data = data.draw(st.binary(max_size=20))
            case "cut" if found:
                found[at].data = found[at].data[: data.draw(st.integers(0, 40))]
    numbers = st.none() | SIZES
    end = End(zip64=data.draw(st.booleans()))
    if data.draw(st.integers(0, 4)) == 0:
        end = End(
            data.draw(numbers), data.draw(numbers), data.draw(numbers), end.zip64, data.draw(st.binary(max_size=4))
        )
    return make_zip(found, end)


def test_the_maker_makes_good_zips(folder):
    assert survives(folder, lambda path: path.write_bytes(make_zip(members())))
    assert survives(folder, lambda path: path.write_bytes(make_zip(members(), End(zip64=True))))


@given(st.data())
@quick
def test_zips_with_lies(folder, data):
    content = draw_zip(data)
    survives(folder, lambda path: path.write_bytes(content))


@given(
    st.binary(max_size=300) | st.builds(lambda a, b: a + b"PK\5\6" + b, st.binary(max_size=60), st.binary(max_size=40))
)
@quick
def test_any_bytes(folder, content):
    assert not survives(folder, lambda path: path.write_bytes(content))


def test_names_that_leave_the_folder_write_nothing(folder, tmp_path):
    """Also when the manifest lists them, its digests right."""
    for name in ("../../up", "/" + str(tmp_path / "up").lstrip("/"), "a/../../up", "..", "a/.."):
        files = {**FILES, name: b"out"}
        text = json.loads(hostile.MANIFEST)
        text["entries"][name] = digests({name: b"out"})[name].model_dump()
        listed = [m for m in members(files) if m.name != MANIFEST_NAME.encode()]
        listed.append(Member(MANIFEST_NAME.encode(), json.dumps(text).encode()))
        content = make_zip(listed)
        assert not survives(folder, lambda path, content=content: path.write_bytes(content))
    assert not (tmp_path / "up").exists()


def test_memory_is_bounded_by_what_is_allowed(folder, tmp_path):
    """Sizes that are promised and not there reserve nothing."""
    zips = [
        make_zip(members(), End(count=2**16 - 1, length=2**32 - 2, start=0)),
        make_zip(members(), End(count=2**63, length=2**63, start=2**63, zip64=True)),
    ]
    for value in (2**31, 2**32 - 2):
        lying = members()
        for m in lying:
            m.local, m.central = {"size": value, "packed": value}, {"size": value, "packed": value}
        zips.append(make_zip(lying))
    path = tmp_path / "x"
    tracemalloc.start()
    try:
        for content in zips:
            path.write_bytes(content)
            tracemalloc.reset_peak()
            with pytest.raises(UserError):
                open_artifact(path)
            assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


# -- folders ----------------------------------------------------------------------------------------------------------

KINDS = ["file", "link", "broken link", "loop", "folder", "fifo", "hard link", "absent", "empty"]


@given(
    st.lists(
        st.tuples(st.sampled_from([*GOOD, "extra", "weights", "a/b/c", "model.sig"]), st.sampled_from(KINDS)),
        max_size=4,
    )
)
@settings(quick, max_examples=120)
def test_folders_with_anything_in_them(folder, changes):
    outside = folder.parent / "outside"
    outside.write_bytes(b"not yours")

    def write(path: Path) -> None:
        for m in members():
            file = path / m.name.decode()
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(m.data)
        for name, kind in changes:
            file = path / name
            if os.path.lexists(file) and not (file.is_dir() and not file.is_symlink()):
                file.unlink()
            if not os.path.lexists(file) and (file.parent.is_dir() or not os.path.lexists(file.parent)):
                _make(file, kind, outside)

    survives(folder, write)
    assert outside.read_bytes() == b"not yours"


def _make(file: Path, kind: str, outside: Path) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        match kind:
            case "file":
                file.write_bytes(b"x")
            case "empty":
                file.touch()
            case "link":
                file.symlink_to(outside)
            case "broken link":
                file.symlink_to("nowhere")
            case "loop":
                file.symlink_to(file.name)
            case "folder":
                file.mkdir()
            case "fifo":
                os.mkfifo(file)
            case "hard link":
                os.link(outside, file)
    except OSError:
        pass  # a change before it is in the way


# -- manifests --------------------------------------------------------------------------------------------------------

VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(["../up", "manifest.json", "model.sig", "weights/rank-0.bin", "a" * 5000, "\ud800", "0" * 64]),
    st.builds(list),
    st.builds(dict),
    st.builds(lambda: [[[[[]]]]]),
)


def places(value: Any) -> list[tuple[Any, Any]]:
    """(object or list, key) of everything inside a JSON value."""
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else []
    return [(value, key) for key in keys] + [place for key in keys for place in places(value[key])]


@given(st.data())
@quick
def test_manifests_with_other_values(data):
    fields = json.loads(hostile.MANIFEST)
    for _ in range(data.draw(st.integers(1, 3))):
        inside, key = data.draw(st.sampled_from(places(fields)))
        match data.draw(st.sampled_from(["set", "delete", "add"])):
            case "set":
                inside[key] = data.draw(VALUES)
            case "delete":
                del inside[key]
            case "add" if isinstance(inside, dict):
                inside[data.draw(st.text(max_size=8))] = data.draw(VALUES)
    try:
        found = Manifest.parse(json.dumps(fields).encode(), "manifest.json")
    except UserError as e:
        assert len(str(e)) < hostile.LONGEST
        return
    assert Manifest.parse(found.to_bytes(), "again") == found


@given(st.binary(max_size=200) | st.text(max_size=200).map(lambda s: s.encode("utf-8", "surrogatepass")))
@example(b"[" * 200_000)
@example(b'{"a":' * 100_000)
@example(b"9" * 1_000_000)
@example(b'{"format_version": ' + b"9" * 10_000 + b"}")
@example(b'{"minimum_runtime": "' + b"9." * 10_000 + b'"}')
@example(b'{"format_version": 1e999, "minimum_runtime": NaN}')
@quick
def test_manifests_of_any_bytes(content):
    with pytest.raises(UserError) as e:
        Manifest.parse(content, "manifest.json")
    assert len(str(e.value)) < hostile.LONGEST


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_numbers_are_finite(value):
    text = hostile.MANIFEST.decode().replace('"rms_norm_eps": 1e-05', f'"rms_norm_eps": {value}')
    with pytest.raises(UserError, match="spec.rms_norm_eps: .*finite"):
        Manifest.parse(text.encode(), "manifest.json")


def test_a_manifest_of_the_largest_size_is_read_in_bounds(tmp_path):
    """As many entries as there may be, each with the longest name."""
    files = {f"{i:0200}"[-200:]: b"" for i in range(9_000)}
    entries = digests({**FILES, **dict.fromkeys(list(files)[:1], b"")})
    one = entries[next(iter(files))]
    big = manifest({**digests(FILES), **dict.fromkeys(files, one)}).to_bytes()
    found = Manifest.parse(big, "manifest.json")
    assert len(found.entries) == 9_000 + len(FILES)


# -- atheris ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["zip", "bytes", "manifest", "signature"])
def test_the_fuzzer_runs(target, tmp_path):
    pytest.importorskip("atheris")
    harness = Path(__file__).parent / "fuzz" / "fuzz_artifact.py"
    command = [sys.executable, harness, target, "-runs=100", "-max_total_time=20", f"-artifact_prefix={tmp_path}/"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr[-3000:]
    assert re.search("^Done [0-9]+ runs", done.stderr, re.MULTILINE), done.stderr[-3000:]
