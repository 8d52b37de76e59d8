"""Every tensor of a model into the blobs of its layouts, in one pass: read and quantised, or drawn at random. Several
tensors at a time, as many as CPUs and as take together no more memory than the largest of them alone."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from mkpack import platform, quantize
from mkpack.checkpoint import Checkpoint
from mkpack.dummy import Dummy
from mkpack.layout import Layout
from mkpack.manifest import LayoutName
from mkpack.pack import BlobWriter
from mkpack.pack_cuda import CudaBlobWriter
from mkpack.plan import Plan, groups
from mkpack.spec import TensorRole

if TYPE_CHECKING:
    from rich.console import Console

T = TypeVar("T")
Blobs = dict[LayoutName, list[Path]]  # rank 0 first
Writer = BlobWriter | CudaBlobWriter

REFERENCE = "reference"  # name of the blob, and of the kernel, of the bf16 model that the quality is measured against


def pack(
    todo: Plan,
    checkpoint: Checkpoint | Dummy,
    work: Path,
    kernels: Future[Any],
    console: Console | None,
) -> tuple[Blobs, dict[str, Any]]:
    """Writes the blob of every layout and rank into `work`, and that of the quality's reference. Returns the blobs and
    the report: the error of every tensor, or that there is none because nothing was quantised.

    kernels: what compiles meanwhile; when that fails, so does this, without the rest of the work.
    """
    paths: Blobs = {name: [work / f"{name}-{r}.bin" for r in range(x.tp)] for name, x in todo.layouts.items()}
    with contextlib.ExitStack() as open_blobs:
        writers: list[Writer] = []
        for name, layout in todo.layouts.items():
            if isinstance(layout, Layout):
                writers.append(open_blobs.enter_context(BlobWriter(layout, paths[name])))
            else:
                writers.append(open_blobs.enter_context(CudaBlobWriter(layout, paths[name][0])))
        if isinstance(checkpoint, Dummy):
            _each(functools.partial(_draw, todo, checkpoint, writers), todo, kernels, console)
            return paths, {"weights": "random, drawn in the formats they are stored in; nothing was quantised"}
        plain = None
        if todo.quality:
            plain = open_blobs.enter_context(BlobWriter(todo.quality.reference, [work / f"{REFERENCE}.bin"]))
        _import_libraries(todo)
        one = functools.partial(_quantise, todo, checkpoint, writers, plain)
        errors = dict(pair for found in _each(one, todo, kernels, console, _one_torch_thread) for pair in found)
    total = sum(errors.values(), quantize.ErrorStats())
    tensors = {name: round(e.relative, 6) for name, e in errors.items()}
    return paths, {"relative_error": round(total.relative, 6), "tensors": tensors}


def _draw(todo: Plan, dummy: Dummy, writers: list[Writer], group: list[TensorRole]) -> None:
    for role in group:
        for fmt in todo.formats(role):
            q = dummy.draw(role, fmt)
            for writer in writers:
                writer.put(role.name, q, fmt)


def _quantise(
    todo: Plan, checkpoint: Checkpoint, writers: list[Writer], plain: BlobWriter | None, group: list[TensorRole]
) -> list[tuple[str, quantize.ErrorStats]]:
    read = [checkpoint.read(role.source, role.part) for role in group]
    shared = None
    errors: dict[str, quantize.ErrorStats] = {}
    for role, tensor in zip(group, read, strict=True):
        for fmt in todo.formats(role):
            if fmt == "nvfp4" and len(group) > 1 and shared is None:
                shared = quantize.tensor_scale(*read, names=[r.label for r in group])
            scale2 = shared if fmt == "nvfp4" else None
            q, error = quantize.quantise_measured(
                tensor, fmt, name=role.label, scale2=scale2, algorithm=todo.recipe.quantise.algorithm
            )
            for writer in writers:
                writer.put(role.name, q, fmt)
            if role.precision:
                # The second format of a tied embedding is that of the head.
                errors["lm_head" if role.name in errors else role.name] = error
        if plain:
            fmt = plain.layout.format_of(role)
            plain.put(role.name, quantize.quantise(tensor, fmt, name=role.label), fmt)
    return list(errors.items())


def _import_libraries(todo: Plan) -> None:
    """Takes seconds: in this thread, where Ctrl-C ends it, and not in one that has to be waited for."""
    import torch  # noqa: F401

    quantize.load_for({fmt for role in todo.roles for fmt in todo.formats(role)})


def _one_torch_thread() -> None:
    """Several threads with a team of torch's own each would wait for each other, spinning."""
    import torch

    torch.set_num_threads(1)


def _each(
    work: Callable[[list[TensorRole]], T],
    todo: Plan,
    kernels: Future[Any],
    console: Console | None,
    initializer: Callable[[], None] | None = None,
) -> list[T]:
    """work() of every group of tensors, several at a time; results in order. The first error ends it."""
    chosen = list(groups(todo.roles))
    most, at_once = max(map(todo.group_bytes, chosen)), platform.cores()
    changed = threading.Condition()
    held, running, failed = 0, 0, False

    def ended(future: Future[T], size: int) -> None:
        nonlocal held, running, failed
        with changed:
            held, running = held - size, running - 1
            failed |= not future.cancelled() and future.exception() is not None
            changed.notify()

    futures: list[Future[T]] = []
    pool = ThreadPoolExecutor(at_once, "mkpack-pack", initializer)
    try:
        for group in _progress(chosen, console):
            size = todo.group_bytes(group)
            with changed:
                while not failed and running and (running >= at_once or held + size > most):
                    changed.wait()
                held, running = held + size, running + 1
            if failed:
                break
            if kernels.done():
                kernels.result()
            futures.append(pool.submit(work, group))
            futures[-1].add_done_callback(functools.partial(ended, size=size))
        return [future.result() for future in futures]
    finally:
        pool.shutdown(cancel_futures=True)


def _progress(chosen: list[list[TensorRole]], console: Console | None) -> Iterator[list[TensorRole]]:
    if console is None:
        yield from chosen
        return
    from rich.progress import track

    yield from track(chosen, description="pack", console=console, transient=True)
