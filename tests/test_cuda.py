"""CUDA kernels without a GPU: they compile for every architecture, within registers and code size; layouts agree."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from cuda_models import cuda_spec

from mkpack import abi, compile, cubin, platform
from mkpack.codegen_cuda import cuda_header
from mkpack.compile import CUDA_TARGETS, Unit, compile_kernels, cuda_flags
from mkpack.errors import InternalError, UserError
from mkpack.layout_cuda import CudaLayout
from mkpack.manifest import Limits
from mkpack.spec import LayerSpec

HERE = Path(__file__).parent
LADDER = HERE / "bench" / "ladder"
NVCC = platform.nvcc()
needs_nvcc = pytest.mark.skipif(NVCC is None, reason="no nvcc in CUDA_HOME, on the PATH or in /usr/local/cuda")


def unit(target: str, name: str | None = None) -> Unit:
    """The shape the kernel was written for: Qwen3-30B-A3B."""
    layers = (LayerSpec(moe=True),) * 48
    layout = CudaLayout(cuda_spec(layers=layers, moe={"intermediate_size": 768}, vocab_size=151936))
    header = cuda_header(layout, Limits(context=8192, tokens_per_step=16), target)
    return Unit(name or target, target, header)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The model for every architecture, in a folder whose name needs escaping."""
    if NVCC is None:
        pytest.skip("nvcc is not here")
    folder = tmp_path_factory.mktemp("cuda") / "a $b: c"
    folder.mkdir()
    return compile_kernels([unit(t) for t in CUDA_TARGETS], folder)


@pytest.mark.parametrize("target", CUDA_TARGETS)
def test_resources_of_the_decode_kernel(built, target):
    kernel = built[target]
    assert kernel.requires == {"gpu": target, "system": "linux"}
    assert kernel.compiler == f"nvcc {NVCC.version}"
    assert [r.kernel for r in kernel.resources] == ["decode_kernel<0>", "logits_kernel", "read_all"]
    for r in kernel.resources:
        assert (r.arch, r.stack, r.spill_stores, r.spill_loads) == (target, 0, 0, 0)
    found = kernel.resources[0]
    # 640 threads share 65536 registers; shared memory of a block ends at 227 KB; the code must stay in its cache.
    assert 0 < found.registers <= 65536 // 640 // 8 * 8
    assert 200_000 < found.shared <= 227 << 10
    assert 20_000 < found.code < cubin.INSTRUCTION_CACHE
    assert re.search(r"\d+ registers, 0 B stack, 0 B spilled, .* KB of code \(\d+% of", found.render())


def test_only_the_contract_is_exported(built):
    done = subprocess.run(["nm", "-D", "--defined-only", built["sm_90a"].path], capture_output=True, text=True)
    if done.returncode:
        pytest.skip("no nm")
    assert {line.split()[-1] for line in done.stdout.splitlines()} == set(abi.FUNCTIONS)


def test_without_a_gpu_it_says_so(built):
    """Also where there is one: the test hides it."""
    script = (
        "import ctypes, sys\nfrom mkpack import abi\nfrom mkpack.native import Library\nimport json\n"
        "library = Library(open(sys.argv[1], 'rb').read(), 'the kernel')\n"
        "size = json.loads(library.describe())['weights_bytes']\n"
        "options = abi.Options((ctypes.c_void_p * 1)(4096), size, 1, 1, 0, 0, 2.0)\n"
        "code = library.lib.mk_create(ctypes.byref(options), ctypes.byref(ctypes.c_void_p()))\n"
        "print(code, library.error(code, 'starting the kernel'))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, built["sm_90a"].path],
        capture_output=True,
        text=True,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(HERE.parent)},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{abi.ERR_DEVICE} starting the kernel failed: device error: no GPU to run on")


def test_folders_do_not_change_a_byte(built, tmp_path, monkeypatch):
    copy = tmp_path / "else where" / "csrc"
    shutil.copytree(compile.sources(), copy)
    monkeypatch.setattr(compile, "sources", lambda: copy)
    again = compile_kernels([unit("sm_90a", name="another")], tmp_path)
    data = again["another"].path.read_bytes()
    assert data == built["sm_90a"].path.read_bytes()
    assert str(tmp_path).encode() not in data and b"else where" not in data


def test_spills_fail_the_build(built):
    path = built["sm_90a"].path
    log = path.with_name("ptxas.log").read_text()
    spilled = log.replace("0 bytes spill stores, 0 bytes spill loads", "80 bytes spill stores, 96 bytes spill loads")
    assert spilled != log
    with pytest.raises(InternalError, match=r"decode_kernel<0> for sm_90a spills 80 bytes in stores and 96 in loads"):
        cubin.report(path.read_bytes(), spilled)


