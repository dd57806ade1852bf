"""Every layout trains as one process does: losses and gradient norms over 20 steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from training_harness import Cluster, Generation, tiny_job

STEPS = 20
NO_SNAPSHOTS = 1000  # the saves are tested elsewhere


def train(cluster: Cluster, data: Path, dtype: str, **layout: Any) -> Generation:
    job = tiny_job(data, dtype=dtype, steps=STEPS, snapshot_every_steps=NO_SNAPSHOTS, **layout)
    return cluster.run(job)


def assert_equal_curves(one: Generation, many: Generation, relative: float) -> None:
    assert set(one.losses()) == set(many.losses()) == set(range(1, STEPS + 1))
    for step, loss in one.losses().items():
        got = float.fromhex(many.losses()[step])
        assert got == pytest.approx(float.fromhex(loss), rel=relative), f"loss of step {step}"
        assert many.norms()[step] == pytest.approx(one.norms()[step], rel=relative), f"norm of step {step}"


def assert_samples_once(one: Generation, many: Generation) -> None:
    for step, ids in one.samples().items():
        assert sorted(many.samples()[step]) == sorted(ids)


LAYOUTS: list[dict[str, Any]] = [
    {"dp_replicate": 2, "microbatches": 2},
    {"dp_shard": 2},
    {"tp": 2},
    {"pp": 2, "microbatches": 4},
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_two_ranks_equal_one_in_float64(layout: dict[str, Any], cluster: Cluster, data: Path) -> None:
    one = train(cluster, data, "float64")
    many = train(cluster, data, "float64", **layout)
    assert_equal_curves(one, many, 1e-9)
    assert_samples_once(one, many)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        {"dp_replicate": 2},
        {"dp_shard": 2, "microbatches": 2},
        {"pp": 2, "microbatches": 2, "schedule": "gpipe"},
        {"dp_replicate": 2, "dp_shard": 2},
        {"dp_replicate": 2, "tp": 2},
        {"dp_replicate": 2, "pp": 2, "microbatches": 2},
        {"dp_shard": 2, "tp": 2, "microbatches": 2},
        {"dp_shard": 2, "pp": 2, "microbatches": 2},
        {"tp": 2, "pp": 2, "microbatches": 2},
        {"dp_shard": 2, "tp": 2, "pp": 2, "microbatches": 2},
    ],
    ids=str,
)
def test_combinations_equal_one_in_float64(layout: dict[str, Any], cluster: Cluster, data: Path) -> None:
    one = train(cluster, data, "float64")
    many = train(cluster, data, "float64", **layout)
    assert_equal_curves(one, many, 1e-9)
    assert_samples_once(one, many)


def test_float32_stays_close(cluster: Cluster, data: Path) -> None:
    one = train(cluster, data, "float32", learning_rate=1e-3)
    many = train(cluster, data, "float32", learning_rate=1e-3, dp_shard=2)
    assert_equal_curves(one, many, 1e-5)


def test_another_order_of_samples_is_noticed(cluster: Cluster, data: Path) -> None:
    """Negative control: with another global batch the curves differ by far more than the tolerance."""
    one = train(cluster, data, "float64")
    other = train(cluster, data, "float64", dp_replicate=2, global_batch=10)
    with pytest.raises(AssertionError, match="loss of step 1"):
        assert_equal_curves(one, other, 1e-9)
