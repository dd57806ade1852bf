"""The controller dies and comes back: the job never notices, and nothing is started twice."""

from __future__ import annotations

import os
import signal
import sys
import uuid
from pathlib import Path
from typing import Any

import pytest

import leaks
from live import LiveCluster, cluster_of
from myriad.control.records import GenerationRecord, JobRecord
from myriad.control.status import JobStatus
from myriad.runtime.admin import AdminRefused, ControllerUnreachable
from myriad.runtime.store import StateReader

CRASH = Path(__file__).with_name("crash_controller.py")
# Each rank notes its starts by generation, then waits for the go of the test.
COUNTED = 'echo "$MYRIAD_GENERATION $RANK" >> "$MYRIAD_JOB_DIR/starts"; while [ ! -e "$MYRIAD_JOB_DIR/go" ]; do sleep 0.02; done'


def starts(cluster: LiveCluster, job: str) -> list[str]:
    path = cluster.state_dir.job_dir(job) / "starts"
    return sorted(path.read_text().split("\n")[:-1]) if path.exists() else []


def go(cluster: LiveCluster, job: str) -> None:
    (cluster.state_dir.job_dir(job) / "go").touch()


def all_ranks(cluster: LiveCluster, job: str, count: int) -> None:
    """The pids of all ranks of the current generation are known to the controller."""
    cluster.wait_for(job, lambda j: len(cluster.pids(job)) == count and j.stage == "", what="all ranks run")


@pytest.mark.parametrize("kill", [True, False], ids=["SIGKILL", "SIGTERM"])
def test_the_job_runs_on_without_its_controller(state_root: Path, kill: bool) -> None:
    with LiveCluster(state_root, cluster_of(2)) as cluster:
        job = cluster.submit(nodes=2, command=COUNTED)
        cluster.wait_for_status(job, JobStatus.RUNNING)
        all_ranks(cluster, job, 2)
        pids, before = cluster.pids(job), cluster.job(job)
        with cluster.reader() as reader:
            rows = reader.last_seq()
        cluster.kill_controller(signal.SIGKILL if kill else signal.SIGTERM)
        with pytest.raises(ControllerUnreachable):
            cluster.admin.call("ping")
        assert not any(map(leaks.is_gone, pids.values()))
        cluster.start_controller()
        cluster.wait("the agents are back", lambda r: all(n.connected for n in cluster.nodes().values()))
        assert cluster.pids(job) == pids and cluster.job(job) == before
        with cluster.reader() as reader:
            assert len(reader.journal(limit=10_000)) > rows, "the history goes on"
        go(cluster, job)
        assert cluster.wait_for_end(job).status is JobStatus.SUCCEEDED
        assert starts(cluster, job) == ["1 0", "1 1"]


def test_a_job_that_ends_in_the_absence_is_noticed(state_root: Path) -> None:
    with LiveCluster(state_root, cluster_of(2)) as cluster:
        good = cluster.submit(nodes=1, command=COUNTED)
        bad = cluster.submit(nodes=1, command=COUNTED + "; exit 3")
        for job in (good, bad):
            cluster.wait_for_status(job, JobStatus.RUNNING)
        cluster.kill_controller()
        for job in (good, bad):
            go(cluster, job)
        cluster.start_controller()
        assert cluster.wait_for_end(good).status is JobStatus.SUCCEEDED
        ended = cluster.wait_for_end(bad)
        assert ended.status is JobStatus.FAILED and ended.exit_code == 3
        assert starts(cluster, good) == ["1 0"]


def test_an_agent_that_dies_in_the_absence_is_a_lost_node(state_root: Path) -> None:
    with LiveCluster(state_root, cluster_of(3)) as cluster:
        job = cluster.submit(nodes=2, spares=1, command=COUNTED)
        cluster.wait_for_status(job, JobStatus.RUNNING)
        all_ranks(cluster, job, 2)
        agent = int(
            (cluster.state_dir.node_dir("n1") / "agent.json").read_text().split('"pid": ')[1].split(",")[0]
        )
        cluster.kill_controller()
        os.kill(agent, signal.SIGKILL)
        cluster.start_controller()
        cluster.wait_for(
            job, lambda j: j.generation == 2 and j.status is JobStatus.RUNNING, what="generation 2"
        )
        go(cluster, job)
        assert cluster.wait_for_end(job).status is JobStatus.SUCCEEDED
        assert starts(cluster, job) == ["1 0", "1 1", "2 0", "2 1"]
        assert cluster.generations(job)[0].culprit_node == "n1"


def test_a_second_controller_on_the_same_state_says_so_and_leaves(state_root: Path) -> None:
    with LiveCluster(state_root, cluster_of(1)) as cluster:
        first = cluster.controller
        cluster.start_controller(wait=False)
        second, cluster.controller = cluster.controller, first
        assert second is not None and second.wait(20) == 1
        want = f"another controller is running on the state {state_root}"
        assert want in cluster.state_dir.log("controller").read_text()
        cluster.admin.call("ping")


