"""A Hugging Face safetensors folder: checked as a whole before any work, then read one tensor at a time.

Shard headers are parsed here rather than by the safetensors package: every fault of every file goes into one message,
and a tensor is read into a buffer of its own instead of a map that keeps whole shards resident.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mkpack import prequantised
from mkpack.errors import UserError, combine, nearest, some
from mkpack.quant_config import HF_QUANT_CONFIG, claims, disagreements, fp8_block
from mkpack.shard import LFS_POINTER, lfs_problem, load_json, read_header
from mkpack.shard import TensorInfo as TensorInfo
from mkpack.spec import SourcePart, TensorRole

if TYPE_CHECKING:
    import numpy as np
    import torch

    from mkpack.digest import Progress
    from mkpack.formats import Prequantised

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

_SUPPORTED = ", ".join(prequantised.PLAIN)

_AUX = re.compile(
    r"tokenizer\.json|tokenizer_config\.json|special_tokens_map\.json|generation_config\.json|chat_template\.jinja"
    r"|(?i:(licen[sc]e|notice)([._-].*)?)"
)
_LIST_LIMIT = 20
_CHUNK = 4 << 20
_DIGEST_THREADS = 4


def is_aux(name: str) -> bool:
    """Whether a file of this name, beside config and weights, belongs to a build: tokenizer, template, licence."""
    return _AUX.fullmatch(name) is not None


def index_shards(text: bytes) -> tuple[dict[str, str], list[str]]:
    """An index file's map of tensor name -> shard, and what is wrong with the file.

    A shard outside the folder (absolute, or with "..") is a problem, so that an index cannot make a build read or
    fetch anything else.
    """
    problems: list[str] = []
    try:
        index = load_json(text, problems)
    except ValueError as e:
        return {}, [f"not readable as JSON: {e}"]
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(v, str) for v in weight_map.values()):
        return {}, ['no "weight_map" from tensor names to file names']
    for shard in sorted(set(weight_map.values())):
        parts = shard.split("/")
        if not shard.endswith(".safetensors") or "" in parts or ".." in parts or "\\" in shard or "\0" in shard:
            problems.append(f'"{shard}" is not the name of a .safetensors file in this folder')
    return weight_map, problems


@dataclass(frozen=True)
class Checkpoint:
    """A checked safetensors folder. `tensors` is in file order; `stray` holds .safetensors files that nothing uses."""

    folder: Path
    config: dict[str, Any]
    generation_config: dict[str, Any]
    tensors: dict[str, TensorInfo]
    shards: tuple[str, ...]
    stray: tuple[str, ...]
    hf_quant_config: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def open(cls, folder: Path) -> Checkpoint:
        """Read config, index and every shard's header; all faults are in one UserError and no tensor is read."""
        if not folder.is_dir():
            raise UserError(f"checkpoint {folder}: no such folder")
        problems: list[str] = []
        config = {}
        if os.path.lexists(folder / "config.json"):
            config = _json_object(folder, "config.json", problems)
        else:
            problems.append("config.json is absent: this is not the folder of a checkpoint")
        generation_config = {}
        for name, path in _aux_files(folder).items():
            if name == "generation_config.json":
                generation_config = _json_object(folder, name, problems)
            elif _is_pointer(path):
                problems.append(lfs_problem(name))
        quantised = _json_object(folder, HF_QUANT_CONFIG, problems) if (folder / HF_QUANT_CONFIG).is_file() else {}
        tensors, shards = _weights(folder, problems)
        if problems:
            raise _refusal(f"checkpoint {folder}", problems)
        present = {f.name for f in folder.glob("*.safetensors")}
        stray = tuple(sorted(present - set(shards)))
        return cls(folder, config, generation_config, tensors, tuple(shards), stray, quantised)

    @cached_property
    def license_id(self) -> str | None:
        """Licence identifier in the front matter of README.md (its licence_name where the id is "other"), or None."""
        try:
            text = (self.folder / "README.md").read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            return None
        front = re.match(r"\ufeff?---\r?\n(.*?)\r?\n---\s*(\n|$)", text, re.DOTALL)
        if front is None:
            return None
        import yaml

        try:
            meta = yaml.safe_load(front[1])
        except yaml.YAMLError:
            return None
        found = meta.get("license") if isinstance(meta, dict) else None
        if found == "other":
            found = meta.get("license_name") or found
        if isinstance(found, list) and found and all(isinstance(x, str) for x in found):
            return " AND ".join(found)
        return found if isinstance(found, str) else None

    def check(self, roles: Iterable[TensorRole]) -> None:
        """Refuse, in one UserError, every tensor that `roles` need and that is absent or has another shape or dtype."""
        kinds = self.faults(roles)
        if any(kinds):
            raise _refusal(f"tensors of checkpoint {self.folder}", *kinds)

    def faults(self, roles: Iterable[TensorRole]) -> list[list[str]]:
        """What `check` refuses: tensors that are missing, of another shape, of another dtype, badly quantised."""
        missing: list[str] = []
        shapes: list[str] = []
        dtypes: list[str] = []
        formats: list[str] = []
        block = fp8_block(self.config)
        # Of the roles that share a fused tensor, one speaks for all.
        for role in {role.source: role for role in roles}.values():
            stored = prequantised.find(role.source, self.tensors)
            if stored is None:
                instead = prequantised.found_instead(role.source, self.tensors)
                missing.append(f'"{role.source}" is missing, expected shape {list(role.source_shape)}{instead}')
                continue
            if role.precision is not None:
                shape = _out_in(role)
                formats += prequantised.faults(role.source, stored, shape, self.tensors, block)
            if stored.scheme != "plain" and role.precision is not None:
                continue
            info = stored.weight
            if info.shape != role.source_shape:
                expected = f"expected shape {list(role.source_shape)} by config.json"
                shapes.append(f'"{info.name}" in {info.file}: {expected}, found {list(info.shape)}')
            if info.dtype not in prequantised.PLAIN:
                never = "" if role.precision else "; routers and vectors are never quantised"
                dtypes.append(f'"{info.name}" in {info.file}: expected dtype {_SUPPORTED}, found {info.dtype}{never}')
        return [missing, shapes, dtypes, formats]

    def notes(self, roles: Iterable[TensorRole]) -> list[str]:
        """What a build should tell of these tensors: metadata that contradicts them, scales that have no part in it,
        and routing biases that may have been rounded."""
        roles = list(roles)
        lines = disagreements(claims(self.config, self.hf_quant_config), roles, self.tensors)
        if scales := [name for name in self.tensors if name.endswith(prequantised.ACTIVATION_SCALES)]:
            lines.append(
                f"{len(scales)} scales of activations and of the KV cache are not used, since neither is quantised: "
                f"{some(scales)}"
            )
        biases = [r.source for r in roles if r.name.endswith(".choice_bias")]
        if narrow := [name for name in biases if name in self.tensors and self.tensors[name].dtype != "F32"]:
            lines.append(
                f"{len(narrow)} routing biases are {self.tensors[narrow[0]].dtype}: if they were float32 once, "
                f"rounding changed which experts are chosen; compare with the original: {some(narrow)}"
            )
        return lines

    def unused(self, roles: Iterable[TensorRole]) -> list[str]:
        """Names of the tensors that no role needs, sorted; scales of activations are in `notes`."""
        used: set[str] = set()
        for role in roles:
            if stored := prequantised.find(role.source, self.tensors):
                used.update(part.name for part in stored.parts())
        return sorted(n for n in self.tensors.keys() - used if not n.endswith(prequantised.ACTIVATION_SCALES))

    def read(self, name: str, part: SourcePart | None = None) -> torch.Tensor | Prequantised:
        """One tensor, or a part of it, in memory of its own: in the checkpoint's own dtype (float32, float16 or
        bfloat16) where it is not quantised, in float32 where its fp8 scales are of blocks."""
        return self._read(name, part, self.read_bytes)

    def read_together(self, roles: Iterable[TensorRole]) -> list[torch.Tensor | Prequantised]:
        """What `read` gives for each role, with bytes that several of them are parts of (gate and up of a fused expert)
        read once and, where they need no copy, in memory once."""
        kept: dict[tuple[str, int], np.ndarray] = {}

        def once(info: TensorInfo) -> np.ndarray:
            place = info.file, info.offset
            if place not in kept:
                kept[place] = self.read_bytes(info)
            return kept[place]

        # Only parts: what a whole matrix is made of need not stay until its neighbour is read.
        return [self._read(role.source, role.part, once if role.part else self.read_bytes) for role in roles]

    def _read(
        self, name: str, part: SourcePart | None, read: Callable[[TensorInfo], np.ndarray]
    ) -> torch.Tensor | Prequantised:
        import torch

        stored = prequantised.find(name, self.tensors)
        if stored is not None and stored.scheme != "plain":
            return prequantised.load(stored, read, fp8_block(self.config), part)
        # numpy has no bfloat16: its bits are viewed, which copies nothing.
        data = torch.from_numpy(self._numpy(name, part, read))
        return data.view(torch.bfloat16) if self.tensors[name].dtype == "BF16" else data

    def read_numpy(self, name: str, part: SourcePart | None = None) -> np.ndarray:
        """One tensor, or a part of it, without torch: F32 as float32, F16 as float16, BF16 as its bits in uint16."""
        return self._numpy(name, part, self.read_bytes)

    def _numpy(self, name: str, part: SourcePart | None, read: Callable[[TensorInfo], np.ndarray]) -> np.ndarray:
        import numpy as np

        info = self._readable(name)
        dtype = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}[info.dtype]
        if part is None:
            return read(info).view(dtype).reshape(info.shape)
        one = info.entry(part.index)  # only the expert's bytes are read
        return np.ascontiguousarray(part.of(read(one).view(dtype).reshape(one.shape)))

    def aux_files(self) -> dict[str, Path]:
        """Tokenizer, chat template, generation defaults and licence files that are there, by name."""
        return _aux_files(self.folder)

    def digests(self, progress: Progress | None = None, expected: dict[str, str] | None = None) -> dict[str, str]:
        """SHA-256 in hex of every file a build uses, by name, sorted.

        `progress(done, total)` gets bytes, from one thread at a time. `expected` holds digests that are known from
        elsewhere (`hub.SourceSnapshot.sha256`); files that differ are refused.
        """
        names = {"config.json", *self.shards, *self.aux_files()}
        names |= {name for name in (INDEX, HF_QUANT_CONFIG) if (self.folder / name).is_file()}
        lock, done = threading.Lock(), 0
        total = sum((self.folder / name).stat().st_size for name in names)

        def digest(name: str) -> str:
            nonlocal done
            state, buffer = sha256(), bytearray(_CHUNK)
            with open(self.folder / name, "rb", buffering=0) as f:
                while n := f.readinto(buffer):
                    state.update(memoryview(buffer)[:n])
                    if progress is not None:
                        with lock:
                            done += n
                            progress(done, total)
            return state.hexdigest()

        ordered = sorted(names)
        with ThreadPoolExecutor(_DIGEST_THREADS) as pool:
            result = dict(zip(ordered, pool.map(digest, ordered), strict=True))
        wrong = [
            f"{name}: expected sha256 {expected[name]}, found {found}; delete the file and fetch it again"
            for name, found in result.items()
            if expected and expected.get(name, found) != found
        ]
        if wrong:
            raise _refusal(f"checkpoint {self.folder} is damaged", wrong)
        return result

    def _readable(self, name: str) -> TensorInfo:
        info = self.tensors.get(name)
        if info is None:
            raise UserError(f'checkpoint {self.folder}: no tensor "{name}"{nearest(name, self.tensors)}')
        if info.dtype not in prequantised.PLAIN:
            raise UserError(f'checkpoint {self.folder}: "{name}" is {info.dtype}, expected one of {_SUPPORTED}')
        return info

    def read_bytes(self, info: TensorInfo) -> np.ndarray:
        """The bytes of a tensor or of an entry of one, uint8 [nbytes]."""
        import numpy as np

        # A plain read into fresh memory: with a map, pages of a shard would stay in this process's RSS.
        buffer = np.empty(info.nbytes, np.uint8)
        view, done = buffer.data, 0
        with open(self.folder / info.file, "rb", buffering=0) as f:
            f.seek(info.offset)
            while done < info.nbytes:
                n = f.readinto(view[done:])
                if not n:
                    raise UserError(
                        f'{self.folder / info.file} changed while it was read: "{info.name}" should be {info.nbytes} '
                        f"bytes at {info.offset}, found {done}"
                    )
                done += n
        return buffer


