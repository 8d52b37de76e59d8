"""Schedules of GPUs: they hold for every shape, faults planted in them are named, their numbers are the kernels'."""

from __future__ import annotations

import dataclasses
import re
import subprocess
from collections.abc import Callable
from typing import Any

import emulator
import pytest
from cuda_models import cuda_layout, cuda_spec, muse_spec, small_spec
from hypothesis import given, settings
from hypothesis import strategies as st

from mkpack import compile, platform, schedule
from mkpack.codegen_cuda import cuda_header
from mkpack.layout_cuda import GRID, CudaLayout
from mkpack.manifest import Limits
from mkpack.schedule import Phase, Schedule, Wait, distinct_experts, phase_bytes, step_bytes, validate
from mkpack.schedule.cuda import cuda_phases
from mkpack.schedule.ir import Put, Region, Role
from mkpack.schedule.shape import SHARED_LIMIT
from mkpack.schedule.streams import spans
from mkpack.spec import LayerSpec

MOE = LayerSpec(moe=True)
STEP_LAYER = ["qkv", "attention", "combine", "output", "router", "choose", "gate_up", "down"]
# As few SMs as decode_kernel takes for so small a model.
FAST = cuda_layout(
    cuda_spec(
        hidden_size=1024,
        num_attention_heads=8,
        num_key_value_heads=2,
        vocab_size=67,
        layers=(MOE,) * 2,
        moe={"num_experts": 32, "intermediate_size": 256},
    )
)
SMALL = cuda_layout(
    small_spec(hidden_size=576, layers=(MOE,) * 2, qk_norm=True, qkv_bias=True, o_bias=True), "f32", attention="fp8"
)


def kernels(layout: CudaLayout, grid: int | None, context: int = 200) -> dict[str, Schedule]:
    return {s.kernel: s for s in schedule.cuda_schedules(layout, context, "sm_90a", grid)}


def ranks(tp: int, **changes: Any) -> CudaLayout:
    """36 units of hidden rows, 4 of experts' rows, 9 of the vocabulary: the last of 8 ranks has none of some."""
    spec = small_spec(hidden_size=576, num_attention_heads=8, layers=(MOE,) * 2, **changes)
    return CudaLayout(spec, SMALL.precision, "f32", tp, tp)


STEP = kernels(SMALL, 5)["step_kernel"]
EIGHT = kernels(ranks(8), 40)["step_kernel"]
GREEDY, DRAWN = (kernels(FAST, 64)[name] for name in ("decode_kernel", "decode_kernel, drawn"))
BY_NAME = {"step": STEP, "greedy": GREEDY, "drawn": DRAWN}


# -- they hold -------------------------------------------------------------------------------------------------------


@st.composite
def shapes(draw):
    head_dim, kv = draw(st.sampled_from([64, 128])), draw(st.integers(1, 4))
    experts = draw(st.integers(1, 64))
    spec = small_spec(
        hidden_size=64 * draw(st.integers(1, 48)),
        head_dim=head_dim,
        num_key_value_heads=kv,
        num_attention_heads=kv * draw(st.integers(1, 16)),
        vocab_size=draw(st.integers(1, 3000)),
        layers=(MOE, *(LayerSpec(moe=draw(st.booleans())) for _ in range(draw(st.integers(0, 2))))),
        dense_intermediate_size=8 * draw(st.integers(1, 400)),
        sandwich=draw(st.sampled_from([None, muse_spec().sandwich])),
        attention_gate=draw(st.booleans()),
        embed_norm=draw(st.booleans()),
        qk_norm=draw(st.booleans()),
        qk_norm_over=draw(st.sampled_from(["head", "projection"])),
        qkv_bias=draw(st.booleans()),
        o_bias=draw(st.booleans()),
        attention_sinks=draw(st.booleans()),
        moe={
            **({"scoring": "sigmoid", "choice_bias": True} if draw(st.booleans()) else {}),
            "router_bias": draw(st.booleans()),
            "expert_bias": draw(st.booleans()),
            "num_experts": experts,
            "top_k": draw(st.integers(1, min(experts, 32))),
            "intermediate_size": 64 * draw(st.integers(1, 40)),
            "hidden_size": draw(st.sampled_from([None, 64, 576, 2112])),
        },
    )
    fmt = st.sampled_from(["bf16", "fp8"])
    router = draw(st.sampled_from(["bf16", "f32"]))
    return cuda_layout(spec, router, attention=draw(fmt), lm_head=draw(fmt), dense=draw(fmt))


