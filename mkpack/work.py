"""Where a build works: a folder beside the artifact, which a later build takes over when this one is killed."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from mkpack import journal, platform
from mkpack.calibration_step import KEPT
from mkpack.errors import UserError, size
from mkpack.plan import Plan


def check_disk(todo: Plan, path: Path, keep_work: bool, unfinished: Iterable[Path]) -> None:
    """unfinished: work folders of killed builds, whose place this one takes over or frees."""
    folder = path.absolute().parent
    taken = sum(file.stat().st_blocks * 512 for work in unfinished for file in work.glob("*.bin"))
    free, needed = platform.free_disk(folder) + taken, todo.disk_bytes
    if keep_work or not platform.can_punch_holes(folder):  # the blobs stay beside the artifact they are copied into
        needed += todo.artifact_bytes
    if free < needed:
        raise UserError(
            f"{path}: building needs {size(needed)} of disk, {size(free)} are free; "
            "free some or choose another folder with --output"
        )


@contextlib.contextmanager
def work_folder(path: Path, keep: bool, unfinished: Path | None) -> Iterator[Path]:
    """A folder beside the artifact: same disk, and named so that the next build finds it if this one is killed.
    unfinished: that of a killed build, which becomes this one's, with its journal, blobs and calibration alone."""
    work = path.absolute().with_name(f".{path.name}.{os.getpid()}.work")
    shutil.rmtree(work, ignore_errors=True)
    if unfinished:
        unfinished.rename(work)
        for item in work.iterdir():
            if item.is_dir():  # of the compiler, which may have been killed half-way too
                shutil.rmtree(item)
            elif item.name not in (journal.NAME, KEPT) and item.suffix != ".bin":
                item.unlink()
    work.mkdir(exist_ok=True)
    try:
        yield work
    finally:
        if keep:
            names = itertools.chain([f"{path.name}.work"], (f"{path.name}.work-{i}" for i in itertools.count(2)))
            kept = next(p for p in map(path.absolute().with_name, names) if not os.path.lexists(p))
            work.rename(kept)
            print(f"work kept in {kept}", file=sys.stderr)
        else:
            shutil.rmtree(work, ignore_errors=True)
