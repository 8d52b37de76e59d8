"""Bytes that a step must read: the bound that every speed is printed beside is bytes_per_step() over the machine's read
bandwidth."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from mkpack.schedule.cpu import phases
from mkpack.schedule.ir import Phase

if TYPE_CHECKING:
    from mkpack.manifest import LayoutName, Section
    from mkpack.spec import ModelSpec

KV_BYTES: dict[LayoutName, int] = {"cpu": 4, "cuda": 2}  # CPUs keep keys and values in float32, GPUs in bfloat16


def distinct_experts(num_experts: int, top_k: int, tokens: int) -> float:
    """Experts that `tokens` tokens hit together under uniform routing, expected."""
    return num_experts * (1 - (1 - top_k / num_experts) ** tokens)


def phase_bytes(
    spec: ModelSpec,
    phase: Phase,
    tokens: int = 1,
    position: int = 0,
    kv_bytes: int = KV_BYTES["cpu"],
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
        return phase.nbytes * experts / spec.moe.num_experts
    return phase.nbytes


def bytes_per_step(
    spec: ModelSpec,
    sections: Iterable[Section],
    tp: int = 1,
    tokens: int = 1,
    position: int = 0,
    kv_bytes: int = KV_BYTES["cpu"],
    experts: float | None = None,
) -> float:
    """Bytes a step must read, all ranks together: weights once, and the keys and values of `position` tokens, kv_bytes
    an element. experts: as phase_bytes() takes them, of every layer."""
    return sum(phase_bytes(spec, p, tokens, position, kv_bytes, experts) for p in phases(spec, sections, tp))
