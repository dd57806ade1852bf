"""One observer for both systems: when was each step's line written, and what did a kill cost?

Both write one line a finished step into a file, flushed, from the rank that knows the loss. The observer reads what
is new every 5 ms and notes its own clock, so both systems are timed by one clock, one rule and one process, and
neither is asked to measure itself. The clock is made as the controller's is (wall time anchored once, then
monotonic), so that a generation's journaled times can be compared with it to the millisecond.

Trade-off: a line is seen up to 5 ms late, more when the machine is so loaded that the observer waits for a core.
"""

from __future__ import annotations

import os
import re
import signal
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Protocol

from myriad.runtime.clock import HostClock

POLL_S = 0.005
ASK_S = 0.1  # between looks at anything but the log
_STEP = re.compile(r"step (\d+) of \d+: loss ([^\s,]+)")


class RunFailed(Exception):
    """A system did not do what it had to, or not in time; the message says what."""


@dataclass(frozen=True)
class Seen:
    """A finished step, as its line was seen."""

    at_s: float
    number: int
    loss: str


@dataclass(frozen=True)
class Kill:
    """SIGKILL of ``rank``, ``part`` of a median step after the line of step ``step``."""

    step: int
    rank: int
    part: float


@dataclass(frozen=True)
class Recovery:
    """What one kill cost. Seconds from the last step of the old workers, less one median step."""

    kill: Kill
    downtime_s: float  # to the first step of the new workers
    regained_s: float  # to the first step that the old ones had not done: redone steps included
    last_step: int
    redone: int
    killed_at_s: float
    first_at_s: float


class Observer:
    """Reads a system's log from its beginning."""

    def __init__(self, log: Path, clock: HostClock) -> None:
        self._log, self._clock = log, clock
        self._offset, self._rest = 0, ""
        self.steps: list[Seen] = []
        self.others: list[tuple[float, str]] = []  # all other lines

    def look(self) -> None:
        """Take in what has been written since the last look."""
        try:
            if self._log.stat().st_size == self._offset:
                return
        except FileNotFoundError:
            return
        with self._log.open("rb") as file:
            file.seek(self._offset)
            new = file.read()
        now = self._clock.now()
        self._offset += len(new)
        *lines, self._rest = (self._rest + new.decode(errors="replace")).split("\n")
        for line in lines:
            if (match := _STEP.match(line)) is not None:
                self.steps.append(Seen(now, int(match.group(1)), match.group(2)))
            else:
                self.others.append((now, line))

    def watch(self, seconds: float) -> None:
        """Look for so long."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            self.look()
            time.sleep(min(POLL_S, left))

    def until(self, what: str, done: Callable[[], bool], deadline_s: float, every_s: float = POLL_S) -> None:
        """Look until ``done``, asked every ``every_s``; RunFailed after ``deadline_s`` seconds."""
        end, ask = time.monotonic() + deadline_s, 0.0
        while True:
            self.look()
            now = time.monotonic()
            if now >= ask:
                if done():
                    return
                ask = now + every_s
            if now > end:
                tail = " / ".join(line for _, line in self.others[-5:])
                raise RunFailed(f"after {deadline_s:g} s still not: {what}; the log ends with: {tail}")
            time.sleep(POLL_S)

    def line_s(self, line: str) -> float | None:
        """When ``line`` was first seen."""
        return next((at_s for at_s, text in self.others if text == line), None)

    def between(self, begin_s: float, end_s: float = float("inf")) -> list[Seen]:
        return [seen for seen in self.steps if begin_s < seen.at_s < end_s]

    def reached(self, number: int, since_s: float) -> bool:
        """Whether a worker started at ``since_s`` has finished step ``number``."""
        return any(seen.number >= number for seen in self.between(since_s))


class System(Protocol):
    """What is measured: a job that runs, whose workers can be killed and come back by themselves."""

    name: str
    log: Path

    def pid(self, rank: int) -> int:
        """Of a worker that runs now."""

    def restarted_s(self, number: int, observer: Observer) -> float | None:
        """A time after the end of the old workers and before a step of restart ``number`` (1 is the first);
        None: not yet."""


def measure(
    system: System, kills: Sequence[Kill], clock: HostClock, deadline_s: float, enough_s: float
) -> tuple[list[Recovery], float, Observer]:
    """Kill as planned and watch; the recoveries, the median step in seconds, and all that was seen.

    ``deadline_s`` holds for the first step and for each wait after it. No further kill is made once ``enough_s``
    seconds have passed since the first step.
    """
    observer = Observer(system.log, clock)
    observer.until("a first step", lambda: bool(observer.steps), deadline_s)
    first_s, began_s, spans = clock.now(), [0.0], []
    for number, kill in enumerate(kills, 1):
        if number > 1 and clock.now() - first_s > enough_s:
            break
        spans.append(_kill(system, observer, clock, kill, number, began_s[-1], deadline_s))
        began_s.append(spans[-1].restarted_s)
    runs = pairwise([*began_s, float("inf")])
    median_s = statistics.median(interval for run in runs for interval in _intervals(observer.between(*run)))
    return [_recovery(observer, median_s, span) for span in spans], median_s, observer


@dataclass(frozen=True)
class _Span:
    """A kill, the old workers' last step, and the start of the new ones."""

    kill: Kill
    killed_s: float
    last: Seen
    restarted_s: float


def _kill(
    system: System,
    observer: Observer,
    clock: HostClock,
    kill: Kill,
    number: int,
    since_s: float,
    deadline_s: float,
) -> _Span:
    """Make one kill, and wait for the first step that the workers started at ``since_s`` had not done."""
    observer.until(f"step {kill.step}", lambda: observer.reached(kill.step, since_s), deadline_s)
    pid = system.pid(kill.rank)
    observer.watch(kill.part * statistics.median(_intervals(observer.between(since_s))))
    os.kill(pid, signal.SIGKILL)
    killed_s = clock.now()
    observer.until(
        f"restart {number}",
        lambda: system.restarted_s(number, observer) is not None,
        deadline_s,
        every_s=ASK_S,
    )
    restarted_s = system.restarted_s(number, observer)
    assert restarted_s is not None
    last = observer.between(since_s, restarted_s)[-1]
    what = f"a new step after restart {number}"
    observer.until(what, lambda: observer.reached(last.number + 1, restarted_s), deadline_s)
    return _Span(kill, killed_s, last, restarted_s)


def _recovery(observer: Observer, median_s: float, span: _Span) -> Recovery:
    new, last = observer.between(span.restarted_s), span.last
    beyond = next(seen for seen in new if seen.number > last.number)
    return Recovery(
        kill=span.kill,
        downtime_s=new[0].at_s - last.at_s - median_s,
        regained_s=beyond.at_s - last.at_s - median_s,
        last_step=last.number,
        redone=last.number + 1 - new[0].number,
        killed_at_s=span.killed_s,
        first_at_s=new[0].at_s,
    )


def _intervals(steps: Sequence[Seen]) -> list[float]:
    """Seconds from each of one start's steps to the next; its first step, which is warm-up, ends none."""
    return [b.at_s - a.at_s for a, b in pairwise(steps)]
