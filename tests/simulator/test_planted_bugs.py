"""Planted bugs: the explorer is worth its name only if it catches the bug it is there for, and soon.

Each control patches one decision of production code (the last ones: the journal's disk, the ledger, a loader) and plays
the seeds from 0 on until an invariant breaks. That the same seeds hold without the patch is what ``test_explorer``
asserts. A patch must be caught by what it makes go wrong, not by an error of its own making, so each names the
words in which it is found.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest

from myriad.agent import orders
from myriad.cluster.state import ClusterState, NodeState
from myriad.control import (
    accounting,
    blame,
    jobs,
    liveness,
    members,
    nodes,
    recovery,
    restore,
    starting,
    stopping,
)
from myriad.control.events import AgentConnected, JobSubmitted
from myriad.control.journal import Row
from myriad.control.records import JobRecord, NodeRecord
from myriad.control.status import Reason
from myriad.control.turn import Turn
from myriad.operations.ledger import Role, Tenure
from myriad.simulator.disk import Disk
from myriad.simulator.draw import draw
from myriad.simulator.explore import run
from myriad.simulator.training import Run, Worker
from myriad.spec.messages import Intervals, MemberStatus, StartStore, StartWorkers, StepReport, StopWorkers

# How many schedules a bug may survive. Most are caught within ten; the rarest break two or three in three hundred.
SEEDS_MAX = 1000

Patch = pytest.MonkeyPatch


@dataclass(frozen=True)
class Bug:
    """``plant`` patches one thing; ``found`` matches the sentence in which the explorer says so."""

    plant: Callable[[Patch], None]
    found: str

    @property
    def name(self) -> str:
        return self.plant.__name__


# ---------------------------------------------------------------- the five that the explorer was built for


def missing_fence(patch: Patch) -> None:
    """Everybody counts as stopped at once."""
    patch.setattr(members, "is_fenced", lambda member, generation: True)


def stale_view(patch: Patch) -> None:
    """The scheduler goes on seeing a node as free that was given away."""
    original = ClusterState.put

    def put(self: ClusterState, node: Any) -> None:
        if node.state is not NodeState.BUSY:
            original(self, node)

    patch.setattr(ClusterState, "put", put)


def lost_wake_up(patch: Patch) -> None:
    """A node becomes free, and nobody looks at the queue again."""
    original = Turn.set_node

    def set_node(self: Turn, *args: Any, **changes: Any) -> NodeRecord:
        before = self.reschedule
        found = original(self, *args, **changes)
        self.reschedule = before
        return found

    patch.setattr(Turn, "set_node", set_node)


def double_release(patch: Patch) -> None:
    """A node that has moved on to another job is released once more by the one that lost it."""
    original = stopping._release_all

    def release_all(turn: Turn, job: JobRecord) -> None:
        original(turn, job)
        for node in turn.state.allocation(job.id).lost:
            if turn.state.node(node).state is not NodeState.DOWN:
                stopping.release(turn, node)

    patch.setattr(stopping, "_release_all", release_all)


def command_not_idempotent(patch: Patch) -> None:
    """A submit that is repeated makes a second job."""
    original = jobs.submit

    def submit(turn: Turn, event: JobSubmitted) -> None:
        turn.state.requests.pop(event.request, None)
        original(turn, event)

    patch.setattr(jobs, "submit", submit)


# ---------------------------------------------------------------- and more


def nobody_asks_again(patch: Patch) -> None:
    """After a hello nobody asks again for what is still wanted: only a deadline of 600 s does."""

    def reconcile_node(turn: Turn, node: str, statuses: tuple[MemberStatus, ...]) -> None:
        for status in statuses:
            jobs.take_status(turn, node, status)

    patch.setattr(jobs, "reconcile_node", reconcile_node)


def order_not_idempotent(patch: Patch) -> None:
    """An agent that is told twice to start workers starts them twice."""
    original = orders.Orders._order

    def order(self: orders.Orders, message: StartStore | StartWorkers | StopWorkers) -> None:
        member = self.members.get(message.job)
        same = member is not None and member.generation == message.generation and member.next is None
        if isinstance(message, StartWorkers) and same and member is not None and member.state == "started":
            self._start_workers(member, message)
        else:
            original(self, message)

    patch.setattr(orders.Orders, "_order", order)


def early_release(patch: Patch) -> None:
    """Nodes go back before their workers are known to be gone."""
    patch.setattr(members, "unstopped", lambda state, job: [])


def stale_shards(patch: Patch) -> None:
    """What was saved in an older generation counts in this one."""
    original = starting.begin

    def begin(turn: Turn, job: JobRecord, *rest: Any) -> JobRecord:
        kept = {m.key: m.saved_step for m in turn.state.members(job.id).values()}
        result = original(turn, job, *rest)
        for member in list(turn.state.members(job.id).values()):
            turn.put(msgspec.structs.replace(member, saved_step=kept.get(member.key, 0)))
        return result

    patch.setattr(starting, "begin", begin)


def some_ranks_are_enough(patch: Patch) -> None:
    """A checkpoint of those nodes that were quick."""

    def commit(turn: Turn, job: JobRecord) -> JobRecord:
        step = max((m.saved_step for m in turn.state.members(job.id).values()), default=0)
        if step <= (job.durable_step or 0):
            return job
        return turn.set_job(job, durable_step=step, durable_generation=job.generation)

    patch.setattr(jobs, "commit_checkpoint", commit)


def same_generation_again(patch: Patch) -> None:
    """A restart that does not count up."""
    original = starting.begin

    def begin(turn: Turn, job: JobRecord, *rest: Any) -> JobRecord:
        if job.generation and job.generation >= job.numbered:
            job = turn.set_job(job, generation=job.generation - 1)
        return original(turn, job, *rest)

    patch.setattr(starting, "begin", begin)


def restarts_behind_its_checkpoint(patch: Patch) -> None:
    """Any snapshot that everybody holds is good enough."""
    original = restore.choose

    def choose(
        held: Sequence[frozenset[int]],
        copies: Sequence[Mapping[int, str]],
        step: int | None,
        generation: int,
    ) -> restore.RestorePoint:
        common = frozenset.intersection(*held) if held else frozenset()
        if step is not None and (older := [each for each in common if each < step]):
            return restore.RestorePoint(max(older), 0, ("memory",) * len(held), {})
        return original(held, copies, step, generation)

    patch.setattr(restore, "choose", choose)


def no_deadline(patch: Patch) -> None:
    """A fence that may take for ever."""
    original = Turn.set_job

    def set_job(self: Turn, job: JobRecord, reason: Reason | None = None, **changes: Any) -> JobRecord:
        if changes.get("stage") == "fence":
            changes["stage_deadline_s"] = None
        return original(self, job, reason, **changes)

    patch.setattr(Turn, "set_job", set_job)


def no_budget(patch: Patch) -> None:
    """Restarts without progress are not counted, and nothing looks the same twice."""
    patch.setattr(blame, "FRUITLESS_RESTARTS_MAX", 10**9)
    patch.setattr(blame, "REPEATS_BEFORE_MOVING", 10**9)


def counters_drift(patch: Patch) -> None:
    """A counter forgets to count down when a node leaves a state."""
    patch.setattr(ClusterState, "_forget_free", lambda self, node: None)


def resurrection(patch: Patch) -> None:
    """Cancelling a job that has ended changes it."""
    original = jobs.cancel_job

    def cancel_job(turn: Turn, job: JobRecord) -> None:
        if job.status.final:
            turn.put(msgspec.structs.replace(job, reason=Reason.CANCELLED, ended_s=turn.now))
        original(turn, job)

    patch.setattr(jobs, "cancel_job", cancel_job)


def zombie_is_taken_back(patch: Patch) -> None:
    """An agent that was declared dead says hello, and is welcome."""
    original = nodes.connected

    def connected(turn: Turn, event: AgentConnected) -> None:
        node = turn.state.node(event.node)
        if node.incarnation == event.incarnation and node.state is NodeState.DOWN:
            turn.set_node(node, NodeState.FREE, connected=True)
            return
        original(turn, event)

    patch.setattr(nodes, "connected", connected)


def rejoined_counts_as_survivor(patch: Patch) -> None:
    """A lost node that is back with a new agent is taken for one that never left."""
    patch.setattr(members, "is_lost", lambda state, job, node: state.node(node).state is NodeState.DOWN)


def node_left_behind(patch: Patch) -> None:
    """One node of an ended job is forgotten."""
    original = stopping.release

    def release(turn: Turn, name: str) -> None:
        if name != "n1":
            original(turn, name)

    patch.setattr(stopping, "release", release)


def silence_is_not_reported(patch: Patch) -> None:
    """Nobody says that an agent has not been heard of."""
    patch.setattr(liveness.Liveness, "look", lambda self, now_s: [])


def restart_decides_again(patch: Patch) -> None:
    """A decision depends on something that is not in the journal."""
    original = recovery.fence
    calls = iter(range(10**9))

    def fence(turn: Turn, job: JobRecord, reason: Reason, detail: str, failed_s: float) -> JobRecord:
        return original(turn, job, reason, f"{detail} ({next(calls)})", failed_s)

    patch.setattr(recovery, "fence", fence)


def change_beside_the_journal(patch: Patch) -> None:
    """A record is changed without leaving a trace."""
    original = nodes.disconnected

    def disconnected(turn: Turn, event: Any) -> None:
        original(turn, event)
        turn.state.apply(msgspec.structs.replace(turn.state.node(event.node), reason="a secret"))

    patch.setattr(nodes, "disconnected", disconnected)


def torn_tail_is_trusted(patch: Patch) -> None:
    """After a crash half a commit is taken for a whole one."""
    original = Disk._frame

    def frame(self: Disk, offset: int) -> tuple[list[Row], int] | None:
        found = original(self, offset)
        if found is None and len(self._bytes) > offset:
            self._bytes[offset:] = self.last_whole
            found = original(self, offset)
        if found is not None:
            _, end = found
            self.last_whole = bytes(self._bytes[offset:end])
        return found

    patch.setattr(Disk, "last_whole", b"", raising=False)
    patch.setattr(Disk, "_frame", frame)


def ledger_forgets_the_dead(patch: Patch) -> None:
    """The time in which a node was down is nobody's."""
    original = accounting.node_tenures

    def node_tenures(*args: Any) -> Mapping[str, tuple[Tenure, ...]]:
        found = original(*args)
        return {
            name: tuple(Tenure(Role.AWAY, t.start_s, t.end_s) if t.role is Role.DOWN else t for t in tenures)
            for name, tenures in found.items()
        }

    patch.setattr(accounting, "node_tenures", node_tenures)


