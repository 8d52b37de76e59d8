"""Compiles csrc/cuda, or a test of the emulator, with g++ alone: tests/cuda/emulator/README.md."""

from __future__ import annotations

import atexit
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import kernels
import numpy as np
import pytest
from patience import PATIENCE_S

from mkpack import abi, compile, layout_cuda, platform
from mkpack import build as builder
from mkpack.codegen_cuda import cuda_header
from mkpack.compile import CUDA_TARGETS, Kernel, Unit
from mkpack.layout_cuda import CudaLayout
from mkpack.manifest import Limits
from mkpack.pack_cuda import CudaBlobWriter
from mkpack.platform import CudaDevice, CudaDriver

EMULATOR = Path(__file__).parent / "cuda" / "emulator"
MACHINE = tuple(sorted(EMULATOR.glob("*.cpp")))
# The kernels look at the same bytes through several types, as nvcc allows. -g1 lets reports name functions and lines.
# -Og compiles in two thirds of -O1's time, and what it makes runs as fast: the machine takes most of it.
FLAGS = (
    "-std=c++20 -Og -g1 -fno-strict-aliasing -fPIC -fvisibility=hidden -Wall -Wno-unknown-pragmas -Wno-parentheses"
).split()
KERNEL = ("-include", "emulator.h", "-x", "c++")
# The compiler then calls the emulator at every access: race.h.
RACES = ("-fsanitize=thread", "--param", "tsan-distinguish-volatile=1")

Call = tuple[str, Sequence[Any], dict[str, Any]]  # of kernels.Model: method, arguments


def _command(headers: Path | None = None) -> list[str | Path]:
    compiler = platform.compiler()
    if compiler is None:
        pytest.skip("no C++ compiler")
    csrc = compile.sources()
    folders = [EMULATOR, csrc / "cuda", csrc, *([headers] if headers else [])]
    return [*compiler.command, *FLAGS, *(f"-I{f}" for f in folders)]


def _run(command: Sequence[str | Path]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=2 * PATIENCE_S)
    assert done.returncode == 0, done.stderr


@cache
def _session() -> Path:
    """A folder of this session's, for what is compiled once in it."""
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder)
    return folder


@cache
def _machine() -> list[Path]:
    """Objects of the emulator itself."""
    folder = _session()
    objects = [folder / f"{source.stem}.o" for source in MACHINE]
    for source, compiled in zip(MACHINE, objects, strict=True):
        _run([*_command(), *KERNEL, "-O2", "-c", source, "-o", compiled])
    return objects


def build(
    source: Path, out: Path, *, headers: Path | None = None, races: bool = False, link: Sequence[str] = ()
) -> Path:
    """Compiles `source` for the emulated machine. headers: a folder that holds model.h; races: look for them."""
    compiled = out.with_name(out.name + ".o")
    place = f'-DMK_EMULATOR_IMAGE="{out}"'
    _run([*_command(headers), *KERNEL, *(RACES if races else ()), place, "-c", source, "-o", compiled])
    _run([*_command(), *_machine(), compiled, *link, "-o", out])
    return out


def build_library(model_h: str, folder: Path, *, source: Path | None = None, races: bool = False) -> Path:
    """The .so of a CUDA target with this model.h, loadable as any other, that runs on the emulated machine. source:
    instead of model.cu."""
    (folder / "model.h").write_text(model_h)
    csrc = compile.sources()
    link = ("-shared", f"-Wl,--version-script={csrc / 'exports.map'}")
    return build(source or csrc / "cuda" / "model.cu", folder / "kernel.so", headers=folder, races=races, link=link)


@cache
def library(model_h: str, *, source: Path | None = None, races: bool = False) -> Path:
    """The same, compiled once a session."""
    return build_library(model_h, Path(tempfile.mkdtemp(dir=_session())), source=source, races=races)


