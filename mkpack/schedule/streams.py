"""Proof of what a GPU's schedule says of bytes and of shared memory: every streamed byte comes once, to one worker;
rings never stand still; what shares memory is not in use together; registers suffice."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations

from mkpack.schedule.ir import Feed, Machine, Phase, Schedule
from mkpack.schedule.shape import SHARED_LIMIT

REGISTERS = 1 << 16  # of an SM


def problems(schedule: Schedule, machine: Machine) -> Iterator[str]:
    """Everything that is wrong, each in a line."""
    found = [*_feeds(schedule, machine)]
    yield from found
    if not found:
        yield from _bytes(schedule, machine)
        yield from _rings(schedule, machine)
    yield from _shared(schedule, machine)
    yield from _registers(machine)


def actives(schedule: Schedule) -> tuple[int, ...]:
    """Numbers of chosen experts that a step may have: the fewest and the most."""
    moe = schedule.spec.moe
    if not moe:
        return (1,)
    return tuple(sorted({moe.top_k, min(moe.num_experts, schedule.tokens_per_step * moe.top_k)}))


def _feeds(schedule: Schedule, machine: Machine) -> Iterator[str]:
    """Feeds whose numbers fit each other and their ring, and waits of rings for phases before their own."""
    rings = {r.name: r for r in machine.rings}
    place = {p.key: i for i, p in enumerate(schedule.phases)}
    for i, p in enumerate(schedule.phases):
        for f in p.feeds:
            what = f"{p.key}: the feed of {f.section}"
            if f.ring not in rings:
                yield f"{what} goes through {f.ring}, which is no ring"
                continue
            if len(f.bounds) != machine.workers + 1 or list(f.bounds) != sorted(f.bounds) or f.bounds[0]:
                yield f"{what} is not dealt to {machine.workers} workers in their order"
            if sum(f.pages) != f.unit_bytes:
                yield f"{what} has units of {f.unit_bytes} bytes in pages of {sum(f.pages)}"
            if (most := max(f.pages) * f.pack) > rings[f.ring].page_bytes:
                yield f"{what} has pages of {most} bytes, a slot of {f.ring} holds {rings[f.ring].page_bytes}"
            if f.held > rings[f.ring].slots:
                yield f"{what} has {f.held} pages in use at a time, {f.ring} has {rings[f.ring].slots} slots"
            if f.after is not None and place.get(f.after, i) >= i:
                yield f"wait cycle: {p.key} waits for pages that are asked for after {f.after}, which comes only then"


def _bytes(schedule: Schedule, machine: Machine) -> Iterator[str]:
    """Streamed sections: every byte exactly once, by one worker. Loaded ones: every byte at least once."""
    sections = {s.name: s for s in schedule.sections}
    streamed: dict[str, list[tuple[int, int, str]]] = defaultdict(list)
    loaded: dict[str, list[tuple[int, int, str]]] = defaultdict(list)
    alike: dict[Feed, list[tuple[int, int]]] = {}  # layers differ by where they begin
    for p in schedule.phases:
        for f in p.feeds:
            if f.section in sections:
                bare = replace(f, at=0, after=None)
                if bare not in alike:
                    alike[bare] = _joined(sorted(spans(bare, machine.workers)))
                streamed[f.section] += [(f.at + a, f.at + b, p.key) for a, b in alike[bare]]
        for x in p.loads:
            loaded[x.section].append((x.at, x.at + x.nbytes, p.key))
    for name, section in sections.items():
        if any(name in p.gathers for p in schedule.phases):
            continue
        if name in streamed and name in loaded:
            yield f"section {name} is both streamed and loaded"
        yield from _cover(name, section.nbytes, sorted(streamed.get(name) or loaded[name]), once=name in streamed)


def _joined(found: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Those that end where the next begins as one."""
    joined: list[tuple[int, int]] = []
    for a, b in found:
        if joined and joined[-1][1] == a:
            joined[-1] = joined[-1][0], b
        else:
            joined.append((a, b))
    return joined


def spans(feed: Feed, workers: int) -> Iterator[tuple[int, int]]:
    """Bytes from and to in the section of everything that workers stream of a feed, were every expert chosen."""
    for worker in range(workers):
        for expert, first, last in feed.runs(worker, max(feed.experts, 1)):
            at = feed.at + expert * feed.stride
            yield at + first * feed.unit_bytes, at + last * feed.unit_bytes


def _cover(name: str, nbytes: int, found: list[tuple[int, int, str]], once: bool) -> Iterator[str]:
    end, last = 0, "nothing"
    for at, stop, phase in found:
        if at > end:
            yield f"section {name}: bytes {end} to {at}, before those of {phase}, are never read"
        if at < end and once:
            yield f"section {name}: bytes {at} to {min(end, stop)} are streamed twice, by {last} and {phase}"
        if stop > end:
            end, last = stop, phase
    if end < nbytes:
        yield f"section {name}: bytes {end} to {nbytes} are never read"
    if end > nbytes:
        yield f"section {name}: {last} reads up to byte {end} of {nbytes}"


# -- rings -------------------------------------------------------------------------------------------------------------


