"""The recipe: a YAML file that says what to build, read strictly.

Every key is checked: an unknown key, a wrong type or a wrong choice is refused with the file, the line, the key,
what was expected and what was found; all problems of a file come in one message.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from mkpack.errors import combine, nearest
from mkpack.recipe_yaml import Document, read_document
from mkpack.spec import Algorithm, Carry, Format, Precision, PrecisionKey

Choice = Literal["bf16", "fp8", "nvfp4"]
Target = Literal["x86-64-v3", "x86-64-v4", "sm_90a", "sm_100a", "native"]

NEVER_QUANTISED = ("router", "routers", "gate", "norm", "norms", "bias", "biases")


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


def _absolute(value: Any, info: ValidationInfo) -> Any:
    """Text -> absolute path, relative to the recipe's folder; anything else is left for the type check to refuse."""
    if not isinstance(value, str) or not value.strip() or not value.isprintable():
        return value
    base = (info.context or {}).get("base", Path.cwd())
    return Path(os.path.abspath(base / os.path.expanduser(value)))


def _data(value: Any, info: ValidationInfo) -> Any:
    """None for the text "default", else as _absolute."""
    return None if value == "default" else _absolute(value, info) if value is not None else _given(value)


def _given(value: Any) -> Any:
    """A key that may be left out may still not be left empty."""
    if value is None:
        raise PydanticCustomError("empty", "empty")
    return value


FilePath = Annotated[Path, BeforeValidator(_absolute)]
NotEmpty = BeforeValidator(_given)
# The descriptions below are the "expected ..." of the error messages.


class Source(_Strict):
    """Where the weights come from: a repo of the hub at a revision, a local folder, or none: random weights of `seed`
    in the shape that the config.json at `dummy` describes. Paths are absolute here."""

    repo: Annotated[str | None, NotEmpty] = Field(
        default=None,
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*$",
        description="a hub repository, org/name",
    )
    revision: str = Field(default="main", pattern=r"^\S+$", description="a branch, a tag or a commit")
    folder: Annotated[FilePath | None, NotEmpty] = Field(default=None, description="the path of a checkpoint folder")
    dummy: Annotated[FilePath | None, NotEmpty] = Field(default=None, description="the path of a config.json")
    seed: int = Field(default=0, ge=0, lt=2**63, description="a whole number from 0 to 2^63 - 1")


class Quantise(_Strict):
    """Storage format by kind of matrix. `dense` is the MLP of layers without experts, and the
    projections into and out of experts of another width than the model's. `algorithm` chooses NVFP4 block scales:
    `max`, so that the largest value of a block is kept, or `mse`, the least squared error among those and their
    neighbours. `down_input` is how what goes into the experts' down projection is carried; None: as each target's
    product takes it."""

    experts: Choice = Field(default="nvfp4", description="one of nvfp4, fp8, bf16")
    dense: Choice = Field(default="bf16", description="one of bf16, fp8, nvfp4")
    attention: Choice = Field(default="bf16", description="one of bf16, fp8, nvfp4")
    lm_head: Choice = Field(default="bf16", description="one of bf16, fp8, nvfp4")
    embeddings: Choice = Field(default="bf16", description="one of bf16, fp8, nvfp4")
    algorithm: Algorithm = Field(default="max", description="one of max, mse")
    down_input: Annotated[Carry | None, NotEmpty] = Field(default=None, description="one of bf16, nvfp4")


class Parallel(_Strict):
    """tp ranks, each with its own blob; `split` is the axis along which matrices are cut: n, the output rows. On GPUs
    as many as `per_device` ranks may share a device."""

    tp: int = Field(default=1, ge=1, le=8, description="a whole number from 1 to 8")
    per_device: int = Field(default=1, ge=1, le=8, description="a whole number from 1 to 8")
    split: Literal["n"] = Field(default="n", description="n, the only split of this version")


class Limits(_Strict):
    """What the compiled model reserves: KV cache positions, and tokens that one step may run."""

    context: int = Field(default=4096, ge=16, description="a whole number of at least 16")
    tokens_per_step: int = Field(default=16, ge=1, le=16, description="a whole number from 1 to 16")


