"""Every tensor of a model into the blobs of its layouts, in one pass: read and quantised, or drawn at random. Several
tensors at a time, as many as CPUs and as take together no more memory than the largest of them alone."""

from __future__ import annotations

import contextlib
import functools
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import astuple
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

from mkpack import platform, quantize
from mkpack.blobfile import Seal
from mkpack.checkpoint import Checkpoint
from mkpack.dummy import Dummy
from mkpack.errors import size
from mkpack.formats import QTensor
from mkpack.journal import Journal
from mkpack.layout import Layout
from mkpack.manifest import LayoutName
from mkpack.pack import BlobWriter
from mkpack.pack_cuda import CudaBlobWriter
from mkpack.plan import Plan, groups
from mkpack.spec import Format, TensorRole

if TYPE_CHECKING:
    import numpy as np
    from rich.console import Console

T = TypeVar("T")
Blobs = dict[LayoutName, list[Path]]  # of the plan's ranks, in order
Writer = BlobWriter | CudaBlobWriter

PLAIN: Any = {"highlight": False, "markup": False, "soft_wrap": True}  # for text that is no markup
REFERENCE = "reference"  # name of the blob, and of the kernel, of the bf16 model that the quality is measured against


def pack(
    todo: Plan,
    checkpoint: Checkpoint | Dummy,
    work: Path,
    key: str,
    vectors: Mapping[str, np.ndarray],
    kernels: Future[Any],
    console: Console | None,
) -> tuple[Blobs, dict[str, Any]]:
    """Writes the blob of every layout and rank into `work`, and that of the quality's reference. Returns the blobs and
    the report: the error of every tensor, or that there is none because nothing was quantised.

    key: the build key; what a build of the same key left in `work` is checked and taken over. vectors: float32, by
    section of CPUs' layout, that are no tensors of the source. kernels: what compiles meanwhile; when that fails, so
    does this, without the rest of the work.
    """
    paths: Blobs = {name: [work / f"{name}-{r}.bin" for r in todo.ranks] for name in todo.layouts}
    with contextlib.ExitStack() as stack:
        journal = Journal(work, key)
        stack.callback(journal.close)
        resume = bool(journal.found)
        writers: list[Writer] = []
        for name, layout in todo.layouts.items():
            if isinstance(layout, Layout):
                writers.append(stack.enter_context(BlobWriter(layout, paths[name], resume)))
            else:
                writers.append(stack.enter_context(CudaBlobWriter(layout, paths[name], resume, todo.ranks)))
        if todo.quality:
            writers.append(stack.enter_context(BlobWriter(todo.quality.reference, [work / f"{REFERENCE}.bin"], resume)))
        for writer in writers[: len(todo.layouts)]:
            for section, values in vectors.items():
                writer.put(section, QTensor("f32", values.shape, values), "f32")
        done = _finished(todo, journal, writers, console)
        put = functools.partial(_draw, todo, checkpoint) if isinstance(checkpoint, Dummy) else None
        if put is None:
            assert isinstance(checkpoint, Checkpoint)
            _import_libraries(todo)
            put = functools.partial(_quantise, todo, checkpoint)

        def one(group: list[TensorRole]) -> dict[str, quantize.ErrorStats]:
            seals: list[list[Seal]] = [[] for _ in writers]
            errors = put(writers, seals, group)
            journal.add(_name(group), seals, {name: astuple(error) for name, error in errors.items()})
            return errors

        initializer = None if isinstance(checkpoint, Dummy) else _one_torch_thread
        start = time.monotonic()
        found = _each(one, todo, done, kernels, console, initializer)
    if console:
        source = sum(todo.source_bytes(group) for group in groups(todo.roles) if _name(group) not in done)
        seconds = time.monotonic() - start
        console.print(
            f"packed    {size(todo.artifact_bytes)} of weights, from {size(source)} of source in "
            f"{seconds:.1f} s ({source / 1e6 / seconds:.0f} MB/s)",
            **PLAIN,
        )
    if isinstance(checkpoint, Dummy):
        return paths, {"weights": "random, drawn in the formats they are stored in; nothing was quantised"}
    return paths, _report({name: error for group in found for name, error in group.items()}, todo)


def _report(errors: dict[str, quantize.ErrorStats], todo: Plan) -> dict[str, Any]:
    total = sum(errors.values(), quantize.ErrorStats())
    algorithm = todo.recipe.quantise.algorithm
    report: dict[str, Any] = {"relative_error": round(total.relative, 6), "algorithm": algorithm}
    if algorithm != "max":
        report["relative_error_of_max"] = round(total.relative_max, 6)
    return {**report, "tensors": {name: round(e.relative, 6) for name, e in errors.items()}}


def _name(group: list[TensorRole]) -> str:
    return group[0].group or group[0].name


def _finished(
    todo: Plan, journal: Journal, writers: list[Writer], console: Console | None
) -> dict[str, dict[str, quantize.ErrorStats]]:
    """Groups that an earlier build finished and whose bytes are all there, with their errors."""

    def check(name: str) -> bool:
        seals, _ = journal.found[name]
        return len(seals) == len(writers) and all(
            len(part) % writer.blobs == 0
            and all(writer.holds(part[i : i + writer.blobs]) for i in range(0, len(part), writer.blobs))
            for writer, part in zip(writers, seals, strict=True)
        )

    names = list(journal.found)
    with ThreadPoolExecutor(platform.cores(), "mkpack-check") as pool:
        held = [name for name, holds in zip(names, pool.map(check, names), strict=True) if holds]
    if console and names:
        total = len(list(groups(todo.roles)))
        console.print(
            f"resumed   a build that was stopped had packed {len(held)} of {total} groups of tensors", **PLAIN
        )

    return {name: {k: quantize.ErrorStats(*v) for k, v in journal.found[name][1].items()} for name in held}


