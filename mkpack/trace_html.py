"""A trace as one page: where the time of a step goes, its largest bubbles, a step and a layer as pictures."""

from __future__ import annotations

import math
from collections.abc import Iterator
from html import escape
from typing import TYPE_CHECKING

from mkpack.trace import ROLES, Summary, Trace

if TYPE_CHECKING:
    import numpy as np

LEFT, STEP_WIDTH, LAYER_WIDTH = 190, 3600, 1400  # in pixels: names at the left of a picture; the pictures
COLOURS = "#4269d0 #efb118 #ff725c #6cc5b0 #3ca951 #ff8ab7 #a463f2 #97bbf5 #9c6b4e #9498a0 #7d4e00".split()
STYLE = """
body { font: 14px system-ui, sans-serif; margin: 2em auto; max-width: 1450px; color: #222; background: #fff }
table { border-collapse: collapse; margin: .5em 0 1.5em } td, th { padding: .15em .9em; text-align: right }
th { border-bottom: 1px solid #999 } td:first-child, th:first-child { text-align: left }
div { overflow-x: auto; margin: .5em 0 1.5em } text { font: 11px system-ui, sans-serif; fill: #222 }
i { display: inline-block; width: .8em; height: .8em; margin-right: .4em }
""".strip()


def page(trace: Trace, summary: Summary) -> str:
    """HTML text that needs no other file."""
    return "\n".join(
        [
            '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">',
            f"<title>{escape(trace.title)}</title><style>{STYLE}</style></head><body>",
            f"<h1>{escape(trace.title)}</h1>",
            f"<p>A step takes {summary.step_us:.1f} us here. Keeping times slows a kernel down: an ordinary build is "
            "faster. A bubble is the time between an SM's last result and the input of its next phase. All in "
            "microseconds.</p>",
            "<h2>Where a step's time goes, for the median SM</h2>",
            *_phases(trace, summary),
            "<h2>The largest bubbles</h2>",
            *_bubbles(summary),
            "<h2>A step</h2>",
            "<p>Light from the first SM's input to the last one's result, dark from the median input to the median "
            "result; below the phases the streams of weights, from the first page that could be issued to the last "
            "that was.</p>",
            *_step(trace),
            *_layer(trace),
            "</body></html>",
            "",
        ]
    )


def _table(head: str, rows: Iterator[list[str]]) -> Iterator[str]:
    yield "<table><tr>" + "".join(f"<th>{name}</th>" for name in head.split(", ")) + "</tr>"
    for row in rows:
        yield "<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>"
    yield "</table>"


def _phases(trace: Trace, summary: Summary) -> Iterator[str]:
    def rows() -> Iterator[list[str]]:
        for p in summary.phases:
            bubble = [f"{p.bubble_step_us:.1f}", f"{p.bubble_step_us / summary.step_us:.1%}"]
            each = [f"{p.bubble_each_us:.2f}", f"{p.bubble_most_us:.2f}"]
            yield [_swatch(trace, p.name), *bubble, *each, f"{p.work_step_us:.1f}", f"{p.work_each_us:.2f}"]

    head = "phase, bubbles before it a step, share, median one, largest one, its own time a step, median one"
    return _table(head, rows())


def _bubbles(summary: Summary) -> Iterator[str]:
    def rows() -> Iterator[list[str]]:
        for b in summary.bubbles:
            where = [f"{b.step}", f"{b.layer}"]
            yield [f"before {escape(b.phase)}", *where, f"{b.us:.2f}", f"{b.most_us:.2f} (SM {b.sm})"]

    return _table("bubble, step, layer, median over SMs, largest", rows())


def _colour(trace: Trace, name: str) -> str:
    names = [trace.names[row].partition(" ")[2] for row in trace.phases]
    return COLOURS[names.index(name) % len(COLOURS)] if name in names else "#888"


def _swatch(trace: Trace, name: str) -> str:
    return f'<i style="background:{_colour(trace, name)}"></i>{escape(name)}'


