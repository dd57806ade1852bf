"""A child that outlives the agent by a moment, to leave no orphan behind.

The agent tells it each process group it starts and ends, through a pipe. When the agent dies, however
that happens, the pipe closes and the guard kills what is left, grandchildren included (a parent-death
signal would reach only the children). It is forked first, holds nothing else, and ignores signals that a
terminal sends.
"""

from __future__ import annotations

import contextlib
import os
import signal


class Guard:
    """The agent's side."""

    def __init__(self) -> None:
        reading, self._writing = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self._writing)
            _stand_by(reading)
        os.close(reading)

    def add(self, group: int) -> None:
        self._tell(f"+{group}\n")

    def remove(self, group: int) -> None:
        self._tell(f"-{group}\n")

    def _tell(self, line: str) -> None:
        with contextlib.suppress(BrokenPipeError):  # somebody killed the guard: PDEATHSIG remains
            os.write(self._writing, line.encode())

    def close(self) -> None:
        """End the guard; it kills what was added and not removed."""
        os.close(self._writing)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)


def _stand_by(reading: int) -> None:
    """The guard's whole life; never returns."""
    try:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        groups: set[int] = set()
        with os.fdopen(reading, "r") as lines:
            for line in lines:
                group = int(line[1:])
                if line[0] == "+":
                    groups.add(group)
                else:
                    groups.discard(group)
        for group in groups:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(group, signal.SIGKILL)
    finally:
        os._exit(0)
