"""The durable checkpoints of one rank's session: begun, written behind, told, marked, tried again.

Method: ``begin`` hands the snapshot's bytes to the thread (``behind``); what came of it is taken between two steps and
told to the agent. The next save waits for the one before, so all ranks know the same outcome when they decide on
the next. Where the storage does not take a checkpoint they go on without it, unless none of the job's has ever been
written: then it is not the storage that is gone, but the place that is wrong.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from myriad.spec.messages import FromWorker, SaveFailed, ShardSet, ShardsSaved, WorkerWelcome
from myriad.storage.durable.manifest import CheckpointError, checkpoint_path, commit_marker, prune
from myriad.storage.memory.snapshot import Taken
from myriad.training.behind import Behind, Marked, NotSaved, Outcome, Saved, timed
from myriad.training.state import State

if TYPE_CHECKING:
    from myriad.storage.durable.writing import CheckpointWriter

SAVE_RETRIES_S = 600.0  # for storage that is gone to come back, at the end of a job
SAVE_RETRY_S = 2.0
SAVE_TIMEOUT_S = 1800.0  # for one checkpoint to be written; the collectives of its ranks wait as long


class CheckpointNotSaved(RuntimeError):
    """The storage did not take a checkpoint in all the time there was."""


@dataclass(frozen=True)
class Policy:
    """Where state is saved, and how much of it is kept. ``last_step`` is saved in any case (None: in ``finish``)."""

    directory: Path
    keep: int = 2
    last_step: int | None = None
    fixed: Mapping[str, int] = field(default_factory=dict)  # of Intervals, what the program itself has set
    remote: str | None = None  # where committed checkpoints are copied to: s3://bucket/prefix
    layout: Mapping[str, Any] = field(default_factory=dict)
    meta: Mapping[str, Any] = field(default_factory=dict)  # kept in the manifest


class Durable:
    """``saved_step`` is the last one on storage, ``committed_step`` the last one that the controller has confirmed."""

    def __init__(self, welcome: WorkerWelcome, policy: Policy) -> None:
        self._welcome, self._policy = welcome, policy
        self.saved_step = self.committed_step = welcome.durable_step
        self._writing: int | None = None  # the step that is being written
        self._written: Callable[[], None] = lambda: None
        self._unmarked: set[int] = set()  # steps this generation has saved and that do not bear their mark
        self._error = ""
        self._behind = Behind()
        self._writer: CheckpointWriter | None = None

    def begin(self, position: int, state: State, snapshot: Taken, written: Callable[[], None]) -> None:
        """Have a durable checkpoint written from ``snapshot``, and call ``written`` when its bytes are not needed any more.

        All ranks, at the same step, none of them with one still being written. The first time it is a collective.
        """
        assert self._writing is None, f"the checkpoint of step {self._writing} is still being written"
        if self._writer is None:
            from myriad.storage.durable.writing import (
                CheckpointWriter,  # a second, where nothing has imported DCP
            )

            group = dist.new_group(backend="gloo") if dist.is_initialized() else None
            policy = self._policy
            self._writer = CheckpointWriter(
                policy.directory, self._welcome.generation, group, policy.layout, policy.meta
            )
        self._writing, self._written = snapshot.step, written
        self._behind.ask(_write(self._writer, position, state, snapshot))

    def news(self) -> list[FromWorker]:
        """What has come of all that was asked for, for the agent, without waiting. Raises CheckpointError where none of
        the job's checkpoints could ever be written."""
        found = []
        while self._behind.asked and (outcome := self._behind.outcome()) is not None:
            found += self._taken(outcome)
        return found

    def settle(self) -> list[FromWorker]:
        """As :meth:`news`, once nothing is being written. Raises CheckpointNotSaved where that takes too long."""
        found, deadline = self.news(), time.monotonic() + SAVE_TIMEOUT_S
        while self._writing is not None:
            outcome = self._behind.outcome(max(1e-3, deadline - time.monotonic()))
            if outcome is None:
                raise CheckpointNotSaved(
                    f"the checkpoint of step {self._writing} was not written within {SAVE_TIMEOUT_S:g} s: "
                    f"check the storage below {self._policy.directory}"
                )
            found += self._taken(outcome)
        return found

    def save_last(self, last: int, save: Callable[[], None], all_agree: Callable[[bool], bool]) -> None:
        """The last step must be on storage: ``save`` it until it is, or for SAVE_RETRIES_S. Raises CheckpointNotSaved."""
        deadline = time.monotonic() + SAVE_RETRIES_S
        while self.saved_step != last:
            save()
            if self.saved_step != last:
                # All ranks failed alike, and all must agree on whether to try again.
                if all_agree(time.monotonic() >= deadline):
                    raise CheckpointNotSaved(
                        f"the checkpoint of step {last} could not be written for {SAVE_RETRIES_S:g} s: {self._error}"
                    )
                time.sleep(SAVE_RETRY_S)

    def committed(self, step: int) -> None:
        """The controller has journaled it: the first rank marks it and removes old ones."""
        self.committed_step = step
        if self._welcome.rank == 0 and step in self._unmarked:
            self._behind.ask(lambda: self._mark(step))

    def mark_last(self) -> list[FromWorker]:
        """Until the last checkpoint bears its mark, also if the storage was away when its commit was heard."""
        found: list[FromWorker] = []
        deadline = time.monotonic() + SAVE_RETRIES_S
        while time.monotonic() < deadline:
            while self._behind.asked and (outcome := self._behind.outcome(1.0)) is not None:
                found += self._taken(outcome)
            if self._behind.asked:
                continue
            if self._welcome.rank != 0 or self.committed_step not in self._unmarked:
                break
            time.sleep(SAVE_RETRY_S)
            assert self.committed_step is not None
            self.committed(self.committed_step)
        return found

    def mark_restored(self) -> None:
        """The first rank marks the newest committed checkpoint again: its writer may have died before the marker."""
        step, generation = self._welcome.durable_step, self._welcome.durable_generation
        if self._welcome.rank != 0 or step is None or not generation:
            return
        path = checkpoint_path(self._policy.directory, step, generation)
        if self._policy.remote is not None and not path.exists():
            return  # lost, and read from its copy
        try:
            commit_marker(path)
        except CheckpointError as error:  # a loss for people and tools; the job itself may not need it
            print(error, file=sys.stderr, flush=True)

    def _taken(self, outcome: Outcome) -> list[FromWorker]:
        match outcome:
            case Saved():
                self._release()
                self.saved_step = outcome.step
                self._unmarked.add(outcome.step)
                shards = ShardSet(
                    rank=self._welcome.rank, step=outcome.step, seconds=outcome.seconds, files=outcome.files
                )
                return [ShardsSaved(shards=shards)]
            case NotSaved():
                self._release()
                if self.saved_step is None:
                    raise CheckpointError(outcome.error)
                return [
                    self._failed(f"the checkpoint of step {outcome.step} was not written: {outcome.error}")
                ]
            case Marked():
                if outcome.marked:
                    self._unmarked.discard(outcome.step)
                return [self._failed(outcome.error)] if outcome.error else []

    def _release(self) -> None:
        self._writing = None
        self._written()

    def _failed(self, error: str) -> SaveFailed:
        print(error, file=sys.stderr, flush=True)
        self._error = error
        return SaveFailed(error=error)

    def _mark(self, step: int) -> Marked:
        """Mark a committed checkpoint and remove old ones, as far as the storage lets one."""
        marked = False
        try:
            commit_marker(checkpoint_path(self._policy.directory, step, self._welcome.generation))
            marked = True
            prune(self._policy.directory, self._policy.keep)
        except CheckpointError as error:
            return Marked(
                step,
                marked,
                f"the checkpoint of step {step} was not marked, or old ones not removed: {error}",
            )
        return Marked(step, marked)


def _write(writer: CheckpointWriter, position: int, state: State, snapshot: Taken) -> Callable[[], Outcome]:
    def write() -> Outcome:
        step = snapshot.step
        try:
            return timed(lambda: writer.save(step, position, state, snapshot.view), step)
        except CheckpointError as error:
            return NotSaved(step, str(error))

    return write
