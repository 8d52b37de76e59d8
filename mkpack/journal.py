"""What a build has finished, so that one that was killed goes on from there.

`journal.jsonl` lies beside the unfinished blobs. Its first line is the build key, which names everything the bytes
depend on: recipe, source files by their digests, tools, mkpack's own sources. Every other line is one group of tensors:
its name, what the report says of it, and a seal of the bytes that each blob got. A line is written after those bytes,
in one call, so that whatever ends the process leaves whole lines and at most one cut short.

A journal of another key is not used. A group counts as finished when every seal still holds, which is checked against
the blobs themselves: after a power cut, or a copy that had begun to give blobs up, what is lost is made again. What no
tensor fills is a hole of the file, which nothing writes to.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkpack.blobfile import Seal

NAME = "journal.jsonl"


class Journal:
    """The journal of one build in its work folder; made when it is not there. Threads may add at once.

    `found` holds the groups of an earlier build with the same key, by name, not checked yet: their seals, a list for
    every blob writer, and their notes for the report.
    """

    def __init__(self, work: Path, key: str) -> None:
        path = work / NAME
        self.found: dict[str, tuple[list[list[Seal]], dict[str, Any]]] = {}
        length = 0
        if key_of(work) == key:
            for line, end in _lines(path):
                if length:  # the first line is the key
                    self.found[line["group"]] = (
                        [[Seal.from_json(seal) for seal in seals] for seals in line["seals"]],
                        line["notes"],
                    )
                length = end
        self._lock = threading.Lock()
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
        os.truncate(self._fd, length)
        os.lseek(self._fd, length, os.SEEK_SET)
        if not length:
            self._write({"key": key})

    def add(self, group: str, seals: list[list[Seal]], notes: dict[str, Any]) -> None:
        """Notes that a group is finished and written: for every blob writer the seals it gave."""
        made = [[seal.to_json() for seal in of_writer] for of_writer in seals]
        self._write({"group": group, "seals": made, "notes": notes})

    def _write(self, line: dict[str, Any]) -> None:
        data = (json.dumps(line, separators=(",", ":")) + "\n").encode()
        with self._lock:
            while data:
                data = data[os.write(self._fd, data) :]

    def close(self) -> None:
        os.close(self._fd)


def key_of(work: Path) -> str | None:
    """The build key of a work folder's journal; None when there is none that can be read."""
    try:
        line, _ = next(_lines(work / NAME))
        return str(line["key"])
    except (OSError, StopIteration, KeyError):
        return None


def _lines(path: Path) -> Iterator[tuple[dict[str, Any], int]]:
    """Whole lines up to the first that is none, each with the byte after it."""
    end = 0
    with open(path, "rb") as file:
        for text in file:
            try:
                line = json.loads(text)
            except ValueError:
                return
            if not text.endswith(b"\n") or not isinstance(line, dict):
                return
            end += len(text)
            yield line, end
