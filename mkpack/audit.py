"""`mkpack audit`: what a checkpoint holds and whether it can be built, without building it.

Headers and metadata, the scales of quantised matrices (see scales.py) and the first bytes of matrices, to find those
that are stored twice; other weights are not read, so a NaN among them is the build's to find.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, get_args

from mkpack import payload, plan, prequantised, schedule, text_tokens
from mkpack.checkpoint import INDEX, Checkpoint
from mkpack.errors import UserError, size, some
from mkpack.layout import Layout
from mkpack.models import model_spec
from mkpack.prequantised import Stored
from mkpack.quant_config import fp8_block
from mkpack.recipe import Quantise
from mkpack.scales import Range, Scales
from mkpack.shard import TensorInfo
from mkpack.spec import Format, ModelSpec, Precision, SourceNames, TensorRole, tensors

_PREFIX = 4096  # bytes that two matrices must have in common before they are read whole
_CHUNK = 16 << 20
_MOST_REFUSALS = 20
_DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


@dataclass
class Amount:
    tensors: int = 0
    nbytes: int = 0

    def add(self, info: TensorInfo) -> None:
        self.tensors += 1
        self.nbytes += info.nbytes


@dataclass
class Part:
    """Tensors of the model of one kind ("experts.gate"), stored alike."""

    part: str
    stored: str  # a prequantised.Scheme; "plain" is what has no scales
    dtype: str
    shape: tuple[int, ...]
    tensors: int = 0
    nbytes: int = 0


@dataclass
class Audit:
    """What was found. refused: what a build would not take, a line each; notes: what is worth knowing. gate_up: pairs
    of NVFP4 matrices, how many have tensor scales that differ, and the largest ratio of the two."""

    checkpoint: str
    family: str | None = None
    refused: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    dtypes: dict[str, Amount] = field(default_factory=dict)
    parts: list[Part] = field(default_factory=list)
    scales: dict[str, Scales] = field(default_factory=dict)  # by part and scheme
    gate_up: dict[str, float] = field(default_factory=dict)
    routers: dict[str, list[str]] = field(default_factory=dict)  # router, router_bias, choice_bias -> dtypes
    unused: dict[str, Amount] = field(default_factory=dict)  # by name, with {i} for numbers
    duplicates: list[list[str]] = field(default_factory=list)
    precision: dict[str, Format] = field(default_factory=dict)  # that the sizes below are for
    artifact_bytes: int | None = None
    bytes_per_token: int | None = None

    @property
    def exit_code(self) -> int:
        """1 when something would be refused."""
        return 1 if self.refused else 0

    def to_json(self) -> str:
        """The same, with ends of empty ranges as null."""
        return json.dumps(_finite(asdict(self)), indent=2)


def audit(folder: Path, progress: Callable[[Iterable[Any], str], Iterable[Any]] = lambda items, _: items) -> Audit:
    """Examines a checkpoint folder. progress wraps what takes long, with a title.

    Raises UserError when there is no such folder; everything else that is wrong is in the result.
    """
    found = Audit(str(folder))
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "no such folder"
        raise UserError(f"checkpoint {folder}: {what}; expected a folder here, in the Hugging Face format")
    try:
        checkpoint = Checkpoint.open(folder)
    except UserError as e:
        found.refused = _lines(e)
        return found
    for info in checkpoint.tensors.values():
        found.dtypes.setdefault(info.dtype, Amount()).add(info)
    found.notes = [*_contradictions(checkpoint)]
    try:
        if text_tokens.tokenizer(plan.source_files(folder)) is None:
            found.notes.append("no tokenizer.json: an artifact would take token ids only")
    except UserError as e:
        found.refused = _lines(e)
    if checkpoint.stray:
        found.notes.append(f"files the index does not name are ignored: {', '.join(checkpoint.stray)}")
    try:
        spec, names = model_spec(checkpoint.config)
    except UserError as e:
        found.refused += _lines(e)
        return found
    roles = list(tensors(spec, names))
    found.family = spec.family
    faults = [line for kind in checkpoint.faults(roles) for line in kind]
    found.refused += faults
    found.notes += checkpoint.notes(roles)
    _inventory(found, checkpoint, roles)
    found.duplicates = _duplicates(checkpoint, progress)
    found.notes += _tied(checkpoint, spec, names, found.duplicates)
    if not faults:  # scales of the wrong shape mean nothing
        _scales(found, checkpoint, roles, progress)
    _sizes(found, checkpoint, spec, roles)
    if len(found.refused) > _MOST_REFUSALS:
        more = len(found.refused) - _MOST_REFUSALS
        found.refused[_MOST_REFUSALS:] = [f"and {more} more like these"]
    return found


def _lines(error: UserError) -> list[str]:
    """The problems of a UserError that may combine several."""
    first, *rest = str(error).split("\n")
    return [line.removeprefix("  - ") for line in rest] or [first]


def _contradictions(checkpoint: Checkpoint) -> Iterator[str]:
    """Where index and config.json do not say what the tensors are, in ways that change nothing for a build."""
    total = sum(t.nbytes for t in checkpoint.tensors.values())
    if (checkpoint.folder / INDEX).is_file():
        metadata = json.loads((checkpoint.folder / INDEX).read_bytes()).get("metadata")
        said = metadata.get("total_size") if isinstance(metadata, dict) else None
        if isinstance(said, int | float) and said != total:
            yield f"{INDEX} says total_size {said:.0f}, the tensors are {total} bytes"
    said = checkpoint.config.get("dtype") or checkpoint.config.get("torch_dtype")
    sizes: Counter[str] = Counter()
    for info in checkpoint.tensors.values():
        if info.dtype in prequantised.PLAIN and len(info.shape) > 1:
            sizes[info.dtype] += info.nbytes
    if sizes and said in _DTYPES and _DTYPES[said] != (most := sizes.most_common(1)[0][0]):
        yield f"config.json says dtype {said}, most weights that are not quantised are {most}"


def _inventory(found: Audit, checkpoint: Checkpoint, roles: list[TensorRole]) -> None:
    rows: dict[tuple[str, str, str, tuple[int, ...]], Part] = {}
    for role in roles:
        stored = prequantised.find(role.source, checkpoint.tensors)
        if stored is None:
            continue
        part = _part(role)
        key = part, stored.scheme, stored.weight.dtype, role.shape
        row = rows.setdefault(key, Part(*key))
        row.tensors += 1
        share = math.prod(role.shape) / max(math.prod(role.source_shape), 1)  # of a fused tensor
        row.nbytes += round(share * sum(t.nbytes for t in stored.parts()))
        if (kind := part.rsplit(".", 1)[-1]) in ("router", "router_bias", "choice_bias"):
            dtypes = found.routers.setdefault(kind, [])
            if stored.weight.dtype not in dtypes:
                dtypes.append(stored.weight.dtype)
    found.parts = list(rows.values())
    for name in checkpoint.unused(roles):
        pattern = re.sub(r"(?<=\.)\d+(?=\.|$)", "{i}", name)
        found.unused.setdefault(pattern, Amount()).add(checkpoint.tensors[name])


def _part(role: TensorRole) -> str:
    """The role's name without numbers of layer and expert."""
    return ".".join(word for word in role.name.split(".") if not word.isdigit() and word != "layers")


