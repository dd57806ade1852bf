"""What the API says of jobs, nodes and the cluster: plain values made from the controller's records.

Times are given twice: durations in seconds for programs to compare, ISO 8601 for people to read. A view is made
afresh for each request from one read of the records; the summary of 1,000 jobs takes about 20 ms.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, TypedDict

from myriad.cluster.state import NodeState
from myriad.control.records import (
    AllocationRecord,
    ClusterRecord,
    GenerationRecord,
    JobRecord,
    MemberRecord,
    NodeRecord,
    SpecRecord,
)
from myriad.control.status import JobStatus
from myriad.runtime.store import StateReader
from myriad.server.copies import copies, saves
from myriad.server.sentences import iso
from myriad.spec.cluster import ClusterSpec, NodeType
from myriad.spec.messages import StepReport


class Progress(TypedDict):
    """The newest finished step. ``loss`` and ``tokens_per_s`` come from the rank that reports them."""

    step: int
    steps: int | None
    loss: float | None
    tokens_per_s: float | None


class MemberView(TypedDict):
    """One node's part in a job: the state its agent reports, empty when it has none; ``pids`` by rank."""

    node: str
    node_rank: int
    state: str
    step: int
    pids: dict[str, int]


class GenerationView(TypedDict):
    """One start of the job's workers."""

    generation: int
    nodes: list[str]
    begun: str
    start_s: float | None  # from the grant or the verdict to the first finished step
    restore_step: int | None
    tiers: dict[str, int]  # ranks by the tier they restored from
    cause: str
    culprit_node: str | None
    culprit_rank: int | None
    replacement: dict[str, str]


class JobSummary(TypedDict):
    """One line of ``ps``."""

    id: str
    name: str
    status: str
    reason: str
    detail: str
    generation: int
    restarts: int
    nodes: list[str]  # in rank order; empty while pending
    nodes_wanted: int
    spares_wanted: int
    durable_step: int | None
    progress: Progress
    submitted: str
    changed: str
    ended: str | None
    waited_s: float
    run_s: float | None
    exit_code: int | None


class JobView(JobSummary):
    """Everything ``show`` prints."""

    stage: str
    world_size: int
    members: list[MemberView]
    spares: list[str]
    lost: list[str]
    alerts: list[str]  # what goes wrong while the job goes on
    saves: dict[str, str]  # by tier: how often and why; empty before the job has nodes
    copies: str  # where the nodes keep copies of each other's snapshots, or why they do not
    time_limit: str | None
    failure: dict[str, Any] | None
    generations: list[GenerationView]
    spec: dict[str, Any]


class HardwareView(TypedDict):
    """What the cluster file says a node has; ``nics`` are bytes per second by rail."""

    accelerator: str
    cpus: int
    memory_bytes: int
    nvme_bytes: int
    nics: dict[int, float]


class NodeView(TypedDict):
    """One node. ``silent_s`` is None when the controller could not be asked."""

    name: str
    type: str
    accelerators: int
    leaf: str
    rack: str
    power_feed: str
    state: str
    job: str | None
    connected: bool
    expected: bool  # its agent is there or has been asked for
    suspect: bool
    reason: str
    since: str
    state_s: float
    silent_s: float | None
    hardware: HardwareView


class ClusterView(TypedDict):
    """The cluster in numbers."""

    name: str
    nodes: int
    accelerators: int
    nodes_by_state: dict[str, int]
    accelerators_busy: int
    jobs_by_status: dict[str, int]
    closing: bool
    controller: bool  # whether it answers


@dataclass(frozen=True, slots=True)
class Moment:
    """A reader and the time to count durations to."""

    reader: StateReader
    now_s: float


def job_summaries(at: Moment, with_ended: bool) -> list[JobSummary]:
    """All jobs, or those that have not ended, oldest first."""
    jobs = sorted(at.reader.records(JobRecord).values(), key=number_of)
    return [job_summary(at, job) for job in jobs if with_ended or not job.status.final]


def number_of(job: JobRecord) -> int:
    """The 12 of ``j12``."""
    return int(job.id[1:])


