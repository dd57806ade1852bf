"""What can be refused at submission, because job and cluster together say it can never run as written.

A job that wants more nodes than there are is *not* refused: nodes come and go, so it is accepted and waits,
with the deficit as its reason. Refused is what no number of nodes would mend: a node type that the cluster
does not have, or a layout whose degrees do not multiply to the workers it was given.
"""

from __future__ import annotations

from myriad.spec.cluster import ClusterSpec
from myriad.spec.errors import SpecError
from myriad.spec.job import JobSpec
from myriad.spec.units import format_bytes


def check(job: JobSpec, cluster: ClusterSpec) -> None:
    """SpecError with one sentence when the job can never run on the cluster as written."""
    if not fitting_types(job, cluster):
        # With several types, each misfits in the same way; the first explains it.
        raise SpecError(str(_misfit(job, cluster, candidates(job, cluster)[0])))


def candidates(job: JobSpec, cluster: ClusterSpec) -> list[str]:
    """Names of the node types the job may run on, in the cluster's order: the one it names, or all."""
    if job.node_type is None:
        return list(cluster.node_types)
    if job.node_type not in cluster.node_types:
        raise SpecError(f'job "{job.name}" asks for the unknown {cluster.unknown_type(job.node_type)}')
    return [job.node_type]


def fitting_types(job: JobSpec, cluster: ClusterSpec) -> list[str]:
    """The candidates on which the job's layout covers exactly its workers; a command fits every candidate."""
    return [name for name in candidates(job, cluster) if _misfit(job, cluster, name) is None]


def _misfit(job: JobSpec, cluster: ClusterSpec, type_name: str) -> str | None:
    """Why a model job cannot run on nodes of that type; None when it can, or for a command."""
    if job.model is None:
        return None
    node_type = cluster.node_types[type_name]
    workers = job.workers_per_node_on(node_type)
    if workers > node_type.accelerators:
        return (
            f'job "{job.name}" wants {workers} workers on a node, but node type "{type_name}" has '
            f"{node_type.accelerators} accelerators and a model's worker needs one; lower workers_per_node"
        )
    if job.layout.world != job.nodes * workers:
        return (
            f'job "{job.name}" has the layout {job.layout} = {job.layout.world} ranks, but {job.nodes} nodes '
            f'x {workers} workers (node type "{type_name}") are {job.nodes * workers}; change the '
            f"layout or nodes"
        )
    cache = None if job.data is None else job.data.cache
    if cache is not None and 0 < node_type.nvme < cache.size:
        return (
            f'job "{job.name}" wants a cache of {format_bytes(cache.size)}, but a node of type "{type_name}" has '
            f"{format_bytes(node_type.nvme)} of NVMe; lower data.cache.size"
        )
    return None
