import os
import stat
from pathlib import Path

import pytest

from mkpack import platform
from mkpack.errors import UserError

V2 = "cx16 lahf_lm popcnt pni sse4_1 sse4_2 ssse3"
V3 = V2 + " avx avx2 bmi1 bmi2 f16c fma abm movbe xsave"
V4 = V3 + " avx512f avx512bw avx512cd avx512dq avx512vl"


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The kernel's files as a dict: what is not in it cannot be read."""
    texts: dict[str, str] = {}
    monkeypatch.setattr(platform, "_read", lambda path: texts.get(str(path), ""))
    return texts


def program(folder: Path, name: str, script: str) -> Path:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


@pytest.mark.parametrize(
    ("flags", "levels"),
    [(V4, ["x86-64-v4", "x86-64-v3"]), (V3, ["x86-64-v3"]), (V2, []), ("", [])],
)
def test_levels_are_the_psabi_sets(files: dict[str, str], flags: str, levels: list[str]) -> None:
    files["/proc/cpuinfo"] = f"processor\t: 0\nflags\t\t: fpu {flags}\nbugs\t: spectre\n"
    assert platform.cpu_levels() == levels


@pytest.mark.parametrize("flag", V3.split())
def test_every_flag_of_a_level_counts(files: dict[str, str], flag: str) -> None:
    have = " ".join(f for f in V4.split() if f != flag)
    files["/proc/cpuinfo"] = f"flags : {have}\n"
    assert platform.missing_features("x86-64-v3") == [flag]
    assert platform.cpu_levels() == []


def test_v4_misses_only_avx512_on_a_v3_machine(files: dict[str, str]) -> None:
    files["/proc/cpuinfo"] = f"flags : {V3} avx512f\n"
    assert platform.missing_features("x86-64-v4") == ["avx512bw", "avx512cd", "avx512dq", "avx512vl"]


def test_other_targets_have_no_features() -> None:
    with pytest.raises(ValueError, match="sm_90a is not a CPU target"):
        platform.missing_features("sm_90a")


def test_cores_follow_the_affinity(files: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 7, 9}, raising=False)
    assert platform.cores() == 3


@pytest.mark.parametrize(
    ("quota", "count"), [("max 100000", 8), ("250000 100000", 2), ("50000 100000", 1), ("9900000 100000", 8)]
)
def test_cores_follow_the_quota(files: dict[str, str], monkeypatch: pytest.MonkeyPatch, quota: str, count: int) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    files["/proc/self/cgroup"] = "0::/pod/box\n"
    files["/sys/fs/cgroup/pod/box/cpu.max"] = "max 100000\n"
    files["/sys/fs/cgroup/pod/cpu.max"] = quota + "\n"
    assert platform.cores() == count


