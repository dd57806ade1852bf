"""The reader: a process of a rank's own that reads its next batches into memory which the rank maps.

    python -m myriad.storage.datasets.reader CHANNEL_FD PARENT_PID

Method: a program of its own, never a fork, since the worker holds torch's threads and perhaps an accelerator;
it imports numpy and not torch. It is told a position and reads on from there with the same ``Loader`` as a rank
without one, so what it reads is the same by construction and it keeps no state. Each batch goes into a slot (a
memfd), one small message says where its arrays lie, and a slot is filled again when the rank has given it back:
``depth`` slots bound the memory. It stays in the worker's process group, which the fence kills, and ends with
the worker: by the kernel's parent-death signal, and at the end of the channel.

Trade-off: handing a batch over costs 0.15 ms or more and 16 bytes a token are copied twice; a batch in the page
cache is read faster than that, so only what has to be waited for is read by a process
(docs/decisions/0011-reading.md has the figures).
"""

from __future__ import annotations

import ctypes
import dataclasses
import mmap
import os
import signal
import sys
import traceback
from collections import deque
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from myriad.storage.datasets.cache import BlockCache
from myriad.storage.datasets.index import DatasetError
from myriad.storage.datasets.loader import Batch, Loader, open_mixture
from myriad.storage.memory.channel import Channel, ChannelClosed

SETUP_TIMEOUT_S = 60.0  # the worker sends it right after the start
ALIGNMENT = 64  # bytes: of each array in a slot
_PR_SET_PDEATHSIG = 1


Kind = Literal["array", "tuple", "int", "none"]


class Setup(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """What to read from where on: the arguments of ``open_mixture`` and ``Loader``, and how many batches ahead."""

    parts: tuple[tuple[str, float], ...]
    sequence_length: int
    seed: int
    global_batch: int
    dp_rank: int
    dp_size: int
    position: int
    on_end: Literal["repeat", "refuse"]
    depth: int
    skipped: tuple[tuple[int, int], ...] = ()
    cache: tuple[str, int] | None = None  # directory, and how many bytes in it


class Free(msgspec.Struct, frozen=True, tag=True):
    """The rank has taken the batch out of this slot."""

    slot: int


class Place(msgspec.Struct, frozen=True, array_like=True):
    """Where in its slot a field of the batch lies; ``kind`` is what it was before it became an array."""

    field: str
    kind: Kind
    dtype: str
    shape: tuple[int, ...]
    offset: int


class Ready(msgspec.Struct, frozen=True, tag=True):
    """A batch stands in the slot, whose memfd is beside the message where it is a new one.

    ``end`` is the position behind the batch.
    """

    slot: int
    places: tuple[Place, ...]
    end: int


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The data set cannot be read: the sentence for the user."""

    sentence: str


class Broken(msgspec.Struct, frozen=True, tag=True):
    """A bug: its last line; the traceback is in the rank's log."""

    error: str


ToReader = Setup | Free
FromReader = Ready | Refused | Broken


def main() -> int:
    """Read ahead until the worker is gone (0), or the data set cannot be read (1)."""
    fd, parent = (int(word) for word in sys.argv[1:3])
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the call above: no signal will come
        return 0
    channel: Channel[ToReader] = Channel.from_fd(fd, ToReader)
    try:
        _serve(channel)
    except ChannelClosed:
        return 0
    except DatasetError as error:
        channel.send(Refused(str(error)))
    except Exception as error:  # noqa: BLE001  the worker raises it
        traceback.print_exc(file=sys.stderr)
        channel.send(Broken(f"{type(error).__name__}: {error}"))
    return 1


def _serve(channel: Channel[ToReader]) -> None:
    setup, _ = channel.recv(SETUP_TIMEOUT_S)
    assert isinstance(setup, Setup), setup
    slots = [Slot(number) for number in range(setup.depth)]
    free = deque(slots)
    cache = None if setup.cache is None else BlockCache(Path(setup.cache[0]), setup.cache[1])
    with open_mixture(setup.parts, setup.sequence_length, cache=cache) as mixture:
        loader = Loader(
            mixture,
            setup.seed,
            setup.global_batch,
            setup.dp_rank,
            setup.dp_size,
            setup.position,
            setup.skipped,
            setup.on_end,
        )
        while True:
            received = channel.recv() if not free else channel.recv_nowait()
            if received is not None:
                assert isinstance(received[0], Free), received
                free.append(slots[received[0].slot])
            else:
                batch = loader.next()
                free.popleft().fill(batch, loader.position, channel)


class Slot:
    """Room for one batch; it grows to the largest one it has held."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._memory: mmap.mmap | None = None

    def fill(self, batch: Batch, end: int, channel: Channel[ToReader]) -> None:
        """Copy the batch into the slot and say so."""
        arrays, places, size = [], [], 0
        for field in dataclasses.fields(batch):
            value = getattr(batch, field.name)
            array = value if isinstance(value, np.ndarray) else np.asarray(value or 0, np.int64)
            places.append(Place(field.name, _kind(value), array.dtype.str, array.shape, size))
            arrays.append(array)
            size += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
        fds = [self._renew(size)] if self._memory is None or len(self._memory) < size else []
        assert self._memory is not None
        for array, place in zip(arrays, places, strict=True):
            view(self._memory, place)[...] = array
        try:
            channel.send(Ready(self._number, tuple(places), end), fds)
        finally:
            for fd in fds:
                os.close(fd)

    def _renew(self, size: int) -> int:
        """Other memory of ``size`` bytes; its fd, to be sent and closed."""
        if self._memory is not None:
            self._memory.close()
        fd = os.memfd_create("myriad-batch", os.MFD_CLOEXEC)
        os.ftruncate(fd, size)
        self._memory = mmap.mmap(fd, size)
        return fd


def _kind(value: object) -> Kind:
    if isinstance(value, np.ndarray):
        return "array"
    return "none" if value is None else "tuple" if isinstance(value, tuple) else "int"


def view(memory: mmap.mmap, place: Place) -> NDArray[Any]:
    """The array at ``place``, not copied."""
    return np.ndarray(place.shape, np.dtype(place.dtype), memory, place.offset)


if __name__ == "__main__":
    sys.exit(main())
