"""csrc/ with a mistake in it, for tests of what finds mistakes."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from mkpack import compile

# File and replacements. Neither mistake can make a kernel wait for ever.
MISTAKES = {
    "sums read before they are complete": (
        "cuda/step_dense.cuh",
        [("    team_sync<kTeam>();\n    finish(first, count);", "    finish(first, count);")],
    ),
    "page given back before it is read": (
        "cuda/step_dense.cuh",
        [
            (
                "          ring.wait_full();\n",
                "          ring.wait_full();\n"
                "          const uint32_t slot = ring.slot();\n"
                "          ring.release(0, b.zero, b.lane());\n",
            ),
            ("b.s.dense[ring.slot()]", "b.s.dense[slot]"),
            ("          ring.release(w[0].w | w[1].w, b.zero, b.lane());\n", ""),
        ],
    ),
}


@contextmanager
def sources(mistake: str) -> Iterator[None]:
    """compile.sources() is a copy with this one of MISTAKES; "" leaves it alone. Not for several threads."""
    if not mistake:
        yield
        return
    with changed(*MISTAKES[mistake]):
        yield


@contextmanager
def changed(name: str, changes: list[tuple[str, str]]) -> Iterator[None]:
    """compile.sources() is a copy with these replacements in one file, each of a text that is there once."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        csrc = Path(folder) / "csrc"
        shutil.copytree(compile.sources(), csrc)
        text = (csrc / name).read_text()
        for old, new in changes:
            assert text.count(old) == 1, f"{name} has changed: {old!r}"
            text = text.replace(old, new)
        (csrc / name).write_text(text)
        patch.setattr(compile, "sources", lambda: csrc)
        yield
