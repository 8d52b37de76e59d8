"""The language of schedules. Nothing here knows a target or a model family.

A worker is what runs items: a thread on a CPU, an SM on a GPU. Every worker goes through the phases of a step in their
order, and deals with its share of each phase's items.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from mkpack.manifest import Section
    from mkpack.spec import Format, ModelSpec

# How long what a buffer holds is valid: until the phase, the layer or the step ends, or as long as the model lives.
Lifetime = Literal["phase", "layer", "step", "model"]
# shared: one, used by all workers. private: one a worker, which alone uses it. published: one a worker, read by others.
# words: {value, epoch} pairs of shared memory, in two copies that the epochs use in turn: whoever reads one polls until
# its epoch is there. ordered: shared, and no barrier says when; what a worker knows from the words it read must do.
Scope = Literal["shared", "private", "published", "words", "ordered"]
# barrier: every worker has left the awaited phase, and so all before it. last arriver: an item starts on the worker
# that finished the last of the items that it reads; nothing else is known to be over. words: a worker has those words
# of the awaited phase that it reads, and what their writers had seen before they wrote them.
Means = Literal["barrier", "last arriver", "words"]
Dtype = Literal["float32", "int32", "bfloat16", "word"]
_BYTES: dict[Dtype, int] = {"float32": 4, "int32": 4, "bfloat16": 2, "word": 8}


@dataclass(frozen=True)
class Buffer:
    """elements: allocated, of one worker's when private or published, at the limits that the model is compiled for.
    replicas: of words, so many equal ones, that workers read in turn; `elements` are those of one, in one of the two
    copies. per_layer: every layer has a part of its own."""

    name: str
    holds: str
    elements: int
    lifetime: Lifetime
    dtype: Dtype = "float32"
    scope: Scope = "shared"
    replicas: int = 1
    per_layer: bool = False

    @property
    def nbytes(self) -> int:
        """All of it, of one worker when private or published."""
        return _BYTES[self.dtype] * self.elements * self.replicas * (2 if self.scope == "words" else 1)


@dataclass(frozen=True)
class Use:
    """A buffer and how far into it a phase may reach, in elements. part: a rank with memory of its own touches only its
    own part of that."""

    buffer: str
    elements: int
    part: bool = False


@dataclass(frozen=True)
class Exchange:
    """What follows a phase where ranks have memory of their own: each sends its part of these buffers to the others, or
    where `first` to the first rank alone. words: of 32 bits, of a rank for the most tokens; not per_token: for
    any number of them. carried: what values travel as where they are rounded to that; others as they are."""

    buffers: tuple[str, ...]
    words: int
    first: bool = False
    per_token: bool = True
    carried: Format | None = None


def carried_words(values: int, carried: Format | None) -> int:
    """Words of 32 bits that so many values take, which are whole blocks of 16 where they are carried as something.
    NVFP4 comes in groups of four blocks: a word of their scales, and two of codes each, as in csrc/cpu/carry.h."""
    if carried == "nvfp4":
        return -(-values // 64) * 9
    return values // 2 if carried == "bf16" else values


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
    per: str = ""
    workers: Literal["all", "first"] = "all"


Span = tuple[int, int]  # from, to


@dataclass(frozen=True)
class Load:
    """Bytes [at, at + nbytes) of a section that a phase reads by ordinary loads, of routed ones the chosen experts'."""

    section: str
    at: int
    nbytes: int
    routed: bool = False


