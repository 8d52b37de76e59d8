"""`mkpack inspect` and `mkpack verify`: an artifact as text. Nothing of the artifact is run."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from mkpack.artifact import open_artifact
from mkpack.errors import size, visible
from mkpack.manifest import Entry, LayoutName, Manifest
from mkpack.repo import located
from mkpack.spec import ModelSpec


def describe(manifest: Manifest, tensors: bool = False) -> str:
    """What `mkpack inspect` prints; with `tensors` also the section table with offsets."""
    return visible("\n".join(_lines(manifest, tensors)))


def manifest_of(artifact: str) -> Manifest:
    """The manifest of an artifact, or of a repo on the hub, of which nothing else is downloaded."""
    where = located(artifact)
    if isinstance(where, str):
        from mkpack.pull import pull_manifest

        return pull_manifest(where).manifest
    with open_artifact(where) as opened:
        return opened.manifest


def to_json(manifest: Manifest, tensors: bool = False) -> str:
    """The manifest and the sums `describe` shows; the section table only with `tensors`."""
    document: dict[str, Any] = manifest.model_dump(mode="json", exclude=None if tensors else {"sections"})
    document["bytes_by_kind"] = bytes_by_kind(manifest)
    return json.dumps(document, indent=2)


def check(path: Path) -> Iterator[tuple[bool, str]]:
    """(damaged?, line to print) for every entry of an artifact and for what does not belong into it.

    Raises UserError when the container or the manifest cannot be read at all.
    """
    problems: list[str] = []
    with open_artifact(path, problems) as artifact:
        yield from ((True, f"damaged  {problem}") for problem in problems)
        for name, entry in _sorted(artifact.manifest.entries):
            if any(problem.startswith(f"{name}: ") for problem in problems):
                continue
            damage = artifact.verify([name], full=True)
            yield bool(damage), f"damaged  {damage[0]}" if damage else f"OK       {name}  {size(entry.size)}"


def bytes_by_kind(manifest: Manifest) -> dict[LayoutName, dict[str, int]]:
    """For every layout the bytes of a rank's blob by kind of section ("qkv", "gate_up", ...), layers added up, scales
    with their matrix."""
    found: dict[LayoutName, dict[str, int]] = {}
    for layout, sections in manifest.sections.items():
        sizes = found.setdefault(layout, {})
        for section in sections:
            kind = re.sub(r"^layers\.\d+\.", "", section.name).removesuffix(".scale")
            sizes[kind] = sizes.get(kind, 0) + section.nbytes
    return found


def _lines(m: Manifest, tensors: bool) -> Iterator[str]:
    yield from _facts(
        {
            "name": m.name,
            "format": f"version {m.format_version}, needs mkpack {m.minimum_runtime} or newer",
            "producer": _producer(m),
            "source": _source(m),
            "licence": m.license,
            "model": _model(m.spec),
            "precision": ", ".join(_precision(m)),
            "limits": f"context {m.limits.context:,} positions, {m.limits.tokens_per_step} tokens a step",
            "quality": _quality(m),
            "build key": m.build_key,
        }
    )
    yield from ("", "kernels:")
    yield from _table(
        (target, kernel.path, kernel.compiler, _requires(kernel.requires)) for target, kernel in m.kernels.items()
    )
    yield from ("", "weights:" if m.one_rank is None else f"weights ({m.holds}):")
    yield from _table((f"{w.layout}, rank {w.rank} of {m.tp}", w.path, size(w.nbytes)) for w in m.weights)
    for layout, sizes in bytes_by_kind(m).items():
        yield from ("", f"bytes of a rank's {layout} weights by kind:")
        total = sum(sizes.values()) or 1
        ordered = sorted(sizes.items(), key=lambda item: -item[1])
        yield from _table((kind, size(nbytes), f"{nbytes / total:.1%}") for kind, nbytes in ordered)
    yield from ("", "entries:")
    yield from _table((name, size(entry.size), "sha256 " + entry.sha256) for name, entry in _sorted(m.entries))
    for layout, sections in m.sections.items() if tensors else ():
        yield from ("", f"{layout} sections (offset, bytes, format, rows x columns, tensors):")
        yield from _table(
            (s.name, f"{s.offset:#x}", str(s.nbytes), s.format, f"{s.rows}x{s.cols}", _few(s.tensors)) for s in sections
        )


def _producer(m: Manifest) -> str:
    p = m.producer
    commit = f" (commit {p.commit[:12]}{', changed' if p.dirty else ''})" if p.commit else ""
    tools = [f"Python {p.python}", p.torch and f"torch {p.torch}", p.modelopt and f"modelopt {p.modelopt}"]
    compilers = [v if v.startswith(tool) else f"{tool} {v}" for tool, v in p.compilers.items()]
    return f"mkpack {p.mkpack}{commit}, " + ", ".join([t for t in tools if t] + compilers)


def _source(m: Manifest) -> str:
    if m.source.kind == "dummy":
        drawn = f"random weights of seed {m.source.seed}, drawn in the formats they are stored in"
        return f"{drawn}, in the shape of a config.json"
    files = f"{len(m.source.files)} files"
    return f"{m.source.repo} at {m.source.commit}, {files}" if m.source.repo else f"a local folder, {files}"


def _precision(m: Manifest) -> Iterator[str]:
    for role, fmt in m.precision.items():
        if role == "down_input" and fmt == "nvfp4":
            whence = "a constant, for weights are random" if m.source.kind == "dummy" else "calibrated"
            yield f"{role} {fmt} (global scales {whence})"
        else:
            yield f"{role} {fmt}"


def _model(spec: ModelSpec) -> str:
    experts = sum(layer.moe for layer in spec.layers)
    parts = [
        f"{spec.family}, {len(spec.layers)} layers ({experts} with experts)",
        f"hidden_size {spec.hidden_size}",
        f"{spec.num_attention_heads} query and {spec.num_key_value_heads} KV heads of {spec.head_dim}",
        f"vocab_size {spec.vocab_size}{', tied embeddings' if spec.tie_word_embeddings else ''}",
    ]
    if spec.moe:
        parts.append(f"{spec.moe.num_experts} experts of {spec.moe.intermediate_size}, top_k {spec.moe.top_k}")
    return "; ".join(parts)


def _quality(m: Manifest) -> str:
    """The report's figures, and those of the comparison with bf16 where it was made."""
    if m.quality is None:
        return "not measured when it was built"
    end_to_end = m.quality.get("end_to_end")
    known = {**m.quality, **(end_to_end if isinstance(end_to_end, dict) else {})}
    figures = {k: v for k, v in known.items() if isinstance(v, (int, float, str))}
    return ", ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in figures.items()) or "see --json"


def _requires(requires: dict[str, Any]) -> str:
    words = [f"{k} {' '.join(map(str, v)) if isinstance(v, list) else v}" for k, v in requires.items()]
    return "needs " + ", ".join(words) if words else ""


def _facts(facts: dict[str, str]) -> Iterator[str]:
    for key, value in facts.items():
        yield f"{key + ':':12}{value}"


def _table(rows: Iterable[Sequence[str]]) -> Iterator[str]:
    table = [list(row) for row in rows]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for row in table:
        yield "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _sorted(entries: dict[str, Entry]) -> list[tuple[str, Entry]]:
    return sorted(entries.items())


def _few(names: Sequence[str]) -> str:
    return " ".join(names) if len(names) <= 4 else f"{' '.join(names[:2])} ... {names[-1]} ({len(names)})"
