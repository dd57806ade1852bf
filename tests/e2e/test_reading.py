"""Jobs whose batches are read ahead of them: the same losses bit for bit, whoever is killed."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest
from commandline import cluster_up

import leaks
from live import cluster_of
from myriad.control.records import MemberRecord
from myriad.runtime.store import StateReader
from recovery import Site, assert_unbroken, dataset, drawn, tiny_job

SEED = int(os.environ.get("MYRIAD_SEED", "1"))


def readers(site: Site, job: str) -> list[int]:
    """The reader processes of a job's ranks, in the order of the ranks."""
    with StateReader(site.dir) as reader:
        members = [m.status for m in reader.records(MemberRecord).values() if m.job == job and m.status]
    pids = {rank: pid for status in members for rank, pid in status.pids.items()}
    return [child for rank in sorted(pids) for child in children(pids[rank])]


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def with_data(spec: dict[str, Any], **keys: Any) -> dict[str, Any]:
    return {**spec, "data": {**spec["data"], **keys}}


@pytest.mark.slow
def test_a_lost_worker_and_a_lost_reader_change_nothing(tmp_path: Path) -> None:
    spec = tiny_job(dataset(tmp_path), 2, {"dp_replicate": 2}, 60)
    with cluster_up(tmp_path, cluster_of(nodes=3, leaves=2)) as state:
        site = Site(tmp_path, state)
        reference = site.submit(spec)
        assert site.until_end(reference).status == "SUCCEEDED", site.job(reference)

        job = site.submit(with_data(spec, prefetch=3))
        draw = random.Random(SEED)
        fault = drawn(draw, spec, "kill-worker", rank=draw.randrange(2))
        site.harm(job, fault)
        assert_unbroken(site, job, reference, fault)

        job = site.submit(with_data(spec, prefetch=3))
        site.until_step(job, 15)
        pids = readers(site, job)
        assert len(pids) == 2, pids
        os.kill(pids[1], signal.SIGKILL)
        assert_unbroken(site, job, reference, fault)
        words = f"the reader of data-parallel rank 1 (pid {pids[1]}) was killed by SIGKILL"
        assert words in site.run("logs", job), site.run("logs", job)
        assert all(leaks.is_gone(pid) for pid in pids), "they end with their ranks"
