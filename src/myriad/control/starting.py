"""Starting a generation: the store on the lead's node first, then the workers everywhere.

The lead is the node of the lowest surviving rank, so that a newcomer's template may still be loading
while the store is up. All messages are rebuilt from the state, never remembered, so the same message
goes out again when an agent reconnects.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from myriad.control import intervals, limits, members
from myriad.control.copies import copy_plan
from myriad.control.records import GenerationRecord, JobRecord, MemberRecord, SpecRecord
from myriad.control.restore import RestorePoint
from myriad.control.status import JobStatus, Reason
from myriad.control.turn import Turn
from myriad.spec.cluster import NodeType
from myriad.spec.messages import Peer, Phase, Prepare, RankPlan, StartStore, StartWorkers, Tier

Wanted = Literal["prepared", "store", "started", "stopped"]


def workers_per_node(turn: Turn, job: str) -> int:
    spec = turn.state.spec(job)
    node = turn.state.node(turn.state.allocation(job).nodes[0])
    return spec.workers_per_node or node.accelerators


def want(turn: Turn, job: str, node: str, wanted: Wanted, generation: int) -> None:
    """Record what is asked of a node's agent, and ask."""
    old = turn.state.members(job).get(node)
    if old is None:
        record = MemberRecord(job=job, node=node, wanted=wanted, generation=generation)
    else:
        record = msgspec.structs.replace(old, wanted=wanted, generation=generation)
    turn.put(record)
    ask(turn, job, node)


def ask(turn: Turn, job: str, node: str) -> None:
    """Send what is wanted of a node, unless its agent has already done it. (Stops: stopping.py.)"""
    member = turn.state.members(job)[node]
    torch = turn.state.spec(job).uses_torch
    status = members.current_status(member, member.generation)
    match member.wanted:
        case "prepared":
            turn.send(node, Prepare(job=job, torch=torch))
        case "store":
            if status is None or status.state != "store":
                turn.send(node, StartStore(job=job, generation=member.generation, torch=torch))
        case "started":
            if status is None or status.state not in ("started", "exited", "stopped"):
                turn.send(node, start_message(turn, turn.state.job(job), node))
        case _:
            pass


def begin(
    turn: Turn, job: JobRecord, point: RestorePoint, begun_s: float, reason: Reason, detail: str
) -> JobRecord:
    """Start the next generation from ``point`` on the nodes of the current allocation."""
    generation = max(job.generation, job.numbered) + 1
    allocation = turn.state.allocation(job.id)
    early = turn.state.members(job.id).get(job.lead)
    if early is None or early.wanted != "store" or early.generation != generation:
        job = turn.set_job(job, lead=allocation.nodes[0])
    turn.put(
        GenerationRecord(
            job=job.id,
            generation=generation,
            allocation=allocation.number,
            nodes=allocation.nodes,
            begun_s=begun_s,
            fenced_s=turn.now,
            restore_step=point.step,
            restore_generation=point.generation,
            intervals=intervals.decide(turn, job),
            tiers=point.tiers,
            sources=point.sources,
        )
    )
    job = turn.set_job(
        job,
        reason,
        generation=generation,
        detail=detail,
        stage="store",
        stage_deadline_s=turn.now + limits.STORE_DEADLINE_S,
        start_error="",
    )
    for node in (*allocation.nodes, *allocation.spares):
        old = turn.state.members(job.id).get(node)
        if old is not None:  # what the generation before has said and saved does not count in this one
            turn.put(msgspec.structs.replace(old, exits=(), saved_step=0))
        if node != job.lead:
            want(turn, job.id, node, "prepared", generation)
        elif old is None or old.wanted != "store" or old.generation != generation:
            want(turn, job.id, node, "store", generation)
    return job


def start_workers(turn: Turn, job: JobRecord) -> JobRecord:
    """The store is up: start every rank."""
    record = turn.state.generation(job.id, job.generation)
    turn.put(msgspec.structs.replace(record, store_s=turn.now))
    job = turn.set_job(job, stage="workers", stage_deadline_s=turn.now + limits.START_DEADLINE_S)
    for node in turn.state.allocation(job.id).nodes:
        want(turn, job.id, node, "started", job.generation)
    return job


