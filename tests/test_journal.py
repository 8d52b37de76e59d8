"""A build that was killed goes on: seals, the journal, and builds killed at random, whose artifact is that of one that
was left alone."""

from __future__ import annotations

import json
import random
import shutil
import signal
from pathlib import Path

import builds
import families
import numpy as np
import pytest
from builds import DIE, names, process
from patience import PATIENCE_S

from mkpack import build as builder
from mkpack import journal, packing
from mkpack.blobfile import BlobFile, Seal
from mkpack.build import build
from mkpack.journal import Journal
from mkpack.quality import Quality

# Two formats that need no modelopt, whose import takes seconds, two ranks, and a second blob of everything.
KEYS = {"quantise": {"experts": "bf16"}, "parallel": {"tp": 2}, "quality": {"tokens": 40}}


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    return families.make_case(tmp_path_factory.mktemp("source") / "checkpoint", "mixtral-plain")


# -- seals --------------------------------------------------------------------------------------------------------


def test_extents_are_few_and_say_where_everything_lies(tmp_path):
    file, seal = BlobFile(tmp_path / "blob", 1000), Seal()
    places = [(0, 10), (10, 10), (20, 5), *[(100 + 30 * i, 7) for i in range(20)], (900, 7), (901, 50)]
    rng = np.random.default_rng(0)
    for offset, size in places:
        file.write(offset, rng.integers(0, 256, size, np.uint8), seal)
    assert seal.extents == [[0, 25, 25, 1], [100, 7, 30, 20], [900, 7, 7, 1], [901, 50, 50, 1]]
    assert sum(size for _, size in seal.pieces()) == sum(size for _, size in places)
    again = Seal.from_json(json.loads(json.dumps(seal.to_json())))
    assert again == seal
    # Byte 901 was written twice: the seal is of what was written first, which is gone.
    assert not file.holds(seal)


def test_a_seal_holds_until_a_byte_changes(tmp_path):
    file, seal = BlobFile(tmp_path / "blob", 5000), Seal()
    file.write(64, np.arange(100, dtype=np.float32), seal)
    file.write(4000, np.ones((3, 5), np.uint8), seal)
    assert file.holds(seal) and file.holds(Seal())
    file.close()
    file = BlobFile(tmp_path / "blob", 5000, resume=True)
    assert file.holds(seal)
    file.write(4014, np.zeros(1, np.uint8), Seal())
    assert not file.holds(seal)
    assert not file.holds(Seal([[4990, 20, 20, 1]])) and not file.holds(Seal([[-1, 1, 1, 1]]))
    file.close()
    assert (tmp_path / "blob").stat().st_size == 5000
    BlobFile(tmp_path / "blob", 600).close()
    assert (tmp_path / "blob").read_bytes() == bytes(600)


# -- the journal --------------------------------------------------------------------------------------------------


def test_a_journal_is_read_up_to_where_it_was_cut(tmp_path):
    seals = [[Seal([[0, 4, 4, 1]], 7)], [Seal(), Seal([[8, 2, 6, 3]], 9)]]
    first = Journal(tmp_path, "key")
    assert first.found == {}
    first.add("a", seals, {"a": [1.5, 2.0, None]})
    first.add("b", [], {})
    first.close()
    whole = (tmp_path / journal.NAME).read_bytes()
    for cut in range(len(whole)):
        (tmp_path / journal.NAME).write_bytes(whole[:cut])
        again = Journal(tmp_path, "key")
        expected = ["a", "b"][: max(whole[:cut].count(b"\n") - 1, 0)]
        assert list(again.found) == expected, cut
        if "a" in again.found:
            assert again.found["a"] == (seals, {"a": [1.5, 2.0, None]})
        # What comes next is read too.
        again.add("c", [], {})
        again.close()
        last = Journal(tmp_path, "key")
        assert list(last.found) == [*expected, "c"]
        last.close()


@pytest.mark.parametrize("text", [b"", b"\n", b"[]\n", b"garbage\n", b'{"key": "other"}\n{"group": "a"}\n'])
def test_another_journal_is_not_used(tmp_path, text):
    (tmp_path / journal.NAME).write_bytes(text)
    found = Journal(tmp_path, "key")
    found.close()
    assert found.found == {} and journal.key_of(tmp_path) == "key"
    assert (tmp_path / journal.NAME).read_bytes().count(b"\n") == 1
    assert journal.key_of(tmp_path / "absent") is None


