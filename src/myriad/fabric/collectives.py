"""How long a collective takes on a set of nodes: ring algorithms under the alpha-beta model.

Method (reference planner.md 4.6): n members pass V bytes around a ring in n-1 steps, each step gated by
the slowest link of the ring: time = steps * alpha + share of V / B. ``members`` names the node of each
member in rank order, so a node that holds two members appears twice. Trade-off: no trees and no
hierarchy, so small messages over hundreds of nodes come out too slow, never too fast; a link's bandwidth
is one accelerator's, so rings of different accelerators do not slow each other.
"""

from __future__ import annotations

from collections.abc import Sequence

from myriad.fabric.fabric import Fabric, Level, Link


def bottleneck(fabric: Fabric, members: Sequence[str]) -> Level:
    """The level of the slowest link on the ring over ``members`` (at least one), at equal speed the higher."""
    assert members, "a collective needs a member"
    order = list(Level)
    levels = {fabric.level(a, b) for a, b in zip(members, [*members[1:], members[0]], strict=True)}
    return min(levels, key=lambda level: (fabric.links[level].bandwidth_bytes_per_s, -order.index(level)))


def _ring(fabric: Fabric, members: Sequence[str]) -> Link:
    """The link that gates every step of the ring: its smallest bandwidth and its largest latency."""
    pairs = zip(members, [*members[1:], members[0]], strict=True)
    links = [fabric.link(a, b) for a, b in pairs]
    return Link(min(link.bandwidth_bytes_per_s for link in links), max(link.latency_s for link in links))


def all_gather_s(fabric: Fabric, members: Sequence[str], size_bytes: float) -> float:
    """Seconds until every member holds all ``size_bytes``, of which it held 1/n: (n-1)/n * V/B + (n-1) alpha."""
    n = len(members)
    if n <= 1:
        return 0.0
    link = _ring(fabric, members)
    return (n - 1) / n * size_bytes / link.bandwidth_bytes_per_s + (n - 1) * link.latency_s


def reduce_scatter_s(fabric: Fabric, members: Sequence[str], size_bytes: float) -> float:
    """Seconds until each member holds 1/n of the sum of everyone's ``size_bytes``; the cost of an all-gather."""
    return all_gather_s(fabric, members, size_bytes)


def all_reduce_s(fabric: Fabric, members: Sequence[str], size_bytes: float) -> float:
    """Seconds until everyone holds the sum of ``size_bytes``: reduce-scatter, then all-gather."""
    scatter_s = reduce_scatter_s(fabric, members, size_bytes)
    return scatter_s + all_gather_s(fabric, members, size_bytes)


def all_to_all_s(fabric: Fabric, members: Sequence[str], size_bytes: float) -> float:
    """Seconds for each member to send 1/n of its ``size_bytes`` to every other: (n-1)/n * V/B + (n-1) alpha.

    Unlike in a ring every pair talks, so the slowest *pair* gates it, not the slowest neighbour.
    """
    n = len(members)
    if n <= 1:
        return 0.0
    links = [fabric.link(a, b) for a, b in _distinct_pairs(members)]
    bandwidth = min(link.bandwidth_bytes_per_s for link in links)
    return (n - 1) / n * size_bytes / bandwidth + (n - 1) * max(link.latency_s for link in links)


def point_to_point_s(fabric: Fabric, source: str, target: str, size_bytes: float) -> float:
    """Seconds to move ``size_bytes`` from a worker on one node to another worker: alpha + V/B."""
    link = fabric.link(source, target)
    return link.latency_s + size_bytes / link.bandwidth_bytes_per_s


def _distinct_pairs(members: Sequence[str]) -> list[tuple[str, str]]:
    """Pairs of nodes that exchange data, one per unordered pair of names; a repeated name pairs with itself."""
    names = sorted(set(members))
    pairs = [(a, b) for i, a in enumerate(names) for b in names[i + 1 :]]
    return pairs + [(a, a) for a in names if members.count(a) > 1]
