"""A shard's header: what is sound is read, everything else is refused by name, and no bytes crash the reader."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from shards import POINTER, shard

from mkpack.shard import TensorInfo, read_header

NAME = "model.safetensors"
SOUND = shard({"a": ("F32", [2, 3]), "b": ("BF16", [4])})
DATA = len(SOUND) - 32


def read(folder: Path, data: bytes) -> tuple[list[TensorInfo], list[str]]:
    """(tensors, problems) of a shard that holds these bytes; every problem names the file."""
    (folder / NAME).write_bytes(data)
    problems: list[str] = []
    tensors = read_header(folder, NAME, problems)
    assert all(NAME in problem for problem in problems)
    return tensors, problems


def test_a_sound_shard(tmp_path):
    assert read(tmp_path, SOUND) == (
        [TensorInfo("a", "F32", (2, 3), NAME, DATA, 24), TensorInfo("b", "BF16", (4,), NAME, DATA + 24, 8)],
        [],
    )


def test_an_entry_of_the_first_dimension():
    info = TensorInfo("a", "F32", (3, 2, 5), NAME, 100, 120)
    assert info.entry(0) == TensorInfo("a", "F32", (2, 5), NAME, 100, 40)
    assert info.entry(2) == TensorInfo("a", "F32", (2, 5), NAME, 180, 40)


def test_a_type_that_is_not_known_is_left_to_the_check(tmp_path):
    entry = {"dtype": "F6_E3M2", "shape": [16], "data_offsets": [0, 12]}
    tensors, problems = read(tmp_path, shard({"c": ("U8", [12])}, header={"c": entry}))
    assert [t.dtype for t in tensors] == ["F6_E3M2"] and problems == []


@pytest.mark.parametrize("found", [0, 7, 8, 60, len(SOUND) - 1])
def test_truncated(tmp_path, found):
    _, problems = read(tmp_path, SOUND[:found])
    assert len(problems) == 1 and "is truncated" in problems[0] and f"found {found}" in problems[0]
    if found > DATA:
        assert f"expected {len(SOUND)} bytes" in problems[0]


def test_bytes_after_the_last_tensor(tmp_path):
    _, problems = read(tmp_path, SOUND + b"xyz")
    expected = f"expected {len(SOUND)} bytes, found {len(SOUND) + 3}"
    assert problems == [f"{NAME} has bytes after its last tensor: {expected}"]


def test_a_tensor_twice(tmp_path):
    entry = b'"c": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}'
    text = b"{" + entry + b", " + entry + b"}"
    assert read(tmp_path, struct.pack("<Q", len(text)) + text + b"x")[1] == [f'{NAME}: "c" is listed twice']


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ({"dtype": "F16", "shape": [3, 3], "data_offsets": [0, 12]}, "needs 18 bytes, its offsets hold 12"),
        ({"dtype": "F16", "shape": [3, 2], "data_offsets": [2, 14]}, '"c" begins at byte'),
        ({"dtype": "F16", "shape": [3, 2], "data_offsets": [12, 0]}, '"c" is malformed'),
        ({"dtype": "F16", "shape": [-3, -2], "data_offsets": [0, 12]}, '"c" is malformed'),
        ({"dtype": "F16", "shape": [3.0, 2], "data_offsets": [0, 12]}, '"c" is malformed'),
        ({"dtype": "F16", "shape": [3, 2]}, '"c" is malformed'),
        ({"dtype": "F16", "shape": [1 << 70], "data_offsets": [0, 1 << 71]}, "is truncated"),
        ([], '"c" is malformed'),
    ],
)
def test_an_entry_that_cannot_be(tmp_path, entry, said):
    _, problems = read(tmp_path, shard({"c": ("F16", [3, 2])}, header={"c": entry}))
    assert any(said in problem for problem in problems)


def test_tensors_that_overlap(tmp_path):
    same = {"dtype": "F16", "shape": [3, 2], "data_offsets": [0, 12]}
    _, problems = read(tmp_path, shard({"c": ("F16", [3, 2])}, header={"d": same}))
    assert len(problems) == 1 and '"d" begins at byte' in problems[0] and '"c" ends' in problems[0]


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (struct.pack("<Q", 100_000_001) + bytes(64), "the limit is 100000000"),
        (struct.pack("<Q", 4) + b"nope", "not readable as JSON"),
        (struct.pack("<Q", 2) + b"[]", "not a JSON object"),
        (struct.pack("<Q", 200_000) + b"[" * 200_000, "not readable as JSON"),
        (POINTER, "Git LFS pointer"),
    ],
)
def test_a_header_that_cannot_be(tmp_path, data, said):
    tensors, problems = read(tmp_path, data)
    assert tensors == [] and len(problems) == 1 and said in problems[0]


def test_a_file_that_cannot_be_opened(tmp_path):
    (tmp_path / NAME).mkdir()
    problems: list[str] = []
    assert read_header(tmp_path, NAME, problems) == []
    assert problems == [f"{NAME} cannot be read: Is a directory"]


@given(data=st.binary(max_size=200), cut=st.integers(0, 400), at=st.integers(0, 200))
def test_no_bytes_crash_the_reader(tmp_path_factory, data, cut, at):
    """Whatever a shard holds, it is refused or its tensors lie inside the file without a gap."""
    damaged = (SOUND[:at] + data + SOUND[at + len(data) :])[:cut]
    tensors, problems = read(tmp_path_factory.mktemp("fuzz"), damaged)
    if not problems:
        assert sum(t.nbytes for t in tensors) == len(damaged) - 8 - int.from_bytes(damaged[:8], "little")
