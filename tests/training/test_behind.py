"""Saves behind the loop: the bytes are those of the step, and every way to end is told."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from myriad.storage.durable.checkpoint import load
from myriad.storage.durable.manifest import CheckpointError, checkpoint_path, damage
from myriad.storage.durable.writing import CheckpointWriter, local_bytes
from myriad.storage.memory.buffers import Buffers
from myriad.storage.memory.snapshot import take_snapshot
from myriad.training.behind import Behind, Outcome, Saved, timed
from myriad.training.state import State, snapshot_entries


def state(value: float) -> State:
    return {"weight": torch.full((300, 7), value), "half": torch.full((5,), value).bfloat16()}


@pytest.fixture
def behind() -> Iterator[Behind]:
    made = Behind()
    yield made
    made.leave()


@pytest.mark.parametrize("taken", (True, False), ids=("of a snapshot", "control: of the live tensors"))
def test_what_the_loop_does_meanwhile_is_not_in_a_checkpoint(
    taken: bool, behind: Behind, tmp_path: Path
) -> None:
    writer, live, buffers, changed = (
        CheckpointWriter(tmp_path, 1, None, {}, {}),
        state(1.0),
        Buffers(),
        threading.Event(),
    )
    snapshot = take_snapshot(snapshot_entries(live), 4, {}, buffers, "test")

    def save() -> Outcome:
        assert changed.wait(30.0)
        data = snapshot.view if taken else lambda name: local_bytes(live[name])
        return timed(lambda: writer.save(4, 4, live, data), 4)

    behind.ask(save)
    assert behind.outcome() is None, "in flight"
    for each in live.values():
        each.fill_(2.0)  # the next step
    changed.set()
    outcome = behind.outcome(30.0)
    assert isinstance(outcome, Saved) and behind.asked == 0
    assert damage(checkpoint_path(tmp_path, 4, 1)) == ()
    load(tmp_path, 4, 1, back := state(0.0))
    assert all(bool((each == (1.0 if taken else 2.0)).all()) for each in back.values())
    buffers.close()


def test_what_the_work_raises_is_raised_in_the_loop_and_the_next_work_is_done(behind: Behind) -> None:
    def fail() -> Outcome:
        raise CheckpointError("the connection is gone")

    behind.ask(fail)
    behind.ask(lambda: timed(tuple, 2))
    with pytest.raises(CheckpointError, match="the connection is gone"):
        behind.outcome(30.0)
    outcome = behind.outcome(30.0)
    assert isinstance(outcome, Saved) and outcome.step == 2


def test_leaving_waits_for_the_save_in_flight_and_leaves_no_thread(behind: Behind) -> None:
    before, begun, go = threading.active_count(), threading.Event(), threading.Event()

    def save() -> Outcome:
        begun.set()
        assert go.wait(30.0)
        return timed(tuple, 1)

    behind.ask(save)
    assert begun.wait(30.0) and threading.active_count() == before + 1
    threading.Timer(0.1, go.set).start()
    behind.leave()
    assert isinstance(behind.outcome(), Saved) and threading.active_count() == before
