"""Traces made by hand: what a person sees in Perfetto, which bubbles are named, and the page."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from mkpack import trace as tracing
from mkpack.errors import UserError
from mkpack.trace import Bubble, Trace, summarise, to_chrome
from mkpack.trace_html import page

NAMES = ["consumers qkv", "consumers out", "consumers head", "experts choose", "dense qkv"]
QKV, OUT, HEAD, CHOOSE, DENSE = range(5)


def by_hand() -> Trace:
    """Two steps of one layer and a head on two SMs; SM 1 has no part in `out`. A step starts 100 us after the other. In
    a step, microseconds after its start: qkv enters at 0, has its input at 1 (SM 1: 2), products at 3, results at 4;
    out enters at 10 and publishes at 12; head enters at 20 and publishes at 30 (SM 1: 29)."""
    stamps = np.zeros((2, 2, len(NAMES), 2, 4), np.int64)
    for step in range(2):
        at = stamps[step]
        at[0, QKV] = [[0, 1000, 3000, 4000], [0, 2000, 3000, 4000]]
        at[0, OUT, 0] = [10_000, 0, 0, 12_000]
        at[1, HEAD] = [[20_000, 0, 0, 30_000], [20_000, 0, 0, 29_000]]
        at[0, CHOOSE] = [[4000, 5000, 0, 6000]] * 2
        at[0, DENSE] = [[500, 0, 0, 3500]] * 2
        at[at > 0] += 100_000 * step + 7
        at[0, QKV, :, 0] = 100_000 * step + 7
    return Trace(NAMES, stamps, "a model <traced>")


def test_what_is_summed_up():
    found = summarise(by_hand())
    assert found.step_us == 29.0  # from the first input, at 1, to 30
    times = {p.name: p for p in found.phases}
    assert [p.name for p in found.phases] == ["qkv", "head", "out"] and "choose" not in times
    # head: SM 0 waits from 12 to 20, SM 1, which had no part in `out`, from 4 to 20
    assert times["head"].bubble_step_us == times["head"].bubble_each_us == (8 + 16) / 2
    assert times["head"].bubble_most_us == 16
    assert times["head"].work_step_us == (10 + 9) / 2
    assert times["out"].bubble_step_us == 6 and times["out"].work_each_us == 2
    # before the first qkv there is nothing to wait for; before the second SM 0 waits 71 us, SM 1 73
    assert times["qkv"].bubble_each_us == times["qkv"].bubble_step_us == 72 and times["qkv"].bubble_most_us == 73
    assert times["qkv"].work_each_us == 2.5
    assert found.bubbles[0] == Bubble(step=1, layer=0, phase="qkv", us=72, most_us=73, sm=1)
    assert [(b.step, b.phase, b.us) for b in found.bubbles[1:3]] == [(0, "head", 12), (1, "head", 12)]


def test_one_step_of_one_phase():
    trace = by_hand()
    trace.stamps[:, :, OUT:] = 0
    (only,) = summarise(Trace(NAMES, trace.stamps[:1], "")).phases
    assert (only.name, only.bubble_step_us, only.bubble_most_us, only.work_step_us) == ("qkv", 0, 0, 2.5)


def test_slices_for_perfetto():
    events = json.loads(to_chrome(by_hand()))["traceEvents"]
    named = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert named == {0: "SM 0", 1: "SM 1"}
    roles = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert roles == {(sm, i): role for sm in (0, 1) for i, role in enumerate(["consumers", "dense", "experts"])}
    slices = [e for e in events if e["ph"] == "X"]

    def of(name: str, sm: int, step: int) -> list[tuple]:
        found = [e for e in slices if (e["name"], e["pid"], e["args"]["step"]) == (name, sm, step)]
        return [(roles[e["pid"], e["tid"]], e["ts"], e["dur"], e["args"].get("layer")) for e in found]

    # the clock starts with the first stream
    assert of("wait for qkv", 1, 0) == [("consumers", -0.5, 2.0, 0)]
    assert of("qkv", 1, 0) == [("consumers", 1.5, 2.0, 0), ("dense", 0.0, 3.0, 0)]
    assert of("publish", 1, 0) == [("consumers", 2.5, 1.0, 0)]
    assert of("choose", 0, 1) == [("experts", 104.5, 1.0, 0)]
    assert of("head", 0, 1) == [("consumers", 119.5, 10.0, None)] and of("out", 1, 0) == []
    assert all(e["dur"] > 0 for e in slices)


def test_roles_of_a_newer_kernel_are_refused():
    with pytest.raises(UserError, match="the kernel traces painters, which"):
        to_chrome(Trace(["painters wall"], np.ones((1, 1, 1, 1, 4), np.int64), ""))


def test_the_page_names_the_bubbles_and_stands_alone():
    trace = by_hand()
    text = page(trace, summarise(trace))
    assert "<h1>a model &lt;traced&gt;</h1>" in text and "<traced>" not in text
    assert "<td>before qkv</td><td>1</td><td>0</td><td>72.00</td><td>73.00 (SM 1)</td>" in text
    assert "Layer 0, SM by SM" in text and "experts: choose" in text and ">SM 0<" in text
    assert not any(word in text for word in ("http:", "https:", "src=", "<script", "nan", "@import"))
    # one bar a phase, layer and SM of the last step in the second picture, and a line for each wait inside a phase
    assert text.rpartition("<svg")[2].count("<rect") == 3 + 2


def test_files_that_are_written(tmp_path, monkeypatch):
    monkeypatch.setattr(tracing, "load", lambda path, target: SimpleNamespace(__enter__=None))
    monkeypatch.setattr(tracing, "record", lambda *a: by_hand())

    class Loaded:
        def __enter__(self) -> None: ...
        def __exit__(self, *e: object) -> None: ...

    monkeypatch.setattr(tracing, "load", lambda path, target: Loaded())
    text = tracing.run("a.mkpack", tmp_path / "t.json.gz")
    assert f"written   {tmp_path / 't.json.gz'}" in text and "a step takes 29.0 us" in text
    assert json.loads(gzip.decompress((tmp_path / "t.json.gz").read_bytes())) == json.loads(to_chrome(by_hand()))
    assert (tmp_path / "t.html").is_file()
    with pytest.raises(UserError, match="cannot write"):
        tracing.run("a.mkpack", Path(tmp_path / "no folder" / "t.json"))
