"""The picture of `mkpack graph`: phases of a layer from left to right, under them who writes and reads each buffer, and
at the bottom the bytes that each phase streams, to scale."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Iterator
from typing import TYPE_CHECKING
from xml.sax.saxutils import escape, quoteattr

from mkpack.errors import size
from mkpack.graph import items, kind, plural, ranges, sent, step_sizes, wait, worker_of
from mkpack.schedule import Buffer, Phase, Schedule, phase_bytes

if TYPE_CHECKING:
    from mkpack.graph import Graph

_COLOURS = ("#4c78a8", "#e09f3e", "#c77d3c", "#59a14f", "#8c6bb1", "#d1605e", "#499894", "#9c755f")
_INK, _SOFT, _LINE, _PAPER = "#1f2933", "#667380", "#c5ccd3", "#ffffff"
_WIDTH, _MARGIN, _LABELS, _GAP, _LANE = 1360, 28, 148, 22, 30
_BOX_TOP, _BOX = 92, 150
_LEGEND = 26


def draw(graph: Graph, layer: int) -> str:
    """SVG text of one layer."""
    return "\n".join(_Picture(graph, layer).parts())


class _Picture:
    def __init__(self, graph: Graph, layer: int):
        self.graph, self.layer, self.s = graph, layer, graph.schedule
        self.phases = self.s.layer(layer)
        self.lanes = _lanes(self.s, self.phases)
        self.pitch = (_WIDTH - 2 * _MARGIN - _LABELS + _GAP) / len(self.phases)
        self.lane_top = _BOX_TOP + _BOX + 44
        self.bar_top = self.lane_top + _LANE * len(self.lanes) + 2 * _LEGEND + 16
        self.height = self.bar_top + 64 * len(step_sizes(self.s)) + 8

    def left(self, column: int) -> float:
        return _MARGIN + _LABELS + column * self.pitch

    def middle(self, column: int) -> float:
        return self.left(column) + (self.pitch - _GAP) / 2

    def parts(self) -> Iterator[str]:
        yield (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{self.height}" '
            f'viewBox="0 0 {_WIDTH} {self.height}" font-family="DejaVu Sans, Verdana, Arial, sans-serif">'
        )
        yield f"<title>{escape(self.graph.name)}: the schedule of layer {self.layer}</title>"
        yield f'<rect width="100%" height="100%" fill="{_PAPER}"/>'
        yield from self._title()
        yield from self._syncs()
        yield from self._buffers()
        for column, phase in enumerate(self.phases):
            yield from self._box(column, phase)
        yield from self._legend()
        yield from self._bars()
        yield "</svg>"

    def _title(self) -> Iterator[str]:
        alike, count = self.graph.alike(self.layer), len(self.s.spec.layers)
        same = f"layers {ranges(alike)} do the same" if len(alike) > 1 else "no other layer does the same"
        yield _text(_MARGIN, 36, f"{self.graph.name}: layer {self.layer} of {count}", 20, bold=True)
        stored = sum(p.nbytes for p in self.phases)
        read = ", ".join(
            f"{size(sum(phase_bytes(self.s.spec, p, t) for p in self.phases))} read by a step of {plural(t, 'token')}"
            for t in step_sizes(self.s)
        )
        where = (
            f"{self.s.kernel} on {self.s.target}"
            if self.s.kernel
            else f"{plural(self.s.tp, 'rank')} on {self.s.target}"
        )
        if words := sum(p.exchange.words for p in self.phases if p.exchange):
            where += f", each sending another {size(4 * words / self.s.tokens_per_step)} a token"
        target = f"{same}; {where}"
        yield _text(_MARGIN, 58, f"{target}; {size(stored)} of weights, {read}", 12, _SOFT)

    def _box(self, column: int, p: Phase) -> Iterator[str]:
        x, width = self.left(column), self.pitch - _GAP
        colour, chars = _COLOURS[column % len(_COLOURS)], int(width / 6.7)
        yield f"<g><title>{escape(f'{p.key}: {items(p.items, self.s)}')}</title>"
        yield _rect(x, _BOX_TOP, width, _BOX, "#f6f8fa", colour, 5)
        yield _rect(x, _BOX_TOP, width, 26, colour, colour, 5)
        yield _text(x + width / 2, _BOX_TOP + 18, p.name, 13, "#ffffff", "middle", bold=True)
        each = f" per {p.items.per}" if p.items.per else ""
        y = _BOX_TOP + 46
        for line in textwrap.wrap(f"{p.items.count} x {p.items.what}{each}", chars)[:3]:
            yield _text(x + 8, y, line, 11)
            y += 15
        y = _BOX_TOP + 99
        streams = f"{'part of' if p.routed else 'streams'} {size(p.nbytes)}" if p.sections else "no weights"
        yield _text(x + 8, y, streams, 11, colour if p.sections else _SOFT, bold=bool(p.sections))
        for line in textwrap.wrap(" ".join(kind(n) for n in p.sections), chars)[:2]:
            y += 15
            yield _text(x + 8, y, line, 11, _SOFT)
        if p.exchange:
            nbytes = 4 * p.exchange.words / self.s.tokens_per_step
            what, to = sent(p.exchange), "the first rank" if p.exchange.first else "every rank"
            words = f"after {p.name} a rank sends its part of {what} to {to}: {nbytes:,.0f} bytes a token"
            yield f"<g><title>{escape(words)}</title>"
            for line, y in ((f"sends {size(nbytes)}", 15), ("a token", 28)):
                yield _text(x + width / 2, _BOX_TOP + _BOX + y, line, 11, colour, "middle", bold=True)
            yield "</g>"
        yield "</g>"

    def _syncs(self) -> Iterator[str]:
        """What a phase waits for, as a line before it that goes down through the buffers."""
        bottom = self.lane_top + _LANE * len(self.lanes) - 8
        for column, p in enumerate(self.phases):
            x = self.left(column) - _GAP / 2
            for w in p.waits:
                dash = "" if w.by == "barrier" else ' stroke-dasharray="3 4"'
                words = escape(f"{p.name} waits for {wait(w, self.layer)}")
                yield (
                    f'<line x1="{x:.1f}" y1="{_BOX_TOP - 8}" x2="{x:.1f}" y2="{bottom}" stroke="{_SOFT}" '
                    f'stroke-width="2"{dash}><title>{words}</title></line>'
                )

    def _buffers(self) -> Iterator[str]:
        for row, buffer in enumerate(self.lanes):
            y = self.lane_top + row * _LANE
            yield _text(_MARGIN, y + 1, buffer.name, 12, bold=True)
            of = f" {worker_of(self.s)}" if buffer.scope in ("private", "published") else ""
            yield _text(_MARGIN, y + 13, f"{size(buffer.nbytes)}{of}", 10, _SOFT)
            dash = ' stroke-dasharray="6 4"' if buffer.scope == "private" else ""
            for start, end in self._spans(buffer):
                yield f'<path d="M{start:.1f} {y}H{end:.1f}" stroke="{_SOFT}" stroke-width="1.5"{dash}>'
                yield f"<title>{escape(f'{buffer.name}: {buffer.holds}')}</title></path>"
            for column, p in enumerate(self.phases):
                yield from self._mark(self.middle(column), y, _role(p, buffer), _COLOURS[column % len(_COLOURS)])

    def _spans(self, buffer: Buffer) -> Iterator[tuple[float, float]]:
        """From where to where the buffer's contents matter."""
        if buffer.lifetime in ("step", "model"):  # they come from before the layer, and stay
            yield self.left(0) - _GAP / 2, _WIDTH - _MARGIN
            return
        columns = [(c, role) for c, p in enumerate(self.phases) if (role := _role(p, buffer))]
        for (column, _), (next_column, role) in itertools.pairwise(columns):
            if role != "writes":
                yield self.middle(column), self.middle(next_column)

    def _mark(self, x: float, y: float, role: str, colour: str) -> Iterator[str]:
        if role == "updates":
            points = f"{x - 8},{y} {x},{y - 8} {x + 8},{y} {x},{y + 8}"
            yield f'<polygon points="{points}" fill="{colour}" stroke="{colour}"/>'
        elif role:
            fill = colour if role == "writes" else _PAPER
            yield f'<circle cx="{x:.1f}" cy="{y}" r="6.5" fill="{fill}" stroke="{colour}" stroke-width="2.5"/>'

    def _legend(self) -> Iterator[str]:
        y = self.lane_top + _LANE * len(self.lanes) + 14
        x = _MARGIN + float(_LABELS)
        for role, words in (("writes", "writes"), ("reads", "reads"), ("updates", "reads and writes in place")):
            yield from self._mark(x, y, role, _SOFT)
            yield _text(x + 14, y + 4, words, 11, _SOFT)
            x += 40 + 6.6 * len(words)
        if any(w.by == "words" for p in self.phases for w in p.waits):
            waits = [("3 4", "polls for the words that it reads")]
        elif self.s.machine:
            waits = [("", "barrier of all SMs")]
        else:
            waits = [("", "barrier of all threads"), ("3 4", "runs where the last item before it arrives")]
        for dash, words in waits:
            yield f'<path d="M{x} {y - 9}v18" stroke="{_SOFT}" stroke-width="2" stroke-dasharray="{dash or "none"}"/>'
            yield _text(x + 10, y + 4, words, 11, _SOFT)
            x += 36 + 6.6 * len(words)
        yield f'<path d="M{x} {y}h26" stroke="{_SOFT}" stroke-width="1.5" stroke-dasharray="6 4"/>'
        yield _text(x + 34, y + 4, f"{worker_of(self.s)}'s own", 11, _SOFT)

    def _bars(self) -> Iterator[str]:
        """One bar a step size, all to one scale: what each phase reads of its weights."""
        sizes = step_sizes(self.s)
        read = {t: [phase_bytes(self.s.spec, p, t) for p in self.phases] for t in sizes}
        scale = (_WIDTH - 2 * _MARGIN - _LABELS) / max(sum(counts) for counts in read.values())
        yield _text(_MARGIN + _LABELS, self.bar_top - 12, "weights that a step reads, to one scale", 11, _SOFT)
        for row, (t, counts) in enumerate(read.items()):
            x, y = _MARGIN + float(_LABELS), self.bar_top + 64 * row
            yield _text(_MARGIN, y + 17, plural(t, "token"), 12, bold=True)
            yield _text(_MARGIN, y + 33, f"{size(sum(counts))} read", 11, _SOFT)
            for column, (p, count) in enumerate(zip(self.phases, counts, strict=True)):
                width, share = count * scale, f"{count / sum(counts):.0%}"
                yield f"<g><title>{escape(f'{p.name}: {size(count)}, {share}')}</title>"
                yield _rect(x, y, width, 42, _COLOURS[column % len(_COLOURS)], _PAPER)
                if width > 9 * len(p.name):
                    yield _text(x + width / 2, y + 18, p.name, 12, "#ffffff", "middle", bold=True)
                if width > 62:
                    yield _text(x + width / 2, y + 34, size(count), 11, "#ffffff", "middle")
                yield "</g>"
                x += width


def _lanes(s: Schedule, phases: list[Phase]) -> list[Buffer]:
    """Buffers that pass from phase to phase, by first use."""
    used = dict.fromkeys(u.buffer for p in phases for u in (*p.reads, *p.writes, *p.updates))
    return [s.buffer(name) for name in used if s.buffer(name).lifetime != "phase"]


def _role(p: Phase, buffer: Buffer) -> str:
    for role, uses in (("updates", p.updates), ("writes", p.writes), ("reads", p.reads)):
        if any(u.buffer == buffer.name for u in uses):
            return role
    return ""


def _text(
    x: float, y: float, words: str, points: int, colour: str = _INK, anchor: str = "start", bold: bool = False
) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{points}" fill={quoteattr(colour)} text-anchor="{anchor}"{weight}>'
        f"{escape(words)}</text>"
    )


def _rect(x: float, y: float, width: float, height: float, fill: str, stroke: str, radius: int = 0) -> str:
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="{radius}" fill="{fill}" '
        f'stroke="{stroke}"/>'
    )