def test_a_report_of_other_kernels_is_refused(built):
    path = built["sm_90a"].path
    log = path.with_name("ptxas.log").read_text()
    with pytest.raises(InternalError, match=r"tells of the kernels none, but .* holds decode_kernel<0>, logits"):
        cubin.report(path.read_bytes(), "")
    with pytest.raises(InternalError, match="tells of the kernels decade_kernel<0>, logits_kernel, read_all, but"):
        cubin.report(path.read_bytes(), log.replace("decode_kernel", "decade_kernel"))
    with pytest.raises(InternalError, match="cannot read what ptxas says"):
        cubin.report(path.read_bytes(), log.replace("registers", "colours"))


@needs_nvcc
def test_a_header_that_does_not_compile_is_quoted(tmp_path):
    bad = Unit("bad", "sm_90a", unit("sm_90a").header.replace("kNormTopkProb = true", "kNormTopkProb = false"))
    with pytest.raises(InternalError, match="not written for this model"):
        compile_kernels([bad], tmp_path)


def test_the_a_of_the_architecture_stays():
    for target in CUDA_TARGETS:
        number = target.removeprefix("sm_")
        assert number.endswith("a")
        assert cuda_flags(target)[-2:] == ["-gencode", f"arch=compute_{number},code=sm_{number}"]


def test_no_nvcc(tmp_path, monkeypatch):
    monkeypatch.setattr(platform, "nvcc", lambda: None)
    with pytest.raises(UserError, match=r"target sm_100a: nvcc is not here; install the CUDA toolkit, 12\.8 or newer"):
        compile_kernels([unit("sm_100a")], tmp_path)
    assert not list(tmp_path.iterdir())


def test_an_old_nvcc(tmp_path, monkeypatch):
    monkeypatch.setattr(platform, "nvcc", lambda: platform.Compiler(("/opt/nvcc",), "12.4"))
    with pytest.raises(UserError, match=r"sm_100a: needs nvcc of CUDA 12\.8 or newer, found 12\.4 \(/opt/nvcc\)"):
        compile_kernels([unit("sm_90a"), unit("sm_100a")], tmp_path)


def test_a_killed_nvcc(tmp_path, monkeypatch):
    path = tmp_path / "nvcc"
    path.write_text("#!/bin/sh\necho \"nvcc error   : 'cicc' died due to signal 9 (Kill signal)\" >&2; exit 9\n")
    path.chmod(0o755)
    monkeypatch.setattr(platform, "nvcc", lambda: platform.Compiler((str(path),), "13.0"))
    with pytest.raises(InternalError, match="the compiler was killed, most likely for lack of memory"):
        compile_kernels([unit("sm_90a")], tmp_path)


def test_ptxas_of_several_kernels():
    text = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z8read_allPKhl' for 'sm_90a'
ptxas info    : Function properties for _Z8read_allPKhl
    16 bytes stack frame, 0 bytes spill stores, 4 bytes spill loads
ptxas info    : Used 22 registers, used 1 barriers, 16 bytes cumulative stack size, 64 bytes smem
ptxas info    : Compiling entry function 'plain' for 'sm_90a'
ptxas info    : Function properties for plain
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 8 registers, used 0 barriers
"""
    assert list(cubin._read_ptxas(text, {"_Z8read_allPKhl": 640, "plain": 128})) == [
        cubin.Resources("read_all", "sm_90a", 22, 16, 0, 4, 64, 640),
        cubin.Resources("plain", "sm_90a", 8, 0, 0, 0, 0, 128),
    ]


def test_no_elf_is_refused():
    with pytest.raises(InternalError, match="no 64-bit little-endian ELF"):
        cubin.report(b"MZ", "")


def test_layouts_are_bijections(tmp_path):
    """tests/bench/ladder/layout_check.cu as a host program: it needs neither a GPU nor nvcc."""
    compiler = platform.compiler()
    if compiler is None:
        pytest.skip(platform.no_compiler())
    program = tmp_path / "layout_check"
    flags = ["-std=c++20", "-O1", "-D__host__=", "-D__device__=", f"-I{compile.sources() / 'cuda'}", f"-I{LADDER}"]
    subprocess.run(
        [*compiler.command, *flags, "-x", "c++", str(LADDER / "layout_check.cu"), "-o", str(program)], check=True
    )
    done = subprocess.run([program], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert len(done.stdout.splitlines()) == 12 and "WRONG" not in done.stdout
