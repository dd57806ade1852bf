"""Finding what a test has left behind: processes, threads, listening sockets of its own.

Every process started by this test run carries a mark in its environment, so that a daemon which has
been re-parented is found as surely as a child. The cost is one listing of /proc a test: process ids seen once
without the mark are not read again, about 1 ms in all.
"""

from __future__ import annotations

import os
import signal
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass

MARK = "MYRIAD_TEST_RUN"
# What is on its way out when a test ends (a reaped daemon, a closing socket) has this long.
GRACE_S = 3.0
POLL_S = 0.02

_foreign: set[int] = set()


def mark_this_run() -> None:
    """From now on every child started by exec is known as ours. Call once, early."""
    os.environ.setdefault(MARK, uuid.uuid4().hex)


@dataclass(frozen=True, slots=True)
class Held:
    """What exists at one moment."""

    processes: frozenset[int]
    threads: frozenset[int]
    listeners: frozenset[str]

    @staticmethod
    def now() -> Held:
        threads = (t.ident for t in threading.enumerate() if t.ident is not None)
        return Held(frozenset(our_processes()), frozenset(threads), frozenset(listeners()))


def our_processes() -> list[int]:
    """Live processes that this test run has started, children and daemons."""
    mark = f"{MARK}={os.environ[MARK]}"
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    _foreign.intersection_update(pids)
    _foreign.add(os.getpid())
    found = []
    children = _children()
    for pid in pids:
        if pid in children or (pid not in _foreign and has_environment(pid, mark)):
            if not is_gone(pid):
                found.append(pid)
        else:
            _foreign.add(pid)
    return found


def has_environment(pid: int, entry: str) -> bool:
    """Whether the process was started with ``NAME=value`` in its environment."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return entry.encode() in file.read().split(b"\0")
    except OSError:
        return False


def is_gone(pid: int) -> bool:
    """Ended, whether or not its parent has waited for it."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] in (b"Z", b"X")
    except OSError:
        return True


def describe(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return f"{pid} ({file.read().replace(bytes(1), b' ').decode(errors='replace').strip()[:160]})"
    except OSError:
        return f"{pid} (gone)"


def kill(pids: list[int]) -> None:
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def _children() -> set[int]:
    found: set[int] = set()
    for task in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{task}/children") as file:
                found.update(map(int, file.read().split()))
        except OSError:
            continue
    return found


def listeners() -> list[str]:
    """Listening sockets of this very process, as ``proto:local address``."""
    inodes = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    return [] if not inodes else [*_listening("tcp", inodes), *_listening("tcp6", inodes), *_unix(inodes)]


def _listening(protocol: str, inodes: set[str]) -> list[str]:
    try:
        with open(f"/proc/self/net/{protocol}") as file:
            rows = [line.split() for line in file][1:]
    except OSError:
        return []
    return [f"{protocol}:{row[1]}:{row[9]}" for row in rows if row[3] == "0A" and row[9] in inodes]


def _unix(inodes: set[str]) -> list[str]:
    with open("/proc/self/net/unix") as file:
        rows = [line.split() for line in file][1:]
    accepting = "00010000"
    return [f"unix:{' '.join(row[7:])}:{row[6]}" for row in rows if row[3] == accepting and row[6] in inodes]


def wait_until(predicate: Callable[[], object], seconds: float) -> bool:
    """Poll; False when the time is over."""
    deadline = time.monotonic() + seconds
    while not predicate():
        if time.monotonic() >= deadline:
            return False
        time.sleep(POLL_S)
    return True


def left_since(before: Held) -> list[str]:
    """What a test has left beyond ``before`` after the grace, in words; leaked processes are killed."""
    now = Held.now()

    def leaked() -> bool:
        nonlocal now
        now = Held.now()
        return bool(
            now.processes - before.processes
            or now.threads - before.threads
            or now.listeners - before.listeners
        )

    if not leaked() or wait_until(lambda: not leaked(), GRACE_S):
        return []
    pids = sorted(now.processes - before.processes)
    words = [f"process {describe(pid)}" for pid in pids]
    threads = now.threads - before.threads
    words += [f"thread {t.name}" for t in threading.enumerate() if t.ident in threads]
    words += [f"listening socket {name}" for name in sorted(now.listeners - before.listeners)]
    kill(pids)
    return words