class _Axis:
    """Nanoseconds to pixels."""

    def __init__(self, since: int, until: int, width: int) -> None:
        self.since, self.span, self.width = since, max(until - since, 1), width

    def x(self, at: float) -> float:
        return LEFT + (at - self.since) / self.span * (self.width - LEFT)

    def bar(self, since: float, until: float, y: float, height: float, fill: str) -> str:
        x = self.x(since)
        width = max(self.x(until) - x, 0.3)
        return f'<rect x="{x:.1f}" y="{y:g}" width="{width:.1f}" height="{height:g}" fill="{fill}"/>'

    def ticks(self, height: float) -> Iterator[str]:
        apart = self.span * 100 / (self.width - LEFT)  # 100 pixels, then the next 1, 2 or 5 times a power of ten
        ten = 10 ** math.floor(math.log10(apart))
        apart = next(n * ten for n in (1, 2, 5, 10) if n * ten >= apart)
        for i in range(int(self.span / apart) + 1):
            x = self.x(self.since + i * apart)
            yield f'<line x1="{x:.1f}" x2="{x:.1f}" y1="14" y2="{height:g}" stroke="#ddd"/>'
            yield f'<text x="{x:.1f}" y="11" text-anchor="middle">{i * apart / 1e3:g} us</text>'


def _svg(width: int, height: float, parts: Iterator[str]) -> Iterator[str]:
    yield f'<div><svg width="{width + 30}" height="{height:g}">'
    yield from parts
    yield "</svg></div>"


def _span(begin: np.ndarray, end: np.ndarray, width: int) -> _Axis:
    return _Axis(int(begin[begin > 0].min(initial=1 << 62)), int(end.max(initial=0)), width)


def _rows(trace: Trace) -> list[int]:
    """Rows that any SM has stamped, the consumers first."""
    order = {role: i for i, role in enumerate(ROLES)}
    stamped = trace.stamps.max(axis=(0, 1, 3, 4)) > 0
    rows = [i for i in range(len(trace.names)) if stamped[i]]
    return sorted(rows, key=lambda i: (order[trace.names[i].partition(" ")[0]], i))


def _step(trace: Trace) -> Iterator[str]:
    """The last step: a line for each phase and stream."""
    import numpy as np

    begin, end, rows = trace.begin[-1], trace.end[-1], _rows(trace)
    axis = _span(begin[:, trace.phases], end[:, trace.phases], STEP_WIDTH)
    height = 20 + 18 * len(rows)

    def parts() -> Iterator[str]:
        yield from axis.ticks(height)
        for line, row in enumerate(rows):
            role, _, name = trace.names[row].partition(" ")
            y, colour = 18 + 18 * line, _colour(trace, name) if role == "consumers" else "#777"
            label = name if role == "consumers" else f"{role}: {name}"
            yield f'<text x="{LEFT - 8}" y="{y + 12}" text-anchor="end">{escape(label)}</text>'
            for layer in range(begin.shape[0]):
                there = begin[layer, row] > 0
                # A stream runs ahead, and may have begun in the step before.
                since, until = np.maximum(begin[layer, row][there], axis.since), end[layer, row][there]
                if len(since) and until.max() > axis.since:
                    light = axis.bar(since.min(), until.max(), y, 15, colour)
                    yield light.replace("/>", ' opacity="0.3"/>')
                    yield axis.bar(np.median(since), max(np.median(until), axis.since), y + 3, 9, colour)

    return _svg(STEP_WIDTH, height, parts())


def _layer(trace: Trace) -> Iterator[str]:
    """A layer in the middle of the last step: a line for each SM, waits left white."""
    layer = (trace.stamps.shape[1] - 1) // 2
    begin, end, entered = trace.begin[-1, layer], trace.end[-1, layer], trace.entered[-1, layer]
    phases = [row for row in trace.phases if (begin[row] > 0).any()]
    axis, sms = _span(entered[phases], end[phases], LAYER_WIDTH), begin.shape[-1]
    height = 20 + 4 * sms

    def parts() -> Iterator[str]:
        yield from axis.ticks(height)
        for sm in range(sms):
            y = 18 + 4 * sm
            if sm % 10 == 0:
                yield f'<text x="{LEFT - 8}" y="{y + 6}" text-anchor="end">SM {sm}</text>'
            for row in phases:
                if begin[row, sm] > 0:
                    colour = _colour(trace, trace.names[row].partition(" ")[2])
                    if 0 < entered[row, sm] < begin[row, sm]:
                        yield axis.bar(entered[row, sm], begin[row, sm], y + 1, 1, colour)
                    yield axis.bar(begin[row, sm], end[row, sm], y, 3, colour)

    yield f"<h2>Layer {layer}, SM by SM</h2>"
    names = (trace.names[row].partition(" ")[2] for row in phases)
    yield "<p>" + " &nbsp; ".join(_swatch(trace, name) for name in names)
    yield ". A thin line: entered, and waiting for its input. White: waiting for the others.</p>"
    yield from _svg(LAYER_WIDTH, height, parts())
