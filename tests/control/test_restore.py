"""The step that a job restarts from, and the tier of each rank, as a table."""

from __future__ import annotations

from typing import Any

import pytest

from myriad.control.restore import RestorePoint, choose

M, P, D, N = "memory", "peer", "durable", "none"

# name: steps each rank's node holds; steps of which another node has copies; durable step; what follows
CASES: dict[str, tuple[list[set[int]], list[dict[int, str]], int | None, tuple[Any, ...]]] = {
    "nothing at all": ([set(), set()], [{}, {}], None, (None, 0, (N, N), {})),
    "all in memory": ([{7, 8}, {7, 8}], [{}, {}], 5, (8, 0, (M, M), {})),
    "one step behind": ([{7, 8}, {6, 7}], [{}, {}], 5, (7, 0, (M, M), {})),
    "a newcomer without copy": ([{7, 8, 5}, set()], [{}, {}], 5, (5, 9, (M, D), {})),
    "a newcomer with copy": ([{7, 8, 6}, set()], [{}, {6: "n2"}], 5, (6, 0, (M, P), {1: "n2"})),
    "the copy of the step that others hold": (
        [{8, 6, 4}, set()], [{}, {4: "n2", 6: "n2"}], 3, (6, 0, (M, P), {1: "n2"}),
    ),
    "copies that nobody else can match": ([{8}, set()], [{}, {6: "n2"}], 5, (5, 9, (D, D), {})),
    "an older copy than the checkpoint": ([{8, 4}, set()], [{}, {4: "n2"}], 5, (5, 9, (D, D), {})),
    "the copy of the checkpoint's step": ([{8, 5}, set()], [{}, {5: "n2"}], 5, (5, 0, (M, P), {1: "n2"})),
    "both lost": ([set(), set()], [{6: "n2"}, {}], 5, (5, 9, (D, D), {})),
    "both newcomers have copies": (
        [set(), set()], [{6: "n2"}, {6: "n3"}], None, (6, 0, (P, P), {0: "n2", 1: "n3"}),
    ),
    "own memory before a copy": ([{6}, {6}], [{6: "n2"}, {6: "n3"}], None, (6, 0, (M, M), {})),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_restart_from(name: str) -> None:
    held, copies, durable, (step, generation, tiers, sources) = CASES[name]
    point = choose([frozenset(steps) for steps in held], copies, durable, 9)
    assert point == RestorePoint(step, generation, tiers, sources)
