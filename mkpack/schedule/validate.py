"""Proof that a schedule can be run as it stands, for steps with and without logits, in any succession.

Workers go through the phases in order. So whatever any phase so far waited for by a barrier is over, and so is all that
came before that; nothing else is assumed.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from mkpack.errors import InternalError
from mkpack.schedule import exchange, streams
from mkpack.schedule.ir import Buffer, Feed, Phase, Schedule, Use, carried_words

if TYPE_CHECKING:
    from mkpack.manifest import Section


def check(schedule: Schedule) -> None:
    """InternalError that names what is wrong with the schedule, if anything is."""
    if problems := validate(schedule):
        more = [f"and {len(problems) - 8} more"] if len(problems) > 8 else []
        shown = "\n  - ".join(problems[:8] + more)
        what = f"{schedule.target}, {schedule.kernel}" if schedule.kernel else schedule.target
        raise InternalError(f"the schedule for {what} is wrong, nothing was compiled:\n  - {shown}")


def validate(schedule: Schedule) -> list[str]:
    """Everything that is wrong, each in a line that names phase, buffer or section; empty when the schedule holds."""
    problems = [*_names(schedule)]
    if not problems:
        if schedule.machine:
            problems = [*streams.problems(schedule, schedule.machine), *exchange.problems(schedule, schedule.machine)]
        else:
            problems = [*_sections(schedule)]
        problems += [*_uses(schedule), *_waits(schedule), *_exchanges(schedule)]
        optional = any(p.optional for p in schedule.phases)
        for logits in itertools.product((True, False) if optional else (True,), repeat=2):
            problems += _Run(schedule, logits).problems()
    return list(dict.fromkeys(problems))


def _names(schedule: Schedule) -> Iterator[str]:
    """What must be unique or known before anything else can be said."""
    keys, buffers = [p.key for p in schedule.phases], [b.name for b in schedule.buffers]
    sections = [s.name for s in schedule.sections]
    for kind, names in (("phase", keys), ("buffer", buffers), ("section", sections)):
        for name in (n for n, times in Counter(names).items() if times > 1):
            yield f"{kind} {name} is there twice"
    for p in schedule.phases:
        for name in dict.fromkeys(u.buffer for u in (*p.reads, *p.writes, *p.updates)):
            if name not in buffers:
                yield f"{p.key} uses {name}, which is no buffer"
        for name in dict.fromkeys([*(put.buffer for put in p.puts), *(take.buffer for take in p.takes)]):
            if name not in buffers:
                yield f"{p.key} exchanges {name}, which is no buffer"
        for name in (*p.sections, *p.gathers):
            if name not in sections:
                yield f"{p.key} reads section {name}, which the blob does not have"


def _sections(schedule: Schedule) -> Iterator[str]:
    """Every section streamed once, by a phase of its own layer, in the order in which the bytes lie."""
    readers: dict[str, list[Phase]] = {s.name: [] for s in schedule.sections}
    offset = {s.name: s.offset for s in schedule.sections}
    before: dict[int | None, str] = {}
    for p in schedule.phases:
        for name in p.sections:
            readers[name].append(p)
            last = before.setdefault(p.layer, name)
            # Outside the layers a tied head goes back to the embedding, which is the first section.
            if p.layer is not None and offset[name] < offset[last]:
                yield f"{p.key} streams section {name} after {last}, which lies behind it"
            before[p.layer] = name
    gathered = {name for p in schedule.phases for name in p.gathers}
    for name, found in readers.items():
        if not found and name not in gathered:
            yield f"section {name} is never read"
        if len(found) > 1:
            yield f"section {name} is read more than once: by {', '.join(p.key for p in found)}"
        own = int(name.split(".")[1]) if name.startswith("layers.") else None
        for p in found:
            if p.layer != own:
                yield f"{p.key} reads section {name} of another layer"


def _uses(schedule: Schedule) -> Iterator[str]:
    """Items to do, uses inside their buffers, and no buffer or value that nobody needs."""
    buffers = {b.name: b for b in schedule.buffers}
    read = {u.buffer for p in schedule.phases for u in (*p.reads, *p.updates)}
    used = read | {u.buffer for p in schedule.phases for u in p.writes}
    for name in buffers:
        if name not in used:
            yield f"buffer {name} is never used"
        elif name not in read:
            writers = ", ".join(p.key for p in schedule.phases if any(u.buffer == name for u in p.writes))
            yield f"buffer {name} is written by {writers} and never read"
    for p in schedule.phases:
        if p.items.count < 1:
            yield f"{p.key} has {p.items.count} items: expected at least one"
        for u in dict.fromkeys((*p.reads, *p.writes, *p.updates)):
            if not 0 < u.elements <= buffers[u.buffer].elements:
                yield f"{p.key} uses {u.elements} elements of {u.buffer}, which has {buffers[u.buffer].elements}"
        shared = {u.buffer for u in p.writes if buffers[u.buffer].scope == "shared"}
        for u in p.reads:
            if u.buffer in shared:
                yield f"{p.key} reads {u.buffer} while other items of it write there"


def _waits(schedule: Schedule) -> Iterator[str]:
    """Waits that can end: for a phase that is there, and that no worker comes to only after the wait."""
    place = {p.key: i for i, p in enumerate(schedule.phases)}
    for i, p in enumerate(schedule.phases):
        for w in p.waits:
            if w.phase not in place:
                yield f"{p.key} waits for {w.phase}, which is no phase"
                continue
            awaited = schedule.phases[place[w.phase]]
            if place[w.phase] >= i and not w.earlier_step:
                yield f"wait cycle: {p.key} waits for {w.phase}, which workers reach only after it"
            if w.by == "last arriver" and place[w.phase] != i - 1:
                yield f"{p.key} starts where the last item of {w.phase} ends, but does not come next"
            if awaited.optional and not p.optional and not w.earlier_step:
                yield f"{p.key} waits for {w.phase}, which not every step has"


def _exchanges(schedule: Schedule) -> Iterator[str]:
    """Exchanges that several ranks have, of what their phase made, and with workers that meet: before it, or one would
    send what another has not finished, and after it, or one would read what another has not taken."""
    barriers = schedule.barriers() | {p.key for p in schedule.phases if p.items.workers == "first"}
    for p in schedule.phases:
        if p.exchange is None:
            continue
        made = {u.buffer for u in (*p.writes, *p.updates) if u.part}
        for name in p.exchange.buffers:
            if name not in made:
                yield f"{p.key} exchanges {name}, of which no rank has a part from it"
        if schedule.tp == 1:
            yield f"{p.key} exchanges {', '.join(p.exchange.buffers)}, but there is one rank"
        if p.exchange.words < 1:
            yield f"{p.key} exchanges {p.exchange.words} words: expected at least one"
        elif schedule.machine is None and (values := _values(schedule, p)):
            if p.exchange.words != (expected := carried_words(values, p.exchange.carried)):
                yield f"{p.key} exchanges {p.exchange.words} words: a rank's part has {expected}"
        if p.key not in barriers:
            yield f"{p.key} ends with an exchange, but nobody waits for it"


def _values(schedule: Schedule, p: Phase) -> int | None:
    """A rank's part for the most tokens, as the blob has it: a value for each row that a rank has of the phase's
    matrix, or, where it has none, for each column of the matrix that reads its result whole; None without either."""
    sections, moe = {s.name: s for s in schedule.sections}, schedule.spec.moe
    gathered = {name for phase in schedule.phases for name in phase.gathers}

    def matrix(phase: Phase) -> Section | None:
        return next((sections[n] for n in phase.sections if sections[n].cols > 1), None)

    if own := matrix(p):
        values = own.rows // (schedule.tp if own.name in gathered else 1)  # a tied head is the embedding, held whole
        if p.routed and moe:  # the rows of all experts; of those chosen each has a result, or all together have one
            values = values // moe.num_experts * (moe.top_k if p.items.per == "active expert" else 1)
        return schedule.tokens_per_step * values // (2 if own.name.endswith(".gate_up") else 1)
    assert p.exchange
    buffers = p.exchange.buffers
    for reader in schedule.phases:
        if reader.layer == p.layer and (read := matrix(reader)):
            if any(u.buffer in buffers and not u.part for u in reader.reads):
                return schedule.tokens_per_step * read.cols // schedule.tp
    return None


@dataclass
class _State:
    """What a buffer has seen: the phases that wrote it last (one, or all that update it), those that read since.
    has: who has all of it where ranks have memory of their own."""

    writer: int | None = None
    elements: int = 0
    has: Literal["every rank", "the first rank", "no rank"] = "every rank"
    readers: list[int] = field(default_factory=list)


class _Run:
    """Two steps in succession, phase by phase. logits: whether each has the optional phases."""

    def __init__(self, schedule: Schedule, logits: tuple[bool, ...]):
        self.buffers = {b.name: b for b in schedule.buffers}
        self.apart = schedule.tp > 1
        self.phases = [(s, p) for s, all_ in enumerate(logits) for p in schedule.phases if all_ or not p.optional]
        self.state: dict[tuple[str, int | None], _State] = defaultdict(_State)
        self.over = -1  # every phase up to here is complete, on all workers
        self.flows: set[int] = set()  # phases whose data an item of this one has complete, by last arriver or words
        self.asked: dict[str, int] = {}  # of a ring: what was over when its next pages could be asked for
        self.gates = {(f.after, f.ring) for _, p in self.phases for f in p.feeds if f.after is not None}

    def problems(self) -> Iterator[str]:
        latest: dict[str, int] = {}
        for i, (_, p) in enumerate(self.phases):
            self.flows = set()
            for w in p.waits:
                if w.phase in latest and w.by == "barrier":
                    self.over = max(self.over, latest[w.phase])
                elif w.phase in latest:
                    self.flows.add(latest[w.phase])
            for f in p.feeds:
                if f.section in self.buffers:
                    yield from self._ahead(i, p, f)
            for after, ring in self.gates:
                if after == p.key:
                    self.asked[ring] = self.over
            written = {u.buffer for u in p.writes}
            # A private buffer in both is filled first, and then read by the same worker.
            for u in (*p.reads, *p.updates):
                if u.buffer not in written or self.buffers[u.buffer].scope != "private":
                    yield from self._read(i, p, u)
            for u in (*p.writes, *p.updates):
                yield from self._write(i, p, u)
            if p.exchange:
                for name in p.exchange.buffers:
                    self._of(name, p).has = "the first rank" if p.exchange.first else "every rank"
            for u in p.reads:
                self._of(u.buffer, p).readers.append(i)
            latest[p.key] = i

    def _of(self, name: str, p: Phase) -> _State:
        return self.state[name, p.layer if self.buffers[name].per_layer else None]

    def _ahead(self, i: int, p: Phase, feed: Feed) -> Iterator[str]:
        """What a ring reads of a buffer must be there when the ring may ask for it, which is ahead of the phase."""
        writer = self._of(feed.section, p).writer
        if writer is not None and writer > self.asked.get(feed.ring, -1):
            yield f"{p.key} has pages of {feed.section} asked for while {self._name(writer, i)} may still write there"

    def _read(self, i: int, p: Phase, use: Use) -> Iterator[str]:
        buffer, state = self.buffers[use.buffer], self._of(use.buffer, p)
        if state.writer is None or not self._alive(buffer, state.writer, i):
            if buffer.lifetime != "model":
                yield f"{p.key} reads {use.buffer}, which no phase before it in this {buffer.lifetime} writes"
            return
        writer = self.phases[state.writer][1].key
        # Of ordered memory exchange.py tells when it is there.
        alone = buffer.scope in ("private", "ordered")
        if not alone and not (self._done(state.writer, i) or state.writer in self.flows):
            yield f"{p.key} reads {use.buffer}, but does not wait for {writer}, which writes it"
        whole = state.has == "every rank" or (state.has == "the first rank" and p.items.workers == "first")
        if self.apart and not use.part and not whole:
            yield f"{p.key} reads all of {use.buffer}, which {state.has} has: {writer} writes a rank's part of it"
        if buffer.lifetime != "model" and use.elements > state.elements:
            yield f"{p.key} reads {use.elements} elements of {use.buffer}, of which {writer} writes {state.elements}"

    def _write(self, i: int, p: Phase, use: Use) -> Iterator[str]:
        state = self._of(use.buffer, p)
        if self.buffers[use.buffer].scope in ("shared", "published"):
            for other in state.readers:
                if not self._done(other, i):
                    yield f"{p.key} writes {use.buffer} while {self._name(other, i)} may still read it"
            if state.writer is not None and not self._done(state.writer, i):
                yield f"{p.key} writes {use.buffer} while {self._name(state.writer, i)} may still write it"
        state.writer, state.elements, state.readers = i, use.elements, []
        state.has = "no rank" if use.part else "every rank"

    def _alive(self, buffer: Buffer, writer: int, reader: int) -> bool:
        (step, p), (step_now, now) = self.phases[writer], self.phases[reader]
        match buffer.lifetime:
            case "model":
                return True
            case "step":
                return step == step_now
            case "layer":
                return (step, p.layer) == (step_now, now.layer)
            case "phase":
                return writer == reader

    def _done(self, earlier: int, now: int) -> bool:
        first = all(self.phases[i][1].items.workers == "first" for i in (earlier, now))
        return earlier <= self.over or first

    def _name(self, earlier: int, now: int) -> str:
        (step, p), (step_now, _) = self.phases[earlier], self.phases[now]
        return p.key + (" of the step before" if step != step_now else "")
