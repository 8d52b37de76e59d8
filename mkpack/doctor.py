"""`mkpack doctor`: what works on this machine, what is missing and how to get it."""

from __future__ import annotations

import json
import os
import shutil
import sys
import threading
import urllib.error
import urllib.request
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Literal

from mkpack import platform

State = Literal["ok", "warn", "missing"]

_BUILD_EXTRA = 'pip install "mkpack[build]"'
_HUB_TIMEOUT_S = 4.0
_LITTLE_DISK = 10 << 30
_LITTLE_MEMORY = 4 << 30


@dataclass(frozen=True)
class Row:
    """One thing looked at: what was found, and (unless ok) how to get it."""

    name: str
    state: State
    found: str
    fix: str = ""


@dataclass(frozen=True)
class Ability:
    """Something a user may want to do here; `lacking` names the rows that stand in its way."""

    name: str
    lacking: tuple[str, ...]

    @property
    def works(self) -> bool:
        return not self.lacking


@dataclass(frozen=True)
class Diagnosis:
    rows: tuple[Row, ...]
    abilities: tuple[Ability, ...]

    @property
    def exit_code(self) -> int:
        """0 when artifacts can run here, else 1."""
        return 0 if self.abilities[0].works else 1

    def render(self) -> str:
        """Plain text, a row a line."""
        lines = [f"{r.state:8}{r.name:18}{r.found}" + (f"  ->  {r.fix}" if r.fix else "") for r in self.rows]
        return "\n".join([*lines, "", *self.conclusions()])

    def conclusions(self) -> list[str]:
        return [
            f"{a.name}: " + ("works here" if a.works else f"does not work here (see {', '.join(a.lacking)})")
            for a in self.abilities
        ]

    def to_json(self) -> str:
        abilities = {a.name: {"works": a.works, "lacking": a.lacking} for a in self.abilities}
        return json.dumps({"rows": [asdict(r) for r in self.rows], "abilities": abilities}, indent=2)


def diagnose() -> Diagnosis:
    """Looks at this machine. Takes a few seconds at most, imports nothing heavy, raises nothing."""
    rows = [
        _system(),
        _cpu(),
        Row("cores", "ok", f"{platform.cores()} for this process"),
        _memory(),
        _compiler(),
        _ninja(),
        _package("torch"),
        _package("nvidia-modelopt"),
        _package("safetensors"),
        _package("requests"),
        _gpu(),
        _nvcc(),
        _hub(),
        _cache_disk(),
    ]
    # A GPU that no kernel is for is there, and as good as missing.
    bad = [r.name for r in rows if r.state == "missing" or (r.name == "GPU" and r.state != "ok")]

    def ability(name: str, *needs: str) -> Ability:
        return Ability(name, tuple(n for n in needs if n in bad))

    build = ("compiler", "ninja", "torch", "nvidia-modelopt", "safetensors", "requests")
    abilities = (
        ability("run CPU artifacts", "system", "CPU features"),
        ability("build CPU artifacts", "system", *build),
        ability("run GPU artifacts", "system", "GPU"),
        ability("build GPU artifacts", "system", *build, "nvcc"),
        ability("download from the hub", "hub"),
    )
    return Diagnosis(tuple(rows), abilities)


def show(diagnosis: Diagnosis) -> None:
    """Prints to standard output: a table on a terminal, plain lines otherwise."""
    if not sys.stdout.isatty():
        print(diagnosis.render())
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    colours = {"ok": "green", "warn": "yellow", "missing": "red"}
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("", "", "found", "how to get it"):
        table.add_column(title, overflow="fold")
    for row in diagnosis.rows:
        table.add_row(Text(row.state, colours[row.state]), Text(row.name), Text(row.found), Text(row.fix))
    console = Console()
    console.print(table)
    console.print()
    for ability, line in zip(diagnosis.abilities, diagnosis.conclusions(), strict=True):
        console.print(Text(line, "green" if ability.works else "yellow"))


def _system() -> Row:
    glibc = platform.glibc()
    found = f"{sys.platform} {platform.machine()}, Python {sys.version.split()[0]}"
    if sys.platform == "linux" and glibc:
        return Row("system", "ok", f"{found}, glibc {glibc}")
    return Row("system", "missing", found, "artifacts run on Linux with glibc")


def _cpu() -> Row:
    levels = platform.cpu_levels()
    if not levels:
        lowest = platform.CPU_TARGETS[-1]
        lacks = ", ".join(platform.missing_features(lowest))
        return Row("CPU features", "missing", f"lacks {lacks}", f"CPU artifacts need an {lowest} processor")
    return Row("CPU features", "ok", ", ".join(levels))


