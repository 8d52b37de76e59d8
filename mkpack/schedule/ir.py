"""The language of schedules. Nothing here knows a target or a model family.

A worker is what runs items: a thread on a CPU, an SM on a GPU. Every worker goes through the phases of a step in their
order, and deals with its share of each phase's items.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from mkpack.manifest import Section
    from mkpack.spec import ModelSpec

# How long what a buffer holds is valid: until the phase, the layer or the step ends, or as long as the model lives.
Lifetime = Literal["phase", "layer", "step", "model"]
# shared: one, used by all workers. private: one a worker, which alone uses it. published: one a worker, read by others.
Scope = Literal["shared", "private", "published"]
# barrier: every worker has left the awaited phase, and so all before it. last arriver: an item starts on the worker
# that finished the last of the items that it reads; nothing else is known to be over.
Means = Literal["barrier", "last arriver"]


@dataclass(frozen=True)
class Buffer:
    """elements: allocated, of one worker's when not shared, at the limits that the model is compiled for."""

    name: str
    holds: str
    elements: int
    lifetime: Lifetime
    dtype: Literal["float32", "int32"] = "float32"
    scope: Scope = "shared"

    @property
    def nbytes(self) -> int:
        return 4 * self.elements


@dataclass(frozen=True)
class Use:
    """A buffer and how far into it a phase may reach, in elements."""

    buffer: str
    elements: int


@dataclass(frozen=True)
class Wait:
    """phase: key of what must be complete. earlier_step: that of the step before, which always comes first."""

    phase: str
    by: Means = "barrier"
    earlier_step: bool = False


@dataclass(frozen=True)
class Items:
    """Work items of a phase: `count` of them for every `per` ("" for the whole phase), each `what`. workers: who deals
    with them; what the first worker does alone in several phases needs no waits."""

    count: int
    what: str
    per: Literal["", "token", "active expert", "256 positions"] = ""
    workers: Literal["all", "first"] = "all"


@dataclass(frozen=True)
class Phase:
    """layer: None outside the layers. sections: streamed in this order, of `routed` ones the chosen experts' share.
    nbytes: of the sections, whole, all ranks together. gathers: sections of which only rows are looked up, which costs
    next to nothing. updates: buffers read and written in place, by each item its own part. optional: left out of steps
    whose logits nobody wants. A private buffer that is both read and written is written first.
    """

    name: str
    layer: int | None
    items: Items
    sections: tuple[str, ...] = ()
    nbytes: int = 0
    routed: bool = False
    gathers: tuple[str, ...] = ()
    reads: tuple[Use, ...] = ()
    writes: tuple[Use, ...] = ()
    updates: tuple[Use, ...] = ()
    waits: tuple[Wait, ...] = ()
    optional: bool = False

    @property
    def key(self) -> str:
        return self.name if self.layer is None else f"layers.{self.layer}.{self.name}"


@dataclass(frozen=True)
class Schedule:
    """One step of a model on a target. sections: table of one rank's blob. context, tokens_per_step: the limits."""

    target: str
    spec: ModelSpec
    sections: tuple[Section, ...]
    tp: int
    context: int
    tokens_per_step: int
    buffers: tuple[Buffer, ...]
    phases: tuple[Phase, ...]

    def buffer(self, name: str) -> Buffer:
        return next(b for b in self.buffers if b.name == name)

    def layer(self, i: int) -> list[Phase]:
        return [p for p in self.phases if p.layer == i]

    def barriers(self) -> set[str]:
        """Keys of the phases after which all workers meet."""
        return {w.phase for p in self.phases for w in p.waits if w.by == "barrier"}
