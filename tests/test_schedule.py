"""The schedule: bytes of the bound, a validator that finds every fault planted here, and a kernel that follows it."""

from __future__ import annotations

import dataclasses
import itertools
import re
import subprocess
from collections.abc import Callable

import families
import kernels
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_layout import layouts

from mkpack import codegen, compile, platform, schedule
from mkpack.errors import InternalError
from mkpack.layout import Layout
from mkpack.manifest import Limits
from mkpack.models import model_spec
from mkpack.schedule import (
    Exchange,
    Phase,
    Schedule,
    Use,
    bytes_per_step,
    distinct_experts,
    phase_bytes,
    phases,
    validate,
)
from mkpack.spec import LayerSpec, ModelSpec

ATTENTION = ["qkv", "attention", "combine", "output"]
MOE, DENSE = [*ATTENTION, "router", "gate_up", "down"], [*ATTENTION, "gate_up", "down"]
SPLIT = {
    *("qkv", "qkv_bias", "o", "pre_proj", "gate_up", "gate_up_bias", "down", "down_bias", "post_proj", "lm_head"),
}


def layer_phases(spec: ModelSpec, moe: bool) -> list[str]:
    """Of one layer, in order."""
    names = list(MOE if moe else DENSE)
    if moe and spec.moe and spec.moe.hidden_size:
        names.insert(names.index("gate_up"), "pre_proj")
        names.append("post_proj")
    if spec.qk_norm and spec.qk_norm_over == "projection":
        names.insert(1, "qk_squares")
    if spec.sandwich:
        names.insert(names.index("output") + 1, "attn_residual")
        names.append("mlp_residual")
    return names


def scheduled(layout: Layout, context: int = 300, tokens: int = 16) -> Schedule:
    return schedule.cpu_schedule(layout, context, tokens)


@given(layouts())
def test_every_section_is_read_once_in_blob_order(layout):
    found = phases(layout.spec, layout.sections, layout.tp)
    order = [name for p in found for name in p.sections]
    head = {"embed", "embed.scale"}
    stored = [s.name for s in layout.sections if s.name not in head]
    assert [n for n in order if n not in head] == stored
    assert (head & set(order) != set()) == layout.tied
    names = [(p.name, p.layer) for p in found]
    layers = [(n, i) for i, layer in enumerate(layout.spec.layers) for n in layer_phases(layout.spec, layer.moe)]
    assert names == [("embed", None), *layers, ("head", None), ("sample", None)]


@given(layouts())
def test_bytes_are_those_of_all_ranks(layout):
    sizes = {s.name: s.nbytes for s in layout.sections}
    for phase in phases(layout.spec, layout.sections, layout.tp):
        kinds = {n: n.removesuffix(".scale").split(".")[-1] for n in phase.sections}
        assert phase.nbytes == sum(sizes[n] * (layout.tp if kind in SPLIT else 1) for n, kind in kinds.items())
        assert phase.routed == (
            phase.name in ("gate_up", "down") and phase.layer is not None and layout.spec.layers[phase.layer].moe
        )


def test_the_bound_by_hand():
    """One MoE layer of 4 experts, 1 chosen, sizes that fill whole tiles: every byte is counted here again."""
    spec = kernels.tiny_spec(
        hidden_size=32,
        head_dim=16,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=64,
        layers=[LayerSpec(moe=True, sliding_window=10)],
        moe={"num_experts": 4, "top_k": 1, "intermediate_size": 16},
    )
    layout = Layout(spec, kernels.precision("bf16"), 1, "f32")
    vectors = 3 * 32 * 4
    attention = (64 + 32) * 32 * 2
    router = 16 * 32 * 4  # padded to a tile
    expert = 3 * 16 * 32 * 2
    weights = vectors + attention + router + expert + 64 * 32 * 2
    assert bytes_per_step(spec, layout.sections) == weights
    kv = 2 * 16 * 4
    assert bytes_per_step(spec, layout.sections, position=7) == weights + 7 * kv
    assert bytes_per_step(spec, layout.sections, position=1000) == weights + 9 * kv
    two = weights + expert * (distinct_experts(4, 1, 2) - 1)
    assert bytes_per_step(spec, layout.sections, tokens=2) == pytest.approx(two)


