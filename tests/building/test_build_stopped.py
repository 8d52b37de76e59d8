"""A build that is killed, interrupted, or runs out of something, and what it leaves behind. The compiler compiles
nothing, since no kernel is run."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import builds
import pytest
from builds import DIE, names, process, refusal
from patience import PATIENCE_S, until

from mkpack import build as builder
from mkpack import compile as compiling
from mkpack import packing, platform
from mkpack.artifact import open_artifact
from mkpack.build import build
from mkpack.errors import UserError

POINTS = {
    "before the compiler": ("mkpack.build", "compile_kernels", 1),
    "first tensor": ("mkpack.pack", "pack_tiles", 1),
    "in the middle of the tensors": ("mkpack.pack", "pack_tiles", 20),
    "before writing": ("mkpack.build", "write_artifact", 1),
    "in the middle of writing": ("mkpack.artifact", "_blocks", 8),
    "before the file gets its name": ("os", "replace", 1),
}


def test_a_build_that_is_killed_leaves_nothing_that_counts(stub, recipe, tmp_path):
    with contextlib.ExitStack() as stack:
        killed = {}
        for point, where in POINTS.items():
            out = tmp_path / point
            out.mkdir()
            killed[out] = stack.enter_context(process(recipe, out, DIE.format(point=where)))
        for out, running in killed.items():
            _, errors = running.communicate(timeout=PATIENCE_S)
            assert running.returncode == -signal.SIGKILL, (out.name, errors)
    for out in killed:
        assert "tiny.mkpack" not in names(out), out.name
        assert any(name.endswith(".work") for name in names(out)), f"{out.name}: killed before it did anything"
        build(recipe, output=out)
        assert names(out) == {"tiny.mkpack", ".tiny.mkpack.lock"}, out.name
        with open_artifact(out / "tiny.mkpack") as artifact:
            assert not artifact.verify()


def test_a_build_that_is_killed_at_any_moment_leaves_a_whole_file_or_none(stub, recipe, out):
    for delay in (0.02, 0.08, 0.15, 0.3):
        with process(recipe, out) as running:
            assert running.stdout and running.stdout.readline() == "READY\n"
            time.sleep(delay)
            running.kill()
            running.wait()
        if "tiny.mkpack" in names(out):
            with open_artifact(out / "tiny.mkpack") as artifact:
                assert not artifact.verify()
            (out / "tiny.mkpack").unlink()
    build(recipe, output=out)
    assert names(out) == {"tiny.mkpack", ".tiny.mkpack.lock"}


def test_ctrl_c_ends_a_build_cleanly(stub, recipe, out):
    command = [Path(sys.executable).with_name("mkpack"), "build", recipe, "--output", out]
    env = {**os.environ, "BUILD_PAUSE": "600"}
    running = subprocess.Popen(command, env=env, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    until(lambda: builds.compilations(stub))
    os.killpg(running.pid, signal.SIGINT)
    printed, errors = running.communicate(timeout=PATIENCE_S)
    assert running.returncode == 130, errors
    # Python itself says so when an interrupt hits a callback of the import system.
    assert not printed and (b"Traceback" not in errors or b"Exception ignored" in errors)
    assert names(out) == {".tiny.mkpack.lock"}


def test_an_interrupt_in_a_callback_is_not_lost(monkeypatch):
    class Referent:
        pass

    lost: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda said: lost.append(said.exc_type))

    with pytest.raises(KeyboardInterrupt), packing._no_interrupt_lost():
        gone = Referent()
        kept = weakref.ref(gone, lambda _: signal.raise_signal(signal.SIGINT))
        del gone
        assert kept() is None
    assert lost == [KeyboardInterrupt]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_failed_build_ends_its_compiler(stub, recipe, out, monkeypatch):
    monkeypatch.setenv("BUILD_PAUSE", "600")

    def fail(*_: Any) -> None:
        until(lambda: builds.compilations(stub))
        raise UserError("no weights today")

    monkeypatch.setattr(builder, "pack", fail)
    assert "no weights today" in refusal(recipe, out)


def test_a_full_disk_is_said_before_the_work(stub, recipe, out, monkeypatch):
    monkeypatch.setattr(platform, "free_disk", lambda path: 1000)
    monkeypatch.setattr(builder, "compile_kernels", None)
    text = refusal(recipe, out)
    assert "B of disk, 1.0 kB are free" in text and "--output" in text


def test_a_disk_that_fills_up_ends_in_one_line(stub, recipe, out):
    size = build(recipe, output=out).stat().st_size
    (out / "tiny.mkpack").unlink()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for limit in (size // 2, size - 1000):  # while packing, and while the artifact is written
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limits[1]))
        try:
            text = refusal(recipe, out)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert "File too large" in text and "free some disk space" in text and "\n" not in text


def test_a_compiler_that_fails_ends_the_packing(stub, recipe, out, monkeypatch):
    monkeypatch.setattr(compiling, "ninja", lambda: "/bin/false")
    quantise, compile_kernels, failed = packing.quantize.quantise, builder.compile_kernels, threading.Event()

    def fails(*words):
        try:
            return compile_kernels(*words)
        finally:
            failed.set()

    def slow(tensor, fmt, *, name, scale2=None):
        assert failed.wait(PATIENCE_S)
        time.sleep(0.05)
        assert name != "model.norm.weight", "every tensor was packed"
        return quantise(tensor, fmt, name=name, scale2=scale2)

    monkeypatch.setattr(packing.quantize, "quantise", slow)
    monkeypatch.setattr(builder, "compile_kernels", fails)
    with pytest.raises(Exception, match="did not compile"):
        build(recipe, output=out)
    assert names(out) == {".tiny.mkpack.lock"}
