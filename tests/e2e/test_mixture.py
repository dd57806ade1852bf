"""A job on a weighted mixture of two data sets: it loses a worker, and every sample of both still comes once."""

from __future__ import annotations

import os
import random
import sysconfig
from pathlib import Path

from commandline import cluster_up, myriad

from live import cluster_of
from recovery import Site, assert_unbroken, dataset, drawn, tiny_job

SEED = int(os.environ.get("MYRIAD_SEED", "1"))


def test_two_sources(tmp_path: Path) -> None:
    other = Path(sysconfig.get_paths()["stdlib"]) / "json"
    built = myriad("data", "build", other, "--out", tmp_path / "json", cwd=tmp_path)
    assert built.code == 0, built
    spec = tiny_job(dataset(tmp_path), 2, {"dp_replicate": 2}, 800)
    spec["data"] = {
        "sources": [{"path": str(tmp_path / "text"), "weight": 3}, {"path": str(tmp_path / "json")}],
        "sequence_length": 32,
        "global_batch": 8,
    }
    draw = random.Random(SEED)
    fault = drawn(draw, spec, "kill-worker", rank=draw.randrange(2))
    with cluster_up(tmp_path, cluster_of(nodes=3, accelerators=1, leaves=2)) as state:
        site = Site(tmp_path, state)
        reference = site.submit(spec)
        assert site.until_end(reference).status == "SUCCEEDED", site.job(reference)
        job = site.submit(spec)
        site.harm(job, fault)
        assert_unbroken(site, job, reference, fault)  # the report knows the mixture's order, sample by sample
