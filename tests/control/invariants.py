"""What must hold after every event of a story: the explorer's invariants, and the hand-driven agents' ground truth.

``world`` is the stories' cluster: its agents are what the controller's records are compared with.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from myriad.cluster.state import NodeState
from myriad.control.commands import ToAgent
from myriad.control.records import JobRecord
from myriad.simulator import checks
from myriad.spec.messages import Commit, StartWorkers

if TYPE_CHECKING:
    from world import World


def check_everything(world: World, before: Mapping[str, JobRecord]) -> None:
    """All of them. ``before``: the job records as they were before the last event."""
    state = world.state
    checks.counters_equal_a_recount(state)
    checks.statuses_follow_edges(before, world.journal[-1])
    checks.nodes_and_jobs_agree(state)
    checks.generations_only_grow(state, before)
    checks.no_job_is_lost(state, before)
    checks.waiting_has_a_deadline(state)
    checks.budgets_hold(state)
    one_generation_per_accelerator(world)
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
