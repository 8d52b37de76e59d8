"""A model's ranks in several processes through the raw ABI, on the emulated machine or a GPU: whoever tests them hands
the addresses around by himself, without torch."""

from __future__ import annotations

import ctypes
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import kernels
import numpy as np

from mkpack import abi
from mkpack.manifest import Limits
from mkpack.native import Library


class Built(Protocol):
    """emulator.Emulated, or what gpu/models.py packs."""

    @property
    def layout(self) -> Any: ...
    @property
    def limits(self) -> Limits: ...
    @property
    def blobs(self) -> tuple[Path, ...]: ...


class Part:
    """One of the processes. Each request is answered once."""

    def __init__(self, **environment: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **environment},
        )

    def ask(self, what: str, *arguments: Any, **named: Any) -> None:
        assert self.process.stdin
        pickle.dump((what, arguments, named), self.process.stdin)
        self.process.stdin.flush()

    def answer(self, limit: float = 120.0) -> Any:
        """AssertionError when it ended or takes too long."""
        assert self.process.stdout
        late = threading.Timer(limit, self.process.kill)
        late.start()
        try:
            return pickle.load(self.process.stdout)
        except EOFError:
            raise AssertionError(f"the process ended, or did not answer within {limit:g} s") from None
        finally:
            late.cancel()

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


def each(parts: Sequence[Part], what: str, *arguments: Any, **named: Any) -> list[Any]:
    """The answers of all to the same request, asked at once."""
    for part in parts:
        part.ask(what, *arguments, **named)
    return [part.answer() for part in parts]


def create(parts: Sequence[Part], kernel: Path, built: Built, devices: Sequence[int], **options: Any) -> list[Any]:
    """(code, error) of every process's mk_create_placed; devices: the GPU of each."""
    tp = len(built.blobs)
    held = tp // len(parts)
    for i, part in enumerate(parts):
        blobs = built.blobs[i * held : (i + 1) * held]
        placement = (i * held, held, devices[i])
        part.ask("create", kernel, built.layout, built.limits, blobs, placement, {"num_ranks": tp, **options})
    return [part.answer() for part in parts]


@contextmanager
def running(
    kernel: Path, built: Built, processes: int, devices: Sequence[int] = (), environment: Any = (), **options: Any
) -> Iterator[list[Part]]:
    """So many processes that know each other's memory. devices: of each its GPU, the first unless given."""
    parts = [Part(**dict(environment)) for _ in range(processes)]
    try:
        made = create(parts, kernel, built, devices or [0] * processes, **options)
        assert all(code == abi.OK for code, _ in made), made
        connect(parts)
        yield parts
        if all(part.process.poll() is None for part in parts):
            each(parts, "connect", None)  # all of them before any is destroyed
            each(parts, "destroy")
    finally:
        for part in parts:
            part.end()


def connect(parts: Sequence[Part]) -> None:
    found = each(parts, "addresses")
    assert each(parts, "connect", b"".join(found)) == [(abi.OK, "")] * len(parts)


class _Server:
    """In the process: what a Part asks for."""

    def create(self, kernel: Path, layout: Any, limits: Any, blobs: Any, placement: Any, options: Any) -> Any:
        self.blobs = [np.memmap(blob, np.uint8, "r") for blob in blobs]
        self.library = Library(kernel.read_bytes(), str(kernel))
        self.held, handle = placement[1], ctypes.c_void_p()
        pointers = (ctypes.c_void_p * len(blobs))(*(b.ctypes.data for b in self.blobs))
        given = abi.Options(weights=pointers, **{"weights_bytes": layout.nbytes, "wait_limit_s": 60.0, **options})
        lib = self.library.lib
        code = lib.mk_create_placed(ctypes.byref(given), ctypes.byref(abi.Placement(*placement)), ctypes.byref(handle))
        self.model = kernels.Model(lib, handle, layout.spec.vocab_size, limits.tokens_per_step)
        return code, self.model.error() if code else ""

    def addresses(self) -> bytes:
        found = (ctypes.c_uint8 * (self.held * abi.ADDRESS_BYTES))()
        assert self.model.lib.mk_addresses(self.model.handle, found) == abi.OK, self.model.error()
        return bytes(found)

    def connect(self, addresses: bytes | None) -> Any:
        given = (ctypes.c_uint8 * len(addresses)).from_buffer_copy(addresses) if addresses else None
        code = self.model.lib.mk_connect(self.model.handle, given)
        return code, self.model.error() if code else ""

    def call(self, name: str, *arguments: Any, cancel_after: int | None = None, **named: Any) -> Any:
        """A method of kernels.Model. cancel_after: tokens, in the process that has rank 0."""
        if cancel_after is not None:
            seen: list[int] = []
            named["callback"] = lambda token: seen.append(token) or len(seen) >= cancel_after
        result = getattr(self.model, name)(*arguments, **named)
        if isinstance(result, kernels.Generated):
            return result.tokens, result.code, result.error, result.result.stop_reason
        return result

    def many(self, count: int, *arguments: Any, **named: Any) -> tuple[int, str]:
        """(code, error) of the last of so many generations from an empty cache, or of the first that fails."""
        for _ in range(count):
            assert self.model.truncate(0) == abi.OK
            if (made := self.model.generate(*arguments, **named)).code:
                break
        return made.code, made.error

    def failed_step(self) -> tuple[int, str]:
        code, _ = self.model.try_step([1])
        return code, self.model.error()

    def destroy(self) -> None:
        self.model.lib.mk_destroy(self.model.handle)
        self.library.close()


def _main() -> None:
    server, answers = _Server(), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    while True:
        try:
            what, arguments, named = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        pickle.dump(getattr(server, what)(*arguments, **named), answers)
        answers.flush()


if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parent)]
    # What is pickled must be of this module's name as others import it.
    import placed

    placed._main()
