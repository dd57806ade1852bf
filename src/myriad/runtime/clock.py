"""The controller's clock: never decreasing, also over restarts and jumps of the wall clock."""

from __future__ import annotations

import time


class HostClock:
    """Wall time read once, then the monotonic clock; starts no earlier than ``floor``."""

    def __init__(self, floor: float = 0.0) -> None:
        self._base = max(time.time(), floor) - time.monotonic()

    def now(self) -> float:
        return self._base + time.monotonic()
