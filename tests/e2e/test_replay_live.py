"""What a live controller has decided, decided once more: journals of real runs replay byte for byte.

A difference is a bug of the controller: a decision that depended on more than state, event and time.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from commandline import EXAMPLES, cluster_up, environment, myriad

from live import cluster_of
from myriad.cli import daemons
from myriad.control.journal import decode_event
from myriad.control.records import NodeRecord
from myriad.engines.local import processes
from myriad.runtime.files import read_json
from myriad.runtime.paths import StateDir
from myriad.runtime.store import JournalFile, StateReader
from recovery import JOB_DEADLINE_S, Site

FAULTS = 5
KINDS = ("kill-node", "kill-worker", "kill-agent", "stop")
NODES, RANKS = 5, 2
PAUSE_S_MAX = 1.5  # between two faults: some hit a job that runs, some one that is recovering
DEMO_DEADLINE_S = 400.0
POLL_S = 0.1

# Survives whatever happens to it: each generation waits for the same file.
PATIENT = {
    "name": "patient",
    "nodes": RANKS,
    "spares": 2,
    "command": 'while [ ! -e "$MYRIAD_JOB_DIR/go" ]; do sleep 0.05; done',
}


def assert_replays(state: Path, cwd: Path) -> dict[str, Any]:
    """``myriad simulate`` finds the journal identical; its document."""
    shown = myriad("simulate", "--journal", state, cwd=cwd)
    assert shown.code == 0, shown
    assert re.fullmatch(r"[\d,]+ events, [\d,]+ commands, [\d,]+ changes replayed: identical\n", shown.out)
    document: dict[str, Any] = myriad("simulate", "--journal", state, "--json", cwd=cwd).json()
    assert document["identical"] is True and document["difference"] is None, document
    return document


def recorded(state: Path) -> list[str]:
    """The classes of a journal's events."""
    with JournalFile(state) as journal:
        return [type(decode_event(row.event)).__name__ for row in journal.rows()]


# ---------------------------------------------------------------- the demo


@pytest.mark.slow
@pytest.mark.timeout(DEMO_DEADLINE_S + 60)
def test_the_demo_succeeds_and_its_journal_replays(tmp_path: Path) -> None:
    runs = tmp_path / "demo"
    try:
        demo = subprocess.run(
            [sys.executable, EXAMPLES / "demo" / "demo.py", "--seed", "7", "--runs", runs],
            env=environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=DEMO_DEADLINE_S,
            check=False,
        )
    finally:  # the demo does so itself unless it was cut off
        if (runs / "state" / "controller.json").exists():
            myriad("down", "--cancel-jobs", "--state", runs / "state", cwd=tmp_path)
    assert demo.returncode == 0, (demo.stdout, demo.stderr)
    report = json.loads((runs / "report.json").read_text())
    assert report["losses_equal_reference"] is True and len(report["recoveries"]) == 1
    assert_replays(runs / "state", tmp_path)
    events = recorded(runs / "state")
    assert events.count("JobSubmitted") == 2 and events.count("InjectRequested") == 1


# ---------------------------------------------------------------- faults from a seed


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_a_run_with_seeded_faults_replays(seed: int, tmp_path: Path) -> None:
    draw = random.Random(seed)
    crash_after = draw.randrange(FAULTS)
    with (
        nobody_left(StateDir(tmp_path / "state")),
        cluster_up(tmp_path, cluster_of(nodes=NODES, heartbeat_s=0.2)) as state,
    ):
        site = Site(tmp_path, state)
        job = site.submit(PATIENT)
        for number in range(FAULTS):
            time.sleep(draw.uniform(0.0, PAUSE_S_MAX))
            kind = draw.choice(KINDS)
            target = (
                f"{job}/{draw.randrange(RANKS)}" if kind == "kill-worker" else f"n{draw.randrange(NODES)}"
            )
            inject(site, kind, target)
            if number == crash_after:
                restart_controller(site)
        assert_replays(state, tmp_path)  # of a journal that is being written
        wake_up(site)
        (site.dir.job_dir(job) / "go").touch()
        repair(site)  # or there may be too few nodes to start on once more
        assert site.until_end(job).status == "SUCCEEDED", site.job(job)
    found = assert_replays(state, tmp_path)
    events = recorded(state)
    assert found["events"] == len(events)
    assert events.count("InjectRequested") == FAULTS and events.count("ControllerStarted") == 2


@contextmanager
def nobody_left(state: StateDir) -> Iterator[None]:
    """A node that was stopped hears nobody say that the cluster is down."""
    try:
        yield
    finally:
        daemons.end_agents(state, deadline_s=5.0)


def wake_up(site: Site) -> None:
    """Continue whatever was stopped: an agent that has been given up for lost comes back and is refused."""
    for agent in daemons.agents(site.dir):
        processes.send_all(processes.of_session(agent), signal.SIGCONT)


def inject(site: Site, kind: str, target: str) -> None:
    """As soon as there is something to harm: a lost node is brought back, a worker may have to start first."""

    def done() -> bool:
        repair(site)
        tried = myriad("inject", kind, target, "--state", site.state, cwd=site.folder)
        assert tried.code in (0, 3), tried
        return tried.code == 0

    until(done, f"something to {kind} at {target}")


def repair(site: Site) -> None:
    """Bring every lost node back, without waiting for it."""
    with StateReader(site.dir) as reader:
        down = [node.name for node in reader.records(NodeRecord).values() if node.state == "down"]
    for node in down:
        site.run("undrain", node)


def restart_controller(site: Site) -> None:
    """What it had in memory is gone; it goes on from its journal."""
    running = read_json(StateDir(site.state).controller_file)
    assert running is not None
    os.kill(int(running["pid"]), signal.SIGKILL)
    site.run("up")


def until(done: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + JOB_DEADLINE_S
    while not done():
        assert time.monotonic() < deadline, f"never came: {what}"
        time.sleep(POLL_S)