@given(st.integers(1, 64), st.data())
def test_distinct_experts(num_experts, data):
    top_k = data.draw(st.integers(1, num_experts))
    assert distinct_experts(num_experts, top_k, 1) == pytest.approx(top_k)
    counts = [distinct_experts(num_experts, top_k, t) for t in range(1, 17)]
    assert counts == sorted(counts) and counts[-1] <= num_experts
    if num_experts <= 4:
        sets = list(itertools.combinations(range(num_experts), top_k))
        union = [len({*a, *b}) for a, b in itertools.product(sets, sets)]
        assert counts[1] == pytest.approx(sum(union) / len(union))


def test_a_step_costs_its_phases():
    layout = Layout(kernels.tiny_spec(), kernels.precision("nvfp4"), 2)
    found = phases(layout.spec, layout.sections, 2)
    total = sum(phase_bytes(layout.spec, p, 3, 50) for p in found)
    assert bytes_per_step(layout.spec, layout.sections, 2, 3, 50) == total
    routed = [p for p in found if p.routed]
    assert len(routed) == 4
    for p in routed:
        assert phase_bytes(layout.spec, p, 1, 0) == pytest.approx(p.nbytes * 2 / 5)


# -- the validator ---------------------------------------------------------------------------------------------------


@given(layouts(), st.integers(1, 16), st.integers(1, 700))
def test_every_schedule_holds(layout, tokens, context):
    assert validate(scheduled(layout, context, tokens)) == []


@pytest.mark.parametrize("case", families.CASES)
def test_schedules_of_the_families_hold(case):
    family, overrides = families.CASES[case]
    spec, _ = model_spec(families.make_config(family, **overrides).to_dict())
    for fmt in ("bf16", "nvfp4"):
        found = scheduled(Layout(spec, kernels.precision(fmt)))
        assert validate(found) == []
        schedule.check(found)


# Both kinds of layers, biases and norms; two dense ones end it.
SPEC = kernels.tiny_spec(
    qk_norm=True,
    qkv_bias=True,
    layers=[LayerSpec(moe=True), LayerSpec(moe=True), LayerSpec(moe=False)],
    dense_intermediate_size=40,
)
LAYOUT = Layout(SPEC, kernels.precision("fp8"), 2)
SCHEDULE = scheduled(LAYOUT)


def edit(key: str, **changes: object) -> Schedule:
    """The schedule with fields of one phase replaced; values may be functions of the old one."""

    def new(p: Phase) -> Phase:
        if p.key != key:
            return p
        values = {k: v(getattr(p, k)) if isinstance(v, Callable) else v for k, v in changes.items()}
        return dataclasses.replace(p, **values)

    assert any(p.key == key for p in SCHEDULE.phases)
    return dataclasses.replace(SCHEDULE, phases=tuple(map(new, SCHEDULE.phases)))


def without(key: str) -> Schedule:
    return dataclasses.replace(SCHEDULE, phases=tuple(p for p in SCHEDULE.phases if p.key != key))


def swapped(a: str, b: str) -> Schedule:
    by_key = {p.key: p for p in SCHEDULE.phases}
    other = {a: by_key[b], b: by_key[a]}
    return dataclasses.replace(SCHEDULE, phases=tuple(other.get(p.key, p) for p in SCHEDULE.phases))


def resized(name: str, by: int) -> Schedule:
    buffers = (dataclasses.replace(b, elements=b.elements + by) if b.name == name else b for b in SCHEDULE.buffers)
    return dataclasses.replace(SCHEDULE, buffers=tuple(buffers))


def lasting(name: str, lifetime: str) -> Schedule:
    buffers = (dataclasses.replace(b, lifetime=lifetime) if b.name == name else b for b in SCHEDULE.buffers)
    return dataclasses.replace(SCHEDULE, buffers=tuple(buffers))


def shared(name: str) -> Schedule:
    buffers = (dataclasses.replace(b, scope="shared") if b.name == name else b for b in SCHEDULE.buffers)
    return dataclasses.replace(SCHEDULE, buffers=tuple(buffers))


def drop(name: str) -> Callable[[tuple], tuple]:
    return lambda uses: tuple(u for u in uses if getattr(u, "buffer", getattr(u, "phase", u)) != name)


