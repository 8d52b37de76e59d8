"""`mkpack graph`: the schedule of a recipe or an artifact as tables, as JSON, and one layer of it as a picture."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from mkpack import schedule
from mkpack.errors import UserError, os_errors
from mkpack.layout import Layout, layout_of
from mkpack.schedule import Items, Phase, Schedule, Wait, phase_bytes


@dataclass(frozen=True)
class Graph:
    """name: of the recipe or artifact, whose path is `source`. The schedule holds: it was checked."""

    name: str
    schedule: Schedule
    source: Path | None = field(default=None, compare=False)

    def bound(self, tokens: int) -> float:
        """Bytes that a step of `tokens` tokens must read, the KV cache left out."""
        return sum(phase_bytes(self.schedule.spec, p, tokens) for p in self.schedule.phases)

    def alike(self, layer: int) -> list[int]:
        """The layers that do the same as `layer`, itself among them."""
        return next(group for group in self.groups() if layer in group)

    def groups(self) -> list[list[int]]:
        """The layers, those that do the same together."""
        groups: dict[object, list[int]] = {}
        for i, layer in enumerate(self.schedule.spec.layers):
            bare = tuple((p.name, p.items, p.nbytes, len(p.sections)) for p in self.schedule.layer(i))
            groups.setdefault((bare, layer.sliding_window), []).append(i)
        return list(groups.values())

    def check_layer(self, layer: int) -> None:
        """UserError for a layer that the model does not have."""
        if not 0 <= layer < (count := len(self.schedule.spec.layers)):
            raise UserError(f"--layer {layer}: this model has the layers 0 to {count - 1}")

    def render(self, layer: int | None = None) -> str:
        """Phases, bytes and buffers as tables: of one layer, or of the step with equal layers shown once."""
        if layer is not None:
            self.check_layer(layer)
        return "\n".join(_lines(self, layer))

    def to_json(self, layer: int | None = None) -> str:
        """The whole schedule (or the phases of one layer), with each phase's bytes for one token and for the most."""
        s = self.schedule
        if layer is not None:
            self.check_layer(layer)
        chosen = s.phases if layer is None else s.layer(layer)
        barriers = s.barriers()
        document = {
            "name": self.name,
            "target": s.target,
            "tp": s.tp,
            "context": s.context,
            "tokens_per_step": s.tokens_per_step,
            "bytes_per_step": {t: round(self.bound(t)) for t in step_sizes(s)},
            "buffers": [asdict(b) for b in s.buffers],
            "phases": [
                {
                    "key": p.key,
                    **asdict(p),
                    "barrier_after": p.key in barriers,
                    "bytes_per_step": {t: round(phase_bytes(s.spec, p, t)) for t in step_sizes(s)},
                }
                for p in chosen
            ],
        }
        return json.dumps(document, indent=2)

    def save_svg(self, path: Path, layer: int = 0) -> None:
        """Writes the picture of a layer. UserError when the file cannot be written, or is no picture so far."""
        text = self.svg(layer)
        with os_errors(f"write {path}"):
            _check_svg(path, self.source)
            path.write_text(text, encoding="utf-8")

    def svg(self, layer: int = 0) -> str:
        """One layer as a picture."""
        from mkpack.graph_svg import draw

        self.check_layer(layer)
        return draw(self, layer)


def _check_svg(path: Path, source: Path | None) -> None:
    """UserError when writing a picture to `path` would lose what the picture was not."""
    if not path.is_file() or not path.stat().st_size:
        return  # a device and the like lose nothing
    if source and source.exists() and path.samefile(source):
        raise UserError(f"cannot write {path}: it is what the picture is drawn from; choose another name")
    with open(path, "rb") as file:
        head = file.read(1024).removeprefix(b"\xef\xbb\xbf").lstrip()
    if not head.startswith((b"<svg", b"<?xml")):
        raise UserError(f"cannot write {path}: a file that is not an SVG picture is in the way; choose another name")


def read(path: Path) -> Graph:
    """The schedule of a recipe (.yaml, .yml) or of an artifact. UserError when it is neither, or of another version."""
    if path.suffix in (".yaml", ".yml"):
        from mkpack import plan as planner

        plan = planner.plan(path)
        limits = plan.recipe.limits
        return _graph(plan.recipe.name, plan.layout, limits.context, limits.tokens_per_step, path)
    from mkpack.artifact import open_artifact

    with open_artifact(path) as artifact:
        m = artifact.manifest
    layout = layout_of(m)
    if layout is None or layout.sections != m.sections.get("cpu", layout.sections):
        raise UserError(f"{path}: its sections are not those of this version of mkpack; rebuild it to see its schedule")
    return _graph(m.name, layout, m.limits.context, m.limits.tokens_per_step, path)


def _graph(name: str, layout: Layout, context: int, tokens: int, source: Path) -> Graph:
    found = schedule.cpu_schedule(layout.spec, layout.sections, layout.tp, context, tokens)
    schedule.check(found)
    return Graph(name, found, source)


def step_sizes(s: Schedule) -> tuple[int, ...]:
    """Tokens of the steps that are shown: one, and the most."""
    return tuple(sorted({1, s.tokens_per_step}))


# -- tables ------------------------------------------------------------------------------------------------------------


