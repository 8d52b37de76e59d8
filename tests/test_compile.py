"""Kernels through ninja: flags, bytes that do not depend on folders, clean warnings, failures that say what failed."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import kernels
import pytest

from mkpack import abi, codegen, compile, platform
from mkpack.compile import CPU_FLAGS, Unit, compile_kernels
from mkpack.errors import InternalError, UserError
from mkpack.layout import Layout
from mkpack.manifest import Limits
from mkpack.spec import LayerSpec

LIMITS = Limits(context=64, tokens_per_step=4)
# Every format and every kind of layer, so that all of the kernel is instantiated.
SPEC = kernels.tiny_spec(
    qk_norm=True,
    qkv_bias=True,
    o_bias=True,
    layers=[LayerSpec(moe=True), LayerSpec(moe=False, sliding_window=5)],
    dense_intermediate_size=24,
)
MIX = kernels.precision("bf16", experts="nvfp4", dense="fp8", embeddings="f32", lm_head="f32")
DENSE = kernels.tiny_spec(layers=[LayerSpec(moe=False)], moe=None, dense_intermediate_size=24, tie_word_embeddings=True)


def unit(target: str, spec=SPEC, mix=MIX, name: str | None = None) -> Unit:
    return Unit(name or target, target, codegen.model_header(Layout(spec, mix), LIMITS, target))


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Both targets, whatever this machine runs, in a folder whose name needs escaping."""
    folder = tmp_path_factory.mktemp("built") / "a $b: c"
    folder.mkdir()
    return compile_kernels([unit("x86-64-v3"), unit("x86-64-v4")], folder)


def newest_glibc(library: Path) -> str:
    """The newest GLIBC_ version a library asks for, by objdump."""
    text = subprocess.run(["objdump", "-T", library], check=True, capture_output=True, text=True).stdout
    versions = {tuple(map(int, v.split("."))) for v in re.findall(r"GLIBC_([0-9.]+)", text)}
    return ".".join(map(str, max(versions)))


def test_every_target_is_built_and_described(built):
    assert built.keys() == {"x86-64-v3", "x86-64-v4"}
    for target, kernel in built.items():
        assert kernel.path.is_file()
        assert kernel.requires == {"cpu": target, "system": "linux", "glibc": newest_glibc(kernel.path)}
        assert kernel.compiler == platform.compiler().version
        assert f'"target": "{target}"'.encode() in kernel.path.read_bytes()


def test_folders_do_not_change_a_byte(built, tmp_path, monkeypatch):
    """Another folder of sources, another one to build in, other neighbours."""
    copy = tmp_path / "elsewhere" / "csrc"
    shutil.copytree(compile.sources(), copy)
    monkeypatch.setattr(compile, "sources", lambda: copy)
    again = compile_kernels([unit("x86-64-v3", name="another")], tmp_path)
    data = again["another"].path.read_bytes()
    assert data == built["x86-64-v3"].path.read_bytes()
    assert str(tmp_path).encode() not in data and b"elsewhere" not in data


def test_only_the_contract_is_exported(built):
    done = subprocess.run(["nm", "-D", "--defined-only", built["x86-64-v3"].path], capture_output=True, text=True)
    if done.returncode:
        pytest.skip("no nm")
    names = {line.split()[-1] for line in done.stdout.splitlines()}
    # Of what a kernel may lack, those of CPUs tell hidden states alone.
    assert names == set(abi.FUNCTIONS) - abi.OPTIONAL | {"mk_step_taps"}


def test_multiply_adds_are_fused_only_where_written():
    assert "-ffp-contract=off" in CPU_FLAGS and "-ffast-math" not in CPU_FLAGS
    assert not any(f.startswith("-march") for f in CPU_FLAGS)  # the target's, never this machine's


@pytest.mark.parametrize("target", ["x86-64-v3", "x86-64-v4"])
@pytest.mark.parametrize(("spec", "mix"), [(SPEC, MIX), (DENSE, kernels.precision("fp8"))], ids=["all", "dense"])
def test_no_warnings(target, spec, mix, tmp_path):
    compiler = platform.compiler()
    (tmp_path / "model.h").write_text(codegen.model_header(Layout(spec, mix), LIMITS, target))
    flags = [f for f in CPU_FLAGS if f != "-shared" and not f.startswith(("-Wl", "-static"))]
    # The two that are off come from inside the compiler's own headers.
    warnings = ["-Wall", "-Wextra", "-Wno-maybe-uninitialized", "-Wno-restrict", "-Werror"]
    command = [*compiler.command, *flags, *warnings, "-fsyntax-only", f"-march={target}", f"-I{compile.sources()}"]
    source = compile.sources() / "cpu" / "model.cpp"
    done = subprocess.run(
        [*command, f"-I{tmp_path}", str(source), "-o", str(tmp_path / "out.o")], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


# -- failures ----------------------------------------------------------------------------------------------------------


def fake_compiler(folder, monkeypatch, script: str) -> None:
    path = folder / "fake c++"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setattr(platform, "compiler", lambda: platform.Compiler((str(path),), "fake 1.0"))


def test_no_compiler(tmp_path, monkeypatch):
    monkeypatch.setattr(platform, "compiler", lambda: None)
    with pytest.raises(UserError) as e:
        compile_kernels([unit("x86-64-v3")], tmp_path)
    assert str(e.value) == platform.no_compiler()
    assert not list(tmp_path.iterdir())


def test_no_ninja(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin" / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(platform, "compiler", lambda: platform.Compiler(("g++",), "g++ 12"))
    with pytest.raises(UserError, match=r"ninja is not installed.*pip install 'mkpack\[build\]'"):
        compile_kernels([unit("x86-64-v3")], tmp_path)


def test_a_killed_compiler(tmp_path, monkeypatch):
    """What g++ prints when its cc1plus is killed by the kernel, and a compiler that is itself killed."""
    texts = (
        "echo 'g++: fatal error: Killed signal terminated program cc1plus' >&2; exit 1",
        "echo 'cc1plus: out of memory allocating 65536 bytes' >&2; exit 1",
        "kill -9 $$",
    )
    for script in texts:
        fake_compiler(tmp_path, monkeypatch, script)
        with pytest.raises(InternalError, match="the compiler was killed, most likely for lack of memory"):
            compile_kernels([unit("x86-64-v3")], tmp_path)


def test_a_failing_compiler_is_quoted(tmp_path, monkeypatch):
    fake_compiler(tmp_path, monkeypatch, "echo 'model.cpp:7: error: no such thing' >&2; exit 3")
    with pytest.raises(InternalError) as e:
        compile_kernels([unit("x86-64-v3")], tmp_path)
    assert "the kernel did not compile" in str(e.value) and "model.cpp:7: error: no such thing" in str(e.value)
    assert not (tmp_path / "x86-64-v3" / "kernel.so").exists()


def test_a_header_that_does_not_compile_is_quoted(tmp_path):
    bad = Unit("bad", "x86-64-v3", unit("x86-64-v3").header + '\nstatic_assert(false, "on purpose");\n')
    with pytest.raises(InternalError, match="on purpose"):
        compile_kernels([bad], tmp_path)


def test_a_ninja_status_of_the_user_does_no_harm(tmp_path, monkeypatch):
    monkeypatch.setenv("NINJA_STATUS", "%z")
    fake_compiler(tmp_path, monkeypatch, 'for last; do :; done; : > "$last"')
    assert compile_kernels([unit("x86-64-v3")], tmp_path)["x86-64-v3"].path.exists()
