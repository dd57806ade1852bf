"""A rank that stands still shows as communication on the rank that waits for it, whatever the axis."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import pytest
from training_harness import Cluster, tiny_job

PAUSE_S = 1.0


@pytest.mark.parametrize(
    ("layout", "paused"),
    [
        ({"dp_replicate": 2}, 0),
        ({"pp": 2, "microbatches": 2}, 1),
        pytest.param({"dp_shard": 2}, 0, marks=pytest.mark.slow),
        pytest.param({"tp": 2}, 1, marks=pytest.mark.slow),
        pytest.param({"pp": 2, "microbatches": 2}, 0, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_waiting_for_a_paused_rank(layout: dict[str, Any], paused: int, cluster: Cluster, data: Path) -> None:
    job = tiny_job(data, steps=30, snapshot_every_steps=1000, **layout)
    run = cluster.start(job)
    while len(run.workers[paused].reports) < 5:
        run.poll(1.0)
    run.kill(paused, signal.SIGSTOP)
    time.sleep(PAUSE_S)
    run.kill(paused, signal.SIGCONT)
    run.wait()
    assert run.codes() == [0, 0], run.describe()
    waited = max(report.communication_s for report in run.workers[1 - paused].reports)
    assert PAUSE_S * 0.9 < waited < PAUSE_S + 2.0


def test_parts_tile_the_wall_time(cluster: Cluster, data: Path) -> None:
    run = cluster.start(tiny_job(data, steps=10, every_steps=4, dp_shard=2)).wait()
    for worker in run.workers.values():
        for report in worker.reports:
            parts = report.compute_s + report.communication_s + report.data_s + report.checkpoint_s
            assert parts <= report.wall_s * (1 + 1e-9)
            assert report.wall_s - parts < 0.02 * report.wall_s + 0.02, "unaccounted"
        # The reports follow each other without gaps: their sum is the time between first and last.
        between = worker.arrived_s[-1] - worker.arrived_s[0]
        assert sum(r.wall_s for r in worker.reports[1:]) == pytest.approx(between, abs=0.3)
        assert [each.shards.step for each in worker.shards] == [4, 8, 10]
        assert worker.shards[-1].shards.seconds < worker.reports[-1].checkpoint_s, (
            "the end waits for its save"
        )
