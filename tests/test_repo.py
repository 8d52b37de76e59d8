"""An artifact as files of a repo: parts, what a run needs, names; and those files mapped in one piece again."""

from __future__ import annotations

import gc
import hashlib
import os
from pathlib import Path

import artifacts
import pytest

from mkpack import repo
from mkpack.errors import UserError
from mkpack.manifest import CHUNK, Entry, KernelEntry, Manifest, WeightsEntry
from mkpack.repo import SCHEME, RepoFile, clashes, digests, files, located, needed, parse
from mkpack.snapshot import Mapping, SnapshotStore
from mkpack.store import address


def fat() -> Manifest:
    """Two CPU kernels, one of a GPU with weights of its own, two ranks."""
    names = [
        "kernels/x86-64-v3.so",
        "kernels/x86-64-v4.so",
        "kernels/sm_90a.so",
        "recipe.yaml",
        "tokenizer/tokenizer.json",
    ]
    weights = [f"weights/{layout}-{rank}.bin" for layout in ("cpu", "cuda") for rank in (0, 1)]
    entries = {name: Entry(size=8192, sha256="0" * 64) for name in [*names, *weights]}
    made = artifacts.manifest({"weights/rank-0.bin": Entry(size=3 * 4096, sha256="0" * 64)})
    kernels = {
        Path(name).stem: KernelEntry(
            path=name, layout="cuda" if "sm_" in name else "cpu", description="{}", compiler="", requires={}
        )
        for name in names
        if name.startswith("kernels/")
    }
    blobs = [
        WeightsEntry(layout=layout, rank=rank, path=f"weights/{layout}-{rank}.bin", nbytes=8192)
        for layout in ("cpu", "cuda")
        for rank in (0, 1)
    ]
    return made.model_copy(update={"entries": entries, "kernels": kernels, "weights": blobs, "tp": 2})


SMALL = ["recipe.yaml", "tokenizer/tokenizer.json"]


@pytest.mark.parametrize(
    ("target", "ranks", "expected"),
    [
        ("x86-64-v3", None, ["kernels/x86-64-v3.so", *SMALL, "weights/cpu-0.bin", "weights/cpu-1.bin"]),
        ("sm_90a", None, ["kernels/sm_90a.so", *SMALL, "weights/cuda-0.bin", "weights/cuda-1.bin"]),
        ("sm_90a", [1], ["kernels/sm_90a.so", *SMALL, "weights/cuda-1.bin"]),
        (None, None, SMALL),
    ],
)
def test_what_a_run_needs(target, ranks, expected):
    assert needed(fat(), target, ranks) == expected


