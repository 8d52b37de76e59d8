"""Ranks of one artifact in several processes of one host, started by torchrun or whatever sets RANK, WORLD_SIZE and
MASTER_ADDR. They meet in torch.distributed's store, hand each other the addresses of their GPU memory, and then the
process of rank 0 tells the others every call that it makes.

The one file of the run side that imports torch, when ranks meet. docs/TENSOR_PARALLEL.md, "Ranks in several processes".
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from mkpack.errors import InternalError, UserError, combine
from mkpack.native import Placement

if TYPE_CHECKING:
    from mkpack.model import Model
    from mkpack.native import NativeModel

MEET_LIMIT_S = 120.0  # from one process's start to the last one's
LOAD_LIMIT_S = 3600.0  # from the first process that has loaded its weights to the last one
KEEPER_S = 5.0  # after an error, until the last process knows of it
LEAVE_LIMIT_S = 10.0  # beyond the longest wait of a kernel
PORT = 29500  # torchrun's own, where MASTER_PORT is not set
_GAVE_UP = b"gave up"
_POLL = timedelta(seconds=0.5)  # between two looks at whether a process still lives


@dataclass(frozen=True)
class World:
    """What a launcher tells one of its processes. rank: this one of world_size; local_rank: of those on this host."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    address: str
    port: int
    meet_limit: float = MEET_LIMIT_S

    def place(self, tp: int, per_device: int, devices: int) -> Placement:
        """Which of tp ranks this process has and on which GPU of those it sees: each process its own where there are
        enough, else neighbours share one. UserError when so many processes cannot share the ranks."""
        fit = [n for n in range(2, tp + 1) if tp % n == 0 and tp // n <= per_device]
        if self.world_size not in fit:
            wanted = " or ".join(map(str, fit)) or "an artifact of several ranks (parallel.tp), this one has one"
            raise UserError(
                f"rank {self.rank}: WORLD_SIZE {self.world_size}: expected {wanted}"
                + (f", for the {tp} ranks this artifact was built for" if fit else "")
            )
        held, here = tp // self.world_size, max(1, self.local_world_size)
        device = self.local_rank if devices >= here else self.local_rank * max(devices, 1) // here
        return Placement(self.rank * held, held, tp, device)


def world(environment: Mapping[str, str] | None = None) -> World | None:
    """What a launcher says in the environment; None where there is none or it started one process only.

    UserError naming every variable that is missing or wrong.
    """
    given = os.environ if environment is None else environment
    if given.get("WORLD_SIZE", "1") == "1" and not (given.get("RANK", "0") != "0" and "WORLD_SIZE" not in given):
        return None
    wrong: list[str] = []

    def number(name: str, least: int, otherwise: int | None = None) -> int:
        text = given.get(name)
        if text is None and otherwise is not None:
            return otherwise
        if text is None or not text.isdecimal() or int(text) < least:
            found = "it is not set" if text is None else f"found {text!r}"
            wrong.append(f"{name}: expected a number from {least} on, {found}")
            return least
        return int(text)

    rank, size = number("RANK", 0), number("WORLD_SIZE", 1)
    local = number("LOCAL_RANK", 0, rank), number("LOCAL_WORLD_SIZE", 1, size)
    port = number("MASTER_PORT", 1, PORT)
    address = given.get("MASTER_ADDR", "")
    if not address:
        wrong.append("MASTER_ADDR: expected the host where rank 0 runs, it is not set")
    if not wrong and rank >= size:
        wrong.append(f"RANK {rank}: expected 0 to {size - 1}, WORLD_SIZE is {size}")
    if wrong:
        raise combine(f"rank {given.get('RANK', '?')}, as its launcher set it up", wrong)
    return World(rank, size, *local, address, port)


def serve(model: Model) -> None:
    """Model.follow() of a program that rank 0's is the front of: Ctrl-C, which all of them get, is for that one."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    model.follow()


class Group:
    """The processes of a World that have met: what NativeModel knows as its `others`."""

    def __init__(self, world: World, facts: Mapping[str, str]) -> None:
        """Waits for all, at most world.meet_limit. facts: what must be the same in all, by its name for messages.

        UserError naming who did not come, is on another host or has other facts, and without torch."""
        self._world, self._calls, self._closed = world, 0, False
        self._store, self._errors = _open_store(world)
        self._processes: dict[int, int] = {}  # of each other rank a file descriptor that tells when it has ended
        mine = {"name": socket.gethostname(), "host": _host(), "pid": str(os.getpid()), **facts}
        self._store.set(f"hello/{world.rank}", json.dumps(mine))
        found, missing = {world.rank: mine}, []
        until = time.monotonic() + world.meet_limit
        for rank in self._others():
            try:
                found[rank] = json.loads(self._get(f"hello/{rank}", rank, max(0.0, until - time.monotonic())))
            except TimeoutError:
                missing.append(rank)
        if missing:
            self._over(missing)
            raise UserError(
                f"rank {world.rank}: {_ranks(missing)} did not come within {world.meet_limit:g} s to "
                f"{world.address}:{world.port}; expected {world.world_size} processes of this launch"
            )
        self._compare(found, facts)
        for rank in self._others():
            with contextlib.suppress(OSError):  # it ended meanwhile, as the next wait finds out
                self._processes[rank] = os.pidfd_open(int(found[rank]["pid"]))

    @property
    def follows(self) -> bool:
        """Whether this process does what that of rank 0 does."""
        return self._world.rank != 0

    def _others(self) -> Iterable[int]:
        return (rank for rank in range(self._world.world_size) if rank != self._world.rank)

    def _compare(self, found: Mapping[int, Mapping[str, str]], facts: Mapping[str, str]) -> None:
        wrong, first = [], found[0]
        for rank in range(1, self._world.world_size):
            other = found[rank]
            if other["host"] != first["host"]:
                wrong.append(
                    f"rank {rank} is on {other['name']}, rank 0 on {first['name']} or in another container there; "
                    "expected one host and one process namespace, since CUDA IPC reaches no further"
                )
                continue
            wrong += [
                f"rank {rank} has another {name}: expected {first.get(name)} as rank 0, found {other.get(name)}"
                for name in facts
                if other.get(name) != first.get(name)
            ]
        if wrong:
            self._over()
            raise combine("ranks cannot work together", wrong)

    def _over(self, missing: Sequence[int] = ()) -> None:
        """Says that this process ends. Rank 0's, which may keep the store, does so last, when the others know why."""
        until = time.monotonic() + KEEPER_S
        with contextlib.suppress(self._errors.DistError):
            self._store.set(f"over/{self._world.rank}", b"1")
            for rank in () if self.follows else self._others():
                with contextlib.suppress(InternalError, TimeoutError):
                    if rank not in missing:
                        self._get(f"over/{rank}", rank, max(0.0, until - time.monotonic()))

    def _ended(self, rank: int) -> bool:
        """Whether the process of another rank has."""
        process = self._processes.get(rank)
        return bool(process is not None and select.select([process], [], [], 0)[0])

    def _get(self, key: str, rank: int, limit: float) -> bytes:
        """What another rank says under a key. TimeoutError after so many seconds, InternalError when it has ended."""
        until = time.monotonic() + limit
        while True:
            ended = self._ended(rank)  # before the look: what it said last counts
            left = timedelta(seconds=max(0.001, min(until - time.monotonic(), _POLL.total_seconds())))
            try:
                self._store.wait([key], timedelta(seconds=0.001) if ended else left)
                return bytes(self._store.get(key))
            except self._errors.DistNetworkError as e:
                raise InternalError(
                    f"rank {self._world.rank}: the store at {self._world.address}:{self._world.port} is gone, in a "
                    f"wait for rank {rank}; the process that kept it, rank 0's or the launcher, has ended"
                ) from e
            except self._errors.DistStoreError:
                pass  # not there yet
            if ended:
                raise InternalError(f"rank {self._world.rank}: the process of rank {rank} has ended; it may say why")
            if time.monotonic() > until:
                raise TimeoutError

    def _gather(self, what: str, mine: bytes) -> list[bytes]:
        """What every rank says, as soon as all have."""
        self._store.set(f"{what}/{self._world.rank}", mine)
        found = []
        for rank in range(self._world.world_size):
            try:
                found.append(mine if rank == self._world.rank else self._get(f"{what}/{rank}", rank, LOAD_LIMIT_S))
            except TimeoutError:
                raise InternalError(
                    f"rank {self._world.rank}: rank {rank} has not loaded its weights within {LOAD_LIMIT_S:g} s"
                ) from None
            if found[-1] == _GAVE_UP:
                with self._told():
                    first = bytes(self._store.get("failed")).decode()  # others gave up because of it
                raise InternalError(f"rank {self._world.rank}: rank {first} could not load its weights; it may say why")
        return found

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """Around what leads to connect(): where it fails, the others do not wait for this process."""
        try:
            yield
        except BaseException:
            with contextlib.suppress(self._errors.DistError):
                self._store.compare_set("failed", "", str(self._world.rank))
                for what in ("addresses", "connected"):
                    self._store.set(f"{what}/{self._world.rank}", _GAVE_UP)
            self._over()
            self._forget()
            raise

    def connect(self, native: NativeModel) -> None:
        """Tells every process where the memory of the others is; when it returns all know."""
        addresses = b"".join(self._gather("addresses", native.addresses()))
        native.connect(addresses)
        self._gather("connected", b"1")
        native.others = self

    def announce(self, call: Mapping[str, Any]) -> None:
        """Of rank 0: the others do this too."""
        with self._told():
            self._store.set(f"call/{self._calls}", json.dumps(call))
        self._calls += 1

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except self._errors.DistError as e:
            raise InternalError(
                f"rank {self._world.rank}: the store at {self._world.address}:{self._world.port} is gone: {e}"
            ) from e

    def follow(self, repeat: Callable[[Mapping[str, Any]], None]) -> None:
        """Of the others: calls repeat() with what rank 0 announces until that leaves. InternalError when it ends."""
        while True:
            key = f"call/{self._calls}"
            try:
                call = json.loads(self._get(key, 0, 3600.0))
            except TimeoutError:
                continue  # whoever asks rank 0 takes their time
            if call["call"] == "leave":
                return
            repeat(call)
            # The last to read it clears it away.
            with self._told():
                if self._store.add(f"read/{self._calls}", 1) == self._world.world_size - 1:
                    self._store.delete_key(key)
                    self._store.delete_key(f"read/{self._calls}")
            self._calls += 1

    def leave(self, disconnect: Callable[[], None], wait_limit: float) -> None:
        """Closes the others' memory and waits until they have closed this process's, which may then be freed. A process
        that stalls is not waited for longer than its kernel may run."""
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(InternalError, self._errors.DistError):
            if not self.follows:
                self.announce({"call": "leave"})
        disconnect()
        with contextlib.suppress(self._errors.DistError):
            self._store.set(f"left/{self._world.rank}", b"1")
        until = time.monotonic() + wait_limit + LEAVE_LIMIT_S
        for rank in self._others():
            with contextlib.suppress(InternalError, TimeoutError):
                self._get(f"left/{rank}", rank, max(0.0, until - time.monotonic()))
        self._forget()

    def _forget(self) -> None:
        """Closes what tells of the other processes."""
        for process in self._processes.values():
            os.close(process)
        self._processes = {}


def _ranks(found: list[int]) -> str:
    return f"rank {found[0]}" if len(found) == 1 else f"ranks {', '.join(map(str, found))}"


def _host() -> str:
    """The same in all processes that can see each other."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"


def _open_store(world: World) -> tuple[Any, Any]:
    """torch.distributed's store, and the module with its errors. torchrun keeps one itself; else rank 0 does."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # what ends is told here, without the frames of the store
    try:
        import torch.distributed as distributed

        if not distributed.is_available():
            raise ImportError("it was built without torch.distributed")
    except ImportError as e:
        raise UserError(
            f"rank {world.rank}: WORLD_SIZE is {world.world_size}, and processes meet in torch.distributed's store, "
            f"but torch is not here ({e}); pip install torch, or start one process without a launcher"
        ) from e
    kept = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    try:
        store = distributed.TCPStore(
            world.address,
            world.port,
            world.world_size,
            world.rank == 0 and not kept,
            timedelta(seconds=world.meet_limit),
            wait_for_workers=False,
        )
    except (distributed.DistError, RuntimeError, ValueError) as e:
        keeper = "the launcher" if kept else "rank 0"
        raise UserError(
            f"rank {world.rank}: no store at {world.address}:{world.port}, which {keeper} keeps, within "
            f"{world.meet_limit:g} s: {str(e).splitlines()[0]}"
        ) from e
    # After a restart of all ranks torchrun's store still has what they said before.
    again = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return distributed.PrefixStore(f"mkpack/{again}", store), distributed
