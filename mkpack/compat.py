"""Which of an artifact's kernels this machine runs, and everything that keeps it from running the others.

A kernel's `requires` (manifest.json) says what its machine must have. Its keys: `system` ("linux"), `cpu` (an x86-64
level), `gpu` ("sm_90a"), `glibc` ("2.34", the oldest), `cuda` ("13.0", the oldest CUDA release the driver must be for)
and `sms` (multiprocessors it was compiled for, at least). A key that is absent asks for nothing.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from mkpack import platform
from mkpack.manifest import LayoutName, Manifest, shown

_KINDS: dict[LayoutName, str] = {"cpu": "cpu", "cuda": "gpu"}
_KNOWN = ("system", "cpu", "gpu", "glibc", "cuda", "sms")


def choose_target(manifest: Manifest, wanted: str | None = None) -> tuple[str | None, list[str]]:
    """The best of the artifact's kernels that this machine runs: a GPU's before a CPU's, the higher CPU level first.
    wanted: only this target, or with "cpu" or "gpu" only those of the kind.

    Without one: None, and every mismatch of every kernel, a text each.
    """
    asked = {t: k for t, k in sorted(manifest.kernels.items()) if wanted in (None, t) or _KINDS[k.layout] == wanted}
    if wanted is not None and not asked:
        has = ", ".join(sorted(manifest.kernels)) or "none"
        return None, [f"target {shown(wanted)}: the artifact has no such kernel, it has {has}"]
    found = {target: mismatches(target, kernel.requires) for target, kernel in asked.items()}
    fitting = [target for target, problems in found.items() if not problems]
    if fitting:
        return min(fitting, key=_rank), []
    if sys.platform != "linux":
        return None, [f"kernels are for Linux, this is {sys.platform}; run the artifact on Linux"]
    here = ", ".join(platform.cpu_levels()) or "mkpack has none yet"
    has = ", ".join(found) or "none"
    first = f"no kernel for this machine: the artifact has {has}; it needs a target that runs here ({here})"
    if wanted is not None:
        first = f"target {shown(wanted)} does not run on this machine"
    return None, [first, *(problem for problems in found.values() for problem in problems)]


def gpu_targets() -> list[str]:
    """The GPU targets of this version that this machine's GPU runs."""
    from mkpack.layout_cuda import GRID

    return [target for target, sms in GRID.items() if not mismatches(target, {"sms": sms})]


def mismatches(target: str, requires: Mapping[str, Any]) -> list[str]:
    """Everything the kernel needs and this machine lacks, a text each; empty when it runs here."""
    if sys.platform != "linux":
        return [f"{target} is for Linux, this is {sys.platform}"]
    found = [f"{target} {problem}" for problem in _needs(_level(target, requires), _gpu(target, requires), requires)]
    unknown = [shown(key) for key in sorted(requires) if key not in _KNOWN]
    if unknown:
        found.append(f"{target} has requirements this version does not know ({', '.join(unknown)}); upgrade mkpack")
    return found


def _rank(target: str) -> int:
    return platform.CPU_TARGETS.index(target) if target in platform.CPU_TARGETS else -1


def _level(target: str, requires: Mapping[str, Any]) -> str | None:
    level = requires.get("cpu", target)
    return level if level in platform.CPU_TARGETS else None


def _gpu(target: str, requires: Mapping[str, Any]) -> str | None:
    gpu = requires.get("gpu", target)
    return gpu if isinstance(gpu, str) and re.fullmatch(r"sm_[0-9]{2,3}[af]?", gpu) else None


def _needs(level: str | None, gpu: str | None, requires: Mapping[str, Any]) -> Iterator[str]:
    if level is None and gpu is None:
        yield "is no target that this version of mkpack knows; upgrade mkpack"
        return
    machine = platform.machine()
    if machine not in ("x86_64", "AMD64"):
        yield f"is for x86-64, this machine is {machine}"
    elif level and level not in platform.cpu_levels():
        yield f"needs {', '.join(platform.missing_features(level))}, which this CPU lacks"
    oldest, libc = requires.get("glibc"), platform.glibc()
    if oldest is not None and (libc is None or _version(libc) < _version(oldest)):
        yield f"needs glibc {shown(oldest)} or newer, found {libc or 'another C library'}"
    if gpu:
        yield from _gpu_needs(gpu, requires)


def _gpu_needs(gpu: str, requires: Mapping[str, Any]) -> Iterator[str]:
    digits = gpu.removeprefix("sm_").rstrip("af")
    wanted = f"{digits[:-1]}.{digits[-1]}"
    driver = platform.cuda_driver()
    if driver is None:
        yield f"needs an NVIDIA GPU of compute capability {wanted}; this machine has no working NVIDIA driver"
        return
    cuda = requires.get("cuda")
    if cuda is not None and _version(driver.cuda) < _version(cuda):
        yield f"needs an NVIDIA driver for CUDA {shown(cuda)} or newer, this one is for CUDA {driver.cuda}; update it"
    first = driver.devices[0] if driver.devices else None  # the one that a kernel takes
    sms = requires.get("sms")
    if first is None or first.capability != wanted:
        have = ", ".join(f"{d.capability} ({d.name})" for d in driver.devices) or "no GPU"
        later = any(device.capability == wanted for device in driver.devices)
        how = "; the first is taken, so put the right one first in CUDA_VISIBLE_DEVICES" if later else ""
        yield f"needs an NVIDIA GPU of compute capability {wanted}, found {have}{how}"
    elif isinstance(sms, int) and first.multiprocessors < sms:
        yield f"is compiled for {sms} multiprocessors, the GPU ({first.name}) has {first.multiprocessors}"


def _version(text: object) -> tuple[int, ...]:
    """The numbers of a version; a text without any is older than all."""
    return tuple(int(n) for n in re.findall(r"[0-9]{1,9}", str(text))[:3])
