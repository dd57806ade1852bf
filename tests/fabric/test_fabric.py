"""Distances between nodes, and what a collective costs on a set of them."""

from __future__ import annotations

import pytest

from myriad.fabric import Fabric, Level, Link
from myriad.fabric.collectives import (
    all_gather_s,
    all_reduce_s,
    all_to_all_s,
    bottleneck,
    point_to_point_s,
    reduce_scatter_s,
)
from myriad.spec.cluster import cluster_from_yaml

FABRIC = Fabric(
    "laptop",
    {"a0": "a", "a1": "a", "b0": "b", "b1": "b"},
    {Level.NODE: Link(100e9, 1e-6), Level.LEAF: Link(10e9, 5e-6), Level.CORE: Link(5e9, 2e-5)},
)
MIB = 2.0**20

CLUSTER = """
name: laptop
node_types:
  small: {accelerators: 2, cpus: 2, memory: 4GiB}
nodes:
  - {name: "a[0-1]", type: small, rack: r0, power_feed: p0, leaf: a}
  - {name: b0, type: small, rack: r1, power_feed: p0, leaf: b}
fabric:
  node: {bandwidth: 100GB/s, latency: 1us}
  leaf: {bandwidth: 80Gbit/s, latency: 5us}
  core: {bandwidth: 5GB/s, latency: 20us}
"""


def test_a_fabric_is_read_from_the_cluster() -> None:
    fabric = Fabric.from_spec(cluster_from_yaml(CLUSTER, "cluster.yaml"))
    assert fabric.cluster == "laptop"
    assert dict(fabric.leaf_of) == {"a0": "a", "a1": "a", "b0": "b"}
    assert dict(fabric.links) == dict(FABRIC.links)


@pytest.mark.parametrize(
    ("a", "b", "level", "distance"),
    [("a0", "a0", "node", 0), ("a0", "a1", "leaf", 1), ("b1", "b0", "leaf", 1), ("a1", "b0", "core", 2)],
)
def test_levels(a: str, b: str, level: str, distance: int) -> None:
    assert FABRIC.level(a, b) == level
    assert FABRIC.distance(a, b) == distance == FABRIC.distance(b, a)
    assert FABRIC.link(a, b) == FABRIC.links[Level(level)]


def test_an_unknown_node_is_an_error() -> None:
    with pytest.raises(KeyError):
        FABRIC.level("a0", "zz")
    with pytest.raises(KeyError):
        FABRIC.level("zz", "zz")


@pytest.mark.parametrize(
    ("members", "level"),
    [
        (["a0"], Level.NODE),
        (["a0", "a0"], Level.NODE),
        (["a0", "a0", "a1", "a1"], Level.LEAF),
        (["a0", "a1", "b0"], Level.CORE),
    ],
)
def test_bottleneck(members: list[str], level: Level) -> None:
    assert bottleneck(FABRIC, members) is level


def test_the_bottleneck_is_the_slowest_link_not_the_highest() -> None:
    slow_leaf = Fabric("c", FABRIC.leaf_of, {**FABRIC.links, Level.LEAF: Link(1e9, 5e-6)})
    assert bottleneck(slow_leaf, ["a0", "a1", "b0"]) is Level.LEAF


def test_ring_formulas() -> None:
    four = ["a0", "a1", "b0", "b1"]
    half = 3 / 4 * MIB / 5e9 + 3 * 2e-5
    assert all_gather_s(FABRIC, four, MIB) == pytest.approx(half)
    assert reduce_scatter_s(FABRIC, four, MIB) == pytest.approx(half)
    assert all_reduce_s(FABRIC, four, MIB) == pytest.approx(2 * half)
    assert all_to_all_s(FABRIC, four, MIB) == pytest.approx(half)
    assert point_to_point_s(FABRIC, "a0", "a1", MIB) == pytest.approx(5e-6 + MIB / 10e9)


def test_one_member_costs_nothing() -> None:
    for collective in (all_gather_s, reduce_scatter_s, all_reduce_s, all_to_all_s):
        assert collective(FABRIC, ["a0"], MIB) == 0.0


def test_neighbours_on_one_node_do_not_slow_the_ring_but_pairs_across_do() -> None:
    slow_node = Fabric("c", FABRIC.leaf_of, {**FABRIC.links, Level.NODE: Link(1e9, 1e-6)})
    assert all_gather_s(slow_node, ["a0", "a1"], MIB) == pytest.approx(MIB / 2 / 10e9 + 5e-6)
    assert all_to_all_s(slow_node, ["a0", "a0", "a1"], MIB) == pytest.approx(2 / 3 * MIB / 1e9 + 2 * 5e-6)
