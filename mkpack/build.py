"""`mkpack build`: checkpoint -> quantise -> pack -> compile -> measure -> one artifact, whole or not at all."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import itertools
import json
import mmap
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mkpack import __version__, codegen, journal, platform, provenance, quality, trust
from mkpack import compile as compiling
from mkpack.artifact import Given, abandoned, build_lock, clean_temporaries, open_artifact, write_artifact
from mkpack.calibration_step import calibrated, down_input_report, down_input_scales
from mkpack.checkpoint import Checkpoint
from mkpack.codegen_cuda import cuda_header
from mkpack.compile import Kernel, Unit, compile_kernels
from mkpack.dummy import Dummy
from mkpack.errors import UserError, os_errors
from mkpack.layout import Layout
from mkpack.manifest import (
    FORMAT_VERSION,
    MANIFEST_NAME,
    Entry,
    KernelEntry,
    Limits,
    Manifest,
    Producer,
    Source,
    WeightsEntry,
)
from mkpack.native import Library, NativeModel
from mkpack.packing import REFERENCE, Blobs, pack
from mkpack.plan import Plan, QualityPlan, plan
from mkpack.progress_bar import progress_bar
from mkpack.recipe import load_recipe
from mkpack.store import address
from mkpack.targets import layout_name
from mkpack.work import check_disk, work_folder

if TYPE_CHECKING:
    from rich.console import Console

    from mkpack.digest import Progress


def build(
    recipe_path: Path,
    *,
    output: Path | str | None = None,
    force: bool = False,
    keep_work: bool = False,
    trace: bool = False,
    strict: bool = False,
    like: Manifest | None = None,
    rank: int | None = None,
    console: Console | None = None,
) -> Path:
    """Builds a recipe's artifact and returns its path; an up-to-date one is left as it is unless `force`.

    output: file, or folder to hold NAME.mkpack, of one rank NAME-rank-R-of-N.mkpack (default: here); text that ends in
    a slash means a folder. What lies there is replaced only when it is an artifact. trace: kernels of GPUs keep times
    for `mkpack trace`, which makes them slower. strict: UserError when calibration leaves experts with few tokens.
    like: of an artifact to make again: a hub source at its commit, its targets whatever this machine is, its one rank,
    and whether they trace. rank: only this rank's weights, for the GPU targets and for `mkpack bench --rank-of`.
    UserError for everything the user can mend.
    """
    start = time.monotonic()

    def say(text: str) -> None:
        if console:
            console.print(text, highlight=False, markup=False, soft_wrap=True)

    shown = console is not None and console.is_terminal
    compiler = platform.compiler()
    if compiler is None:
        raise UserError(platform.no_compiler())
    _check_libraries(recipe_path)
    path = _output(recipe_path, output, rank)
    todo = plan(recipe_path, weights=True, progress=console is not None, like=like, rank=rank)
    checkpoint = todo.checkpoint
    assert checkpoint is not None
    trace = trace or (like is not None and any(kernel.traced for kernel in like.kernels.values()))
    if trace and "cuda" not in todo.layouts:
        raise UserError(f"--trace is for targets of GPUs, and {recipe_path} has only {', '.join(todo.targets)}")
    say(f"source    {todo.source}: {len(todo.roles)} tensors, {todo.spec.family}")
    for note in _notes(todo, checkpoint):
        say(f"note      {note}")
    producer = provenance.producer(compiler, platform.nvcc() if "cuda" in todo.layouts else None)
    with build_lock(path, lambda: say(f"waiting   for another build of {path}")), os_errors(f"build {path}"):
        unfinished = [work for work in abandoned(path) if journal.key_of(work)]
        clean_temporaries(path, keep=unfinished)
        if force or not path.exists():
            check_disk(todo, path, keep_work, unfinished)  # hashing the source may take long
        with progress_bar("hash", shown) as advance:
            digests = checkpoint.digests(advance, todo.sha256)
        key = _build_key(todo, digests, producer, trace)
        mine = next((work for work in unfinished if journal.key_of(work) == key), None)
        clean_temporaries(path, keep=[mine] if mine else [])
        if not force and _is_current(path, key):
            clean_temporaries(path)
            say(f"current   {path} is up to date")
            return path
        check_disk(todo, path, keep_work, [mine] if mine else [])
        with work_folder(path, keep_work, mine) as work:
            limits = Limits(**todo.recipe.limits.model_dump())
            units = [Unit(t, t, _header(todo, limits, t, trace)) for t in todo.targets]
            if todo.quality:
                header = codegen.model_header(todo.quality.reference, limits, todo.quality.target)
                units.append(Unit(REFERENCE, todo.quality.target, header))
            with ThreadPoolExecutor(1) as pool, _set_at_end(threading.Event()) as stop:
                # The compiler works beside the quantiser; both are done before anything is measured.
                kernels = pool.submit(compile_kernels, units, work, stop)
                calibration = calibrated(todo, checkpoint, work, strict, console)
                scales = down_input_scales(todo, calibration)
                blobs, report = pack(todo, checkpoint, work, key, scales, kernels, console)
                compiled = kernels.result()
            if calibration and todo.recipe.calibrate:
                report["calibration"] = calibration.report(todo.spec, todo.recipe.calibrate.min_tokens)
            if carried := down_input_report(todo):
                report["down_input"] = carried
            for target in todo.targets:
                say(f"compiled  {target} with {compiled[target].compiler}")
                for resources in compiled[target].resources:
                    say(f"          {resources.render()}")
            if todo.quality:
                measured = _measure(todo.layout, todo.quality, limits, blobs["cpu"], compiled, work)
                report["end_to_end"] = asdict(measured)
                say(f"quality   {measured.render()}")
            if "relative_error" in report:
                of_max = report.get("relative_error_of_max")
                note = f" (algorithm: max would give {of_max:.4f})" if of_max else ""
                say(f"quality   relative error of the weights {report['relative_error']:.4f}{note}")
            with progress_bar("write", shown) as advance:
                manifest = _publish(
                    path, todo, limits, trace, digests, key, producer, blobs, compiled, report, keep_work, advance
                )
    try:
        # Whoever compiled a kernel needs no one's word for it.
        trust.remember([manifest.entries[k.path].sha256 for k in manifest.kernels.values()], "built", manifest.name)
    except UserError as e:
        say(f"note      run it with --trust-kernel, for its kernel could not be noted as yours: {e}")
    say(f"built     {path}: {path.stat().st_size / 1e6:.1f} MB in {time.monotonic() - start:.1f} s")
    return path


@contextlib.contextmanager
def _set_at_end(event: threading.Event) -> Iterator[threading.Event]:
    try:
        yield event
    finally:
        event.set()


def _header(todo: Plan, limits: Limits, target: str, trace: bool) -> str:
    layout = todo.layouts[layout_name(target)]
    if isinstance(layout, Layout):
        return codegen.model_header(layout, limits, target)
    return cuda_header(layout, limits, target, trace)


def _output(recipe_path: Path, output: Path | str | None, rank: int | None) -> Path:
    recipe = load_recipe(recipe_path)
    # A whole artifact of this recipe keeps its place.
    name = recipe.name if rank is None else f"{recipe.name}-rank-{rank}-of-{recipe.parallel.tp}"
    path = Path.cwd() if output is None else Path(output)
    if isinstance(output, str) and output.endswith("/") and not path.is_dir():
        raise UserError(f"cannot write into {output}: no such folder; make it first, or name a file without the slash")
    if (path / MANIFEST_NAME).exists():
        raise UserError(f"cannot write {path}: an unpacked artifact is in the way; choose another name")
    if path.is_dir():
        path = path / f"{name}.mkpack"
    if path.is_dir():
        raise UserError(f"cannot write {path}: a folder of that name is in the way; remove it or choose another name")
    _check_replaceable(path, recipe_path)
    folder = path.absolute().parent
    if not folder.is_dir():
        raise UserError(f"cannot write {path}: the folder {folder} does not exist; make it first")
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as e:
        raise UserError(f"cannot write {path}: {folder}: {e.strerror}; choose another folder with --output") from e
    return path


def _check_replaceable(path: Path, recipe_path: Path) -> None:
    """UserError when a file at `path` is something else than an artifact, however old or damaged."""
    with os_errors(f"write {path}"):
        if not path.exists():
            return
        if path.samefile(recipe_path):
            raise UserError(f"cannot write {path}: it is the recipe; choose another name with --output")
        if not path.is_file():
            raise UserError(f"cannot write {path}: it is not a regular file; choose another name with --output")
        if not path.stat().st_size:
            return
        with open(path, "rb") as file:
            zipped = file.read(2) == b"PK"
    if zipped and path.suffix == ".mkpack":
        return
    try:
        open_artifact(path).close()
    except UserError as e:
        raise UserError(
            f"cannot write {path}: a file that is not an artifact is in the way; remove it or choose another name "
            "with --output"
        ) from e


def _check_libraries(recipe_path: Path) -> None:
    if load_recipe(recipe_path).source.dummy is None:
        missing = [m for m in ("torch", "modelopt") if importlib.util.find_spec(m) is None]
        if missing:
            raise UserError(
                f"building needs torch and nvidia-modelopt; not installed here: {', '.join(missing)}; "
                "pip install 'mkpack[build]'"
            )
    compiling.ninja()


def _notes(todo: Plan, checkpoint: Checkpoint | Dummy) -> Iterator[str]:
    yield from todo.notes()
    if unused := checkpoint.unused(todo.roles):
        yield (
            f"{len(unused)} tensors of the checkpoint are not part of the model and left out: "
            + _left_out(unused, {role.source for role in todo.roles})
        )
    if checkpoint.stray:
        yield f"files the index does not name are ignored: {', '.join(checkpoint.stray)}"
    if todo.spec.tie_word_embeddings and not todo.layout.tied:
        yield "the head is tied to the embedding but has another precision, so the matrix is stored twice"


def _left_out(unused: Iterable[str], used: Iterable[str]) -> str:
    """Names up to where no tensor of the model shares them, with how many begin so: a whole tower has one name."""

    def prefixes(name: str) -> Iterator[str]:
        return itertools.accumulate(name.split("."), "{}.{}".format)

    known = {prefix for name in used for prefix in prefixes(name)}
    parts: dict[str, list[str]] = {}
    for name in unused:
        part = next(prefix for prefix in prefixes(name) if prefix not in known or prefix == name)
        parts.setdefault(part, []).append(name)
    shown = [f"{part} ({len(names)})" if len(names) > 1 else names[0] for part, names in parts.items()]
    return ", ".join(shown[:8]) + (", ..." if len(shown) > 8 else "")


def _build_key(todo: Plan, digests: dict[str, str], producer: Producer, trace: bool) -> str:
    """Everything the artifact's bytes depend on."""
    facts = {
        "recipe": todo.recipe.canonical_text(),
        "commit": todo.commit,
        "source": digests,
        "license": _license(todo),
        "targets": todo.targets,
        "producer": producer.model_dump(mode="json", exclude={"commit", "dirty"}),
        "csrc": provenance.sources_digest(),
        "quality": todo.quality.tokens if todo.quality else None,
        "calibration": todo.calibration,
        "trace": trace,
        "rank": todo.rank,
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _license(todo: Plan) -> str:
    """Of the recipe, or else of the source: a README.md is not among its digests."""
    return todo.recipe.license or (todo.checkpoint and todo.checkpoint.license_id) or "unknown"


def _is_current(path: Path, key: str) -> bool:
    if not path.exists():
        return False
    try:
        with open_artifact(path) as artifact:
            return artifact.manifest.build_key == key and not artifact.verify()
    except UserError:
        return False  # damaged or of another version: it is replaced


def _measure(
    layout: Layout, todo: QualityPlan, limits: Limits, blobs: list[Path], compiled: dict[str, Kernel], work: Path
) -> quality.Quality:
    plain = [work / f"{REFERENCE}.bin"]
    with (
        _running(compiled[todo.target].path, blobs, layout, len(todo.tokens)) as model,
        _running(compiled[REFERENCE].path, plain, todo.reference, len(todo.tokens)) as reference,
    ):
        return quality.measure(model, reference, todo.tokens, limits.tokens_per_step)


@contextlib.contextmanager
def _running(kernel: Path, blobs: list[Path], layout: Layout, context: int) -> Iterator[quality.Step]:
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
            context=context,
            wait_limit=30.0,
        )
        stack.callback(native.close)

        def step(tokens: Any) -> np.ndarray:
            logits = np.empty((len(tokens), layout.spec.vocab_size), np.float32)
            native.step(tokens, logits)
            return logits

        yield step