@settings(max_examples=40)
@given(shapes(), st.sampled_from(sorted(GRID)), st.integers(1, 3000))
def test_every_schedule_holds(layout, target, context):
    for found in schedule.cuda_proofs(layout, context, target):
        assert validate(found) == []


@pytest.mark.parametrize("layers", [1, 2, 5, 8])
def test_decode_kernels_of_any_number_of_layers_hold(layers):
    layout = cuda_layout(cuda_spec(layers=(MOE,) * layers, moe={"intermediate_size": 768}))
    found = schedule.cuda_proofs(layout, 9000, "sm_90a")
    assert [s.kernel for s in found] == ["step_kernel", "decode_kernel", "decode_kernel, drawn", *["decode_kernel"] * 2]
    for s in found:
        assert validate(s) == []
        schedule.check(s)


def test_phases_and_the_order_of_rings():
    for s, first, last in (
        (STEP, ["embed"], ["head", "sample", "token"]),
        (GREEDY, [], ["head", "token"]),
        (DRAWN, [], ["head", "sample", "token"]),
    ):
        layers = [n for _ in s.spec.layers for n in STEP_LAYER]
        assert [p.name for p in s.phases] == [*first, *layers, *last]
    rings = {ring: [p.name for p in STEP.layer(0) for f in p.feeds if f.ring == ring] for ring in ("dense", "expert")}
    assert rings == {"dense": ["qkv", "output"], "expert": ["attention", "gate_up", "down"]}


def test_phases_of_dense_layers_and_narrow_experts():
    s = kernels(cuda_layout(muse_spec()), 5)["step_kernel"]
    attention = ["qkv", "attention", "combine", "output", "attention_residual"]
    narrow = ["pre_proj", "router", "choose", "gate_up", "down", "mix", "post_proj", "mlp_residual"]
    assert [p.name for p in s.layer(0)] == [*attention, *narrow] == [p.name for p in s.layer(2)]
    assert [p.name for p in s.layer(1)] == [*attention, "dense_gate_up", "dense_down", "mlp_residual"]
    # The router needs nothing of the projection before it, so nobody waits between them.
    assert "layers.0.pre_proj" not in s.barriers() and "layers.0.down" in s.barriers()


def test_a_model_with_many_tokens_an_expert_keeps_all_pages_of_a_tile():
    wide = cuda_layout(small_spec(hidden_size=2112, moe={"intermediate_size": 64}))
    s = kernels(wide, 132)["step_kernel"]
    (feed,) = next(p for p in s.phases if p.name == "gate_up").feeds
    assert s.tokens_per_step > 8 and feed.held == len(feed.pages) == 2


# -- bytes -----------------------------------------------------------------------------------------------------------


@settings(max_examples=25)
@given(shapes())
def test_the_bytes_of_a_step_are_those_of_the_blob(layout):
    """All experts chosen: everything but the embedding, of which rows are looked up."""
    found, spec = cuda_phases(layout), layout.spec
    assert spec.moe
    stored = sum(s.nbytes for s in layout.sections if s.name != "embedding")
    assert step_bytes(spec, found, experts=spec.moe.num_experts) == pytest.approx(stored)
    experts = sum(s.nbytes for s in layout.sections if s.name in ("experts", "expert_scales"))
    if spec.moe.expert_bias:
        biases = 2 * spec.moe.intermediate_size + layout.expert_hidden
        experts += layout.moe_layers() * spec.moe.num_experts * biases * 4
    chosen = distinct_experts(spec.moe.num_experts, spec.moe.top_k, 3)
    least = stored - experts + experts * chosen / spec.moe.num_experts
    assert step_bytes(spec, found, 3) == pytest.approx(least)
    attention = next(p for p in found if p.name == "attention")
    assert phase_bytes(spec, attention, 1, 10, 2) - attention.nbytes == 2 * 10 * spec.kv_size * 2


