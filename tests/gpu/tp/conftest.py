"""Ranks on the GPUs of one host: `make gpu-test-tp`. docs/TENSOR_PARALLEL.md, "Testing on GPUs", tells how.

Collected only when this folder is asked for by name: `make gpu-test` leaves it out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from prebuild_tp import RANKS

from mkpack import platform

HERE = Path(__file__).resolve().parent


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    places = [(config.invocation_params.dir / arg.split("::")[0]).resolve() for arg in config.args]
    return None if any(HERE == place or HERE in place.parents for place in places) else True


# ---- the table for docs/MEASUREMENTS.md ------------------------------------------------------------------------------
TABLE = pytest.StashKey[dict[str, list[str]]]()


@pytest.fixture
def row(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Adds a row of a table that is printed at the end: row("title | columns", cells ...)."""
    tables = request.config.stash.setdefault(TABLE, {})

    def add(table: str, *cells: Any) -> None:
        tables.setdefault(table, []).append("| " + " | ".join(map(str, cells)) + " |")

    return add


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    for table, rows in config.stash.get(TABLE, {}).items():
        title, *columns = (part.strip() for part in table.split("|"))
        terminalreporter.write_line("")
        for line in (f"{title}:", "", f"| {' | '.join(columns)} |", "|---" * len(columns) + "|", *rows):
            terminalreporter.write_line(line)


# ---- what is tested ------------------------------------------------------------------------------------------------
@pytest.fixture(scope="session")
def gpus(rehearsal: bool) -> int:
    """GPUs that are used: 1, 2, 4 or 8 of those that are seen. The emulated machine has one."""
    driver = None if rehearsal else platform.cuda_driver()
    seen = len(driver.devices) if driver else 1
    return next(n for n in (8, 4, 2, 1) if n <= seen)


@pytest.fixture
def prebuilt_kernel(request: pytest.FixtureRequest, rehearsal: bool) -> Callable[[str], Path | None]:
    """By its name the kernel that prebuild_tp.py left, or None: it is compiled here. Skips where it cannot be."""
    folder = request.config.getoption("prebuilt")

    def find(name: str) -> Path | None:
        if folder and (folder / name).exists():
            return Path(folder / name)
        if not rehearsal and platform.nvcc() is None:
            pytest.skip("nvcc is not here, and no --prebuilt folder has this kernel")
        return None

    return find


@pytest.fixture(params=RANKS, ids=lambda tp: f"tp{tp}")
def tp(request: pytest.FixtureRequest, rehearsal: bool) -> Iterator[int]:
    if rehearsal and request.param > 2:
        pytest.skip("takes minutes on the emulated machine")
    yield request.param