def _out_in(role: TensorRole) -> tuple[int, ...]:
    """The shape of a role's whole tensor when quantised: [.., out, in] also where the plain one is turned."""
    shape = role.source_shape
    return (*shape[:-2], shape[-1], shape[-2]) if role.part and role.part.transposed else shape


def _weights(folder: Path, problems: list[str]) -> tuple[dict[str, TensorInfo], list[str]]:
    """Tensors and shards of the folder; the index, where there is one, decides which files count."""
    if not os.path.lexists(folder / INDEX):
        if not os.path.lexists(folder / SINGLE):
            problems.append(_no_weights(folder))
            return {}, []
        return {t.name: t for t in read_header(folder, SINGLE, problems)}, [SINGLE]

    text = _read(folder, INDEX, problems)
    if text is None:
        return {}, []
    weight_map, faults = index_shards(text)
    problems += [f"{INDEX}: {fault}" for fault in faults]
    if faults:
        return {}, []

    named: dict[str, list[str]] = {}
    for tensor, shard in weight_map.items():
        named.setdefault(shard, []).append(tensor)
    tensors: dict[str, TensorInfo] = {}
    for shard in sorted(named):
        if not (folder / shard).is_file():
            problems.append(f"{shard} is absent; {INDEX} places {some(sorted(named[shard]))} in it")
            continue
        before = len(problems)
        found = {t.name: t for t in read_header(folder, shard, problems)}
        if len(problems) > before and not found:
            continue  # an unreadable header says nothing about single tensors
        for name in sorted(set(named[shard]) - found.keys()):
            problems.append(f'"{name}" is not in {shard}, where {INDEX} places it')
        for name, info in found.items():
            if name in tensors:
                problems.append(f'"{name}" is in both {tensors[name].file} and {shard}')
            elif name not in weight_map:
                problems.append(f'"{name}" in {shard} is not in {INDEX}')
            tensors.setdefault(name, info)
    return tensors, sorted(named)


