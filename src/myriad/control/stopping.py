"""Ending a job's processes and giving its nodes back.

STOPPING kills what is left (the store, at least), waits until every node has confirmed, and only then
lets the nodes go, so that no accelerator is ever in two jobs.
"""

from __future__ import annotations

from typing import Any

import msgspec

from myriad.cluster.state import NodeState
from myriad.control import intervals, limits, members
from myriad.control.records import JobRecord
from myriad.control.status import JobStatus, Reason
from myriad.control.turn import Turn
from myriad.spec.messages import Forget, Shutdown, StopWorkers

GRACEFUL = frozenset({Reason.CANCELLING, Reason.TIME_LIMIT_REACHED})


def ask_stop(turn: Turn, job: str, node: str) -> None:
    """Send the fence of a node again unless it has confirmed."""
    member = turn.state.members(job)[node]
    if member.wanted != "stopped" or members.is_fenced(member, member.generation):
        return
    record = turn.state.job(job)
    stopping = record.status is JobStatus.STOPPING
    grace = limits.STOP_GRACE_S if record.reason in GRACEFUL else 0.0
    turn.send(node, StopWorkers(job=job, generation=member.generation, grace_s=grace, keep=not stopping))


def want_stopped(turn: Turn, job: str, node: str) -> None:
    """Fence one node, whatever generation it was asked for last."""
    member = turn.state.members(job).get(node)
    if member is None or member.wanted == "prepared" or members.is_lost(turn.state, job, node):
        return
    turn.put(msgspec.structs.replace(member, wanted="stopped"))
    ask_stop(turn, job, node)


def stop(
    turn: Turn, job: JobRecord, reason: Reason, outcome: Reason, detail: str, **changes: Any
) -> JobRecord:
    """Enter STOPPING on the way to ``outcome``; finishes at once when nothing runs."""
    grace = limits.STOP_GRACE_S if reason in GRACEFUL else 0.0
    job = turn.set_job(
        job,
        reason,
        detail=detail,
        outcome=outcome,
        stage="",
        stage_deadline_s=turn.now + grace + limits.FENCE_DEADLINE_S,
        best_step=members.best_step(turn.state, job),
        **changes,
    )
    for node in turn.state.allocation(job.id).nodes:
        want_stopped(turn, job.id, node)
    return finish_if_stopped(turn, job)


def finish_if_stopped(turn: Turn, job: JobRecord) -> JobRecord:
    if members.unstopped(turn.state, job):
        return job
    assert job.outcome is not None
    record = turn.state.generation(job.id, job.generation)
    if record.ended_s is None:
        turn.put(msgspec.structs.replace(record, ended_s=turn.now))
    numbered = max((m.generation for m in turn.state.members(job.id).values()), default=0)
    intervals.end_counting(turn, job)
    _release_all(turn, job)
    requeued = job.outcome is Reason.NODE_DEFICIT
    return turn.set_job(
        job,
        job.outcome,
        outcome=None,
        stage_deadline_s=None,
        lead="",
        numbered=max(job.numbered, numbered),
        ended_s=None if requeued else turn.now,
    )


def _release_all(turn: Turn, job: JobRecord) -> None:
    allocation = turn.state.allocation(job.id)
    for node in (*allocation.nodes, *allocation.spares):
        if members.is_lost(turn.state, job.id, node):
            continue
        turn.send(node, Forget(job=job.id))
        release(turn, node)
    for member in list(turn.state.members(job.id).values()):
        turn.drop(member)
    turn.put(msgspec.structs.replace(allocation, released_s=turn.now))


def release(turn: Turn, name: str) -> None:
    """The job no longer needs the node."""
    node = turn.state.node(name)
    after = NodeState.DRAINED if node.state is NodeState.DRAINING else NodeState.FREE
    turn.set_node(node, after, job=None)
    if turn.cluster.closing:
        turn.send(name, Shutdown())
