"""When a rank saves, and what that costs it.

All ranks must save at the same steps, and what the controller decides reaches each at a moment of its own. So the
first rank's word counts, and the ranks pass it on at durable checkpoints, where all of them are at the same step.
Between two of these nothing changes. What a program has fixed itself stays fixed.

The costs are medians of what training stood still for since the last durable checkpoint was reported.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

from msgspec import structs

from myriad.spec.messages import Intervals, SaveCosts

REMEMBERED = 64  # steps and saves that a median is of


@dataclass(frozen=True)
class Due:
    """What is saved after a step."""

    memory: bool
    peer: bool
    durable: bool


class Cadence:
    """``durable_step`` is the last one on storage, ``last_step`` the job's last; ``fixed`` are the intervals that the
    program itself has set, ``copies`` says whether there are any."""

    def __init__(
        self,
        intervals: Intervals,
        copies: bool,
        durable_step: int | None,
        last_step: int | None,
        fixed: Mapping[str, int] | None = None,
    ) -> None:
        self._fixed, self._copies, self._last_step = dict(fixed or {}), copies, last_step
        self._since = durable_step or 0  # where the intervals of durable checkpoints are counted from
        self.intervals = structs.replace(intervals, **self._fixed)
        self.wished = intervals  # by the controller
        self._steps_s: deque[float] = deque(maxlen=REMEMBERED)
        self._memory_s: deque[float] = deque(maxlen=REMEMBERED)
        self._peer_s: deque[float] = deque(maxlen=REMEMBERED)
        self._durable_s = 0.0

    def due(self, step: int) -> Due:
        peer = self._copies and self.intervals.peer > 0 and step % self.intervals.peer == 0
        durable = (step - self._since) % self.intervals.durable == 0 or step == self._last_step
        return Due(durable or peer or step % self.intervals.memory == 0, peer, durable)

    def adopt(self, words: Intervals, step: int) -> None:
        """At the durable checkpoint of ``step``, on all ranks: from now on it is as the first rank was told."""
        self._since = step
        self.intervals = structs.replace(words, **self._fixed)

    def stepped(self, seconds: float) -> None:
        """A step took ``seconds``, its saves not counted."""
        self._steps_s.append(seconds)

    def saved(self, due: Due, seconds: float) -> None:
        """Training stood still for ``seconds`` to save what was due."""
        if due.durable:
            self._durable_s = seconds
        elif due.peer:
            self._peer_s.append(seconds)
        elif due.memory:
            self._memory_s.append(seconds)

    def costs(self) -> SaveCosts:
        """What was measured; 0 where nothing was."""
        memory_s, peer_s, step_s = (
            median(each) if each else 0.0 for each in (self._memory_s, self._peer_s, self._steps_s)
        )
        return SaveCosts(step_s, memory_s, peer_s, self._durable_s, self.intervals, tuple(self._fixed))
