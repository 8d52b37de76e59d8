"""Calibration as a step of the build: the checkpoint's tensors, progress, and what is told of the result."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mkpack import quantize
from mkpack.calibrate import Calibration, calibrate
from mkpack.checkpoint import Checkpoint
from mkpack.dummy import Dummy
from mkpack.errors import UserError, some
from mkpack.packing import PLAIN
from mkpack.plan import Plan

if TYPE_CHECKING:
    import torch
    from rich.console import Console

KEPT = "calibration.json"  # in the work folder


def calibrated(
    todo: Plan, checkpoint: Checkpoint | Dummy, work: Path, strict: bool, console: Console | None
) -> dict[str, Any] | None:
    """The calibration's part of the report, None where the recipe asks for none. It is kept in `work`, so that a build
    that is killed afterwards need not do it again."""
    wanted = todo.recipe.calibrate
    if todo.calibration is None or wanted is None:
        return None
    assert isinstance(checkpoint, Checkpoint)
    start, roles, kept = time.monotonic(), {role.name: role for role in todo.roles}, work / KEPT
    if kept.exists():
        found = Calibration.from_json(kept.read_text())
    else:

        def load(name: str, rows: Sequence[int] | None) -> torch.Tensor:
            role = roles[name]
            return quantize.floats(checkpoint.read(role.source, role.part), rows)

        found = calibrate(todo.spec, load, todo.calibration, _tracked(console))
        kept.with_suffix(".part").write_text(found.to_json())
        kept.with_suffix(".part").replace(kept)
    if console:
        more = ", all there are," if found.tokens < wanted.tokens else ""
        console.print(
            f"calibrated on {found.tokens} tokens{more} in {time.monotonic() - start:.1f} s; kernels carry activations "
            "unquantised, so the scales are recorded and change no result",
            **PLAIN,
        )
    if few := found.few(todo.spec, wanted.min_tokens):
        text = (
            f"{len(few)} experts saw fewer than {wanted.min_tokens} of the {found.tokens} tokens of the calibration, "
            f"and take the maxima of their layers: {some(few)}"
        )
        if strict:
            raise UserError(f"{text}; more tokens or other data (calibrate in the recipe) may reach them")
        if console:
            console.print(f"note      {text}; report.json lists them", **PLAIN)
    return found.report(todo.spec, wanted.min_tokens)


def _tracked(console: Console | None) -> Callable[[Iterable[int]], Iterable[int]]:
    if console is None:
        return iter
    from rich.progress import track

    return lambda layers: track(list(layers), description="calibrate", console=console, transient=True)