def test_cores_follow_a_version_1_quota(files: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    files["/proc/self/cgroup"] = "5:cpu,cpuacct:/box\n0::/\n"
    files["/sys/fs/cgroup/cpu/box/cpu.cfs_quota_us"] = "300000\n"
    files["/sys/fs/cgroup/cpu/box/cpu.cfs_period_us"] = "100000\n"
    assert platform.cores() == 3
    files["/sys/fs/cgroup/cpu/box/cpu.cfs_quota_us"] = "-1\n"
    assert platform.cores() == 8


def test_memory_is_the_lower_of_machine_and_group(files: dict[str, str]) -> None:
    whole = platform.total_memory()
    assert whole == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    files["/proc/self/cgroup"] = "0::/box\n"
    files["/sys/fs/cgroup/box/memory.max"] = "max\n"
    files["/sys/fs/cgroup/memory.max"] = "1048576\n"
    assert platform.total_memory() == 1 << 20


def test_free_disk_of_a_folder_that_is_not_there(tmp_path: Path) -> None:
    assert platform.free_disk(tmp_path / "not" / "yet") > 0


def test_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(
        tmp_path,
        "nvidia-smi",
        "echo 'NVIDIA H200, 9.0, 143771, 580.65.06'\necho 'NVIDIA Tiny, 12.1, [N/A], 580.65.06'",
    )
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    first, second = platform.gpus()
    assert first == platform.Gpu("NVIDIA H200", "9.0", 143771 << 20, "580.65.06")
    assert second.memory is None


@pytest.mark.parametrize("script", ["echo 'No devices were found'; exit 6", "echo nonsense", "printf '\\377, 1, 2'"])
def test_gpus_never_raise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    program(tmp_path, "nvidia-smi", script)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert platform.gpus() == []


def test_compiler_is_cxx_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = program(tmp_path, "launch", 'echo "ran $*"')
    monkeypatch.setenv("CXX", f"{launcher} g++ -m64")
    found = platform.compiler()
    assert found is not None
    assert found.command == (str(launcher), "g++", "-m64") and found.path == str(launcher)
    assert found.version == "ran g++ -m64 --version"
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert platform.compiler() is None
    assert "CXX is 'no-such-compiler'" in platform.no_compiler()


def test_clang_when_there_is_no_gcc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    clang = program(tmp_path, "clang++", "echo clang version 19.1.0")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert platform.compiler() == platform.Compiler((str(clang),), "clang version 19.1.0")


def test_nvcc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bin").mkdir()
    path = program(tmp_path / "bin", "nvcc", "echo 'Cuda compilation tools, release 13.0, V13.0.88'")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert platform.nvcc() == platform.Compiler((str(path),), "13.0")


def test_a_named_target_is_itself() -> None:
    assert platform.resolve_target("sm_90a") == "sm_90a"


def test_native_is_the_best_that_machine_and_compiler_share(
    files: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files["/proc/cpuinfo"] = f"flags : {V4}\n"
    compiler = program(tmp_path, "cxx", "echo test compiler 12")
    monkeypatch.setenv("CXX", str(compiler))
    assert platform.resolve_target("native") == "x86-64-v4"
    program(tmp_path, "cxx", 'case "$*" in *x86-64-v4*) exit 1;; esac\necho test compiler 10')
    assert platform.resolve_target("native") == "x86-64-v3"
    program(tmp_path, "cxx", 'case "$*" in *march*) exit 1;; esac\necho test compiler 9')
    with pytest.raises(UserError, match=r"\(test compiler 9\) does not know -march=x86-64-v3"):
        platform.resolve_target("native")


def test_native_says_what_is_missing(files: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    files["/proc/cpuinfo"] = "flags : " + " ".join(f for f in V3.split() if f not in ("avx2", "fma")) + "\n"
    with pytest.raises(UserError, match="lacks avx2, fma, which x86-64-v3"):
        platform.resolve_target("native")
    files["/proc/cpuinfo"] = f"flags : {V3}\n"
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(UserError, match="does not run; unset it"):
        platform.resolve_target("native")
    files["/proc/cpuinfo"] = ""
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    with pytest.raises(UserError, match="this machine is aarch64"):
        platform.resolve_target("native")


def test_a_command_that_hangs_is_given_up(tmp_path: Path) -> None:
    sleeper = program(tmp_path, "sleeper", "exec sleep 30")
    assert platform._output([str(sleeper)], timeout=0.2) is None


def test_a_hole_gives_its_disk_back(tmp_path: Path) -> None:
    if not platform.can_punch_holes(tmp_path):
        pytest.skip("this file system keeps every block of a file")
    path = tmp_path / "file"
    path.write_bytes(b"x" * (1 << 20))
    before = path.stat().st_blocks
    with open(path, "r+b") as file:
        assert platform.punch_hole(file.fileno(), 4096, 1 << 19)
    assert path.stat().st_size == 1 << 20 and path.stat().st_blocks <= before - (1 << 19) // 512
    assert path.read_bytes() == b"x" * 4096 + bytes(1 << 19) + b"x" * ((1 << 19) - 4096)


def test_where_holes_cannot_be_punched(tmp_path: Path) -> None:
    assert not platform.can_punch_holes(tmp_path / "absent")
    read, write = os.pipe()
    try:
        assert not platform.punch_hole(write, 0, 4096)
    finally:
        os.close(read)
        os.close(write)
