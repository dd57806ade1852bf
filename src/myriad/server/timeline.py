"""The journal as human events, filtered by job or node, read once or followed.

Rows are read in batches from where the last read ended, so a follower misses none and holds one batch at most.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager

import anyio
from starlette.concurrency import run_in_threadpool

from myriad.control.records import JobRecord
from myriad.runtime.store import StateReader
from myriad.server.sentences import HumanEvent, Narrator
from myriad.server.views import find_generation

POLL_S = 0.2  # between two looks at a journal that has not grown
BATCH_ROWS = 1000  # read at a time


class Timeline:
    """A position in the journal and what to tell from there on."""

    def __init__(self, job: str | None, node: str | None, after: int) -> None:
        self.job, self._node, self._after = job, node, after

    def read(self, reader: StateReader) -> Iterator[HumanEvent]:
        """The events since the last read."""
        narrator = Narrator(lambda job, generation: find_generation(reader, job, generation))
        while rows := reader.journal(after_seq=self._after, limit=BATCH_ROWS):
            for row in rows:
                yield from (event for event in narrator.tell(row) if self._wanted(event))
            self._after = rows[-1].seq

    def _wanted(self, event: HumanEvent) -> bool:
        return (self.job is None or event["job"] == self.job) and (
            self._node is None or event["node"] == self._node
        )


async def stream(
    timeline: Timeline, reading: Callable[[], AbstractContextManager[StateReader]]
) -> AsyncIterator[str]:
    """One JSON object a line, until the job has ended; without a job, until the client leaves."""

    def read() -> tuple[str, bool]:
        with reading() as reader:
            record = reader.record(JobRecord, timeline.job) if timeline.job is not None else None
            ended = record is not None and record.status.final
            return "".join(json.dumps(event) + "\n" for event in timeline.read(reader)), ended

    while True:
        lines, ended = await run_in_threadpool(read)
        if lines:
            yield lines
        if ended:
            return
        await anyio.sleep(POLL_S)
