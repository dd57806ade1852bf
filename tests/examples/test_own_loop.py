"""A plain PyTorch loop with the session's lines: restored bit for bit by Myriad, and unchanged without it."""

from __future__ import annotations

import difflib
import json
import random
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from commandline import EXAMPLES, Background, by_hand, write

from live import cluster_of
from myriad.runtime.admin import AdminClient
from myriad.runtime.paths import StateDir
from myriad.runtime.store import StateReader

EXAMPLE = EXAMPLES / "own_loop"
STEPS, SAVE_EVERY = 60, 20  # train.py's
COPY_EVERY = 10  # the session's own choice
MAX_ADDED = 10  # lines


@dataclass(frozen=True)
class Result:
    """What a run leaves behind: the loss of each step as float hex, and the hash of the weights."""

    losses: list[str]
    sha256: str


def plainly(script: str, folder: Path, processes: int) -> Result:
    """Run without Myriad."""
    first, *_ = by_hand(EXAMPLE / script, cwd=folder, processes=processes)
    return Result([line.split()[-1] for line in first.splitlines()], (folder / "weights.sha256").read_text())


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Result:
    """``plain.py`` in two processes."""
    result = plainly("plain.py", tmp_path_factory.mktemp("unbroken"), processes=2)
    assert len(result.losses) == STEPS
    return result


def test_train_is_plain_with_at_most_ten_lines_more() -> None:
    plain, train = (code_of(EXAMPLE / name) for name in ("plain.py", "train.py"))
    changes = [line for line in difflib.ndiff(plain, train) if line[0] in "+-"]
    assert [line for line in changes if line[0] == "-"] == []
    assert 1 <= len(changes) <= MAX_ADDED, changes
    assert all("# myriad" in line for line in changes), changes


def code_of(file: Path) -> list[str]:
    """The lines below the module's docstring without indentation (a ``with`` around lines moves them) and gaps."""
    _, _, code = file.read_text().split('"""', 2)
    return [line.strip() for line in code.splitlines() if line.strip()]


@pytest.mark.slow
def test_train_outside_myriad_equals_plain(tmp_path: Path) -> None:
    assert plainly("train.py", tmp_path, processes=1) == plainly("plain.py", tmp_path, processes=1)


@dataclass(frozen=True)
class Story:
    name: str
    fault: tuple[str, str]
    lost: list[str]
    tiers: dict[str, int]  # ranks by the tier they are restored from
    max_redone: int  # steps


STORIES = [
    # A step whose snapshot one of the agents has not taken yet is not held by all ranks, so up to two are done again.
    Story(
        "the death of a worker costs no more than steps in flight",
        ("kill-worker", "j1/1"),
        [],
        {"memory": 2},
        2,
    ),
    Story(
        "the loss of a node goes back to the copies in another's memory",
        ("kill-node", "n0"),
        ["n0"],
        {"memory": 1, "peer": 1},
        2 * COPY_EVERY,
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.name)
def test_restored_bit_for_bit(story: Story, tmp_path: Path, unbroken: Result) -> None:
    step = random.Random(story.name).randrange(SAVE_EVERY + 2, 2 * SAVE_EVERY - 8)
    folder = Path(
        shutil.copytree(EXAMPLE, tmp_path / "job", ignore=shutil.ignore_patterns("runs", "*.sha256"))
    )
    cluster = write(folder / "cluster.yaml", cluster_of(nodes=3, heartbeat_s=0.2))

    with Background("run", "job.yaml", "--cluster", cluster, "--state", "state", "--json", cwd=folder) as run:
        state = StateDir(folder / "state")
        run.until(f"a report of step {step}", lambda: reported_step(state) >= step or None)
        kind, target = story.fault
        AdminClient(state).call("inject", kind=kind, target=target)
        ended = run.end()

    assert ended.code == 0, ended.err
    answer = ended.json()
    check_recovery(story, step, answer["job"])
    check_report(story, step, answer["report"], unbroken)
    assert (folder / "weights.sha256").read_text() == unbroken.sha256


def reported_step(state: StateDir) -> int:
    """The newest step whose loss has come to reports.db, which is there when the controller listens."""
    if not state.controller_file.exists():
        return 0
    with StateReader(state) as reader:
        return max((r.step for r in reader.last_reports("j1") if r.loss is not None), default=0)


def check_recovery(story: Story, step: int, job: dict[str, Any]) -> None:
    assert (job["status"], job["restarts"], job["lost"]) == ("SUCCEEDED", 1, story.lost), job
    assert job["durable_step"] == STEPS
    first, second = job["generations"]
    assert first["restore_step"] is None
    assert second["tiers"] == story.tiers, second
    if story.lost:
        assert second["restore_step"] % COPY_EVERY == 0 and second["restore_step"] > step - 2 * COPY_EVERY, (
            second
        )
    else:
        assert second["restore_step"] >= step, second


def check_report(story: Story, step: int, report: dict[str, Any], unbroken: Result) -> None:
    assert report["losses"] == unbroken.losses
    assert report["sample_ids_seen_once"] is True
    assert report["redone_losses_equal"] is not False
    assert report["redone_steps"] <= story.max_redone, json.dumps(report["recoveries"])
    if report["generations"][1]["restore_step"] < step:  # else the fault came late, after the next checkpoint
        assert report["redone_losses_equal"] is True
        assert report["redone_steps"] >= 1 and report["ledger"]["lost_work"] > 0
    assert report["ledger"].get("running_unattributed", 0) == 0 and report["ledger"]["compute"] > 0
    owned = report["wall_time_s"] * report["accelerators"]
    assert sum(report["ledger"].values()) == pytest.approx(owned, rel=1e-3)
