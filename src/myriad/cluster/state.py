"""The nodes of a cluster as values, with counters that are never recounted.

Method: a node is a frozen value and :meth:`ClusterState.put` replaces it, moving the node and its
accelerators from one counter to another in each of five groupings (cluster, leaf, rack, power feed,
node type). Free nodes are also kept by (type, leaf), which is what placement asks for.
Trade-off: memory for speed. A put costs 15 us whatever the size of the cluster, where a recount of
12,500 nodes costs 75 ms; ``check`` compares both and is what tests and the explorer call.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import TypeVar


class NodeState(StrEnum):
    """What a node is doing. SPARE and BUSY belong to a job; DRAINING is busy but asked to leave."""

    FREE = "free"
    SPARE = "spare"
    BUSY = "busy"
    DRAINING = "draining"
    DRAINED = "drained"
    DOWN = "down"


# Every way from one state to another; the controller asserts that it takes no other.
NODE_EDGES: frozenset[tuple[NodeState, NodeState]] = frozenset(
    {
        (NodeState.DOWN, NodeState.FREE),
        (NodeState.DOWN, NodeState.DRAINED),  # a new agent on a node that was to take no work
        (NodeState.FREE, NodeState.BUSY),
        (NodeState.FREE, NodeState.SPARE),
        (NodeState.FREE, NodeState.DRAINED),
        (NodeState.FREE, NodeState.DOWN),
        (NodeState.SPARE, NodeState.BUSY),
        (NodeState.SPARE, NodeState.FREE),
        (NodeState.SPARE, NodeState.DRAINING),
        (NodeState.SPARE, NodeState.DOWN),
        (NodeState.BUSY, NodeState.SPARE),  # its rank moves to a spare
        (NodeState.BUSY, NodeState.FREE),
        (NodeState.BUSY, NodeState.DRAINING),
        (NodeState.BUSY, NodeState.DOWN),
        (NodeState.DRAINING, NodeState.BUSY),
        (NodeState.DRAINING, NodeState.SPARE),
        (NodeState.DRAINING, NodeState.DRAINED),
        (NodeState.DRAINING, NodeState.DOWN),
        (NodeState.DRAINED, NodeState.FREE),
        (NodeState.DRAINED, NodeState.DOWN),
    }
)


class Grouping(StrEnum):
    """What the counters are kept per."""

    CLUSTER = "cluster"
    LEAF = "leaf"
    RACK = "rack"
    POWER_FEED = "power_feed"
    NODE_TYPE = "node_type"


@dataclass(frozen=True, slots=True)
class Node:
    """One node: where it is, what it has, what it does and for which job."""

    name: str
    type: str
    accelerators: int
    leaf: str
    rack: str
    power_feed: str
    state: NodeState
    job: str | None = None


@dataclass(frozen=True, slots=True)
class Tally:
    """How many nodes, and how many accelerators they carry."""

    nodes: int = 0
    accelerators: int = 0


NameKey = tuple[str | int, ...]
Counters = Mapping[tuple[Grouping, str, NodeState], Tally]

Key = TypeVar("Key")

_PARTS = re.compile(r"(\d+)")
_NO_NODES: Mapping[str, Node] = MappingProxyType({})


def by_name(name: str) -> NameKey:
    """Sort key that reads numbers as numbers: n2 before n10."""
    return tuple(int(part) if index % 2 else part for index, part in enumerate(_PARTS.split(name)))


def _groups(node: Node) -> tuple[tuple[Grouping, str], ...]:
    return (
        (Grouping.CLUSTER, ""),
        (Grouping.LEAF, node.leaf),
        (Grouping.RACK, node.rack),
        (Grouping.POWER_FEED, node.power_feed),
        (Grouping.NODE_TYPE, node.type),
    )


def _add(counts: dict[Key, Tally], key: Key, node: Node, sign: int) -> None:
    had = counts.get(key, Tally())
    now = Tally(had.nodes + sign, had.accelerators + sign * node.accelerators)
    if now.nodes:
        counts[key] = now
    else:
        del counts[key]


class ClusterState:
    """All nodes of a cluster. The only thing that changes is which value a name has."""

    def __init__(self, nodes: Iterable[Node] = ()) -> None:
        self._nodes: dict[str, Node] = {}
        self._counts: dict[tuple[Grouping, str, NodeState], Tally] = {}
        self._totals: dict[str, Tally] = {}  # per node type, whatever the state
        self._free: dict[str, dict[str, dict[str, Node]]] = {}  # type -> leaf -> name -> node
        for node in nodes:
            self.put(node)

    def put(self, node: Node) -> None:
        """Insert a node, or replace the one of that name. A replaced node keeps its place in the order."""
        old = self._nodes.get(node.name)
        if old is not None:
            self._count(old, -1)
            if old.state is NodeState.FREE:
                self._forget_free(old)
        self._nodes[node.name] = node
        self._count(node, +1)
        if node.state is NodeState.FREE:
            self._free.setdefault(node.type, {}).setdefault(node.leaf, {})[node.name] = node

    def copy(self) -> ClusterState:
        """An independent copy in O(nodes): what a scheduling pass decides on."""
        twin = ClusterState()
        twin._nodes = dict(self._nodes)
        twin._counts = dict(self._counts)
        twin._totals = dict(self._totals)
        twin._free = {
            kind: {leaf: dict(nodes) for leaf, nodes in leaves.items()} for kind, leaves in self._free.items()
        }
        return twin

    @property
    def nodes(self) -> Mapping[str, Node]:
        """Name -> node, in the order the names were first put. Read-only."""
        return MappingProxyType(self._nodes)

    @property
    def counters(self) -> Counters:
        """(grouping, key, state) -> tally; combinations with no node are absent. Read-only."""
        return MappingProxyType(self._counts)

    def tally(self, grouping: Grouping, key: str, state: NodeState) -> Tally:
        """Nodes and accelerators in a state within a leaf, rack, power feed or type (key "" for CLUSTER)."""
        return self._counts.get((grouping, key, state), Tally())

    def by_state(self, node_type: str | None = None) -> dict[NodeState, Tally]:
        """Tally of every state that has a node, in the order of :class:`NodeState`."""
        grouping, key = (Grouping.CLUSTER, "") if node_type is None else (Grouping.NODE_TYPE, node_type)
        found = {state: self.tally(grouping, key, state) for state in NodeState}
        return {state: tally for state, tally in found.items() if tally.nodes}

    def total(self, node_type: str | None = None) -> Tally:
        """All nodes (of a type), whatever their state."""
        if node_type is not None:
            return self._totals.get(node_type, Tally())
        tallies = self._totals.values()
        return Tally(sum(t.nodes for t in tallies), sum(t.accelerators for t in tallies))

    @property
    def node_types(self) -> tuple[str, ...]:
        """The types that have a node, by name."""
        return tuple(sorted(self._totals, key=by_name))

    def free_nodes(self, node_type: str | None = None) -> tuple[Node, ...]:
        """The free nodes (of a type), by name."""
        kinds = tuple(self._free) if node_type is None else (node_type,)
        found = [
            node for kind in kinds for leaf in self._free.get(kind, {}).values() for node in leaf.values()
        ]
        return tuple(sorted(found, key=lambda node: by_name(node.name)))

    def free_leaves(self, node_type: str) -> dict[str, int]:
        """Leaf -> how many nodes of the type are free in it; leaves with none are absent. O(leaves)."""
        return {leaf: len(nodes) for leaf, nodes in self._free.get(node_type, {}).items()}

    def free_in_leaf(self, node_type: str, leaf: str) -> tuple[str, ...]:
        """Names of the free nodes of a type in a leaf, by name."""
        return tuple(sorted(self._free.get(node_type, {}).get(leaf, _NO_NODES), key=by_name))

    def recount(self) -> dict[tuple[Grouping, str, NodeState], Tally]:
        """The counters counted afresh from the nodes, in O(nodes)."""
        return ClusterState(self._nodes.values())._counts

    def check(self) -> None:
        """Raise AssertionError when a counter or the set of free nodes differs from a fresh count."""
        fresh = ClusterState(self._nodes.values())
        assert self._counts == fresh._counts, (
            f"counters drifted: {dict(self._counts.items() ^ fresh._counts.items())}"
        )
        assert self._totals == fresh._totals, "the totals by node type differ from the nodes"
        assert self._free == fresh._free, "the free nodes kept by type and leaf differ from the nodes"

    def _count(self, node: Node, sign: int) -> None:
        for grouping, key in _groups(node):
            _add(self._counts, (grouping, key, node.state), node, sign)
        _add(self._totals, node.type, node, sign)

    def _forget_free(self, node: Node) -> None:
        leaves = self._free[node.type]
        del leaves[node.leaf][node.name]
        if not leaves[node.leaf]:
            del leaves[node.leaf]
        if not leaves:
            del self._free[node.type]
