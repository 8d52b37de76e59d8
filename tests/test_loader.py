"""load() of mkpack/loader.py and mkpack/native.py with a fake kernel: mismatches, damage, leaks."""

from __future__ import annotations

import ctypes
import functools
import gc
import os
import struct
import subprocess
import sys
from pathlib import Path

import fake
import pytest
from fake import END, FAKE, HELLO, TARGET, ids

import mkpack
from mkpack import loader, platform
from mkpack.artifact import extract, open_artifact
from mkpack.errors import UserError
from mkpack.loader import load
from mkpack.model import Model


@pytest.fixture
def make(tmp_path):
    return functools.partial(fake.artifact, tmp_path)


def test_close_twice_and_use_after_close(make):
    model = load(make(HELLO))
    model.close()
    model.close()
    for use in (lambda: model.length, lambda: model.step([1]), lambda: list(model.generate("Hi")), model.reset):
        with pytest.raises(UserError, match="the model is closed"):
            use()


# --- what does not fit is refused before native code is loaded ---------------------------------------------------


def must_not_load(path: Path, monkeypatch, **options) -> str:
    def loaded(*_args, **_kwargs):
        raise AssertionError("native code was loaded")

    with monkeypatch.context() as patch:
        patch.setattr(ctypes, "CDLL", loaded)
        with pytest.raises(UserError) as caught:
            load(path, **options)
    return str(caught.value)


def damage(path: Path, needle: bytes) -> None:
    data = bytearray(path.read_bytes())
    at = data.index(needle)
    data[at] ^= 1
    path.write_bytes(data)


def test_all_mismatches_in_one_message(make, monkeypatch, tmp_path):
    path = make(HELLO, targets=("x86-64-v4",))
    folder = tmp_path / "folder"
    extract(path, folder)
    (folder / "weights/rank0.bin").unlink()
    damage(folder / "tokenizer/tokenizer.json", b"version")
    (folder / "tokenizer/generation_config.json").write_bytes(b"{}")
    monkeypatch.setattr(platform, "cpu_levels", lambda: ["x86-64-v3"])
    monkeypatch.setattr(platform, "missing_features", lambda level: ["avx512f", "avx512bw"])
    message = must_not_load(folder, monkeypatch, context=65, threads=0, wait_limit=0)
    assert f"cannot load {folder}: 8 problems" in message
    assert "the artifact has x86-64-v4; it needs a target that runs here (x86-64-v3)" in message
    assert "x86-64-v4 needs avx512f, avx512bw, which this CPU lacks" in message
    assert "tokenizer/tokenizer.json: sha256 expected" in message
    assert "tokenizer/generation_config.json: expected " in message
    assert "weights/rank0.bin: missing" in message
    assert "context 65: expected 1 to 64" in message
    assert "threads 0: expected 1 to 1024" in message
    assert "wait_limit 0: " in message


def test_the_best_kernel_of_this_machine_is_chosen(make, monkeypatch):
    path = make(HELLO, targets=platform.CPU_TARGETS)
    for levels, target in ((["x86-64-v4", "x86-64-v3"], "x86-64-v4"), (["x86-64-v3"], "x86-64-v3")):
        monkeypatch.setattr(platform, "cpu_levels", lambda levels=levels: levels)
        with load(path) as model:
            assert model.target == target


def test_wrong_architecture_and_gpu_only(make, monkeypatch):
    path = make(HELLO, targets=("sm_90a",))
    monkeypatch.setattr(platform, "cuda_driver", lambda: None)
    assert "sm_90a needs an NVIDIA GPU of compute capability 9.0" in must_not_load(path, monkeypatch)
    monkeypatch.setattr(platform, "cpu_levels", lambda: [])
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    message = must_not_load(make(HELLO), monkeypatch)
    assert f"the artifact has {TARGET};" in message
    assert f"{TARGET} is for x86-64, this machine is aarch64" in message