def _lines(graph: Graph, layer: int | None) -> Iterator[str]:
    s, tokens = graph.schedule, step_sizes(graph.schedule)
    groups = graph.groups() if layer is None else [[layer]]
    count, most = len(s.spec.layers), tokens[-1]
    yield f"{graph.name}: {plural(count, 'layer')}, {len(s.phases)} phases, {plural(s.tp, 'rank')}, target {s.target}"
    yield f"limits: context {s.context:,}, {plural(most, 'token')} a step; waits, buffers and sections are proven"
    yield "bound: " + ", ".join(f"{size(graph.bound(t))} a step of {plural(t, 'token')}" for t in tokens)
    cache = sum(phase_bytes(s.spec, p, 1, 1) for p in s.phases) - graph.bound(1)
    yield f"       and {size(cache)} of keys and values for every position in the cache"
    shown: list[tuple[str, list[Phase], int]] = []
    if layer is None:
        shown.append(("before the layers", list(s.phases[:1]), 1))
    for group in groups:
        shown.append((f"layer{'s' if len(group) > 1 else ''} {ranges(group)}", s.layer(group[-1]), len(group)))
    if layer is None:
        shown.append(("after the layers", [p for p in s.phases if p.optional], 1))
    for title, chosen, _ in shown:
        yield f"\n{title}"
        rows = [["phase", "items", "reads", "writes", "waits for"]]
        rows += [[p.name, items(p.items), _reads(p), _writes(s, p), _waits(p)] for p in chosen]
        yield from _table(rows)
    head = [f"T={t}" for t in tokens] + [f"share T={t}" for t in tokens]
    rows = [["layers", "phase", "sections in streaming order", "stored", *head]]
    for title, chosen, times in shown:
        rows += [_bytes_row(graph, title, p, times) for p in chosen if p.sections]
    yield "\nbytes read per step (all layers of a line together; gate_up and down: of experts as expected to be chosen)"
    yield from _table(rows, right=3)
    yield "\nbuffers (* updated in place; sizes at the limits, of private and published ones a thread's)"
    rows = [["buffer", "holds", "elements", "bytes", "valid for a", "used by"]]
    used = {u.buffer for _, chosen, _ in shown for p in chosen for u in (*p.reads, *p.writes, *p.updates)}
    rows += [
        [b.name, b.holds, f"{b.elements:,} {b.dtype}", size(b.nbytes), b.lifetime, _SCOPES[b.scope]]
        for b in s.buffers
        if b.name in used
    ]
    yield from _table(rows)


_SCOPES = {"shared": "all threads", "private": "its thread", "published": "its thread, then thread 0"}


def _bytes_row(graph: Graph, title: str, p: Phase, times: int) -> list[str]:
    spec, tokens = graph.schedule.spec, step_sizes(graph.schedule)
    counts = [times * phase_bytes(spec, p, t) for t in tokens]
    shares = [f"{n / graph.bound(t):.1%}" for n, t in zip(counts, tokens, strict=True)]
    kinds = " ".join(kind(n) for n in p.sections)
    name = title.removeprefix("layers ").removeprefix("layer ") if p.layer is not None else ""
    return [name, p.name, kinds, size(times * p.nbytes), *map(size, counts), *shares]


def items(i: Items) -> str:
    """Work items as text: "192 x 16 rows of q, k or v"."""
    per = f" per {i.per}" if i.per else ""
    alone = ", one thread" if i.workers == "first" else ""
    return f"{i.count} x {i.what}{per}{alone}"


def kind(section: str) -> str:
    return section.split(".", 2)[2] if section.startswith("layers.") else section


def _scratch(p: Phase) -> set[str]:
    """What a phase fills and then reads itself."""
    return {u.buffer for u in p.reads} & {u.buffer for u in p.writes}


def _reads(p: Phase) -> str:
    return " ".join(u.buffer for u in p.reads if u.buffer not in _scratch(p)) or "-"


def _writes(s: Schedule, p: Phase) -> str:
    """Left out: what ends with the phase."""
    names = [u.buffer for u in p.writes if s.buffer(u.buffer).lifetime != "phase"]
    return " ".join([*names, *(u.buffer + "*" for u in p.updates)]) or "-"


def _waits(p: Phase) -> str:
    return ", ".join(wait(w, p.layer) for w in p.waits) or "-"


def wait(w: Wait, layer: int | None) -> str:
    """What is awaited and how, as text; layers are named only when they are others."""
    name = w.phase
    if layer is not None:
        name = name.removeprefix(f"layers.{layer}.")
        if name.startswith(before := f"layers.{layer - 1}."):
            name = f"{name.removeprefix(before)} of the layer before"
    means = "" if w.by == "barrier" else f" ({w.by})"
    return name + means + (" of the step before" if w.earlier_step else "")


def _table(rows: Sequence[Sequence[str]], right: int | None = None) -> Iterator[str]:
    """right: the first column to be set flush right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (
            cell.rjust(width) if right is not None and i >= right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        yield "  " + "  ".join(cells).rstrip()


def ranges(numbers: Sequence[int]) -> str:
    """[0, 1, 2, 5] -> "0-2, 5"."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][-1] + 1:
            runs[-1].append(n)
        else:
            runs.append([n])
    return ", ".join(f"{r[0]}-{r[-1]}" if len(r) > 1 else f"{r[0]}" for r in runs)


def plural(n: int, word: str) -> str:
    return f"{n} {word}{'' if n == 1 else 's'}"


def size(count: float) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.1f} {unit}"
    return f"{count:.0f} B"
