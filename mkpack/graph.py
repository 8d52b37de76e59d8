"""`mkpack graph`: the schedule of a recipe or an artifact as tables, as JSON, and one layer of it as a picture."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from mkpack import graph_gpu, schedule
from mkpack.errors import UserError, os_errors, size
from mkpack.layout import Layout, layout_of
from mkpack.layout_cuda import GRID, CudaLayout, cuda_layout_of
from mkpack.manifest import LayoutName
from mkpack.schedule import Exchange, Items, Phase, Schedule, Wait, kv_element, phase_bytes


@dataclass(frozen=True)
class Graph:
    """name: of the recipe or artifact, whose path is `source`. The schedule holds: it was checked. kernels: all that
    its target has, the schedule's among them."""

    name: str
    schedule: Schedule
    kernels: tuple[str, ...] = ("",)
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
            **({"kernel": s.kernel, "machine": graph_gpu.document(s.machine)} if s.machine else {}),
            "tp": s.tp,
            "context": s.context,
            "tokens_per_step": s.tokens_per_step,
            "bytes_per_step": {t: round(self.bound(t)) for t in step_sizes(s)},
            "buffers": [asdict(b) for b in s.buffers],
            "phases": [
                {
                    "key": p.key,
                    **_fields(p, s.machine is not None),
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


def read(path: Path, target: str | None = None, kernel: str | None = None) -> Graph:
    """The schedule of a recipe (.yaml, .yml) or of an artifact on one of its targets: "cpu", "gpu", or its name; CPUs'
    where it has one. kernel: of those that a GPU has, by default the one that runs every step.

    UserError when it is neither, of another version, or has no such target or kernel.
    """
    if path.suffix in (".yaml", ".yml"):
        from mkpack import plan as planner

        plan = planner.plan(path)
        chosen = _target(path, plan.targets, target)
        layout = plan.layouts["cuda"] if chosen in GRID else plan.layout
        limits = plan.recipe.limits
        return _graph(plan.recipe.name, layout, limits.context, limits.tokens_per_step, path, chosen, kernel)
    from mkpack.artifact import open_artifact

    with open_artifact(path) as artifact:
        m = artifact.manifest
    chosen = _target(path, tuple(m.kernels), target)
    read_by: LayoutName = "cuda" if chosen in GRID else "cpu"
    made = cuda_layout_of(m) if read_by == "cuda" else layout_of(m)
    if made is None or made.sections != m.sections.get(read_by, made.sections):
        raise UserError(f"{path}: its sections are not those of this version of mkpack; rebuild it to see its schedule")
    return _graph(m.name, made, m.limits.context, m.limits.tokens_per_step, path, chosen, kernel)


def _target(path: Path, targets: tuple[str, ...], wanted: str | None) -> str:
    """The target to show; "cpu" for those of CPUs, which have one schedule."""
    gpus = [t for t in targets if t in GRID]
    found = {t: t if t in GRID else "cpu" for t in targets} | ({"gpu": gpus[0]} if gpus else {})
    if len(gpus) < len(targets):
        found["cpu"] = "cpu"
    if wanted is None:
        return found.get("cpu", "") or gpus[0]
    if wanted not in found:
        raise UserError(f"--target {wanted}: {path} has no such target, but {', '.join(sorted(found))}")
    return found[wanted]


def _graph(
    name: str, layout: Layout | CudaLayout, context: int, tokens: int, source: Path, target: str, kernel: str | None
) -> Graph:
    if isinstance(layout, CudaLayout):
        kernels = schedule.cuda_schedules(layout, context, target)
    else:
        kernels = (schedule.cpu_schedule(layout, context, tokens, target),)
    names = tuple(s.kernel for s in kernels)
    if kernel is not None and kernel not in names:
        has = ", ".join(f'"{n}"' for n in names if n) or "just one"
        raise UserError(f"--kernel {kernel}: target {target} has no such kernel; it has {has}")
    found = kernels[0 if kernel is None else names.index(kernel)]
    schedule.check(found)
    return Graph(name, found, names, source)


def step_sizes(s: Schedule) -> tuple[int, ...]:
    """Tokens of the steps that are shown: one, and the most."""
    return tuple(sorted({1, s.tokens_per_step}))


# -- tables ------------------------------------------------------------------------------------------------------------


def _lines(graph: Graph, layer: int | None) -> Iterator[str]:
    s, tokens = graph.schedule, step_sizes(graph.schedule)
    groups = graph.groups() if layer is None else [[layer]]
    count, most = len(s.spec.layers), tokens[-1]
    where = f"target {s.target}" + (f", {s.machine.workers} SMs" if s.machine else "")
    yield f"{graph.name}: {plural(count, 'layer')}, {len(s.phases)} phases, {plural(s.tp, 'rank')}, {where}"
    if s.machine:
        others = [f'"{k}"' for k in graph.kernels if k != s.kernel]
        yield f"kernel: {s.kernel}" + (f" (others, by --kernel: {', '.join(others)})" if others else "")
    yield f"limits: context {s.context:,}, {plural(most, 'token')} a step; waits, buffers and sections are proven"
    whose = " of each rank" if s.machine and s.tp > 1 else ""
    yield f"bound{whose}: " + ", ".join(f"{size(graph.bound(t))} a step of {plural(t, 'token')}" for t in tokens)
    kv = kv_element(s.spec, "cuda" if s.machine else "cpu", s.tp)
    cache = sum(phase_bytes(s.spec, p, 1, 1, kv) for p in s.phases) - graph.bound(1)
    yield f"       and {size(cache)} of keys and values for every position in the cache"
    shown: list[tuple[str, list[Phase], int]] = []
    first = next(i for i, p in enumerate(s.phases) if p.layer is not None)
    if layer is None and first:
        shown.append(("before the layers", list(s.phases[:first]), 1))
    for group in groups:
        shown.append((f"layer{'s' if len(group) > 1 else ''} {ranges(group)}", s.layer(group[-1]), len(group)))
    if layer is None:
        shown.append(("after the layers", [p for p in s.phases[first:] if p.layer is None], 1))
    for title, chosen, _ in shown:
        yield f"\n{title}"
        rows = [["phase", "items", "reads", "writes", "waits for"]]
        rows += [[p.name, items(p.items, s), _reads(p), _writes(s, p), _waits(p)] for p in chosen]
        yield from _table(rows)
    if told := _exchanges(s, [(title, p, times) for title, chosen, times in shown for p in chosen]):
        total = sum(p.exchange.words for p in s.phases if p.exchange)
        yield "\nexchanges of ranks with memory of their own: what a rank sends to each other after a phase"
        yield f"  in all {total:,} words of 4 bytes ({size(4 * total)}) at most, in a step of {plural(most, 'token')}"
        yield from _table(told, right=4)
    head = [f"T={t}" for t in tokens] + [f"share T={t}" for t in tokens]
    rows = [["layers", "phase", "sections in streaming order", "stored", *head]]
    for title, chosen, times in shown:
        rows += [_bytes_row(graph, title, p, times) for p in chosen if p.sections]
    yield "\nbytes read per step (all layers of a line together; gate_up and down: of experts as expected to be chosen)"
    yield from _table(rows, right=3)
    worker = worker_of(s)
    yield f"\nbuffers (* updated in place; sizes at the limits, of private and published ones {worker}'s)"
    rows = [["buffer", "holds", "elements", "bytes", "valid for a", "used by"]]
    used = {u.buffer for _, chosen, _ in shown for p in chosen for u in (*p.reads, *p.writes, *p.updates)}
    rows += [
        [b.name, b.holds, f"{b.elements:,} {b.dtype}", size(b.nbytes), b.lifetime, _scopes(s)[b.scope]]
        for b in s.buffers
        if b.name in used
    ]
    yield from _table(rows)
    if s.machine:
        for title, table in graph_gpu.tables(s, s.machine, [p for _, chosen, _ in shown for p in chosen]):
            yield f"\n{title}"
            yield from _table(table)


def _exchanges(s: Schedule, shown: Sequence[tuple[str, Phase, int]]) -> list[list[str]]:
    """Rows of phases that an exchange follows, none where there is one rank."""
    rows = [["layers", "after", "what", "to", "words a token", "bytes a token", f"bytes T={s.tokens_per_step}"]]
    for title, p, times in shown:
        if e := p.exchange:
            name = title.removeprefix("layers ").removeprefix("layer ") if p.layer is not None else ""
            to = "the first rank" if e.first else "every rank"
            each = e.words / s.tokens_per_step
            numbers = (f"{n:,.1f}".removesuffix(".0") if e.per_token else "-" for n in (each, 4 * each))
            rows.append([name, p.name, sent(e), to, *numbers, size(times * 4 * e.words)])
    return rows if len(rows) > 1 else []


def sent(e: Exchange) -> str:
    """What an exchange tells, as text."""
    return " ".join(e.buffers) + (f" as {e.carried}" if e.carried else "")


def worker_of(s: Schedule) -> str:
    """What runs items, with its article."""
    return "an SM" if s.machine else "a thread"


def _scopes(s: Schedule) -> dict[str, str]:
    who = "SM" if s.machine else "thread"
    return {
        "shared": f"all {who}s",
        "private": f"its {who}",
        "published": f"its {who}, then {who} 0",
        "words": f"{who}s that wait for them",
        "ordered": f"{who}s that words told",
    }


def _fields(p: Phase, gpu: bool) -> dict[str, object]:
    """A phase for JSON."""
    if gpu:
        return asdict(p)
    return {k: v for k, v in asdict(p).items() if k not in ("feeds", "loads", "puts", "takes", "epoch", "meets")}


def _bytes_row(graph: Graph, title: str, p: Phase, times: int) -> list[str]:
    spec, tokens = graph.schedule.spec, step_sizes(graph.schedule)
    counts = [times * phase_bytes(spec, p, t) for t in tokens]
    shares = [f"{n / graph.bound(t):.1%}" for n, t in zip(counts, tokens, strict=True)]
    kinds = " ".join(kind(n) for n in p.sections)
    name = title.removeprefix("layers ").removeprefix("layer ") if p.layer is not None else ""
    return [name, p.name, kinds, size(times * p.nbytes), *map(size, counts), *shares]


def items(i: Items, s: Schedule) -> str:
    """Work items as text: "192 x 16 rows of q, k or v"."""
    per = f" per {i.per}" if i.per else ""
    alone = f", one {worker_of(s).split()[1]}" if i.workers == "first" else ""
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
