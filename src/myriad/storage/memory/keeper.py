"""The memory snapshots an agent holds for the ranks of its node.

Per (job, rank) it keeps the two newest (the older one is whole even while a rank dies in mid-step), the
one of the last durable step (when a node is lost, the survivors restart from it while the newcomer reads
storage), those whose durable checkpoint is still being committed, and the three newest that are copied to
another node. The copies it keeps for that other node's ranks follow the same rule. All else is closed at once.

A snapshot is sealed, read and checked once, when it is first reported, which is when its worker is gone; after that it
cannot change by anybody's doing, and its reader checks it once more before use. Until then the memory is the worker's,
which writes into it again only when it has heard that the snapshot was dropped.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import NamedTuple

from myriad.spec.messages import Holding
from myriad.storage.memory.retention import Use, kept_steps
from myriad.storage.memory.snapshot import verify

_log = logging.getLogger(__name__)


class Owner(NamedTuple):
    """Whose memory it is: the worker process, and its buffer."""

    process: str
    buffer: int


@dataclass
class _Held:
    fd: int
    size: int
    crc32: int
    use: Use
    verified: bool = False
    owner: Owner | None = None


class SnapshotKeeper:
    """Owns every fd given to it, and closes each one it drops. Not for use by two threads at once."""

    def __init__(self, dropped: Callable[[Owner], None] = lambda owner: None) -> None:
        """``dropped`` hears of each snapshot whose memory its owner may use again."""
        self._dropped = dropped
        self._held: dict[str, dict[int, dict[int, _Held]]] = {}  # job -> rank -> step
        self._durable_step: dict[str, int] = {}  # job -> last committed durable step
        self.bytes_held = 0

    def add(
        self,
        job: str,
        rank: int,
        step: int,
        fd: int,
        size: int,
        crc32: int,
        use: Use,
        *,
        verified: bool = False,
        owner: Owner | None = None,
    ) -> None:
        """Take over ``fd``; a step taken again (re-executed after a restart) replaces the older one.

        ``verified``: its checksum was compared while it arrived.
        """
        steps = self._held.setdefault(job, {}).setdefault(rank, {})
        self._close(steps, step)
        steps[step] = _Held(fd, size, crc32, use, verified, owner)
        self.bytes_held += size
        self._trim(job)

    def mark_durable(self, job: str, step: int) -> None:
        """The durable checkpoint of ``step`` is committed: its snapshot replaces the one kept so far."""
        self._durable_step[job] = step
        self._trim(job)

    def holdings(self, job: str) -> tuple[Holding, ...]:
        """All snapshots of the job that are whole, by rank and step; damaged ones are dropped here."""
        found = []
        for rank, steps in sorted(self._held.get(job, {}).items()):
            for step, held in sorted(steps.items()):
                held.verified = held.verified or verify(held.fd, held.size, held.crc32)
                if held.verified:
                    found.append(Holding(rank, step, held.size))
                else:
                    _log.warning("snapshot of job %s rank %d step %d is damaged: dropped", job, rank, step)
                    self._close(steps, step)
        return tuple(found)

    def fd_for(self, job: str, rank: int, step: int) -> int | None:
        """The snapshot's fd, to be sent at once (it stays ours), or None where it is not held."""
        held = self._held.get(job, {}).get(rank, {}).get(step)
        return None if held is None else held.fd

    def holds(self, job: str, rank: int, step: int) -> bool:
        return step in self._held.get(job, {}).get(rank, {})

    def duplicate(self, job: str, rank: int, step: int) -> tuple[int, int, int] | None:
        """(fd of the caller's own, bytes, CRC-32) of a snapshot, or None where it is not held."""
        held = self._held.get(job, {}).get(rank, {}).get(step)
        return None if held is None else (os.dup(held.fd), held.size, held.crc32)

    def keep_ranks(self, job: str, ranks: Collection[int]) -> None:
        """Drop what is held for other ranks of the job: their copies are kept elsewhere now."""
        for rank in [each for each in self._held.get(job, {}) if each not in ranks]:
            steps = self._held[job].pop(rank)
            for step in list(steps):
                self._close(steps, step)

    def drop_newer(self, job: str, step: int) -> None:
        """After a restart from ``step``: whatever the abandoned timeline took beyond it must go."""
        for steps in self._held.get(job, {}).values():
            for newer in [each for each in steps if each > step]:
                self._close(steps, newer)
        if self._durable_step.get(job, step) > step:
            del self._durable_step[job]

    def forget(self, job: str) -> None:
        """The job has ended here: close all it has."""
        for steps in self._held.pop(job, {}).values():
            for step in list(steps):
                self._close(steps, step)
        self._durable_step.pop(job, None)

    def close(self) -> None:
        for job in list(self._held):
            self.forget(job)

    def _trim(self, job: str) -> None:
        durable_step = self._durable_step.get(job, -1)
        for steps in self._held.get(job, {}).values():
            kept = kept_steps({step: held.use for step, held in steps.items()}, durable_step)
            for step in [each for each in steps if each not in kept]:
                self._close(steps, step)

    def _close(self, steps: dict[int, _Held], step: int) -> None:
        held = steps.pop(step, None)
        if held is not None:
            os.close(held.fd)
            self.bytes_held -= held.size
            if held.owner is not None:
                self._dropped(held.owner)
