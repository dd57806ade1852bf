"""Which snapshots an agent holds, as stories: what happens, and which steps are left."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
from storage_faults import sealed_copy

from myriad.spec.messages import Holding
from myriad.storage.memory.keeper import Owner, SnapshotKeeper
from myriad.storage.memory.retention import Use
from myriad.storage.memory.snapshot import open_snapshot
from sealed import write_snapshot

JOB = "job-1"


def add(keeper: SnapshotKeeper, step: int, rank: int = 0, durable: bool = False, job: str = JOB) -> None:
    fd, size, crc = write_snapshot({"x": ("uint8", (3,), b"abc")}, step, {"rank": rank})
    keeper.add(job, rank, step, fd, size, crc, Use(durable))


def take(*steps: int, durable: tuple[int, ...] = ()) -> Callable[[SnapshotKeeper], None]:
    def run(keeper: SnapshotKeeper) -> None:
        for step in steps:
            add(keeper, step, durable=step in durable)

    return run


def commit(step: int) -> Callable[[SnapshotKeeper], None]:
    return lambda keeper: keeper.mark_durable(JOB, step)


def restart(step: int) -> Callable[[SnapshotKeeper], None]:
    return lambda keeper: keeper.drop_newer(JOB, step)


STORIES: list[tuple[str, list[Callable[[SnapshotKeeper], None]], list[int]]] = [
    ("nothing", [], []),
    ("two newest", [take(1, 2, 3, 4)], [3, 4]),
    ("taken out of order", [take(4, 3, 5)], [4, 5]),
    ("a durable step outlives newer ones", [take(1, 2, durable=(2,)), commit(2), take(3, 4, 5)], [2, 4, 5]),
    ("a durable step waits for its commit", [take(2, durable=(2,)), take(3, 4, 5)], [2, 4, 5]),
    (
        "the former durable step stays until the next is committed",
        [take(2, durable=(2,)), commit(2), take(4, durable=(4,)), take(5, 6, 7)],
        [2, 4, 6, 7],
    ),
    (
        "and goes with it",
        [take(2, durable=(2,)), commit(2), take(4, durable=(4,)), take(5, 6, 7), commit(4)],
        [4, 6, 7],
    ),
    ("uncommitted ones are bounded", [take(1, 2, 3, 4, 5, 6, durable=(1, 2, 3, 4))], [3, 4, 5, 6]),
    ("a commit of a step not held", [take(2, durable=(2,)), commit(2), take(3, 4, 5), commit(9)], [4, 5]),
    ("restart from an older step", [take(1, 2, 3, durable=(1,)), commit(1), restart(1)], [1]),
    ("the step done again replaces", [take(1, 2, 3), restart(2), take(3)], [2, 3]),
    (
        "restart below the durable step",
        [take(1, 2, 3, durable=(3,)), commit(3), restart(2), take(3, 4)],
        [3, 4],
    ),
]


@pytest.mark.parametrize(("name", "actions", "want"), STORIES, ids=[story[0] for story in STORIES])
def test_steps_held(name: str, actions: list[Callable[[SnapshotKeeper], None]], want: list[int]) -> None:
    before = len(os.listdir("/proc/self/fd"))
    keeper = SnapshotKeeper()
    for action in actions:
        action(keeper)
    holdings = keeper.holdings(JOB)
    assert [each.step for each in holdings] == want
    assert keeper.bytes_held == sum(each.size for each in holdings)
    assert len(os.listdir("/proc/self/fd")) == before + len(want)
    keeper.close()
    assert (keeper.bytes_held, len(os.listdir("/proc/self/fd"))) == (0, before)


def test_ranks_and_jobs_are_apart_and_the_bytes_are_theirs() -> None:
    keeper = SnapshotKeeper()
    for rank in (3, 1):
        for step in (1, 2, 3):
            add(keeper, step, rank)
    add(keeper, 9, job="other")
    assert [(each.rank, each.step) for each in keeper.holdings(JOB)] == [(1, 2), (1, 3), (3, 2), (3, 3)]
    fd = keeper.fd_for(JOB, 3, 2)
    assert fd is not None
    with open_snapshot(fd) as opened:
        assert (opened.step, opened.meta) == (2, {"rank": 3})
    assert keeper.fd_for(JOB, 3, 1) is None and keeper.fd_for("none", 0, 0) is None
    keeper.forget(JOB)
    assert keeper.holdings(JOB) == () and [each.step for each in keeper.holdings("other")] == [9]
    keeper.close()


def test_a_damaged_snapshot_is_not_reported_and_is_dropped(caplog: pytest.LogCaptureFixture) -> None:
    keeper = SnapshotKeeper()
    add(keeper, 1)
    fd, size, crc = write_snapshot({"x": ("uint8", (3,), b"abc")}, 2, {})
    damaged = sealed_copy(fd, flip_bit_at=size // 2)
    os.close(fd)
    keeper.add(JOB, 0, 2, damaged, size, crc, Use())
    assert keeper.holdings(JOB) == (Holding(0, 1, keeper.bytes_held),)
    assert keeper.fd_for(JOB, 0, 2) is None and "step 2 is damaged" in caplog.text
    keeper.close()


def test_the_owner_hears_when_its_memory_is_free() -> None:
    heard: list[Owner] = []
    keeper = SnapshotKeeper(heard.append)
    for step in range(1, 5):
        fd, size, crc = write_snapshot({"x": ("uint8", (3,), b"abc")}, step, {})
        keeper.add("j1", 0, step, fd, size, crc, Use(), owner=Owner("j1/1/0", step))
    assert heard == [Owner("j1/1/0", 1), Owner("j1/1/0", 2)], "two are kept"
    fd, size, crc = write_snapshot({"x": ("uint8", (3,), b"abc")}, 4, {})
    keeper.add("j1", 0, 4, fd, size, crc, Use(), owner=Owner("j1/2/0", 1))
    assert heard[2:] == [Owner("j1/1/0", 4)], (
        "the step was taken again, by another process, in a buffer of its own"
    )
    keeper.close()
    assert len(heard) == 5
