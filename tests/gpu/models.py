"""Models of random weights that the GPU suite runs: shapes that nobody would choose, each with what it is there for."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import shutil
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import emulator
import kernels
import mistakes
from cuda_models import cuda_layout, cuda_spec, muse_spec, small_spec
from jobs import Built

from mkpack import compile, platform
from mkpack.codegen_cuda import cuda_header
from mkpack.compile import Unit
from mkpack.errors import InternalError, UserError
from mkpack.layout_cuda import CudaLayout
from mkpack.manifest import Limits
from mkpack.pack_cuda import CudaBlobWriter
from mkpack.spec import LayerSpec, SwigluSpec

WINDOWS = (LayerSpec(moe=True), LayerSpec(moe=True, sliding_window=7))


@dataclass(frozen=True)
class Small:
    """One of them. grid: blocks; cuts: sizes of the first chunks of its prompt; followed: compiled so that racecheck
    can judge every access (MK_RACECHECK in csrc/cuda); mistake: one of mistakes.MISTAKES in its sources."""

    layout: CudaLayout
    prompt: int
    cuts: tuple[int, ...] = (1,)
    context: int = 128
    grid: int = 132
    followed: bool = False
    mistake: str = ""

    @property
    def limits(self) -> Limits:
        return Limits(context=self.context, tokens_per_step=16)

    def of_ranks(self, tp: int, per_device: int) -> Small:
        """The same model for several ranks."""
        one = self.layout
        layout = CudaLayout(one.spec, one.precision, one.router_format, tp, per_device)
        return dataclasses.replace(self, layout=layout)

    def header(self, grid: int | None = None) -> str:
        header = cuda_header(self.layout, self.limits, "sm_90a", grid=grid or self.grid)
        return f"#define MK_RACECHECK\n{header}" if self.followed else header


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
                moe={"num_experts": 512, "top_k": 16, "intermediate_size": 192, "norm_topk_prob": False},
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
    "sinks, biases, clamped SwiGLU": Small(
        cuda_layout(
            small_spec(
                hidden_size=2112,
                qkv_bias=True,
                o_bias=True,
                attention_sinks=True,
                layers=WINDOWS,
                moe={
                    **{"intermediate_size": 2112, "router_bias": True, "expert_bias": True},
                    "swiglu": SwigluSpec(alpha=1.702, limit=0.7, up_offset=1.0),
                },
            )
        ),
        40,
        (3, 8),
    ),
    "sigmoids, norms over all heads": Small(
        cuda_layout(
            small_spec(
                head_dim=128,
                num_attention_heads=12,
                qk_norm=True,
                qk_norm_over="projection",
                vocab_size=313,  # of those that were tried the one where no token is close to another choice
                moe={
                    **{"num_experts": 8, "top_k": 3, "scoring": "sigmoid", "choice_bias": True},
                    **{"norm_topk_eps": 1e-15, "routed_scaling_factor": 2.5},
                },
            ),
            "f32",
        ),
        45,
        (9,),
    ),
    "Muse Spark: dense layers, narrow experts, norms after, gates": Small(
        cuda_layout(
            muse_spec(
                hidden_size=320,
                vocab_size=313,
                qkv_bias=True,
                o_bias=True,
                dense_intermediate_size=200,
                moe={"num_experts": 8, "top_k": 3, "intermediate_size": 192, "expert_bias": True},
            ),
            attention="fp8",
            dense="fp8",
        ),
        45,
        (5, 16),
    ),
    "3000 positions": Small(
        cuda_layout(small_spec(hidden_size=64, vocab_size=61, layers=1, num_key_value_heads=4)), 3000, context=3072
    ),
    # For tools that slow a kernel down a hundredfold.
    "few blocks": Small(cuda_layout(small_spec(hidden_size=64, vocab_size=13, layers=WINDOWS)), 20, grid=4, context=64),
}
SMALL["few blocks, followed"] = dataclasses.replace(SMALL["few blocks"], followed=True)
for _mistake in mistakes.MISTAKES:
    SMALL[f"few blocks, {_mistake}"] = dataclasses.replace(SMALL["few blocks, followed"], mistake=_mistake)


class Kernels:
    """Compiled kernels by the text of their header and the sources: from a folder that prebuild.py filled, else from
    this machine's nvcc. emulated: for the emulated machine instead, with few blocks."""

    def __init__(self, folder: Path, prebuilt: Path | None, emulated: bool) -> None:
        self.folder, self.prebuilt, self.emulated = folder, prebuilt, emulated
        self._failed: dict[str, Exception] = {}

    def compile(self, models: Iterable[Small]) -> list[Path | Exception]:
        """Their .so files, compiled side by side; of one that does not compile the error."""
        models = list(models)
        with ThreadPoolExecutor(platform.cores()) as pool:
            list(pool.map(self._one, [model for model in models if not model.mistake]))
        return [self._one(model) for model in models]

    def get(self, model: Small) -> Path:
        """The .so file of one of them; raises what stands in the way."""
        found = self._one(model)
        if isinstance(found, Exception):
            raise found
        return found

    def _one(self, model: Small) -> Path | Exception:
        with mistakes.sources(model.mistake):
            return self._make(model)

    def _make(self, model: Small) -> Path | Exception:
        header = model.header(min(model.grid, 4) if self.emulated else None)
        name = f"{'emulated' if self.emulated else 'sm_90a'}-{_digest(header)}"
        if name in self._failed:
            return self._failed[name]
        path = self._place(name)
        try:
            if not path.exists():
                path.parent.mkdir(parents=True)
                if self.emulated:
                    emulator.build_library(header, path.parent)
                else:
                    os.environ["NVCC_APPEND_FLAGS"] = "-lineinfo"  # checkers then name lines
                    made = compile.compile_kernels([Unit("unit", "sm_90a", header)], path.parent)
                    shutil.copyfile(made["unit"].path, path)
        except (UserError, InternalError, AssertionError) as e:
            self._failed[name] = e
            return e
        return path

    def _place(self, name: str) -> Path:
        ready = self.prebuilt / name / "kernel.so" if self.prebuilt else None
        return ready if ready and ready.exists() else self.folder / name / "kernel.so"

    def keep(self, models: Mapping[str, Small], folder: Path) -> None:
        """Compiles them and leaves only the .so files in `folder`."""
        for name, path in zip(models, self.compile(models.values()), strict=True):
            if isinstance(path, Exception):
                print(f"{name}: {path}")
                continue
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
    blobs = tuple(folder / f"blob-{rank}" for rank in range(model.layout.tp))
    with CudaBlobWriter(model.layout, blobs) as writer:
        for name, q in weights.tensors.items():
            writer.put(name, q, q.format)
    return Built(kernel, model.layout, model.limits, blobs), weights
