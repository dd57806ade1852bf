"""Which node keeps the copies of which node's snapshots.

Every node of a job gives its copies to one other and keeps those of one other, so nobody carries more than one
node's worth. A lost rack or switch must not take a snapshot and its copy: another leaf comes first. Next comes a node
with which none of its ranks shares a pipeline, tensor or shard group, since a verdict may condemn a whole group.

Method: the nodes in order of their leaf, each giving to the one ``shift`` places on; with a shift of at least the
largest leaf, and no leaf with more than half of the nodes, every copy is in another leaf. A few shifts are tried and the
best taken; then nodes trade holders where that helps. Trade-off: not every assignment is looked at.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from myriad.planner.memory import copies_refusal
from myriad.spec.cluster import NodeType
from myriad.spec.job import JobSpec, LayoutSpec

Place = tuple[int, int, int, int]  # pp, dp_replicate, dp_shard, tp

SHIFTS_TRIED = 16
TRADES_TRIED = 32


@dataclass(frozen=True, slots=True)
class Cover:
    """Of ``nodes`` nodes, how many have their copy in another leaf, and how many of those outside their groups."""

    nodes: int
    other_leaf: int
    other_group: int


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """``holders``: node -> the node that keeps its copies; ``off`` says why there are none."""

    holders: Mapping[str, str]
    off: str = ""


def copy_plan(
    job: JobSpec,
    node_type: NodeType,
    nodes: Sequence[str],
    leaf_of: Mapping[str, str],
    ranks_per_node: int,
) -> CopyPlan:
    """Whether and where the snapshots of a job on ``nodes`` are copied."""
    if not job.checkpoint.peer_every_steps:
        return CopyPlan({}, "checkpoint.peer_every_steps is 0")
    if len(nodes) < 2:
        return CopyPlan({}, "the job has one node")
    refused = copies_refusal(job, node_type, ranks_per_node)
    if refused is not None:
        return CopyPlan({}, refused)
    return CopyPlan(holders(nodes, leaf_of, job.layout, ranks_per_node))


def holders(
    nodes: Sequence[str], leaf_of: Mapping[str, str], layout: LayoutSpec, ranks_per_node: int
) -> Mapping[str, str]:
    """Node -> the node that keeps its copies. Empty for a job of one node."""
    axes = layout.pp, layout.dp_replicate, layout.dp_shard, layout.tp
    return _holders(tuple(nodes), tuple(leaf_of[node] for node in nodes), axes, ranks_per_node)


@functools.lru_cache(maxsize=64)  # every node's start asks for the same one
def _holders(
    nodes: tuple[str, ...], leaves: tuple[str, ...], axes: Place, per_node: int
) -> Mapping[str, str]:
    count = len(nodes)
    if count < 2:
        return {}
    order = sorted(range(count), key=lambda index: (leaves[index], index))
    first = min(max(Counter(leaves).values()), count - 1)
    shifts = {1, count // 2, *range(first, min(first + SHIFTS_TRIED, count))}
    places = [_places(index, axes, per_node) for index in range(count)]

    def worth(shift: int) -> tuple[int, int, int]:
        apart = [(a, b) for a, b in _pairs(order, shift) if leaves[a] != leaves[b]]
        return len(apart), sum(not _share_group(places[a], places[b]) for a, b in apart), -shift

    best = dict(_pairs(order, max(shifts, key=worth)))
    _trade(best, leaves, places)
    return MappingProxyType({nodes[a]: nodes[b] for a, b in best.items()})


def cover(
    held_by: Mapping[str, str],
    nodes: Sequence[str],
    leaf_of: Mapping[str, str],
    layout: LayoutSpec,
    ranks_per_node: int,
) -> Cover:
    """What losses :func:`holders` covers."""
    index = {node: number for number, node in enumerate(nodes)}
    apart = [(a, b) for a, b in held_by.items() if leaf_of[a] != leaf_of[b]]
    axes = layout.pp, layout.dp_replicate, layout.dp_shard, layout.tp
    places = [_places(number, axes, ranks_per_node) for number in range(len(nodes))]
    outside = sum(not _share_group(places[index[a]], places[index[b]]) for a, b in apart)
    return Cover(len(held_by), len(apart), outside)


def _trade(held_by: dict[int, int], leaves: Sequence[str], places: Sequence[Sequence[Place]]) -> None:
    """Let nodes trade holders while that brings a copy out of its owner's groups and spoils nothing."""

    def rank(giver: int, holder: int) -> int:
        if giver == holder:
            return -1
        return 2 * (leaves[giver] != leaves[holder]) + (not _share_group(places[giver], places[holder]))

    count = len(leaves)
    for giver in range(count):
        if rank(giver, held_by[giver]) == 3:
            continue
        for step in range(1, min(TRADES_TRIED, count)):
            other = (giver + step) % count
            old = sorted((rank(giver, held_by[giver]), rank(other, held_by[other])))
            new = sorted((rank(giver, held_by[other]), rank(other, held_by[giver])))
            if new > old:
                held_by[giver], held_by[other] = held_by[other], held_by[giver]
                break


def _pairs(order: Sequence[int], shift: int) -> list[tuple[int, int]]:
    return [(giver, order[(place + shift) % len(order)]) for place, giver in enumerate(order)]


def _places(index: int, axes: Place, ranks_per_node: int) -> list[Place]:
    """Where the ranks of a node are in the mesh of size ``axes``; pp varies slowest, tp fastest."""
    _, replicas, shards, tps = axes
    found = []
    for rank in range(index * ranks_per_node, (index + 1) * ranks_per_node):
        rest, tp = divmod(rank, tps)
        rest, shard = divmod(rest, shards)
        pp, replica = divmod(rest, replicas)
        found.append((pp, replica, shard, tp))
    return found


def _share_group(one: Sequence[Place], other: Sequence[Place]) -> bool:
    """Some rank of each are in one pipeline, tensor or shard group: their places differ in that axis only."""
    for drop in (0, 2, 3):
        rest = {place[:drop] + place[drop + 1 :] for place in one}
        if any(place[:drop] + place[drop + 1 :] in rest for place in other):
            return True
    return False
