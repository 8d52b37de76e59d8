"""The tokenizer of a source, and the token ids that a build runs: to measure the quality, and to calibrate."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mkpack import quality
from mkpack.errors import UserError
from mkpack.recipe import Recipe, place
from mkpack.spec import ModelSpec
from mkpack.text import Text

LEGAL = ("LICEN", "NOTICE")  # how names of licence files begin


def tokenizer(files: dict[str, Path]) -> Text | None:
    """The tokenizer, None when the source has none. UserError, naming the file, when the runtime could not read it."""
    if "tokenizer.json" not in files:
        return None
    text = Text({name: path.read_bytes() for name, path in tokenizer_files(files).items()})
    try:
        _ = text.tokenizer, text.stop_tokens
    except UserError as e:
        problem = str(e).removesuffix("; build the artifact again")  # the advice to who has but the artifact
        folder = files["tokenizer.json"].parent
        raise UserError(f"checkpoint {folder}: {problem}; copy the file again from the source of the checkpoint") from e
    return text


def quality_tokens(recipe: Recipe, recipe_path: Path, text: Text | None, spec: ModelSpec) -> tuple[int, ...] | None:
    if recipe.quality is None:
        return None
    if text is None:
        where = place(recipe_path, "quality")
        raise UserError(
            f"recipe refused: {where}: measuring needs a tokenizer, and the source has no tokenizer.json; remove "
            "quality from the recipe or add the file"
        )
    try:
        passage = quality.read_text(recipe.quality.text)
        tokens = quality.tokens_of(passage, text, recipe.quality.tokens, recipe.limits.context)
    except UserError as e:
        raise UserError(f"recipe refused: {place(recipe_path, 'quality.text')}: {e}") from e
    _check_tokens(tokens, spec, place(recipe_path, "quality"))
    return tuple(tokens)


def calibration_tokens(
    recipe: Recipe, recipe_path: Path, text: Text | None, spec: ModelSpec
) -> tuple[tuple[int, ...], ...] | None:
    if recipe.calibrate is None:
        return None
    if text is None:
        where = place(recipe_path, "calibrate")
        raise UserError(
            f"recipe refused: {where}: calibrating needs a tokenizer, and the source has no tokenizer.json; remove "
            "calibrate from the recipe or add the file"
        )
    from mkpack.calibrate import sequences_of

    try:
        found = sequences_of(recipe.calibrate.data, text, recipe.calibrate.tokens, recipe.limits.context)
    except UserError as e:
        raise UserError(f"recipe refused: {place(recipe_path, 'calibrate.data')}: {e}") from e
    _check_tokens([token for sequence in found for token in sequence], spec, place(recipe_path, "calibrate"))
    return tuple(map(tuple, found))


def _check_tokens(tokens: Sequence[int], spec: ModelSpec, where: str) -> None:
    if max(tokens) >= spec.vocab_size:
        raise UserError(
            f"recipe refused: {where}: the tokenizer gives the token {max(tokens)}, but vocab_size in config.json is "
            f"{spec.vocab_size}; tokenizer.json belongs to another model"
        )


def tokenizer_files(files: dict[str, Path]) -> dict[str, Path]:
    return {n: p for n, p in files.items() if not n.upper().startswith(LEGAL)}
