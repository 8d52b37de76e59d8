"""The phases of a step: every section is read once, in the order of the blob; the bound counts what must be read."""

from __future__ import annotations

import itertools

import kernels
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_layout import layouts

from mkpack.layout import Layout
from mkpack.schedule import LAYER_PHASES, bytes_per_step, distinct_experts, phase_bytes, phases
from mkpack.spec import LayerSpec


@settings(deadline=None)
@given(layouts())
def test_every_section_is_read_once_in_blob_order(layout):
    found = phases(layout.spec, layout.sections, layout.tp)
    order = [name for p in found for name in p.sections]
    head = {"embed", "embed.scale"}
    stored = [s.name for s in layout.sections if s.name not in head]
    assert [n for n in order if n not in head] == stored
    assert (head & set(order) != set()) == layout.tied
    names = [p.name for p in found]
    assert names == ["embed", *LAYER_PHASES * len(layout.spec.layers), "head"]
    assert [p.layer for p in found[1:-1]] == [i for i in range(len(layout.spec.layers)) for _ in LAYER_PHASES]


@settings(deadline=None)
@given(layouts())
def test_bytes_are_those_of_all_ranks(layout):
    sizes = {s.name: s.nbytes for s in layout.sections}
    for phase in phases(layout.spec, layout.sections, layout.tp):
        once = sum(sizes[n] for n in phase.sections)
        whole = phase.name in ("embed", "attention", "router") or phase.name == "head" and layout.tied
        assert phase.nbytes == once * (1 if whole else layout.tp)
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