def moved(key: str, to: str) -> Schedule:
    """The exchange of one phase after another."""
    exchange = {to: next(p.exchange for p in SCHEDULE.phases if p.key == key), key: None}
    phases = (dataclasses.replace(p, exchange=exchange.get(p.key, p.exchange)) for p in SCHEDULE.phases)
    return dataclasses.replace(SCHEDULE, phases=tuple(phases))


FAULTS = {
    # Producers.
    "layers.1.combine is no phase": (
        without("layers.1.combine"),
        "layers.1.output waits for layers.1.combine, which is no",
    ),
    "combine dropped": (
        without("layers.1.combine"),
        "layers.1.output reads attention, which no phase before it in this layer",
    ),
    "choice of experts dropped": (
        edit("layers.0.gate_up", writes=drop("active"), reads=drop("active")),
        "layers.0.down reads active, which no phase before it in this layer writes",
    ),
    "embedding dropped": (
        edit("embed", writes=drop("x")),
        "layers.0.qkv reads x, which no phase before it in this step",
    ),
    "half an inner": (
        edit("layers.2.gate_up", writes=lambda uses: tuple(Use(u.buffer, 16) for u in uses)),
        "layers.2.down reads 768 elements of inner, of which layers.2.gate_up writes 16",
    ),
    # Order and waits.
    "swapped": (swapped("layers.0.gate_up", "layers.0.down"), "wait cycle: layers.0.down waits for layers.0.gate_up"),
    "swapped sections": (
        swapped("layers.0.gate_up", "layers.0.down"),
        "layers.0.gate_up streams section layers.0.gate_up after layers.0.down.scale, which lies behind it",
    ),
    "waits for itself": (
        edit("layers.0.qkv", waits=(schedule.Wait("layers.0.qkv"),)),
        "wait cycle: layers.0.qkv waits for layers.0.qkv",
    ),
    "waits for nothing": (edit("head", waits=(schedule.Wait("tail"),)), "head waits for tail, which is no phase"),
    "no begin": (edit("layers.0.qkv", waits=()), "layers.0.qkv reads x, but does not wait for embed, which writes it"),
    "no barrier": (
        edit("layers.1.down", waits=()),
        "layers.1.down reads inner, but does not wait for layers.1.gate_up",
    ),
    "no barrier before a write": (
        edit("layers.1.output", waits=()),
        "layers.1.output reads attention, but does not wait for layers.1.combine",
    ),
    "no barrier between steps": (
        edit("embed", waits=()),
        "embed writes x while layers.2.down of the step before may still write it",
    ),
    "no barrier after the head": (
        edit("sample", waits=()),
        "sample reads logits, but does not wait for head, which writes it",
    ),
    "last arriver is no barrier": (
        edit("embed", waits=(schedule.Wait("layers.2.down", "last arriver", True),)),
        "embed writes x while layers.2.down of the step before may still write it",
    ),
    "last arriver of something far": (
        edit("layers.1.down", waits=(schedule.Wait("layers.1.router", "last arriver"),)),
        "layers.1.down starts where the last item of layers.1.router ends, but does not come next",
    ),
    "waits for logits": (edit("sample", optional=False), "sample waits for head, which not every step has"),
    "race": (
        edit("layers.0.qkv", writes=lambda uses: (*uses, Use("x", 640))),
        "layers.0.qkv reads x while other items of it write there",
    ),
    "published, not private": (shared("normed"), "layers.0.qkv reads normed while other items of it write there"),
    "short life": (lasting("x", "layer"), "layers.0.qkv reads x, which no phase before it in this layer writes"),
    # Exchanges.
    **{
        f"no exchange after {key}": (
            edit(key, exchange=None),
            f"{reader} reads all of {buffer}, which no rank has: {key}",
        )
        for key, reader, buffer in (
            ("layers.1.combine", "layers.1.output", "attention"),
            ("layers.1.output", "layers.1.router", "x"),
            ("layers.0.gate_up", "layers.0.down", "inner"),
            ("layers.0.down", "layers.1.qkv", "x"),
            ("layers.2.down", "head", "x"),
            ("head", "sample", "best_value"),
            ("sample", "embed", "tokens"),
        )
    },
    "exchange after the wrong phase": (
        moved("layers.1.combine", "layers.1.attention"),
        "layers.1.attention exchanges attention, of which no rank has a part from it",
    ),
    "exchange too late": (
        moved("layers.0.gate_up", "layers.0.down"),
        "layers.0.down reads all of inner, which no rank has: layers.0.gate_up writes a rank's part of it",
    ),
    "exchange that nobody waits for": (
        edit("layers.0.router", waits=()),
        "layers.0.output ends with an exchange, but nobody waits for it",
    ),
    "exchange of another buffer": (
        edit("layers.1.output", exchange=Exchange(("inner",), 384)),
        "layers.1.output exchanges inner, of which no rank has a part from it",
    ),
    "exchange with one rank": (
        dataclasses.replace(SCHEDULE, tp=1),
        "layers.0.gate_up exchanges inner, but there is one rank",
    ),
    "exchange without words": (
        edit("layers.1.output", exchange=Exchange(("x",), 0)),
        "layers.1.output exchanges 0 words: expected at least one",
    ),
    "only the first rank is told": (
        edit("layers.1.output", exchange=lambda e: dataclasses.replace(e, first=True)),
        "layers.1.router reads all of x, which the first rank has: layers.1.output writes a rank's part of it",
    ),
    "part read as whole": (
        edit("layers.0.attention", reads=lambda uses: tuple(dataclasses.replace(u, part=False) for u in uses)),
        "layers.0.attention reads all of qkv, which no rank has: layers.0.qkv writes a rank's part of it",
    ),
    # Sections.
    "read twice": (
        edit("layers.1.router", sections=lambda names: (*names, "layers.1.router")),
        "section layers.1.router is read more than once: by layers.1.router, layers.1.router",
    ),
    "never read": (edit("head", sections=()), "section final_norm is never read"),
    "other layer": (
        edit("layers.1.router", sections=("layers.0.mlp_norm", "layers.1.router")),
        "layers.1.router reads section layers.0.mlp_norm of another layer",
    ),
    "unknown section": (edit("head", sections=("tail",)), "head reads section tail, which the blob does not have"),
    "backwards": (
        edit("layers.0.qkv", sections=lambda names: names[::-1]),
        "layers.0.qkv streams section layers.0.qkv.scale after layers.0.qkv_bias, which lies behind it",
    ),
    "section twice in the blob": (
        dataclasses.replace(SCHEDULE, sections=(*SCHEDULE.sections, SCHEDULE.sections[7])),
        f"section {SCHEDULE.sections[7].name} is there twice",
    ),
    # Buffers and items.
    "unknown buffer": (edit("head", reads=(Use("y", 1),)), "head uses y, which is no buffer"),
    "never used": (
        dataclasses.replace(SCHEDULE, buffers=(*SCHEDULE.buffers, schedule.Buffer("y", "nothing", 1, "step"))),
        "buffer y is never used",
    ),
    "never used again": (
        edit("sample", reads=drop("best_token")),
        "buffer best_token is written by head and never read",
    ),
    "no items": (
        edit("layers.0.router", items=schedule.Items(0, "16 experts")),
        "layers.0.router has 0 items: expected at least one",
    ),
    "phase twice": (
        dataclasses.replace(SCHEDULE, phases=(*SCHEDULE.phases, SCHEDULE.phases[1])),
        "phase layers.0.qkv is there twice",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_validator_names_what_is_wrong(fault):
    wrong, expected = FAULTS[fault]
    problems = validate(wrong)
    assert any(re.match(e, p) for p in problems for e in expected.split("|")), problems
    with pytest.raises(InternalError, match="schedule for cpu is wrong"):
        schedule.check(wrong)


def test_the_schedule_of_the_faults_has_none():
    assert validate(SCHEDULE) == []


def reach(name: str) -> int:
    uses = (u for p in SCHEDULE.phases for u in (*p.reads, *p.writes, *p.updates))
    return max(u.elements for u in uses if u.buffer == name)


def test_buffers_are_no_larger_than_what_is_used_of_them():
    spare = {b.name: b.elements - reach(b.name) for b in SCHEDULE.buffers if b.elements > reach(b.name)}
    # A layer of experts smaller than the dense MLP leaves the end of the last expert's part; a thread's share of x is
    # one block more than it may need; queries have room for all heads of a group.
    assert spare.keys() == {"inner", "down_sum", "query"}


@pytest.mark.parametrize("name", [b.name for b in SCHEDULE.buffers])
def test_a_buffer_that_is_too_small_is_named(name):
    problems = validate(resized(name, reach(name) - SCHEDULE.buffer(name).elements - 1))
    assert problems and all(f"elements of {name}, which has {reach(name) - 1}" in p for p in problems)


def test_a_long_list_of_problems_is_cut():
    empty = dataclasses.replace(SCHEDULE, phases=SCHEDULE.phases[:1])
    problems = validate(empty)
    with pytest.raises(InternalError) as caught:
        schedule.check(empty)
    assert f"and {len(problems) - 8} more" in str(caught.value) and len(str(caught.value).splitlines()) == 10


@pytest.mark.parametrize("by", [-1, 1])
@pytest.mark.parametrize("key", [p.key for p in SCHEDULE.phases if p.exchange and p.name != "sample"])
def test_words_of_an_exchange_are_those_of_the_blob(key, by):
    words = next(p.exchange.words for p in SCHEDULE.phases if p.key == key)
    wrong = edit(key, exchange=lambda e: dataclasses.replace(e, words=e.words + by))
    assert f"{key} exchanges {words + by} words: a rank's part has {words}" in validate(wrong)


def test_words_are_fewer_where_values_are_carried_as_something():
    """Of experts alone: 16 tokens, 2 chosen experts and 16 rows a rank are 32 blocks."""
    for carried, words in ((None, 512), ("bf16", 256), ("nvfp4", 72)):
        layout = Layout(SPEC, LAYOUT.precision | ({"down_input": carried} if carried else {}), 2)
        found = schedule.cpu_schedule(layout, 300, 16)
        sent = {p.key: p.exchange for p in found.phases if p.name == "gate_up"}
        assert sent["layers.0.gate_up"] == Exchange(("inner",), words, carried=carried)
        assert sent["layers.2.gate_up"] == Exchange(("inner",), 512) and validate(found) == []
        said = f"layers.0.gate_up exchanges 511 words: a rank's part has {words}"
        wrong = [
            dataclasses.replace(p, exchange=dataclasses.replace(p.exchange, words=511))
            if p.key == "layers.0.gate_up"
            else p
            for p in found.phases
        ]
        assert said in validate(dataclasses.replace(found, phases=tuple(wrong)))


@pytest.mark.parametrize("key", [p.key for p in SCHEDULE.phases if p.waits])
def test_no_wait_can_be_left_out(key):
    assert validate(edit(key, waits=()))


# -- the kernel ------------------------------------------------------------------------------------------------------


def header(spec=SPEC, tp=2) -> str:
    return codegen.model_header(
        Layout(spec, kernels.precision("fp8"), tp), Limits(context=300, tokens_per_step=16), "any"
    )


def test_the_kernel_runs_the_phases_in_this_order():
    rows = re.findall(r"\{Phase::(\w+), (-?\d+), (\w+), \d+\},", header())
    run = [p for p in SCHEDULE.phases if p.name not in ("embed", "combine", "sample")]
    assert rows == [(p.name, str(-1 if p.layer is None else p.layer), "true") for p in run]
    names = re.search(r"phase_names\[\] = \{(.*)\};", header())
    enum = re.search(r"enum class Phase \{ (.*) \};", header())
    assert names and enum and names[1].replace('"', "") == enum[1]


def test_buffers_of_other_sizes_than_the_schedules_do_not_compile(tmp_path):
    compiler = platform.compiler()
    if compiler is None:
        pytest.skip("no C++ compiler")

    def compiled(text: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / "model.h").write_text(text)
        (tmp_path / "all.cpp").write_text('#include "cpu/state.h"\n')
        command = [*compiler.command, "-std=c++20", "-march=x86-64-v3", "-fsyntax-only"]
        command += [f"-I{compile.sources()}", f"-I{tmp_path}", str(tmp_path / "all.cpp")]
        return subprocess.run(command, capture_output=True, text=True)

    right = compiled(header())
    assert right.returncode == 0, right.stderr
    # Each wrong in its own way, or the compiler tells only once of what is equal.
    sizes = {name: 10**9 + i for i, name in enumerate(schedule.cpu.BUFFERS)}
    wrong = compiled(re.sub(r" buffer_(\w+) = (\d+);", lambda m: f" buffer_{m[1]} = {sizes[m[1]]};", header()))
    assert wrong.returncode
    for name, size in sizes.items():
        assert f"buffer_{name}" in wrong.stderr or f"{size}" in wrong.stderr, name
