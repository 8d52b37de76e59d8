"""Ranks in processes that a launcher started: what it must say, how they meet, what `mkpack run` then does."""

from __future__ import annotations

import json
import socket
import sys
import threading

import builds
import emulator
import families
import launched
import pytest
from test_gpu_emulated import SHAPE

from mkpack import build as builder
from mkpack import launcher
from mkpack.errors import InternalError, UserError
from mkpack.native import Placement

BLOCKS = 4
TOLD = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "host", "MASTER_PORT": "123"}
ONE = launcher.World(1, 2, 1, 2, "host", 123)


@pytest.mark.parametrize("given", [{}, {"WORLD_SIZE": "1", "RANK": "0", "MASTER_ADDR": "host"}, {"RANK": "0"}])
def test_one_process_needs_no_launcher(given):
    assert launcher.world(given) is None


def test_what_a_launcher_says():
    assert launcher.world(TOLD) == ONE
    more = {**TOLD, "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4"}
    del more["MASTER_PORT"]
    assert launcher.world(more) == launcher.World(1, 2, 3, 4, "host", launcher.PORT)


@pytest.mark.parametrize(
    ("without", "changed", "text"),
    [
        ("RANK", {}, "rank ?, as its launcher set it up: RANK: expected a number from 0 on, it is not set"),
        ("WORLD_SIZE", {}, "rank 1, as its launcher set it up: WORLD_SIZE: expected a number from 1 on, it is not set"),
        (
            "MASTER_ADDR",
            {},
            "rank 1, as its launcher set it up: MASTER_ADDR: expected the host where rank 0 runs, it is",
        ),
        ("", {"RANK": "x"}, "rank x, as its launcher set it up: RANK: expected a number from 0 on, found 'x'"),
        ("", {"RANK": "2"}, "rank 2, as its launcher set it up: RANK 2: expected 0 to 1, WORLD_SIZE is 2"),
        ("", {"LOCAL_RANK": "-1", "MASTER_PORT": "0"}, "rank 1, as its launcher set it up: 2 problems\n  - LOCAL_RANK"),
    ],
)
def test_what_a_launcher_does_not_say_is_refused(without, changed, text):
    given = {name: value for name, value in {**TOLD, **changed}.items() if name != without}
    with pytest.raises(UserError) as error:
        launcher.world(given)
    assert str(error.value).startswith(text)


@pytest.mark.parametrize(
    ("tp", "per_device", "devices", "placement"),
    [
        (2, 1, 2, Placement(1, 1, 2, 1)),  # a GPU each
        (2, 1, 1, Placement(1, 1, 2, 0)),  # one for both, in turns
        (4, 2, 2, Placement(2, 2, 4, 1)),  # two ranks each
        (8, 4, 0, Placement(4, 4, 8, 0)),
    ],
)
def test_ranks_of_a_process(tp, per_device, devices, placement):
    assert ONE.place(tp, per_device, devices) == placement


@pytest.mark.parametrize(
    ("tp", "per_device", "text"),
    [
        (4, 1, "rank 1: WORLD_SIZE 2: expected 4, for the 4 ranks this artifact was built for"),
        (8, 2, "rank 1: WORLD_SIZE 2: expected 4 or 8, for the 8 ranks this artifact was built for"),
        (1, 1, "rank 1: WORLD_SIZE 2: expected an artifact of several ranks (parallel.tp), this one has one"),
    ],
)
def test_a_world_that_cannot_share_the_ranks_is_refused(tp, per_device, text):
    with pytest.raises(UserError) as error:
        ONE.place(tp, per_device, 1)
    assert str(error.value) == text


def test_without_torch_it_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.distributed", None)
    with pytest.raises(
        UserError, match=r"^rank 1: WORLD_SIZE is 2, and processes meet in torch\.distributed's store, but"
    ):
        launcher.Group(ONE, {})


# ---- how they meet: a thread each instead of a process, since importing torch takes seconds --------------------------
class Rank(threading.Thread):
    """One of three, which meets the others and then does `work` with its Group."""

    def __init__(self, rank, port, limit=20.0, artifact="a", work=None):
        super().__init__(name=str(rank))
        self.world = launcher.World(rank, 3, rank, 3, "127.0.0.1", port, limit)
        self.artifact, self.work, self.error, self.done = artifact, work, None, None
        self.start()

    def run(self):
        try:
            self.group = launcher.Group(self.world, {"artifact": self.artifact})
            self.done = self.work and self.work(self.group)
        except (UserError, InternalError) as error:
            self.error = str(error)


def meet(ranks, limit=20.0, work=None, artifacts="aaa"):
    port = launched.free_port()
    found = [Rank(rank, port, limit, artifacts[rank], work) for rank in ranks]
    for rank in found:
        rank.join(60)
    return found


