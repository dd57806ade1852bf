"""What is said of how often a job saves, and of the copies that its nodes keep of each other's snapshots."""

from __future__ import annotations

from myriad.control.copies import copy_plan, cover
from myriad.control.records import (
    AllocationRecord,
    ClusterRecord,
    IntervalRecord,
    MemberRecord,
    NodeRecord,
    SpecRecord,
)
from myriad.planner.intervals import Choice
from myriad.runtime.store import StateReader
from myriad.spec.cluster import ClusterSpec
from myriad.spec.job import JobSpec


def copies(reader: StateReader, allocation: AllocationRecord | None) -> str:
    """Which losses they cover, or why there are none; empty before the job has nodes."""
    cluster = reader.record(ClusterRecord, "cluster")
    if allocation is None or cluster is None:
        return ""
    spec, job = ClusterSpec.model_validate(cluster.spec), _job(reader, allocation.job)
    nodes = allocation.nodes
    first = reader.record(NodeRecord, nodes[0])
    assert first is not None
    node_type = spec.node_types[first.type]
    per_node = job.workers_per_node_on(node_type)
    leaf_of = {node.name: node.leaf for node in spec.nodes}
    plan = copy_plan(job, node_type, nodes, leaf_of, per_node)
    if plan.off:
        return f"off: {plan.off}"
    found = cover(plan.holders, nodes, leaf_of, job.layout, per_node)
    text = (
        f"of {found.nodes} nodes {found.other_leaf} have theirs in another leaf, {found.other_group} of them "
        "outside their groups"
    )
    for node in nodes:
        member = reader.record(MemberRecord, f"{allocation.job}/{node}")
        if member is not None and member.status is not None and member.status.copy_error:
            text += f"; the last of {node} was not made: {member.status.copy_error}"
    return text


def saves(reader: StateReader, job: str) -> dict[str, str]:
    """By tier: how often, and why. Empty before the job has nodes, and for one that does not step."""
    record = reader.record(IntervalRecord, job)
    if record is None or record.intervals is None:
        return {}
    if record.costs is None and not _job(reader, job).uses_torch:
        return {}
    choice = Choice(record.intervals, record.why)
    return dict(choice.sentences())


def _job(reader: StateReader, job: str) -> JobSpec:
    record = reader.record(SpecRecord, job)
    assert record is not None, f"{job} has no specification"
    return JobSpec.model_validate(record.spec)
