"""Who builds: versions of everything that decides the bytes of an artifact."""

from __future__ import annotations

import hashlib
import platform as _platform
import subprocess
from functools import cache
from importlib import metadata
from pathlib import Path

from mkpack import __version__
from mkpack.compile import sources
from mkpack.manifest import Producer
from mkpack.platform import Compiler, glibc


def producer(compiler: Compiler, nvcc: Compiler | None = None) -> Producer:
    """Versions of mkpack, its source commit when it runs from a checkout, and the libraries and compilers it uses."""
    commit, dirty = _git()
    return Producer(
        mkpack=__version__,
        commit=commit,
        dirty=dirty,
        python=_platform.python_version(),
        torch=_version("torch"),
        modelopt=_version("nvidia-modelopt"),
        compilers={
            Path(compiler.path).name: compiler.version,
            **_linker(compiler),
            **({"nvcc": nvcc.version} if nvcc else {}),
        },
        libraries=_libraries(),
        sources=sources_digest(),
    )


def _linker(compiler: Compiler) -> dict[str, str]:
    """The linker that the compiler calls: it lays the .so out."""
    found = _first_line([*compiler.command, "-print-prog-name=ld"])
    version = _first_line([found, "--version"]) if found else None
    return {"ld": version} if version else {}


def _libraries() -> dict[str, str]:
    """What else has a part in the bytes: packages that read, quantise and write, and the C library that is linked."""
    packages = ("gguf", "ninja", "numpy", "pydantic", "safetensors", "tokenizers")
    found = {name: version for name in packages if (version := _version(name))}
    return {**found, **({"glibc": libc} if (libc := glibc()) else {})}


def _first_line(command: list[str]) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.partition("\n")[0].strip() or None if done.returncode == 0 else None


@cache
def sources_digest() -> str:
    """sha256 over names and contents of csrc/ and of the Python that generates code and bytes."""
    digest = hashlib.sha256()
    package = Path(__file__).parent
    for root, pattern in ((sources(), "**/*.*"), (package, "**/*.py")):
        for file in sorted(root.glob(pattern)):
            if file.is_file():
                digest.update(f"{file.relative_to(root)}\0{file.stat().st_size}\0".encode())
                digest.update(file.read_bytes())
    return digest.hexdigest()


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _git() -> tuple[str | None, bool | None]:
    """(commit, dirty) of the checkout this file lies in; (None, None) outside one."""
    here = Path(__file__).resolve().parent
    if not (here.parent / ".git").exists():
        return None, None

    def git(*words: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", "-C", str(here), *words], capture_output=True, text=True, timeout=10, check=False
            )
        except (OSError, subprocess.SubprocessError):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    commit, status = git("rev-parse", "HEAD"), git("status", "--porcelain", "--", ".", "../csrc")
    if commit is None or len(commit) != 40:
        return None, None
    return commit, None if status is None else bool(status)
