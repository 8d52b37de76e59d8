"""What `mkpack graph` shows of a GPU's schedule beside its phases: who streams which bytes, who exchanges which words,
and what an SM's shared memory and registers are for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest
from typing import Any

from mkpack.schedule import Phase, Schedule
from mkpack.schedule.ir import Feed, Machine
from mkpack.schedule.shape import SHARED_LIMIT

Rows = list[list[str]]


def tables(s: Schedule, machine: Machine, chosen: Sequence[Phase]) -> Iterator[tuple[str, Rows]]:
    """(title, rows) of every table, for the phases that are shown."""
    yield _streams(s, machine, chosen)
    if words := _words(s, machine, chosen):
        yield "words {value, epoch} that SMs exchange, in two copies that epochs use in turn", words
    yield _memory(machine)
    rows = [["warps", "do", "registers a thread", "of the SM's"]]
    for role in machine.roles:
        rows.append([f"{role.warps}", role.name, f"{role.registers}", f"{32 * role.warps * role.registers:,}"])
    yield f"registers ({machine.launch_registers} a thread at launch)", rows


def _streams(s: Schedule, machine: Machine, chosen: Iterable[Phase]) -> tuple[str, Rows]:
    moe = s.spec.moe
    active = moe.top_k if moe else 1
    rows = [["ring", "phase", "from", "units", "unit", "pages of a unit", "SMs", "units of one", "asked for after"]]
    for p in chosen:
        for f in p.feeds:
            counts = [sum(last - first for _, first, last in f.runs(w, active)) for w in range(machine.workers)]
            busy = [n for n in counts if n]
            least, most = min(busy, default=0), max(busy, default=0)
            rows.append(
                [
                    *(f.ring, p.name, f.section, f"{f.units:,}{' an expert' if f.experts else ''}"),
                    *(f"{f.unit_bytes:,} B", " + ".join(f"{n:,}" for n in f.pages), f"{len(busy)}"),
                    *(f"{least} - {most}" if least < most else f"{most}", _after(f)),
                ]
            )
    slots = ", ".join(f"{r.name} {r.slots} x {r.page_bytes:,} B" for r in machine.rings)
    experts = f", with {active} experts chosen" if moe else ""
    return (
        f"streams, in the order of each ring, which runs on through phases, layers and steps ({slots}){experts}",
        rows,
    )


def _after(f: Feed) -> str:
    if f.after is None:
        return "the pages before"
    return f.after.rpartition(".")[2] + (f" (the first {f.early} before)" if f.early else "")


def _words(s: Schedule, machine: Machine, chosen: Sequence[Phase]) -> Rows:
    rows = [["words", "written by", "SMs", "read by", "SMs", "words of one", "replicas"]]
    for b in (b for b in s.buffers if b.scope == "words"):
        left, right = [], []
        for p in chosen:
            for bounds in (put.bounds for put in p.puts if put.buffer == b.name):
                left.append([p.name, f"{sum(bounds[w] < bounds[w + 1] for w in range(machine.workers))}"])
            for take in (take for take in p.takes if take.buffer == b.name):
                counts = [n for spans in take.spans if (n := sum(z - a for a, z in spans))]
                late = " of the layer after" if take.back and p.layer is not None else ""
                right.append([p.name + late, f"{len(counts)}", f"{max(counts):,}", f"{b.replicas}"])
        pairs = zip_longest(left, right, fillvalue=None)
        for place, (put, take_) in enumerate(pairs):
            rows.append([b.name if place == 0 else "", *(put or ["", ""]), *(take_ or ["", "", "", ""])])
    return rows if len(rows) > 1 else []


def _memory(machine: Machine) -> tuple[str, Rows]:
    rows = [["at", "bytes", "holds", "in phases"]]
    for r in machine.regions:
        rows.append([f"{r.at:,}", f"{r.nbytes:,}", r.name, ", ".join(r.live) or "all"])
    return f"shared memory of an SM: {machine.shared_bytes:,} of {SHARED_LIMIT:,} bytes", rows


def document(machine: Machine) -> dict[str, Any]:
    """The machine for JSON."""
    return {
        "sms": machine.workers,
        "rings": {r.name: {"slots": r.slots, "page_bytes": r.page_bytes} for r in machine.rings},
        "shared_bytes": machine.shared_bytes,
        "regions": [{"name": r.name, "at": r.at, "bytes": r.nbytes, "phases": list(r.live)} for r in machine.regions],
        "launch_registers": machine.launch_registers,
        "roles": [{"does": r.name, "warps": r.warps, "registers": r.registers} for r in machine.roles],
    }