# -- builds -------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def quick(tmp_path, monkeypatch) -> Path:
    """Kernels that are not compiled nor run; sources that count as unchanged while someone edits them."""
    monkeypatch.setattr(builder.provenance, "sources_digest", lambda: "1" * 64)
    monkeypatch.setattr(builder, "_measure", lambda *_: Quality(39, 2.0, 1.5, 0.1, 0.9))
    return builds.stub_compiler(tmp_path / "stub-cxx", monkeypatch)


def killed(recipe: Path, out: Path, writes: int) -> None:
    """A build that is killed at its n-th write into a blob."""
    before = "builder.provenance.sources_digest = lambda: '1' * 64\n" + DIE.format(point=("os", "pwrite", writes))
    with process(recipe, out, before) as running:
        _, errors = running.communicate(timeout=PATIENCE_S)
        assert running.returncode == -signal.SIGKILL, errors


def test_a_build_that_is_killed_again_and_again_gives_the_same_bytes(source, tmp_path, monkeypatch, capsys):
    recipe = builds.write_recipe(tmp_path / "recipe.yaml", source, **KEYS)
    (tmp_path / "alone").mkdir()
    (tmp_path / "out").mkdir()
    expected = build(recipe, output=tmp_path / "alone").read_bytes()
    rng = random.Random(7)
    for _ in range(3):
        killed(recipe, tmp_path / "out", rng.randrange(20, 90))
        (work,) = (tmp_path / "out").glob(".*.work")
    before = len(Journal(work, journal.key_of(work) or "").found)
    assert before >= 3
    put, count = packing._put, 0

    def counted(*words):
        nonlocal count
        count += 1
        return put(*words)

    monkeypatch.setattr(packing, "_put", counted)
    from rich.console import Console

    path = build(recipe, output=tmp_path / "out", console=Console(stderr=True, width=200))
    assert path.read_bytes() == expected
    assert names(tmp_path / "out") == {"tiny.mkpack", ".tiny.mkpack.lock"}
    assert f"had packed {before} of" in capsys.readouterr().err
    resumed, count = count, 0
    build(recipe, output=tmp_path / "out", force=True)
    assert resumed <= count - 2 * before


@pytest.mark.parametrize("change", ["recipe", "source", "mkpack", "bytes", "reordered"])
def test_what_ends_a_journal_s_worth(source, tmp_path, monkeypatch, change, capsys):
    """Another recipe, checkpoint or version begins anew; bytes that are not there any more are made again."""
    checkpoint = Path(shutil.copytree(source, tmp_path / "checkpoint"))
    keys = {"quantise": KEYS["quantise"], "parallel": KEYS["parallel"]}
    recipe = builds.write_recipe(tmp_path / "recipe.yaml", checkpoint, **keys)
    out = tmp_path / "out"
    out.mkdir()
    killed(recipe, out, 60)
    (work,) = out.glob(".*.work")
    sealed = Journal(work, journal.key_of(work) or "").found
    found = len(sealed)
    assert found > 2
    if change == "recipe":
        builds.write_recipe(recipe, checkpoint, **{**keys, "limits": {"context": 100}})
    if change == "source":
        (checkpoint / "generation_config.json").write_text('{"eos_token_id": 1}')
    if change == "mkpack":
        monkeypatch.setattr(builder.provenance, "sources_digest", lambda: "0" * 64)
    if change == "bytes":
        with open(work / "cpu-1.bin", "r+b") as blob:
            for seals, _ in list(sealed.values())[1:]:
                for offset, size in seals[0][1].pieces():  # of rank 1
                    blob.seek(offset + size // 2)
                    blob.write(b"\xff")
    if change == "reordered":  # not all of it, as after a power cut
        (work / "cpu-0.bin").write_bytes(b"")
    from rich.console import Console

    path = build(recipe, output=out, console=Console(stderr=True, width=200))
    resumed = capsys.readouterr().err
    if change in ("recipe", "source", "mkpack"):
        assert "resumed" not in resumed
    else:
        held = int(resumed.split("had packed ")[1].split()[0])
        assert held < found
    assert names(out) == {"tiny.mkpack", ".tiny.mkpack.lock"}
    again = build(recipe, output=tmp_path, force=True)
    assert again.read_bytes() == path.read_bytes()
