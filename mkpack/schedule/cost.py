"""Bytes that a step must read: the bound that every speed is printed beside is their time at the machine's read
bandwidth."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from mkpack.errors import UserError
from mkpack.layout import split_heads
from mkpack.schedule.cpu import phases
from mkpack.schedule.ir import Phase

if TYPE_CHECKING:
    from mkpack.manifest import LayoutName, Manifest, Section
    from mkpack.spec import ModelSpec

KV_BYTES: dict[LayoutName, int] = {"cpu": 4, "cuda": 2}  # CPUs keep keys and values in float32, GPUs in bfloat16


def kv_element(spec: ModelSpec, layout: LayoutName, tp: int) -> float:
    """Bytes that a step reads for each element of keys and values: of CPUs by all ranks together, of GPUs by one rank,
    as the phases of each count, and so less than the element has."""
    share = split_heads(spec, tp).kv_heads / spec.num_key_value_heads if layout == "cuda" else 1
    return KV_BYTES[layout] * share


def distinct_experts(num_experts: int, top_k: int, tokens: int) -> float:
    """Experts that `tokens` tokens hit together under uniform routing, expected."""
    return num_experts * (1 - (1 - top_k / num_experts) ** tokens)


def phase_bytes(
    spec: ModelSpec,
    phase: Phase,
    tokens: int = 1,
    position: int = 0,
    kv_bytes: float = KV_BYTES["cpu"],
    experts: float | None = None,
) -> float:
    """Bytes one phase must read for a step of `tokens` tokens after `position` earlier ones. experts: distinct ones
    that they chose, by default what distinct_experts() expects."""
    if phase.name == "attention":
        assert phase.layer is not None
        window = spec.layers[phase.layer].sliding_window
        seen = position if window is None else min(position, window - 1)  # a window counts the token itself
        return phase.nbytes + 2 * seen * spec.kv_size * kv_bytes
    if phase.routed:
        assert spec.moe is not None
        if experts is None:
            experts = distinct_experts(spec.moe.num_experts, spec.moe.top_k, tokens)
        routed = phase.routed_nbytes
        return phase.nbytes - routed + routed * experts / spec.moe.num_experts
    return phase.nbytes


def step_bytes(
    spec: ModelSpec,
    found: Iterable[Phase],
    tokens: int = 1,
    position: int = 0,
    kv_bytes: float = KV_BYTES["cpu"],
    experts: float | None = None,
) -> float:
    """Bytes a step of these phases must read: weights once, and the keys and values of `position` tokens, kv_bytes an
    element. experts: as phase_bytes() takes them, of every layer."""
    return sum(phase_bytes(spec, p, tokens, position, kv_bytes, experts) for p in found)


def bytes_per_step(
    spec: ModelSpec,
    sections: Iterable[Section],
    tp: int = 1,
    tokens: int = 1,
    position: int = 0,
    kv_bytes: int = KV_BYTES["cpu"],
    experts: float | None = None,
) -> float:
    """step_bytes() of the CPU target, all ranks together."""
    return step_bytes(spec, phases(spec, sections, tp), tokens, position, kv_bytes, experts)


def phases_of(m: Manifest, layout: LayoutName) -> list[Phase]:
    """The phases of a step of an artifact on what reads this layout, for their bytes. UserError for a model that this
    version of mkpack lays out otherwise."""
    if layout == "cpu":
        return phases(m.spec, m.sections["cpu"], m.tp)
    from mkpack.layout_cuda import cuda_layout_of
    from mkpack.schedule.cuda import cuda_phases

    found = cuda_layout_of(m)
    if found is None or found.sections != m.sections.get("cuda", found.sections):
        raise UserError("this model is laid out as no version of mkpack known here does it; build the artifact again")
    return cuda_phases(found)
