"""This machine: processor level, cores, memory, disk, GPUs and compilers. Nothing here imports anything heavy."""

from __future__ import annotations

import os
import platform as _platform
import shlex
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from mkpack.errors import UserError

# The x86-64 psABI's microarchitecture levels, in the names /proc/cpuinfo uses (pni is SSE3, abm is LZCNT). Each level
# also needs everything of the one before it.
_LEVEL_FLAGS: dict[str, tuple[str, ...]] = {
    "x86-64-v2": ("cx16", "lahf_lm", "popcnt", "pni", "sse4_1", "sse4_2", "ssse3"),
    "x86-64-v3": ("avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe", "xsave"),
    "x86-64-v4": ("avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"),
}
# What mkpack compiles for, best first.
CPU_TARGETS = ("x86-64-v4", "x86-64-v3")


@dataclass(frozen=True)
class Gpu:
    """One NVIDIA GPU. capability: "9.0"; memory in bytes, None when the driver does not tell."""

    name: str
    capability: str
    memory: int | None
    driver: str


@dataclass(frozen=True)
class CudaDevice:
    """One GPU that CUDA shows to this process. capability: "9.0"."""

    name: str
    capability: str
    multiprocessors: int


@dataclass(frozen=True)
class CudaDriver:
    """NVIDIA's driver as a process sees it: the CUDA release it is for ("13.0"), and its GPUs."""

    cuda: str
    devices: tuple[CudaDevice, ...]


@dataclass(frozen=True)
class Compiler:
    """A compiler that runs. command: how to call it ($CXX may hold a launcher); version: the first line it prints."""

    command: tuple[str, ...]
    version: str

    @property
    def path(self) -> str:
        return self.command[0]


def machine() -> str:
    """Processor architecture as the kernel names it: "x86_64", "aarch64"."""
    return _platform.machine()


def cpu_levels() -> list[str]:
    """CPU targets this machine can run, best first; empty when it is no x86-64 or an older one."""
    return [level for level in CPU_TARGETS if not missing_features(level)]


def missing_features(level: str) -> list[str]:
    """The /proc/cpuinfo flags that CPU target `level` needs and this machine lacks, in the psABI's order.

    Raises ValueError when `level` is not one of CPU_TARGETS.
    """
    if level not in CPU_TARGETS:
        raise ValueError(f"{level} is not a CPU target ({', '.join(CPU_TARGETS)})")
    have = _cpu_flags()
    missing: list[str] = []
    for name, flags in _LEVEL_FLAGS.items():
        missing += [flag for flag in flags if flag not in have]
        if name == level:
            break
    return missing


def _cpu_flags() -> frozenset[str]:
    for line in _read("/proc/cpuinfo").splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "flags":
            return frozenset(value.split())
    return frozenset()


def cores() -> int:
    """Cores this process may keep busy: its affinity mask, or the control group's CPU quota when that is lower."""
    try:
        count = len(os.sched_getaffinity(0))
    except AttributeError:  # not Linux
        count = os.cpu_count() or 1
    quota = _cpu_quota()
    # Rounded down: one thread more than the quota pays for is stopped in the middle of a barrier.
    return count if quota is None else max(1, min(count, int(quota)))


