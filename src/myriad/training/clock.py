"""Where the time of a step goes: every second belongs to exactly one cause.

Method: a stack of open sections on the main thread; the time between two changes belongs to the innermost
one, so the parts tile the wall time by construction and nested sections are never counted twice. What no
section claims is ``other``. A change costs about 0.5 us.

Communication is only carved out of compute: a collective inside a checkpoint, the data loader or an
evaluation belongs to those, because that is what the job was waiting for.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

Cause = Literal["other", "compute", "communication", "data", "checkpoint", "evaluation"]
CARVED: tuple[Cause, ...] = ("compute", "other")  # sections that communication is taken out of


@dataclass(frozen=True)
class Lap:
    """One step's wall time in seconds and its parts, which sum to it."""

    wall_s: float
    parts_s: dict[Cause, float]


class StepClock:
    """Exclusive seconds by cause since the last :meth:`lap`. Sections of other threads are ignored."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._thread = threading.get_ident()
        self._stack: list[Cause] = ["other"]
        self._parts_s: dict[Cause, float] = {}
        self._began = self._changed = now()

    @contextmanager
    def section(self, cause: Cause) -> Iterator[None]:
        """Time inside belongs to ``cause``, except what sections within claim."""
        if threading.get_ident() != self._thread:
            yield
            return
        innermost = self._stack[-1]
        self._change()
        self._stack.append(innermost if cause == "communication" and innermost not in CARVED else cause)
        try:
            yield
        finally:
            self._change()
            self._stack.pop()

    def lap(self) -> Lap:
        """Close the account of this step and open the next one at the same instant."""
        self._change()
        lap = Lap(self._changed - self._began, self._parts_s)
        self._parts_s, self._began = {}, self._changed
        return lap

    def _change(self) -> None:
        now = self._now()
        cause = self._stack[-1]
        self._parts_s[cause] = self._parts_s.get(cause, 0.0) + now - self._changed
        self._changed = now
