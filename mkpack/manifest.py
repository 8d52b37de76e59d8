"""The manifest of an artifact: what it holds, who made it, the digest of every byte. docs/ARTIFACT.md explains it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Annotated, Any, Final, Literal, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, JsonValue, ValidationError, model_validator

from mkpack import __version__
from mkpack.errors import UserError, combine
from mkpack.spec import Carry, Format, ModelSpec, PrecisionKey

FORMAT_VERSION: Final = 2
MANIFEST_NAME = "manifest.json"
SIGNATURE_NAME = "model.sig"  # beside the entries of a folder; it cannot be one, since it signs the list of them
LayoutName = Literal["cpu", "cuda"]  # how weights lie in their blobs; every kernel reads one of them
CHUNK = 32 << 20  # bytes of an entry covered by one chunk digest
WEIGHTS_ALIGNMENT = 4096
MAX_NAME = 200
MAX_PROBLEMS = 20  # a hostile manifest may hold millions; nobody reads more than these

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+-]*(/[A-Za-z0-9_][A-Za-z0-9._+-]*)*")


def name_problem(name: str) -> str | None:
    """Why `name` may not be an entry, or None. Relative ASCII paths without hidden or parent parts are left."""
    if len(name) > MAX_NAME:
        return f"name of {len(name)} characters (at most {MAX_NAME}): {ascii(name[:60])}..."
    if not _NAME.fullmatch(name):
        return f"name {ascii(name)} is not a plain relative path: letters, digits, _ . + - and no leading dot"
    return None


def _entry_name(name: str) -> str:
    if problem := name_problem(name):
        raise ValueError(problem)
    return name


EntryName = Annotated[str, AfterValidator(_entry_name)]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Commit = Annotated[str, Field(pattern=r"^[0-9a-f]{40}$")]
Version = Annotated[str, Field(pattern=r"^[0-9]{1,9}(\.[0-9]{1,9}){0,3}$")]
Count = Annotated[int, Field(ge=0, lt=1 << 63)]
Positive = Annotated[int, Field(ge=1, lt=1 << 63)]


def capped(problems: list[str]) -> list[str]:
    """The first MAX_PROBLEMS and how many more there are."""
    left = len(problems) - MAX_PROBLEMS
    return problems[:MAX_PROBLEMS] + ([f"and {left} more"] if left > 0 else [])


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Entry(_Frozen):
    """One file of the artifact. `chunks` are digests of each CHUNK bytes when the file is larger, else empty."""

    size: Count
    sha256: Sha256
    chunks: list[Sha256] = []

    @model_validator(mode="after")
    def _one_digest_a_chunk(self) -> Entry:
        expected = -(-self.size // CHUNK) if self.size > CHUNK else 0
        if len(self.chunks) != expected:
            raise ValueError(f"{self.size} bytes need {expected} chunk digests, found {len(self.chunks)}")
        return self


class Producer(_Frozen):
    """What built the artifact. `commit` and `dirty` are null when mkpack ran outside a git checkout; `sources` is one
    digest over csrc/ and mkpack's Python, whether git knows them or not."""

    mkpack: str
    commit: Commit | None
    dirty: bool | None
    python: str
    torch: str | None
    modelopt: str | None
    compilers: dict[str, str]  # tool -> version, for instance {"g++": "12.2.0"}
    libraries: dict[str, str] = {}  # package, or system library, that has a part in the bytes -> version
    sources: Sha256 | None = None


class Source(_Frozen):
    """Where the weights came from. A folder has no name here: absolute paths of a machine stay out of artifacts.

    A dummy source is random weights of `seed`; its only file is the config.json whose shape they have.
    """

    kind: Literal["hub", "folder", "dummy"]
    repo: str | None
    commit: Commit | None
    files: dict[str, Sha256]
    seed: Count | None = None

    @model_validator(mode="after")
    def _named_when_from_the_hub(self) -> Source:
        if (self.kind == "hub") != (self.repo is not None) or (self.kind == "hub") != (self.commit is not None):
            raise ValueError("a hub source has repo and commit, any other has neither")
        if (self.kind == "dummy") != (self.seed is not None):
            raise ValueError("a dummy source has a seed, no other has one")
        return self


class Limits(_Frozen):
    """Compiled-in limits: positions of the KV cache, and tokens a step."""

    context: Positive
    tokens_per_step: Annotated[int, Field(ge=1, le=16)]


