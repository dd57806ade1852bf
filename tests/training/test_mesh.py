"""Places of ranks: pp outermost, tp innermost."""

from __future__ import annotations

import pytest

from myriad.spec.job import LayoutSpec
from myriad.training.mesh import Mesh, axis_sizes, coordinates_of

SIZES = axis_sizes(LayoutSpec(pp=2, dp_replicate=2, dp_shard=2, tp=2, microbatches=2))


@pytest.mark.parametrize(
    ("rank", "pp", "dp_replicate", "dp_shard", "tp"),
    [(0, 0, 0, 0, 0), (1, 0, 0, 0, 1), (2, 0, 0, 1, 0), (4, 0, 1, 0, 0), (8, 1, 0, 0, 0), (15, 1, 1, 1, 1)],
)
def test_coordinates(rank: int, pp: int, dp_replicate: int, dp_shard: int, tp: int) -> None:
    want = {"pp": pp, "dp_replicate": dp_replicate, "dp_shard": dp_shard, "tp": tp}
    assert coordinates_of(rank, SIZES) == want


def test_each_data_parallel_rank_is_one_row_of_the_mesh() -> None:
    rows: dict[int, set[int]] = {}
    for rank in range(16):
        mesh = Mesh(SIZES, coordinates_of(rank, SIZES), None)
        rows.setdefault(mesh.dp_rank, set()).add(rank)
    assert rows == {0: {0, 1, 8, 9}, 1: {2, 3, 10, 11}, 2: {4, 5, 12, 13}, 3: {6, 7, 14, 15}}


def test_first_and_last_stage() -> None:
    stages = [Mesh(SIZES, coordinates_of(rank, SIZES), None) for rank in (3, 12)]
    assert [(m.first_stage, m.last_stage) for m in stages] == [(True, False), (False, True)]
    assert stages[0].is_first("pp", "dp_replicate") and not stages[0].is_first("tp")
