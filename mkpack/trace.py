"""`mkpack trace`: when every SM of a GPU did what in a few steps, as a file for Perfetto (or chrome://tracing) and as a
page that names the largest bubbles.

A bubble is the time between an SM's last result and the input of its next phase: it waits for others.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mkpack.errors import UserError, os_errors
from mkpack.generation import spread
from mkpack.loader import load

if TYPE_CHECKING:
    import numpy as np

    from mkpack.model import Model

ROLES = ("consumers", "dense", "experts")  # warps that multiply; those that stream dense weights, expert weights
STEPS, CONTEXT = 3, 512
LARGEST = 12  # bubbles that the page lists one by one


@dataclass(frozen=True)
class Trace:
    """stamps: int64 [steps, layers, rows, SMs, 4] nanoseconds of one clock, 0: none. Of a phase: entered, input there,
    products done, published; of a stream: first page could be issued, -, -, last was. The last layer is what follows
    the layers. names: of the rows, a role and what it does."""

    names: list[str]
    stamps: np.ndarray
    title: str

    @property
    def phases(self) -> list[int]:
        """Rows of the consumers: everything else runs beside them."""
        return [i for i, name in enumerate(self.names) if name.startswith("consumers ")]

    @property
    def entered(self) -> np.ndarray:
        """[steps, layers, rows, SMs]; 0 where an SM has no part in it."""
        return self.stamps[..., 0]

    @property
    def begin(self) -> np.ndarray:
        """When the input was there: a phase that does not tell has it when it is entered."""
        import numpy as np

        return np.where(self.stamps[..., 1] > 0, self.stamps[..., 1], self.stamps[..., 0])

    @property
    def end(self) -> np.ndarray:
        return self.stamps.max(axis=-1)


@dataclass(frozen=True)
class PhaseTime:
    """A phase of the consumers in microseconds. bubble: before it; each: the median over SMs, layers and steps; most:
    the largest one; step: the median over SMs of the sum over the layers of a step, mean of the steps."""

    name: str
    work_each_us: float
    work_step_us: float
    bubble_each_us: float
    bubble_most_us: float
    bubble_step_us: float


@dataclass(frozen=True)
class Bubble:
    """Before `phase` of a layer: the median over the SMs and the largest, at `sm`, in microseconds."""

    step: int
    layer: int
    phase: str
    us: float
    most_us: float
    sm: int


@dataclass(frozen=True)
class Summary:
    """step_us: from the first SM's first input to the last one's last result, mean of the steps. phases: largest
    bubbles first."""

    step_us: float
    phases: tuple[PhaseTime, ...]
    bubbles: tuple[Bubble, ...]

    def render(self) -> str:
        lines = [
            f"a step takes {self.step_us:.1f} us; microseconds, of the median SM:",
            "phase        bubble before it: each    most   a step | work: each   a step",
        ]
        for p in self.phases:
            lines.append(
                f"{p.name:12} {p.bubble_each_us:22.2f} {p.bubble_most_us:7.2f} {p.bubble_step_us:8.1f} |"
                f" {p.work_each_us:10.2f} {p.work_step_us:8.1f}"
            )
        return "\n".join(lines)


def run(
    path: Path | str,
    output: Path,
    *,
    target: str | None = None,
    steps: int = STEPS,
    tokens: int = 1,
    context: int | None = None,
) -> str:
    """Traces an artifact that was built with --trace and writes `output` (.json, or .json.gz) and the page beside it.

    tokens: of every step. context: positions in the cache before them. Returns the summary as text. UserError when the
    kernel keeps no times, or the steps do not fit.
    """
    from mkpack import trace_html

    name = output.name.removesuffix(".gz").removesuffix(".json")
    if name == output.name or not name:
        raise UserError(f"cannot write the trace to {output}: expected a name that ends in .json or .json.gz")
    with load(path, target=target) as model:
        trace = record(model, steps, tokens, context)
    page, found = output.with_name(f"{name}.html"), summarise(trace)
    with os_errors(f"write {output}"):
        text = to_chrome(trace).encode()
        output.write_bytes(gzip.compress(text, 6, mtime=0) if output.suffix == ".gz" else text)
        page.write_text(trace_html.page(trace, found), encoding="utf-8")
    return f"{trace.title}\n{found.render()}\nwritten   {output}, for ui.perfetto.dev\nwritten   {page}"


def record(model: Model, steps: int, tokens: int, context: int | None = None) -> Trace:
    """Traces steps of a loaded model after `context` positions (default CONTEXT, or what fits). UserError: as run()."""
    room = model.context - max(tokens, steps + 1)  # a step runs before those that are traced
    if context is None:
        context = min(CONTEXT, max(room, 0))
    if context > room:
        raise UserError(f"context {context}: expected at most {room}, so that the traced steps fit")
    ids = spread(model.spec.vocab_size, context + tokens)
    model.reset()
    if context:
        model.step(ids[:context], 0)
    names, stamps = model.trace(ids[context:], steps)
    name, weights = model.manifest.name, "random weights, " if model.manifest.source.kind == "dummy" else ""
    many = f"{steps} steps" if steps > 1 else "a step"
    title = f"{name} on {model.target}, {weights}{many} of {tokens} token{'s' * (tokens > 1)} at context {context}"
    return Trace(names, stamps, title)


def summarise(trace: Trace) -> Summary:
    import numpy as np

    rows, shape = trace.phases, trace.stamps.shape
    begin, end = trace.begin[:, :, rows], trace.end[:, :, rows]
    there = begin > 0
    bubble = np.full(begin.shape, np.nan)
    for sm in range(shape[3]):
        at = np.flatnonzero(there[..., sm])
        at = at[np.argsort(begin[..., sm].ravel()[at], kind="stable")]
        starts, ends = begin[..., sm].ravel()[at], end[..., sm].ravel()[at]
        waits = np.full(len(at), np.nan)
        waits[1:] = np.maximum(starts[1:] - np.maximum.accumulate(ends)[:-1], 0)
        flat = np.full(begin[..., sm].size, np.nan)
        flat[at] = waits
        bubble[..., sm] = flat.reshape(begin.shape[:3])
    work = np.where(there, end - begin, np.nan)
    times = []
    for i, row in enumerate(rows):
        if not there[:, :, i].any():
            continue
        waits = bubble[:, :, i] / 1e3
        known = waits[~np.isnan(waits)]
        times.append(
            PhaseTime(
                name=trace.names[row].partition(" ")[2],
                work_each_us=float(np.nanmedian(work[:, :, i])) / 1e3,
                work_step_us=_a_step(work[:, :, i] / 1e3),
                bubble_each_us=float(np.median(known)) if len(known) else 0.0,
                bubble_most_us=float(known.max()) if len(known) else 0.0,
                bubble_step_us=_a_step(waits),
            )
        )
    times.sort(key=lambda p: -p.bubble_step_us)
    first = np.where(there, begin, np.iinfo(np.int64).max).min(axis=(1, 2, 3))
    took = (end.max(axis=(1, 2, 3)) - first) / 1e3
    return Summary(float(took.mean()), tuple(times), tuple(_largest(trace, bubble)))


def _a_step(values: np.ndarray) -> float:
    """values: [steps, layers, SMs], NaN: none. The median over the SMs that have any of their sums, mean of steps."""
    import numpy as np

    sums = [np.nansum(step, axis=0)[~np.isnan(step).all(axis=0)] for step in values]
    return float(np.mean([np.median(s) for s in sums if len(s)] or [0.0]))


def _largest(trace: Trace, bubble: np.ndarray) -> Iterator[Bubble]:
    import numpy as np

    known = ~np.isnan(bubble)
    medians = np.zeros(bubble.shape[:3])
    for at in zip(*np.nonzero(known.any(axis=3)), strict=True):
        medians[at] = np.median(bubble[at][known[at]])
    for flat in np.argsort(-medians, axis=None, kind="stable")[:LARGEST]:
        step, layer, row = (int(i) for i in np.unravel_index(flat, medians.shape))
        if medians[step, layer, row] > 0:
            sm = int(np.nanargmax(bubble[step, layer, row]))
            name = trace.names[trace.phases[row]].partition(" ")[2]
            us, most = medians[step, layer, row] / 1e3, bubble[step, layer, row, sm] / 1e3
            yield Bubble(step, layer, name, float(us), float(most), sm)


def to_chrome(trace: Trace) -> str:
    """The trace in the format of chrome://tracing, which Perfetto reads: an SM is a process, a role in it a thread. A
    slice lasts from a phase's input to its results; the wait before it is a slice of its own, and so is publishing."""
    tracks = [json.dumps(track) for track in _tracks(trace)]
    head = json.dumps({"displayTimeUnit": "ns", "otherData": {"title": trace.title}})
    events = ",\n".join([*tracks, *_slices(trace)])
    return f'{head[:-1]}, "traceEvents": [\n{events}\n]}}\n'


