"""The targets of a recipe: which of them this model and this machine can have, and whose weights each reads."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from mkpack import platform
from mkpack.compile import CUDA_TARGETS, compiler_of
from mkpack.errors import UserError, combine
from mkpack.layout_cuda import cuda_refusals
from mkpack.manifest import LayoutName
from mkpack.recipe import Recipe, place
from mkpack.spec import Format, ModelSpec, PrecisionKey


def layout_name(target: str) -> LayoutName:
    """The layout of the weights that a target's kernel reads."""
    return "cuda" if target in CUDA_TARGETS else "cpu"


def runs_here(targets: tuple[str, ...]) -> list[str]:
    """Those of the CPU targets that this machine runs, best first."""
    return [level for level in platform.cpu_levels() if level in targets]


def for_one_rank(recipe: Recipe, recipe_path: Path, rank: int) -> Recipe:
    """The recipe for one rank's weights alone: its GPU targets, without quality, which a CPU measures. UserError when
    it is for one rank, or has no such rank or no GPU target."""
    tp, gpu = recipe.parallel.tp, tuple(t for t in recipe.targets if t in CUDA_TARGETS)
    problems = []
    if tp == 1:
        problems.append(f"{place(recipe_path, 'parallel.tp')}: 1, but a rank by itself is one of several")
    elif not 0 <= rank < tp:
        problems.append(f"--rank {rank}: expected 0 to {tp - 1}, the ranks that parallel.tp {tp} gives")
    if not gpu:
        has = ", ".join(recipe.targets)
        problems.append(
            f"{place(recipe_path, 'targets')}: a rank by itself is for GPUs; expected {' or '.join(CUDA_TARGETS)} "
            f"among them, found {has}"
        )
    if problems:
        raise combine("recipe refused", problems)
    return recipe.model_copy(update={"targets": gpu, "quality": None})


def checked_targets(
    recipe: Recipe,
    recipe_path: Path,
    spec: ModelSpec,
    precision: Mapping[PrecisionKey, Format],
    router_format: Format,
    building: bool,
) -> tuple[str, ...]:
    """The targets, "native" resolved. building: compilers of GPU targets must be here too.

    UserError naming everything in limits, targets and precisions that this model or this machine cannot have.
    """
    problems = []

    def refuse(key: str, text: str) -> None:
        problems.append(f"{place(recipe_path, key)}: {text}")

    if recipe.limits.context > spec.max_position_embeddings:
        refuse(
            "limits.context",
            f"{recipe.limits.context} positions, but the model has "
            f"max_position_embeddings {spec.max_position_embeddings}; set limits.context to at most that",
        )
    if (tp := recipe.parallel.tp) % (per := recipe.parallel.per_device):
        fits = ", ".join(str(n) for n in range(1, tp + 1) if tp % n == 0)
        refuse("parallel.per_device", f"{per} ranks a device do not share out {tp}; expected one of {fits}")
    if gpu := [t for t in recipe.targets if t in CUDA_TARGETS]:
        for text in cuda_refusals(spec, precision, recipe.parallel.tp, router_format):
            key, _, rest = text.partition(" ")
            if key.startswith(("quantise.", "parallel.")):
                refuse(key, f"{rest} (target {', '.join(gpu)})")
            else:
                refuse("targets", f"{', '.join(gpu)}: {text}")
    if why := _down_input_refusal(recipe, spec):
        refuse("quantise.down_input", why)
    for target in gpu if building else ():
        try:
            compiler_of(target)
        except UserError as e:
            refuse("targets", str(e))
    targets: tuple[str, ...] = ()
    try:
        targets = tuple(dict.fromkeys(platform.resolve_target(t) for t in recipe.targets))
    except UserError as e:
        refuse("targets", str(e))
    if recipe.quality and recipe.source.dummy:
        refuse("quality", "random weights (source.dummy) have none to measure; remove quality from the recipe")
    elif recipe.quality and targets and not runs_here(targets):
        refuse(
            "quality",
            f"none of the targets {', '.join(targets)} runs on this machine's CPU, where it is measured; remove "
            "quality from the recipe or add a target of this machine",
        )
    if problems:
        raise combine("recipe refused", problems)
    return targets


def _down_input_refusal(recipe: Recipe, spec: ModelSpec) -> str | None:
    """Why the experts' down input cannot be carried as the recipe says, on any target."""
    carried = recipe.quantise.down_input
    if carried and not any(layer.moe for layer in spec.layers):
        return f"{carried}, but no layer of this model has experts; remove the key"
    if carried == "nvfp4" and recipe.calibrate is None and recipe.source.dummy is None:
        return (
            "nvfp4 needs global scales, which come from the largest values that calibration sees there; add a section "
            '"calibrate: {data: default}" to the recipe, or choose bf16'
        )
    return None