@dataclass(frozen=True)
class Feed:
    """What a ring brings to a phase of a section (or of a buffer), page after page.

    A unit is `unit_bytes`, cut into `pages`; unit u begins at at + u * unit_bytes. Worker s streams the units
    [bounds[s], bounds[s + 1]). Of a routed phase the units are those of one expert, and the same again `stride` bytes
    further for each of `experts`; only the chosen ones' are streamed. spread: then the units of all chosen experts,
    one expert after the other, are dealt evenly to the workers; otherwise each has its units of every chosen expert,
    `pack` experts' in one page. held: pages that a worker may have in use at a time. after: the phase that the worker
    must have done before the pages but the first `early` are asked for; there it waits until the ring's thread has
    come too.
    """

    ring: str
    section: str
    at: int
    unit_bytes: int
    pages: tuple[int, ...]
    bounds: tuple[int, ...]
    experts: int = 0
    stride: int = 0
    spread: bool = False
    pack: int = 1
    held: int = 1
    after: str | None = None
    early: int = 0

    @property
    def units(self) -> int:
        return self.bounds[-1]

    @property
    def nbytes(self) -> int:
        """Bytes of the section that this is about, of all experts."""
        return max(self.experts, 1) * self.units * self.unit_bytes

    def runs(self, worker: int, active: int = 1) -> Iterator[tuple[int, int, int]]:
        """(place among the `active` chosen experts, first unit, last unit + 1) of what a worker streams, in order."""
        first, last = self.bounds[worker], self.bounds[worker + 1]
        if not self.experts:
            if first < last:
                yield 0, first, last
        elif self.spread:
            workers = len(self.bounds) - 1
            at, end = (active * self.units * w // workers for w in (worker, worker + 1))
            while at < end:
                stop = min(end, (at // self.units + 1) * self.units)
                yield at // self.units, at % self.units, (stop - 1) % self.units + 1
                at = stop
        else:
            for unit in range(first, last):
                yield from ((expert, unit, unit + 1) for expert in range(active))

    def page_count(self, worker: int, active: int = 1) -> int:
        """Pages that come to a worker."""
        units = sum(last - first for _, first, last in self.runs(worker, active))
        if self.experts and not self.spread:
            units = (self.bounds[worker + 1] - self.bounds[worker]) * -(-active // self.pack)
        return units * len(self.pages)


@dataclass(frozen=True)
class Put:
    """What a phase writes of a buffer of words or of ordered memory: worker s [bounds[s], bounds[s + 1])."""

    buffer: str
    bounds: tuple[int, ...]


@dataclass(frozen=True)
class Take:
    """What a phase reads of such a buffer, for every worker. back: of words, how many epochs before its own."""

    buffer: str
    spans: tuple[tuple[Span, ...], ...]
    back: int = 0


@dataclass(frozen=True)
class Phase:
    """layer: None outside the layers. sections: streamed in this order, of `routed` ones the chosen experts' share.
    nbytes: of the sections, whole, all ranks together. gathers: sections of which only rows are looked up, which costs
    next to nothing. updates: buffers read and written in place, by each item its own part. optional: left out of steps
    whose logits nobody wants. A private buffer that is both read and written is written first. exchange: of several
    ranks, where they have memory of their own; workers meet before it and after it.

    Of GPUs: feeds and loads say which bytes of the sections. puts and takes say which worker touches what of buffers
    without barriers; epoch counts layers from the step's first; meets: the warps of a worker that puts anything meet
    after all they take and before that.
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
    exchange: Exchange | None = None
    optional: bool = False
    feeds: tuple[Feed, ...] = ()
    loads: tuple[Load, ...] = ()
    puts: tuple[Put, ...] = ()
    takes: tuple[Take, ...] = ()
    epoch: int = 0
    meets: bool = True

    @property
    def key(self) -> str:
        return self.name if self.layer is None else f"layers.{self.layer}.{self.name}"

    @property
    def routed_nbytes(self) -> int:
        """Those of nbytes of which only the chosen experts' are read."""
        if not self.routed or not (self.feeds or self.loads):
            return self.nbytes if self.routed else 0
        return sum(f.nbytes for f in self.feeds if f.experts) + sum(x.nbytes for x in self.loads if x.routed)


@dataclass(frozen=True)
class Ring:
    """Pages of shared memory between a thread that streams weights (or several that take pages in turn) and the worker
    that uses them. It takes the feeds of all phases in their order, step after step."""

    name: str
    slots: int
    page_bytes: int


@dataclass(frozen=True)
class Region:
    """Bytes [at, at + nbytes) of a worker's shared memory. live: names of the phases in which it is in use, () for all;
    what shares bytes with it must not be in use then."""

    name: str
    at: int
    nbytes: int
    live: tuple[str, ...] = ()


@dataclass(frozen=True)
class Role:
    """Warps of a worker that do the same, and the registers that each of their threads has."""

    name: str
    warps: int
    registers: int


@dataclass(frozen=True)
class Machine:
    """What a GPU's schedule takes of each SM. shared_bytes: of all regions; launch_registers: a thread's at launch, out
    of which the roles' are dealt."""

    workers: int
    rings: tuple[Ring, ...]
    regions: tuple[Region, ...]
    shared_bytes: int
    roles: tuple[Role, ...]
    launch_registers: int


@dataclass(frozen=True)
class Schedule:
    """One step of a model on a target. sections: table of one rank's blob. context, tokens_per_step: the limits.
    kernel: where a target has several. machine: of GPUs."""

    target: str
    spec: ModelSpec
    sections: tuple[Section, ...]
    tp: int
    context: int
    tokens_per_step: int
    buffers: tuple[Buffer, ...]
    phases: tuple[Phase, ...]
    kernel: str = ""
    machine: Machine | None = None

    def buffer(self, name: str) -> Buffer:
        return next(b for b in self.buffers if b.name == name)

    def layer(self, i: int) -> list[Phase]:
        return [p for p in self.phases if p.layer == i]

    def barriers(self) -> set[str]:
        """Keys of the phases after which all workers meet."""
        return {w.phase for p in self.phases for w in p.waits if w.by == "barrier"}