class KernelEntry(_Frozen):
    """One compiled model. `description` is the exact text that mk_describe() of the .so returns; `layout` names the
    blobs it reads."""

    path: EntryName
    layout: LayoutName
    description: str
    compiler: str
    requires: dict[str, JsonValue]

    @model_validator(mode="after")
    def _description_is_json(self) -> KernelEntry:
        try:
            json.loads(self.description)
        except (ValueError, RecursionError) as e:
            raise ValueError("description is not JSON text") from e
        return self

    @property
    def traced(self) -> bool:
        """Whether it was built with --trace."""
        facts = json.loads(self.description)
        return isinstance(facts, dict) and facts.get("trace") is True


class WeightsEntry(_Frozen):
    """The packed blob of one rank in one layout."""

    layout: LayoutName
    rank: Count
    path: EntryName
    nbytes: Positive


class Section(_Frozen):
    """One 4096-aligned piece of every rank's blob in a layout: `tensors` stored as [rows, cols] in `format`, at byte
    `offset`."""

    name: str
    format: Format
    rows: Count
    cols: Count
    offset: Count
    nbytes: Count
    tensors: tuple[str, ...]


class Manifest(_Frozen):
    """manifest.json. `entries` covers every other file of the artifact."""

    format_version: Literal[2]
    minimum_runtime: Version
    name: str
    license: str
    producer: Producer
    source: Source
    recipe: str
    build_key: Sha256
    spec: ModelSpec
    precision: dict[PrecisionKey, Format]
    limits: Limits
    tp: Positive
    kernels: dict[str, KernelEntry]
    weights: list[WeightsEntry]
    sections: dict[LayoutName, list[Section]]
    tokenizer_files: list[EntryName]
    quality: dict[str, JsonValue] | None
    entries: dict[EntryName, Entry]

    @model_validator(mode="after")
    def _consistent(self) -> Manifest:
        if problems := list(self._contradictions()):
            raise ValueError("\n".join(problems))
        return self

    def _contradictions(self) -> Iterator[str]:
        if MANIFEST_NAME in self.entries:
            yield f"entries lists {MANIFEST_NAME}, which cannot hold its own digest"
        if SIGNATURE_NAME in self.entries:
            yield f"entries lists {SIGNATURE_NAME}, the name of a signature over them"
        if not self.weights:
            yield "weights: none"
        carried = self.precision.get("down_input", "bf16")
        if carried not in get_args(Carry):
            yield f"precision.down_input: expected {' or '.join(get_args(Carry))}, found {carried}"
        for layout in get_args(LayoutName):
            yield from self._layout_contradictions(layout)
        for w in self.weights:
            if w.path in self.entries and self.entries[w.path].size != w.nbytes:
                yield f"weights of rank {w.rank}: {w.nbytes} bytes here, {self.entries[w.path].size} in entries"
            if not w.path.startswith("weights/"):
                yield f"weights of rank {w.rank}: {w.path} is outside weights/ and so not aligned"
        named = [k.path for k in self.kernels.values()] + [w.path for w in self.weights] + self.tokenizer_files
        for path in named:
            if path not in self.entries:
                yield f"{path} is named but not in entries"

    def _layout_contradictions(self, layout: LayoutName) -> Iterator[str]:
        found = self.weights_in(layout)
        users = [shown(target) for target, kernel in self.kernels.items() if kernel.layout == layout]
        if not found and not users and layout not in self.sections:
            return
        ranks = [w.rank for w in found]
        alone = layout == "cuda" and self.one_rank is not None and ranks[0] < self.tp
        if not alone and (len(ranks) != self.tp or ranks != list(range(len(ranks)))):
            needed = f" ({', '.join(users)} read them)" if users else ""
            or_one = ", or one of them" if layout == "cuda" and self.tp > 1 else ""
            yield f"{layout} weights: expected ranks 0 to {self.tp - 1} in order{or_one}{needed}, found {shown(ranks)}"
        if len({w.nbytes for w in found}) > 1:  # a kernel is told one size, and reads that much of every blob
            yield f"{layout} weights: every rank has as many bytes, found {shown([w.nbytes for w in found])}"
        if layout not in self.sections:
            yield f"sections: none of the layout {layout}"
        blob, end = min((w.nbytes for w in found), default=0), 0
        for s in self.sections.get(layout, []):
            if s.offset % WEIGHTS_ALIGNMENT or s.offset < end or s.offset + s.nbytes > blob:
                yield (
                    f"{layout} section {shown(s.name)}: bytes {s.offset} to {s.offset + s.nbytes} are not "
                    f"{WEIGHTS_ALIGNMENT}-aligned, after the section before (ends at {end}) and within the blob "
                    f"({blob} bytes)"
                )
            end = s.offset + s.nbytes

    @property
    def one_rank(self) -> int | None:
        """The rank whose GPU weights alone the artifact holds (`mkpack build --rank`); None when it holds them all."""
        found = self.weights_in("cuda")
        return found[0].rank if self.tp > 1 and len(found) == 1 else None

    @property
    def holds(self) -> str:
        """What to say where other ranks than `one_rank` would be needed."""
        return f"this artifact holds rank {self.one_rank} of {self.tp} alone, for mkpack bench --rank-of {self.tp}"

    def weights_in(self, layout: LayoutName) -> list[WeightsEntry]:
        """The blobs of one layout, rank 0 first; empty when the artifact has no kernel that reads it."""
        return [w for w in self.weights if w.layout == layout]

    def to_bytes(self) -> bytes:
        """The one JSON text of this manifest: sorted keys, so equal manifests give equal bytes."""
        return to_text(self.model_dump())

    @classmethod
    def parse(cls, data: bytes, where: str) -> Manifest:
        """Reads and checks manifest.json; `where` names it in errors. UserError: every problem, in one message.

        Versions are looked at before the fields: another format has other fields.
        """
        try:
            raw = json.loads(data.decode("utf-8"), object_pairs_hook=_no_duplicates)
        except (ValueError, RecursionError) as e:
            raise UserError(f"{where}: not JSON: {shown(str(e))}") from e
        if not isinstance(raw, dict):
            raise UserError(f"{where}: expected a JSON object, found {type(raw).__name__}")
        if other := list(_other_version(raw)):
            raise combine(where, other)
        try:
            return cls.model_validate_json(data, strict=True)
        except (ValidationError, RecursionError) as e:
            problems = _problems(e) if isinstance(e, ValidationError) else ["nested too deeply"]
            raise combine(f"{where} is not a valid manifest (rebuild the artifact)", problems) from e


