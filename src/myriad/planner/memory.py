"""How much memory a rank needs, and what its share of the node is.

Method: model arithmetic for the state and the activations of the hungriest stage, plus the agent's
snapshots of the state and the process itself. Where accelerators are CPU cores everything shares the
node's memory; elsewhere only snapshots and processes do, since a node type does not state an accelerator's
memory. Trade-off: no allocator fragmentation and no communication buffers, so a plan that fits by a few
percent may still fail.
"""

from __future__ import annotations

from dataclasses import dataclass

from myriad.planner.subject import Subject
from myriad.spec.arithmetic import RankBytes, rank_bytes
from myriad.spec.cluster import NodeType
from myriad.spec.job import JobSpec
from myriad.spec.units import format_bytes

# Snapshots of each rank in memory: two versions, the one of the last durable step, and the memory of the next.
SNAPSHOTS_KEPT = 4
# More of them where snapshots are copied between nodes: two more own ones, and four of a rank of another node.
COPIES_KEPT = 6
# Private memory of a forked worker before it holds a model: 70 MB measured (torch 2.13, CPU).
WORKER_BYTES = 70_000_000


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Bytes of the hungriest rank, and the bytes of host memory that are its share of the node."""

    stage: int
    model: RankBytes
    snapshots: int
    worker: int
    in_host_memory: int
    host_share: int

    @property
    def fits(self) -> bool:
        return self.in_host_memory <= self.host_share


def rank_memory(subject: Subject) -> RankMemory:
    """The memory of a rank of the stage that needs most."""
    stages = range(subject.layout.pp)
    needs = [rank_bytes(subject.model, subject.layout, subject.data, stage) for stage in stages]
    stage = max(stages, key=lambda s: (_host_bytes(needs[s], subject), -s))
    return RankMemory(
        stage=stage,
        model=needs[stage],
        snapshots=SNAPSHOTS_KEPT * snapshot_bytes(needs[stage]),
        worker=WORKER_BYTES,
        in_host_memory=_host_bytes(needs[stage], subject),
        host_share=subject.node_type.memory // subject.workers_per_node,
    )


def snapshot_bytes(need: RankBytes) -> int:
    """Bytes of one snapshot of a rank: what a restart needs, which leaves out gradients and activations."""
    return need.parameters + need.optimizer


def copies_refusal(job: JobSpec, node_type: NodeType, workers_per_node: int) -> str | None:
    """Why the nodes have no room for copies of each other's snapshots; None where they have, or it is not known."""
    if job.model is None or job.data is None:
        return None
    stages = range(job.layout.pp)
    needs = [rank_bytes(job.model, job.layout, job.data, stage) for stage in stages]
    worst = max(
        (SNAPSHOTS_KEPT + COPIES_KEPT) * snapshot_bytes(need)
        + WORKER_BYTES
        + (need.total if node_type.accelerator == "cpu" else 0)
        for need in needs
    )
    if worst * workers_per_node <= node_type.memory:
        return None
    return (
        f"a node would need {_about(worst * workers_per_node)} of memory with them and has "
        f"{format_bytes(node_type.memory)}"
    )


def refusal(memory: RankMemory, subject: Subject) -> str | None:
    """The sentence when a rank does not fit, None when it does."""
    if memory.fits:
        return None
    need = memory.model
    parts = {"snapshots": memory.snapshots, "the process": memory.worker}
    if subject.on_cpu:
        parts = {
            "parameters": need.parameters,
            "gradients": need.gradients,
            "optimizer": need.optimizer,
            "activations": need.activations,
        } | parts
    listed = ", ".join(f"{what} {_about(size)}" for what, size in parts.items())
    remedy = (
        "raise layout.microbatches or lower data.global_batch"
        if parts.get("activations", 0) > memory.in_host_memory / 2
        else "raise layout.dp_shard, tp or pp"
    )
    return (
        f"a rank of stage {memory.stage} needs {_about(memory.in_host_memory)} of memory ({listed}) but its "
        f"share of a node of type {subject.type_name} is {format_bytes(memory.host_share)} "
        f"({format_bytes(subject.node_type.memory)} over {subject.workers_per_node} workers); {remedy}"
    )


def _about(size: int) -> str:
    """Four significant digits; an estimate has no more."""
    return format_bytes(round(size, 4 - len(str(size))))


def _host_bytes(need: RankBytes, subject: Subject) -> int:
    beside = SNAPSHOTS_KEPT * snapshot_bytes(need) + WORKER_BYTES
    return beside + (need.total if subject.on_cpu else 0)
