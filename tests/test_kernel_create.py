"""Creating a model: options that are refused, threads that come and go, threads that cannot be started."""

from __future__ import annotations

import ctypes
import math
import os
import resource
import signal
import time
from pathlib import Path

import kernels
import pytest
from kernels import Kernels, Weights, precision, running, tiny_spec, try_create
from patience import PATIENCE_S, until

from mkpack import abi
from mkpack.layout import Layout
from mkpack.manifest import Limits
from mkpack.native import Library

LIMITS = Limits(context=96, tokens_per_step=16)
LAYOUT = Layout(tiny_spec(), precision("bf16", experts="nvfp4"))
if not kernels.TARGETS:
    pytest.skip("this machine runs no CPU target", allow_module_level=True)


@pytest.fixture(scope="module")
def kernel(tmp_path_factory):
    return Kernels.of_session(tmp_path_factory).path(LAYOUT, LIMITS)


@pytest.fixture(scope="module")
def blobs(tmp_path_factory):
    return Weights.random(LAYOUT, seed=11).blobs(tmp_path_factory.mktemp("blobs"))


def test_bad_options_are_refused(kernel, blobs):
    library = Library(kernel.read_bytes(), str(kernel))
    pointers = (ctypes.c_void_p * 1)(blobs[0].ctypes.data + 4)
    for options, text in (
        ({"num_ranks": 2}, "compiled for 1 ranks, given 2"),
        ({"weights_bytes": 17}, f"must be {LAYOUT.nbytes} bytes, given 17"),
        ({"weights": pointers}, "rank 0 are not aligned"),
        ({"context": 97}, "at most 96, given 97"),
        ({"context": -1}, "at most 96, given -1"),
        ({"threads": 5000}, "1024 threads"),
        ({"wait_limit_s": 0.0}, "wait_limit_s"),
        ({"wait_limit_s": math.nan}, "wait_limit_s"),
    ):
        code, handle = try_create(library.lib, LAYOUT, blobs, **options)
        assert code == abi.ERR_ARGUMENT and text in library.lib.mk_last_error().decode()
        assert not handle.value
    library.close()


def test_threads_by_default_and_their_end(kernel, blobs):
    def count() -> int:
        return len(os.listdir("/proc/self/task"))

    before = count()
    with running(kernel, LAYOUT, LIMITS, blobs, threads=0) as model:
        assert count() - before == len(os.sched_getaffinity(0)) - 1
        model.step([1])
    until(lambda: count() == before)  # a joined thread stands in /proc for another moment


def test_threads_that_cannot_be_started_are_an_error(kernel, blobs):
    """In a process of its own, since the limit on the address space cannot be lifted again."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            library = Library(kernel.read_bytes(), str(kernel))
            used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30),) * 2)
            result, _ = try_create(library.lib, LAYOUT, blobs, threads=1000)
            code = 0 if result == abi.ERR_MEMORY else 2
        finally:
            os._exit(code)
    deadline = time.monotonic() + PATIENCE_S
    while (ended := os.waitpid(pid, os.WNOHANG))[0] == 0 and time.monotonic() < deadline:
        time.sleep(0.05)
    if ended[0] == 0:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    assert ended == (pid, 0)
