"""Proof that words and ordered memory can be used as a schedule says: what a worker reads was written by somebody, for
this epoch; nothing is overwritten before all who read it are known to have read it.

A worker knows of another's phase that it is over when it has read a word that the other wrote afterwards, or one of a
third who knew. This is played through, worker by worker, for three steps: knowledge that comes from waits does not
depend on who is fast. Within a worker warps go on alone: what one has read, the others know after the warps have met,
and only that goes along with the words they write.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field

from mkpack.schedule.ir import Buffer, Machine, Phase, Put, Schedule, Span, Take

STEPS = 3
Known = dict[int, int]  # number of a phase, counted over steps -> the workers of which it is over, a bit each
Groups = dict[tuple[Span, ...], int]  # what is read -> the workers that read just that, a bit each


@dataclass
class _Content:
    """What a copy of a buffer holds: the phase that wrote it, for which epoch, who wrote what, what the writers knew,
    and who has read what since."""

    writer: int
    epoch: int
    bounds: tuple[int, ...]
    told: list[Known] = field(default_factory=list)
    readers: list[tuple[int, Groups]] = field(default_factory=list)


def problems(schedule: Schedule, machine: Machine) -> Iterator[str]:
    """Everything that is wrong, each in a line; none of a schedule that has no words."""
    if any(b.scope in ("words", "ordered") for b in schedule.buffers):
        yield from _Exchange(schedule, machine).problems()


class _Exchange:
    def __init__(self, schedule: Schedule, machine: Machine):
        self.buffers = {b.name: b for b in schedule.buffers}
        layers = len(schedule.spec.layers)
        # As many layers as tell all there is: copies alternate, so an even number stays even.
        self.layers = layers if layers < 5 else 3 + (layers + 1) % 2
        dropped = layers - self.layers
        self.phases = [p for p in schedule.phases if p.layer is None or p.layer < self.layers]
        self.epochs = [p.epoch if p.layer is not None else p.epoch - dropped for p in self.phases]
        self.workers = machine.workers
        # What each worker's warps know together, and what only some of them know yet.
        self.known: list[Known] = [{} for _ in range(self.workers)]
        self.fresh: list[Known] = [{} for _ in range(self.workers)]
        self.contents: dict[tuple[str, int | None], _Content] = {}

    def problems(self) -> Iterator[str]:
        for p in self.phases:
            yield from self._told(p)
        for step in range(STEPS):
            for place, p in enumerate(self.phases):
                now = step * len(self.phases) + place
                epoch = step * self.layers + self.epochs[place] + 1
                for take in p.takes:
                    yield from self._take(now, epoch, p, take)
                for known in self.fresh:
                    known[now] = 0
                writes = {w for put in p.puts for w in range(self.workers) if put.bounds[w] < put.bounds[w + 1]}
                for w in range(self.workers):
                    self.fresh[w][now] |= 1 << w
                    if p.meets and w in writes:
                        _merge(self.known[w], self.fresh[w])
                        self.fresh[w] = {}
                for put in p.puts:
                    yield from self._put(now, epoch, p, put)
                self._forget()

    def _told(self, p: Phase) -> Iterator[str]:
        """Whether a phase says of every buffer of words or ordered memory that it uses who touches what."""
        for verb, uses, names in (
            ("reads", (*p.reads, *p.updates), {t.buffer for t in p.takes}),
            ("writes", (*p.writes, *p.updates), {put.buffer for put in p.puts}),
        ):
            found = {u.buffer for u in uses if self.buffers[u.buffer].scope in ("words", "ordered")}
            for name in sorted(found ^ names):
                yield f"{p.key} {verb} {name}, but {'no worker does' if name in found else 'only its workers say so'}"

    def _key(self, buffer: Buffer, p: Phase, epoch: int) -> tuple[str, int | None]:
        if buffer.scope == "words":
            return buffer.name, epoch % 2
        return buffer.name, p.layer if buffer.per_layer else None

    def _take(self, now: int, epoch: int, p: Phase, take: Take) -> Iterator[str]:
        buffer, wanted = self.buffers[take.buffer], epoch - take.back
        content = self.contents.get(self._key(buffer, p, wanted))
        groups: Groups = {}
        for w, spans in enumerate(take.spans):
            if spans:
                groups[spans] = groups.get(spans, 0) | 1 << w
        if buffer.scope == "ordered":
            if content:
                yield from self._ordered(content, p, take.buffer, groups)
                content.readers.append((now, groups))
            return
        if content is None or content.epoch != wanted:
            yield f"{p.key} waits for words of {buffer.name} that no phase before it writes in that epoch"
            return
        for spans, readers in groups.items():
            if (words := max(b for _, b in spans)) > content.bounds[-1]:
                written = f"{self._name(content.writer)} writes {content.bounds[-1]}"
                yield f"{p.key} waits for {words} words of {buffer.name}, of which {written}"
            learnt: Known = {}
            for source in _bits(_owners(content.bounds, spans)):
                _merge(learnt, content.told[source])
            for w in _bits(readers):
                _merge(self.fresh[w], learnt)
        content.readers.append((now, groups))

    def _ordered(self, content: _Content, p: Phase, buffer: str, groups: Groups) -> Iterator[str]:
        for spans, readers in groups.items():
            sources = _owners(content.bounds, spans)
            for w in _bits(readers):
                known = self.known[w].get(content.writer, 0) | self.fresh[w].get(content.writer, 0)
                if missing := sources & ~known & ~(1 << w):
                    who, writer = _first(missing), self._name(content.writer)
                    yield f"{p.key} on SM {w} reads {buffer}, but does not know that {writer} on SM {who} is over"
                    return

    def _put(self, now: int, epoch: int, p: Phase, put: Put) -> Iterator[str]:
        buffer = self.buffers[put.buffer]
        key = self._key(buffer, p, epoch)
        if old := self.contents.get(key):
            yield from self._overwritten(old, now, p, put)
        told = [dict(known) for known in self.known]
        self.contents[key] = _Content(now, epoch, put.bounds, told)

    def _overwritten(self, old: _Content, now: int, p: Phase, put: Put) -> Iterator[str]:
        # A phase that reads ordered memory and writes there does so in different places of what is one here.
        written: Groups = {
            (span,): 1 << w for w, span in enumerate(zip(old.bounds, old.bounds[1:], strict=False)) if span[0] < span[1]
        }
        for phase, groups in [(old.writer, written), *(r for r in old.readers if r[0] != now)]:
            masks: dict[Span, int] = {}
            for w in range(self.workers):
                span = put.bounds[w], put.bounds[w + 1]
                if span[0] == span[1]:
                    continue
                if span not in masks:
                    same = groups is written and old.bounds == put.bounds
                    masks[span] = groups[span,] if same else _touching(groups, span)
                # What this worker did itself in an earlier phase, it did before; if all its warps know.
                if missing := masks[span] & ~self.known[w].get(phase, 0):
                    who = _first(missing)
                    does = f"may still {'write' if phase == old.writer else 'read'} it"
                    yield f"{p.key} on SM {w} writes {put.buffer} while {self._name(phase)} on SM {who} {does}"
                    break

    def _name(self, phase: int) -> str:
        return self.phases[phase % len(self.phases)].key

    def _forget(self) -> None:
        """Only what somebody may still have to know is kept."""
        needed = {c.writer for c in self.contents.values()} | {r for c in self.contents.values() for r, _ in c.readers}
        for w in range(self.workers):
            self.known[w] = {k: v for k, v in self.known[w].items() if k in needed}
            self.fresh[w] = {k: v for k, v in self.fresh[w].items() if k in needed}


def _merge(into: Known, more: Known) -> None:
    for phase, workers in more.items():
        into[phase] = into.get(phase, 0) | workers


def _owners(bounds: tuple[int, ...], spans: tuple[Span, ...]) -> int:
    """Workers that write anything of the spans."""
    found = 0
    for a, b in spans:
        if a < b:
            first, last = bisect_right(bounds, a) - 1, bisect_left(bounds, b)
            for w in range(first, min(last, len(bounds) - 1)):
                if bounds[w] < bounds[w + 1]:
                    found |= 1 << w
    return found


def _touching(groups: Groups, span: Span) -> int:
    """Workers whose spans have something of `span`."""
    found = 0
    for spans, workers in groups.items():
        if any(a < span[1] and span[0] < b for a, b in spans):
            found |= workers
    return found


def _bits(workers: int) -> Iterator[int]:
    while workers:
        low = workers & -workers
        yield low.bit_length() - 1
        workers ^= low


def _first(workers: int) -> int:
    return (workers & -workers).bit_length() - 1
