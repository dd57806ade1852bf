"""From a failure to the next generation: fence, blame, replace, restore.

The fence is complete when every node of the job has confirmed that no process of the old generation is
left, or is known to be down. The next generation's store is started at the same time, on the node of
the lowest surviving rank. Only then is the failure judged, because by then every exit has been reported.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from myriad.cluster.state import NodeState
from myriad.control import blame, intervals, limits, members, restore, starting, stopping
from myriad.control.blame import Failure, Kind
from myriad.control.records import JobRecord, Move
from myriad.control.status import Reason
from myriad.control.turn import Turn
from myriad.scheduler.placement import replace as find_replacement
from myriad.scheduler.refusal import Refusal
from myriad.spec.failures import FailureClass
from myriad.spec.messages import StopWorkers


@dataclass(frozen=True, slots=True)
class Verdict:
    """What to do after a failure: ``give_up`` ends the job, ``move`` takes the rank to another node."""

    job: JobRecord
    give_up: Reason | None
    why: str
    move: str | None


def fence(turn: Turn, job: JobRecord, reason: Reason, detail: str, failed_s: float) -> JobRecord:
    """Something of the job has failed: kill the rest of its generation and prepare the next."""
    record = turn.state.generation(job.id, job.generation)
    if record.verdict_s is None:
        turn.put(
            msgspec.structs.replace(
                record, failed_s=max(failed_s, record.begun_s), verdict_s=turn.now, cause=detail
            )
        )
    job = turn.set_job(
        job,
        reason,
        detail=detail,
        stage="fence",
        stage_deadline_s=turn.now + limits.FENCE_DEADLINE_S,
    )
    for node in turn.state.allocation(job.id).nodes:
        stopping.want_stopped(turn, job.id, node)
    job = start_store_early(turn, job)
    return finish_if_fenced(turn, job)


def start_store_early(turn: Turn, job: JobRecord) -> JobRecord:
    """The next store needs only one surviving node, not a finished fence."""
    for node in turn.state.allocation(job.id).nodes:
        if not members.is_lost(turn.state, job.id, node):
            job = turn.set_job(job, lead=node)
            starting.want(turn, job.id, node, "store", max(job.generation, job.numbered) + 1)
            return job
    return turn.set_job(job, lead="")


def node_lost(turn: Turn, job: JobRecord, node: str, reason: str, last_sign_s: float) -> JobRecord:
    """A rank-holding node of the job is down."""
    detail = f"node {node} was lost ({reason})"
    if job.stage != "fence":
        return fence(turn, job, Reason.NODE_FAILED, detail, last_sign_s)
    if job.lead == node:  # another node is asked for the store just now: it gets its own time to answer
        job = turn.set_job(job, stage_deadline_s=turn.now + limits.FENCE_DEADLINE_S)
        job = start_store_early(turn, job)
    return finish_if_fenced(turn, turn.set_job(job, Reason.NODE_FAILED, detail=detail))


def finish_if_fenced(turn: Turn, job: JobRecord) -> JobRecord:
    """Once every node has confirmed: blame, replace, and start again, or stop with the reason."""
    if members.unfenced(turn.state, job):
        return job
    record = turn.state.generation(job.id, job.generation)
    verdict = judge(turn, job)
    job = verdict.job
    failure = _failure(turn, job)
    intervals.count(turn, job, _class_of(turn, job, failure))
    record = msgspec.structs.replace(
        record,
        ended_s=turn.now,
        cause=failure.sentence,
        culprit_node=failure.node,
        culprit_rank=failure.rank,
    )
    turn.put(record)
    if verdict.give_up is not None:
        code = failure.code if failure.code is not None and failure.code > 0 else None
        return stopping.stop(turn, job, Reason.FAILING, verdict.give_up, verdict.why, exit_code=code)
    swaps = replace_nodes(turn, job, verdict.move)
    if isinstance(swaps, Refusal):
        detail = f"{failure.sentence}; {swaps.sentence}"
        return stopping.stop(turn, job, Reason.REQUEUEING, Reason.NODE_DEFICIT, detail)
    turn.put(msgspec.structs.replace(record, replacement=swaps))
    return restart(turn, job, failure, swaps)


def _failure(turn: Turn, job: JobRecord) -> Failure:
    found = blame.first_failure(members.lost_nodes(turn.state, job), members.exits(turn.state, job))
    if found is not None:
        return found
    assert job.start_error, f"{job.id} was fenced without a failure"
    return Failure(Kind.START, "", None, None, "start_failed", job.start_error, None)


def _class_of(turn: Turn, job: JobRecord, failure: Failure) -> FailureClass:
    """What the failure has taken with it."""
    if failure.kind is not Kind.NODE:
        return FailureClass.PROCESS
    return FailureClass.NODE if len(members.lost_nodes(turn.state, job)) == 1 else FailureClass.DOMAIN


def judge(turn: Turn, job: JobRecord) -> Verdict:
    """Is another start worth it, and does it have to be elsewhere?"""
    failure = _failure(turn, job)
    record = turn.state.generation(job.id, job.generation)
    best = members.best_step(turn.state, job)
    ran_s = (record.failed_s or turn.now) - (record.forked_s or turn.now)
    # Time alone is progress where steps are not reported, or where nothing speaks against the job.
    by_time = failure.kind is Kind.NODE or not (best or turn.state.spec(job.id).uses_torch)
    doublings = min(blame.failures_alike(job.failure, failure), limits.PROGRESS_DOUBLINGS_MAX)
    progress = best > job.best_step or (by_time and ran_s >= limits.PROGRESS_RUN_S * 2**doublings)
    signature = blame.extend_signature(job.failure, failure, progress)
    job = turn.set_job(job, failure=signature, fruitless=0 if progress else job.fruitless + 1, best_step=best)
    if job.fruitless > blame.FRUITLESS_RESTARTS_MAX:
        why = f"{failure.sentence}; {job.fruitless} restarts in a row made no progress"
        return Verdict(job, Reason.BUDGET_SPENT, why, None)
    repeats = failure.kind in (Kind.ERROR, Kind.SIGNAL) and signature.count >= blame.REPEATS_BEFORE_MOVING
    if not repeats:
        return Verdict(job, None, "", None)
    at = "" if failure.step is None else f" at step {failure.step}"
    if len(signature.nodes) >= 2:
        why = f"{failure.sentence}; the same{at} {signature.count} times, on {' and '.join(signature.nodes)}"
        return Verdict(job, Reason.USER_ERROR, why, None)
    if isinstance(_replacement(turn, job, failure.node), Refusal):
        why = f"{failure.sentence}; the same{at} {signature.count} times, and no other node is free to try"
        return Verdict(job, Reason.USER_ERROR, why, None)
    return Verdict(job, None, "", failure.node)


def _replacement(turn: Turn, job: JobRecord, node: str) -> str | Refusal:
    if turn.state.node(node).state is NodeState.FREE:
        return node
    allocation = turn.state.allocation(job.id)
    return find_replacement(
        node, allocation.nodes, allocation.spares, turn.state.cluster, turn.fabric, turn.state.node(node).type
    )


def replace_nodes(turn: Turn, job: JobRecord, move: str | None) -> dict[str, str] | Refusal:
    """Put spares or free nodes in the places of lost ones, and of the one to move away from.

    Nodes that have rejoined come first: each takes its own place before anybody else's is filled.
    """
    swaps: dict[str, str] = {}
    nodes = turn.state.allocation(job.id).nodes
    for node in sorted(nodes, key=lambda name: turn.state.node(name).state is not NodeState.FREE):
        lost = members.is_lost(turn.state, job.id, node)
        if not lost and node != move:
            continue
        found = _replacement(turn, job, node)
        if isinstance(found, Refusal):
            return found
        swaps[node] = found
        _swap(turn, job, node, found, lost)
    return swaps


def _swap(turn: Turn, job: JobRecord, old: str, new: str, lost: bool) -> None:
    allocation = turn.state.allocation(job.id)
    from_spares = new in allocation.spares
    spares = tuple(s for s in allocation.spares if s != new)
    # A node that has been lost and has rejoined can take its own place; a draining one leaves with its rank.
    replaced = lost and new != old
    to_spares = not lost and from_spares and turn.state.node(old).state is NodeState.BUSY
    if to_spares:
        spares = (*spares, old)
    moves = list(allocation.moves)
    if not from_spares and new != old and new not in allocation.lost:
        moves.append(Move(node=new, at_s=turn.now))
    if not lost and not to_spares and old not in allocation.lost:
        moves.append(Move(node=old, at_s=turn.now, joins=False))
    turn.put(
        msgspec.structs.replace(
            allocation,
            nodes=tuple(new if n == old else n for n in allocation.nodes),
            spares=spares,
            lost=(*allocation.lost, old) if replaced else allocation.lost,
            moves=tuple(moves),
        )
    )
    turn.set_node(turn.state.node(new), NodeState.BUSY, job=job.id)
    member = turn.state.members(job.id).get(old)
    if member is not None:
        turn.drop(member)
    if lost:
        return
    turn.send(old, StopWorkers(job=job.id, generation=job.generation + 1, keep=False))
    if to_spares:
        turn.set_node(turn.state.node(old), NodeState.SPARE)
    else:
        stopping.release(turn, old)


def restart(turn: Turn, job: JobRecord, failure: Failure, swaps: dict[str, str]) -> JobRecord:
    """Choose the step and begin the next generation."""
    per_node = starting.workers_per_node(turn, job.id)
    held = members.held_steps(turn.state, job, per_node)
    copies = members.copied_steps(turn.state, job, per_node)
    ended = turn.state.generation(job.id, job.generation)
    if ended.sources and ended.restored_s is None:  # whatever it was, it is not tried twice
        copies = [{}] * job.world_size
    point = restore.choose(held, copies, job.durable_step, job.durable_generation)
    taken = "; ".join(f"{new} takes over from {old}" for old, new in swaps.items())
    where = "the beginning" if point.step is None else f"step {point.step}"
    detail = f"{failure.sentence}{'; ' + taken if taken else ''}; restarting from {where}"
    job = turn.set_job(job, restarts=job.restarts + 1)
    verdict_s = turn.state.generation(job.id, job.generation).verdict_s
    assert verdict_s is not None
    return starting.begin(turn, job, point, verdict_s, job.reason, detail)