def _cgroup_folders(controller: str) -> list[Path]:
    """This process's control group folders for `controller` and all above them (version 2, then version 1)."""
    found: list[Path] = []
    for line in _read("/proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root = Path("/sys/fs/cgroup")
        elif controller in controllers.split(","):
            root = Path("/sys/fs/cgroup") / controller
        else:
            continue
        # In a container the path may be the host's: folders that are not there are skipped by the readers.
        folder = root / path.lstrip("/")
        found += [folder, *(p for p in folder.parents if p == root or root in p.parents)]
    return found


def _cpu_quota() -> float | None:
    quotas = []
    for folder in _cgroup_folders("cpu"):
        words = _read(folder / "cpu.max").split()
        if not words:
            words = [_read(folder / "cpu.cfs_quota_us").strip(), _read(folder / "cpu.cfs_period_us").strip()]
        if len(words) == 2 and words[0].isdigit() and words[1].isdigit() and int(words[1]):
            quotas.append(int(words[0]) / int(words[1]))
    return min(quotas, default=None)


def total_memory() -> int:
    """Bytes of memory this process may use: the machine's, or the control group's limit when that is lower."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for folder in _cgroup_folders("memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            limit = _read(folder / name).strip()
            if limit.isdigit():
                total = min(total, int(limit))
    return total


def free_disk(path: str | os.PathLike[str]) -> int:
    """Bytes free for this user where `path` is or would be created."""
    folder = Path(path).absolute()
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def punch_hole(fd: int, offset: int, length: int) -> bool:
    """Gives the disk of a part of a file back; the part then reads as zeros. False where the file system cannot."""
    import ctypes

    try:
        fallocate = ctypes.CDLL(None, use_errno=True).fallocate64
    except (OSError, AttributeError):  # no glibc
        return False
    fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    keep_size, punch = 1, 2  # FALLOC_FL_ flags of the kernel
    return fallocate(fd, keep_size | punch, offset, length) == 0


def can_punch_holes(folder: str | os.PathLike[str]) -> bool:
    """Whether the file system of `folder` can give back parts of a file."""
    import tempfile

    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(1 << 16))
            file.flush()
            return punch_hole(file.fileno(), 0, 1 << 16)
    except OSError:
        return False


def glibc() -> str | None:
    """Version of the C library ("2.36"), None when it is not glibc."""
    try:
        text = os.confstr("CS_GNU_LIBC_VERSION")
    except (AttributeError, ValueError, OSError):
        return None
    return text.split()[-1] if text else None


def gpus() -> list[Gpu]:
    """The NVIDIA GPUs the driver shows; empty when there is no driver, no GPU or no answer. Never raises."""
    query = "--query-gpu=name,compute_cap,memory.total,driver_version"
    text = _output(["nvidia-smi", query, "--format=csv,noheader,nounits"], timeout=5)
    found = []
    for line in (text or "").splitlines():
        words = [word.strip() for word in line.rsplit(",", 3)]
        if len(words) == 4:
            name, capability, memory, driver = words
            found.append(Gpu(name, capability, int(memory) << 20 if memory.isdigit() else None, driver))
    return found


def cuda_driver() -> CudaDriver | None:
    """What libcuda.so.1 says of itself and of the GPUs this process may use; None without a working driver.

    Unlike gpus() it heeds CUDA_VISIBLE_DEVICES. Never raises.
    """
    import ctypes

    try:
        cuda = ctypes.CDLL("libcuda.so.1")
        number, name = ctypes.c_int(), ctypes.create_string_buffer(256)

        def ask(function: str, *words: object) -> int:
            if getattr(cuda, function)(ctypes.byref(number), *words):
                raise OSError(f"{function} failed")
            return number.value

        if cuda.cuInit(0):
            return None
        release = ask("cuDriverGetVersion")
        devices = []
        for i in range(ask("cuDeviceGetCount")):
            device = ask("cuDeviceGet", i)
            cuda.cuDeviceGetName(name, len(name), device)
            # The numbers are CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, _MINOR and _MULTIPROCESSOR_COUNT.
            major, minor, count = (ask("cuDeviceGetAttribute", attribute, device) for attribute in (75, 76, 16))
            devices.append(CudaDevice(name.value.decode(errors="replace"), f"{major}.{minor}", count))
    except (OSError, AttributeError):
        return None
    return CudaDriver(f"{release // 1000}.{release % 1000 // 10}", tuple(devices))


def compiler() -> Compiler | None:
    """The C++ compiler: $CXX when it is set (then nothing else), else g++, else clang++; None when none runs."""
    chosen = os.environ.get("CXX", "").strip()
    candidates = [shlex.split(chosen)] if chosen else [["g++"], ["clang++"]]
    for command in candidates:
        found = _compiler(command)
        if found:
            return found
    return None


def nvcc() -> Compiler | None:
    """CUDA's compiler: in $CUDA_HOME, on the PATH, or in /usr/local/cuda; its version is the release ("13.0")."""
    home = os.environ.get("CUDA_HOME")
    for command in ([f"{home}/bin/nvcc"] if home else []) + ["nvcc", "/usr/local/cuda/bin/nvcc"]:
        path = shutil.which(command)
        text = _output([path, "--version"], timeout=10) if path else None
        if path and text and "release " in text:
            return Compiler((path,), text.split("release ", 1)[1].split(",")[0].strip())
    return None


def supports(found: Compiler, level: str) -> bool:
    """Whether the compiler knows -march=`level` (g++ and clang++ do since 11 and 12)."""
    command = [*found.command, f"-march={level}", "-x", "c++", "-fsyntax-only", os.devnull]
    return _output(command, timeout=20) is not None


def resolve_target(target: str) -> str:
    """The target itself, or for "native" the best CPU target this machine runs and its compiler makes.

    Raises UserError when "native" means none: no x86-64-v3 processor, no compiler, or one that is too old.
    """
    if target != "native":
        return target
    levels = cpu_levels()
    if not levels:
        lowest = CPU_TARGETS[-1]
        if machine() not in ("x86_64", "AMD64"):
            raise UserError(
                f"target native: this machine is {machine()}, and the CPU targets are {', '.join(CPU_TARGETS)}; "
                "name the target to build for instead"
            )
        raise UserError(
            f"target native: this processor lacks {', '.join(missing_features(lowest))}, which {lowest}, the lowest "
            "CPU target, needs; name the target to build for instead"
        )
    found = compiler()
    if found is None:
        raise UserError(f"target native: {no_compiler()}")
    for level in levels:
        if supports(found, level):
            return level
    raise UserError(
        f"target native: the compiler {' '.join(found.command)} ({found.version}) does not know -march={levels[-1]}; "
        "use g++ 11 or clang++ 12 or newer, and point CXX at it"
    )


def no_compiler() -> str:
    """Why compiler() found nothing, and what to do."""
    chosen = os.environ.get("CXX", "").strip()
    if chosen:
        return f"CXX is {chosen!r}, which does not run; unset it or point it at g++ 11 or clang++ 12 or newer"
    return "no C++ compiler (g++ or clang++) on the PATH; install one (Debian, Ubuntu: apt-get install g++)"


def _compiler(command: list[str]) -> Compiler | None:
    path = shutil.which(command[0]) if command else None
    text = _output([path, *command[1:], "--version"], timeout=10) if path else None
    if path is None or not text or not text.strip():
        return None
    return Compiler((path, *command[1:]), text.strip().splitlines()[0].strip())


def _output(command: list[str], timeout: float) -> str | None:
    """Standard output of a command that ended with 0 in time, else None."""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout, encoding="utf-8", errors="replace"
        )
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def _read(path: str | Path) -> str:
    """Text of a small file of the kernel, '' when it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
