"""A process that has the GPU, so that a test can see what others find then."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from mkpack import platform

SOURCE = Path(__file__).with_name("holder.cu")


def compile(out: Path) -> Path:
    nvcc = platform.nvcc()
    if nvcc is None:
        pytest.skip("nvcc is not here, and no --prebuilt folder was given")
    flags = ["-O2", "-std=c++17", "-cudart", "static", "-gencode", "arch=compute_90a,code=sm_90a"]
    subprocess.run([*nvcc.command, *flags, str(SOURCE), "-o", str(out)], check=True, timeout=200)
    return out


def program(folder: Path, prebuilt: Path | None) -> Path:
    ready = prebuilt / "holder" if prebuilt else None
    return ready if ready and ready.exists() else compile(folder / "holder")


@contextmanager
def running(program: Path, what: str, seconds: int) -> Iterator[None]:
    """what: "spin" keeps every SM busy, "memory" takes the GPU's memory; for at most `seconds`."""
    process = subprocess.Popen([program, what, str(seconds)], stdout=subprocess.PIPE, text=True)
    assert process.stdout
    try:
        assert process.stdout.readline() == "ready\n", "the program that holds the GPU did not start"
        yield
    finally:
        process.kill()
        process.wait(timeout=30)
