"""Jobs whose batches are read ahead of them: the same losses bit for bit, whoever is killed."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from commandline import cluster_up
from object_server import object_server

import leaks
from live import cluster_of
from myriad.control.records import MemberRecord
from myriad.runtime.store import StateReader
from recovery import Site, dataset, tiny_job

SEED = int(os.environ.get("MYRIAD_SEED", "1"))


def workers(site: Site, job: str) -> list[int]:
    """The processes of a job's ranks."""
    with StateReader(site.dir) as reader:
        members = [m.status for m in reader.records(MemberRecord).values() if m.job == job and m.status]
    pids = {rank: pid for status in members for rank, pid in status.pids.items()}
    return [pids[rank] for rank in sorted(pids)]


def readers(site: Site, job: str) -> list[int]:
    """The reader processes of a job's ranks, in the order of the ranks."""
    return [child for pid in workers(site, job) for child in children(pid)]


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def with_data(spec: dict[str, Any], **keys: Any) -> dict[str, Any]:
    return {**spec, "data": {**spec["data"], **keys}}


@pytest.mark.slow
def test_a_lost_reader_is_a_restart(tmp_path: Path) -> None:
    """Of a job that reads from object storage through a cache."""
    (tmp_path / "bucket").mkdir()
    spec = tiny_job(dataset(tmp_path / "bucket"), 2, {"dp_replicate": 2}, 40)
    with object_server(tmp_path) as server, cluster_up(tmp_path, cluster_of(nodes=3, leaves=2)) as state:
        site = Site(tmp_path, state)
        reference = site.submit(spec)
        assert site.until_end(reference).status == "SUCCEEDED", site.job(reference)
        cache = {"directory": str(tmp_path / "nvme"), "size": "64MiB"}
        job = site.submit(
            with_data({**spec, "env": server.environment}, path="s3://bucket/text", cache=cache)
        )
        site.until_step(job, 10)
        pids = readers(site, job)
        assert len(pids) == 2, pids
        os.kill(pids[1], signal.SIGKILL)
        assert_same(site, job, reference, restarts=1)
        words = f"the reader of data-parallel rank 1 (pid {pids[1]}) was killed by SIGKILL"
        assert words in site.run("logs", job), site.run("logs", job)
        assert all(leaks.is_gone(pid) for pid in pids), "they end with their ranks"
        assert len(list((tmp_path / "nvme" / "myriad-blocks").iterdir())) == 2, "one block, and the lock"
        whole = [asked for key, asked in server.requests if key == "bucket/text.bin" and asked]
        assert 1 <= len(whole) <= 4, "each reader at most once, before and after the restart"


def assert_same(site: Site, job: str, reference: str, restarts: int) -> None:
    """As ``assert_unbroken``, for data the server of the cluster cannot read."""
    record = site.until_end(job)
    assert (record.status, record.restarts) == ("SUCCEEDED", restarts), record
    found = site.report(job, reference)
    assert found["losses"] and found["losses"] == found["reference_losses"], job
    assert site.result(job)["final_sha256"] == site.result(reference)["final_sha256"]


LATENCY_S = 0.05  # of each request; a step computes for longer
AWAY_S = 1.5
LONG = {"layers": 2, "dim": 128, "heads": 4, "kv_heads": 2, "ffn_dim": 256, "vocab_size": 258}


@pytest.mark.slow
def test_slow_object_storage_is_waited_for_without_prefetch_and_not_with_it(tmp_path: Path) -> None:
    """Losses and parameters are those of the local data set: storage goes away for a while, a worker is killed."""
    (tmp_path / "bucket").mkdir()
    spec = tiny_job(dataset(tmp_path / "bucket"), 2, {"dp_replicate": 2}, 20, model=LONG)
    spec = with_data(spec, sequence_length=256)
    with object_server(tmp_path) as server, cluster_up(tmp_path, cluster_of(nodes=3, leaves=2)) as state:
        site = Site(tmp_path, state)
        reference = site.submit(spec)
        assert site.until_end(reference).status == "SUCCEEDED", site.job(reference)

        server.latency_s = LATENCY_S
        spec = with_data({**spec, "env": server.environment}, path="s3://bucket/text")
        waiting = site.submit(with_data(spec, prefetch=0))
        site.until_step(waiting, 4)
        server.status = 503
        time.sleep(AWAY_S)
        server.status = 200
        assert_same(site, waiting, reference, restarts=0)
        assert site.report(waiting, reference)["ledger"]["data_wait"] >= AWAY_S + 2 * 19 * 0.9 * LATENCY_S

        ahead = site.submit(spec)
        site.until_step(ahead, random.Random(SEED).randrange(5, 10))
        os.kill(workers(site, ahead)[1], signal.SIGKILL)  # at once: the job is short
        assert_same(site, ahead, reference, restarts=1)
        without, with_it = data_wait_s(site, waiting), data_wait_s(site, ahead)
        assert without >= 0.9 * LATENCY_S and with_it <= 0.2 * without, (without, with_it)


def data_wait_s(site: Site, job: str) -> float:
    """The median of a rank's waiting for data in a step, without the first two of a generation (a reader's start)."""
    with StateReader(site.dir) as reader:
        reports = list(reader.step_reports(job))
    began = {r.generation: min(o.step for o in reports if o.generation == r.generation) for r in reports}
    return median(r.data_s for r in reports if r.step > began[r.generation] + 1)


@pytest.mark.slow
def test_storage_that_is_away_is_said_in_one_sentence(tmp_path: Path) -> None:
    spec = tiny_job(tmp_path, 1, {}, 5)
    away = {"AWS_ENDPOINT_URL": "http://127.0.0.1:9", "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
    with cluster_up(tmp_path, cluster_of(nodes=1)) as state:
        site = Site(tmp_path, state)
        job = site.submit(with_data({**spec, "spares": 0, "env": away}, path="s3://bucket/text"))
        record = site.until_end(job)
    assert (
        record.status == "FAILED" and "DatasetError: s3://bucket/text.idx cannot be reached" in record.detail
    )
