"""Calibration as a step of the build: the checkpoint's tensors, progress, and what is told of the result."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mkpack import quantize
from mkpack.calibrate import Calibration, calibrate, input_scales
from mkpack.checkpoint import Checkpoint
from mkpack.dummy import Dummy
from mkpack.errors import UserError, some
from mkpack.packing import PLAIN
from mkpack.plan import Plan

if TYPE_CHECKING:
    import numpy as np
    import torch
    from rich.console import Console

KEPT = "calibration.json"  # in the work folder
DUMMY_AMAX = 6.0  # stands for the largest input of down where weights are random and nothing was calibrated


def calibrated(
    todo: Plan, checkpoint: Checkpoint | Dummy, work: Path, strict: bool, console: Console | None
) -> Calibration | None:
    """What the calibration saw, None where the recipe asks for none. It is kept in `work`, so that a build that is
    killed afterwards need not do it again."""
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
        use = "the scales are recorded and change no result, for quantise.down_input is not nvfp4"
        if todo.layout.down_input == "nvfp4":
            use = "what goes into the experts' down projections is scaled by it"
        console.print(
            f"calibrated on {found.tokens} tokens{more} in {time.monotonic() - start:.1f} s; {use}",
            **PLAIN,
        )
    if few := found.few(todo.spec, wanted.min_tokens):
        text = (
            f"{len(few)} experts saw fewer than {wanted.min_tokens} of the {found.tokens} tokens of the calibration, "
            f"and take the maxima of their layers: {some(few)}"
        )
        if strict:
            raise UserError(f"{text}; --strict refuses that: give more tokens or other data (calibrate in the recipe)")
        if console:
            console.print(f"note      {text}; report.json lists them", **PLAIN)
    return found


def down_input_scales(todo: Plan, found: Calibration | None) -> dict[str, np.ndarray]:
    """By section the global scales of the experts' down input, where it is carried as NVFP4: those that the
    calibration found, or of random weights a constant."""
    if todo.layout.down_input != "nvfp4":
        return {}
    if found is not None and todo.recipe.calibrate is not None:
        return found.down_input_scales(todo.spec, todo.recipe.calibrate.min_tokens)
    assert todo.spec.moe is not None
    constant = input_scales([DUMMY_AMAX] * todo.spec.moe.num_experts)
    return {f"layers.{i}.down_input_scale": constant for i, layer in enumerate(todo.spec.layers) if layer.moe}


def down_input_report(todo: Plan) -> dict[str, str]:
    """For report.json: how the experts' down input is carried where the recipe says it, and whence its scales are."""
    carried = todo.layout.down_input
    if carried != "nvfp4":
        return {"format": carried} if carried else {}
    told = "of every expert, from the calibration"
    if todo.recipe.source.dummy:
        told = f"random weights, nothing calibrated: {DUMMY_AMAX:g} / {quantize.NVFP4_MAX:g} for every expert"
    return {"format": carried, "global_scales": told}


def _tracked(console: Console | None) -> Callable[[Iterable[int]], Iterable[int]]:
    if console is None or not console.is_terminal:
        return iter
    from rich.progress import track

    return lambda layers: track(list(layers), description="calibrate", console=console, transient=True)
