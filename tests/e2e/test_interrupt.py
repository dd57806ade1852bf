"""Ctrl-C on ``myriad run`` at any moment: exit code 130 and nothing left running (which the suite itself checks)."""

from __future__ import annotations

from pathlib import Path

import pytest
from commandline import Background, write

from live import cluster_of

MOMENTS = {
    "while the server starts": "server.log",
    "while the agents start": "nodes/n0",  # made just before the agent, which has written nothing yet
    "while the job runs": "jobs/j1/logs/rank-00000.log",
}


@pytest.mark.slow
@pytest.mark.parametrize("moment", MOMENTS)
def test_interrupted_run_takes_everything_down(moment: str, tmp_path: Path) -> None:
    cluster = write(tmp_path / "cluster.yaml", cluster_of(nodes=2))
    job = write(tmp_path / "job.yaml", {"name": "long", "nodes": 2, "command": ["sleep", "600"]})
    seen = tmp_path / "state" / MOMENTS[moment]
    with Background("run", job, "--cluster", cluster, "--state", "state", cwd=tmp_path) as run:
        run.until(str(seen), lambda: seen.exists() or None)
        run.interrupt()
        ended = run.end()
    assert (ended.code, ended.out) == (130, ""), ended
