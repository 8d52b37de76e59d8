"""Its place puts this folder on the path, for the helpers that tests/hub imports too. Fixtures of several files."""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# The user's own trust list and kernel cache are not the tests': neither read nor written, here or in their processes.
_HOME = tempfile.mkdtemp(prefix="mkpack-tests-")
atexit.register(shutil.rmtree, _HOME, ignore_errors=True)
os.environ["XDG_CONFIG_HOME"], os.environ["XDG_CACHE_HOME"] = f"{_HOME}/config", f"{_HOME}/cache"

# A script that starts the tests in the background has them ignore Ctrl-C, and all that they start; some are about it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# How long an example takes is the machine's, and fixtures of one test serve all its examples. In CI the same examples
# every time, so that a red run is about the change; elsewhere new ones each time.
_SILENT = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
_IN_CI = bool(os.environ.get("CI"))
settings.register_profile("mkpack", deadline=None, suppress_health_check=_SILENT, derandomize=_IN_CI)
settings.load_profile("mkpack")


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3-MoE checkpoint in bf16. Not to be changed."""
    import families

    return families.make_checkpoint(tmp_path_factory.mktemp("plain") / "checkpoint", "qwen3_moe", dtype="bfloat16")


@pytest.fixture
def compressed(plain: Path, tmp_path: Path) -> Path:
    """The same, quantised by compressed-tensors: a test's own."""
    import quantised

    quantised.compressed_tensors(plain, tmp_path / "compressed", "NVFP4A16")
    return tmp_path / "compressed"
