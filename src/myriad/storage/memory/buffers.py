"""Memory for one rank's snapshots, used again as soon as nobody needs what is in it.

Method: a buffer is a memfd that stays mapped in the worker; its agent holds the same memory by a file descriptor. Fresh
memory costs a page fault for every 4 KiB, five times the copy itself (0.5 against 5 GB/s measured), so what the agent
has dropped and no save reads any more is written again. A buffer cannot shrink or grow; that nobody writes into it any
more is sealed by the agent once the worker is gone, before it is ever restored from.

Trade-off: a rank keeps ``FREE_KEPT`` buffers beyond those in use.
"""

from __future__ import annotations

import fcntl
import itertools
import mmap
import os

FREE_KEPT = 1  # one is free when the next snapshot comes: the agent drops one for each it takes
SIZE_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


class Buffer:
    """``size`` bytes of shared memory; ``number`` names it between worker and agent."""

    def __init__(self, number: int, size: int) -> None:
        self.number, self.size = number, size
        self.users: set[str] = set()
        self.fd = os.memfd_create(f"myriad-snapshot-{number}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.posix_fallocate(self.fd, 0, size)  # an error here, not a bus error in mid-copy
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, SIZE_SEALS)
            self.map = mmap.mmap(self.fd, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        except BaseException:
            os.close(self.fd)
            raise

    def close(self) -> None:
        self.map.close()
        os.close(self.fd)


class Buffers:
    """All buffers of a rank. Not for use by two threads at once."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._used: dict[int, Buffer] = {}
        self._free: list[Buffer] = []

    def take(self, size: int, *users: str) -> Buffer:
        """A buffer of ``size`` bytes for these users. Raises OSError when memory does not suffice."""
        found = next((each for each in self._free if each.size == size), None)
        if found is not None:
            self._free.remove(found)
        else:
            while self._free:  # of a size that is no longer asked for
                self._free.pop().close()
            found = Buffer(next(self._numbers), size)
        found.users = set(users)
        self._used[found.number] = found
        return found

    def release(self, number: int, user: str) -> None:
        """``user`` does not need it any more; one that nobody needs may be taken again. Others are let pass."""
        buffer = self._used.get(number)
        if buffer is None:
            return
        buffer.users.discard(user)
        if not buffer.users:
            del self._used[number]
            if len(self._free) < FREE_KEPT:
                self._free.append(buffer)
            else:
                buffer.close()

    def close(self) -> None:
        for buffer in (*self._used.values(), *self._free):
            buffer.close()
        self._used.clear()
        self._free.clear()
