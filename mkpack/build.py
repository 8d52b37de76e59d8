"""`mkpack build`: checkpoint -> quantise -> pack -> compile -> measure -> one artifact, whole or not at all."""

from __future__ import annotations

import contextlib
import hashlib
import json
import mmap
import os
import shutil
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mkpack import __version__, codegen, platform, provenance, quality, quantize
from mkpack.artifact import build_lock, clean_temporaries, open_artifact, write_artifact
from mkpack.checkpoint import Checkpoint
from mkpack.compile import Kernel, Unit, compile_kernels
from mkpack.errors import UserError
from mkpack.layout import Layout
from mkpack.manifest import Entry, KernelEntry, Limits, Manifest, Producer, Source, WeightsEntry
from mkpack.native import Library, NativeModel
from mkpack.pack import BlobWriter
from mkpack.plan import Plan, plan
from mkpack.spec import Format, TensorRole
from mkpack.store import address
from mkpack.text import Text

if TYPE_CHECKING:
    import torch
    from rich.console import Console


def build(
    recipe_path: Path,
    *,
    output: Path | None = None,
    force: bool = False,
    keep_work: bool = False,
    console: Console | None = None,
) -> Path:
    """Builds a recipe's artifact and returns its path; an up-to-date one is left as it is unless `force`.

    output: file, or folder to hold NAME.mkpack (default: here). UserError for everything the user can mend.
    """
    start = time.monotonic()
    say = console.print if console else (lambda *_, **__: None)
    todo = plan(recipe_path, weights=True, progress=console is not None)
    path = _output(todo, output)
    checkpoint = todo.checkpoint
    assert checkpoint is not None
    say(f"source    {todo.source}: {len(todo.roles)} tensors, {todo.spec.family}", highlight=False, soft_wrap=True)
    for note in _notes(todo, checkpoint):
        say(f"note      {note}", highlight=False, soft_wrap=True)
    digests = checkpoint.digests(expected=todo.sha256)
    compiler = platform.compiler()
    if compiler is None:
        raise UserError(platform.no_compiler())
    text = quality.read_text(todo.recipe.quality.text) if todo.recipe.quality else None
    producer = provenance.producer(compiler)
    key = _build_key(todo, digests, producer, text)

    with build_lock(path, lambda: say(f"waiting   for another build of {path}", highlight=False, soft_wrap=True)):
        clean_temporaries(path)
        if not force and _is_current(path, key):
            say(f"current   {path} is up to date", highlight=False, soft_wrap=True)
            return path
        _check_disk(todo, path)
        with _work_folder(path, keep_work) as work:
            limits = Limits(**todo.recipe.limits.model_dump())
            units = [Unit(t, t, codegen.model_header(todo.layout, limits, t)) for t in todo.targets]
            reference = _Reference(todo, limits) if text is not None else None
            units += reference.units if reference else []
            with ThreadPoolExecutor(1) as pool:
                # The compiler works beside the quantiser; both are done before anything is measured.
                kernels = pool.submit(compile_kernels, units, work)
                blobs, report = _pack(todo, checkpoint, work, reference, console)
                compiled = kernels.result()
            for target in todo.targets:
                say(f"compiled  {target} with {compiled[target].compiler}", highlight=False, soft_wrap=True)
            if reference and text is not None:
                report["end_to_end"] = _measure(todo, limits, blobs, compiled, reference, work, text)
                say(f"quality   {quality.Quality(**report['end_to_end']).render()}", highlight=False, soft_wrap=True)
            say(
                f"quality   relative error of the weights {report['relative_error']:.4f}",
                highlight=False,
                soft_wrap=True,
            )
            _publish(path, todo, limits, digests, key, producer, blobs, compiled, report)
    size = path.stat().st_size
    say(f"built     {path}: {size / 1e6:.1f} MB in {time.monotonic() - start:.1f} s", highlight=False, soft_wrap=True)
    return path


def _output(todo: Plan, output: Path | None) -> Path:
    name = f"{todo.recipe.name}.mkpack"
    path = Path(name) if output is None else output / name if output.is_dir() else output
    if not path.absolute().parent.is_dir():
        raise UserError(f"cannot write {path}: the folder {path.absolute().parent} does not exist; make it first")
    return path.absolute() if output is None else path


def _notes(todo: Plan, checkpoint: Checkpoint) -> Iterator[str]:
    if unused := checkpoint.unused(todo.roles):
        few = ", ".join(unused[:3]) + (", ..." if len(unused) > 3 else "")
        yield f"{len(unused)} tensors of the checkpoint are not part of the model and left out: {few}"
    if checkpoint.stray:
        yield f"files the index does not name are ignored: {', '.join(checkpoint.stray)}"
    if todo.spec.tie_word_embeddings and not todo.layout.tied:
        yield "the head is tied to the embedding but has another precision, so the matrix is stored twice"


