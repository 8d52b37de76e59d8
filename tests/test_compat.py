"""Which kernel a machine gets, and what it is told when it gets none."""

from __future__ import annotations

import sys

import artifacts
import pytest

from mkpack import compat, platform
from mkpack.manifest import Manifest
from mkpack.platform import CudaDevice, CudaDriver

H200 = CudaDevice("NVIDIA H200", "9.0", 132)


@pytest.fixture
def machine(monkeypatch):
    """machine(...) plays a machine: an AVX2 one with glibc 2.36 and no GPU unless told otherwise."""

    def play(levels=("x86-64-v3",), arch="x86_64", glibc="2.36", driver=None, system="linux"):
        monkeypatch.setattr(platform, "cpu_levels", lambda: list(levels))
        monkeypatch.setattr(platform, "missing_features", lambda level: ["avx512f", "avx512bw"])
        monkeypatch.setattr(platform, "machine", lambda: arch)
        monkeypatch.setattr(platform, "glibc", lambda: glibc)
        monkeypatch.setattr(platform, "cuda_driver", lambda: driver)
        monkeypatch.setattr(sys, "platform", system)

    play()
    return play


def manifest(**kernels: dict) -> Manifest:
    """A manifest whose kernels have these requirements, "_" in a keyword standing for "-"."""
    files = {f"kernels/{name.replace('__', '-')}.so": b"so" for name in kernels}
    made = artifacts.manifest(artifacts.digests(files | {"weights/rank-0.bin": bytes(3 * 4096)}))
    found = {
        name.replace("__", "-"): made.kernels[name.replace("__", "-")].model_copy(update={"requires": requires})
        for name, requires in kernels.items()
    }
    return made.model_copy(update={"kernels": found})


def test_a_gpu_kernel_goes_before_a_cpu_kernel(machine):
    both = manifest(x86__64__v3={"cpu": "x86-64-v3", "system": "linux"}, sm_90a={"gpu": "sm_90a"})
    assert compat.choose_target(both) == ("x86-64-v3", [])
    machine(driver=CudaDriver("13.0", (H200,)))
    assert compat.choose_target(both) == ("sm_90a", [])


def test_the_higher_cpu_level_goes_first(machine):
    both = manifest(x86__64__v3={}, x86__64__v4={})
    assert compat.choose_target(both) == ("x86-64-v3", [])
    machine(levels=("x86-64-v4", "x86-64-v3"))
    assert compat.choose_target(both) == ("x86-64-v4", [])


def test_every_mismatch_of_every_kernel_is_told(machine):
    machine(glibc="2.31", driver=CudaDriver("12.4", (CudaDevice("NVIDIA H100 PCIe", "9.0", 114),)))
    target, problems = compat.choose_target(
        manifest(
            x86__64__v4={"cpu": "x86-64-v4", "glibc": "2.34"},
            sm_90a={"gpu": "sm_90a", "cuda": "13.0", "sms": 132, "glibc": "2.34"},
            sm_100a={"gpu": "sm_100a"},
        )
    )
    assert target is None
    assert problems == [
        "no kernel for this machine: the artifact has sm_100a, sm_90a, x86-64-v4; it needs a target that runs here "
        "(x86-64-v3)",
        "sm_100a needs an NVIDIA GPU of compute capability 10.0, found 9.0 (NVIDIA H100 PCIe)",
        "sm_90a needs glibc 2.34 or newer, found 2.31",
        "sm_90a needs an NVIDIA driver for CUDA 13.0 or newer, this one is for CUDA 12.4; update it",
        "sm_90a is compiled for 132 multiprocessors, the GPU (NVIDIA H100 PCIe) has 114",
        "x86-64-v4 needs avx512f, avx512bw, which this CPU lacks",
        "x86-64-v4 needs glibc 2.34 or newer, found 2.31",
    ]


@pytest.mark.parametrize(
    ("requires", "said"),
    [
        ({"glibc": "2.36"}, None),
        ({"glibc": "2.9"}, None),
        ({"glibc": "2.36.1"}, "needs glibc 2.36.1 or newer, found 2.36"),
        ({"quantum": 1}, "has requirements this version does not know (quantum); upgrade mkpack"),
    ],
)
def test_requirements_of_a_cpu_kernel(machine, requires, said):
    found = compat.mismatches("x86-64-v3", {"cpu": "x86-64-v3", "system": "linux", **requires})
    assert found == ([f"x86-64-v3 {said}"] if said else [])


def test_another_c_library(machine):
    machine(glibc=None)
    assert compat.mismatches("x86-64-v3", {"glibc": "2.34"}) == [
        "x86-64-v3 needs glibc 2.34 or newer, found another C library"
    ]


def test_no_driver_no_gpu_and_an_unknown_target(machine):
    assert "no working NVIDIA driver" in compat.mismatches("sm_90a", {})[0]
    machine(driver=CudaDriver("13.0", ()))
    assert "found no GPU" in compat.mismatches("sm_90a", {})[0]
    assert "upgrade mkpack" in compat.mismatches("riscv64", {})[0]


def test_the_first_gpu_is_taken(machine):
    b200 = CudaDevice("NVIDIA B200", "10.0", 148)
    machine(driver=CudaDriver("13.0", (b200, H200)))
    assert compat.mismatches("sm_100a", {"sms": 148}) == []
    assert compat.mismatches("sm_90a", {"sms": 132}) == [
        "sm_90a needs an NVIDIA GPU of compute capability 9.0, found 10.0 (NVIDIA B200), 9.0 (NVIDIA H200); the first "
        "is taken, so put the right one first in CUDA_VISIBLE_DEVICES"
    ]


def test_a_target_that_was_asked_for(machine):
    machine(levels=("x86-64-v4", "x86-64-v3"), driver=CudaDriver("13.0", (H200,)))
    found = manifest(x86__64__v3={}, x86__64__v4={}, sm_90a={}, sm_100a={})
    kernels = {t: k.model_copy(update={"layout": "cuda"} if "sm_" in t else {}) for t, k in found.kernels.items()}
    found = found.model_copy(update={"kernels": kernels})
    for wanted, target in (("cpu", "x86-64-v4"), ("gpu", "sm_90a"), ("x86-64-v3", "x86-64-v3"), (None, "sm_90a")):
        assert compat.choose_target(found, wanted) == (target, [])
    assert compat.choose_target(found, "sm_100a")[1] == [
        "target sm_100a does not run on this machine",
        "sm_100a needs an NVIDIA GPU of compute capability 10.0, found 9.0 (NVIDIA H200)",
    ]
    assert compat.choose_target(found, "sm_80") == (
        None,
        ["target sm_80: the artifact has no such kernel, it has sm_100a, sm_90a, x86-64-v3, x86-64-v4"],
    )


def test_another_architecture_and_another_system(machine):
    machine(levels=(), arch="aarch64")
    assert "is for x86-64, this machine is aarch64" in compat.mismatches("x86-64-v3", {})[0]
    machine(system="darwin")
    assert compat.choose_target(manifest(x86__64__v3={}))[1] == [
        "kernels are for Linux, this is darwin; run the artifact on Linux"
    ]


def test_this_machine_is_asked_without_raising():
    driver = platform.cuda_driver()
    assert driver is None or driver.cuda.count(".") == 1
