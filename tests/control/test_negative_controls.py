"""Planted bugs: each invariant family is worth its name only if it catches the bug it is there for.

Every control patches one line of the controller (or of the play) and runs random histories until an assertion
fails. A history that fails without the patch would be a bug of its own, found by ``test_explore``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from chaos import Chaos, everything_back, heal, replays
from world import World

from myriad.cluster.state import ClusterState, NodeState
from myriad.control import jobs, members, nodes, recovery, starting, stopping
from myriad.control.records import JobRecord, NodeRecord
from myriad.control.state import State
from myriad.control.status import EDGES, STATUS_OF, JobStatus, Reason
from myriad.control.turn import Turn
from myriad.spec.messages import MemberStatus

# How many histories a bug may survive; most are caught within the first twenty.
SEEDS_MAX = 200
STEPS = 250

Patch = Callable[[pytest.MonkeyPatch], None]


def no_fence(patch: pytest.MonkeyPatch) -> None:
    """Missing fence: everybody counts as stopped at once."""
    patch.setattr(members, "is_fenced", lambda member, generation: True)


def early_release(patch: pytest.MonkeyPatch) -> None:
    """Nodes go back before their workers are known to be gone."""
    patch.setattr(members, "unstopped", lambda state, job: [])


def double_grant(patch: pytest.MonkeyPatch) -> None:
    """A node keeps looking free to the scheduler after it was given away."""
    original = ClusterState.put

    def put(self: ClusterState, node: Any) -> None:
        if node.state is not NodeState.BUSY:
            original(self, node)

    patch.setattr(ClusterState, "put", put)


def counters_drift(patch: pytest.MonkeyPatch) -> None:
    """A counter forgets to count down when a node leaves a state."""
    patch.setattr(ClusterState, "_forget_free", lambda self, node: None)


def stale_shards(patch: pytest.MonkeyPatch) -> None:
    """What was saved in an older generation counts in this one."""
    original = starting.begin

    def begin(turn: Turn, job: JobRecord, *rest: Any) -> JobRecord:
        kept = {m.key: m.saved_step for m in turn.state.members(job.id).values()}
        result = original(turn, job, *rest)
        for member in list(turn.state.members(job.id).values()):
            turn.put(msgspec.structs.replace(member, saved_step=kept.get(member.key, 0)))
        return result

    patch.setattr(starting, "begin", begin)


def dead_ranks_do_not_count(patch: pytest.MonkeyPatch) -> None:
    """A checkpoint of those ranks that are left."""

    def saved(turn: Turn, status: MemberStatus, node: str) -> int:
        return max((shard.step for shard in status.shards), default=0)

    patch.setattr(jobs, "_saved_step", saved)


def same_generation_again(patch: pytest.MonkeyPatch) -> None:
    """A restart that does not count up."""
    original = starting.begin

    def begin(turn: Turn, job: JobRecord, *rest: Any) -> JobRecord:
        if job.generation:
            job = turn.set_job(job, generation=job.generation - 1)
        return original(turn, job, *rest)

    patch.setattr(starting, "begin", begin)


def lost_wake_up(patch: pytest.MonkeyPatch) -> None:
    """After a hello nobody asks again for what is still wanted."""
    patch.setattr(jobs, "reconcile_node", lambda turn, node, statuses: None)


def no_deadline(patch: pytest.MonkeyPatch) -> None:
    """A fence that may take for ever."""
    original = Turn.set_job

    def set_job(self: Turn, job: JobRecord, reason: Reason | None = None, **changes: Any) -> JobRecord:
        if changes.get("stage") == "fence":
            changes["stage_deadline_s"] = None
        return original(self, job, reason, **changes)

    patch.setattr(Turn, "set_job", set_job)


def resurrection(patch: pytest.MonkeyPatch) -> None:
    """Cancelling a job that has ended."""
    original = jobs.cancel_job

    def cancel_job(turn: Turn, job: JobRecord) -> None:
        if job.status.final:
            turn.put(msgspec.structs.replace(job, reason=Reason.CANCELLED, ended_s=turn.now))
        original(turn, job)

    patch.setattr(jobs, "cancel_job", cancel_job)
    operate = Chaos.operate

    def cancel_anything(self: Chaos) -> None:
        for job in list(self.world.state.table(JobRecord)):
            self.world.cancel(job)
        operate(self)

    patch.setattr(Chaos, "operate", cancel_anything)


def node_left_behind(patch: pytest.MonkeyPatch) -> None:
    """One node of an ended job is forgotten."""
    original = stopping.release

    def release(turn: Turn, name: str) -> None:
        if name != "n1":
            original(turn, name)

    patch.setattr(stopping, "release", release)


def zombie_is_taken_back(patch: pytest.MonkeyPatch) -> None:
    """An agent that was declared dead says hello, and is welcome."""
    original = nodes.connected

    def connected(turn: Turn, event: Any) -> None:
        node = turn.state.node(event.node)
        if node.incarnation == event.incarnation and node.state is NodeState.DOWN:
            turn.set_node(node, NodeState.FREE, connected=True)
            return
        original(turn, event)

    patch.setattr(nodes, "connected", connected)


def unmapped_reason(patch: pytest.MonkeyPatch) -> None:
    patch.delitem(STATUS_OF, Reason.BUDGET_SPENT)


def forbidden_edge(patch: pytest.MonkeyPatch) -> None:
    """An edge that is taken but is not in the table (the table is what gives way here)."""
    patch.setattr("invariants.EDGES", EDGES - {(JobStatus.STARTING, JobStatus.RECOVERING)})


def rejoined_counts_as_survivor(patch: pytest.MonkeyPatch) -> None:
    """A lost node that is back with a new agent is taken for one that never left."""
    patch.setattr(members, "is_lost", lambda state, job, node: state.node(node).state is NodeState.DOWN)


def unstable_order(patch: pytest.MonkeyPatch) -> None:
    """The state depends on something that is not in the journal."""
    original = recovery.fence
    calls = iter(range(10**9))

    def fence(turn: Turn, job: JobRecord, reason: Reason, detail: str, failed_s: float) -> JobRecord:
        return original(turn, job, reason, f"{detail} ({next(calls)})", failed_s)

    patch.setattr(recovery, "fence", fence)


def change_beside_the_journal(patch: pytest.MonkeyPatch) -> None:
    """A record is changed without leaving a trace."""
    original = nodes.disconnected

    def disconnected(turn: Turn, event: Any) -> None:
        node = turn.state.node(event.node)
        turn.state.apply(msgspec.structs.replace(node, reason="a secret"))
        original(turn, event)

    patch.setattr(nodes, "disconnected", disconnected)


PLANTED: list[Patch] = [
    no_fence,
    early_release,
    double_grant,
    counters_drift,
    stale_shards,
    dead_ranks_do_not_count,
    same_generation_again,
    lost_wake_up,
    no_deadline,
    resurrection,
    node_left_behind,
    zombie_is_taken_back,
    unmapped_reason,
    forbidden_edge,
    rejoined_counts_as_survivor,
    unstable_order,
    change_beside_the_journal,
]


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_a_planted_bug_is_caught(plant: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    for seed in range(SEEDS_MAX):
        try:
            whole_history(seed)
        except (AssertionError, KeyError, ValueError):
            return
    pytest.fail(f"{plant.__name__} survived {SEEDS_MAX} histories")


def whole_history(seed: int) -> World:
    world = Chaos(seed, STEPS).run()
    heal(world)
    everything_back(world)
    for job in world.state.table(JobRecord).values():
        spec = world.state.spec(job.id)
        assert job.status.final or spec.nodes + spec.spares > len(world.state.table(NodeRecord))
    replays(world)
    assert isinstance(world.state, State)
    return world
