"""Roles of nodes over time, from where an allocation ended and who was in which generation."""

from __future__ import annotations

from itertools import pairwise

import pytest

from myriad.cluster.state import NodeState
from myriad.control.records import AllocationRecord, GenerationRecord, Move, NodeRecord
from myriad.control.tenures import node_tenures

GRANTED_S, RELEASED_S = 100.0, 200.0


def generation(
    number: int,
    nodes: str,
    begun_s: float,
    failed_s: float | None = None,
    culprit: str = "",
    rank: int | None = None,
) -> GenerationRecord:
    return GenerationRecord(
        job="j1",
        generation=number,
        allocation=1,
        nodes=tuple(nodes),
        begun_s=begun_s,
        failed_s=failed_s,
        verdict_s=None if failed_s is None else failed_s + 2,
        culprit_node=culprit,
        culprit_rank=rank,
    )


def roles(
    generations: list[GenerationRecord],
    nodes: str,
    idle: str = "",
    lost: str = "",
    moves: tuple[Move, ...] = (),
    down_since_s: float | None = None,
) -> dict[str, list[tuple[str, float]]]:
    """Node -> (role, until), from the records of an allocation that ended with ``nodes``, ``idle`` and ``lost``."""
    allocation = AllocationRecord(
        job="j1",
        nodes=tuple(nodes),
        spares=tuple(idle),
        lost=tuple(lost),
        granted_s=GRANTED_S,
        released_s=RELEASED_S,
        moves=moves,
    )
    records = {
        name: NodeRecord(
            name=name,
            type="t",
            accelerators=1,
            leaf="l",
            rack="r",
            power_feed="p",
            state=NodeState.FREE if down_since_s is None else NodeState.DOWN,
            since_s=down_since_s or 0.0,
        )
        for name in "abcdefg"
    }
    found = node_tenures(allocation, generations, records, RELEASED_S)
    for tenures in found.values():
        assert tenures[0].start_s == GRANTED_S and tenures[-1].end_s == RELEASED_S
        assert all(x.end_s == y.start_s and x.role != y.role for x, y in pairwise(tenures))
    return {name: [(t.role.value, t.end_s) for t in tenures] for name, tenures in found.items()}


def test_nothing_happens() -> None:
    assert roles([generation(1, "ab", 100)], "ab", idle="c") == {
        "a": [("ranks", 200)],
        "b": [("ranks", 200)],
        "c": [("spare", 200)],
    }


def test_a_spare_takes_over_twice_the_second_one_is_lost_too() -> None:
    life = [
        generation(1, "ab", 100, 120, "b"),
        generation(2, "ac", 122, 150, "c"),
        generation(3, "ad", 152),
    ]
    assert roles(life, "ad", idle="e", lost="bc") == {
        "a": [("ranks", 200)],
        "b": [("ranks", 120), ("down", 200)],
        "c": [("spare", 122), ("ranks", 150), ("down", 200)],
        "d": [("spare", 152), ("ranks", 200)],
        "e": [("spare", 200)],
    }


def test_without_spares_a_free_node_joins() -> None:
    life = [generation(1, "ab", 100, 120, "b"), generation(2, "ac", 122)]
    assert roles(life, "ac", lost="b", moves=(Move(node="c", at_s=122),))["c"] == [
        ("away", 122),
        ("ranks", 200),
    ]


def test_one_spare_then_a_free_node() -> None:
    life = [
        generation(1, "ab", 100, 120, "b"),
        generation(2, "ac", 122, 150, "c"),
        generation(3, "ad", 152),
    ]
    found = roles(life, "ad", lost="bc", moves=(Move(node="d", at_s=152),))
    assert found["c"][0] == ("spare", 122) and found["d"][0] == ("away", 152)


@pytest.mark.parametrize(
    ("story", "idle", "want"),
    [
        ("kept as a spare", "b", [("ranks", 122), ("spare", 200)]),
        ("given back", "", [("ranks", 122), ("away", 200)]),
    ],
)
def test_a_rank_is_moved_away_from_a_healthy_node(
    story: str, idle: str, want: list[tuple[str, float]]
) -> None:
    life = [generation(1, "ab", 100, 120, "b", rank=1), generation(2, "ac", 122)]
    moves = () if idle else (Move(node="b", at_s=122, joins=False),)
    assert roles(life, "ac", idle=idle, moves=moves)["b"] == want, story


def test_a_node_that_comes_back_after_a_rest() -> None:
    life = [
        generation(1, "ab", 100, 120, "b", rank=1),
        generation(2, "ac", 122, 150, "c"),
        generation(3, "ab", 152),
    ]
    found = roles(life, "ab", lost="c")
    assert found["b"] == [("ranks", 122), ("spare", 152), ("ranks", 200)]
    assert found["c"] == [("spare", 122), ("ranks", 150), ("down", 200)]


def test_a_lost_node_that_nobody_replaced() -> None:
    assert roles([generation(1, "ab", 100, 190, "b")], "ab")["b"] == [("ranks", 190), ("down", 200)]
    assert roles([generation(1, "ab", 100, 190, "b", rank=1)], "ab")["b"] == [("ranks", 200)]


def test_an_idle_spare_dies() -> None:
    life = [generation(1, "ab", 100, 120, "b", rank=1), generation(2, "ab", 122)]
    assert roles(life, "ab", lost="c", down_since_s=130)["c"] == [("spare", 130), ("down", 200)]
    assert roles(life, "ab", lost="c")["c"] == [("spare", 200)]  # back since, and nobody knows from when


def test_a_node_that_leaves_comes_back_and_leaves_again() -> None:
    life = [
        generation(1, "ab", 100, 120, "b", rank=1),
        generation(2, "ac", 122, 150, "c", rank=1),
        generation(3, "ab", 152, 170, "b", rank=1),
        generation(4, "ac", 172),
    ]
    turns = [("b", 122, False), ("c", 122, True), ("c", 152, False), ("b", 152, True), ("b", 172, False)]
    moves = tuple(Move(node=node, at_s=at_s, joins=joins) for node, at_s, joins in [*turns, ("c", 172, True)])
    found = roles(life, "ac", moves=moves)
    assert found["b"] == [("ranks", 122), ("away", 152), ("ranks", 172), ("away", 200)]
    assert found["c"] == [("away", 122), ("ranks", 152), ("away", 172), ("ranks", 200)]