def _rings(schedule: Schedule, machine: Machine) -> Iterator[str]:
    """A worker and the threads of its rings, played through for two steps: nobody may stand still.

    What a worker waits for from other workers is always of an earlier phase, and every worker has the phases in this
    order. So if none stands still alone, none does together: of all that wait, the one in the earliest phase goes on.
    Layers of a kind are alike but for their bytes; the first two, and the first of every kind, stand for all.
    """
    kinds: dict[tuple[str, ...], int] = {}
    for i in range(len(schedule.spec.layers)):
        kinds.setdefault(tuple(p.name for p in schedule.layer(i)), i)
    shown = {None, 0, 1, *kinds.values()}
    chosen = [p for p in schedule.phases if p.layer in shown]
    told: set[str] = set()
    for active in actives(schedule):
        seen: set[tuple[int, ...]] = set()
        for worker in range(machine.workers):
            counts = tuple(f.page_count(worker, active) for p in chosen for f in p.feeds)
            if counts in seen:
                continue
            seen.add(counts)
            stuck = _Play(chosen, machine, worker, active).stuck()
            if stuck and stuck not in told:
                told.add(stuck)
                yield f"SM {worker}, {active} experts chosen: {stuck}"


class _Play:
    """Programs of a worker and of its rings: ("page", ring, held, phase) or ("meet", ring, phase)."""

    def __init__(self, phases: list[Phase], machine: Machine, worker: int, active: int):
        self.slots = {r.name: r.slots for r in machine.rings}
        self.worker: list[tuple[str, str, int, str]] = []
        self.rings: dict[str, list[tuple[str, str]]] = {name: [] for name in self.slots}
        gates = {(f.after, f.ring) for p in phases for f in p.feeds if f.after is not None}
        for _ in range(2):
            for p in phases:
                for f in p.feeds:
                    n, ring = f.page_count(worker, active), self.rings[f.ring]
                    self.worker += [("page", f.ring, f.held, p.key)] * n + [("release", f.ring, 0, p.key)]
                    early = min(f.early, n)
                    ring += [("page", "")] * early
                    if f.after is not None:
                        ring.append(("meet", f.after))
                    ring += [("page", "")] * (n - early)
                self.worker += [("meet", name, 0, p.key) for name in self.slots if (p.key, name) in gates]

    def stuck(self) -> str | None:
        """Who waits for whom, when nobody can go on."""
        issued, taken, released = (dict.fromkeys(self.slots, 0) for _ in range(3))
        at, step = dict.fromkeys(self.slots, 0), 0
        moved = True
        while moved:
            moved = False
            for name, program in self.rings.items():
                while at[name] < len(program) and program[at[name]][0] == "page":
                    if issued[name] - released[name] >= self.slots[name]:
                        break
                    issued[name] += 1
                    at[name] += 1
                    moved = True
            while step < len(self.worker):
                what, name, held, phase = self.worker[step]
                if what == "release":
                    released[name] = taken[name]
                elif what == "page":
                    if taken[name] == issued[name]:
                        break
                    taken[name] += 1
                    released[name] = max(released[name], taken[name] - held + 1)
                else:
                    program = self.rings[name]
                    if at[name] == len(program) or program[at[name]] != ("meet", phase):
                        break
                    at[name] += 1
                step, moved = step + 1, True
        if step == len(self.worker):
            return None
        what, name, _, phase = self.worker[step]
        program, place = self.rings[name], at[name]
        if place == len(program):
            behind = "has no more pages"
        else:
            behind = f"waits for {program[place][1] or 'a free slot'}"
        return f"wait cycle: {phase} waits for {'a page' if what == 'page' else 'the thread'} of {name}, which {behind}"


# -- shared memory, registers ------------------------------------------------------------------------------------------


def _shared(schedule: Schedule, machine: Machine) -> Iterator[str]:
    names = {p.name for p in schedule.phases}
    for r in machine.regions:
        if r.at + r.nbytes > machine.shared_bytes:
            yield f"shared memory: {r.name} ends at byte {r.at + r.nbytes} of {machine.shared_bytes}"
    for a, b in combinations(machine.regions, 2):
        if a.at < b.at + b.nbytes and b.at < a.at + a.nbytes:
            both = (set(a.live) or names) & (set(b.live) or names)
            if both:
                yield f"shared memory: {a.name} and {b.name} share bytes, and {', '.join(sorted(both))} uses both"
    regions = {r.name: r for r in machine.regions}
    for ring in machine.rings:
        used = {p.name for p in schedule.phases if any(f.ring == ring.name for f in p.feeds)}
        nbytes, region = ring.slots * ring.page_bytes, regions.get(f"{ring.name} ring")
        if region is None or region.nbytes < nbytes or not used <= (set(region.live) or names):
            yield f"shared memory: ring {ring.name} of {nbytes} bytes has no region of its own"
    if machine.shared_bytes > SHARED_LIMIT:
        yield f"shared memory: {machine.shared_bytes} bytes, a block can have {SHARED_LIMIT}"


def _registers(machine: Machine) -> Iterator[str]:
    threads = 32 * sum(r.warps for r in machine.roles)
    launched, dealt = threads * machine.launch_registers, sum(32 * r.warps * r.registers for r in machine.roles)
    if launched > REGISTERS:
        yield f"registers: {threads} threads of {machine.launch_registers} take {launched}, an SM has {REGISTERS}"
    if dealt > launched:
        yield f"registers: {dealt} are dealt out of {launched} that the launch took; asking for more never returns"
    for r in machine.roles:
        if r.registers % 8 or r.warps % 4:
            yield f"registers: {r.name}: they are dealt by eights, to groups of four warps"