class Calibrate(_Strict):
    """Activation maxima are recorded on the first `tokens` tokens of `data`: the path of a text file, a JSONL file or a
    folder of such, or None for "default", a text that mkpack brings along. Experts that see fewer than `min_tokens` of
    them are listed, and take the maxima of their layer."""

    data: Annotated[Path | None, BeforeValidator(_data)] = Field(
        default=None, description="default, or the path of a text file, a JSONL file or a folder of them"
    )
    tokens: int = Field(default=2048, ge=1, description="a whole number of at least 1")
    min_tokens: int = Field(default=8, ge=1, description="a whole number of at least 1")


class Quality(_Strict):
    """Perplexity and KL divergence against bf16 are measured on the first `tokens` tokens of `text` (default: ours)."""

    text: Annotated[FilePath | None, NotEmpty] = Field(default=None, description="the path of a text file")
    tokens: int = Field(default=512, ge=2, description="a whole number of at least 2")


class Recipe(_Strict):
    """A whole recipe, checked. Build one from a file with `load_recipe`."""

    name: str = Field(
        pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]*$",
        max_length=128,
        description="a file name of letters, digits, '.', '_' and '-' that starts with neither '.' nor '-'",
    )
    source: Source = Field(description="a section with either repo (and revision), folder, or dummy (and seed)")
    license: Annotated[str | None, NotEmpty] = Field(
        default=None, pattern=r"^\S.*$", description="a licence id as text, such as apache-2.0"
    )
    quantise: Quantise = Field(default=Quantise(), description="a section")
    parallel: Parallel = Field(default=Parallel(), description="a section")
    targets: tuple[Target, ...] = Field(
        default=("native",), min_length=1, description=f"a list of one or more of {', '.join(get_args(Target))}"
    )
    limits: Limits = Field(default=Limits(), description="a section")
    calibrate: Annotated[Calibrate | None, NotEmpty] = Field(default=None, description="a section")
    quality: Annotated[Quality | None, NotEmpty] = Field(default=None, description="a section")

    @field_validator("targets")
    @classmethod
    def _no_duplicates(cls, targets: tuple[Target, ...]) -> tuple[Target, ...]:
        twice = sorted({t for t in targets if targets.count(t) > 1})
        if twice:
            raise ValueError(f"expected every target once, found {', '.join(twice)} more than once")
        return targets

    @property
    def precision(self) -> dict[PrecisionKey, Format]:
        """Storage format by `TensorRole.precision`, and that of down_input where the recipe says it."""
        found: dict[PrecisionKey, Format] = {p: getattr(self.quantise, p) for p in get_args(Precision)}
        if self.quantise.down_input:
            found["down_input"] = self.quantise.down_input
        return found

    def canonical_text(self) -> str:
        """One line of JSON that is equal for equal recipes, whatever the order of keys and the defaults left out.

        Paths are left out, so that builds in different folders agree: whoever makes a build key from this adds the
        digests of the files that the paths lead to.
        """
        data = self.model_dump(
            mode="json", exclude={"source": {"folder", "dummy", "seed"}, "calibrate": {"data"}, "quality": {"text"}}
        )
        if self.source.folder is not None:
            data["source"] = "folder"
        elif self.source.dummy is not None:
            data["source"] = {"dummy": self.source.seed}
        return json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=True)


def load_recipe(path: Path) -> Recipe:
    """Reads a recipe file. Raises UserError with every problem of the file: file, line, key, expected, found."""
    document = read_document(path)
    problems = list(document.problems)
    recipe = None
    try:
        recipe = Recipe.model_validate(document.data, context={"base": Path(path).absolute().parent})
    except ValidationError as error:
        errors = error.errors(include_url=False)
        # A skipped node (bad scalar, alias) is already reported, as are the second error of one key, and a list for
        # its items: pydantic counts the good ones alone, and then finds too few.
        seen = {tuple(e["loc"][:i]) for e in errors for i in range(1, len(e["loc"]))}
        for e in errors:
            where = tuple(e["loc"])
            if where not in seen and where not in document.skipped:
                seen.add(where)
                problems.append(_explain(e, where, document))
    problems += _source_problems(document)
    if problems or recipe is None:
        raise combine("recipe refused", (f"{path}:{line}: {text}" for line, text in sorted(problems)))
    return recipe


