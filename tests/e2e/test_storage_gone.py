"""Storage that is gone for a while: training goes on, the alert says why, and what is due at the end is written."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from commandline import cluster_up, myriad

from live import cluster_of
from recovery import POLL_S, Site, dataset, tiny_job

DEADLINE_S = 60.0


def alerts(site: Site, job: str) -> list[str]:
    found: list[str] = json.loads(site.run("show", job, "--json"))["alerts"]
    return found


def until_alert(site: Site, job: str, words: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while words not in " ".join(found := alerts(site, job)):
        assert time.monotonic() < deadline, (found, site.job(job))
        time.sleep(POLL_S)


@pytest.mark.parametrize(
    "until_the_end",
    (False, pytest.param(True, marks=pytest.mark.slow)),
    ids=("comes back", "is gone when the job would end"),
)
def test_training_goes_on(tmp_path: Path, until_the_end: bool) -> None:
    spec = tiny_job(dataset(tmp_path), 2, {"dp_replicate": 2}, 300)
    with cluster_up(tmp_path, cluster_of(nodes=3, accelerators=1, leaves=2)) as state:
        site = Site(tmp_path, state)
        job = site.submit(spec)
        folder = site.dir.job_dir(job) / "checkpoints"
        site.until(job, lambda: site.job(job).durable_step == 60, "a checkpoint")
        away = folder.rename(folder.with_name("away"))
        folder.write_text("what a mount that is gone leaves: not this directory")
        until_alert(site, job, " was not written: the checkpoint directory")
        site.until_step(job, 300 if until_the_end else 140)
        assert site.job(job).durable_step == 60 and site.job(job).status == "RUNNING", site.job(job)
        folder.unlink()
        away.rename(folder)
        record = site.until_end(job)
        assert record.status == "SUCCEEDED" and record.restarts == 0, record
        assert record.durable_step == 300 and alerts(site, job) == []
        listed = myriad("checkpoint", "ls", folder, "--json", cwd=tmp_path)
        newest = json.loads(listed.out)[0]
        assert (newest["step"], newest["committed"]) == (300, True)