def _memory() -> Row:
    total = platform.total_memory()
    little = total < _LITTLE_MEMORY
    return Row("memory", "warn" if little else "ok", _gb(total), "an artifact's weights must fit" if little else "")


def _compiler() -> Row:
    found = platform.compiler()
    if found is None:
        return Row("compiler", "missing", "none", platform.no_compiler())
    unknown = [level for level in platform.CPU_TARGETS if not platform.supports(found, level)]
    text = f"{found.version} ({' '.join(found.command)})"
    if unknown:
        return Row(
            "compiler",
            "missing" if platform.CPU_TARGETS[-1] in unknown else "warn",
            f"{text}, which does not know -march={', '.join(unknown)}",
            "g++ 11 or clang++ 12 or newer; point CXX at it",
        )
    return Row("compiler", "ok", text)


def _ninja() -> Row:
    path = shutil.which("ninja")
    if path:
        return Row("ninja", "ok", path)
    return _package("ninja")


def _package(name: str) -> Row:
    try:
        return Row(name, "ok", version(name))
    except PackageNotFoundError:
        return Row(name, "missing", "not installed", _BUILD_EXTRA)


def _gpu() -> Row:
    gpus = platform.gpus()
    if not gpus:
        return Row("GPU", "missing", "none by nvidia-smi", "an NVIDIA GPU and its driver (CPU targets need none)")
    cards = [f"{g.name} (sm_{g.capability.replace('.', '')}{', ' + _gb(g.memory) if g.memory else ''})" for g in gpus]
    found, driver = f"{', '.join(cards)}, driver {gpus[0].driver}", platform.cuda_driver()
    if driver is None or not driver.devices:
        fix = "look at CUDA_VISIBLE_DEVICES, and at the driver's libcuda.so.1 (in a container: is the GPU given to it?)"
        return Row("GPU", "missing", f"{found}; none that CUDA shows this process", fix)
    from mkpack.compat import gpu_targets, mismatches
    from mkpack.layout_cuda import GRID

    runs, first = gpu_targets(), driver.devices[0]
    what = f"runs {', '.join(runs)}" if runs else "runs no target of this version"
    problems = "" if runs else "; ".join(p for t, sms in GRID.items() for p in mismatches(t, {"sms": sms}))
    found += f" for CUDA {driver.cuda}; first: {first.multiprocessors} SMs, {what}"
    return Row("GPU", "ok" if runs else "warn", found, problems)


def _nvcc() -> Row:
    found = platform.nvcc()
    if found is None:
        return Row("nvcc", "missing", "none", "the CUDA toolkit, with CUDA_HOME or the PATH pointing at it")
    return Row("nvcc", "ok", f"CUDA {found.version} ({found.path})")


def _hub() -> Row:
    from huggingface_hub import constants, get_token

    if constants.HF_HUB_OFFLINE:
        return Row("hub", "missing", "switched off by HF_HUB_OFFLINE", "unset HF_HUB_OFFLINE")
    endpoint = constants.ENDPOINT
    problem = _reach(endpoint)
    if problem:
        return Row("hub", "missing", f"{endpoint}: {problem}", "check the network, the proxy variables and HF_ENDPOINT")
    token = "with a token" if get_token() else "no token (only private and gated repos need one: hf auth login)"
    return Row("hub", "ok", f"{endpoint} answers, {token}")


def _reach(url: str) -> str | None:
    """None when an HTTP server answers at `url`, else what went wrong."""
    problems: list[str] = []
    answered = threading.Event()

    def ask() -> None:
        request = urllib.request.Request(url, method="HEAD", headers={"User-Agent": "mkpack"})
        try:
            urllib.request.urlopen(request, timeout=_HUB_TIMEOUT_S).close()
        except urllib.error.HTTPError:
            pass  # an answer all the same
        except (OSError, ValueError) as error:
            problems.append(str(getattr(error, "reason", error)))
        answered.set()

    # The socket's timeout does not cover the name look-up, so the whole is waited for from outside.
    threading.Thread(target=ask, daemon=True).start()
    if not answered.wait(_HUB_TIMEOUT_S):
        return f"no answer in {_HUB_TIMEOUT_S:.0f} s"
    return problems[0] if problems else None


def _cache_disk() -> Row:
    from huggingface_hub import constants

    folder = os.fspath(constants.HF_HUB_CACHE)
    free = platform.free_disk(folder)
    little = free < _LITTLE_DISK
    fix = "make room, or point HF_HOME at a larger disk" if little else ""
    return Row("hub cache", "warn" if little else "ok", f"{_gb(free)} free at {folder}", fix)


def _gb(count: int) -> str:
    return f"{count / 1e9:.1f} GB"
