"""Durable checkpoints written behind the training that goes on: one thread, one piece of work after the other.

A save is given the sealed bytes of a snapshot, so it does not matter what becomes of the live tensors meanwhile, and a
process group of its own, so that its collectives and those of training can never be taken for each other. All ranks
hand the same saves over in the same order, and each rank's thread takes them in that order: whichever thread is behind,
the others wait for it and for nothing that waits for them. The loop waits only where it needs the outcome: before
the next save, and at the end.

A program that ends by itself while a save is in flight waits a moment for it (``leave``): a thread that comes back from
a collective to an interpreter that is ending aborts the process, and the job would hear of a signal instead of the
program's own error.

Trade-off: while both run they share the cores; writing takes about 0.7 s of one core for each GB.
"""

from __future__ import annotations

import atexit
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from myriad.spec.messages import FileSum

LEAVE_S = 5.0  # for the save in flight, where a program ends without ``finish``


@dataclass(frozen=True)
class Saved:
    """This rank's part of the checkpoint of ``step`` is on storage, and so is everybody else's."""

    step: int
    files: tuple[FileSum, ...]
    seconds: float


@dataclass(frozen=True)
class NotSaved:
    """The storage did not take it, on all ranks alike."""

    step: int
    error: str


@dataclass(frozen=True)
class Marked:
    """Whether the committed checkpoint of ``step`` bears its mark; ``error`` says what was refused."""

    step: int
    marked: bool
    error: str = ""


Outcome = Saved | NotSaved | Marked


class Behind:
    """Does one piece of work at a time. Not for use by two threads."""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[Callable[[], Outcome] | None] = queue.SimpleQueue()  # None: no more
        self._outcomes: queue.SimpleQueue[Outcome | BaseException] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self.asked = 0  # whose outcome has not been taken yet

    def ask(self, work: Callable[[], Outcome]) -> None:
        """Do ``work`` once all that was asked before is done."""
        if self._thread is None:
            # A daemon: whoever leaves by an exception must not wait for a rank that is gone.
            self._thread = threading.Thread(target=self._run, name="myriad-behind", daemon=True)
            self._thread.start()
            atexit.register(self.leave)  # after the session's own, so it runs before that
        self.asked += 1
        self._work.put(work)

    def outcome(self, timeout_s: float = 0.0) -> Outcome | None:
        """The next outcome, or None when there is none within the time. Raises what the work has raised."""
        try:
            found = self._outcomes.get(timeout=timeout_s) if timeout_s else self._outcomes.get_nowait()
        except queue.Empty:
            return None
        self.asked -= 1
        if isinstance(found, BaseException):
            raise found
        return found

    def leave(self) -> None:
        """Let the thread end after what it was asked, and wait for that, at most LEAVE_S."""
        if self._thread is not None:
            self._work.put(None)
            self._thread.join(LEAVE_S)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            try:
                self._outcomes.put(work())
            except BaseException as error:  # noqa: BLE001 (raised where the outcome is taken)
                self._outcomes.put(error)
            del work  # it holds a snapshot


def timed(save: Callable[[], tuple[FileSum, ...]], step: int) -> Saved:
    """Do it, and say how long it took."""
    began = time.monotonic()
    return Saved(step, save(), time.monotonic() - began)
