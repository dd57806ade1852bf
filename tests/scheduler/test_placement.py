"""Which nodes, in which rank order, and the sentences when there are none."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from myriad.cluster import ClusterState, Node, NodeState
from myriad.fabric import Fabric, Level, Link
from myriad.scheduler import Placement, PlacementRequest, Refusal, place, schedule
from myriad.scheduler import replace as replace_node
from myriad.spec.job import LayoutSpec

LINKS = {level: Link(1e9, 1e-5) for level in Level}
STATES = {
    ".": NodeState.FREE,
    "b": NodeState.BUSY,
    "s": NodeState.SPARE,
    "x": NodeState.DOWN,
    "d": NodeState.DRAINED,
}


def cluster_of(**leaves: str) -> tuple[ClusterState, Fabric]:
    """One character per node: ``a="..b"`` is leaf a with nodes a0 and a1 free and a2 busy. All type small."""
    nodes = [
        Node(f"{leaf}{i}", "small", 2, leaf, "rack0", "feed0", STATES[mark])
        for leaf, marks in leaves.items()
        for i, mark in enumerate(marks)
    ]
    return ClusterState(nodes), Fabric("laptop", {node.name: node.leaf for node in nodes}, LINKS)


def layout_of(pp: int = 1, dp_replicate: int = 1, dp_shard: int = 1, tp: int = 1) -> LayoutSpec:
    return LayoutSpec(pp=pp, dp_replicate=dp_replicate, dp_shard=dp_shard, tp=tp, microbatches=pp)


def with_type(cluster: ClusterState, node_type: str, accelerators: int, *names: str) -> ClusterState:
    for name in names:
        cluster.put(replace(cluster.nodes[name], type=node_type, accelerators=accelerators))
    return cluster


@dataclass(frozen=True)
class Story:
    name: str
    leaves: dict[str, str]
    nodes: int
    want: str  # the job's nodes in rank order, then the spares after a bar
    spares: int = 0
    layout: LayoutSpec | None = None


STORIES = [
    Story("one leaf fits", {"a": "...", "b": "..."}, 2, "a0 a1"),
    Story("the fullest leaf that fits", {"a": "....", "b": "b..", "c": "b."}, 2, "b1 b2"),
    Story("numbers in names count as numbers", {"a10": "..", "a9": ".."}, 2, "a90 a91"),
    Story("nodes that are not free are passed over", {"a": "bx.ds.", "b": "...."}, 2, "a2 a5"),
    Story("two leaves, the emptiest first", {"a": "..", "b": "...", "c": "."}, 4, "b0 b1 b2 c0"),
    Story("the last leaf is a best fit", {"a": "..", "b": "....", "c": "...."}, 6, "b0 b1 b2 b3 a0 a1"),
    Story("a spare in the job's own leaf", {"a": "..", "b": "..."}, 2, "b0 b1 | b2", spares=1),
    Story("a spare elsewhere when the leaf is full", {"a": "..", "b": ".."}, 2, "a0 a1 | b0", spares=1),
    Story(
        "a spare elsewhere fills the fullest leaf", {"a": "...", "b": "..", "c": "."}, 3, "a0 a1 a2 | c0", 1
    ),
    Story("spares go round the job's leaves", {"a": "....", "b": "...."}, 6, "a0 a1 a2 a3 b0 b1 | b2 b3", 2),
    Story(
        "the demo: a stage in each leaf and the spare beside one",
        {"a": "...", "b": ".."},
        4,
        "a0 a1 b0 b1 | a2",
        spares=1,
        layout=layout_of(pp=2, dp_shard=2, tp=2),
    ),
    Story(
        "stages stay whole: three leaves of 3, 3 and 2 hold three stages of two, one mixed",
        {"a": "...", "b": "..."},
        6,
        "a0 a1 b0 b1 a2 b2",
        layout=layout_of(pp=3, dp_shard=2, tp=2),
    ),
    Story(
        "the last leaf is the smallest that keeps stages whole",
        {"a": "....", "b": "...", "c": "...."},
        8,
        "a0 a1 a2 a3 c0 c1 c2 c3",
        layout=layout_of(pp=2, dp_shard=4, tp=2),
    ),
    Story(
        "a stage that no leaf holds keeps its shard groups whole",
        {"a": "...", "b": "..."},
        4,
        "a0 a1 b0 b1",
        layout=layout_of(pp=1, dp_replicate=2, dp_shard=2, tp=2),
    ),
    Story("two stages on one node", {"a": "."}, 1, "a0", layout=layout_of(pp=2)),
]


@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.name)
def test_placement(story: Story) -> None:
    cluster, fabric = cluster_of(**story.leaves)
    request = PlacementRequest("job-1", story.nodes, story.spares, layout=story.layout)
    nodes, _, spares = story.want.partition(" | ")
    assert place(request, cluster, fabric) == Placement(tuple(nodes.split()), tuple(spares.split()))


REFUSALS = [
    (
        "more than the cluster has",
        PlacementRequest("j", 40),
        ("limit", "Resources"),
        'needs 40 nodes but cluster "laptop" has 5; 35 more are needed',
    ),
    (
        "one more than the cluster has, by type and with a spare",
        PlacementRequest("j", 5, 1, "small"),
        ("limit", "Resources"),
        'needs 6 nodes (5 and 1 spare) of type small but cluster "laptop" has 5; 1 more is needed',
    ),
    (
        "more than is free",
        PlacementRequest("j", 4, 0, "small"),
        ("turn", "Resources"),
        "needs 4 nodes of type small but only 2 of 5 are free (2 busy, 1 down); 2 more nodes needed",
    ),
    (
        "a spare is part of the gang",
        PlacementRequest("j", 2, 1),
        ("turn", "Resources"),
        "needs 3 nodes (2 and 1 spare) but only 2 of 5 are free (2 busy, 1 down); 1 more node needed",
    ),
    (
        "a type that is not there",
        PlacementRequest("j", 1, 0, "huge"),
        ("never", "BadConstraints"),
        "needs nodes of type huge but the cluster has only small; name one of these types in node_type",
    ),
    (
        "a layout that does not fit the nodes",
        PlacementRequest("j", 1, layout=LayoutSpec(dp_shard=8)),
        ("never", "BadConstraints"),
        (
            "the layout needs 8 workers on each of 1 node but small has 2; "
            "change nodes, layout or workers_per_node"
        ),
    ),
]


@pytest.mark.parametrize(
    ("name", "request_", "kind", "sentence"), REFUSALS, ids=lambda value: str(value)[:40]
)
def test_refusal(name: str, request_: PlacementRequest, kind: tuple[str, str], sentence: str) -> None:
    cluster, fabric = cluster_of(a="..b", b="bx")
    decision = place(request_, cluster, fabric)
    assert isinstance(decision, Refusal), name
    assert (decision.tier, decision.code) == kind
    assert decision.sentence == sentence


def test_nothing_free_and_nothing_there() -> None:
    cluster, fabric = cluster_of(a="bb")
    decision = place(PlacementRequest("j", 1), cluster, fabric)
    assert isinstance(decision, Refusal)
    assert decision.sentence == "needs 1 node but none of 2 is free (2 busy); 1 more node needed"
    decision = place(PlacementRequest("j", 2, node_type="small"), ClusterState(), fabric)
    assert isinstance(decision, Refusal)
    assert decision.tier == "limit", "nodes that have not joined yet are waited for"
    assert decision.sentence == 'needs 2 nodes of type small but cluster "laptop" has 0; 2 more are needed'


def test_all_nodes_are_of_one_type() -> None:
    cluster, fabric = cluster_of(a="...", b="...")
    with_type(cluster, "big", 8, "a0", "a1", "b0", "b1")
    request = PlacementRequest("j", 3)
    assert place(request, cluster, fabric) == Placement(("a0", "a1", "b0"))
    assert place(replace(request, nodes=2, node_type="small"), cluster, fabric) == Placement(("a2", "b2"))
    decision = place(replace(request, node_type="small"), cluster, fabric)
    assert isinstance(decision, Refusal)
    assert decision.sentence == 'needs 3 nodes of type small but cluster "laptop" has 2; 1 more is needed'


def test_the_layout_picks_the_type_whose_accelerators_match() -> None:
    cluster, fabric = cluster_of(a="..", b="..")
    with_type(cluster, "big", 8, "a0", "a1")
    request = PlacementRequest("j", 2, layout=LayoutSpec(dp_shard=2, tp=2))
    assert place(request, cluster, fabric) == Placement(("b0", "b1"))
    wide = replace(request, layout=LayoutSpec(dp_shard=8, tp=2))
    assert place(wide, cluster, fabric) == Placement(("a0", "a1"))
    half_used = replace(request, workers_per_node=4, layout=LayoutSpec(dp_shard=4, tp=2))
    assert place(half_used, cluster, fabric) == Placement(("a0", "a1"))


@pytest.mark.parametrize(
    ("name", "leaves", "want"),
    [
        ("all of them", {"a": ".....", "b": "x"}, Placement(("a0", "a1", "a2"), ("a3", "a4"))),
        ("one of two", {"a": "....", "b": "x"}, Placement(("a0", "a1", "a2"), ("a3",))),
        ("none", {"a": "...", "b": "x"}, Placement(("a0", "a1", "a2"))),
        (
            "not even the nodes",
            {"a": "..", "b": "xb"},
            Refusal(
                "turn",
                "Resources",
                "needs 3 nodes but only 2 of 4 are free (1 busy, 1 down); 1 more node needed",
            ),
        ),
    ],
)
def test_spares_that_are_not_required(name: str, leaves: dict[str, str], want: Placement | Refusal) -> None:
    cluster, fabric = cluster_of(**leaves)
    assert place(PlacementRequest("j", 3, 2, spares_required=False), cluster, fabric) == want, name


REPLACEMENTS = [
    ("a spare of the failed node's leaf", {"a": "xbs", "b": "s."}, "a0 a1", "b0 a2", "a2"),
    ("any spare before a free node nearer by", {"a": "xb.", "b": "s."}, "a0 a1", "b0", "b0"),
    ("a spare that died is passed over", {"a": "xbx", "b": "s."}, "a0 a1", "a2 b0", "b0"),
    ("a free node of the same leaf", {"a": "xb.", "b": "..."}, "a0 a1", "", "a2"),
    ("a free node beside the rest of the job", {"a": "xb", "b": "..", "c": "b."}, "a0 a1 c0", "", "c1"),
    ("a free node anywhere", {"a": "xb", "b": ".."}, "a0 a1", "", "b0"),
]


@pytest.mark.parametrize(("name", "leaves", "allocation", "spares", "want"), REPLACEMENTS)
def test_replacement(name: str, leaves: dict[str, str], allocation: str, spares: str, want: str) -> None:
    cluster, fabric = cluster_of(**leaves)
    assert replace_node("a0", allocation.split(), spares.split(), cluster, fabric) == want, name


def test_no_replacement() -> None:
    cluster, fabric = cluster_of(a="xbb", b=".x")
    with_type(cluster, "big", 8, "b0")
    decision = replace_node("a0", ["a0", "a1"], [], cluster, fabric, "small")
    assert decision == Refusal(
        "turn",
        "Resources",
        "no node of type small is left to replace a0: no spare, and none of 4 is free (2 busy, 2 down); "
        "1 more node needed",
    )


def test_a_pass_gives_no_node_twice_and_says_who_is_ahead() -> None:
    cluster, fabric = cluster_of(a="...", b="..")
    queue = [
        PlacementRequest("job-1", 3),
        PlacementRequest("job-2", 40),
        PlacementRequest("job-3", 4),
        PlacementRequest("job-4", 1, 1),
        PlacementRequest("job-5", 1),
    ]
    decided = dict(schedule(queue, cluster, fabric))
    assert decided["job-1"] == Placement(("a0", "a1", "a2"))
    assert decided["job-2"] == Refusal(
        "limit", "Resources", 'needs 40 nodes but cluster "laptop" has 5; 35 more are needed'
    )
    assert decided["job-3"] == Refusal(
        "turn",
        "Resources",
        "needs 4 nodes but only 2 of 5 are free (3 busy); 2 more nodes needed; behind job-1",
    )
    assert decided["job-4"] == Placement(("b0",), ("b1",))
    assert decided["job-5"] == Refusal(
        "turn",
        "Resources",
        "needs 1 node but none of 5 is free (1 spare, 4 busy); 1 more node needed; "
        "behind job-1, job-3, job-4",
    )
    assert len(cluster.free_nodes()) == 5, "the pass decides on a copy"


def test_a_sentence_names_three_of_the_jobs_ahead() -> None:
    cluster, fabric = cluster_of(a=".....")
    queue = [PlacementRequest(f"job-{i}", 1) for i in range(6)]
    last = schedule(queue, cluster, fabric)[-1][1]
    assert isinstance(last, Refusal)
    assert last.sentence.endswith("; behind job-0, job-1, job-2 and 2 more")


# ---------------------------------------------------------------- properties

MARKS = st.text(alphabet=".bsxd", max_size=5)
LEAVES = st.lists(MARKS, min_size=1, max_size=5).map(lambda marks: dict(zip("abcde", marks, strict=False)))


def fewest_leaves(cluster: ClusterState, nodes: int) -> int:
    free = [leaf_nodes for leaf_nodes in cluster.free_leaves("small").values()]
    return next(k for k in range(1, len(free) + 1) for some in combinations(free, k) if sum(some) >= nodes)


@given(LEAVES, st.integers(1, 8), st.integers(0, 2), st.sampled_from([1, 2, 4]))
def test_a_gang_is_exact_free_and_on_the_fewest_leaves(
    leaves: dict[str, str], nodes: int, spares: int, pp: int
) -> None:
    cluster, fabric = cluster_of(**leaves)
    layout = layout_of(pp=pp, dp_shard=2 * nodes // pp) if nodes % pp == 0 else None
    free = {node.name for node in cluster.free_nodes()}
    decision = place(PlacementRequest("j", nodes, spares, layout=layout), cluster, fabric)
    if isinstance(decision, Refusal):
        assert len(free) < nodes + spares
        return
    assert len(decision.nodes) == nodes and len(decision.spares) == spares
    chosen = {*decision.nodes, *decision.spares}
    assert len(chosen) == nodes + spares, "no node twice"
    assert chosen <= free
    used = {cluster.nodes[name].leaf for name in decision.nodes}
    assert len(used) == fewest_leaves(cluster, nodes)


@given(LEAVES, st.sampled_from([(2, 1), (2, 2), (4, 2), (3, 2), (2, 3)]))
def test_no_stage_is_split_when_the_fewest_leaves_can_hold_them_whole(
    leaves: dict[str, str], shape: tuple[int, int]
) -> None:
    stages, stage = shape
    cluster, fabric = cluster_of(**leaves)
    layout = layout_of(pp=stages, dp_shard=2 * stage)
    decision = place(PlacementRequest("j", stages * stage, layout=layout), cluster, fabric)
    if isinstance(decision, Refusal):
        return
    leaf_of = {node.name: node.leaf for node in cluster.nodes.values()}
    runs = [decision.nodes[i : i + stage] for i in range(0, len(decision.nodes), stage)]
    split = sum(1 for run in runs if len({leaf_of[name] for name in run}) > 1)
    free = list(cluster.free_leaves("small").values())
    k = fewest_leaves(cluster, stages * stage)
    most_whole = max(sum(leaf // stage for leaf in some) for some in combinations(free, k))
    if most_whole >= stages:
        assert split == 0


ASKED = st.tuples(st.integers(1, 4), st.integers(0, 2), st.booleans())


@given(st.lists(ASKED, max_size=8), LEAVES)
def test_a_pass_is_a_set_of_disjoint_placements(
    asked: list[tuple[int, int, bool]], leaves: dict[str, str]
) -> None:
    cluster, fabric = cluster_of(**leaves)
    queue = [
        PlacementRequest(f"job-{i}", nodes, spares, spares_required=required)
        for i, (nodes, spares, required) in enumerate(asked)
    ]
    placed = [d for _, d in schedule(queue, cluster, fabric) if isinstance(d, Placement)]
    given_out = [name for d in placed for name in (*d.nodes, *d.spares)]
    assert len(given_out) == len(set(given_out))
    assert {cluster.nodes[name].state for name in given_out} <= {NodeState.FREE}