@pytest.mark.parametrize("kernel", BY_NAME)
def test_who_streams_what_by_counting(kernel):
    """Every byte of every feed of one layer, counted one by one."""
    s = BY_NAME[kernel]
    for p in s.layer(1):
        for f in (f for f in p.feeds if f.section != "cache"):
            seen: dict[int, int] = {}
            for a, b in spans(f, s.machine.workers):
                for unit in range(a, b, f.unit_bytes):
                    seen[unit] = seen.get(unit, 0) + 1
            expected = {
                f.at + e * f.stride + u * f.unit_bytes for e in range(max(f.experts, 1)) for u in range(f.units)
            }
            assert seen == dict.fromkeys(expected, 1)
            for active in (1, 2) if f.experts else (1,):
                pages = sum(f.page_count(w, active) for w in range(s.machine.workers))
                packed = -(-active // f.pack) if f.experts else 1
                assert pages == f.units * packed * len(f.pages)


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_exchanges_of_ranks(tp):
    """Words as docs/TENSOR_PARALLEL.md counts them, of the first rank: T 16, H 576, Q 512, k 2, I 64."""
    (s,) = schedule.cuda_schedules(ranks(tp), 200, "sm_90a", 40)
    assert validate(s) == [] and s.tp == tp
    units, pairs, head = -(-36 // tp), -(-8 // tp), 8 * -(-9 // tp)
    of_layer = {
        "combine": (("attention",), 16 * 512 // tp // 2),
        "output": (("hidden", "router_input", "squares"), 16 * (16 * units + units)),
        "gate_up": (("swiglu",), 16 * 2 * pairs * 8 // 2),
        "down": (("hidden", "squares"), 16 * (8 * units + units)),
    }
    rest = {
        "head": (("best", "shared_token"), 2 * (40 // tp) + 1),
        "gather_logits": (("logits",), head),
    }
    found = [(p.layer, p.name, (p.exchange.buffers, p.exchange.words)) for p in s.phases if p.exchange]
    assert found == [
        *((i, name, words) for i in range(2) for name, words in of_layer.items()),
        *((None, name, words) for name, words in rest.items()),
    ]


def test_norms_over_all_heads_take_an_exchange_more():
    (s,) = schedule.cuda_schedules(ranks(2, qk_norm=True, qk_norm_over="projection"), 200, "sm_90a", 40)
    assert validate(s) == []
    sent = next(p for p in s.phases if p.name == "qkv").exchange
    # of 16 tokens 4 query heads and a KV head, in units of 8 rows
    assert sent and (sent.buffers, sent.words) == (("qk_squares",), 16 * 5 * 8)
    assert any("reads all of qk_squares, which no rank has" in p for p in validate(edit(s, "qkv", exchange=None)))


@pytest.mark.parametrize("tp", [2, 8])
def test_exchanges_of_narrow_experts_and_dense_layers(tp):
    """Words as docs/TENSOR_PARALLEL.md counts them, of the first rank: T 16, H 192, N 128, dense I 72; none can be left
    out."""
    (s,) = schedule.cuda_schedules(
        CudaLayout(muse_spec(num_attention_heads=8), SMALL.precision, "f32", tp, tp), 200, "sm_90a", 40
    )
    assert validate(s) == []
    units, width, pairs = -(-12 // tp), 128 // tp, -(-9 // tp)
    wanted = {
        "output": 16 * units,
        "attention_residual": 16 * (16 * units + units),
        "pre_proj": 16 * (width // 2 + width // 8),
        "down": 16 * 2 * width // 16,
        "mix": 16 * width // 2,
        "post_proj": 16 * units,
        "dense_gate_up": 16 * pairs * 8 // 2,
        "dense_down": 16 * units,
        "mlp_residual": 16 * (8 * units + units),
    }
    found = {p.name: p.exchange.words for p in s.phases if p.exchange}
    assert {name: found[name] for name in wanted} == wanted
    for name in wanted:
        assert any("which no rank has" in p for p in validate(edit(s, name, exchange=None))), name


def test_one_rank_reads_its_share_of_keys_and_values():
    spec = EIGHT.spec  # 2 KV heads: each of 8 ranks has one
    assert [schedule.kv_element(spec, "cuda", tp) for tp in (1, 2, 8)] == [2, 1, 1]
    assert schedule.kv_element(spec, "cpu", 8) == 4


# -- faults ----------------------------------------------------------------------------------------------------------


def changed(what: Any, changes: dict[str, object]) -> Any:
    """With fields replaced; values may be functions of the old one."""
    values = {k: v(getattr(what, k)) if callable(v) else v for k, v in changes.items()}
    return dataclasses.replace(what, **values)


def edit(s: Schedule, name: str, **changes: object) -> Schedule:
    """The phases of that name with fields replaced."""

    def new(p: Phase) -> Phase:
        return changed(p, changes) if p.name == name else p

    assert any(p.name == name for p in s.phases)
    return dataclasses.replace(s, phases=tuple(map(new, s.phases)))


def feed(s: Schedule, name: str, **changes: object) -> Schedule:
    return edit(s, name, feeds=lambda feeds: tuple(changed(f, changes) for f in feeds))


def machine(s: Schedule, **changes: object) -> Schedule:
    return dataclasses.replace(s, machine=changed(s.machine, changes))


def taken(s: Schedule, name: str, buffer: str, **changes: object) -> Schedule:
    """Of phases of that name, one thing that they take replaced, or dropped."""
    return edit(
        s,
        name,
        takes=lambda takes: tuple(
            dataclasses.replace(t, **changes) if t.buffer == buffer else t
            for t in takes
            if changes or t.buffer != buffer
        ),
    )


def longer(region: str, phase: str) -> Callable:
    return lambda regions: tuple(
        dataclasses.replace(r, live=(*r.live, phase)) if r.name == region else r for r in regions
    )


FAULTS = {
    # Bytes.
    "a unit left out": (
        feed(STEP, "qkv", bounds=lambda b: (0, *(max(0, n - 1) for n in b[1:]))),
        r"section dense: bytes \d+ to \d+, before those of layers\.0\.output, are never read",
    ),
    "a unit twice": (
        feed(STEP, "output", at=lambda at: at - 640),
        r"section dense: bytes \d+ to \d+ are streamed twice, by layers\.0\.qkv and layers\.0\.output",
    ),
    "an expert over": (feed(STEP, "down", experts=4), r"section experts: layers\.1\.down reads up to byte \d+ of \d+"),
    "a vector left out": (
        edit(STEP, "attention", loads=()),
        r"section norms: bytes \d+ to \d+, before those of layers\.0\.qkv, are never read",
    ),
    "scales left out": (edit(STEP, "head", loads=(), feeds=()), r"section head: bytes 0 to \d+ are never read"),
    "not dealt": (feed(STEP, "qkv", bounds=(0, 3, 2, 1, 4, 5)), "layers.0.qkv: the feed of dense is not dealt to 5"),
    "pages": (feed(STEP, "qkv", pages=(1024,)), r"layers\.0\.qkv: the feed of dense has units of \d+ bytes in pages"),
    "a page too large": (
        feed(STEP, "down", pack=64),
        r"layers\.0\.down: the feed of experts has pages of \d+ bytes, a s",
    ),
    "no ring": (feed(STEP, "down", ring="third"), "layers.0.down: the feed of experts goes through third, which is no"),
    # Rings.
    "too many in use": (feed(STEP, "gate_up", held=5), r"layers\.0\.gate_up: the feed of experts has 5 pages in use"),
    "asked for too late": (
        feed(STEP, "gate_up", after=lambda key: key.replace("choose", "down")),
        "wait cycle: layers.0.gate_up waits for pages that are asked for after layers.0.down, which comes only then",
    ),
    "too many before the choice": (
        feed(STEP, "gate_up", early=5),
        "SM 1, 3 experts chosen: wait cycle: layers.0.choose waits for the thread of expert, which waits for a free",
    ),
    "weights behind a choice": (
        feed(STEP, "output", after="layers.0.choose"),
        "wait cycle: layers.0.output waits for pages that are asked for after layers.0.choose, which comes only then",
    ),
    "cache asked for at once": (
        feed(STEP, "gate_up", after=None),
        "layers.0.attention has pages of cache asked for while layers.0.attention of the step before may still write",
    ),
    # Budgets.
    "shared twice": (
        machine(STEP, regions=longer("input of gate_up", "attention")),
        "shared memory: input of gate_up and queries, scores and outputs share bytes, and attention uses both",
    ),
    "sampler over a ring": (
        machine(DRAWN, regions=longer("sampler", "choose")),
        "shared memory: expert ring and sampler share bytes, and choose uses both",
    ),
    "beyond the end": (
        machine(STEP, regions=lambda r: (*r, Region("more", SHARED_LIMIT, 1))),
        "shared memory: more ends at byte",
    ),
    "too much": (machine(STEP, shared_bytes=SHARED_LIMIT + 1), f"shared memory: {SHARED_LIMIT + 1} bytes, a block can"),
    "ring without memory": (
        machine(STEP, regions=lambda r: r[1:]),
        r"shared memory: ring dense of \d+ bytes has no reg",
    ),
    "registers out of nothing": (
        machine(STEP, roles=(Role("streams", 4, 64), Role("computes", 16, 112))),
        "registers: 65536 are dealt out of 61440 that the launch took; asking for more never returns",
    ),
    "more than an SM has": (machine(STEP, launch_registers=104), "registers: 640 threads of 104 take 66560, an SM has"),
    "odd registers": (
        machine(STEP, roles=(Role("streams", 4, 64), Role("computes", 16, 100))),
        "registers: computes: they are dealt by eights",
    ),
    # Words.
    "of the wrong epoch": (
        taken(GREEDY, "qkv", "x_out", back=0),
        "layers.1.qkv waits for words of x_out that no phase before it writes in that epoch",
    ),
    "no writer": (
        edit(GREEDY, "combine", puts=()),
        "layers.0.output waits for words of x_attention that no phase before it writes in that epoch",
    ),
    "more than is written": (
        taken(GREEDY, "choose", "x_logits", spans=(((0, 33),),) * 64),
        "layers.0.choose waits for 33 words of x_logits, of which layers.0.router writes 32",
    ),
    "no wait for the words": (
        edit(GREEDY, "down", waits=()),
        "layers.0.down reads x_experts, but does not wait for layers.0.gate_up, which writes it",
    ),
    "logits before they are there": (
        taken(DRAWN, "sample", "x_best"),
        "sample on SM 0 reads logits, but does not know that head on SM 7 is over",
    ),
    "not told who reads": (taken(GREEDY, "router", "x_mid"), "layers.0.router reads x_mid, but no worker does"),
    "warps that go on alone": (
        dataclasses.replace(GREEDY, phases=tuple(dataclasses.replace(p, meets=False) for p in GREEDY.phases)),
        r"layers\.0\.\w+ on SM \d+ writes x_\w+ while layers\.\d\.\w+ on SM \d+ may still read it",
    ),
    "hidden states nobody waits for": (
        edit(GREEDY, "router", reads=(), takes=(), writes=lambda uses: uses[1:]),
        "layers.0.gate_up reads input, which no phase before it in this layer writes",
    ),
    "the token is nobody's news": (
        taken(edit(GREEDY, "token", waits=()), "token", "x_best"),
        r"layers\.0\.attention on SM 0 writes cache while|token reads x_best, but does not wait for head|"
        r"layers.0.attention on SM \d+ reads cache, but does not know",
    ),
    "words nobody has": (
        edit(GREEDY, "head", puts=lambda p: (*p, Put("y", (0,) * 65))),
        "head exchanges y",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_validator_names_what_is_wrong(fault):
    wrong, expected = FAULTS[fault]
    problems = validate(wrong)
    assert any(re.match(expected, p) for p in problems), problems


@pytest.mark.parametrize("kernel", BY_NAME)
def test_no_wait_can_be_left_out(kernel):
    s = BY_NAME[kernel]
    assert validate(s) == []
    for name in {p.name for p in s.phases if p.waits and p.layer != 0}:
        assert validate(edit(s, name, waits=())), name


@pytest.mark.parametrize(
    ("phase", "expected"),
    [
        ("combine", "layers.0.output reads all of attention"),
        ("output", "layers.0.router reads all of hidden"),
        ("gate_up", "layers.0.down reads all of swiglu"),
        ("down", "layers.1.qkv reads all of hidden"),
        ("head", "token reads all of best"),
        ("gather_logits", "sample reads all of logits"),
    ],
)
def test_no_exchange_of_ranks_can_be_left_out(phase, expected):
    problems = validate(edit(EIGHT, phase, exchange=None))
    assert any(p.startswith(f"{expected}, which no rank has: ") for p in problems), problems


def test_a_barrier_is_no_substitute_for_words():
    barrier = edit(GREEDY, "down", waits=lambda waits: tuple(Wait(w.phase) for w in waits))
    assert validate(barrier) == []  # everybody waits for everybody: slower, and right


# -- the kernels -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("layout", "grid"), [(FAST, 64), (ranks(8), 40)], ids=["one rank", "8 ranks"])
def test_other_numbers_than_the_schedules_do_not_compile(tmp_path, layout, grid):
    compiler = platform.compiler()
    if compiler is None:
        pytest.skip(platform.no_compiler())
    source = compile.sources() / "cuda" / "model.cu"

    def compiled(header: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / "model.h").write_text(header)
        folders = [f"-I{f}" for f in (emulator.EMULATOR, source.parent, compile.sources(), tmp_path)]
        command = [*compiler.command, *emulator.FLAGS, *folders, *emulator.KERNEL, "-fsyntax-only", source]
        return subprocess.run(command, capture_output=True, text=True)

    text = cuda_header(layout, Limits(context=200, tokens_per_step=16), "sm_90a", grid=grid)
    right = compiled(text)
    assert right.returncode == 0, right.stderr
    start = text.index("// What the schedule was proven with.")
    numbers = re.findall(r"constexpr \w+ (\w+) = (?:\d+|true);", text[start : text.index("// Floats")])
    assert {"step_shared_bytes", "exchange_words", "gather_logits_sends"} <= set(numbers)
    if layout is not FAST:  # nobody has shared memory for decode_kernel
        numbers.remove("decode_shared_bytes")
    wrong = text[:start] + re.sub(r" = (\d+);", r" = \1 + 1;", text[start:]).replace(
        "fast_decode = true", "fast_decode = false"
    )
    failed = {
        int(line) for line in re.findall(r"model\.cu:(\d+):\d+: error: static assertion failed", compiled(wrong).stderr)
    }
    # The line at which the assert with each number begins.
    lines = source.read_text().split("\n")
    for number in numbers:
        at = next(i for i, line in enumerate(lines) if re.search(rf"\bm::{number}\b", line))
        assert next(i for i in range(at, -1, -1) if lines[i].startswith("static_assert(")) + 1 in failed, number
