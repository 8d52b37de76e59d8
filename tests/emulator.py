"""Compiles csrc/cuda, or a test of the emulator, with g++ alone: tests/cuda/emulator/README.md."""

from __future__ import annotations

import atexit
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import kernels
import numpy as np
import pytest

from mkpack import compile, platform
from mkpack.layout_cuda import CudaLayout
from mkpack.manifest import Limits

EMULATOR = Path(__file__).parent / "cuda" / "emulator"
MACHINE = tuple(sorted(EMULATOR.glob("*.cpp")))
# The kernels look at the same bytes through several types, as nvcc allows. -g1 lets reports name functions and lines.
FLAGS = (
    "-std=c++20 -O1 -g1 -fno-strict-aliasing -fPIC -fvisibility=hidden -Wall -Wno-unknown-pragmas -Wno-parentheses"
).split()
KERNEL = ("-include", "emulator.h", "-x", "c++")
# The compiler then calls the emulator at every access: race.h.
RACES = ("-fsanitize=thread", "--param", "tsan-distinguish-volatile=1")


def _command(headers: Path | None = None) -> list[str | Path]:
    compiler = platform.compiler()
    if compiler is None:
        pytest.skip("no C++ compiler")
    csrc = compile.sources()
    folders = [EMULATOR, csrc / "cuda", csrc, *([headers] if headers else [])]
    return [*compiler.command, *FLAGS, *(f"-I{f}" for f in folders)]


def _run(command: Sequence[str | Path]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


@cache
def _machine() -> list[Path]:
    """Objects of the emulator itself, compiled once a session."""
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder)
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


def build_library(model_h: str, folder: Path, *, races: bool = False) -> Path:
    """The .so of a CUDA target with this model.h, loadable as any other, that runs on the emulated machine."""
    (folder / "model.h").write_text(model_h)
    csrc = compile.sources()
    link = ("-shared", f"-Wl,--version-script={csrc / 'exports.map'}")
    return build(csrc / "cuda" / "model.cu", folder / "kernel.so", headers=folder, races=races, link=link)


Call = tuple[str, Sequence[Any], dict[str, Any]]  # of kernels.Model: method, arguments


def calls(
    kernel: Path, layout: CudaLayout, limits: Limits, blob: Path, wanted: Sequence[Call], **settings: object
) -> list[Any]:
    """Results of calls to a model that runs in a process of its own, which the emulator may end: the test then fails
    with its report. settings: wait_limit_s, and MK_EMULATOR_* without that beginning."""
    options = {"wait_limit_s": settings.pop("wait_limit_s", 1e6)}
    work = pickle.dumps((kernel, layout, limits, blob, options, wanted))
    environment = {**os.environ, **{f"MK_EMULATOR_{name.upper()}": str(value) for name, value in settings.items()}}
    command = [sys.executable, __file__]
    done = subprocess.run(command, input=work, capture_output=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr.decode()[-6000:]
    found: list[Any] = pickle.loads(done.stdout)
    return found


def _main() -> None:
    kernel, layout, limits, blob, options, wanted = pickle.load(sys.stdin.buffer)
    found = []
    with kernels.running(kernel, layout, limits, [np.memmap(blob, np.uint8, "r")], **options) as model:
        for name, arguments, named in wanted:
            result = getattr(model, name)(*arguments, **named)
            if isinstance(result, kernels.Generated):
                result = result.tokens, result.code, result.error
            found.append(result)
    sys.stdout.buffer.write(pickle.dumps(found))


if __name__ == "__main__":
    _main()
