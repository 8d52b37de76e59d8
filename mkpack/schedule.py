"""The phases of one step, as data: what each reads, in which order, and so the bytes a token must cost.

The compiled kernel runs these phases in this order for every layer; between two of them all threads meet. The bound
that every speed is printed beside is bytes_per_step() over the machine's read bandwidth.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkpack.manifest import Section
    from mkpack.spec import ModelSpec

KV_BYTES = 4  # the CPU target keeps keys and values in float32
LAYER_PHASES = ("qkv", "attention", "output", "router", "gate_up", "down")


@dataclass(frozen=True)
class Phase:
    """layer: None for embed and head. sections: read in this order. routed: only the chosen experts' share is read."""

    name: str
    layer: int | None
    sections: tuple[str, ...]
    nbytes: int
    routed: bool = False


def phases(spec: ModelSpec, sections: Iterable[Section], tp: int = 1) -> list[Phase]:
    """The phases of a step over `sections`, the table of one rank's blob; bytes are those of all ranks."""
    size = {s.name: s.nbytes for s in sections}

    def phase(name: str, layer: int | None, *names: str, split: bool = True, routed: bool = False) -> Phase:
        prefix = "" if layer is None else f"layers.{layer}."
        found = tuple(prefix + n for n in names if prefix + n in size)
        return Phase(name, layer, found, sum(size[n] for n in found) * (tp if split else 1), routed)

    result = [phase("embed", None)]
    for i, layer in enumerate(spec.layers):
        result += [
            phase("qkv", i, "attn_norm", "qkv", "qkv.scale", "qkv_bias"),
            phase("attention", i, "q_norm", "k_norm", split=False),
            phase("output", i, "o", "o.scale", "o_bias"),
            phase("router", i, "mlp_norm", "router", split=False),
            phase("gate_up", i, "gate_up", "gate_up.scale", routed=layer.moe),
            phase("down", i, "down", "down.scale", routed=layer.moe),
        ]
    head = "lm_head" if "lm_head" in size else "embed"
    # A tied head is the embedding, which every rank holds whole and reads its share of.
    result.append(phase("head", None, "final_norm", head, head + ".scale", split=head == "lm_head"))
    return result


def distinct_experts(num_experts: int, top_k: int, tokens: int) -> float:
    """Experts that `tokens` tokens hit together under uniform routing, expected."""
    return num_experts * (1 - (1 - top_k / num_experts) ** tokens)


def phase_bytes(spec: ModelSpec, phase: Phase, tokens: int = 1, position: int = 0) -> float:
    """Bytes one phase must read for a step of `tokens` tokens after `position` earlier ones."""
    if phase.name == "attention":
        assert phase.layer is not None
        window = spec.layers[phase.layer].sliding_window
        seen = position if window is None else min(position, window - 1)  # a window counts the token itself
        return phase.nbytes + 2 * seen * spec.kv_size * KV_BYTES
    if phase.routed:
        assert spec.moe is not None
        return phase.nbytes * distinct_experts(spec.moe.num_experts, spec.moe.top_k, tokens) / spec.moe.num_experts
    return phase.nbytes


def bytes_per_step(
    spec: ModelSpec, sections: Iterable[Section], tp: int = 1, tokens: int = 1, position: int = 0
) -> float:
    """Bytes a step must read, all ranks together: weights once, and the keys and values of `position` tokens."""
    return sum(phase_bytes(spec, p, tokens, position) for p in phases(spec, sections, tp))
