"""Copying this node's snapshots to their holder, in the order they were taken, one at a time.

A rank waits at a peer step until its copy of the one before is made, so at most two steps of a node are in the queue.
Whatever happens to a copy, its rank hears of it: a holder that does not answer costs one deadline, not the job.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from myriad.agent.peers import Copy, PeerClient, PeerError
from myriad.spec.messages import StepReport
from myriad.storage.memory.keeper import SnapshotKeeper

log = logging.getLogger("myriad.agent.copier")


class Copier:
    """``undelivered`` are a rank's step reports that the controller may not have; ``done`` hears of every copy that
    was asked for, with the reason when it was not made."""

    def __init__(
        self,
        client: PeerClient,
        keeper: SnapshotKeeper,
        undelivered: Callable[[str, int], tuple[StepReport, ...]],
        done: Callable[[Copy, str], None],
    ) -> None:
        self._client, self._keeper, self._undelivered, self._done = client, keeper, undelivered, done
        self._queue: asyncio.Queue[Copy] = asyncio.Queue()

    def add(self, copy: Copy) -> None:
        self._queue.put_nowait(copy)

    async def run(self) -> None:
        """For ever."""
        while True:
            copy = await self._queue.get()
            self._done(copy, await self._make(copy))

    async def _make(self, copy: Copy) -> str:
        """Why the copy was not made; empty when it was."""
        found = self._keeper.duplicate(copy.job, copy.rank, copy.step)
        if found is None:
            return f"the snapshot of step {copy.step} is gone"
        try:
            await self._client.put(copy, found, self._undelivered(copy.job, copy.rank))
        except PeerError as error:
            log.warning("rank %d step %d of %s has no copy: %s", copy.rank, copy.step, copy.job, error)
            return str(error)
        return ""
