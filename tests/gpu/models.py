"""Models of random weights that the GPU suite runs: shapes that nobody would choose, each with what it is there for."""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import emulator
import kernels
from cuda_models import cuda_layout, cuda_spec, small_spec
from jobs import Built

from mkpack import compile
from mkpack.codegen_cuda import cuda_header
from mkpack.compile import Unit
from mkpack.layout_cuda import CudaLayout
from mkpack.manifest import Limits
from mkpack.pack_cuda import CudaBlobWriter
from mkpack.spec import LayerSpec

WINDOWS = (LayerSpec(moe=True), LayerSpec(moe=True, sliding_window=7))


@dataclass(frozen=True)
class Small:
    """One of them. grid: blocks; cuts: sizes of the first chunks of its prompt."""

    layout: CudaLayout
    prompt: int
    cuts: tuple[int, ...] = (1,)
    context: int = 128
    grid: int = 132

    @property
    def limits(self) -> Limits:
        return Limits(context=self.context, tokens_per_step=16)

    def header(self, grid: int | None = None) -> str:
        text, count = re.subn(
            r"kGrid = \d+", f"kGrid = {grid or self.grid}", cuda_header(self.layout, self.limits, "sm_90a")
        )
        assert count == 1
        return text


SMALL = {
    "smallest": Small(cuda_layout(small_spec(hidden_size=64, vocab_size=13, layers=WINDOWS)), 40),
    "fp8, biases, windows": Small(
        cuda_layout(
            small_spec(hidden_size=576, qk_norm=True, qkv_bias=True, o_bias=True, layers=WINDOWS),
            "f32",
            attention="fp8",
            lm_head="fp8",
        ),
        61,
        (7, 2),
    ),
    "one expert, tied head": Small(
        cuda_layout(small_spec(head_dim=128, tie_word_embeddings=True, layers=1, moe={"top_k": 1})), 33, (16,)
    ),
    "512 experts, 16 heads a KV head": Small(
        cuda_layout(
            small_spec(
                hidden_size=320,
                num_attention_heads=16,
                num_key_value_heads=1,
                vocab_size=1021,
                moe={"num_experts": 512, "top_k": 32, "intermediate_size": 192, "norm_topk_prob": False},
            )
        ),
        50,
        (9, 8),
    ),
    "Qwen3's shape, two layers": Small(
        cuda_layout(cuda_spec(vocab_size=1021, layers=(LayerSpec(moe=True),) * 2, moe={"intermediate_size": 768})),
        37,
        (2, 16),
    ),
    "3000 positions": Small(
        cuda_layout(small_spec(hidden_size=64, vocab_size=61, layers=1, num_key_value_heads=4)), 3000, context=3072
    ),
    # For tools that slow a kernel down a hundredfold.
    "few blocks": Small(cuda_layout(small_spec(hidden_size=64, vocab_size=13, layers=WINDOWS)), 20, grid=4, context=64),
}


class Kernels:
    """Compiled kernels by the text of their header and the sources: from a folder that prebuild.py filled, else from
    this machine's nvcc. emulated: for the emulated machine instead, with few blocks."""

    def __init__(self, folder: Path, prebuilt: Path | None, emulated: bool) -> None:
        self.folder, self.prebuilt, self.emulated = folder, prebuilt, emulated

    def compile(self, models: Iterable[Small]) -> list[Path]:
        """Their .so files, compiled side by side."""
        headers = [m.header(min(m.grid, 4) if self.emulated else None) for m in models]
        names = [f"{'emulated' if self.emulated else 'sm_90a'}-{_digest(h)}" for h in headers]
        found = {n: self._place(n) for n in names}
        missing = {n: h for n, h in zip(names, headers, strict=True) if not found[n].exists()}
        if missing and self.emulated:
            for name, header in missing.items():
                (self.folder / name).mkdir(parents=True, exist_ok=True)
                emulator.build_library(header, self.folder / name)
        elif missing:
            self.folder.mkdir(parents=True, exist_ok=True)
            compile.compile_kernels([Unit(n, "sm_90a", h) for n, h in missing.items()], self.folder)
        return [found[n] for n in names]

    def _place(self, name: str) -> Path:
        ready = self.prebuilt / name / "kernel.so" if self.prebuilt else None
        return ready if ready and ready.exists() else self.folder / name / "kernel.so"

    def keep(self, models: Iterable[Small], folder: Path) -> None:
        """Compiles them and leaves only the .so files in `folder`."""
        for path in self.compile(models):
            (folder / path.parent.name).mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, folder / path.parent.name / "kernel.so")


def _digest(header: str) -> str:
    digest = hashlib.sha256(header.encode())
    csrc = compile.sources()
    for path in sorted(csrc.rglob("*")):
        if path.is_file():
            digest.update(f"{path.relative_to(csrc)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def pack(model: Small, kernel: Path, folder: Path) -> tuple[Built, kernels.Weights]:
    """Random weights, packed."""
    weights = kernels.Weights.random(model.layout)
    folder.mkdir(parents=True, exist_ok=True)
    with CudaBlobWriter(model.layout, folder / "blob") as writer:
        for name, q in weights.tensors.items():
            writer.put(name, q, q.format)
    return Built(kernel, model.layout, model.limits, folder / "blob"), weights