def _scales(
    found: Audit,
    checkpoint: Checkpoint,
    roles: list[TensorRole],
    progress: Callable[[Iterable[Any], str], Iterable[Any]],
) -> None:
    factors: dict[str, list[float]] = {}
    quantised: list[tuple[TensorRole, Stored]] = []
    for role in roles:
        stored = prequantised.find(role.source, checkpoint.tensors)
        if stored is not None and stored.scheme != "plain":
            quantised.append((role, stored))
    block = fp8_block(checkpoint.config)
    for role, stored in progress(quantised, "scales"):
        scales = found.scales.setdefault(f"{_part(role)} {stored.scheme}", Scales(stored.scheme))
        refused, factor = scales.add(stored, checkpoint.read_bytes, block, role.part)
        found.refused += refused
        base = role.source.removesuffix(".weight")
        for suffix in prequantised.INPUT_SCALES:
            info = checkpoint.tensors.get(base + suffix)
            if info is not None and info.dtype in prequantised.PLAIN:
                scales.activations.add(payload.to_floats(checkpoint.read_bytes(info), info.dtype))
        if role.group and factor:
            factors.setdefault(role.group, []).append(factor)
    for name, scales in found.scales.items():
        if 0 < scales.activations.count < scales.matrices:
            found.notes.append(f"{name}: {scales.activations.count} of {scales.matrices} matrices have an input scale")
    pairs = [pair for pair in factors.values() if len(pair) == 2]
    if pairs:
        ratios = [max(pair) / min(pair) for pair in pairs]
        found.gate_up = {"pairs": len(pairs), "different": sum(r != 1 for r in ratios), "largest_ratio": max(ratios)}


