"""A job on packed documents: built by the command, it loses a worker, and ends as the one that lost nothing."""

from __future__ import annotations

import json
import os
import random
import sysconfig
from pathlib import Path

import pytest
from commandline import cluster_up, myriad

from live import cluster_of
from recovery import Site, assert_unbroken, drawn, tiny_job

SEED = int(os.environ.get("MYRIAD_SEED", "1"))


@pytest.mark.slow
def test_packed_documents(tmp_path: Path) -> None:
    source = Path(sysconfig.get_paths()["stdlib"]) / "asyncio"
    lines = [
        line for file in sorted(source.glob("*.py")) for line in file.read_text().splitlines() if line.strip()
    ]
    (tmp_path / "lines.jsonl").write_text("\n".join(json.dumps({"text": line}) for line in lines))
    built = myriad(
        "data", "build", tmp_path / "lines.jsonl", "--out", tmp_path / "text", "--pack", "64", cwd=tmp_path
    )
    assert built.code == 0 and "packed for 64 tokens" in built.out, built
    shown = json.loads(myriad("data", "show", tmp_path / "text", "--json", cwd=tmp_path).out)
    assert shown["packing"]["efficiency"] > 0.95 and shown["packing"]["sequence_length"] == 64, shown
    spec = tiny_job(tmp_path / "text", 2, {"tp": 2}, 200)
    spec["data"] |= {"sequence_length": 64, "packing": "documents"}
    draw = random.Random(SEED)
    fault = drawn(draw, spec, "kill-worker", rank=draw.randrange(2))
    with cluster_up(tmp_path, cluster_of(nodes=3, accelerators=1, leaves=2)) as state:
        site = Site(tmp_path, state)
        reference = site.submit(spec)
        assert site.until_end(reference).status == "SUCCEEDED", site.job(reference)
        job = site.submit(spec)
        site.harm(job, fault)
        report = assert_unbroken(site, job, reference, fault)
        spec["data"]["packing"] = "none"
        across = site.submit(spec)
        site.until_end(across)
        assert site.report(across, reference)["losses"] != report["losses"]  # negative control
        spec["data"] |= {"sequence_length": 32, "packing": "documents"}
        refused = site.submit(spec)
        assert site.until_end(refused).status == "FAILED"
        assert "build it with `myriad data build --pack 32`" in site.run("show", refused)
