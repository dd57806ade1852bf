"""Jobs: submitted, placed, started, watched, ended. ``advance`` is level-triggered: it looks at where a
job is and takes every step that the members' last words allow, so a repeated or late message is harmless.
"""

from __future__ import annotations

import msgspec

from myriad.cluster.state import NodeState
from myriad.control import intervals, limits, members, recovery, restore, starting, stopping
from myriad.control.events import CancelRequested, JobSubmitted, MemberReported
from myriad.control.records import AllocationRecord, JobRecord, SpecRecord
from myriad.control.status import JobStatus, Reason
from myriad.control.turn import Turn
from myriad.scheduler.placement import Placement, PlacementRequest
from myriad.scheduler.queue import schedule as schedule_queue
from myriad.spec.messages import Commit, Forget, MemberStatus, StopWorkers

# ---------------------------------------------------------------- queue


def submit(turn: Turn, event: JobSubmitted) -> None:
    """A new job, unless this request was seen before."""
    if event.request in turn.state.requests:
        return
    cluster = turn.cluster
    turn.put(msgspec.structs.replace(cluster, jobs=cluster.jobs + 1))
    job = f"j{cluster.jobs + 1}"
    turn.put(SpecRecord(job=job, spec=event.spec, request=event.request))
    spec = turn.state.spec(job)
    turn.put(
        JobRecord(
            id=job,
            name=spec.name,
            reason=Reason.QUEUED,
            detail="waiting for the scheduler",
            submitted_s=turn.now,
            changed_s=turn.now,
        )
    )
    turn.reschedule = True


def schedule(turn: Turn) -> None:
    """One pass over the pending jobs, in order of submission."""
    if turn.cluster.closing:
        return
    pending = [j for j in map(turn.state.job, turn.state.live) if j.status is JobStatus.PENDING]
    if not pending:
        return
    requests = [_request(turn, job) for job in pending]
    for name, decision in schedule_queue(requests, turn.state.cluster, turn.fabric):
        job = turn.state.job(name)
        if isinstance(decision, Placement):
            grant(turn, job, decision)
        elif job.reason is Reason.NODE_DEFICIT:
            turn.set_job(job, detail=decision.sentence)
        else:
            turn.set_job(job, Reason.RESOURCES, detail=decision.sentence)


def _request(turn: Turn, job: JobRecord) -> PlacementRequest:
    spec = turn.state.spec(job.id)
    return PlacementRequest(
        job=job.id,
        nodes=spec.nodes,
        spares=spec.spares,
        # A job that lost its spare goes on without one rather than wait for a repair.
        spares_required=job.generation == 0,
        node_type=spec.node_type,
        workers_per_node=spec.workers_per_node,
        layout=spec.layout if spec.uses_torch else None,
    )


def grant(turn: Turn, job: JobRecord, placement: Placement) -> None:
    """The job holds these nodes from now on; its first (or next) generation starts."""
    number = sum(1 for _ in turn.state.allocations(job.id)) + 1
    turn.put(
        AllocationRecord(
            job=job.id,
            nodes=placement.nodes,
            spares=placement.spares,
            lost=(),
            granted_s=turn.now,
            number=number,
        )
    )
    for node in placement.nodes:
        turn.set_node(turn.state.node(node), NodeState.BUSY, job=job.id)
    for node in placement.spares:
        turn.set_node(turn.state.node(node), NodeState.SPARE, job=job.id)
    spec = turn.state.spec(job.id)
    world = spec.nodes * starting.workers_per_node(turn, job.id)
    limit = job.time_limit_s
    if limit is None and spec.time_limit is not None:
        limit = turn.now + spec.time_limit
    first = job.generation == 0
    job = turn.set_job(
        job,
        Reason.FIRST_START if first else Reason.RESUMED,
        world_size=world,
        granted_s=turn.now if job.granted_s is None else job.granted_s,
        time_limit_s=limit,
    )
    intervals.begin_counting(turn, job)
    point = restore.choose([frozenset()] * world, [{}] * world, job.durable_step, job.durable_generation)
    detail = f"starting on {', '.join(placement.nodes)}"
    starting.begin(turn, job, point, turn.now, job.reason, detail)


# ---------------------------------------------------------------- what agents report


def member_reported(turn: Turn, event: MemberReported) -> None:
    node = turn.state.node(event.node)
    if node.incarnation != event.incarnation or node.state is NodeState.DOWN:
        return  # a fenced or former agent
    take_status(turn, event.node, event.member)


