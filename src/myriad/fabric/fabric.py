"""The interconnect as a value: which level joins two nodes, how far apart they are, how fast the link is.

Method: two switch levels. Two workers share a node, or their nodes share a leaf switch, or their traffic
crosses the core. Each level has one link (bandwidth of one accelerator there, latency of one message). Trade-off: no rails, no oversubscription inside a level, no contention between jobs; levels are
looked up, so an answer costs under 1 us at any size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

from myriad.spec.cluster import ClusterSpec


class Level(StrEnum):
    """The lowest level that joins two nodes, nearest first."""

    NODE = "node"
    LEAF = "leaf"
    CORE = "core"


_HOPS = {Level.NODE: 0, Level.LEAF: 1, Level.CORE: 2}


@dataclass(frozen=True, slots=True)
class Link:
    """One accelerator's path at a level: bytes per second each way, seconds one way for an empty message."""

    bandwidth_bytes_per_s: float
    latency_s: float


@dataclass(frozen=True, slots=True)
class Fabric:
    """Which leaf each node hangs on, and the link of each level."""

    cluster: str
    leaf_of: Mapping[str, str]
    links: Mapping[Level, Link]

    @staticmethod
    def from_spec(spec: ClusterSpec) -> Fabric:
        """The fabric a cluster file describes."""
        levels = {Level.NODE: spec.fabric.node, Level.LEAF: spec.fabric.leaf, Level.CORE: spec.fabric.core}
        return Fabric(
            cluster=spec.name,
            leaf_of=MappingProxyType({node.name: node.leaf for node in spec.nodes}),
            links=MappingProxyType(
                {level: Link(float(link.bandwidth), float(link.latency)) for level, link in levels.items()}
            ),
        )

    def level(self, a: str, b: str) -> Level:
        """The lowest level that joins nodes ``a`` and ``b``. KeyError for a node the fabric does not have."""
        leaf_a, leaf_b = self.leaf_of[a], self.leaf_of[b]
        if a == b:
            return Level.NODE
        return Level.LEAF if leaf_a == leaf_b else Level.CORE

    def distance(self, a: str, b: str) -> int:
        """Levels to climb from ``a`` to ``b``: 0 the same node, 1 the same leaf, 2 across the core."""
        return _HOPS[self.level(a, b)]

    def link(self, a: str, b: str) -> Link:
        """The link that traffic between two nodes takes at its highest level."""
        return self.links[self.level(a, b)]