@dataclass(frozen=True)
class Emulated:
    """A model of random weights for the emulated machine."""

    layout: CudaLayout
    limits: Limits
    weights: kernels.Weights
    header: str
    blobs: tuple[Path, ...]
    source: Path | None = None

    @staticmethod
    def random(
        layout: CudaLayout,
        limits: Limits,
        grid: int,
        *,
        trace: bool = False,
        source: Path | None = None,
        add: str = "",
        flags: bool = False,
    ) -> Emulated:
        """grid: blocks of a device. source: see library(). add: to its header. flags: ranks exchange by flags."""
        weights, folder = kernels.Weights.random(layout), Path(tempfile.mkdtemp(dir=_session()))
        blobs = tuple(folder / f"blob-{rank}" for rank in range(layout.tp))
        with CudaBlobWriter(layout, blobs) as writer:
            for name, q in weights.tensors.items():
                writer.put(name, q, q.format)
        header = cuda_header(layout, limits, "sm_90a", trace, grid, flags)
        return Emulated(layout, limits, weights, header + add, blobs, source)

    @property
    def blob(self) -> Path:
        """That of the first rank."""
        return self.blobs[0]

    def library(self, races: bool = False) -> Path:
        return library(self.header, source=self.source, races=races)

    def calls(self, *wanted: Call, races: bool = False, looped: int | None = None, **settings: object) -> list[Any]:
        """Results of calls to the model in a process of its own, which the emulator may end: the test then fails with
        its report. looped: this rank alone, with its peers looped back. settings: wait_limit_s, and MK_EMULATOR_*
        without that beginning."""
        return _calls(self.library(races), self, wanted, looped, **settings)

    @contextmanager
    def running(self, **options: Any) -> Iterator[kernels.Model]:
        """The model in this process, for calls that are not going to fail; options of mk_options."""
        blobs = [np.memmap(blob, np.uint8, "r") for blob in self.blobs]
        with kernels.running(self.library(), self.layout, self.limits, blobs, **options) as model:
            yield model


@contextmanager
def machine(blocks: int) -> Iterator[None]:
    """This machine has an emulated GPU, which builds compile for and loads find. Its kernels have so many blocks."""
    compile_others = compile.compile_kernels

    def compile_kernels(units: list[Unit], work: Path, stop: object) -> dict[str, Kernel]:
        made = compile_others([unit for unit in units if unit.target not in CUDA_TARGETS], work)
        for unit in units:
            if unit.target in CUDA_TARGETS:
                (work / unit.name).mkdir()
                path = build_library(unit.header, work / unit.name)
                made[unit.name] = Kernel(path, "g++", {"gpu": unit.target, "sms": blocks, "system": "linux"})
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(layout_cuda.GRID, "sm_90a", blocks)
        patch.setattr(builder, "compile_kernels", compile_kernels)
        patch.setattr(platform, "nvcc", lambda: platform.Compiler(("nvcc",), "13.0"))
        gpu = CudaDriver("13.0", (CudaDevice("emulated", "9.0", 160),))
        patch.setattr(platform, "cuda_driver", lambda: gpu)
        yield


def _calls(kernel: Path, model: Emulated, wanted: Sequence[Call], looped: int | None, **settings: object) -> list[Any]:
    options: dict[str, Any] = {"wait_limit_s": settings.pop("wait_limit_s", 1e6)}
    blobs = model.blobs
    if looped is not None:
        options |= {"num_ranks": len(blobs), "flags": abi.OPTION_LOOPED}
        blobs = blobs[looped : looped + 1]
    work = pickle.dumps((kernel, model.layout, model.limits, blobs, options, wanted))
    environment = {**os.environ, **{f"MK_EMULATOR_{name.upper()}": str(value) for name, value in settings.items()}}
    command = [sys.executable, __file__]
    done = subprocess.run(command, input=work, capture_output=True, env=environment, timeout=2 * PATIENCE_S)
    assert done.returncode == 0, done.stderr.decode()[-6000:]
    found: list[Any] = pickle.loads(done.stdout)
    return found


def _main() -> None:
    kernel, layout, limits, blobs, options, wanted = pickle.load(sys.stdin.buffer)
    found = []
    mapped = [np.memmap(blob, np.uint8, "r") for blob in blobs]
    with kernels.running(kernel, layout, limits, mapped, **options) as model:
        for name, arguments, named in wanted:
            result = getattr(model, name)(*arguments, **named)
            if isinstance(result, kernels.Generated):
                result = result.tokens, result.code, result.error
            found.append(result)
    sys.stdout.buffer.write(pickle.dumps(found))


if __name__ == "__main__":
    _main()
