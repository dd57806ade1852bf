"""Finding and ending the processes of an emulated node, by identity rather than by number.

A process id can be reused; (pid, start time) cannot, so that pair is what is remembered.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator


def start_ticks(pid: int) -> int | None:
    """Clock ticks after boot at which the process started; None when it is gone or a zombie."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


def is_alive(pid: int, ticks: int) -> bool:
    return start_ticks(pid) == ticks


def of_session(leader: int) -> list[int]:
    """All processes of the session of ``leader`` and their descendants, the leader first."""
    parents: dict[int, int] = {}
    found: set[int] = set()
    for pid, parent, session in _all_processes():
        parents[pid] = parent
        if session == leader:
            found.add(pid)
    grew = True
    while grew:
        more = {pid for pid, parent in parents.items() if parent in found and pid not in found}
        found |= more
        grew = bool(more)
    return sorted(found, key=lambda pid: (pid != leader, pid))


def _all_processes() -> Iterator[tuple[int, int, int]]:
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
        except OSError:
            continue
        yield int(name), int(fields[1]), int(fields[3])


def send_all(pids: list[int], number: signal.Signals) -> None:
    """Signal each process that is still there."""
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue
