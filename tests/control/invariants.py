"""What must hold after every event, whatever has happened before (design 5).

Each function is one family and raises AssertionError with a sentence. ``world`` is the test's virtual
cluster: its agents are the ground truth that the controller's records are compared with.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from myriad.cluster.state import NodeState
from myriad.control.commands import ToAgent
from myriad.control.records import AllocationRecord, JobRecord, NodeRecord
from myriad.control.status import EDGES, STATUS_OF, JobStatus, Reason
from myriad.spec.messages import Commit, StartWorkers

if TYPE_CHECKING:
    from world import World


def check_everything(world: World, before: Mapping[str, JobRecord]) -> None:
    """All families. ``before``: the job records as they were before the last event."""
    one_generation_per_accelerator(world)
    counters_equal_a_recount(world)
    statuses_follow_edges(world, before)
    nodes_and_jobs_agree(world)
    generations_only_grow(world, before)
    no_job_is_lost(world, before)
    waiting_has_a_deadline(world)
    starts_are_for_the_current_generation(world)
    commits_have_every_rank(world)


def one_generation_per_accelerator(world: World) -> None:
    """No node runs workers of two jobs, or of two generations of one."""
    for agent in world.agents.values():
        if not agent.alive:
            continue
        live = {
            (member.job, process.generation)
            for member in agent.members.values()
            for process in member.processes.values()
            if process.rank is not None
        }
        assert len(live) <= 1, f"{agent.node} runs workers of {sorted(live)} at once"
        record = world.state.node(agent.node)
        if record.state is not NodeState.DOWN and record.incarnation == agent.incarnation:
            for job, _ in live:
                assert record.job == job, (
                    f"{agent.node} still runs {job} and is {record.state} for {record.job}"
                )


def counters_equal_a_recount(world: World) -> None:
    world.state.cluster.check()


def statuses_follow_edges(world: World, before: Mapping[str, JobRecord]) -> None:
    assert set(STATUS_OF) == set(Reason), "a reason belongs to no status"
    assert set(STATUS_OF.values()) == set(JobStatus), "a status has no reason"
    steps: dict[str, JobStatus] = {name: job.status for name, job in before.items()}
    for change in world.journal[-1].changes:
        if isinstance(change, JobRecord):
            old = steps.get(change.id, JobStatus.PENDING)
            assert old is change.status or (old, change.status) in EDGES, (
                f"{change.id}: {old} to {change.status}"
            )
            steps[change.id] = change.status


def nodes_and_jobs_agree(world: World) -> None:
    """Every node of a running allocation points to its job unless it was lost, and the other way round."""
    state = world.state
    held: dict[str, str] = {}
    for name in state.live:
        job = state.job(name)
        if not job.status.allocated:
            continue
        allocation = state.allocation(name)
        assert len(set(allocation.nodes)) == len(allocation.nodes) == state.spec(name).nodes, allocation
        assert not set(allocation.nodes) & set(allocation.spares), f"{allocation} has a node twice"
        for node in (*allocation.nodes, *allocation.spares):
            if state.node(node).job == name:
                assert node not in held, f"{node} is in {held[node]} and {name}"
                held[node] = name
            else:
                fencing = job.stage == "fence" or job.status is JobStatus.STOPPING
                assert fencing, f"{name} goes on with {node}, which it does not hold"
    for node, record in state.table(NodeRecord).items():
        assert record.job == held.get(node), f"{node} says {record.job}, the jobs say {held.get(node)}"
        busy = record.state in (NodeState.BUSY, NodeState.SPARE, NodeState.DRAINING)
        assert busy == (record.job is not None), f"{node} is {record.state} with job {record.job}"
    for allocation in state.table(AllocationRecord).values():
        newest = state.allocation(allocation.job) is allocation
        ended = not (newest and state.job(allocation.job).status.allocated)
        assert ended == (allocation.released_s is not None), f"{allocation} was released, or not"


def generations_only_grow(world: World, before: Mapping[str, JobRecord]) -> None:
    for name, old in before.items():
        new = world.state.job(name)
        assert new.generation >= old.generation, f"{name} went back to generation {new.generation}"
        assert (new.durable_step or 0) >= (old.durable_step or 0), f"{name} lost a durable step"
        again = new.restarts > old.restarts or (new.status.allocated and not old.status.allocated)
        assert not again or new.generation > old.generation, f"{name} was started again under the same number"
        assert new.best_step >= old.best_step and new.restarts >= old.restarts, f"{name} forgot progress"


def no_job_is_lost(world: World, before: Mapping[str, JobRecord]) -> None:
    """Jobs neither vanish nor rise from the dead; every one says why it is where it is."""
    state = world.state
    for name, old in before.items():
        new = state.job(name)
        assert not old.status.final or new == old, f"{name} had ended and changed"
    for name, job in state.table(JobRecord).items():
        assert (name in state.live) != job.status.final, (
            f"{name} is {job.status} and in live: {name in state.live}"
        )
        assert job.detail, f"{name} does not say why it is {job.status}"
        assert (job.ended_s is not None) == job.status.final, f"{name} ended at {job.ended_s} is {job.status}"
        assert (job.outcome is not None) == (job.status is JobStatus.STOPPING), (
            f"{name}: outcome {job.outcome}"
        )


def waiting_has_a_deadline(world: World) -> None:
    for name in world.state.live:
        job = world.state.job(name)
        waits = job.status.allocated and job.status is not JobStatus.RUNNING
        assert waits == (job.stage_deadline_s is not None), (
            f"{name} {job.status} deadline {job.stage_deadline_s}"
        )


def starts_are_for_the_current_generation(world: World) -> None:
    """Workers are only ever started for the current generation, on nodes that the job holds."""
    for command in world.journal[-1].commands:
        if isinstance(command, ToAgent) and isinstance(command.message, StartWorkers):
            message, state = command.message, world.state
            assert message.generation == state.job(message.job).generation, "workers of an old generation"
            assert state.node(command.node).job == message.job, f"{command.node} is not of {message.job}"
            assert len(message.ranks) * len(state.allocation(message.job).nodes) == message.world_size


def commits_have_every_rank(world: World) -> None:
    """A checkpoint becomes durable only when every rank of this generation has written its part."""
    for change in world.journal[-1].changes:
        if not isinstance(change, JobRecord) or change.durable_step is None:
            continue
        key = (change.id, change.durable_step, change.durable_generation)
        if key in world.committed:
            continue
        world.committed.add(key)
        written = {
            rank for job, gen, rank, step in world.written if (job, gen, step) == (key[0], key[2], key[1])
        }
        assert written >= set(range(change.world_size)), (
            f"{key} was committed, written only by {sorted(written)}"
        )
    for command in world.journal[-1].commands:
        if isinstance(command, ToAgent) and isinstance(command.message, Commit):
            message = command.message
            assert (message.job, message.step, message.generation) in world.committed, f"{message} of nothing"
