"""Jobs that run, end, fail, are cancelled and run out of time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from world import World

from myriad.cluster.state import NodeState
from myriad.control import blame, limits
from myriad.control.records import JobRecord, MemberRecord
from myriad.control.status import JobStatus, Reason
from myriad.spec.messages import Forget, Prepare, StartStore, StartWorkers, StopWorkers


def statuses(world: World, job: str) -> list[JobStatus]:
    """The statuses a job has gone through."""
    changes = [c for e in world.journal for c in e.changes if isinstance(c, JobRecord) and c.id == job]
    seen: list[JobStatus] = []
    for change in changes:
        if not seen or seen[-1] is not change.status:
            seen.append(change.status)
    return seen


def test_from_submit_to_success() -> None:
    world = World()
    job = world.submit(nodes=2, spares=1)
    world.run()
    assert world.sent(StartStore) == [StartStore(job=job, generation=1, torch=False)]
    assert world.sent(Prepare) == [Prepare(job=job, torch=False)] * 2
    starts = world.sent(StartWorkers)
    assert [[plan.rank for plan in m.ranks] for m in starts] == [[0, 1], [2, 3]]
    assert [[plan.local_rank for plan in m.ranks] for m in starts] == [[0, 1], [0, 1]]
    assert {(m.world_size, m.store_port, m.job_dir, m.restarts) for m in starts} == {
        (4, 29500, "/jobs/j1", 0)
    }
    assert world.node("n2").state is NodeState.SPARE
    world.finish(job)
    world.run()
    ended = world.job(job)
    assert (ended.reason, ended.exit_code, ended.detail) == (Reason.COMPLETED, 0, "every worker has finished")
    assert statuses(world, job) == [
        JobStatus.PENDING,
        JobStatus.STARTING,
        JobStatus.RUNNING,
        JobStatus.STOPPING,
        JobStatus.SUCCEEDED,
    ]
    record = world.generation(job)
    assert record.begun_s <= (record.store_s or 0) <= (record.forked_s or 0) <= (record.ended_s or 0)
    assert record.first_step_s is None, "a command reports no steps"
    assert len(world.sent(Forget)) == 3 and not world.state.members(job)
    assert all(node.state is NodeState.FREE for node in map(world.node, ("n0", "n1", "n2")))


def test_a_model_job_runs_from_its_first_step_on() -> None:
    world = World()
    job = world.submit(nodes=2, torch=True)
    world.run(until=lambda: "restore" in {p for m in world.agents["n1"].members.values() for p in m.phases})
    assert world.job(job).status is JobStatus.STARTING
    world.run()
    record = world.generation(job)
    assert world.job(job).status is JobStatus.RUNNING
    moments = [record.store_s, record.forked_s, record.rendezvous_s, record.restored_s, record.first_step_s]
    assert None not in moments and moments == sorted(m or 0.0 for m in moments)


@dataclass(frozen=True)
class Failing:
    name: str
    nodes: int
    code: int
    rank: int
    step: int | None
    error: str
    want_starts: int
    want: str


FAILING = [
    Failing(
        "exits 3, other nodes to try: twice here, once there",
        5, 3, 0, None, "", 3,
        "rank 0 on n1 exited with code 3: exit 3: ; the same 3 times, on n0 and n1",
    ),
    Failing(
        "exits 3, no other node: twice",
        1, 3, 0, None, "", 2,
        "rank 0 on n0 exited with code 3: exit 3: ; the same 2 times, and no other node is free to try",
    ),
    Failing(
        "an exception at the same step",
        5, 1, 1, 7, "ValueError", 3,
        "rank 1 on n1 exited with code 1: ValueError: ValueError happened; "
        "the same at step 7 3 times, on n0 and n1",
    ),
    Failing(
        "killed at the same step",
        5, -9, 1, 7, "", 3,
        "rank 1 on n1 was killed by SIGKILL; the same at step 7 3 times, on n0 and n1",
    ),
    Failing(
        "killed before any step: bad luck until the budget is spent",
        5, -11, 0, None, "", blame.FRUITLESS_RESTARTS_MAX + 1,
        "rank 0 on n0 was killed by SIGSEGV; 11 restarts in a row made no progress",
    ),
]  # fmt: skip


@pytest.mark.parametrize("story", FAILING, ids=lambda story: story.name)
def test_crash_loops_stop(story: Failing) -> None:
    world = World(nodes=story.nodes)
    job = world.start(nodes=1)
    for _ in range(story.want_starts):
        assert world.job(job).status is JobStatus.RUNNING
        world.exit(job, story.rank, story.code, story.step, story.error)
        world.run()
    ended = world.job(job)
    assert ended.status is JobStatus.FAILED
    assert ended.detail == story.want
    assert ended.exit_code == (story.code if story.code > 0 else None)
    assert ended.generation == story.want_starts
    assert all(n.job is None for n in map(world.node, world.agents))


def test_steps_are_progress_and_refill_the_budget() -> None:
    """Killed every few steps, a job that gets further each time goes on."""
    world = World()
    job = world.start(nodes=2, torch=True)
    for step in range(1, 3 * blame.FRUITLESS_RESTARTS_MAX):
        world.exit(job, 1, -9, step=5 * step)
        world.run()
        assert world.job(job).status is JobStatus.RUNNING, world.job(job).detail
        assert world.job(job).fruitless == 0 and world.job(job).best_step == 5 * step


def test_time_is_progress_only_where_no_steps_are_reported() -> None:
    world = World()
    command, model = world.start(nodes=1), world.start(nodes=1, torch=True)
    for job in (command, model):
        for doubling in range(2):
            world.tick(limits.PROGRESS_RUN_S * 2**doubling + 1)
            world.exit(job, 0, 1, step=7 if job == model else None, error="ValueError")
            world.run()
    assert (world.job(command).fruitless, world.job(command).failure.count) == (0, 1)  # type: ignore[union-attr]
    assert world.job(model).failure.count == 2  # type: ignore[union-attr]


@pytest.mark.parametrize("code", [1, -9], ids=["error", "signal"])
def test_a_command_that_crashes_every_other_minute_ends_some_day(code: int) -> None:
    world = World()
    job = world.start(nodes=1)
    for _ in range(3 * blame.FRUITLESS_RESTARTS_MAX):
        if world.job(job).status.final:
            break
        world.tick(limits.PROGRESS_RUN_S * 1.5)
        world.exit(job, 0, code)
        world.run()
    assert world.job(job).status is JobStatus.FAILED, world.job(job)


def test_a_killed_worker_is_replaced_in_place_from_memory() -> None:
    world = World()
    job = world.start(nodes=2, torch=True)
    world.save(job, 10)
    world.run()
    world.exit(job, 1, -9, step=12)
    world.run()
    assert world.job(job).status is JobStatus.RUNNING and world.allocation(job).nodes == ("n0", "n1")
    record = world.generation(job)
    assert record.restore_step == 10 and set(record.tiers) == {"memory"}
    first = world.generation(job, 1)
    assert (first.culprit_node, first.culprit_rank) == ("n0", 1) and first.replacement == {}
    stops = world.sent(StopWorkers)
    assert [(m.generation, m.keep, m.grace_s) for m in stops] == [(1, True, 0.0)] * 2


def test_the_peers_of_a_dead_worker_are_not_blamed() -> None:
    world = World()
    job = world.start(nodes=2)
    world.exit(job, 0, 1, error="PeerLost")
    world.exit(job, 3, -9)
    world.run()
    assert world.generation(job, 1).cause == "rank 3 on n1 was killed by SIGKILL"
    assert world.generation(job, 1).culprit_node == "n1"


def test_the_same_request_is_one_job() -> None:
    world = World()
    first = world.submit(nodes=1, request="abc")
    again = world.submit(nodes=1, request="abc")
    other = world.submit(nodes=1, request="abd")
    assert first == again != other and len(world.state.table(JobRecord)) == 2


def test_more_nodes_than_exist_is_pending_with_the_deficit() -> None:
    world = World(nodes=3)
    job = world.submit(nodes=4)
    assert world.job(job).reason is Reason.RESOURCES
    assert "needs 4 nodes" in world.job(job).detail and "3" in world.job(job).detail


def test_two_jobs_never_share_a_node() -> None:
    world = World(nodes=3)
    first, second, third = (world.submit(nodes=2), world.submit(nodes=1), world.submit(nodes=1))
    world.run()
    assert set(world.allocation(first).nodes).isdisjoint(world.allocation(second).nodes)
    assert world.job(third).status is JobStatus.PENDING
    world.finish(first)
    world.run()
    assert world.job(third).status is JobStatus.RUNNING


# ---------------------------------------------------------------- cancel and time limits


def pending(world: World) -> str:
    return world.submit(nodes=9)


def starting(world: World, **keys: Any) -> str:
    return world.submit(nodes=2, **keys)


def running(world: World, **keys: Any) -> str:
    return world.start(nodes=2, **keys)


def recovering(world: World, **keys: Any) -> str:
    job = world.start(nodes=2, **keys)
    world.exit(job, 0, -9)
    world.run(until=lambda: world.job(job).status is JobStatus.RECOVERING)
    return job


def recovering_store(world: World) -> str:
    job = recovering(world)
    world.run(until=lambda: world.job(job).generation == 2)
    return job


def stopping(world: World) -> str:
    job = world.start(nodes=2)
    world.agents["n0"].frozen = True
    world.cancel(job)
    return job


def waiting_for_a_node(world: World) -> str:
    job = world.start(nodes=5)
    world.agent_dies("n4")
    world.run()
    assert world.job(job).reason is Reason.NODE_DEFICIT
    return job


WHEN = [pending, starting, running, recovering, recovering_store, stopping, waiting_for_a_node]


@pytest.mark.parametrize("when", WHEN, ids=lambda when: when.__name__)
def test_cancel(when: Callable[..., str]) -> None:
    world = World(nodes=5)
    job = when(world)
    world.cancel(job)
    for agent in world.agents.values():
        agent.frozen = False
    world.run()
    ended = world.job(job)
    assert ended.status is JobStatus.CANCELLED and ended.ended_s is not None and ended.stage == ""
    assert not [m for m in world.state.table(MemberRecord).values() if m.job == job]
    assert all(n.job is None for n in map(world.node, world.agents))
    assert not any(agent.workers() for agent in world.agents.values())
    world.cancel(job)
    assert not world.journal[-1].changes, "it is over: nothing happens"


def test_cancel_gives_running_workers_time_to_end() -> None:
    world = World()
    world.cancel(world.start(nodes=2))
    assert {(m.grace_s, m.keep) for m in world.sent(StopWorkers)} == {(limits.STOP_GRACE_S, False)}


@pytest.mark.parametrize("when", [starting, running, recovering], ids=lambda when: when.__name__)
def test_time_limit(when: Callable[..., str]) -> None:
    world = World()
    job = when(world, time_limit="50s")
    for agent in world.agents.values():
        agent.frozen = world.job(job).status is not JobStatus.RUNNING
    world.pass_time(15)
    assert world.job(job).status.allocated
    world.pass_time(36)
    for agent in world.agents.values():
        agent.frozen = False
    world.run()
    ended = world.job(job)
    assert ended.status is JobStatus.TIMEOUT or ended.status is JobStatus.STOPPING
    assert ended.detail == "its time limit of 50 s has passed"


def test_the_time_limit_counts_from_the_first_grant() -> None:
    world = World(nodes=2)
    first = world.start(nodes=2)
    second = world.submit(nodes=2, time_limit="50s")
    world.tick(100)
    assert world.job(second).status is JobStatus.PENDING
    world.finish(first)
    world.run()
    world.tick(49)
    assert world.job(second).status is JobStatus.RUNNING
    world.tick(2)
    assert world.job(second).status is JobStatus.TIMEOUT