def reconcile_node(turn: Turn, node: str, statuses: tuple[MemberStatus, ...]) -> None:
    """After a hello: take in what runs there, then ask again for whatever is still wanted."""
    for status in statuses:
        take_status(turn, node, status)
    for job in list(turn.state.live):
        if node in turn.state.members(job) and not members.is_lost(turn.state, job, node):
            starting.ask(turn, job, node)
            stopping.ask_stop(turn, job, node)


def take_status(turn: Turn, node: str, status: MemberStatus) -> None:
    """Fold one member's status in, if it is news, and move the job on."""
    member = turn.state.members(status.job).get(node)
    if member is None:
        if status.state not in ("stopped", "prepared", "preparing"):
            turn.send(node, StopWorkers(job=status.job, generation=status.generation, keep=False))
        turn.send(node, Forget(job=status.job))
        return
    if member.status is not None:
        seen = (member.status.generation, member.status.version)
        if (status.generation, status.version) <= seen:
            return
    job = turn.state.job(status.job)
    current = status.generation == job.generation
    turn.put(
        msgspec.structs.replace(
            member,
            status=status,
            exits=status.exits if current else member.exits,
            saved_step=max(member.saved_step, _saved_step(turn, status, node) if current else 0),
        )
    )
    advance(turn, job)
    _resend_commit(turn, status, node, job.durable_step)


def _saved_step(turn: Turn, status: MemberStatus, node: str) -> int:
    """The durable step all ranks of the node have written, 0 if some have not (the dead ones included)."""
    nodes = turn.state.allocation(status.job).nodes
    if node not in nodes:
        return 0
    count = starting.workers_per_node(turn, status.job)
    first = nodes.index(node) * count
    steps = {shard.rank: shard.step for shard in status.shards}
    return min(steps.get(rank, 0) for rank in range(first, first + count))


def _resend_commit(turn: Turn, status: MemberStatus, node: str, done: int | None) -> None:
    """An agent that still shows shards of ``done``, the step committed before this, has missed the commit."""
    job = turn.state.job(status.job)
    if done is None or status.generation != job.generation:
        return
    if any(shard.step <= done for shard in status.shards):
        wanted = intervals.decided(turn, job)
        turn.send(node, Commit(job=job.id, generation=job.generation, step=done, intervals=wanted))


# ---------------------------------------------------------------- moving on


def advance(turn: Turn, job: JobRecord) -> None:
    """Take every step that is possible now."""
    if job.status is JobStatus.STOPPING:
        stopping.finish_if_stopped(turn, job)
        return
    if not job.status.allocated:
        return
    if job.stage == "fence":
        job = recovery.finish_if_fenced(turn, job)
    elif _fence_if_failed(turn, job):
        return
    if job.stage == "store" and job.status is not JobStatus.STOPPING:
        lead = turn.state.members(job.id).get(job.lead)
        status = members.current_status(lead, job.generation)
        if status is not None and status.state == "store" and status.store_port:
            job = starting.start_workers(turn, job)
    if job.stage in ("workers", "") and job.status is not JobStatus.STOPPING and job.status.allocated:
        job = starting.note_phases(turn, job)
        job = commit_checkpoint(turn, job)
        _finish_if_done(turn, job)


def _fence_if_failed(turn: Turn, job: JobRecord) -> bool:
    """A worker of the current generation ended badly, or an agent could not start one."""
    bad = [(node, e) for node, e in members.exits(turn.state, job) if e.code != 0]
    if bad:
        node, worker_exit = bad[0]
        detail = f"rank {worker_exit.rank} on {node} ended with code {worker_exit.code}"
        recovery.fence(turn, job, Reason.WORKER_FAILED, detail, turn.now)
        return True
    for node, member in turn.state.members(job.id).items():
        status = members.current_status(member, job.generation)
        if status is not None and status.error:
            error = f"node {node} could not start its workers: {status.error}"
            job = turn.set_job(job, start_error=error)
            recovery.fence(turn, job, Reason.START_FAILED, error, turn.now)
            return True
    return False