def _duplicates(checkpoint: Checkpoint, progress: Callable[[Iterable[Any], str], Iterable[Any]]) -> list[list[str]]:
    """Names of matrices whose bytes are equal. Each is read as far as it could still be another's twin."""
    kinds: dict[tuple[str, tuple[int, ...]], list[TensorInfo]] = {}
    for info in checkpoint.tensors.values():
        if len(info.shape) > 1 and not info.name.endswith(("_scale", "_scale_inv", "_scales")):
            kinds.setdefault((info.dtype, info.shape), []).append(info)
    starts: dict[tuple[str, tuple[int, ...], bytes], list[TensorInfo]] = {}
    alike = [(kind, info) for kind, infos in kinds.items() if len(infos) > 1 for info in infos]
    for kind, info in progress(alike, "duplicates"):
        start = checkpoint.read_bytes(_slice(info, 0, _PREFIX)).tobytes()
        starts.setdefault((*kind, start), []).append(info)
    found: list[list[TensorInfo]] = []
    for infos in starts.values():
        twins: list[list[TensorInfo]] = []
        for info in infos if len(infos) > 1 else ():
            mine = next((group for group in twins if _equal(checkpoint, group[0], info)), None)
            twins.append([info]) if mine is None else mine.append(info)
        found += [group for group in twins if len(group) > 1]
    return [[info.name for info in group] for group in found]


def _equal(checkpoint: Checkpoint, a: TensorInfo, b: TensorInfo) -> bool:
    return all(
        (checkpoint.read_bytes(_slice(a, at, _CHUNK)) == checkpoint.read_bytes(_slice(b, at, _CHUNK))).all()
        for at in range(0, a.nbytes, _CHUNK)
    )


def _slice(info: TensorInfo, at: int, size: int) -> TensorInfo:
    """A run of a tensor's bytes."""
    size = min(size, info.nbytes - at)
    return TensorInfo(info.name, "U8", (size,), info.file, info.offset + at, size)


def _tied(checkpoint: Checkpoint, spec: ModelSpec, names: SourceNames, twins: list[list[str]]) -> Iterator[str]:
    """A head that is in the checkpoint although config.json says that the embedding is the head."""
    if spec.tie_word_embeddings and names.lm_head in checkpoint.tensors:
        if not any({names.lm_head, names.embed} <= set(group) for group in twins):
            yield (
                f'tie_word_embeddings is true, so "{names.embed}" is the head; "{names.lm_head}" differs from it '
                "and is left out: set tie_word_embeddings to false if it is the real one"
            )


def _sizes(found: Audit, checkpoint: Checkpoint, spec: ModelSpec, roles: list[TensorRole]) -> None:
    """Size and bytes per token of an artifact on one rank, in the formats that a recipe would sensibly name: those that
    dense matrices have already, else a recipe's defaults."""
    schemes: dict[str, set[str]] = {}
    routers = set()
    for role in roles:
        if stored := prequantised.find(role.source, checkpoint.tensors):
            schemes.setdefault(role.precision or "", set()).add(stored.scheme)
            if role.name.endswith(".router"):
                routers.add(stored.weight.dtype)
    precision: dict[str, Format] = Quantise().model_dump(include=set(get_args(Precision)))
    for key in precision.keys() & schemes.keys() - {"experts"}:
        if schemes[key] <= {"nvfp4", "mxfp4"}:
            precision[key] = "nvfp4"
        elif schemes[key] == {"fp8"}:
            precision[key] = "fp8"
    layout = Layout(spec, precision, 1, "bf16" if routers == {"BF16"} else "f32")
    found.precision = precision
    found.artifact_bytes = layout.nbytes
    found.bytes_per_token = round(schedule.bytes_per_step(spec, layout.sections))