def start_message(turn: Turn, job: JobRecord, node: str) -> StartWorkers:
    """The StartWorkers of a node, from the state alone."""
    allocation = turn.state.allocation(job.id)
    record = turn.state.generation(job.id, job.generation)
    per_node = workers_per_node(turn, job.id)
    index = allocation.nodes.index(node)
    lead = turn.state.members(job.id)[job.lead]
    assert lead.status is not None and lead.status.store_port
    assert record.intervals is not None
    tiers = record.tiers or ("none",) * job.world_size
    ranks = tuple(
        RankPlan(
            rank=rank,
            local_rank=rank - index * per_node,
            tier=_TIERS[tiers[rank]],
            source=_peer(turn, record.sources[rank]) if rank in record.sources else None,
        )
        for rank in range(index * per_node, (index + 1) * per_node)
    )
    held_by = _holders(turn, job)
    wards = [place for place, giver in enumerate(allocation.nodes) if held_by.get(giver) == node]
    return StartWorkers(
        job=job.id,
        job_name=job.name,
        generation=job.generation,
        restarts=job.restarts,
        world_size=job.world_size,
        node_rank=index,
        ranks=ranks,
        store_host=turn.state.node(job.lead).host,
        store_port=lead.status.store_port,
        job_dir=f"{turn.cluster.jobs_dir}/{job.id}",
        spec=turn.state.table(SpecRecord)[job.id].spec,
        intervals=record.intervals,
        restore_step=record.restore_step,
        restore_generation=record.restore_generation,
        durable_step=job.durable_step,
        durable_generation=job.durable_generation,
        holder=_peer(turn, held_by[node]) if node in held_by else None,
        wards=tuple(rank for place in wards for rank in range(place * per_node, (place + 1) * per_node)),
    )


def _holders(turn: Turn, job: JobRecord) -> Mapping[str, str]:
    nodes = turn.state.allocation(job.id).nodes
    type_of = turn.cluster.spec["node_types"][turn.state.node(nodes[0]).type]
    node_type = NodeType.model_validate(type_of)
    spec, per_node = turn.state.spec(job.id), workers_per_node(turn, job.id)
    return copy_plan(spec, node_type, nodes, turn.fabric.leaf_of, per_node).holders


def _peer(turn: Turn, node: str) -> Peer:
    record = turn.state.node(node)
    return Peer(node, record.host, record.peer_port)


# The encoder omits a default by identity, so that a tier read back from the journal must become the
# very constant again: a replay yields the same bytes.
_TIERS: dict[str, Tier] = {"none": "none", "memory": "memory", "peer": "peer", "durable": "durable"}


def note_phases(turn: Turn, job: JobRecord) -> JobRecord:
    """Write down when *all* nodes had passed each phase, and whether the job runs now."""
    record = turn.state.generation(job.id, job.generation)
    nodes = turn.state.allocation(job.id).nodes
    fields: dict[Phase, str] = {
        "fork": "forked_s",
        "rendezvous": "rendezvous_s",
        "restore": "restored_s",
        "first_step": "first_step_s",
    }
    for phase, field in fields.items():
        if getattr(record, field) is None and not missing(turn, job, phase):
            record = msgspec.structs.replace(record, **{field: turn.now})
    turn.put(record)
    runs_from: Phase = "first_step" if turn.state.spec(job.id).uses_torch else "fork"
    if job.stage == "workers" and not missing(turn, job, runs_from):
        where = f"on {len(nodes)} {'node' if len(nodes) == 1 else 'nodes'}"
        detail = f"running {where}, {job.world_size} {'worker' if job.world_size == 1 else 'workers'}"
        if job.status is not JobStatus.RUNNING:
            job = turn.set_job(job, Reason.PROGRESS, detail=detail, stage="", stage_deadline_s=None)
    return job


def missing(turn: Turn, job: JobRecord, phase: Phase) -> list[str]:
    """Nodes of the job that have not reported the phase for the current generation."""
    found = turn.state.members(job.id)
    late = []
    for node in turn.state.allocation(job.id).nodes:
        status = members.current_status(found.get(node), job.generation)
        if status is None or phase not in status.phases:
            late.append(node)
    return late