def to_text(manifest: dict[str, Any]) -> bytes:
    """manifest.json of these fields."""
    return (json.dumps(manifest, sort_keys=True, indent=1, allow_nan=False) + "\n").encode()


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    # Two readers may choose different values of a repeated key, so that none is the checked one.
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("an object holds the same key twice")
    return found


def _other_version(raw: dict[str, Any]) -> Iterator[str]:
    found = raw.get("format_version")
    if type(found) is int and 0 < found < FORMAT_VERSION:
        yield (
            f"older format: found format {found}, mkpack {__version__} reads format {FORMAT_VERSION}; build the "
            "artifact again"
        )
    if isinstance(found, int) and found > FORMAT_VERSION:
        yield (
            f"newer format: found format {shown(found)}, mkpack {__version__} supports up to {FORMAT_VERSION}; "
            "upgrade mkpack (pip install --upgrade mkpack)"
        )
    minimum = raw.get("minimum_runtime")
    if isinstance(minimum, str) and _release(minimum) > _release(__version__):
        yield (
            f"needs a newer runtime: found minimum_runtime {shown(minimum)}, this is mkpack {__version__}; "
            "upgrade mkpack (pip install --upgrade mkpack)"
        )


def _release(version: str) -> tuple[int, ...]:
    """Numbers at the start of a version; trailing zeros do not count, so that 1.2 equals 1.2.0."""
    start = re.match(r"[0-9]{1,9}(\.[0-9]{1,9}){0,3}", version)
    numbers = [int(n) for n in start[0].split(".")] if start else []
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


def _problems(error: ValidationError) -> list[str]:
    found: list[str] = []
    for e in error.errors(include_url=False, include_context=False):
        field = ".".join(str(part) for part in e["loc"]) or "manifest"
        field = shown(field) if len(field) > 80 or not field.isascii() else field
        if e["type"] == "extra_forbidden":
            found.append(f"{field}: unknown field")
        elif e["type"] == "missing":
            found.append(f"{field}: missing field")
        elif e["type"] == "value_error":
            found.extend(f"{field}: {line}" for line in e["msg"].removeprefix("Value error, ").split("\n"))
        else:
            found.append(f"{field}: {e['msg']}, found {shown(e['input'])}")
    return capped(found)


def shown(value: object) -> str:
    """A value of a hostile file as one short line of ASCII."""
    try:
        text = value if isinstance(value, str) and value.isascii() and value.isprintable() else ascii(value)
    except (ValueError, RecursionError):  # an integer too long to print
        text = type(value).__name__
    return text if len(text) <= 80 else text[:77] + "..."