def place(path: Path, key: str) -> str:
    """FILE:LINE: KEY of a key such as "limits.context", for an error about its value that only shows later. The line
    is that of the nearest section when the key is left out."""
    return f"{path}:{read_document(path).line(tuple(key.split('.')))}: {key}"


def _source_problems(document: Document) -> list[tuple[int, str]]:
    """One kind of source, with its own keys. Checked here, since pydantic skips model checks once a field failed."""
    source = document.data.get("source")
    if not isinstance(source, dict):
        return []
    line = document.line(("source",))
    given = [k for k in ("repo", "revision", "folder", "dummy", "seed") if k in source]
    if not {"repo", "folder", "dummy"} & set(given):
        known = nearest(next(iter(source), ""), ("repo", "folder", "dummy"))
        expected = "either repo: org/name, folder: path or dummy: config.json"
        return [(line, f"source: missing key: expected {expected}, found none of them{known}")]
    if not any(set(given) <= kind for kind in ({"repo", "revision"}, {"folder"}, {"dummy", "seed"})):
        found = " and ".join([", ".join(given[:-1]), given[-1]])
        expected = "either repo (and revision), folder, or dummy (and seed)"
        return [(line, f"source: expected {expected}, found {found}; remove what does not belong together")]
    return []


def _explain(error: Any, where: tuple[str | int, ...], document: Document) -> tuple[int, str]:
    """(line, text) of one pydantic error."""
    kind, key = error["type"], ".".join(str(k) for k in where)
    parent = where[:-1]
    if kind == "missing":
        return document.line(parent), f"{key}: missing key: expected {_expected(where)}"
    line = document.line(where)
    if kind == "extra_forbidden":
        last, known = str(where[-1]), sorted(_model(parent).model_fields)
        if parent == ("quantise",) and (last.lower() in NEVER_QUANTISED):
            return line, f"{key}: routers, norms and biases are never quantised: remove this key"
        return line, f"{key}: unknown key{nearest(last, known)}; known keys here: {', '.join(known)}"
    if kind == "value_error":
        return line, f"{key}: {error['ctx']['error']}"
    found = error["input"]
    near = nearest(found, _choices(where)) if isinstance(found, str) else ""
    quotes = ""
    if kind == "string_type" and not isinstance(found, dict | tuple | None):
        quotes = "; write it in quotes"
    return line, f"{key}: expected {_expected(where)}, found {_show(found)}{near}{quotes}"


def _model(where: tuple[str | int, ...]) -> type[BaseModel]:
    """The model of the section at `where`; () is the recipe itself."""
    sections: dict[str, type[BaseModel]] = {
        "source": Source,
        "quantise": Quantise,
        "parallel": Parallel,
        "limits": Limits,
        "calibrate": Calibrate,
        "quality": Quality,
    }
    return sections[str(where[0])] if where else Recipe


def _expected(where: tuple[str | int, ...]) -> str:
    if where and where[0] == "targets" and len(where) > 1:
        return f"one of {', '.join(get_args(Target))}"
    if not where:
        return "a mapping of keys to values"
    text = _model(where[:-1]).model_fields[str(where[-1])].description or ""
    if text == "a section":
        text = f"a section with some of the keys {', '.join(_model(where).model_fields)}"
    return text


def _choices(where: tuple[str | int, ...]) -> tuple[str, ...]:
    if where and where[0] == "targets":
        return get_args(Target)
    if where[:2] == ("quantise", "algorithm"):
        return get_args(Algorithm)
    if where[:2] == ("quantise", "down_input"):
        return get_args(Carry)
    return get_args(Choice) if where[:1] == ("quantise",) else ()


def _show(value: Any) -> str:
    """A value as the reader wrote it, with its kind when that is the point."""
    if value is None:
        return "nothing"
    if isinstance(value, dict):
        return "a section"
    if isinstance(value, tuple):
        return f"a list of {len(value)}" if value else "an empty list"
    if isinstance(value, bool):
        return f"the truth value {str(value).lower()}"
    if isinstance(value, int | float):
        return f"the number {value}"
    text = str(value)
    return f'"{text[:60]}…"' if len(text) > 60 else f'"{text}"'
