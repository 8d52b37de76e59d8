"""The manifest: one text for equal contents, and every mistake in one message."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from artifacts import manifest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

import mkpack.manifest as module
from mkpack.errors import UserError
from mkpack.manifest import CHUNK, Entry, Manifest, name_problem
from mkpack.spec import RopeSpec

ENTRIES = {
    "kernels/x86-64-v3.so": Entry(size=5, sha256="1" * 64),
    "weights/rank-0.bin": Entry(size=12288, sha256="2" * 64),
    "tokenizer/tokenizer.json": Entry(size=7, sha256="3" * 64),
}


def changed(change: Callable[[dict[str, Any]], Any]) -> bytes:
    raw = json.loads(manifest(ENTRIES).to_bytes())
    change(raw)
    return json.dumps(raw).encode()


def refused(data: bytes, *texts: str) -> str:
    with pytest.raises(UserError) as e:
        Manifest.parse(data, "x.mkpack: manifest.json")
    assert str(e.value).startswith("x.mkpack: manifest.json")
    for text in texts:
        assert text in str(e.value)
    return str(e.value)


def test_round_trip_and_one_text() -> None:
    m = manifest(ENTRIES)
    data = m.to_bytes()
    assert Manifest.parse(data, "x") == m
    assert Manifest.parse(data, "x").to_bytes() == data
    assert manifest(dict(reversed(ENTRIES.items()))).to_bytes() == data
    assert data.endswith(b"}\n") and data.isascii()


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), max_size=8))
@settings(max_examples=100)
def test_floats_survive_exactly(values: list[float]) -> None:
    m = manifest(ENTRIES)
    spec = m.spec.model_copy(update={"rope": RopeSpec(inv_freq=tuple(values))})
    parsed = Manifest.parse(m.model_copy(update={"spec": spec}).to_bytes(), "x")
    assert [v.hex() for v in parsed.spec.rope.inv_freq] == [v.hex() for v in values]


def test_not_a_number_is_never_written() -> None:
    with pytest.raises(ValueError, match="finite number"):
        manifest(ENTRIES, quality={"kl": float("nan")}).to_bytes()


def test_newer_versions_come_before_unknown_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    data = changed(lambda m: m.update(format_version=3, minimum_runtime="99.1", novelty=1, name=3))
    text = refused(data, "newer format: found format 3", "supports up to 2", "minimum_runtime 99.1", "upgrade mkpack")
    assert "novelty" not in text and "2 problems" in text
    monkeypatch.setattr(module, "__version__", "1.2.3")
    for version, newer in [("1.2.3", 0), ("1.2", 0), ("1.2.3.0", 0), ("1.10.0", 1), ("1.2.3.1", 1), ("2", 1)]:
        data = changed(lambda m, v=version: m.update(minimum_runtime=v))
        if newer:
            refused(data, f"needs a newer runtime: found minimum_runtime {version}, this is mkpack 1.2.3")
        else:
            Manifest.parse(data, "x")


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda m: m.update(novelty=1), "novelty: unknown field"),
        (lambda m: m["producer"].update(host="h"), "producer.host: unknown field"),
        (lambda m: m.pop("license"), "license: missing field"),
        (lambda m: m.update(format_version=0), "format_version: Input should be 2, found 0"),
        (lambda m: m.update(format_version=1, x=1), "older format: found format 1, mkpack 0.1.0 reads format 2; build"),
        (lambda m: m.update(tp="1"), "tp: Input should be a valid integer, found 1"),
        (lambda m: m.update(minimum_runtime="new"), "minimum_runtime: String should match"),
        (lambda m: m.update(build_key="F" * 64), "build_key: String should match"),
        (lambda m: m["limits"].update(tokens_per_step=17), "limits.tokens_per_step: Input should be less"),
        (lambda m: m["source"].update(kind="hub"), "source: a hub source has repo and commit"),
        (lambda m: m["source"].update(repo="/home/x"), "source: a hub source has repo and commit"),
        (lambda m: m["source"].update(kind="dummy"), "source: a dummy source has a seed, no other has one"),
        (lambda m: m["source"].update(seed=0), "source: a dummy source has a seed, no other has one"),
        (lambda m: m["precision"].update(router="fp8"), "precision.router"),
        (lambda m: m["kernels"]["x86-64-v3"].update(description="{"), "kernels.x86-64-v3: description is not JSON"),
        (lambda m: m["kernels"]["x86-64-v3"].update(path="kernels/y.so"), "kernels/y.so is named but not in entries"),
        (lambda m: m["kernels"]["x86-64-v3"].update(path="../y.so"), "is not a plain relative path"),
        (lambda m: m["tokenizer_files"].append("z"), "z is named but not in entries"),
        (lambda m: m.update(tp=2), "cpu weights: expected ranks 0 to 1 in order (x86-64-v3 read them), found [0]"),
        (
            lambda m: m["kernels"]["x86-64-v3"].update(layout="cuda"),
            "cuda weights: expected ranks 0 to 0 in order (x86",
        ),
        (lambda m: m["kernels"]["x86-64-v3"].update(layout="cuda"), "sections: none of the layout cuda"),
        (lambda m: m["weights"][0].update(layout="tpu"), "weights.0.layout: Input should be 'cpu' or 'cuda'"),
        (lambda m: m.update(weights=[], kernels={}, sections={}), "weights: none"),
        (lambda m: m["weights"][0].update(nbytes=4096), "weights of rank 0: 4096 bytes here, 12288 in entries"),
        (lambda m: m["weights"][0].update(path="kernels/x86-64-v3.so"), "outside weights/"),
        (
            lambda m: m["sections"]["cpu"][1].update(offset=8000),
            "section norm: bytes 8000 to 8192 are not 4096-aligned",
        ),
        (lambda m: m["sections"]["cpu"][1].update(offset=4096), "after the section before (ends at 4608)"),
        (lambda m: m["sections"]["cpu"][1].update(nbytes=4097), "within the blob (12288 bytes)"),
        (lambda m: m["sections"]["cpu"][1].update(format="int4"), "sections.cpu.1.format"),
        (lambda m: m["entries"].update({"manifest.json": m["entries"]["weights/rank-0.bin"]}), "its own digest"),
        (lambda m: m["entries"]["weights/rank-0.bin"].update(chunks=["0" * 64]), "0 chunk digests, found 1"),
        (lambda m: m["entries"]["weights/rank-0.bin"].update(size=CHUNK + 1), "2 chunk digests, found 0"),
        (lambda m: m["entries"]["weights/rank-0.bin"].update(size=-1), "greater than or equal to 0"),
        (lambda m: m["entries"].update({"/etc/passwd": m["entries"]["weights/rank-0.bin"]}), "/etc/passwd"),
    ],
)
def test_each_mistake(change: Callable[[dict[str, Any]], Any], text: str) -> None:
    refused(changed(change), text)


def test_the_weights_of_one_rank_alone_are_for_gpus() -> None:
    def ranks(layout: str, tp: int, *found: int) -> Callable[[dict[str, Any]], Any]:
        def change(m: dict[str, Any]) -> None:
            entry = m["weights"][0] | {"layout": layout}
            m["kernels"]["x86-64-v3"]["layout"] = layout
            m["sections"] = {layout: m["sections"]["cpu"]}
            m |= {"tp": tp, "weights": [entry | {"rank": r} for r in found]}

        return change

    for tp, rank in ((2, 0), (2, 1), (8, 5)):
        assert Manifest.parse(changed(ranks("cuda", tp, rank)), "x").one_rank == rank
    assert Manifest.parse(changed(ranks("cuda", 2, 0, 1)), "x").one_rank is None
    assert Manifest.parse(changed(ranks("cuda", 1, 0)), "x").one_rank is None
    text = "cuda weights: expected ranks 0 to 7 in order, or one of them (x86-64-v3 read them), found [{}]"
    refused(changed(ranks("cuda", 8, 8)), text.format("8"))
    refused(changed(ranks("cuda", 8, 2, 3)), text.format("2, 3"))
    refused(
        changed(ranks("cuda", 1, 1)), "cuda weights: expected ranks 0 to 0 in order (x86-64-v3 read them), found [1]"
    )
    refused(changed(ranks("cpu", 8, 3)), "cpu weights: expected ranks 0 to 7 in order (x86-64-v3 read them), found [3]")


def test_all_mistakes_in_one_message() -> None:
    def change(m: dict[str, Any]) -> None:
        m.update(novelty=1, tp="x" * 1000)
        m.pop("name")

    text = refused(changed(change), "3 problems", "novelty: unknown field", "name: missing field", "tp: ")
    assert max(map(len, text.splitlines())) < 200
    text = refused(changed(lambda m: m.update({f"x{i}": i for i in range(100)})), "and 80 more")
    assert len(text.splitlines()) == 22


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff\xfe{}",
        b"[]",
        b"null",
        b"{",
        b"{}",
        b"[" * 200_000,
        b'{"format_version": ' + b"9" * 10_000 + b"}",
        b'{"format_version": true, "minimum_runtime": []}',
        b'{"name": "\\ud800"}',
        b'{"name": 1, "name": 2}',
        b'{"spec": NaN, "entries": Infinity}',
        b'{"minimum_runtime": "9999999999999999999999.9999999999999"}',
        b'{"quality": ' + b'{"a":' * 500 + b"1" + b"}" * 500 + b"}",
    ],
)
def test_hostile_text(data: bytes) -> None:
    assert refused(data).isascii()


@given(
    st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(), st.lists, max_leaves=5), st.data()
)
@settings(max_examples=200)
def test_any_value_anywhere(value: Any, data: st.DataObject) -> None:
    """A field replaced by anything at all: an equal manifest comes out, or a UserError."""
    raw = json.loads(manifest(ENTRIES).to_bytes())
    at: Any = raw
    while True:
        key = data.draw(st.sampled_from(list(at) if isinstance(at, dict) else range(len(at))))
        if not isinstance(at[key], dict | list) or not at[key] or data.draw(st.booleans()):
            break
        at = at[key]
    at[key] = value
    try:
        parsed = Manifest.parse(json.dumps(raw).encode(), "x")
    except UserError:
        return
    assert json.loads(parsed.to_bytes()) == raw


@pytest.mark.parametrize("name", ["a", "a/b.c", "weights/rank-10.bin", "A_b+c-d/0", "a..b", "a" * 200])
def test_good_names(name: str) -> None:
    assert name_problem(name) is None


@pytest.mark.parametrize(
    "name", ["", "/a", "a/", "a//b", ".", "..", "a/../b", ".a", "a b", "a\n", "a\\b", "é", "a" * 201]
)
def test_bad_names(name: str) -> None:
    assert name_problem(name)
    with pytest.raises(ValidationError):
        manifest({**ENTRIES, name: ENTRIES["weights/rank-0.bin"]})
