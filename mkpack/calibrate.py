"""Calibration: the largest value that goes into every projection, recorded on a text, a layer at a time.

A layer's matrices are read, run on all tokens, and dropped, one after the other (experts: one a CPU), so that memory is
that of the largest of them and of the tokens' activations. What is recorded are the global scales of activations
carried as NVFP4: maximum / 2688, one for each projection and layer, as modelopt's `input_scale`, and one for each
expert of what goes into its down projection, which is what kernels can carry so (`quantise.down_input`).
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mkpack.errors import UserError, nearest, some, unreadable
from mkpack.formats import E2M1_MAX
from mkpack.forward import Forward, Load
from mkpack.quantize import MIN_SCALE2, NVFP4_MAX
from mkpack.spec import ModelSpec
from mkpack.text import Text

if TYPE_CHECKING:
    import torch

SEQUENCE = 512  # tokens of a text that are run together; attention takes the square of it for every thread
SUFFIXES = (".txt", ".jsonl")


@dataclass
class Calibration:
    """What was seen. amax: by projection (see forward.See). seen: tokens by "layers.3.experts.7", of experts that saw
    any."""

    tokens: int
    amax: dict[str, float] = field(default_factory=dict)
    seen: dict[str, int] = field(default_factory=dict)

    def to_json(self) -> str:
        return json.dumps([self.tokens, self.amax, self.seen])

    @classmethod
    def from_json(cls, text: str) -> Calibration:
        return cls(*json.loads(text))

    def few(self, spec: ModelSpec, min_tokens: int) -> list[str]:
        """Experts that saw fewer tokens, such as "layers.3.experts.7", in order."""
        if spec.moe is None:
            return []
        names = (
            f"layers.{i}.experts.{e}"
            for i, layer in enumerate(spec.layers)
            if layer.moe
            for e in range(spec.moe.num_experts)
        )
        return [name for name in names if self.seen.get(name, 0) < min_tokens]

    def report(self, spec: ModelSpec, min_tokens: int) -> dict[str, Any]:
        """For report.json: scales by layer and projection (experts share one), the maxima and tokens of every expert,
        where those that saw few tokens have the maxima of their layer, and who those are."""
        scales, experts = {}, {}
        for i, layer in enumerate(spec.layers):
            p = f"layers.{i}."
            if not layer.moe:
                continue
            assert spec.moe is not None
            names = [f"{p}experts.{e}" for e in range(spec.moe.num_experts)]
            found: dict[str, Any] = {"tokens": [self.seen.get(name, 0) for name in names]}
            for part in ("gate_up", "down"):
                most, maxima = self._maxima(names, part, min_tokens)
                scales[f"{p}experts.{part}"] = _scale(most)
                found[part] = [_short(amax) for amax in maxima]
            experts[p.rstrip(".")] = found
        scales |= {name: _scale(amax) for name, amax in self.amax.items() if ".experts." not in name}
        return {
            "tokens": self.tokens,
            "min_tokens": min_tokens,
            "input_scales": dict(sorted(scales.items())),
            "experts": experts,
            "experts_with_few_tokens": sorted(self.few(spec, min_tokens)),
        }

    def down_input_scales(self, spec: ModelSpec, min_tokens: int) -> dict[str, np.ndarray]:
        """By section of the layout, "layers.3.down_input_scale": float32 [num_experts], the global scale of what goes
        into every expert's down projection as NVFP4.

        It is an expert's maximum / 2688, or its layer's where the expert saw fewer than min_tokens tokens, or only
        zeros. Where the whole layer saw only zeros the maximum counts as 6, which is what modelopt takes then.
        """
        found = {}
        for i, layer in enumerate(spec.layers):
            if not layer.moe:
                continue
            assert spec.moe is not None
            names = [f"layers.{i}.experts.{e}" for e in range(spec.moe.num_experts)]
            most, maxima = self._maxima(names, "down", min_tokens)
            found[f"layers.{i}.down_input_scale"] = input_scales([amax or most or E2M1_MAX for amax in maxima])
        return found

    def _maxima(self, names: Sequence[str], part: str, min_tokens: int) -> tuple[float, list[float]]:
        """(the largest, those of each) of a layer's experts; with few tokens an expert has the largest."""
        # Of all experts, those with few tokens too: what they saw did occur.
        most = max(self.amax.get(f"{name}.{part}", 0.0) for name in names)
        few = [self.seen.get(name, 0) < min_tokens for name in names]
        return most, [most if is_few else self.amax[f"{name}.{part}"] for name, is_few in zip(names, few, strict=True)]


