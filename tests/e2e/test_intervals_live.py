"""A job that leaves it to Myriad how often it saves: it measures, moves, says why, and loses not a bit."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import pytest
from commandline import cluster_up

from live import cluster_of
from myriad.control.journal import decode_changes
from myriad.control.records import IntervalRecord
from myriad.planner.intervals import FIRST
from myriad.runtime.store import JournalFile
from recovery import Fault, Site, assert_unbroken, dataset, tiny_job

SEED = int(os.environ.get("MYRIAD_SEED", "1"))
STEPS = 500


@pytest.mark.slow
def test_the_intervals_move_with_what_is_measured(tmp_path: Path) -> None:
    fixed = tiny_job(dataset(tmp_path), 2, {"dp_replicate": 2}, STEPS)
    chosen = {**fixed, "checkpoint": {}}
    draw = random.Random(SEED)
    fault = Fault("kill-worker", draw.randrange(30, STEPS // 2), rank=draw.randrange(2))
    with cluster_up(tmp_path, cluster_of(nodes=3, accelerators=1, leaves=2)) as state:
        site = Site(tmp_path, state)
        reference = site.submit(fixed)
        assert site.until_end(reference).status == "SUCCEEDED", site.job(reference)
        job = site.submit(chosen)
        site.harm(job, fault)
        assert_unbroken(site, job, reference, fault)
        said = json.loads(site.run("show", job, "--json"))["saves"]
        assert set(said) == {"memory", "peer", "durable"}
        for tier in said:
            assert "for it costs" in said[tier] and "is expected every" in said[tier], said
        told = site.run("show", job)
        assert f"saved to durable: {said['durable']}" in told, told
        as_told = json.loads(site.run("show", reference, "--json"))["saves"]
        assert as_told["memory"] == "every step, as the job says", as_told
        decided = [record.intervals for record in _decisions(site, job)]
    assert decided[0] == FIRST and decided[-1] is not None
    # A save costs milliseconds, and a step takes ten: once in ten steps is far too often.
    assert decided[-1].durable > FIRST.durable and decided[-1].memory > FIRST.memory, decided[-1]


def _decisions(site: Site, job: str) -> list[IntervalRecord]:
    """What the journal holds of the job's intervals, in order."""
    found = []
    with JournalFile(site.state) as journal:
        for row in journal.rows():
            changes = decode_changes(row.changes)
            found += [c for c in changes if isinstance(c, IntervalRecord) and c.job == job and c.intervals]
    return found
