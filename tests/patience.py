"""How long tests wait for what never takes long: a limit that only a hang reaches, however busy the machine is."""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE_S = 300


def until(holds: Callable[[], object]) -> None:
    """Waits until holds() is true, which it soon is."""
    end = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < end, f"waited {PATIENCE_S} s in vain"
        time.sleep(0.005)
