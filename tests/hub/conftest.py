"""A hub, and mkpack as its client, for tests of publishing and of running what was published."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from client import Client
from server import FakeHub


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    with FakeHub() as hub:
        yield hub


@pytest.fixture
def client(hub: FakeHub, tmp_path: Path) -> Iterator[Client]:
    client = Client(hub, tmp_path)
    yield client
    client.kill()