def _slices(trace: Trace) -> Iterator[str]:
    """JSON text of each; there are hundreds of thousands."""
    stamps, begin, end = trace.stamps, trace.begin, trace.end
    start = int(begin[begin > 0].min()) if (begin > 0).any() else 0
    found = (stamps.max(axis=-1) > 0).nonzero()
    moments = zip(*(a[found].tolist() for a in (stamps[..., 0], begin, stamps[..., 2], end)), strict=True)
    last = stamps.shape[1] - 1

    def slice(name: str, since: int, until: int) -> str:
        return f'{{"name": "{name}", {where}, "ts": {(since - start) / 1e3}, "dur": {(until - since) / 1e3}}}'

    for (step, layer, row, sm), times in zip(zip(*(a.tolist() for a in found), strict=True), moments, strict=True):
        role, _, name = trace.names[row].partition(" ")
        entered, since, done, until = times
        args = f'"step": {step}' + (f', "layer": {layer}' if layer < last else "")
        where = f'"ph": "X", "pid": {sm}, "tid": {ROLES.index(role)}, "args": {{{args}}}'
        if since > entered > 0:
            yield slice(f"wait for {name}", entered, since)
        if since > 0:
            yield slice(name, since, until)
        if until > done > since > 0:
            yield slice("publish", done, until)


def _tracks(trace: Trace) -> Iterator[dict[str, Any]]:
    roles = {name.partition(" ")[0] for name in trace.names}
    if unknown := roles - set(ROLES):
        raise UserError(f"the kernel traces {', '.join(sorted(unknown))}, which this mkpack does not know; upgrade it")
    for sm in range(trace.stamps.shape[3]):
        yield {"name": "process_name", "ph": "M", "pid": sm, "args": {"name": f"SM {sm}"}}
        yield {"name": "process_sort_index", "ph": "M", "pid": sm, "args": {"sort_index": sm}}
        for tid, role in enumerate(ROLES):
            if role in roles:
                yield {"name": "thread_name", "ph": "M", "pid": sm, "tid": tid, "args": {"name": role}}
