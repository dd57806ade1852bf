"""Stories of loss: a job on a real cluster, driven through the command line, that loses something and must
end exactly as the job that lost nothing. A fault is one line: ``Fault("kill-node", node=2, step=7)``.
"""

from __future__ import annotations

import json
import random
import sysconfig
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from commandline import DEADLINE_S, myriad, write

from myriad.control.records import AllocationRecord, JobRecord, NodeRecord
from myriad.runtime.paths import StateDir
from myriad.runtime.store import StateReader

POLL_S = 0.02
# Of one job on a loaded machine of two cores; an idle one needs about ten seconds.
JOB_DEADLINE_S = 150.0


@dataclass(frozen=True)
class Fault:
    """Harm done once the job has finished ``step``: to the ``node``-th node of its placement or to a rank."""

    kind: str
    step: int
    node: int | None = None
    rank: int | None = None


def drawn(draw: random.Random, spec: dict[str, Any], kind: str, **target: int) -> Fault:
    """A fault after a step from the seed: beyond the first checkpoint, in the first half of the job."""
    first = spec["checkpoint"]["every_steps"]
    return Fault(kind, draw.randrange(first + 1, spec["optimizer"]["steps"] // 2), **target)


def dataset(folder: Path) -> Path:
    """A token dataset of a few stdlib sources, built by the command; its prefix."""
    source = Path(sysconfig.get_paths()["stdlib"]) / "asyncio"
    built = myriad("data", "build", source, "--out", folder / "text", cwd=folder)
    assert built.code == 0, built
    return folder / "text"


def tiny_job(data: Path, nodes: int, layout: dict[str, int], steps: int, **keys: Any) -> dict[str, Any]:
    """A small model job with one spare, saved in memory after each step and five times durably."""
    return {
        "name": "tiny",
        "nodes": nodes,
        "spares": 1,
        "model": {"layers": 2, "dim": 32, "heads": 4, "kv_heads": 2, "ffn_dim": 64, "vocab_size": 258},
        "layout": layout,
        "data": {"path": str(data), "sequence_length": 32, "global_batch": 8},
        "optimizer": {"steps": steps, "learning_rate": 1e-3, "warmup_steps": 2},
        "checkpoint": {"every_steps": steps // 5, "snapshot_every_steps": 1, "peer_every_steps": 10},
        **keys,
    }


@dataclass
class Site:
    """A cluster that is up, seen by a test."""

    folder: Path
    state: Path
    dir: StateDir = field(init=False)

    def __post_init__(self) -> None:
        self.dir = StateDir(self.state)

    def run(self, *words: object) -> str:
        """One command on this state that has to succeed; its output."""
        done = myriad(*words, "--state", self.state, cwd=self.folder)
        assert done.code == 0, done
        return done.out

    def submit(self, spec: dict[str, Any]) -> str:
        return self.run("submit", write(self.folder / "job.yaml", spec)).strip()

    def job(self, job: str) -> JobRecord:
        with StateReader(self.dir) as reader:
            record = reader.record(JobRecord, job)
        assert record is not None
        return record

    def step(self, job: str) -> int:
        """The newest finished step that has been reported."""
        with StateReader(self.dir) as reader:
            return max((report.step for report in reader.last_reports(job)), default=0)

    def until_step(self, job: str, step: int) -> None:
        self.until(job, lambda: self.step(job) >= step, f"step {step}")

    def until(self, job: str, done: Any, what: str) -> None:
        deadline = time.monotonic() + JOB_DEADLINE_S
        while not done():
            record = self.job(job)
            assert not record.status.final and time.monotonic() < deadline, f"{what} never came: {record}"
            time.sleep(POLL_S)

    def until_end(self, job: str) -> JobRecord:
        deadline = time.monotonic() + JOB_DEADLINE_S
        while not (record := self.job(job)).status.final:
            assert time.monotonic() < deadline, f"{job} did not end: {record}"
            time.sleep(POLL_S)
        return record

    def harm(self, job: str, fault: Fault) -> None:
        """Do it once the job is far enough."""
        self.until_step(job, fault.step)
        if fault.rank is not None:
            self.run("inject", fault.kind, f"{job}/{fault.rank}")
            return
        assert fault.node is not None
        with StateReader(self.dir) as reader:
            allocation = reader.record(AllocationRecord, f"{job}/1")
        assert allocation is not None
        self.run("inject", fault.kind, allocation.nodes[fault.node])

    def result(self, job: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.dir.job_dir(job) / "result.json").read_text())
        return found

    def report(self, job: str, reference: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.run("report", job, "--reference", reference, "--json"))
        return found

    def repair(self) -> None:
        """Bring lost nodes back, and wait until they have joined."""
        with StateReader(self.dir) as reader:
            down = [n.name for n in reader.records(NodeRecord).values() if n.state == "down"]
        for node in down:
            self.run("undrain", node)
        deadline = time.monotonic() + DEADLINE_S
        while True:
            with StateReader(self.dir) as reader:
                if all(n.state == "free" for n in reader.records(NodeRecord).values()):
                    return
            assert time.monotonic() < deadline, "the nodes did not come back"
            time.sleep(POLL_S)


def assert_unbroken(site: Site, job: str, reference: str, fault: Fault) -> dict[str, Any]:
    """The job has recovered, and nothing tells it from the run that lost nothing; its report."""
    record = site.until_end(job)
    assert record.status == "SUCCEEDED" and record.restarts == 1, (fault, record)
    found = site.report(job, reference)
    assert found["losses"] and None not in found["losses"], fault
    assert found["losses"] == found["reference_losses"], fault
    assert site.result(job)["final_sha256"] == site.result(reference)["final_sha256"], fault
    assert found["sample_ids_seen_once"] is True, fault
    owned = found["wall_time_s"] * found["accelerators"]
    assert abs(sum(found["ledger"].values()) - owned) <= 1e-3 * owned, fault
    (recovery,) = found["recoveries"]
    phases = ("detection", "fencing", "start", "rendezvous", "restore", "first_step")
    assert set(recovery["seconds"]) == set(phases), recovery
    redone = [e["step"] for e in found["executions"] if not e["kept"]]
    assert (found["ledger"]["lost_work"] > 0) >= bool(redone)
    return found