def job_summary(at: Moment, job: JobRecord) -> JobSummary:
    spec = _spec(at, job.id)
    allocation = _newest_allocation(at, job.id)
    held = allocation.nodes if allocation and job.status.allocated else ()
    begun = job.granted_s if job.granted_s is not None else (job.ended_s or at.now_s)
    return JobSummary(
        id=job.id,
        name=job.name,
        status=job.status.value,
        reason=job.reason.value,
        detail=job.detail,
        generation=job.generation,
        restarts=job.restarts,
        nodes=list(held),
        nodes_wanted=int(spec["nodes"]),
        spares_wanted=int(spec.get("spares", 0)),
        durable_step=job.durable_step,
        progress=progress(at, job, spec),
        submitted=iso(job.submitted_s),
        changed=iso(job.changed_s),
        ended=None if job.ended_s is None else iso(job.ended_s),
        waited_s=max(0.0, begun - job.submitted_s),
        run_s=None if job.granted_s is None else max(0.0, (job.ended_s or at.now_s) - job.granted_s),
        exit_code=job.exit_code,
    )


def job_view(at: Moment, job: JobRecord) -> JobView:
    allocation = _newest_allocation(at, job.id)
    failure = job.failure
    return JobView(
        **job_summary(at, job),
        stage=job.stage,
        world_size=job.world_size,
        members=_members(at, job, allocation),
        spares=list(allocation.spares) if allocation else [],
        lost=list(allocation.lost) if allocation else [],
        alerts=_alerts(at, job, allocation),
        saves=saves(at.reader, job.id),
        copies=copies(at.reader, allocation),
        time_limit=None if job.time_limit_s is None else iso(job.time_limit_s),
        failure=None
        if failure is None
        else {
            "error_class": failure.error_class,
            "step": failure.step,
            "count": failure.count,
            "nodes": list(failure.nodes),
        },
        generations=[_generation(record) for record in generations(at.reader, job)],
        spec=_spec(at, job.id),
    )


def generations(reader: StateReader, job: JobRecord) -> list[GenerationRecord]:
    """A job's generations, oldest first."""
    found = (find_generation(reader, job.id, number) for number in range(1, job.generation + 1))
    return [record for record in found if record is not None]


def find_generation(reader: StateReader, job: str, generation: int) -> GenerationRecord | None:
    return reader.record(GenerationRecord, f"{job}/{generation:06d}")


def progress(at: Moment, job: JobRecord, spec: dict[str, Any]) -> Progress:
    """From the newest step reports; a job without any has the step the controller knows of."""
    newest = newest_reports(at.reader, job.id)
    step = max([job.best_step, *(report.step for report in newest)])
    with_loss = [report for report in newest if report.loss is not None]
    with_tokens = [report for report in newest if report.tokens and report.wall_s > 0]
    optimizer = spec.get("optimizer") or {}
    return Progress(
        step=step,
        steps=optimizer.get("steps"),
        loss=with_loss[-1].loss if with_loss else None,
        tokens_per_s=with_tokens[-1].tokens / with_tokens[-1].wall_s if with_tokens else None,
    )


def newest_reports(reader: StateReader, job: str) -> list[StepReport]:
    """Of the newest step, and of the one before it while the rank that holds the loss has not reported yet."""
    newest = reader.last_reports(job)
    if not newest or any(report.loss is not None for report in newest):
        return newest
    since = reader.step_reports(job, after_step=newest[0].step - 2)
    return [report for report in since if report.generation == newest[0].generation]


def node_views(at: Moment, silent_s: dict[str, float]) -> list[NodeView]:
    """All nodes, in the order of the cluster file. ``silent_s`` by node, from the controller."""
    types = _node_types(at)
    return [
        NodeView(
            name=node.name,
            type=node.type,
            accelerators=node.accelerators,
            leaf=node.leaf,
            rack=node.rack,
            power_feed=node.power_feed,
            state=node.state.value,
            job=node.job,
            connected=node.connected,
            expected=node.expected,
            suspect=node.suspect,
            reason=node.reason,
            since=iso(node.since_s),
            state_s=max(0.0, at.now_s - node.since_s),
            silent_s=silent_s.get(node.name),
            hardware=_hardware(types[node.type]),
        )
        for node in at.reader.records(NodeRecord).values()
    ]


