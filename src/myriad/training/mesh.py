"""Which rank sits where: world = pp x dp_replicate x dp_shard x tp, tp innermost.

Method: one ``DeviceMesh`` over the axes longer than 1, because each axis costs process groups (about
10 ms each to connect on 8 ranks) and an axis of 1 never communicates. Neighbouring ranks share tp, the
axis that talks most; stages of the pipeline, which talk least, lie farthest apart.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from myriad.spec.job import LayoutSpec

AXES = ("pp", "dp_replicate", "dp_shard", "tp")  # outermost first


@dataclass(frozen=True)
class Mesh:
    """One rank's view of the mesh. ``device_mesh`` has the axes longer than 1 (None: one process)."""

    sizes: dict[str, int]
    coordinates: dict[str, int]
    device_mesh: DeviceMesh | None

    def size(self, axis: str) -> int:
        return self.sizes[axis]

    def coordinate(self, axis: str) -> int:
        """This rank's place along ``axis``, from 0."""
        return self.coordinates[axis]

    def sub(self, *axes: str) -> DeviceMesh:
        """The mesh of those of ``axes`` that are longer than 1, through this rank."""
        assert self.device_mesh is not None
        return self.device_mesh[tuple(axis for axis in axes if self.sizes[axis] > 1)]

    def group(self, axis: str) -> dist.ProcessGroup:
        assert self.device_mesh is not None
        return self.device_mesh.get_group(axis)

    @property
    def dp_size(self) -> int:
        """Number of ranks with different data."""
        return self.sizes["dp_replicate"] * self.sizes["dp_shard"]

    @property
    def dp_rank(self) -> int:
        return self.coordinates["dp_replicate"] * self.sizes["dp_shard"] + self.coordinates["dp_shard"]

    @property
    def first_stage(self) -> bool:
        return self.coordinates["pp"] == 0

    @property
    def last_stage(self) -> bool:
        return self.coordinates["pp"] == self.sizes["pp"] - 1

    def is_first(self, *axes: str) -> bool:
        """Whether this rank is number 0 along all of ``axes``."""
        return all(self.coordinates[axis] == 0 for axis in axes)


def axis_sizes(layout: LayoutSpec) -> dict[str, int]:
    return {axis: getattr(layout, axis) for axis in AXES}


def coordinates_of(rank: int, sizes: dict[str, int]) -> dict[str, int]:
    """Place of ``rank`` along each axis; the last axis varies fastest."""
    coordinates = {}
    for axis in reversed(AXES):
        rank, coordinates[axis] = divmod(rank, sizes[axis])
    assert rank == 0
    return coordinates


def build_mesh(layout: LayoutSpec, rank: int, device_type: str) -> Mesh:
    """Connect the process groups of every axis. Collective: all ranks of the world call it."""
    sizes = axis_sizes(layout)
    assert math.prod(sizes.values()) == dist.get_world_size(), (sizes, dist.get_world_size())
    names = tuple(axis for axis in AXES if sizes[axis] > 1)
    device_mesh = None
    if names:
        device_mesh = init_device_mesh(
            device_type, tuple(sizes[axis] for axis in names), mesh_dim_names=names
        )
    return Mesh(sizes, coordinates_of(rank, sizes), device_mesh)
