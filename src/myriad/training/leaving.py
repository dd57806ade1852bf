"""Ending a program that has used collectives only when its other threads are at rest.

gloo wakes whoever waits for a collective first and drops the collective's tensors afterwards, for which its thread
needs the interpreter's lock. When the interpreter begins to end in between, CPython ends that thread at the lock, and
the process aborts: a job that was done counts as failed. So the end waits, with the lock released, until no other
thread of the process runs any more. Trade-off: a program with a thread that never rests ends a second later.
"""

from __future__ import annotations

import os
import threading
import time

LIMIT_S = 1.0
LOOK_S = 0.006  # longer than a thread that waits for the lock sleeps between two attempts
LOOKS_AT_REST = 3  # in a row: one that is about to run may just have been asleep


def wait_for_rest(limit_s: float = LIMIT_S) -> bool:
    """Wait until every other thread of this process sleeps; False when one still ran after ``limit_s`` seconds."""
    deadline = time.monotonic() + limit_s
    calm = 0
    while calm < LOOKS_AT_REST:
        if time.monotonic() >= deadline:
            return False
        time.sleep(LOOK_S)
        calm = calm + 1 if _others_sleep() else 0
    return True


def _others_sleep() -> bool:
    own = threading.get_native_id()
    for task in os.listdir("/proc/self/task"):
        if int(task) != own:
            try:
                with open(f"/proc/self/task/{task}/stat", encoding="utf-8", errors="replace") as file:
                    state = file.read().rpartition(")")[2].split()[0]
            except OSError:
                continue  # it has ended
            if state != "S":
                return False
    return True
