"""The last tier: a job's checkpoints are copied to object storage behind training, and it resumes from there."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from commandline import cluster_up

from live import cluster_of
from myriad.storage.durable.remote import Remote
from objects import BUCKET, SECRET_KEY, Server, create_bucket, moto, moto_server
from recovery import Fault, Site, assert_unbroken, dataset, tiny_job

__all__ = ["moto", "moto_server"]

URL = f"s3://{BUCKET}/run"


def copied(url: str) -> list[int]:
    return [each.step for each in Remote(url).list_checkpoints() if each.committed]


@pytest.mark.slow
def test_a_node_and_the_directory_are_lost(moto: Server, tmp_path: Path) -> None:
    """No copies in memory, and no local checkpoint: the newcomer reads the copy, and no bit differs."""
    spec = tiny_job(dataset(tmp_path), 2, {"dp_replicate": 2}, 1500)
    spec["checkpoint"] |= {"every_steps": 600, "peer_every_steps": 0}
    with cluster_up(tmp_path, cluster_of(nodes=3, accelerators=1, leaves=2)) as state:
        site = Site(tmp_path, state)
        reference = site.submit(spec)
        assert site.until_end(reference).status == "SUCCEEDED", site.job(reference)
        spec["checkpoint"]["remote"] = URL
        job = site.submit(spec)
        site.until(job, lambda: 600 in copied(URL), "a copy of step 600")
        assert site.step(job) < 1150, "the copy came too late for this test"
        shutil.rmtree(site.dir.job_dir(job) / "checkpoints")
        found = assert_unbroken(site, job, reference, harmed(site, job))
        (recovery,) = found["recoveries"]
        assert recovery["restore_step"] == 600 and recovery["tier_counts"].get("durable"), recovery
        logs = "".join(file.read_text() for file in site.dir.job_dir(job).glob("logs/*.log"))
        assert f"reading it from {URL}/step-600.gen-1" in logs
        # What was due at the end has its copy as well, of the second generation; and no secret went anywhere.
        assert copied(URL)[0] == 1500, copied(URL)
        assert json.loads(site.run("show", job, "--json"))["alerts"] == []
        for file in [*state.rglob("*.log"), *state.glob("*.db*")]:
            assert SECRET_KEY.encode() not in file.read_bytes(), file


def harmed(site: Site, job: str) -> Fault:
    fault = Fault("kill-node", site.step(job), node=1)
    site.harm(job, fault)
    return fault


@pytest.mark.slow
def test_a_copy_that_fails_hurts_nothing(moto: Server, tmp_path: Path) -> None:
    """There is no such bucket: `show` says so, the job trains, and once there is one, its copy is made."""
    spec = tiny_job(dataset(tmp_path), 1, {}, 300, spares=0)
    spec["checkpoint"]["remote"] = "s3://nowhere/run"
    with cluster_up(tmp_path, cluster_of(nodes=1, accelerators=1)) as state:
        site = Site(tmp_path, state)
        job = site.submit(spec)

        def alert() -> str:
            return " ".join(json.loads(site.run("show", job, "--json"))["alerts"])

        site.until(job, lambda: "was not copied: there is no bucket nowhere" in alert(), "an alert")
        site.until_step(job, 200)

        create_bucket(moto, "nowhere")
        record = site.until_end(job)
        assert record.status == "SUCCEEDED" and record.restarts == 0, record
        assert copied("s3://nowhere/run")[0] == 300
