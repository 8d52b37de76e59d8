"""SHA-256 of the entries of an artifact: computed while it is written, checked in parallel while it is loaded."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

from mkpack.container import BLOCKS_AHEAD
from mkpack.errors import combine
from mkpack.manifest import CHUNK, Entry, capped

Progress = Callable[[int, int], None]  # bytes done, bytes in all


class Digester:
    """Makes the Entry of `size` bytes that pass by in pieces of any length."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._whole = hashlib.sha256()
        self._chunk = hashlib.sha256()
        self._in_chunk = 0
        self._chunks: list[str] = []

    def through(self, blocks: Iterable[bytes | memoryview]) -> Iterator[bytes | memoryview]:
        """Yields the blocks it was given, digesting them; the digests of a large entry are computed in two threads of
        their own, beside what the caller does with the blocks."""
        if self._size <= CHUNK:
            for block in blocks:
                self._whole.update(block)
                yield block
            return
        with ThreadPoolExecutor(1) as whole, ThreadPoolExecutor(1) as chunks:
            under_way: deque[Future[None]] = deque()
            for block in blocks:
                under_way += (whole.submit(self._whole.update, block), chunks.submit(self._by_chunk, memoryview(block)))
                yield block
                while len(under_way) > 2 * BLOCKS_AHEAD:
                    under_way.popleft().result()
            for future in under_way:
                future.result()

    def _by_chunk(self, block: memoryview) -> None:
        while block:
            piece = block[: CHUNK - self._in_chunk]
            self._chunk.update(piece)
            self._in_chunk += len(piece)
            block = block[len(piece) :]
            if self._in_chunk == CHUNK:
                self._end_chunk()

    def _end_chunk(self) -> None:
        self._chunks.append(self._chunk.hexdigest())
        self._chunk, self._in_chunk = hashlib.sha256(), 0

    def entry(self) -> Entry:
        """The Entry, once all bytes have passed."""
        if self._in_chunk:
            self._end_chunk()
        return Entry(size=self._size, sha256=self._whole.hexdigest(), chunks=self._chunks)


class Verification:
    """A check of mapped bytes against their digests that runs in threads of its own, from the moment it is made.

    `items` maps a name to its Entry and its bytes, None when they are missing. Entries with chunk digests are checked
    chunk by chunk, which covers every byte; `full` checks their whole digest too, which only one thread can do.
    `progress` is called from the threads, one at a time. Threads are daemons, so that Ctrl-C need not wait for hundreds
    of gigabytes.
    """

    def __init__(
        self,
        where: str,
        items: Mapping[str, tuple[Entry, memoryview | None]],
        threads: int | None = None,
        progress: Progress | None = None,
        full: bool = False,
    ) -> None:
        self._where = where
        self._items = items
        self._unusable: dict[str, str] = {}
        self._data: dict[str, memoryview] = {}
        for name, (entry, data) in items.items():
            if data is None:
                self._unusable[name] = f"{name}: missing"
            elif len(data) != entry.size:
                self._unusable[name] = f"{name}: expected {entry.size} bytes, found {len(data)}"
            else:
                self._data[name] = data
        self._tasks = deque(t for name in self._data for t in _tasks(name, items[name][0], full))
        self._total = sum(end - start for _, start, end, _ in self._tasks)
        self._progress = progress
        self._lock = threading.Lock()
        self._done = 0
        self._passed: set[tuple[str, int, int]] = set()
        self._damaged: dict[str, list[tuple[int, str, str]]] = {}
        self._expected = {(name, start, end) for name, start, end, _ in self._tasks}
        count = min(threads or _usable_cores(), max(1, len(self._tasks)))
        self._threads = [threading.Thread(target=self._work, daemon=True, name="mkpack-verify") for _ in range(count)]
        for thread in self._threads:
            thread.start()

    def _work(self) -> None:
        while True:
            try:
                name, start, end, expected = self._tasks.popleft()
            except IndexError:
                return
            # hashlib lets go of the interpreter lock, and the mapping's pages are read in inside it.
            with self._data[name][start:end] as piece:
                found = hashlib.sha256(piece).hexdigest()
            with self._lock:
                if found == expected:
                    self._passed.add((name, start, end))
                else:
                    self._damaged.setdefault(name, []).append((start, expected, found))
                self._done += end - start
                if self._progress:
                    self._progress(self._done, self._total)

    def cancel(self) -> None:
        """Ends the check after the chunks in work. What was not checked counts as a problem."""
        self._tasks.clear()
        for thread in self._threads:
            thread.join()

    def problems(self) -> list[str]:
        """Waits for the end; one text per damaged entry, in the order of `items`. Empty: every byte is right."""
        try:
            for thread in self._threads:
                thread.join()
        except BaseException:
            self._tasks.clear()
            raise
        found = []
        for name, (entry, _) in self._items.items():
            if name in self._unusable:
                found.append(self._unusable[name])
            elif damaged := sorted(self._damaged.get(name, [])):
                # With `full` the digest of the whole fails too; the chunks say where.
                damaged = [d for d in damaged if d[1] in entry.chunks] or damaged
                start, expected, digest = damaged[0]
                at = (
                    f"{len(damaged)} of {len(entry.chunks)} chunks, the first at byte {start}: " if entry.chunks else ""
                )
                found.append(f"{name}: {at}sha256 expected {expected}, found {digest}")
            elif any(n == name for n, _, _ in self._expected - self._passed):
                found.append(f"{name}: the check was interrupted")
        return found

    def result(self) -> None:
        """Waits for the end. UserError listing every damaged entry."""
        if problems := self.problems():
            title = f"{self._where} is damaged (copy or download it again, or rebuild it)"
            raise combine(title, capped(problems))


def digest_of(value: object) -> str:
    """SHA-256 of a JSON value, the same for equal values."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _tasks(name: str, entry: Entry, full: bool) -> Iterator[tuple[str, int, int, str]]:
    for i, digest in enumerate(entry.chunks):
        yield name, i * CHUNK, min(entry.size, (i + 1) * CHUNK), digest
    if full or not entry.chunks:
        yield name, 0, entry.size, entry.sha256


def _usable_cores() -> int:
    # sched_getaffinity knows of containers and taskset; it is missing on macOS.
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