def skipped_sample(patch: Patch) -> None:
    """After a restart the loader goes on one sample too late."""
    original = Run._report

    def report(self: Run, worker: Worker, step: int) -> StepReport:
        found = original(self, worker, step)
        late = worker.order.restore_step is not None
        return msgspec.structs.replace(found, samples=tuple(s + late for s in found.samples))

    patch.setattr(Run, "_report", report)


def each_rank_for_itself(patch: Patch) -> None:
    """A rank goes by what it was told as soon as it hears it."""
    original = Worker.committed

    def committed(self: Worker, step: int, intervals: Intervals) -> None:
        original(self, step, intervals)
        if self.cadence is not None:
            self.cadence.adopt(intervals, step)

    patch.setattr(Worker, "committed", committed)


def start_with_the_latest(patch: Patch) -> None:
    """What a node is asked to start with is not what its generation was given, but what was decided last."""
    original = starting.start_message

    def start_message(turn: Turn, job: JobRecord, node: str) -> StartWorkers:
        found = original(turn, job, node)
        return msgspec.structs.replace(found, intervals=Intervals(1 + int(turn.now * 10) % 7, 1, 5))

    patch.setattr(starting, "start_message", start_message)


BUGS = [
    Bug(missing_fence, r"runs j\d+ generation|still runs"),
    Bug(stale_view, "which it does not hold|counter of the cluster|instead of"),
    Bug(lost_wake_up, "do not end"),
    Bug(double_release, "which it does not hold|the jobs say"),
    Bug(command_not_idempotent, "jobs from|was answered with"),
    Bug(nobody_asks_again, "although nothing is broken any more"),
    Bug(order_not_idempotent, "started twice|generation"),
    Bug(early_release, r"still runs|and now"),
    Bug(stale_shards, "written only by|took a checkpoint"),
    Bug(some_ranks_are_enough, "written only by|samples, or not once"),
    Bug(same_generation_again, "goes from generation"),
    Bug(restarts_behind_its_checkpoint, "behind its checkpoint"),
    Bug(no_deadline, "with deadline None"),
    Bug(no_budget, "do not end|for nothing"),
    Bug(counters_drift, "counter of the cluster"),
    Bug(resurrection, "had ended and changed"),
    Bug(zombie_is_taken_back, "still runs|says|generation"),
    Bug(rejoined_counts_as_survivor, "which it does not hold|fenced without a failure|goes in circles"),
    Bug(node_left_behind, "says"),
    Bug(silence_is_not_reported, "do not end|although nothing is broken any more"),
    Bug(restart_decides_again, "instead of"),
    Bug(change_beside_the_journal, "instead of|fold"),
    Bug(torn_tail_is_trusted, "instead of"),
    Bug(ledger_forgets_the_dead, "accelerator-seconds"),
    Bug(skipped_sample, "samples, or not once"),
    Bug(each_rank_for_itself, "do not agree"),
    Bug(start_with_the_latest, "do not agree"),
]


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_planted_bug_is_caught(bug: Bug, monkeypatch: pytest.MonkeyPatch) -> None:
    bug.plant(monkeypatch)
    for seed in range(SEEDS_MAX):
        outcome = run(draw(seed))
        if outcome.broken:
            print(f"{bug.name}: seed {seed}: {outcome.broken[:200]}")
            assert re.search(bug.found, outcome.broken), f"seed {seed}: {outcome.broken}"
            monkeypatch.undo()
            healthy = run(draw(seed))
            assert not healthy.broken, f"seed {seed} breaks without the bug: {healthy.broken}"
            return
    pytest.fail(f"{bug.name} survived {SEEDS_MAX} schedules")
