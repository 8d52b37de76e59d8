"""Tensors packed side by side: how many at a time, in which order results come, and what ends it."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from patience import until

from mkpack import packing, platform
from mkpack.spec import TensorRole

SIZES = [100, *[10] * 30, 60, *[20] * 20, 100]


class Work:
    """Takes a moment for every tensor, and remembers what was under way together. The small ones go on when so many
    have been `together`. After the one that `fails` they take long."""

    def __init__(self, fails: str = "", together: int = 1) -> None:
        self._lock, self._fails, self._together = threading.Lock(), fails, together
        self.held, self.running, self.most_held, self.most_running = 0, 0, 0, 0
        self.done: list[str] = []

    def __call__(self, group: list[TensorRole]) -> str:
        (role,) = group
        with self._lock:
            self.held, self.running = self.held + role.shape[0], self.running + 1
            self.most_held, self.most_running = max(self.most_held, self.held), max(self.most_running, self.running)
        if role.shape[0] == min(SIZES):
            until(lambda: self.most_running >= self._together)
        time.sleep(0.1 if self._fails in self.done else 0.001)
        with self._lock:
            self.held, self.running = self.held - role.shape[0], self.running - 1
            self.done.append(role.name)
        if role.name == self._fails:
            raise ValueError(f"{role.name} is damaged")
        return role.name


def each(work: Work, monkeypatch: pytest.MonkeyPatch, cores: int, kernels: Future[Any] | None = None) -> list[str]:
    monkeypatch.setattr(platform, "cores", lambda: cores)
    roles = [TensorRole(f"t{i}", f"t{i}", (size,), None) for i, size in enumerate(SIZES)]
    todo: Any = SimpleNamespace(roles=roles, group_bytes=lambda group: sum(r.shape[0] for r in group))
    return packing._each(work, todo, {}, kernels or Future(), None)


@pytest.mark.parametrize("cores", [1, 4, 50])
def test_together_they_take_no_more_memory_than_the_largest(monkeypatch, cores):
    work = Work(together=min(cores, 3))
    assert each(work, monkeypatch, cores) == [f"t{i}" for i in range(len(SIZES))]
    assert work.most_held <= max(SIZES) and work.most_running <= cores
    assert work.most_running == 1 if cores == 1 else work.most_running >= 3


@pytest.mark.parametrize("cores", [1, 4])
def test_the_first_error_ends_it(monkeypatch, cores):
    work = Work("t7")
    with pytest.raises(ValueError, match="t7 is damaged"):
        each(work, monkeypatch, cores)
    assert len(work.done) < len(SIZES) // 2 and work.running == 0


def test_a_compiler_that_failed_ends_it(monkeypatch):
    work, kernels = Work(), Future[Any]()
    kernels.set_exception(RuntimeError("no kernel"))
    with pytest.raises(RuntimeError, match="no kernel"):
        each(work, monkeypatch, 4, kernels)
    assert work.done == []