def _no_weights(folder: Path) -> str:
    names = sorted(f.name for f in folder.iterdir() if f.is_file())
    expected = f"expected {SINGLE} or {INDEX}"
    if shards := [n for n in names if n.endswith(".safetensors")]:
        return f"{expected}, found only {some(shards)}: the index is absent, copy it from the source of the checkpoint"
    if other := [n for n in names if n.endswith((".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack"))]:
        convert = "convert to safetensors first, for example with save_pretrained() of transformers"
        return f"{expected}, found only {some(other)}: {convert}"
    return f"no weights: {expected}"


def _json_object(folder: Path, name: str, problems: list[str]) -> dict[str, Any]:
    text = _read(folder, name, problems)
    if text is None:
        return {}
    try:
        found = load_json(text, [])
    except ValueError as e:
        problems.append(f"{name} is not readable as JSON: {e}")
        return {}
    if not isinstance(found, dict):
        problems.append(f"{name} is not a JSON object")
        return {}
    return found


def _read(folder: Path, name: str, problems: list[str]) -> bytes | None:
    """A whole small file, or None with a problem added."""
    try:
        text = (folder / name).read_bytes()
    except OSError as e:
        problems.append(f"{name} cannot be read: {e.strerror}")
        return None
    if text.startswith(LFS_POINTER):
        problems.append(lfs_problem(name))
        return None
    return text


def _aux_files(folder: Path) -> dict[str, Path]:
    return {f.name: f for f in sorted(folder.iterdir()) if is_aux(f.name) and f.is_file()}


def _is_pointer(path: Path) -> bool:
    with open(path, "rb") as f:
        return f.read(len(LFS_POINTER)) == LFS_POINTER


def _refusal(title: str, *kinds: list[str]) -> UserError:
    """combine() of every kind of problem, with each kind cut after 20 lines."""
    total = sum(map(len, kinds))
    if all(len(kind) <= _LIST_LIMIT for kind in kinds):
        return combine(title, [problem for kind in kinds for problem in kind])
    lines = [f"{title}: {total} problems"]
    for kind in kinds:
        lines += [f"  - {problem}" for problem in kind[:_LIST_LIMIT]]
        if len(kind) > _LIST_LIMIT:
            lines.append(f"  - ... and {len(kind) - _LIST_LIMIT} more like these")
    return UserError("\n".join(lines))
