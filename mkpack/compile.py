"""model.h + csrc/ -> one .so per target, through ninja."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mkpack import cubin, platform
from mkpack.errors import InternalError, UserError
from mkpack.layout_cuda import GRID
from mkpack.schedule.shape import LAUNCH_REGISTERS

# Contraction is off because every fused multiply-add is written out: results may not depend on the compiler's mood.
CPU_FLAGS = (
    "-std=c++20 -O3 -fPIC -shared -pthread -fvisibility=hidden -ffp-contract=off -fno-math-errno "
    "-Wl,--build-id=none -Wl,-z,relro,-z,now -static-libstdc++ -static-libgcc"
).split()

# GPU architectures, and the first CUDA release that knows each. The "a" is part of the name: without it nvcc leaves out
# what only this generation has.
CUDA_TARGETS = {"sm_90a": (12, 0), "sm_100a": (12, 8)}
UNTRIED = ("sm_100a",)  # compiles, but no GPU of its kind has run it
# Uncompressed, so that the build can read how much code a kernel is; -v is what ptxas says of registers and spills.
CUDA_FLAGS = (
    "-std=c++20 -O3 -shared -cudart static --no-compress -Xptxas -v "
    "-Xcompiler -fPIC,-fvisibility=hidden,-static-libstdc++,-static-libgcc "
    "-Xlinker --build-id=none,-z,relro,-z,now,--strip-all"
).split()
# What is written before model.h of a GPU kernel, tried in this order until it does not spill: the code as it was tuned,
# then one that keeps less in registers (kSpareRegisters in csrc/cuda/).
VARIANTS = ("", "#define MK_SPARE_REGISTERS\n")


@dataclass(frozen=True)
class Unit:
    """One .so to compile: its folder name, the target, and the text of its model.h."""

    name: str
    target: str
    header: str

    @property
    def traced(self) -> bool:
        return "\n#define MK_TRACE\n" in self.header

    @property
    def several_ranks(self) -> bool:
        """Whether it is a GPU kernel with exchanges between ranks, which was not tuned yet and may spill at last."""
        return "\nconstexpr int kRanks = " in self.header and "\nconstexpr int kRanks = 1;" not in self.header


@dataclass(frozen=True)
class Kernel:
    """A compiled target: the .so, the compiler's version line, and what a machine must have to run it.

    resources: of a GPU target, what each of its kernels takes.
    """

    path: Path
    compiler: str
    requires: dict[str, object]
    resources: tuple[cubin.Resources, ...] = ()


def sources() -> Path:
    """The csrc/ folder: inside the package when installed from a wheel, else at the top of the checkout."""
    here = Path(__file__).resolve().parent
    for folder in (here / "csrc", here.parent / "csrc"):
        if (folder / "abi.h").is_file():
            return folder
    raise InternalError(f"csrc/ is missing beside {here}; reinstall mkpack")


def ninja() -> str:
    beside = Path(sys.executable).with_name("ninja")
    found = str(beside) if beside.is_file() else shutil.which("ninja")
    if not found:
        raise UserError("ninja is not installed, and building a kernel needs it; pip install 'mkpack[build]'")
    return found


def _escape(text: str) -> str:
    return text.replace("$", "$$").replace(" ", "$ ").replace(":", "$:")


def _rule(unit: Unit, compiler: platform.Compiler, folder: Path) -> str:
    """The ninja rule of one CPU unit, written into `folder`/name."""
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


def _cuda_rule(unit: Unit, compiler: platform.Compiler, folder: Path) -> str:
    """The ninja rule of one GPU unit. It compiles a copy of csrc/ by relative names: names of sources go into what nvcc
    makes, and it hands none that has a space to the compiler below it."""
    csrc = folder / unit.name / "csrc"
    shutil.copytree(sources(), csrc, dirs_exist_ok=True)
    inputs = [p.relative_to(folder) for p in sorted(csrc.rglob("*")) if p.is_file()] + [Path(unit.name) / "model.h"]
    flags = [*cuda_flags(unit.target), "-Icsrc/cuda", "-Icsrc", "-I.", "-Xlinker", "--version-script=csrc/exports.map"]
    command = shlex.join([*compiler.command, *flags, "csrc/cuda/model.cu", "-o", "kernel.so"]).replace("$", "$$")
    # What ptxas says is kept beside the .so, and shown only when the compiler fails.
    return (
        f"rule {unit.name}\n"
        f"  command = cd {shlex.quote(unit.name)} && {command} > ptxas.log 2>&1 || {{ cat ptxas.log >&2; exit 1; }}\n"
        f"build {_escape(unit.name)}/kernel.so: {unit.name} | {' '.join(_escape(str(p)) for p in inputs)}\n"
    )


def cuda_flags(target: str) -> list[str]:
    """nvcc's flags for one GPU architecture of CUDA_TARGETS, code for it alone."""
    return [*CUDA_FLAGS, "-gencode", f"arch=compute_{target.removeprefix('sm_')},code={target}"]


