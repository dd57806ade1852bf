"""Nodes as values, and counters that equal a fresh count whatever happened."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from myriad.cluster import ClusterState, Grouping, Node, NodeState, Tally
from myriad.cluster.state import by_name


def node(name: str, **changes: object) -> Node:
    plain = Node(name, "small", 2, "leaf0", "rack0", "feed0", NodeState.FREE)
    return replace(plain, **changes)  # type: ignore[arg-type]


def test_counters_follow_a_life() -> None:
    state = ClusterState([node("n0"), node("n1"), node("n2", leaf="leaf1", type="big", accelerators=8)])
    assert state.total() == Tally(3, 12)
    assert state.tally(Grouping.LEAF, "leaf0", NodeState.FREE) == Tally(2, 4)
    assert state.node_types == ("big", "small")

    state.put(node("n0", state=NodeState.BUSY, job="job-1"))
    state.put(node("n1", state=NodeState.DOWN))
    assert state.by_state("small") == {NodeState.BUSY: Tally(1, 2), NodeState.DOWN: Tally(1, 2)}
    assert state.tally(Grouping.LEAF, "leaf0", NodeState.FREE) == Tally()
    assert state.tally(Grouping.RACK, "rack0", NodeState.FREE) == Tally(1, 8)
    assert [n.name for n in state.free_nodes()] == ["n2"]
    assert state.free_nodes("small") == ()
    assert state.free_leaves("small") == {}

    state.put(node("n0"))
    assert state.free_in_leaf("small", "leaf0") == ("n0",)
    assert list(state.nodes) == ["n0", "n1", "n2"], "a replaced node keeps its place"
    state.check()


def test_names_sort_as_people_count() -> None:
    names = ["n10", "n2", "rack1-n1", "7", "n02"]
    assert sorted(names, key=by_name) == ["7", "n2", "n02", "n10", "rack1-n1"]


def test_a_copy_is_independent() -> None:
    state = ClusterState([node("n0"), node("n1")])
    twin = state.copy()
    twin.put(node("n0", state=NodeState.BUSY, job="job-1"))
    assert len(state.free_nodes()) == 2
    assert len(twin.free_nodes()) == 1
    state.check()
    twin.check()


def test_nodes_and_counters_are_read_only() -> None:
    state = ClusterState([node("n0")])
    with pytest.raises(TypeError):
        state.nodes["n1"] = node("n1")  # type: ignore[index]
    with pytest.raises(TypeError):
        state.counters[Grouping.LEAF, "leaf0", NodeState.FREE] = Tally()  # type: ignore[index]


def test_check_sees_a_drift() -> None:
    state = ClusterState([node("n0")])
    state._counts[Grouping.LEAF, "leaf0", NodeState.FREE] = Tally(2, 4)
    with pytest.raises(AssertionError, match="counters drifted"):
        state.check()


def test_check_sees_a_lost_free_node() -> None:
    state = ClusterState([node("n0")])
    state._free.clear()
    with pytest.raises(AssertionError, match="free nodes"):
        state.check()


ANY_NODE = st.builds(
    Node,
    name=st.integers(0, 7).map(lambda i: f"n{i}"),
    type=st.sampled_from(["small", "big"]),
    accelerators=st.integers(0, 8),
    leaf=st.sampled_from(["leaf0", "leaf1", "leaf2"]),
    rack=st.sampled_from(["rack0", "rack1"]),
    power_feed=st.sampled_from(["feed0", "feed1"]),
    state=st.sampled_from(NodeState),
    job=st.sampled_from([None, "job-1"]),
)


@given(st.lists(ANY_NODE, max_size=40))
def test_incremental_counters_equal_a_recount(puts: list[Node]) -> None:
    state = ClusterState()
    for put in puts:
        state.put(put)
        state.check()
        assert dict(state.counters) == state.recount()
    last = {put.name: put for put in puts}
    assert dict(state.nodes) == last
    free = {n.name for n in last.values() if n.state is NodeState.FREE}
    assert {n.name for n in state.free_nodes()} == free
    assert sum(sum(state.free_leaves(kind).values()) for kind in state.node_types) == len(free)