def _build_key(todo: Plan, digests: dict[str, str], producer: Producer, text: str | None) -> str:
    """Everything the artifact's bytes depend on."""
    facts = {
        "recipe": todo.recipe.canonical_text(),
        "commit": todo.commit,
        "source": digests,
        "targets": todo.targets,
        "producer": producer.model_dump(mode="json", exclude={"commit", "dirty"}),
        "csrc": provenance.sources_digest(),
        "text": hashlib.sha256(text.encode()).hexdigest() if text is not None else None,
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _is_current(path: Path, key: str) -> bool:
    if not path.exists():
        return False
    try:
        with open_artifact(path) as artifact:
            return artifact.manifest.build_key == key and not artifact.verify()
    except UserError:
        return False  # damaged or of another version: it is replaced


def _check_disk(todo: Plan, path: Path) -> None:
    free = platform.free_disk(path.absolute().parent)
    if free < todo.disk_bytes:
        raise UserError(
            f"{path}: building needs {todo.disk_bytes / 1e9:.2f} GB of disk, {free / 1e9:.2f} GB are free; "
            "free some or choose another folder with --output"
        )


@contextlib.contextmanager
def _work_folder(path: Path, keep: bool) -> Iterator[Path]:
    """A folder beside the artifact: same disk, and named so that the next build removes it if this one is killed."""
    work = path.absolute().with_name(f".{path.name}.{os.getpid()}.work")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    try:
        yield work
    finally:
        if keep:
            kept = path.absolute().with_name(f"{path.name}.work")
            shutil.rmtree(kept, ignore_errors=True)
            work.rename(kept)
            print(f"work kept in {kept}", file=sys.stderr)
        else:
            shutil.rmtree(work, ignore_errors=True)


class _Reference:
    """The same model with every matrix in bf16, on one rank: what quality is measured against."""

    NAME = "reference"

    def __init__(self, todo: Plan, limits: Limits) -> None:
        bf16: dict[str, Format] = dict.fromkeys(todo.layout.precision, "bf16")
        self.layout = Layout(todo.spec, bf16, 1, todo.layout.router_format)
        self.runs_here = next((t for t in platform.cpu_levels() if t in todo.targets), None)
        self.units = []
        if self.runs_here:
            header = codegen.model_header(self.layout, limits, self.runs_here)
            self.units.append(Unit(self.NAME, self.runs_here, header))


def _pack(
    todo: Plan, checkpoint: Checkpoint, work: Path, reference: _Reference | None, console: Console | None
) -> tuple[list[Path], dict[str, Any]]:
    """Quantises tensor by tensor into every rank's blob. Returns the blobs and the error report."""
    paths = [work / f"rank-{r}.bin" for r in range(todo.layout.tp)]
    writer = BlobWriter(todo.layout, paths)
    plain = BlobWriter(reference.layout, [work / "reference.bin"]) if reference and reference.runs_here else None
    errors: dict[str, quantize.ErrorStats] = {}
    for group in _progress(list(_groups(todo.roles)), console):
        read = [_matrix_source(checkpoint, role) for role in group]
        shared: dict[Format, float] = {}
        for role, tensor in zip(group, read, strict=True):
            for fmt in _formats(todo, role):
                scale2 = None
                if fmt == "nvfp4" and len(group) > 1:
                    if fmt not in shared:
                        shared[fmt] = quantize.tensor_scale(*read, names=[r.source for r in group])
                    scale2 = shared[fmt]
                q = quantize.quantise(tensor, fmt, name=role.source, scale2=scale2)
                writer.put(role.name, q, fmt)
                if role.precision:
                    errors.setdefault(role.name, quantize.tensor_error(q, tensor))
            if plain:
                fmt = "bf16" if role.precision else reference.layout.format_of(role) if reference else "f32"
                plain.put(role.name, quantize.quantise(tensor, fmt, name=role.source), fmt)
    writer.close()
    if plain:
        plain.close()
    total = sum(errors.values(), quantize.ErrorStats())
    tensors = {name: round(e.relative, 6) for name, e in errors.items()}
    return paths, {"relative_error": round(total.relative, 6), "tensors": tensors}


def _matrix_source(checkpoint: Checkpoint, role: TensorRole) -> torch.Tensor:
    return checkpoint.read(role.source)


def _groups(roles: list[TensorRole]) -> Iterator[list[TensorRole]]:
    """Neighbours that share an NVFP4 tensor scale together, all others alone."""
    group: list[TensorRole] = []
    for role in roles:
        if group and (role.group is None or role.group != group[0].group):
            yield group
            group = []
        group.append(role)
    if group:
        yield group


def _formats(todo: Plan, role: TensorRole) -> list[Format]:
    """Formats a tensor is stored in: one, or two for an embedding whose tied head has another precision."""
    if role.name == "embed" and todo.spec.tie_word_embeddings and not todo.layout.tied:
        return [todo.layout.precision["embeddings"], todo.layout.precision["lm_head"]]
    return [todo.layout.format_of(role)]


def _progress(groups: list[list[TensorRole]], console: Console | None) -> Iterator[list[TensorRole]]:
    if console is None:
        yield from groups
        return
    from rich.progress import track

    yield from track(groups, description="quantise", console=console, transient=True)


def _measure(
    todo: Plan,
    limits: Limits,
    blobs: list[Path],
    compiled: dict[str, Kernel],
    reference: _Reference,
    work: Path,
    text: str,
) -> dict[str, Any]:
    assert todo.recipe.quality is not None and todo.checkpoint is not None
    if reference.runs_here is None:
        raise UserError(
            f"quality: none of the targets {', '.join(todo.targets)} runs on this machine, so it cannot be measured "
            "here; remove quality from the recipe or add a target of this machine"
        )
    tokenizer = Text({name: p.read_bytes() for name, p in _tokenizer_files(todo.checkpoint).items()})
    tokens = quality.tokens_of(text, tokenizer, todo.recipe.quality.tokens, limits.context)
    with (
        _running(compiled[reference.runs_here].path, blobs, todo.layout, limits) as model,
        _running(compiled[reference.NAME].path, [work / "reference.bin"], reference.layout, limits) as plain,
    ):
        result = quality.measure(model, plain, tokens, limits.tokens_per_step)
    return asdict(result)


@contextlib.contextmanager
def _running(kernel: Path, blobs: list[Path], layout: Layout, limits: Limits) -> Iterator[quality.Step]:
    """A step function over blobs that are not in an artifact yet."""
    import numpy as np

    with contextlib.ExitStack() as stack:
        views = []
        for blob in blobs:
            file = stack.enter_context(open(blob, "rb"))
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            stack.callback(mapped.close)
            view = memoryview(mapped)
            stack.callback(view.release)
            views.append(view)
        native = NativeModel(
            Library(kernel.read_bytes(), str(kernel)),
            [address(view) for view in views],
            layout.nbytes,
            threads=platform.cores(),
            context=limits.context,
            wait_limit=30.0,
        )
        stack.callback(native.close)

        def step(tokens: Any) -> np.ndarray:
            logits = np.empty((len(tokens), layout.spec.vocab_size), np.float32)
            native.step(tokens, logits)
            return logits

        yield step


def _tokenizer_files(checkpoint: Checkpoint) -> dict[str, Path]:
    """Files the runtime reads to turn text into tokens and back; config.json for its stop tokens."""
    kept = {n: p for n, p in checkpoint.aux_files().items() if not n.upper().startswith(("LICEN", "NOTICE", "README"))}
    return {**kept, "config.json": checkpoint.folder / "config.json"}


def _publish(
    path: Path,
    todo: Plan,
    limits: Limits,
    digests: dict[str, str],
    key: str,
    producer: Producer,
    blobs: list[Path],
    compiled: dict[str, Kernel],
    report: dict[str, Any],
) -> None:
    checkpoint = todo.checkpoint
    assert checkpoint is not None
    layout = todo.layout
    tokenizer = {f"tokenizer/{n}": p for n, p in _tokenizer_files(checkpoint).items()}
    legal = {n: p for n, p in checkpoint.aux_files().items() if n.upper().startswith(("LICEN", "NOTICE"))}
    weights = {f"weights/rank-{r}.bin": p for r, p in enumerate(blobs)}
    kernels = {t: f"kernels/{t}.so" for t in todo.targets}
    entries: dict[str, Path | bytes] = {
        **{kernels[t]: compiled[t].path for t in todo.targets},
        **tokenizer,
        **legal,
        **weights,
        "recipe.yaml": todo.recipe_path,
        "report.json": (json.dumps(report, indent=1, sort_keys=True) + "\n").encode(),
    }
    license_id = todo.recipe.license or checkpoint.license_id or "unknown"

    def manifest(found: dict[str, Entry]) -> Manifest:
        return Manifest(
            format_version=1,
            minimum_runtime=__version__,
            name=todo.recipe.name,
            license=license_id,
            producer=producer,
            source=Source(
                kind="hub" if todo.recipe.source.repo else "folder",
                repo=todo.recipe.source.repo,
                commit=todo.commit,
                files=digests,
            ),
            recipe=todo.recipe.canonical_text(),
            build_key=key,
            spec=todo.spec,
            precision=layout.precision,  # type: ignore[arg-type]
            limits=limits,
            tp=layout.tp,
            kernels={
                t: KernelEntry(
                    path=kernels[t],
                    description=codegen.description(todo.spec, layout.sections, layout.nbytes, layout.tp, limits, t),
                    compiler=compiled[t].compiler,
                    requires=compiled[t].requires,  # type: ignore[arg-type]
                )
                for t in todo.targets
            },
            weights=[WeightsEntry(rank=r, path=p, nbytes=layout.nbytes) for r, p in enumerate(weights)],
            sections=layout.sections,
            tokenizer_files=sorted(tokenizer),
            quality={k: v for k, v in report.items() if k != "tensors"},
            entries=found,
        )

    write_artifact(path, list(entries.items()), manifest)
