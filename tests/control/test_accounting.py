"""The ledger of jobs that lived in a virtual cluster: from the controller's state to every second's cause.

What the lines of each kind of window are is told in ``tests/operations``; here it is that a state, and nothing
but a state and step reports, is enough to fill them. Nodes have 2 accelerators; time passes only in ``tick``,
and between two events 1 ms.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest
from world import World

from myriad.control.accounting import job_ledger, job_records
from myriad.spec.causes import Cause
from myriad.spec.messages import StepReport

EVENTS_S = 1.0  # of accelerator time: all events of a story, 1 ms each on up to 6 accelerators, take less


def steps(generation: int, first: int, last: int, data_s: float = 0.0) -> list[StepReport]:
    """One report per rank and step of 1 s: 4 ranks, 0.1 s of communication and ``data_s`` of waiting for data."""
    return [
        StepReport(
            job="j1",
            generation=generation,
            rank=rank,
            step=step,
            wall_s=1.0,
            compute_s=0.9 - data_s,
            communication_s=0.1,
            data_s=data_s,
        )
        for step in range(first, last + 1)
        for rank in range(4)
    ]


def lines(world: World, job: str, reports: Sequence[StepReport] = ()) -> dict[Cause, float]:
    """The job's lines of some weight; they are the same from a state that was loaded from the disk."""
    ledger = job_ledger(job_records(world.state, job), reports, world.now)
    again = job_ledger(job_records(world.disk.load(), job), reports, world.now)
    assert again == ledger
    assert math.fsum(ledger.lines.values()) == pytest.approx(ledger.accelerator_seconds, rel=1e-9)
    return {cause: seconds for cause, seconds in ledger.lines.items() if seconds > EVENTS_S}


def node_lost(torch: bool) -> tuple[World, str]:
    """2 nodes and a spare: 10 s, the second node dies, 20 s on the spare, done."""
    world = World()
    job = world.start(nodes=2, spares=1, torch=torch)
    world.tick(10)
    world.agent_dies("n1")
    world.run()
    world.tick(20)
    world.finish(job)
    world.run()
    return world, job


def close_to(want: dict[Cause, float]) -> dict[Cause, object]:
    return {cause: pytest.approx(seconds, abs=EVENTS_S) for cause, seconds in want.items()}


LOST = {Cause.SPARE_IDLE: 2 * 10, Cause.NODE_DOWN: 2 * 20}


def test_a_command_that_lost_a_node() -> None:
    world, job = node_lost(torch=False)
    want: dict[Cause, float] = {Cause.RUNNING_UNATTRIBUTED: 4 * 30, **LOST}
    assert lines(world, job) == close_to(want)


def test_a_model_that_lost_a_node_and_had_saved_nothing() -> None:
    world, job = node_lost(torch=True)
    reports = steps(1, 1, 9) + steps(2, 1, 18, data_s=0.3)
    want: dict[Cause, float] = {
        Cause.COMPUTE: 4 * 18 * 0.6,
        Cause.EXPOSED_COMMUNICATION: 4 * 18 * 0.1,
        Cause.DATA_WAIT: 4 * 18 * 0.3,
        Cause.LOST_WORK: 4 * 10,
        Cause.OTHER: 4 * 2,
        **LOST,
    }
    assert lines(world, job, reports) == close_to(want)
    shuffled = random.Random(7).sample(reports, len(reports))
    assert lines(world, job, shuffled) == lines(world, job, reports)


def test_a_running_job_is_counted_until_now() -> None:
    world = World()
    job = world.start(nodes=2)
    world.tick(10)
    records = job_records(world.state, job)
    for later_s in (0, 5):
        found = job_ledger(records, (), world.now + later_s).lines
        assert found[Cause.RUNNING_UNATTRIBUTED] == pytest.approx(4 * (10 + later_s), abs=EVENTS_S)


def test_records_are_of_one_moment_and_of_one_job() -> None:
    world = World(nodes=6)
    other = world.start(nodes=2)
    job = world.start(nodes=2, spares=1)
    before = job_records(world.state, job)
    assert set(before.nodes) == {"n2", "n3", "n4"} and before.job.id == job != other
    world.agent_dies("n3")
    world.run()
    after = job_records(world.state, job)
    assert [g.generation for g in before.generations] == [1]
    assert [g.generation for g in after.generations] == [1, 2]
    assert set(after.nodes) == set(before.nodes) and after.nodes["n3"] != before.nodes["n3"]


def test_a_job_that_never_held_a_node_has_no_lines() -> None:
    world = World(nodes=2)
    job = world.submit(nodes=5)
    ledger = job_ledger(job_records(world.state, job), (), world.now)
    assert ledger.lines == {} and ledger.allocations == () and ledger.accelerator_seconds == 0


def test_a_requeued_job_has_a_ledger_per_allocation() -> None:
    world = World(nodes=2)
    job = world.start(nodes=2)
    world.tick(10)
    world.agent_dies("n1")
    world.run()
    world.tick(50)  # queued: nobody owns these seconds
    world.undrain("n1")
    world.run()
    world.tick(20)
    ledger = job_ledger(job_records(world.state, job), (), world.now)
    assert [of[Cause.RUNNING_UNATTRIBUTED] for of in ledger.of_allocation] == [
        pytest.approx(4 * 10, abs=EVENTS_S),
        pytest.approx(4 * 20, abs=EVENTS_S),
    ]
    assert ledger.lines[Cause.RUNNING_UNATTRIBUTED] == pytest.approx(4 * 30, abs=EVENTS_S)


def test_an_unknown_job() -> None:
    with pytest.raises(KeyError):
        job_records(World().state, "j9")