def test_down_right_after_a_restart_reaches_every_agent(state_root: Path) -> None:
    """They have not dialled again yet when they are told to go."""
    with LiveCluster(state_root, cluster_of(2)) as cluster:
        cluster.kill_controller()
        cluster.down()


# ---------------------------------------------------------------- at every commit


def scripted_life(root: Path, moment: str = "before", number: int = 0) -> tuple[dict[str, Any], int]:
    """Submit, run, a worker killed, recovery, finish. Returns what came of it, and how many commits it took.

    The controller dies before or after commit ``number`` (0: not at all) and is started again; requests are
    repeated until they are answered, as a client does.
    """
    with LiveCluster(root, cluster_of(2, heartbeat_s=1.0)) as cluster:
        cluster.kill_controller(signal.SIGTERM)
        cluster.start_controller((sys.executable, str(CRASH), moment, str(number)), wait=False)
        request = uuid.uuid4().hex
        job = insist(
            cluster, "submit", request=request, spec={"name": "life", "nodes": 2, "command": COUNTED}
        )["job"]
        running(cluster, job, 1)
        insist(cluster, "inject", kind="kill-worker", target=f"{job}/1")
        running(cluster, job, 2)
        go(cluster, job)
        cluster.wait("the end of the job", lambda r: alive(cluster) and ended(r, job))
        commits = int((root / "commits").read_text())
        cluster.kill_controller()  # the one that takes the cluster down is not to die
        cluster.start_controller()
        cluster.wait("the agents are back", lambda r: all(n.connected for n in cluster.nodes().values()))
        return outcome(cluster, job), commits


def alive(cluster: LiveCluster) -> bool:
    """Start the controller again if it has died; always true."""
    assert cluster.controller is not None
    if cluster.controller.poll() is not None:
        cluster.start_controller()
    return True


def insist(cluster: LiveCluster, op: str, **arguments: Any) -> dict[str, Any]:
    """Ask until it is answered. A fault that was done already finds no target and is not done again."""
    answer: dict[str, Any] = {}

    def answered(_: StateReader) -> bool:
        nonlocal answer
        alive(cluster)
        if op == "inject" and cluster.generations("j1")[0].verdict_s is not None:
            return True
        try:
            answer = cluster.admin.call(op, **arguments)
        except ControllerUnreachable:
            return False
        except AdminRefused as refusal:
            return op == "inject" and refusal.code == "not_found"
        return True

    cluster.wait(f"an answer to {op}", answered)
    return answer


def running(cluster: LiveCluster, job: str, generation: int) -> None:
    """All ranks of the generation have started and the controller knows it."""

    def runs(reader: StateReader) -> bool:
        alive(cluster)
        record = reader.record(JobRecord, job)
        assert record is not None
        noted = [line for line in starts(cluster, job) if line.startswith(f"{generation} ")]
        arrived = record.generation == generation and record.status is JobStatus.RUNNING
        return arrived and len(noted) == 2 and len(cluster.pids(job)) == 2

    cluster.wait(f"generation {generation} of {job} runs", runs)


def ended(reader: StateReader, job: str) -> bool:
    record = reader.record(JobRecord, job)
    return record is not None and record.status.final


def outcome(cluster: LiveCluster, job: str) -> dict[str, Any]:
    """Everything that may not depend on when the controller was killed: all but times and process ids."""
    record = cluster.job(job)
    with cluster.reader() as reader:
        generations = reader.records(GenerationRecord).values()
        jobs = list(reader.records(JobRecord))
    return {
        "jobs": jobs,
        "status": (record.status, record.reason, record.detail, record.exit_code),
        "counts": (record.generation, record.restarts, record.world_size),
        "starts": starts(cluster, job),
        "generations": [
            (g.generation, g.nodes, g.cause, g.culprit_node, g.culprit_rank) for g in generations
        ],
        "nodes": {name: (node.state, node.job) for name, node in cluster.nodes().items()},
    }


def test_a_scripted_life(state_root: Path) -> None:
    found, commits = scripted_life(state_root)
    assert found["status"][0] is JobStatus.SUCCEEDED and found["counts"] == (2, 1, 2)
    assert found["starts"] == ["1 0", "1 1", "2 0", "2 1"]
    assert commits > 10


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_killed_before_and_after_every_commit(tmp_path: Path) -> None:
    """About 25 commits, 3 s a life: under three minutes."""
    want, commits = scripted_life(tmp_path / "whole")
    for number in range(1, commits + 1):
        for moment in ("before", "after"):
            found, _ = scripted_life(tmp_path / f"{moment}-{number}", moment, number)
            assert found == want, f"killed {moment} commit {number}"
