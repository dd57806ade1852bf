"""What is planned: a model job on nodes of one type, with everything optional resolved.

The planner's other files take this one value, so that none of them asks again whether a model is there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from myriad.planner.probe import Probe
from myriad.spec import admission
from myriad.spec.cluster import ClusterSpec, NodeType
from myriad.spec.errors import SpecError
from myriad.spec.job import CheckpointSpec, DataSpec, JobSpec, LayoutSpec, ModelSpec, OptimizerSpec


@dataclass(frozen=True, slots=True)
class Subject:
    """A model job, the type of node it runs on and the nodes in rank order (none: the cluster has too few)."""

    name: str
    model: ModelSpec
    layout: LayoutSpec
    data: DataSpec
    optimizer: OptimizerSpec
    checkpoint: CheckpointSpec
    type_name: str
    node_type: NodeType
    workers_per_node: int
    node_count: int
    nodes: tuple[str, ...]
    probe: Probe

    @property
    def world(self) -> int:
        return self.layout.world

    @property
    def on_cpu(self) -> bool:
        """Whether workers compute on CPU cores, in the node's memory, and talk through gloo."""
        return self.probe.emulated or self.node_type.accelerator == "cpu"

    @property
    def microbatch_tokens(self) -> int:
        """Tokens of one microbatch of one data-parallel rank."""
        share = self.layout.dp * self.layout.microbatches
        return self.data.global_batch * self.data.sequence_length // share

    @property
    def flops_per_s(self) -> float:
        """Peak of one accelerator: the catalogue's for real ones, the measured matrix product otherwise."""
        if self.probe.emulated or self.node_type.peak_flops is None:
            return self.probe.gemm_flops_per_s
        return self.node_type.peak_flops

    def ranks(self, stage: int, axis: str) -> Iterator[tuple[str, ...]]:
        """Each group of a stage along ``axis`` (dp_replicate, dp_shard or tp), as its members' nodes."""
        layout = self.layout
        sizes = {"dp_replicate": layout.dp_replicate, "dp_shard": layout.dp_shard, "tp": layout.tp}
        strides = {"dp_replicate": layout.dp_shard * layout.tp, "dp_shard": layout.tp, "tp": 1}
        size, stride = sizes[axis], strides[axis]
        per_stage = layout.dp * layout.tp
        for first in range(stage * per_stage, (stage + 1) * per_stage):
            if first // stride % size == 0:
                yield tuple(self.node_of(first + i * stride) for i in range(size))

    def node_of(self, rank: int) -> str:
        """The node a rank runs on: nodes are filled in rank order."""
        return self.nodes[rank // self.workers_per_node]


def subject_of(
    job: JobSpec, cluster: ClusterSpec, probe: Probe, nodes: Sequence[str] | None = None
) -> Subject:
    """Resolve a job. SpecError when it has no model or can never run on the cluster as written.

    ``nodes`` is a placement in rank order; None takes nodes leaf by leaf, the largest leaf first.
    """
    if job.model is None or job.data is None or job.optimizer is None:
        raise SpecError(
            f'job "{job.name}" runs a command, and only a model can be planned; give it a model, or just submit it'
        )
    admission.check(job, cluster)
    type_name = admission.fitting_types(job, cluster)[0]
    node_type = cluster.node_types[type_name]
    chosen = tuple(nodes) if nodes is not None else _leaf_by_leaf(cluster, type_name)
    return Subject(
        name=job.name,
        model=job.model,
        layout=job.layout,
        data=job.data,
        optimizer=job.optimizer,
        checkpoint=job.checkpoint,
        type_name=type_name,
        node_type=node_type,
        workers_per_node=job.workers_per_node_on(node_type),
        node_count=job.nodes,
        nodes=chosen[: job.nodes] if len(chosen) >= job.nodes else (),
        probe=probe,
    )


def _leaf_by_leaf(cluster: ClusterSpec, type_name: str) -> tuple[str, ...]:
    nodes = [node for node in cluster.nodes if node.type == type_name]
    sizes = Counter(node.leaf for node in nodes)
    return tuple(node.name for node in sorted(nodes, key=lambda node: (-sizes[node.leaf], node.leaf)))
