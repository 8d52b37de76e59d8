"""model.h + csrc/ -> one .so per target, through ninja."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mkpack import platform
from mkpack.errors import InternalError, UserError

# Contraction is off because every fused multiply-add is written out: results may not depend on the compiler's mood.
CPU_FLAGS = (
    "-std=c++20 -O3 -fPIC -shared -pthread -fvisibility=hidden -ffp-contract=off -fno-math-errno "
    "-Wl,--build-id=none -Wl,-z,relro,-z,now -static-libstdc++ -static-libgcc"
).split()


@dataclass(frozen=True)
class Unit:
    """One .so to compile: its folder name, the target, and the text of its model.h."""

    name: str
    target: str
    header: str


@dataclass(frozen=True)
class Kernel:
    """A compiled target: the .so, the compiler's version line, and what a machine must have to run it."""

    path: Path
    compiler: str
    requires: dict[str, object]


def sources() -> Path:
    """The csrc/ folder: inside the package when installed from a wheel, else at the top of the checkout."""
    here = Path(__file__).resolve().parent
    for folder in (here / "csrc", here.parent / "csrc"):
        if (folder / "abi.h").is_file():
            return folder
    raise InternalError(f"csrc/ is missing beside {here}; reinstall mkpack")


def _ninja() -> str:
    beside = Path(sys.executable).with_name("ninja")
    found = str(beside) if beside.is_file() else shutil.which("ninja")
    if not found:
        raise UserError("ninja is not installed, and building a kernel needs it; pip install 'mkpack[build]'")
    return found


def _escape(text: str) -> str:
    return text.replace("$", "$$").replace(" ", "$ ").replace(":", "$:")


def _rule(unit: Unit, compiler: platform.Compiler, folder: Path) -> str:
    csrc, generated = sources(), folder / unit.name
    flags = [
        *CPU_FLAGS,
        f"-march={unit.target}",
        # No path of this machine in the output: the same sources give the same bytes in any folder.
        f"-ffile-prefix-map={csrc}=csrc",
        f"-ffile-prefix-map={generated}=generated",
        f"-I{csrc}",
        f"-I{generated}",
        "-Xlinker",
        f"--version-script={csrc / 'exports.map'}",
    ]
    if unit.target == "x86-64-v4":
        flags.append("-mprefer-vector-width=512")
    command = shlex.join([*compiler.command, *flags])
    out, src = _escape(str(generated / "kernel.so")), _escape(str(csrc / "cpu" / "model.cpp"))
    return (
        f"rule {unit.name}\n"
        f"  command = {command.replace('$', '$$')} -MD -MF $out.d $in -o $out\n"
        f"  depfile = $out.d\n"
        f"  deps = gcc\n"
        f"build {out}: {unit.name} {src} | {_escape(str(generated / 'model.h'))}\n"
    )


def compile_kernels(units: Sequence[Unit], folder: Path) -> dict[str, Kernel]:
    """Compiles CPU kernels side by side, each in `folder`/name. Returns them by name.

    Raises UserError when a tool is missing, InternalError with the compiler's own words when it fails.
    """
    compiler = platform.compiler()
    if compiler is None:
        raise UserError(platform.no_compiler())
    rules = ["ninja_required_version = 1.8\n"]
    for unit in units:
        (folder / unit.name).mkdir(parents=True, exist_ok=True)
        (folder / unit.name / "model.h").write_text(unit.header)
        rules.append(_rule(unit, compiler, folder))
    (folder / "build.ninja").write_text("\n".join(rules))
    environment = {k: v for k, v in os.environ.items() if k != "NINJA_STATUS"}
    done = subprocess.run(
        [_ninja(), "-C", str(folder), "--quiet"], capture_output=True, text=True, env=environment, check=False
    )
    if done.returncode:
        raise _failure(done.stdout + done.stderr)
    return {
        unit.name: Kernel(folder / unit.name / "kernel.so", compiler.version, {"cpu": unit.target, "system": "linux"})
        for unit in units
    }


def _failure(output: str) -> Exception:
    # The kernel's out-of-memory killer leaves no word of its own: the driver only says that a stage was killed.
    if "Killed" in output or "signal terminated" in output or "out of memory" in output.lower():
        return InternalError(
            "the compiler was killed, most likely for lack of memory; close other programs, then build again"
        )
    if "No space left on device" in output:
        return UserError("the compiler ran out of disk space; free some or choose another folder with --output")
    tail = "\n".join(output.strip().splitlines()[-20:])
    return InternalError(f"the kernel did not compile:\n{tail}")