def input_scales(amax: Sequence[float]) -> np.ndarray:
    """float32: NVFP4's global scales of activations with these maxima, with modelopt's rounding."""
    return np.maximum(np.asarray(amax, np.float32) / np.float32(NVFP4_MAX), np.float32(MIN_SCALE2))


def _scale(amax: float) -> float:
    return _short(max(amax / NVFP4_MAX, MIN_SCALE2))


def _short(value: float) -> float:
    return float(f"{value:.6g}")


def calibrate(
    spec: ModelSpec,
    load: Load,
    sequences: Sequence[Sequence[int]],
    track: Callable[[Iterable[int]], Iterable[int]] = iter,
) -> Calibration:
    """Runs the sequences through every layer. load: see forward.Load. track: may show progress of the layers.

    Raises UserError when activations are not finite.
    """
    import torch

    lengths = [len(sequence) for sequence in sequences]
    found = Calibration(sum(lengths))
    lock = threading.Lock()

    def see(name: str, x: torch.Tensor) -> None:
        low, high = (float(end) for end in torch.aminmax(x))
        if not math.isfinite(low) or not math.isfinite(high):
            raise UserError(
                f"calibration: what goes into {name} is NaN or infinite: the model's weights overflow float32; check "
                "the checkpoint against its source"
            )
        with lock:
            found.amax[name] = max(-low, high)
            expert, _, part = name.rpartition(".")
            if ".experts." in name and part == "gate_up":
                found.seen[expert] = len(x)

    with torch.inference_mode(), Forward(spec, load, see) as forward:
        x = forward.embed([token for sequence in sequences for token in sequence])
        for i in track(range(len(spec.layers))):
            x = forward.layer(i, x, lengths)
    return found


def sequences_of(data: Path | None, text: Text, tokens: int, context: int) -> list[list[int]]:
    """The first `tokens` tokens of a text file, of a JSONL file, of a folder of such, or of mkpack's own text, cut into
    sequences that the context holds; fewer when there are no more. UserError, naming the place, when there are none."""
    found: list[list[int]] = []
    left, most = tokens, min(SEQUENCE, context)
    for document in _documents(data):
        if not (document.strip() if isinstance(document, str) else document):
            continue  # a tokenizer would still put its BOS before nothing
        ids = text.encode_raw(document) if isinstance(document, str) else text.encode_chat(document, False)
        for start in range(0, len(ids[:left]), most):
            found.append(ids[:left][start : start + most])
        left -= min(len(ids), left)
        if not left:
            break
    if not found:
        raise UserError(f"{data}: holds no text; name a file or folder that does")
    return found


def _documents(data: Path | None) -> Iterator[str | list[dict[str, Any]]]:
    """Texts, or lists of messages of a chat."""
    if data is None:
        yield files("mkpack").joinpath("data/calibration.txt").read_text(encoding="utf-8")
        return
    if not data.is_dir():
        yield from _of_file(data)
        return
    inside = sorted(path for path in data.rglob("*") if path.is_file() and not path.name.startswith("."))
    chosen = [path for path in inside if path.suffix in SUFFIXES]
    if not chosen:
        other = sorted({path.suffix or path.name for path in inside})
        what = f"found only {some(other)}" if other else "the folder is empty"
        raise UserError(
            f"{data}: expected {' or '.join(SUFFIXES)} files, {what}; write other formats as JSONL first, an object "
            'with "text" a line'
        )
    for path in chosen:
        yield from _of_file(path)


def _of_file(path: Path) -> Iterator[str | list[dict[str, Any]]]:
    try:
        if path.suffix != ".jsonl":
            yield path.read_text(encoding="utf-8")
            return
        with open(path, encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield _of_line(f"{path}:{number}", line)
    except (OSError, UnicodeDecodeError) as e:
        raise UserError(f"{path}: cannot be read: {unreadable(e)}") from e


def _of_line(where: str, line: str) -> str | list[dict[str, Any]]:
    try:
        entry = json.loads(line)
    except ValueError as e:
        raise UserError(f"{where}: not JSON: {e}") from e
    if isinstance(entry, dict):
        if isinstance(entry.get("text"), str):
            return str(entry["text"])
        if isinstance(entry.get("messages"), list):
            return list(entry["messages"])
    known = nearest(next(iter(entry)), ("text", "messages")) if isinstance(entry, dict) and entry else ""
    raise UserError(f'{where}: expected an object with "text" or "messages"{known}')
