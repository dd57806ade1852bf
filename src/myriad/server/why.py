"""Why a job is where it is: its status, its reason, the controller's own sentence, and how final that is.

The sentence is the one the controller decided with; it is not made up again here. Only the tier is worked out
anew, by asking the scheduler's own placement on the nodes as they are now.
"""

from __future__ import annotations

from typing import TypedDict

from myriad.cluster.state import ClusterState
from myriad.control.records import ClusterRecord, JobRecord, NodeRecord, SpecRecord
from myriad.control.state import as_cluster_node
from myriad.control.status import JobStatus
from myriad.fabric import Fabric
from myriad.runtime.store import StateReader
from myriad.scheduler.placement import PlacementRequest, place
from myriad.scheduler.refusal import Refusal, RefusalTier
from myriad.spec.cluster import ClusterSpec
from myriad.spec.job import JobSpec

# How the tiers of a pending job are called where people read them.
TIER_TEXT: dict[RefusalTier, str] = {
    "never": "never as written",
    "limit": "blocked by a limit",
    "turn": "waiting its turn",
}


class WhyView(TypedDict):
    """``tier`` (never, limit or turn) and its text are None unless the job is pending."""

    job: str
    name: str
    status: str
    reason: str
    detail: str
    tier: RefusalTier | None
    tier_text: str | None
    sentence: str


def why(reader: StateReader, job: JobRecord) -> WhyView:
    tier = pending_tier(reader, job)
    reason = job.reason.value.replace("_", " ")
    detail = f": {job.detail}" if job.detail else ""
    final = f", {TIER_TEXT[tier]}" if tier else ""
    return WhyView(
        job=job.id,
        name=job.name,
        status=job.status.value,
        reason=job.reason.value,
        detail=job.detail,
        tier=tier,
        tier_text=TIER_TEXT[tier] if tier else None,
        sentence=f"{job.id} is {job.status} ({reason}{final}){detail}",
    )


def pending_tier(reader: StateReader, job: JobRecord) -> RefusalTier | None:
    """Whether a pending job can run as written, needs more than there is, or waits for nodes others hold."""
    record, cluster = reader.record(SpecRecord, job.id), reader.record(ClusterRecord, "cluster")
    if job.status is not JobStatus.PENDING or record is None or cluster is None:
        return None
    spec = JobSpec.model_validate(record.spec)
    nodes = ClusterState(as_cluster_node(node) for node in reader.records(NodeRecord).values())
    request = PlacementRequest(
        job=job.id,
        nodes=spec.nodes,
        spares=spec.spares if job.generation == 0 else 0,  # a job that lost its spare goes on without one
        node_type=spec.node_type,
        workers_per_node=spec.workers_per_node,
        layout=spec.layout if spec.uses_torch else None,
    )
    decision = place(request, nodes, Fabric.from_spec(ClusterSpec.model_validate(cluster.spec)))
    return decision.tier if isinstance(decision, Refusal) else "turn"