def commit_checkpoint(turn: Turn, job: JobRecord) -> JobRecord:
    """A durable checkpoint exists once every rank has written it and this is journaled."""
    found = turn.state.members(job.id)
    nodes = turn.state.allocation(job.id).nodes
    step = min((found[node].saved_step if node in found else 0 for node in nodes), default=0)
    if step <= (job.durable_step or 0):
        return job
    job = turn.set_job(job, durable_step=step, durable_generation=job.generation)
    statuses = [found[node].status for node in nodes]
    shards = [shard for status in statuses if status is not None for shard in status.shards]
    intervals.take_costs(turn, job, [shard for shard in shards if shard.step == step])
    wanted = intervals.decide(turn, job)
    for node in nodes:
        turn.send(node, Commit(job=job.id, generation=job.generation, step=step, intervals=wanted))
    return job


def _finish_if_done(turn: Turn, job: JobRecord) -> None:
    found = turn.state.members(job.id)
    for node in turn.state.allocation(job.id).nodes:
        status = members.current_status(found.get(node), job.generation)
        if status is None or status.state != "exited":
            return
    stopping.stop(turn, job, Reason.FINISHING, Reason.COMPLETED, "every worker has finished", exit_code=0)


def node_lost(turn: Turn, name: str, node: str, reason: str, last_sign_s: float) -> None:
    """A node that the job held is down."""
    job = turn.state.job(name)
    allocation = turn.state.allocation(name)
    if node in allocation.spares:
        spares = tuple(s for s in allocation.spares if s != node)
        turn.put(msgspec.structs.replace(allocation, spares=spares, lost=(*allocation.lost, node)))
        member = turn.state.members(name).get(node)
        if member is not None:
            turn.drop(member)
        return
    if job.status is JobStatus.STOPPING:
        stopping.finish_if_stopped(turn, job)
    elif node in allocation.nodes:
        recovery.node_lost(turn, job, node, reason, last_sign_s)
        advance(turn, turn.state.job(name))


# ---------------------------------------------------------------- operators and clocks


def cancel(turn: Turn, event: CancelRequested) -> None:
    cancel_job(turn, turn.state.job(event.job))


def cancel_job(turn: Turn, job: JobRecord) -> None:
    """End the job on a person's word; a job that has ended or is ending stays as it is."""
    if job.status is JobStatus.PENDING:
        turn.set_job(job, Reason.CANCELLED, detail="cancelled while pending", ended_s=turn.now)
    elif job.status.allocated and job.status is not JobStatus.STOPPING:
        stopping.stop(turn, job, Reason.CANCELLING, Reason.CANCELLED, "cancelled")


def cancel_all(turn: Turn) -> None:
    for job in list(turn.state.live):
        cancel_job(turn, turn.state.job(job))


def expire(turn: Turn, job: JobRecord) -> list[str]:
    """Act on the job's deadlines that have passed; returns nodes that must be declared down."""
    limit = job.time_limit_s
    if limit is not None and limit <= turn.now and job.status is not JobStatus.STOPPING:
        if job.status.allocated:
            spent = turn.state.spec(job.id).time_limit
            detail = f"its time limit of {spent:g} s has passed"
            stopping.stop(turn, job, Reason.TIME_LIMIT_REACHED, Reason.TIME_LIMIT, detail)
        return []
    if job.stage_deadline_s is None or job.stage_deadline_s > turn.now:
        return []
    if job.status is JobStatus.STOPPING:
        return members.unstopped(turn.state, job)
    if job.stage == "fence":
        return members.unfenced(turn.state, job)
    late = [job.lead] if job.stage == "store" else starting.missing(turn, job, "first_step")
    what = "start a store" if job.stage == "store" else "finish a first step"
    within = limits.STORE_DEADLINE_S if job.stage == "store" else limits.START_DEADLINE_S
    error = f"{', '.join(late)} did not {what} within {within:g} s"
    job = turn.set_job(job, start_error=error)
    recovery.fence(turn, job, Reason.START_FAILED, error, turn.now)
    return []


def renew_deadlines(turn: Turn) -> None:
    """The controller was away, and the clock may have jumped meanwhile: every stage gets its whole time again."""
    for name in turn.state.live:
        job = turn.state.job(name)
        if job.stage_deadline_s is not None:
            turn.set_job(job, stage_deadline_s=turn.now + limits.STAGE_DEADLINES_S[job.stage])


def deadline(job: JobRecord) -> float | None:
    """The next moment at which :func:`expire` has something to do."""
    moments = []
    if job.stage_deadline_s is not None:
        moments.append(job.stage_deadline_s)
    if job.time_limit_s is not None and job.status.allocated and job.status is not JobStatus.STOPPING:
        moments.append(job.time_limit_s)
    return min(moments, default=None)