def _node_types(at: Moment) -> dict[str, NodeType]:
    cluster = at.reader.record(ClusterRecord, "cluster")
    return {} if cluster is None else ClusterSpec.model_validate(cluster.spec).node_types


def _hardware(kind: NodeType) -> HardwareView:
    return HardwareView(
        accelerator=kind.accelerator,
        cpus=kind.cpus,
        memory_bytes=kind.memory,
        nvme_bytes=kind.nvme,
        nics={nic.rail: nic.bandwidth for nic in kind.nics},
    )


def cluster_view(at: Moment, controller: bool) -> ClusterView:
    cluster = at.reader.record(ClusterRecord, "cluster")
    nodes = list(at.reader.records(NodeRecord).values())
    jobs = at.reader.records(JobRecord).values()
    busy = (NodeState.BUSY, NodeState.SPARE, NodeState.DRAINING)
    statuses = Counter(job.status for job in jobs)
    states = Counter(node.state for node in nodes)
    return ClusterView(
        name="" if cluster is None else str(cluster.spec["name"]),
        nodes=len(nodes),
        accelerators=sum(node.accelerators for node in nodes),
        nodes_by_state={state.value: states[state] for state in NodeState if states[state]},
        accelerators_busy=sum(node.accelerators for node in nodes if node.state in busy),
        jobs_by_status={status.value: statuses[status] for status in JobStatus if statuses[status]},
        closing=cluster is not None and cluster.closing,
        controller=controller,
    )


def _spec(at: Moment, job: str) -> dict[str, Any]:
    record = at.reader.record(SpecRecord, job)
    assert record is not None, f"{job} has no specification"
    return record.spec


def allocations(reader: StateReader, job: str) -> list[AllocationRecord]:
    """A job's allocations, oldest first."""
    found: list[AllocationRecord] = []
    while (record := reader.record(AllocationRecord, f"{job}/{len(found) + 1}")) is not None:
        found.append(record)
    return found


def _newest_allocation(at: Moment, job: str) -> AllocationRecord | None:
    return next(reversed(allocations(at.reader, job)), None)


def _alerts(at: Moment, job: JobRecord, allocation: AllocationRecord | None) -> list[str]:
    """Checkpoints that were not written since the last one that was; all ranks of a job fail alike."""
    found: list[str] = []
    for node in allocation.nodes if allocation and job.status.allocated else ():
        member = at.reader.record(MemberRecord, f"{job.id}/{node}")
        if member is not None and member.status is not None and member.status.save_error not in ("", *found):
            found.append(member.status.save_error)
    return found


def _members(at: Moment, job: JobRecord, allocation: AllocationRecord | None) -> list[MemberView]:
    views = []
    for node_rank, node in enumerate(allocation.nodes if allocation else ()):
        member = at.reader.record(MemberRecord, f"{job.id}/{node}")
        status = member.status if member is not None else None
        if status is None or status.generation != job.generation:
            views.append(MemberView(node=node, node_rank=node_rank, state="", step=0, pids={}))
            continue
        pids = sorted(status.pids.items()) if status.state == "started" else []
        views.append(
            MemberView(
                node=node,
                node_rank=node_rank,
                state=status.state,
                step=status.step,
                pids={str(rank): pid for rank, pid in pids},
            )
        )
    return views


def _generation(record: GenerationRecord) -> GenerationView:
    first = record.first_step_s
    return GenerationView(
        generation=record.generation,
        nodes=list(record.nodes),
        begun=iso(record.begun_s),
        start_s=None if first is None else first - record.begun_s,
        restore_step=record.restore_step,
        tiers=dict(Counter(record.tiers)),
        cause=record.cause,
        culprit_node=record.culprit_node or None,
        culprit_rank=record.culprit_rank,
        replacement=dict(record.replacement),
    )