def test_another_system(make, monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    assert "kernels are for Linux, this is darwin" in must_not_load(make(HELLO), monkeypatch)


def test_newer_format(make, monkeypatch, tmp_path):
    extract(make(HELLO), tmp_path / "folder")
    manifest = tmp_path / "folder/manifest.json"
    manifest.write_text(manifest.read_text().replace('"format_version": 2', '"format_version": 3'))
    assert "newer format: found format 3" in must_not_load(tmp_path / "folder", monkeypatch)


def test_a_damaged_kernel_is_not_loaded(make, monkeypatch):
    path = make(HELLO)
    damage(path, b"worker 3 did not arrive")
    for verify in (True, False):
        assert f"kernels/{TARGET}.so: sha256 expected" in must_not_load(path, monkeypatch, verify=verify)


@pytest.mark.parametrize("verify", [True, False])
def test_no_file_of_an_artifact_is_exempt_from_its_digest(make, monkeypatch, verify):
    path = make(HELLO, files={**fake.TOKENIZER_FILES, "LICENSE": b"Do what is right."})
    damage(path, b"Do what is right.")
    message = must_not_load(path, monkeypatch, verify=verify, threads=1025)
    assert "LICENSE: sha256 expected" in message and "threads 1025: expected 1 to 1024" in message


def test_a_kernel_of_another_model_is_refused(make):
    path = make(HELLO, described='{"abi": 1, "experts": 8, "same": 0}', compiled='{"abi": 1, "experts": 4, "same": 0}')
    before = open_files()
    with pytest.raises(UserError, match="not the one of the manifest: experts expected 8, found 4; build it again"):
        load(path)
    assert open_files() == before
    path = make(HELLO, described='{"abi": 1}', compiled='{"abi":1}')
    with pytest.raises(UserError, match="expected the description"):
        load(path)


def test_a_library_that_is_no_kernel_is_refused(make):
    lacking = FAKE.replace("mk_read_bandwidth", "mk_other")
    with pytest.raises(UserError, match="mk_read_bandwidth"):
        load(make(HELLO, source=lacking.replace('#include "abi.h"', "#include <abi.h>")))
    unresolved = FAKE.replace("delete m;", "absent(); delete m;").replace(
        'extern "C" {', 'extern "C" {\nvoid absent();'
    )
    with pytest.raises(UserError, match="cannot be loaded on this machine: .*absent"):
        load(make(HELLO, source=unresolved))


def test_damaged_weights_are_found_before_any_output(make):
    path = make(
        HELLO, weights=struct.pack(f"<{len(HELLO) + 1}i", len(HELLO), *HELLO).ljust(8192, b"\0") + b"last words"
    )
    damage(path, b"last words")
    with load(path) as model:
        for use in (lambda: list(model.generate("Hi")), lambda: model.step([1]), lambda: list(model.generate([1]))):
            with pytest.raises(UserError, match="weights/rank0.bin: sha256 expected"):
                use()
        assert model.length == 0
    with load(path, verify=False) as model:
        assert "".join(model.generate("Hi")) == "Héllo 😀!"


# --- several at once, again and again ----------------------------------------------------------------------------


def test_two_artifacts_in_one_process(make):
    first = make([*ids("one"), END], name="first")
    second = make([*ids("two"), END], name="second", described='{"abi": 1, "model": "other"}')
    with load(first) as a, load(second) as b, load(first) as c:
        runs = [a.generate("Hi"), b.generate("Hi"), c.generate("Hi")]
        pieces = list(zip(*runs, strict=True))
        assert ["".join(column) for column in zip(*pieces, strict=True)] == ["one", "two", "one"]
        a.close()
        assert "".join(b.generate("Hi")) == "two"


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def mappings() -> int:
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sum("mkpack" in line for line in lines)


def test_loading_again_and_again_leaks_nothing(make):
    path = make(HELLO)
    kernels = mappings()  # other tests of this process may hold some
    with load(path) as model:
        list(model.generate("Hi"))
        assert mappings() > kernels
    before = open_files()
    assert mappings() == kernels
    for i in range(20):
        with load(path) as model:
            assert "".join(model.generate("Hi")) == "Héllo 😀!"
            if i % 2:
                next(model.generate("Hi"))
        assert (open_files(), mappings()) == (before, kernels)


def test_a_forgotten_model_is_freed(make):
    kernels = mappings()
    model = load(make(HELLO))
    list(model.generate("Hi"))
    before = open_files()
    del model
    gc.collect()
    assert mappings() == kernels and open_files() <= before


def test_importing_mkpack_is_cheap():
    code = "import sys, mkpack; print(sorted({'ctypes', 'numpy', 'pydantic', 'mkpack.loader'} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    assert mkpack.load is load and mkpack.Model is Model
    with pytest.raises(AttributeError, match="nothing_like_it"):
        mkpack.nothing_like_it  # noqa: B018


def test_the_run_side_imports_nothing_heavy():
    code = (
        "import sys, mkpack.loader; print(sorted({'torch', 'transformers', 'modelopt', 'numpy'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# --- ranks with memory of their own ------------------------------------------------------------------------------


def test_ranks_that_an_artifact_cannot_have(make, monkeypatch):
    path = make(HELLO)
    assert "ranks: this artifact was built for one rank" in must_not_load(path, monkeypatch, ranks=True)
    with open_artifact(path) as artifact:
        two = artifact.manifest.model_copy(update={"tp": 2})
    (target,) = two.kernels

    def refusals(**changes: str) -> list[str]:
        kernel = two.kernels[target].model_copy(update=changes)
        return loader._ranks_refusals(two.model_copy(update={"kernels": {target: kernel}}), target, False)

    assert refusals(description='{"abi": 2}') == []
    assert "built by an older mkpack, which has none; rebuild it" in refusals(description='{"abi": 1}')[0]
    assert refusals(layout="cuda") == [f"ranks: expected a CPU target, found {target}; choose one (--target cpu)"]
