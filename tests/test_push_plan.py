"""What a push makes of two manifests, without a hub; and what the client reads its uploads from."""

from __future__ import annotations

import io
import json
import threading
from hashlib import sha256
from pathlib import Path
from typing import Any

import fake
import pytest
from fake import HELLO, TARGET

from mkpack.artifact import open_artifact
from mkpack.manifest import Manifest, to_text
from mkpack.push_plan import Reader, differences, merged

OTHER = "x86-64-v4" if TARGET != "x86-64-v4" else "x86-64-v3"


def manifest(folder: Path, **options: Any) -> bytes:
    with open_artifact(fake.artifact(folder, HELLO, **options)) as artifact:
        return artifact.read("manifest.json")


def changed(data: bytes, **fields: Any) -> bytes:
    return to_text(json.loads(data) | fields)


def test_an_artifact_with_all_kernels_is_published_as_it_is(tmp_path):
    old, new = manifest(tmp_path), manifest(tmp_path, name="new", targets=(TARGET, OTHER))
    assert differences(old, new) == [] and merged(old, new) == new


def test_kernels_of_two_artifacts_are_in_one_manifest(tmp_path):
    old, new = manifest(tmp_path), manifest(tmp_path, name="new", targets=(OTHER,))
    new = changed(new, minimum_runtime="0.0.10", build_key="1" * 64)
    found = Manifest.parse(merged(old, new), "merged")
    assert found.kernels.keys() == {TARGET, OTHER}
    assert (found.name, found.build_key, found.minimum_runtime) == ("fake", "0" * 64, "0.1")
    assert found.entries.keys() == {*Manifest.parse(old, "old").entries, f"kernels/{OTHER}.so"}
    # What is in a repo already is not pushed again: the manifest does not change.
    assert merged(merged(old, new), old) == merged(old, new)
    assert merged(merged(old, new), new) == merged(old, new)


def test_a_gpu_kernel_brings_the_weights_it_reads(tmp_path):
    """The kernel's layout is not the repo's: its blobs and sections come with it."""
    old = manifest(tmp_path)
    raw = json.loads(manifest(tmp_path, name="gpu", targets=("sm_90a",)))
    raw["kernels"]["sm_90a"]["layout"] = "cuda"
    raw["entries"]["weights/cuda-0.bin"] = raw["entries"].pop("weights/rank0.bin")
    raw["weights"] = [raw["weights"][0] | {"layout": "cuda", "path": "weights/cuda-0.bin"}]
    raw["sections"] = {"cuda": []}
    new = to_text(raw)
    assert differences(old, new) == []
    found = Manifest.parse(merged(old, new), "merged")
    assert [w.path for w in found.weights] == ["weights/rank0.bin", "weights/cuda-0.bin"]
    assert found.sections.keys() == {"cpu", "cuda"} and found.kernels["sm_90a"].layout == "cuda"


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"license": "mit"}, "license: the repo has another"),
        ({"limits": {"context": 32, "tokens_per_step": 4}}, "limits: the repo has another"),
        ({"precision": {"experts": "fp8"}}, "precision: the repo has another"),
        ({"tokenizer_files": []}, "tokenizer: the repo has other files"),
    ],
)
def test_what_keeps_two_artifacts_apart(tmp_path, fields, said):
    old = manifest(tmp_path)
    assert differences(old, changed(old, **fields)) == [said]


def test_other_weights_keep_two_artifacts_apart(tmp_path):
    old = manifest(tmp_path)
    new = manifest(tmp_path, name="new", weights=b"\1\0\0\0".ljust(8192, b"\0"))
    assert differences(old, new) == ["weights of the layout cpu: the repo has others"]


def test_a_reader_reads_like_a_file():
    data = bytes(range(200))
    reader, file = Reader(memoryview(data)), io.BytesIO(data)
    for step in (("read", 10), ("tell",), ("seek", 5), ("read", 3), ("seek", -4, 2), ("read",), ("read", 5), ("tell",),
                 ("seek", 0), ("read", -1), ("seek", 300), ("read", 4), ("seek", 0), ("read", None)):  # fmt: skip
        assert getattr(reader, step[0])(*step[1:]) == getattr(file, step[0])(*step[1:]), step
    assert reader.readable() and reader.seekable()


def test_threads_do_not_disturb_each_other_in_one_reader():
    data = bytes(range(256)) * 4096
    reader, found = Reader(memoryview(data)), []

    def work() -> None:
        digest = sha256()
        reader.seek(0)
        while block := reader.read(4096):
            digest.update(block)
        found.append(digest.hexdigest())

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [sha256(data).hexdigest()] * 8