def _put(writers: list[Writer], seals: list[list[Seal]], tensor: str, q: QTensor, fmt: Format) -> None:
    for writer, found in zip(writers, seals, strict=True):
        found += writer.put(tensor, q, fmt)


def _draw(
    todo: Plan, dummy: Dummy, writers: list[Writer], seals: list[list[Seal]], group: list[TensorRole]
) -> dict[str, quantize.ErrorStats]:
    for role in group:
        for fmt in todo.formats(role):
            _put(writers, seals, role.name, dummy.draw(role, fmt, todo.drawn_rows(role)), fmt)
    return {}


def _quantise(
    todo: Plan, checkpoint: Checkpoint, writers: list[Writer], seals: list[list[Seal]], group: list[TensorRole]
) -> dict[str, quantize.ErrorStats]:
    read = checkpoint.read_together(group)
    shared = None
    errors: dict[str, quantize.ErrorStats] = {}
    count = len(todo.layouts)  # the writer after them is that of the reference
    for role, tensor in zip(group, read, strict=True):
        for fmt in todo.formats(role):
            if fmt == "nvfp4" and len(group) > 1 and shared is None:
                shared = quantize.tensor_scale(*read, names=[r.label for r in group])
            scale2 = shared if fmt == "nvfp4" else None
            q, error = quantize.quantise_measured(
                tensor, fmt, name=role.label, scale2=scale2, algorithm=todo.recipe.quantise.algorithm
            )
            _put(writers[:count], seals[:count], role.name, q, fmt)
            if role.precision:
                # The second format of a tied embedding is that of the head.
                errors["lm_head" if role.name in errors else role.name] = error
        if todo.quality:
            fmt = todo.quality.reference.format_of(role)
            _put(writers[count:], seals[count:], role.name, quantize.quantise(tensor, fmt, name=role.label), fmt)
    return errors


def _import_libraries(todo: Plan) -> None:
    """Takes seconds: in this thread, where Ctrl-C ends it, and not in one that has to be waited for."""
    with _no_interrupt_lost():
        import torch  # noqa: F401

        quantize.load_for({fmt for role in todo.roles for fmt in todo.formats(role)})


@contextlib.contextmanager
def _no_interrupt_lost() -> Iterator[None]:
    """A Ctrl-C that comes while Python runs a callback of an import is printed and forgotten: here it comes again at
    the end."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    came = False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal came
        came = True
        before(number, frame)

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if came:
        raise KeyboardInterrupt


def _one_torch_thread() -> None:
    """Several threads with a team of torch's own each would wait for each other, spinning."""
    import torch

    torch.set_num_threads(1)


def _each(
    work: Callable[[list[TensorRole]], T],
    todo: Plan,
    done: Mapping[str, T],
    kernels: Future[Any],
    console: Console | None,
    initializer: Callable[[], None] | None = None,
) -> list[T]:
    """work() of every group of tensors, several at a time, but of those that are `done`; results in order. The first
    error ends it."""
    chosen = list(groups(todo.roles))
    most, at_once = max(map(todo.group_bytes, chosen)), platform.cores()
    changed = threading.Condition()
    held, running, failed = 0, 0, False
    with _progress(todo, chosen, done, console) as advance, contextlib.ExitStack() as stack:

        def ended(future: Future[T], group: list[TensorRole]) -> None:
            nonlocal held, running, failed
            with changed:
                held, running = held - todo.group_bytes(group), running - 1
                failed |= not future.cancelled() and future.exception() is not None
                advance(group)
                changed.notify()

        futures: dict[str, Future[T]] = {}
        pool = ThreadPoolExecutor(at_once, "mkpack-pack", initializer)
        stack.callback(pool.shutdown, cancel_futures=True)
        for group in chosen:
            if _name(group) in done:
                continue
            nbytes = todo.group_bytes(group)
            with changed:
                while not failed and running and (running >= at_once or held + nbytes > most):
                    changed.wait()
                held, running = held + nbytes, running + 1
            if failed:
                break
            if kernels.done():
                kernels.result()
            future = futures[_name(group)] = pool.submit(work, group)
            future.add_done_callback(functools.partial(ended, group=group))
        results = {name: future.result() for name, future in futures.items()}
    return [done[name] if name in done else results[name] for name in map(_name, chosen)]


@contextlib.contextmanager
def _progress(
    todo: Plan, chosen: list[list[TensorRole]], done: Collection[str], console: Console | None
) -> Iterator[Callable[[list[TensorRole]], None]]:
    """A bar with bytes of the source, how many a second, and the time left; what is yielded moves it by a group."""
    if console is None or not console.is_terminal:
        yield lambda group: None
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn("pack"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        total = sum(map(todo.source_bytes, chosen))
        left = sum(todo.source_bytes(group) for group in chosen if _name(group) not in done)
        task = bar.add_task("", total=total, completed=total - left)
        yield lambda group: bar.advance(task, todo.source_bytes(group))
