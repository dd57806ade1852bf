"""What was fenced stays fenced: a worker that sleeps through a recovery and wakes up changes nothing."""

from __future__ import annotations

import hashlib
import os
import signal
import time
from pathlib import Path

import pytest
from commandline import cluster_up

from live import cluster_of
from myriad.cluster.state import NodeState
from myriad.control.records import AllocationRecord, MemberRecord, NodeRecord
from myriad.engines.local import processes
from myriad.runtime.files import read_json
from myriad.runtime.store import StateReader
from myriad.storage.durable.manifest import is_committed, list_checkpoints
from recovery import JOB_DEADLINE_S, Site, dataset, tiny_job

STEPS = 120
EVERY = 10  # steps between durable checkpoints: many chances to catch one being written


def node_of_rank(site: Site, job: str, rank: int) -> str:
    with StateReader(site.dir) as reader:
        allocation = reader.record(AllocationRecord, f"{job}/1")
    assert allocation is not None
    return allocation.nodes[rank]


def pid_of_rank(site: Site, job: str, rank: int) -> int:
    with StateReader(site.dir) as reader:
        for member in reader.records(MemberRecord).values():
            if member.job == job and member.status is not None and rank in member.status.pids:
                return member.status.pids[rank]
    raise AssertionError(f"{job} has no running rank {rank}")


def stop_in_mid_save(site: Site, job: str, pids: list[int]) -> Path:
    """SIGSTOP the processes while a durable checkpoint is being written; the half-written folder."""
    folder = site.dir.job_dir(job) / "checkpoints"
    deadline = time.monotonic() + JOB_DEADLINE_S
    while True:
        assert time.monotonic() < deadline and not site.job(job).status.final, "never seen in mid-save"
        step = site.step(job) // EVERY * EVERY + EVERY
        save = folder / f"step-{step}.gen-1"
        soon = time.monotonic() + 1.0
        while time.monotonic() < soon:
            if save.exists() and not (save / "manifest.json").exists():
                processes.send_all(pids, signal.SIGSTOP)
                if not (save / "manifest.json").exists():
                    return save
                processes.send_all(pids, signal.SIGCONT)  # just too late: the next one
                break
            time.sleep(0.001)


def content(folder: Path) -> dict[str, str]:
    """Every file of the committed checkpoints with the hash of its bytes."""
    committed = [c for c in list_checkpoints(folder) if is_committed(c.path)]
    files = [f for c in committed for f in sorted(c.path.iterdir())]
    return {str(f.relative_to(folder)): hashlib.sha256(f.read_bytes()).hexdigest() for f in files}


@pytest.mark.slow
def test_a_whole_node_stopped_in_mid_save_wakes_up_after_the_recovery(tmp_path: Path) -> None:
    """Its agent is declared dead by its silence; awake again it is refused, and kills what it has."""
    spec = tiny_job(
        dataset(tmp_path),
        2,
        {"dp_replicate": 2},
        STEPS,
        checkpoint={"every_steps": EVERY, "snapshot_every_steps": 1},
    )
    with cluster_up(tmp_path, cluster_of(nodes=3, heartbeat_s=0.25)) as state:
        site = Site(tmp_path, state)
        reference, job = site.submit(spec), ""
        site.until_end(reference)
        job = site.submit(spec)
        site.until_step(job, 1)
        node = node_of_rank(site, job, 1)
        identity = read_json(site.dir.node_dir(node) / "agent.json")
        assert identity is not None
        group = processes.of_session(identity["pid"])
        torn = stop_in_mid_save(site, job, group)
        record = site.until_end(job)
        assert record.status == "SUCCEEDED" and record.restarts == 1, record
        before = content(torn.parent)
        result = site.result(job)
        processes.send_all(group, signal.SIGCONT)
        deadline = time.monotonic() + JOB_DEADLINE_S
        while any(processes.start_ticks(pid) is not None for pid in group):
            assert time.monotonic() < deadline, "the fenced node is still alive"
            time.sleep(0.05)
        assert content(torn.parent) == before and not is_committed(torn)
        assert site.result(job) == result
        assert result["final_sha256"] == site.result(reference)["final_sha256"]
        assert site.job(job) == record


@pytest.mark.slow
def test_a_worker_stopped_in_mid_save_is_dead_before_its_successor_starts(tmp_path: Path) -> None:
    spec = tiny_job(
        dataset(tmp_path),
        2,
        {"dp_replicate": 2},
        STEPS,
        checkpoint={"every_steps": EVERY, "snapshot_every_steps": 1},
    )
    with cluster_up(tmp_path, cluster_of(nodes=3)) as state:
        site = Site(tmp_path, state)
        reference = site.submit(spec)
        site.until_end(reference)
        job = site.submit(spec)
        site.until_step(job, 1)
        sleeper = pid_of_rank(site, job, 1)
        torn = stop_in_mid_save(site, job, [sleeper])
        site.run("inject", "kill-worker", f"{job}/0")
        site.until(job, lambda: site.job(job).generation == 2, "the second generation")
        with pytest.raises(ProcessLookupError):
            os.kill(sleeper, signal.SIGCONT)
        record = site.until_end(job)
        assert record.status == "SUCCEEDED" and record.restarts == 1, record
        assert not is_committed(torn)
        assert site.result(job)["final_sha256"] == site.result(reference)["final_sha256"]


@pytest.mark.slow
def test_a_node_that_is_stopped_for_good_can_be_had_back_and_leaves_nothing(tmp_path: Path) -> None:
    """It never hears that it was given up: the engine ends it when it is asked back, and so does the end of all."""

    def group(node: str) -> list[int]:
        identity = read_json(site.dir.node_dir(node) / "agent.json")
        assert identity is not None
        return processes.of_session(identity["pid"])

    def state_of(node: str) -> NodeRecord:
        with StateReader(site.dir) as reader:
            record = reader.record(NodeRecord, node)
        assert record is not None
        return record

    def until(node: str, state: NodeState) -> None:
        deadline = time.monotonic() + JOB_DEADLINE_S
        while state_of(node).state is not state:
            assert time.monotonic() < deadline, state_of(node)
            time.sleep(0.05)

    with cluster_up(tmp_path, cluster_of(nodes=2, heartbeat_s=0.2)) as state:
        site = Site(tmp_path, state)
        first, frozen = state_of("n0"), group("n0")
        processes.send_all(frozen, signal.SIGSTOP)
        until("n0", NodeState.DOWN)
        site.run("undrain", "n0")
        until("n0", NodeState.FREE)
        assert state_of("n0").incarnation != first.incarnation
        assert not any(processes.start_ticks(pid) is not None for pid in frozen)
        stopped = group("n1")
        processes.send_all(stopped, signal.SIGSTOP)
    assert not any(processes.start_ticks(pid) is not None for pid in stopped)
