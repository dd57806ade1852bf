"""An unmodified DDP program loses a node, goes on from its own checkpoint, and ends with the same weights."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest
import torch
from commandline import EXAMPLES, Background, by_hand, myriad, write

from live import cluster_of

EXAMPLE = EXAMPLES / "any_command"
STEPS, SAVE_EVERY = 120, 10  # job.yaml's; asserted below by what the reference leaves behind


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The hash of the weights after the program ran in two plain processes, without Myriad and without a fault."""
    folder = tmp_path_factory.mktemp("unbroken")
    by_hand(EXAMPLE / "train_ddp.py", "--pause", 0, cwd=folder, processes=2)
    assert saved_step(folder / "runs" / "checkpoint.pt") == STEPS
    return (folder / "runs" / "weights.sha256").read_text()


def saved_step(file: Path) -> int:
    return int(torch.load(file, weights_only=True)["step"]) if file.exists() else 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_unmodified_script_survives_a_lost_node(seed: int, tmp_path: Path, unbroken: str) -> None:
    draw = random.Random(seed)
    victim, step = f"n{seed % 2}", draw.randrange(SAVE_EVERY, STEPS // 2)
    folder = Path(shutil.copytree(EXAMPLE, tmp_path / "job", ignore=shutil.ignore_patterns("runs")))
    cluster = write(folder / "cluster.yaml", cluster_of(nodes=3))
    checkpoint = folder / "runs" / "checkpoint.pt"

    with Background("run", "job.yaml", "--cluster", cluster, "--state", "state", "--json", cwd=folder) as run:
        run.until(f"a checkpoint of step {step} or later", lambda: saved_step(checkpoint) >= step or None)
        killed = myriad("inject", "kill-node", victim, "--state", "state", cwd=folder)
        assert killed.code == 0, killed
        ended = run.end()

    assert ended.code == 0, ended.err
    job, report = ended.json()["job"], ended.json()["report"]
    assert (job["status"], job["restarts"], job["lost"]) == ("SUCCEEDED", 1, [victim]), job
    assert job["generations"][0]["replacement"] == {victim: "n2"}
    assert (folder / "runs" / "weights.sha256").read_text() == unbroken
    assert report["ledger"]["running_unattributed"] > 0 and report["ledger"].get("compute", 0) == 0
    owned = report["wall_time_s"] * report["accelerators"]
    assert sum(report["ledger"].values()) == pytest.approx(owned, rel=1e-3)
    begins = starts(folder / "state" / "jobs" / "j1" / "logs" / "rank-00000.log")
    assert begins[0] == 0 and begins[1] >= step - step % SAVE_EVERY, begins


def starts(log: Path) -> list[int]:
    """The steps after which rank 0 began, one for each start."""
    return [
        int(line.split()[-1])
        for line in log.read_text().splitlines()
        if line.startswith("rank 0 of 2 begins")
    ]