def compiler_of(target: str) -> platform.Compiler:
    """The compiler of a target. UserError when it is not here or too old."""
    if target not in CUDA_TARGETS:
        compiler = platform.compiler()
        if compiler is None:
            raise UserError(platform.no_compiler())
        return compiler
    compiler, (major, minor) = platform.nvcc(), CUDA_TARGETS[target]
    if compiler is None:
        raise UserError(
            f"target {target}: nvcc is not here; install the CUDA toolkit, {major}.{minor} or newer, and point "
            "CUDA_HOME or the PATH at it"
        )
    if tuple(int(n) for n in compiler.version.split(".")[:2]) < (major, minor):
        raise UserError(
            f"target {target}: needs nvcc of CUDA {major}.{minor} or newer, found {compiler.version} "
            f"({compiler.path}); install a newer CUDA toolkit and point CUDA_HOME at it"
        )
    return compiler


def compile_kernels(units: Sequence[Unit], folder: Path, stop: threading.Event | None = None) -> dict[str, Kernel]:
    """Compiles kernels side by side, each in `folder`/name. Returns them by name. stop: once set, the compilers are
    ended.

    A GPU kernel that spills registers is compiled again as the next of VARIANTS; one of several ranks that spills in
    all of them as the first, and may.

    Raises UserError when a tool is missing, InternalError with the compiler's own words when it fails or is ended, or
    when a GPU kernel spills whatever its variant.
    """
    compilers = {target: compiler_of(target) for target in dict.fromkeys(unit.target for unit in units)}
    made: dict[str, Kernel] = {}
    spills = None
    for variant, may_spill in (*((v, False) for v in VARIANTS), (VARIANTS[0], True)):
        left = [unit for unit in units if unit.name not in made and (unit.several_ranks or not may_spill)]
        if not left:
            break
        _run_compilers(left, compilers, variant, folder, stop or threading.Event())
        for unit in left:
            try:
                made[unit.name] = _kernel(unit, compilers[unit.target], folder / unit.name / "kernel.so", may_spill)
            except cubin.Spills as error:
                spills = error
    if spills and len(made) < len({unit.name for unit in units}):
        raise spills
    return {unit.name: made[unit.name] for unit in units}


def _run_compilers(
    units: Sequence[Unit],
    compilers: Mapping[str, platform.Compiler],
    variant: str,
    folder: Path,
    stop: threading.Event,
) -> None:
    rules = ["ninja_required_version = 1.8\n"]
    for unit in units:
        (folder / unit.name).mkdir(parents=True, exist_ok=True)
        (folder / unit.name / "model.h").write_text(variant + unit.header)
        rule = _cuda_rule if unit.target in CUDA_TARGETS else _rule
        rules.append(rule(unit, compilers[unit.target], folder))
    (folder / "build.ninja").write_text("\n".join(rules))
    code, output = _run_ninja(folder, stop)
    if code:
        raise _failure(output)


def _run_ninja(folder: Path, stop: threading.Event) -> tuple[int, str]:
    """Ninja's exit status and what it printed."""
    environment = {k: v for k, v in os.environ.items() if k != "NINJA_STATUS"}
    # A group of its own: a Ctrl-C is this process's, whose `stop` ends ninja.
    running = subprocess.Popen(
        [ninja(), "-C", str(folder), "--quiet"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        process_group=0,
    )
    interrupt = None
    while running.returncode is None:
        try:
            output, _ = running.communicate(timeout=0.1)
        except subprocess.TimeoutExpired:
            if stop.is_set():
                running.terminate()  # again and again: ninja forgets a signal that comes while it starts a compiler
        except KeyboardInterrupt as error:
            interrupt = error
            stop.set()
    if interrupt:
        raise interrupt
    return running.returncode, output


def _kernel(unit: Unit, compiler: platform.Compiler, path: Path, may_spill: bool) -> Kernel:
    library = path.read_bytes()
    requires = {"system": "linux", **_libc(library)}
    if unit.target not in CUDA_TARGETS:
        return Kernel(path, compiler.version, {"cpu": unit.target, **requires})
    resources = cubin.report(
        library, path.with_name("ptxas.log").read_text(), LAUNCH_REGISTERS, unit.traced or may_spill
    )
    # Machine code runs on every driver for the same CUDA generation; the grid is one block an SM.
    cuda = compiler.version.partition(".")[0] + ".0"
    needs: dict[str, object] = {"gpu": unit.target, "cuda": cuda, "sms": GRID[unit.target]}
    return Kernel(path, f"nvcc {compiler.version}", {**needs, **requires}, resources)


def _libc(library: bytes) -> dict[str, object]:
    """{"glibc": the oldest with every symbol the library asks for}, by the version names in its string table."""
    found = re.findall(rb"\0GLIBC_([0-9]+(?:\.[0-9]+)+)(?=\0)", library)
    newest = max((tuple(int(n) for n in version.split(b".")) for version in found), default=None)
    return {"glibc": ".".join(map(str, newest))} if newest else {}


def _failure(output: str) -> Exception:
    # The kernel's out-of-memory killer leaves no word of its own: the driver only says that a stage was killed.
    killed = ("killed", "signal terminated", "died due to signal", "out of memory")
    if any(word in output.lower() for word in killed):
        return InternalError(
            "the compiler was killed, most likely for lack of memory; close other programs, then build again"
        )
    if "No space left on device" in output:
        return UserError("the compiler ran out of disk space; free some or choose another folder with --output")
    tail = "\n".join(output.strip().splitlines()[-20:])
    return InternalError(f"the kernel did not compile:\n{tail}")