def test_ranks_that_differ_are_named(monkeypatch):
    monkeypatch.setattr(launcher, "_host", lambda: "there" if threading.current_thread().name == "2" else "here")
    (said,) = {rank.error for rank in meet([0, 1, 2], artifacts="aba")}
    assert said.startswith(
        "ranks cannot work together: 2 problems\n  - rank 1 has another artifact: expected a as rank 0, "
    )
    assert f"found b\n  - rank 2 is on {socket.gethostname()}, rank 0 on {socket.gethostname()} or in another" in said


def test_a_rank_that_does_not_come_is_named():
    for i, rank in enumerate(meet([0, 1], 2.0)):
        assert rank.error.startswith(f"rank {i}: rank 2 did not come within 2 s to 127.0.0.1:")


def test_a_store_that_nobody_keeps_is_an_error():
    (rank,) = meet([1], 1.0)
    assert rank.error.startswith("rank 1: no store at 127.0.0.1:") and "which rank 0 keeps, within 1 s" in rank.error


def test_calls_reach_all_and_all_leave_together():
    left = []

    def work(group):
        seen = []
        if group.follows:
            group.follow(seen.append)
        else:
            for i in range(3):
                group.announce({"call": "step", "tokens": [i]})
        group.leave(lambda: left.append(0), 5.0)
        return seen, len(left)

    found = meet([0, 1, 2], work=work)
    assert [rank.error for rank in found] == [None] * 3
    assert found[1].done[0] == found[2].done[0] == [{"call": "step", "tokens": [i]} for i in range(3)]
    assert [rank.done[1] for rank in found] == [3] * 3, "nobody goes on before all have let go"


class Memory:
    """In place of a NativeModel."""

    others = None

    def addresses(self):
        return threading.current_thread().name.encode()

    def connect(self, addresses):
        self.connected = addresses


def test_addresses_reach_all_in_the_order_of_ranks():
    def work(group):
        memory = Memory()
        with group.loading():
            group.connect(memory)
        return memory.connected, memory.others is group

    assert [rank.done for rank in meet([0, 1, 2], work=work)] == [(b"012", True)] * 3


def test_a_rank_that_cannot_load_is_named():
    def work(group):
        with group.loading():
            if threading.current_thread().name == "1":
                raise UserError("out of memory")
            group.connect(Memory())

    first, second, third = (rank.error for rank in meet([0, 1, 2], work=work))
    assert second == "out of memory"
    assert (first, third) == tuple(f"rank {rank}: rank 1 could not load its weights; it may say why" for rank in (0, 2))


# ---- mkpack run ------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def artifact(tmp_path_factory):
    folder = tmp_path_factory.mktemp("launched")
    with emulator.machine(BLOCKS):
        checkpoint = families.make_checkpoint(folder / "checkpoint", "qwen3_moe", **SHAPE)
        keys = {"targets": ["sm_90a"], "limits": {"context": 48}, "parallel": {"tp": 2, "per_device": 2}}
        return builder.build(builds.write_recipe(folder / "recipe.yaml", checkpoint, **keys), output=folder)


def ask(artifact, *more):
    return ["run", artifact, "--prompt", "hi", "--raw", "-n", "6", "--temperature", "1", "--seed", "5", "--json", *more]


def test_run_says_what_one_process_says(artifact):
    port = launched.free_port()
    both = [launched.start(rank, 2, port, BLOCKS, *ask(artifact)) for rank in range(2)]
    alone = launched.start(0, 1, port, BLOCKS, *ask(artifact))
    (first, error), (second, _), (wanted, _) = (p.communicate(timeout=120) for p in (*both, alone))
    assert [p.returncode for p in (*both, alone)] == [0, 0, 0], error
    assert second == "" and json.loads(first)["tokens"] == json.loads(wanted)["tokens"]


def left_by(killed, artifact):
    """The other of two processes that have answered, when one was killed."""
    port = launched.free_port()
    both = [launched.start(rank, 2, port, BLOCKS, "--talk", artifact) for rank in range(2)]
    assert both[0].stdout.readline() == "answered\n"
    both[killed].kill()
    both[killed].communicate()
    return both[1 - killed]


def test_processes_that_are_killed_are_named(artifact):
    """Rank 1's while rank 0 waits for its next prompt: its next answer ends within the limit."""
    left = left_by(1, artifact)
    _, error = left.communicate("again\n", timeout=60)
    assert left.returncode == 1 and "of rank 0 made no progress" in error, error
    assert "waiting for what rank 1 computes" in error


def test_ranks_that_rank_0_leaves_alone_end(artifact):
    left = left_by(0, artifact)
    _, error = left.communicate(timeout=60)
    assert left.returncode == 1 and error.startswith("rank 1: the "), error
