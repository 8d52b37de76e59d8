"""A compiled model in this process: library bytes -> calls of the ABI, with errors as exceptions.

Knows nothing of artifacts, text or sampling defaults; model.py puts those around it.
"""

from __future__ import annotations

import ctypes
import fcntl
import itertools
import os
import queue
import threading
from _ctypes import dlclose
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from mkpack import abi
from mkpack.errors import InternalError, UserError

if TYPE_CHECKING:
    import numpy as np

_loads = itertools.count(1)
_CODES = {
    abi.ERR_ARGUMENT: "refused",
    abi.ERR_CONTEXT: "context full",
    abi.ERR_TIMEOUT: "timed out",
    abi.ERR_MEMORY: "out of memory",
    abi.ERR_DEVICE: "device error",
}


class Library:
    """A shared library loaded from `data` through an anonymous sealed file: what was verified is what runs.

    Raises UserError when this machine cannot load it or a function of the ABI is absent.
    """

    def __init__(self, data: bytes, where: str) -> None:
        try:
            fd = os.memfd_create("mkpack-kernel", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except OSError as error:
            raise InternalError(f"cannot make a memory file for {where}: {error.strerror}") from error
        try:
            with open(fd, "wb", closefd=False) as file:
                file.write(data)
            seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
            self._lib: ctypes.CDLL | None = ctypes.CDLL(_unique_path(fd), mode=os.RTLD_LOCAL | os.RTLD_NOW)
        except OSError as error:
            raise UserError(f"{where} cannot be loaded on this machine: {error}; build the artifact here") from error
        finally:
            os.close(fd)
        try:
            abi.bind(self._lib)
        except AttributeError as error:
            self.close()
            raise UserError(f"{where} is no mkpack kernel: {error}; build the artifact again") from error

    @property
    def lib(self) -> ctypes.CDLL:
        assert self._lib is not None
        return self._lib

    def describe(self) -> str:
        return str((self.lib.mk_describe() or b"").decode("utf-8", "replace"))

    def error(self, code: int, doing: str, starting: bool = False) -> Exception:
        """The exception for a negative code, with this thread's mk_last_error() text."""
        text = (self.lib.mk_last_error() or b"").decode("utf-8", "replace") or "no further text"
        message = f"{doing} failed: {_CODES.get(code, f'code {code}')}: {text}"
        # A kernel that starts has done nothing yet: what stops it then (memory, the GPU) is the user's to mend.
        mendable = (abi.ERR_ARGUMENT, abi.ERR_CONTEXT)
        return UserError(message) if starting or code in mendable else InternalError(message)

    def close(self) -> None:
        if self._lib is not None:
            dlclose(self._lib._handle)
            self._lib = None


def _unique_path(fd: int) -> str:
    # dlopen returns a library it has under an equal name without looking at the file, and fd numbers repeat. "/" and
    # "./" spell this load's number without changing what the path means.
    number = "".join("./" if bit == "1" else "/" for bit in f"{next(_loads):b}")
    return f"/proc/self/fd/{number}{fd}"


class RankTiming(NamedTuple):
    """A step of one rank with its peers looped back: seconds and distinct experts a layer, with exchanges and without;
    how many of these a step has, and bytes that they brought."""

    step_s: float
    experts: float
    without_s: float
    without_experts: float
    exchanges: int
    nbytes: int


class Placement(NamedTuple):
    """The ranks that this process has of a model whose others are in other processes: `held` from `first` on, of `tp`,
    on one GPU."""

    first: int
    held: int
    tp: int
    device: int


class Others(Protocol):
    """The other processes that have ranks of a model (launcher.Group)."""

    @property
    def follows(self) -> bool: ...
    def announce(self, call: Mapping[str, Any]) -> None: ...
    def leave(self, disconnect: Callable[[], None], wait_limit: float) -> None: ...


class NativeModel:
    """One mk_model. Not for several threads at once, except Run.stop(). close() is idempotent."""

    def __init__(
        self,
        library: Library,
        weights: Sequence[int],
        weights_bytes: int,
        *,
        threads: int,
        context: int,
        wait_limit: float,
        ranks: bool = False,
        looped_of: int | None = None,
        placement: Placement | None = None,
    ) -> None:
        """weights: address of each rank's blob, valid until close(). ranks: each has threads and memory of its own.
        looped_of: there is one, of so many, and its peers are looped back. placement: these are a process's part of
        them; connect() and `others` must follow. Owns `library` from here on, also on failure."""
        self._library = library
        self._handle: ctypes.c_void_p | None = None
        self._run: Run | None = None
        self._wait_limit = wait_limit
        self._placement = placement
        self.others: Others | None = None
        handle = ctypes.c_void_p()
        options = abi.Options(
            weights=(ctypes.c_void_p * len(weights))(*weights),
            weights_bytes=weights_bytes,
            num_ranks=looped_of or (placement.tp if placement else len(weights)),
            threads=threads,
            context=context,
            flags=(abi.OPTION_RANKS if ranks else 0) | (abi.OPTION_LOOPED if looped_of else 0),
            wait_limit_s=wait_limit,
        )
        try:
            if placement:
                self._need("mk_create_placed", "has all ranks in one process")
                part = abi.Placement(placement.first, placement.held, placement.device)
                code = library.lib.mk_create_placed(ctypes.byref(options), ctypes.byref(part), ctypes.byref(handle))
            else:
                code = library.lib.mk_create(ctypes.byref(options), ctypes.byref(handle))
            if code != abi.OK:
                raise library.error(code, "starting the kernel", starting=True)
        except BaseException:
            library.close()
            raise
        self._handle = handle

    def _ready(self) -> ctypes.c_void_p:
        """The handle; UserError when the model is closed or a generation still runs."""
        if self._handle is None:
            raise UserError("the model is closed; load it again")
        if self._run is not None and self._run.running:
            raise UserError("the model is still generating; finish or close that generation first")
        if self.others and self.others.follows:
            raise UserError("this process has no rank 0: Model.follow() does here what is asked of that one")
        return self._handle

    def addresses(self) -> bytes:
        """Where the memory of this process's ranks is, for connect() in other processes."""
        assert self._placement
        found = (ctypes.c_uint8 * (self._placement.held * abi.ADDRESS_BYTES))()
        self._check(self._library.lib.mk_addresses(self._handle, found), "offering memory to other processes")
        return bytes(found)

    def connect(self, addresses: bytes | None) -> None:
        """Opens the memory that all ranks' addresses tell of, in the order of ranks; None closes it."""
        assert self._placement
        if addresses is not None and len(addresses) != self._placement.tp * abi.ADDRESS_BYTES:
            raise InternalError(f"addresses of {self._placement.tp} ranks: found {len(addresses)} bytes")
        given = None if addresses is None else (ctypes.c_uint8 * len(addresses)).from_buffer_copy(addresses)
        self._check(self._library.lib.mk_connect(self._handle, given), "opening the memory of other processes")

    def _announce(self, call: str, tokens: Sequence[int], **more: Any) -> None:
        if self.others:
            length = int(self._library.lib.mk_length(self._handle))
            self.others.announce({"call": call, "length": length, "tokens": list(tokens), **more})

    def repeat(self, call: Mapping[str, Any]) -> None:
        """A call that rank 0's process makes, in one without it. That one is told what is wrong with it."""
        lib, handle, tokens = self._library.lib, self._handle, call["tokens"]
        ids, count = (ctypes.c_int32 * len(tokens))(*tokens), len(tokens)
        self._check(lib.mk_truncate(handle, call["length"]), "truncating the cache")
        if call["call"] == "step":
            code = lib.mk_step(handle, ids, count, None, call["num_logits"])
        elif call["call"] == "time_step":
            code = lib.mk_time_step(handle, ids, count, ctypes.byref(abi.Timing()))
        else:
            stops = call["stop_tokens"]
            stop_ids = (ctypes.c_int32 * len(stops))(*stops)
            request = abi.Request(**call["request"], stop_tokens=stop_ids, num_stop_tokens=len(stops))
            code = lib.mk_generate(handle, ids, count, request, abi.TokenCallback(), None, abi.Result())
        if code not in (abi.ERR_ARGUMENT, abi.ERR_CONTEXT):
            self._check(code, call["call"])

    def _check(self, code: int, doing: str) -> None:
        if code != abi.OK:
            raise self._library.error(code, doing)

    def _need(self, function: str, without: str) -> None:
        """UserError when the kernel lacks an optional function of the ABI; `without`: what it then does."""
        if not hasattr(self._library.lib, function):
            raise UserError(
                f"this kernel {without}: it is for a CPU or was built by an older mkpack; build the artifact "
                "again, for a GPU target"
            )

    def length(self) -> int:
        handle = self._ready()
        return int(self._library.lib.mk_length(handle))

    def truncate(self, length: int) -> None:
        handle = self._ready()
        self._check(self._library.lib.mk_truncate(handle, length), "truncating the cache")

    def step(self, tokens: Sequence[int], logits: np.ndarray) -> None:
        """Runs at most MAX_STEP_TOKENS tokens; logits: float32 [num_logits, vocab_size], contiguous, filled in."""
        handle, ids = self._ready(), (ctypes.c_int32 * len(tokens))(*tokens)
        self._announce("step", tokens, num_logits=len(logits))
        self._check(self._library.lib.mk_step(handle, ids, len(tokens), _floats(logits), len(logits)), "a step")

    def step_taps(self, tokens: Sequence[int], logits: np.ndarray, layers: Sequence[int], hidden: np.ndarray) -> None:
        """step(); hidden: float32 [len(layers), len(tokens), hidden_size], contiguous, filled in."""
        if not hasattr(self._library.lib, "mk_step_taps"):
            raise UserError("this kernel tells no hidden states: it was built by an older mkpack; build it again")
        handle, ids = self._ready(), (ctypes.c_int32 * len(tokens))(*tokens)
        taps = (ctypes.c_int32 * len(layers))(*layers)
        call = self._library.lib.mk_step_taps
        code = call(handle, ids, len(tokens), _floats(logits), len(logits), taps, len(layers), _floats(hidden))
        self._check(code, "a step")

    def read_bandwidth(self) -> float:
        handle, result = self._ready(), ctypes.c_double()
        self._check(self._library.lib.mk_read_bandwidth(handle, ctypes.byref(result)), "measuring the bandwidth")
        return result.value

    def time_step(self, tokens: Sequence[int]) -> tuple[float, float]:
        """mk_time_step: seconds of a step, and distinct experts a layer."""
        self._need("mk_time_step", "times no single step")
        handle, ids, result = self._ready(), (ctypes.c_int32 * len(tokens))(*tokens), abi.Timing()
        self._announce("time_step", tokens)
        code = self._library.lib.mk_time_step(handle, ids, len(tokens), ctypes.byref(result))
        self._check(code, "timing a step")
        return result.step_s, result.experts

    def time_rank(self, tokens: Sequence[int]) -> RankTiming:
        """mk_time_rank."""
        self._need("mk_time_rank", "times no rank alone")
        handle, ids, found = self._ready(), (ctypes.c_int32 * len(tokens))(*tokens), abi.RankTiming()
        self._check(self._library.lib.mk_time_rank(handle, ids, len(tokens), ctypes.byref(found)), "timing a step")
        a, b = found.step, found.without
        return RankTiming(a.step_s, a.experts, b.step_s, b.experts, found.exchanges, found.bytes)

    def trace(self, tokens: Sequence[int], steps: int) -> tuple[list[str], np.ndarray]:
        """mk_trace: names of the rows, and int64 [steps, layers, rows, sms, 4]."""
        import numpy as np

        self._need("mk_trace", "keeps no times (mkpack build --trace)")
        handle, ids, shape = self._ready(), (ctypes.c_int32 * len(tokens))(*tokens), abi.TraceShape()
        call = self._library.lib.mk_trace
        self._check(call(handle, ids, len(tokens), steps, None, ctypes.byref(shape)), "tracing")
        stamps = np.zeros((steps, shape.layers, shape.rows, shape.sms, 4), np.int64)
        target = stamps.ctypes.data_as(ctypes.POINTER(ctypes.c_int64))
        self._check(call(handle, ids, len(tokens), steps, target, ctypes.byref(shape)), "tracing")
        return shape.names.decode().split("\n"), stamps

    def generate(self, prompt: Sequence[int], request: abi.Request) -> Run:
        """Starts mk_generate on a thread of its own."""
        handle = self._ready()
        numbers = {name: getattr(request, name) for name in abi.REQUEST_NUMBERS}
        self._announce(
            "generate", prompt, request=numbers, stop_tokens=list(request.stop_tokens[: request.num_stop_tokens])
        )
        self._run = Run(self._library, handle, prompt, request)
        return self._run

    def close(self) -> None:
        """Cancels what runs, then frees the model and unloads its library."""
        if self._handle is None:
            return
        if self._run is not None:
            self._run.stop()
        if self.others:
            self.others.leave(lambda: self.connect(None), self._wait_limit)
        handle, self._handle = self._handle, None
        self._library.lib.mk_destroy(handle)
        self._library.close()


def _floats(array: np.ndarray) -> Any:
    """Pointer to float32 numbers, or None where there are none."""
    return array.ctypes.data_as(ctypes.POINTER(ctypes.c_float)) if array.size else None


class Run:
    """One mk_generate. Iterating gives each token as it is chosen, a stop token included."""

    def __init__(self, library: Library, handle: ctypes.c_void_p, prompt: Sequence[int], request: abi.Request) -> None:
        self.tokens: list[int] = []
        self.result = abi.Result()
        self.error: Exception | None = None
        self._library = library
        self._handle = handle
        self._prompt = (ctypes.c_int32 * len(prompt))(*prompt)
        self._request = request
        self._queue: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._stopping = False
        # A daemon, so that leaving the program cancels the generation instead of waiting for its end.
        self._thread = threading.Thread(target=self._work, name="mkpack-generate", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        @abi.TokenCallback
        def callback(_user: int | None, token: int) -> int:
            self.tokens.append(token)
            self._queue.put(token)
            return int(self._stopping)

        try:
            code = self._library.lib.mk_generate(
                self._handle, self._prompt, len(self._prompt), self._request, callback, None, self.result
            )
            if code != abi.OK:  # here, because mk_last_error() belongs to this thread
                self.error = self._library.error(code, "generating")
        finally:
            self._queue.put(None)

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    def __iter__(self) -> Iterator[int]:
        while (token := self._queue.get()) is not None:
            yield token
        self._thread.join()

    def stop(self) -> None:
        """Ends the run and waits until it has ended; nothing when it already has."""
        self._stopping = True
        while self._thread.is_alive():
            # Again and again: a cancel that comes before mk_generate begins may be forgotten by it.
            self._library.lib.mk_cancel(self._handle)
            self._thread.join(0.02)