def sized(**sizes: int) -> Manifest:
    """A manifest with weights of these sizes; digests are made up."""
    entries = {
        f"weights/{name}.bin": Entry(size=n, sha256="a" * 64, chunks=["b" * 64] * (-(-n // CHUNK) if n > CHUNK else 0))
        for name, n in sizes.items()
    }
    return artifacts.manifest({"weights/rank-0.bin": Entry(size=12288, sha256="0" * 64)}).model_copy(
        update={"entries": entries}
    )


@pytest.mark.parametrize("size", [0, 1, repo.PART - 1, repo.PART, repo.PART + 1, 5 * repo.PART, 5 * repo.PART + CHUNK])
def test_parts_cover_an_entry_and_end_at_chunks(size):
    made = sized(a=size)
    found = files(made, made.entries)
    assert found[0].start == 0 and found[-1].end == size
    assert all(a.end == b.start and a.end % CHUNK == 0 for a, b in zip(found, found[1:], strict=False))
    assert all(f.size <= repo.PART for f in found) and repo.PART <= 20 * 10**9
    assert len({f.path for f in found}) == len(found)
    if size <= repo.PART:
        assert [f.path for f in found] == ["weights/a.bin"]
    else:
        assert found[1].path == f"weights/a-00002-of-{len(found):05d}.bin"
    wanted = [digests(made, f) for f in found]
    assert [e.size for e in wanted] == [f.size for f in found]
    whole = made.entries["weights/a.bin"]
    # Every chunk's digest is held against a part once; a part of one chunk has it as its own.
    held = [c for e in wanted for c in (e.chunks or [e.sha256])]
    assert held == (whole.chunks or [whole.sha256])


def test_names_that_clash():
    parts = sized(**{"a": repo.PART + 1, "a-00001-of-00002": 5})
    assert clashes(parts) == ["weights/a.bin and weights/a-00001-of-00002.bin would be the same file"]
    own = parts.model_copy(update={"entries": {"readme.MD": Entry(size=1, sha256="0" * 64)}})
    assert clashes(own) == ["readme.MD: a repo has a file of its own of that name"]
    assert clashes(sized(a=1, b=1)) == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("org/name", ("org/name", "main")),
        ("hf://org/name", ("org/name", "main")),
        ("hf://org/name@v1.0", ("org/name", "v1.0")),
        ("org/name@refs/pr/3", ("org/name", "refs/pr/3")),
    ],
)
def test_references(text, expected):
    assert parse(text) == expected


@pytest.mark.parametrize(
    "text", ["name", "a/b/c", "org/name@", "../name", "org/name@a b", "hf://", "org/na me", "/a/b"]
)
def test_what_is_no_reference(text):
    with pytest.raises(UserError, match="expected ORG/NAME"):
        parse(text)


def test_a_path_goes_before_a_repo(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert located("org/name") == "hf://org/name"
    assert located("org/name@v1") == "hf://org/name@v1"
    assert located("org/name.mkpack") == Path("org/name.mkpack")
    assert located("name.mkpack") == Path("name.mkpack")
    Path("org").mkdir()
    assert located("org/name") == Path("org/name"), "a name mistyped in a folder that is there"
    assert located("hf://org/name") == f"{SCHEME}org/name"
    with pytest.raises(UserError, match="expected ORG/NAME"):
        located("hf://org")


def test_files_are_one_piece_of_memory_that_outlives_the_store(tmp_path):
    pieces = [os.urandom(8192), os.urandom(4096), os.urandom(100)]
    parts, start = [], 0
    for i, data in enumerate(pieces):
        (tmp_path / f"{i}.bin").write_bytes(data)
        parts.append(RepoFile(f"{i}.bin", "w", start, start + len(data)))
        start += len(data)
    (tmp_path / "empty").write_bytes(b"")
    store = SnapshotStore(tmp_path, [*parts, RepoFile("empty", "empty", 0, 0)])
    assert store.sizes == {"w": start, "empty": 0} and store.names == {"w", "empty"}
    view = store.view("w")
    assert view.readonly and address(view) % 4096 == 0 and bytes(store.view("empty")) == b""
    for use in ("stay", "pass", "drop"):
        store.advise("w", use)
    store.close()
    del store
    gc.collect()
    assert bytes(view) == b"".join(pieces)
    mapped = Path("/proc/self/maps").read_text()
    assert str(tmp_path / "1.bin") in mapped
    del view
    gc.collect()
    assert str(tmp_path / "1.bin") not in Path("/proc/self/maps").read_text(), "the mapping went with its last view"


def test_a_part_in_the_middle_is_mapped_alone(tmp_path):
    (tmp_path / "1.bin").write_bytes(b"m" * 4096)
    assert bytes(Mapping(tmp_path, [RepoFile("1.bin", "w", 8192, 12288)]).view()) == b"m" * 4096


def test_a_file_of_another_size_is_not_mapped(tmp_path):
    (tmp_path / "1.bin").write_bytes(b"short")
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(UserError, match="expected 4096 bytes, found 5; pull it again"):
        SnapshotStore(tmp_path, [RepoFile("1.bin", "w", 0, 4096)]).view("w")
    assert len(os.listdir("/proc/self/fd")) == before


def test_part_digests_are_those_of_the_bytes():
    size = 2 * CHUNK + 5
    data = bytes(size)
    entry = artifacts.digests({"weights/rank-0.bin": data})["weights/rank-0.bin"]
    made = sized(a=1).model_copy(update={"entries": {"weights/a.bin": entry}})
    last = digests(made, RepoFile("x", "weights/a.bin", 2 * CHUNK, size))
    assert last.sha256 == hashlib.sha256(bytes(5)).hexdigest() and last.chunks == []
