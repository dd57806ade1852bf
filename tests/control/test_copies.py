"""Who keeps whose copies: in another leaf where there is one, outside its own groups where that is possible too."""

from __future__ import annotations

from collections import Counter

import pytest

from myriad.control.copies import cover, holders
from myriad.spec.job import LayoutSpec

# name: leaf of each node, layout, ranks a node; how many copies are in another leaf, and outside the groups too
CASES: dict[str, tuple[list[str], dict[str, int], int, tuple[int, int]]] = {
    "two nodes of one leaf": (["a", "a"], {"dp_replicate": 4}, 2, (0, 0)),
    "two nodes, two leaves": (["a", "b"], {"dp_replicate": 4}, 2, (2, 2)),
    "two nodes, two leaves, one group": (["a", "b"], {"dp_shard": 4}, 2, (2, 0)),
    "four nodes, halves": (["a", "a", "b", "b"], {"pp": 2, "dp_shard": 2, "tp": 2}, 2, (4, 4)),
    "dealt in turn": (["a", "b", "a", "b"], {"pp": 2, "dp_shard": 2, "tp": 2}, 2, (4, 4)),
    "one leaf has most": (["a", "a", "a", "b"], {"dp_replicate": 4}, 1, (2, 2)),
    "three leaves": (["a", "a", "b", "b", "c", "c"], {"pp": 3, "dp_shard": 2}, 1, (6, 6)),
}


@pytest.mark.parametrize("name", CASES)
def test_copies_are_apart(name: str) -> None:
    leaves, axes, per_node, want = CASES[name]
    nodes = [f"n{number}" for number in range(len(leaves))]
    leaf_of, layout = (
        dict(zip(nodes, leaves, strict=True)),
        LayoutSpec(**axes, microbatches=axes.get("pp", 1)),
    )
    found = holders(nodes, leaf_of, layout, per_node)
    assert set(found) == set(nodes) and set(Counter(found.values()).values()) == {1}, "one ward each"
    assert all(giver != holder for giver, holder in found.items())
    covered = cover(found, nodes, leaf_of, layout, per_node)
    assert (covered.nodes, covered.other_leaf, covered.other_group) == (len(nodes), *want)


def test_one_node_keeps_nobodys_copies() -> None:
    assert holders(["n0"], {"n0": "a"}, LayoutSpec(), 1) == {}


def test_many_nodes() -> None:
    nodes = [f"n{number}" for number in range(1250)]
    leaf_of = {node: f"l{number // 32}" for number, node in enumerate(nodes)}
    layout = LayoutSpec(pp=10, dp_shard=125, tp=8, microbatches=10)
    found = holders(nodes, leaf_of, layout, 8)
    covered = cover(found, nodes, leaf_of, layout, 8)
    assert covered.other_leaf == 1250 and covered.other_group == 1250