def _finite(value: Any) -> Any:
    """A value for JSON: without the infinities of ranges in which nothing was seen."""
    if isinstance(value, Mapping):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def show(found: Audit) -> None:
    """Prints an audit to standard output, in tables."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False, markup=False, soft_wrap=True)
    if not console.is_terminal:
        console = Console(highlight=False, markup=False, soft_wrap=True, width=200)

    def table(*rows: Iterable[str], head: Iterable[str]) -> None:
        made = Table(box=None, pad_edge=False, header_style="bold")
        for title in head:
            made.add_column(title, justify="right" if title in _NUMBERS else "left", overflow="fold")
        for row in rows:
            made.add_row(*map(Text, row))
        console.print(made)
        console.print()

    console.print(f"{found.checkpoint}: {found.family or 'of no family that could be read'}")
    amounts = (f"{a.tensors:,} {dtype} ({size(a.nbytes)})" for dtype, a in sorted(found.dtypes.items()))
    if found.dtypes:
        console.print(", ".join(amounts) + "\n")
    if found.parts:
        rows = [
            (p.part, p.stored, p.dtype, " x ".join(map(str, p.shape)), f"{p.tensors:,}", size(p.nbytes))
            for p in found.parts
        ]
        table(*rows, head=("part", "stored", "dtype", "shape", "tensors", "bytes"))
    if found.scales:
        kinds = (("blocks", "blocks"), ("whole", "matrix"), ("activations", "input"))
        ranges = [
            (name, title, *_counts(getattr(s, kind)), f"{s.lost:,}" if kind == "blocks" else "")
            for name, s in found.scales.items()
            for kind, title in kinds
            if getattr(s, kind).count
        ]
        head = ("scales of", "per", "count", "zero", "subnormal", "negative", "Inf", "NaN", "range", "lost blocks")
        table(*ranges, head=head)
        for name, s in found.scales.items():
            if s.scheme == "mxfp4":
                console.print(f"{name}: NVFP4 holds {s.matrices - s.inexact:,} of {s.matrices:,} matrices exactly")
    if pairs := found.gate_up:
        ratio = f", by {pairs['largest_ratio']:.3g} at most" if pairs["different"] else ""
        console.print(
            f"gate and up: {pairs['different']:,} of {pairs['pairs']:,} pairs have other tensor scales{ratio}"
        )
    for kind, dtypes in found.routers.items():
        console.print(f"{kind}: {', '.join(dtypes)}")
    for pattern, amount in found.unused.items():
        console.print(f"not part of the model: {pattern} ({amount.tensors:,}, {size(amount.nbytes)})")
    for names in found.duplicates:
        console.print(f"equal bytes: {some(names)}")
    if found.artifact_bytes is not None and found.bytes_per_token is not None:
        console.print(f"artifact: {size(found.artifact_bytes)}, {size(found.bytes_per_token)} read per token, with")
        console.print("  " + ", ".join(f"{key} {fmt}" for key, fmt in found.precision.items()))
    for note in found.notes:
        console.print(f"note: {note}", style="yellow")
    for line in found.refused:
        console.print(f"refused: {line}", style="red")
    if not found.refused:
        console.print("nothing would be refused", style="green")


_NUMBERS = {"tensors", "bytes", "count", "zero", "subnormal", "negative", "Inf", "NaN", "lost blocks"}


def _counts(r: Range) -> tuple[str, ...]:
    ends = f"{r.least:.3g} to {r.most:.3g}" if r.most else ""
    return (*(f"{n:,}" for n in (r.count, r.zero, r.subnormal, r.negative, r.inf, r.nan)), ends)
