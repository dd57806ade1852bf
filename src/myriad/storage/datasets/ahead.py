"""A rank's side of its reader: the batches of a ``Loader``, read before they are asked for.

Method: see ``reader``. The reader is started by exec, with one end of a packet channel; what is taken out of a
slot is a copy of the rank's own, so the slot is free at once and ``depth`` batches are always on their way.
A reader that is refused its data set says the sentence a ``Loader`` would have raised; one that was killed is
noticed by the end of its channel, one that hangs by a deadline, and both are named.
"""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
from typing import Any, Self

from myriad.storage.datasets.index import DatasetError
from myriad.storage.datasets.loader import Batch
from myriad.storage.datasets.reader import Broken, Free, FromReader, Place, Ready, Refused, Setup, view
from myriad.storage.memory.channel import Channel, ChannelClosed, ChannelTimeout

PROGRAM = "myriad.storage.datasets.reader"
BATCH_DEADLINE_S = 300.0  # above what the reader itself waits for storage that is gone, which it can name
EXIT_S = 10.0  # from a kill, or the end of the channel, to the exit status
# It reads and copies: threads of libraries would only take the cores of the ranks.
SINGLE = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


class ReaderLost(RuntimeError):
    """The reader process has died or hangs; the job restarts it with the rank."""


class ReadAhead:
    """As a ``Loader``: ``next()`` and ``position``. Raises DatasetError, ReaderLost. To be closed."""

    def __init__(self, setup: Setup) -> None:
        assert setup.depth > 0, setup
        self.position = setup.position
        self._deadline_s = BATCH_DEADLINE_S
        self._memory: dict[int, mmap.mmap] = {}  # by slot
        self._channel: Channel[FromReader]
        self._channel, theirs = Channel.pair(FromReader)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", PROGRAM, str(theirs.fileno()), str(os.getpid())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env={**os.environ, **SINGLE},
            )
        self._name = f"the reader of data-parallel rank {setup.dp_rank} (pid {self._process.pid})"
        self._tell(setup)

    @property
    def pid(self) -> int:
        """Of the reader process."""
        return self._process.pid

    def next(self) -> Batch:
        """The next batch: at once if it is there."""
        try:
            message, fds = self._channel.recv(self._deadline_s)
        except ChannelTimeout:
            raise ReaderLost(
                f"{self._name} has read no batch for {self._deadline_s:g} s; check the storage below the data set"
            ) from None
        except ChannelClosed:
            raise ReaderLost(f"{self._name} {self._ended()}") from None
        if isinstance(message, Refused):
            raise DatasetError(message.sentence)
        if isinstance(message, Broken):
            raise ReaderLost(f"{self._name} has failed: {message.error}")
        for fd in fds:  # at most one: the slot's new memory
            if message.slot in self._memory:
                self._memory[message.slot].close()
            self._memory[message.slot] = mmap.mmap(fd, os.fstat(fd).st_size, prot=mmap.PROT_READ)
            os.close(fd)
        return self._take(message)

    def _take(self, ready: Ready) -> Batch:
        memory = self._memory[ready.slot]
        batch = Batch(**{place.field: _value(memory, place) for place in ready.places})
        self._tell(Free(ready.slot))
        self.position = ready.end
        return batch

    def _tell(self, message: Setup | Free) -> None:
        try:
            self._channel.send(message, timeout_s=self._deadline_s)
        except ChannelClosed:
            pass  # it has died, or said its last word: the next receive tells
        except ChannelTimeout:
            raise ReaderLost(f"{self._name} takes no message") from None

    def _ended(self) -> str:
        try:
            code = self._process.wait(EXIT_S)
        except subprocess.TimeoutExpired:
            return "has closed its channel"
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"

    def close(self) -> None:
        """End the reader. May be called again."""
        self._channel.close()
        self._process.kill()
        self._process.wait(EXIT_S)
        for memory in self._memory.values():
            memory.close()
        self._memory.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _value(memory: mmap.mmap, place: Place) -> Any:
    """A field of a batch, copied out of the slot."""
    if place.kind == "none":
        return None
    array = view(memory, place)
    if place.kind == "array":
        return array.copy()
    value = array.tolist()
    return tuple(value) if place.kind == "tuple" else value
