"""Compiles csrc/cuda, or a test of the emulator, with g++ alone: tests/cuda/emulator/README.md."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from mkpack import compile, platform

EMULATOR = Path(__file__).parent / "cuda" / "emulator"
MACHINE = tuple(sorted(EMULATOR.glob("*.cpp")))
# The kernels look at the same bytes through several types, as nvcc allows. -g1 lets reports name functions and lines.
FLAGS = (
    "-std=c++20 -O1 -g1 -fno-strict-aliasing -fPIC -fvisibility=hidden -Wall "
    "-Wno-unknown-pragmas -Wno-parentheses"
).split()


def build(source: Path, out: Path, *, headers: Path | None = None, flags: tuple[str, ...] = ()) -> Path:
    """Compiles `source` for the emulated machine. headers: a folder that holds model.h."""
    compiler = platform.compiler()
    if compiler is None:
        pytest.skip("no C++ compiler")
    csrc = compile.sources()
    folders = [EMULATOR, csrc / "cuda", csrc, *([headers] if headers else [])]
    command = [*compiler.command, *FLAGS, *flags, *(f"-I{f}" for f in folders), "-include", "emulator.h", "-x", "c++"]
    done = subprocess.run([*command, source, *MACHINE, "-o", out], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return out


def build_library(model_h: str, folder: Path) -> Path:
    """The .so of a CUDA target with this model.h, loadable as any other, that runs on the emulated machine."""
    (folder / "model.h").write_text(model_h)
    csrc = compile.sources()
    flags = ("-shared", f"-Wl,--version-script={csrc / 'exports.map'}")
    return build(csrc / "cuda" / "model.cu", folder / "kernel.so", headers=folder, flags=flags)