def _publish(
    path: Path,
    todo: Plan,
    limits: Limits,
    trace: bool,
    digests: dict[str, str],
    key: str,
    producer: Producer,
    blobs: Blobs,
    compiled: dict[str, Kernel],
    report: dict[str, Any],
    keep_work: bool,
    progress: Progress | None,
) -> Manifest:
    tokenizer = {f"tokenizer/{n}": p for n, p in todo.tokenizer_files().items()}
    weights = {f"weights/{p.name}": p if keep_work else Given(p) for paths in blobs.values() for p in paths}
    kernels = {t: f"kernels/{t}.so" for t in todo.targets}
    entries: dict[str, Path | bytes | Given] = {
        **{kernels[t]: compiled[t].path for t in todo.targets},
        **tokenizer,
        **todo.legal_files(),
        **weights,
        "recipe.yaml": todo.recipe_path,
        "report.json": (json.dumps(report, indent=1, sort_keys=True) + "\n").encode(),
    }
    source = todo.recipe.source

    def manifest(found: dict[str, Entry]) -> Manifest:
        return Manifest(
            format_version=FORMAT_VERSION,
            minimum_runtime=__version__,
            name=todo.recipe.name,
            license=_license(todo),
            producer=producer,
            source=Source(
                kind="hub" if source.repo else "dummy" if source.dummy else "folder",
                repo=source.repo,
                commit=todo.commit,
                files=digests,
                seed=source.seed if source.dummy else None,
            ),
            recipe=todo.recipe.canonical_text(),
            build_key=key,
            spec=todo.spec,
            precision=todo.layout.precision,  # type: ignore[arg-type]
            limits=limits,
            tp=todo.layout.tp,
            kernels={t: _kernel_entry(todo, limits, t, trace, kernels[t], compiled[t]) for t in todo.targets},
            weights=[
                WeightsEntry(layout=name, rank=r, path=f"weights/{p.name}", nbytes=todo.layouts[name].nbytes)
                for name, paths in blobs.items()
                for r, p in zip(todo.ranks, paths, strict=True)
            ],
            sections={name: layout.sections for name, layout in todo.layouts.items()},
            tokenizer_files=sorted(tokenizer),
            quality=None if source.dummy else _summary(report),
            entries=found,
        )

    return write_artifact(path, list(entries.items()), manifest, progress)


def _summary(report: dict[str, Any]) -> dict[str, Any]:
    """The report without what it says of single tensors and experts."""
    summary = {k: v for k, v in report.items() if k != "tensors"}
    if "calibration" in summary:
        summary["calibration"] = {k: v for k, v in summary["calibration"].items() if k != "experts"}
    return summary


def _kernel_entry(todo: Plan, limits: Limits, target: str, trace: bool, path: str, compiled: Kernel) -> KernelEntry:
    name = layout_name(target)
    return KernelEntry(
        path=path,
        layout=name,
        description=codegen.description(todo.layouts[name], limits, target, trace and name == "cuda"),
        compiler=compiled.compiler,
        requires=compiled.requires,  # type: ignore[arg-type]
    )
