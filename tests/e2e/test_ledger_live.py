"""The ledger of live jobs: a planted delay is found where it was planted, and the lines sum to what was owned.

``planted.py`` sleeps in one place; the same job without the sleep is its base. The difference of the place's line
must be 90 to 115 % of what the ranks have slept (design 10). A second tally, made here from the raw step reports
alone, must agree with the ledger; the last tests show that a dropped report and a misplaced second turn these red.
"""

from __future__ import annotations

import json
import math
import sys
import sysconfig
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
from commandline import cluster_up, myriad, write

from live import cluster_of
from myriad.control.accounting import JobRecords, with_last_signs
from myriad.control.records import GenerationRecord, JobRecord
from myriad.runtime.paths import StateDir
from myriad.runtime.store import StateReader
from myriad.server.report import build_report
from myriad.server.report_source import read_job
from myriad.spec.messages import StepReport

PROGRAM = Path(__file__).parent / "planted.py"
RANKS = 3
STEPS = 20
PLANT_S = 0.25
POLL_S = 0.05
JOB_DEADLINE_S = 240.0  # of a job that takes 10 s on an idle machine

SUM_TOLERANCE = 1e-3  # of the accelerator-seconds owned
OTHER_MOST = 0.02  # of them, where a run is long enough that its last second does not weigh
IN_STEPS = (
    "compute",
    "exposed_communication",
    "pipeline_bubble",
    "straggler_wait",
    "data_wait",
    "checkpoint_wait",
    "evaluation",
)


@dataclass(frozen=True)
class Run:
    """A job that has ended: its report, what that is made of, and what its ranks slept by place."""

    report: dict[str, Any]
    records: JobRecords
    raw: tuple[StepReport, ...]
    slept_s: dict[str, float]

    @property
    def ledger(self) -> dict[str, float]:
        found: dict[str, float] = self.report["ledger"]
        return found

    def rebuilt(self, raw: Sequence[StepReport]) -> Run:
        """The same job, had these step reports arrived instead."""
        report = build_report(self.records, raw, now_s=0.0)
        return Run(report, self.records, self.raw, self.slept_s)


@dataclass
class Cluster:
    """A cluster, driven by the command line alone."""

    folder: Path
    state: Path
    planted_runs: dict[str, Run] = field(default_factory=dict)

    def planted(self, place: str) -> Run:
        """The run that is slow in one place ("" for the base, which is slow in none); made once."""
        if place not in self.planted_runs:
            env = {"PLANT": place, "PLANT_SECONDS": PLANT_S, "PLANT_STEPS": STEPS}
            self.planted_runs[place] = self.end(self.submit_program(place or "base", **env))
        return self.planted_runs[place]

    def submit_program(self, name: str, spares: int = 0, **env: object) -> str:
        command = [sys.executable, str(PROGRAM)]
        variables = {key: str(value) for key, value in env.items()}
        return self.submit(
            {"name": name, "nodes": RANKS, "spares": spares, "command": command, "env": variables}
        )

    def submit(self, spec: dict[str, Any]) -> str:
        file = write(self.folder / "job.yaml", spec)
        done = myriad("submit", file, "--state", self.state, cwd=self.folder)
        assert done.code == 0, done
        return done.out.strip()

    def end(self, job: str) -> Run:
        """Wait for the end of a job, which must be a good one."""
        directory, words = StateDir(self.state), ("--state", self.state)
        followed = myriad("logs", job, "-f", *words, cwd=self.folder, deadline_s=JOB_DEADLINE_S)
        shown = myriad("report", job, "--json", *words, cwd=self.folder)
        assert (followed.code, shown.code) == (0, 0), (followed, shown)
        with StateReader(directory) as reader:
            record = reader.record(JobRecord, job)
            assert record is not None
            raw = tuple(reader.step_reports(job))
            records = with_last_signs(read_job(reader, record), raw)
        slept: Counter[str] = Counter()
        for file in directory.job_dir(job).glob("planted-*.json"):
            slept.update(json.loads(file.read_text()))
        return Run(shown.json(), records, raw, slept)

    def node_of_last_rank(self, job: str) -> str:
        with StateReader(StateDir(self.state)) as reader:
            (generation,) = [g for g in reader.records(GenerationRecord).values() if g.job == job]
        return generation.nodes[-1]

    def wait_for_step(self, job: str, step: int) -> None:
        deadline = time.monotonic() + JOB_DEADLINE_S
        with StateReader(StateDir(self.state)) as reader:
            while max((r.step for r in reader.last_reports(job)), default=0) < step:
                assert time.monotonic() < deadline, f"{job} never came to step {step}"
                time.sleep(POLL_S)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("ledger")
    with cluster_up(folder, cluster_of(nodes=RANKS + 1)) as state:
        yield Cluster(folder, state)


# ------------------------------------------------------------------ what must hold


def wrong_sum(run: Run, accelerators: int) -> str:
    """What is wrong with the sum of the lines, or nothing."""
    (allocation,) = run.records.allocations
    assert allocation.released_s is not None
    owned = (allocation.released_s - allocation.granted_s) * accelerators
    found = math.fsum(run.ledger.values())
    said = run.report["wall_time_s"] * run.report["accelerators"]
    if abs(found - owned) > SUM_TOLERANCE * owned or abs(said - owned) > SUM_TOLERANCE * owned:
        return f"lines sum to {found}, the report says {said}, the job owned {owned}"
    return ""


def wrong_tally(run: Run) -> str:
    """What is wrong with the lines that steps fill, by the raw reports of the steps that counted."""
    last = {}  # (step, rank) -> its last execution, which counts
    for report in sorted(run.raw, key=lambda r: r.generation):
        last[report.step, report.rank] = report
    parts = ("compute_s", "communication_s", "data_s", "checkpoint_s", "evaluation_s")
    told = math.fsum(getattr(report, part) for report in last.values() for part in parts)
    found = math.fsum(run.ledger[cause] for cause in IN_STEPS)
    owned = math.fsum(run.ledger.values())
    return "" if abs(found - told) <= SUM_TOLERANCE * owned else f"steps took {told}, the ledger has {found}"


def wrong_place(run: Run, base: Run, place: str, cause: str, waiting: int = 1) -> str:
    """What is wrong with where a delay landed. ``waiting``: accelerators that each second slept costs."""
    planted = run.slept_s[place] * waiting
    assert planted > 1.0, "too little to be told from noise"
    share = (run.ledger[cause] - base.ledger[cause]) / planted
    return "" if 0.9 <= share <= 1.15 else f"{share:.3f} of {planted:.2f} planted is in {cause}: {run.ledger}"


# ------------------------------------------------------------------ stories

STORIES = [  # place, the line it belongs to, accelerators that wait for each second slept
    ("loader", "data_wait", 1),
    ("rank", "straggler_wait", RANKS - 1),
    ("save", "checkpoint_wait", 1),
    ("collective", "exposed_communication", 1),
]


@pytest.mark.slow
@pytest.mark.parametrize(("place", "cause", "waiting"), STORIES, ids=[s[0] for s in STORIES])
def test_a_delay_lands_in_its_cause(place: str, cause: str, waiting: int, cluster: Cluster) -> None:
    base, run = cluster.planted(""), cluster.planted(place)
    assert wrong_sum(run, RANKS) == "" and wrong_tally(run) == ""
    assert wrong_place(run, base, place, cause, waiting) == ""


@pytest.mark.slow
def test_a_dropped_report_turns_the_tally_red(cluster: Cluster) -> None:
    run = cluster.planted("save")
    assert run.rebuilt(run.raw).ledger == run.ledger and wrong_tally(run) == ""
    dropped = max(run.raw, key=lambda report: report.wall_s)
    poorer = run.rebuilt([report for report in run.raw if report is not dropped])
    assert wrong_tally(poorer) != ""
    assert wrong_sum(poorer, RANKS) == "", "its time is still owned: it is nobody's, hence other"
    assert poorer.ledger["other"] > run.ledger["other"]


@pytest.mark.slow
def test_seconds_in_the_wrong_part_turn_the_place_red(cluster: Cluster) -> None:
    base, run = cluster.planted(""), cluster.planted("loader")
    moved = [
        msgspec.structs.replace(r, data_s=0.0, compute_s=r.compute_s + r.data_s, wall_s=r.wall_s)
        for r in run.raw
    ]
    assert wrong_place(run, base, "loader", "data_wait") == ""
    assert wrong_place(run.rebuilt(moved), base, "loader", "data_wait") != ""


@pytest.mark.slow
def test_a_lost_node_costs_detection_recovery_and_lost_work(cluster: Cluster) -> None:
    env = {"PLANT": "rank", "PLANT_SECONDS": 0.2, "PLANT_STEPS": 45, "PLANT_SAVE_EVERY": 20}
    job = cluster.submit_program("lost", spares=1, **env)
    cluster.wait_for_step(job, 21)  # the next save is four seconds away
    lost = cluster.node_of_last_rank(job)
    killed = myriad("inject", "kill-node", lost, "--state", cluster.state, cwd=cluster.folder)
    assert killed.code == 0, killed
    run = cluster.end(job)

    assert wrong_sum(run, RANKS + 1) == "" and wrong_tally(run) == ""
    (recovery,) = run.report["recoveries"]
    assert (recovery["restore_step"], recovery["culprit_node"]) == (20, lost), recovery
    ledger = run.ledger
    assert all(ledger[cause] > 0 for cause in ("detection", "recovery", "spare_idle", "node_down")), ledger
    assert ledger["detection"] + ledger["recovery"] == pytest.approx(
        RANKS * ready_after_failure_s(run) - dead_before_verdict_s(run), rel=SUM_TOLERANCE
    )
    thrown = [r for r in run.raw if r.generation == 1 and r.step > recovery["restore_step"]]
    assert run.report["redone_steps"] == len({r.step for r in thrown}) > 0
    assert ledger["lost_work"] >= 0.9 * math.fsum(r.wall_s for r in thrown)


def ready_after_failure_s(run: Run) -> float:
    """From the last sign of life to all ranks having restored."""
    first, second = run.records.generations
    assert first.failed_s is not None and second.restored_s is not None
    return second.restored_s - first.failed_s


def dead_before_verdict_s(run: Run) -> float:
    """What of it was the dead node's, which is its own line."""
    first = run.records.generations[0]
    assert first.failed_s is not None and first.verdict_s is not None
    return first.verdict_s - first.failed_s


@pytest.mark.slow
def test_the_built_in_trainer_on_a_pipeline_leaves_little_unexplained(tmp_path: Path) -> None:
    source = sorted(Path(sysconfig.get_path("stdlib")).glob("[a-c]*.py"))
    built = myriad("data", "build", *source, "--out", "text", cwd=tmp_path)
    assert built.code == 0, built
    spec = {
        "name": "pipeline",
        "nodes": 2,
        "model": {"layers": 4, "dim": 96, "heads": 6, "kv_heads": 2, "ffn_dim": 256, "vocab_size": 264},
        "layout": {"pp": 2, "microbatches": 4},
        "data": {"path": str(tmp_path / "text"), "sequence_length": 128, "global_batch": 16},
        "optimizer": {"steps": 100, "learning_rate": 1e-3},
        "checkpoint": {"every_steps": 40},
    }
    with cluster_up(tmp_path, cluster_of(nodes=2)) as state:
        cluster = Cluster(tmp_path, state)
        run = cluster.end(cluster.submit(spec))
    assert wrong_sum(run, 2) == "" and wrong_tally(run) == ""
    assert run.ledger["pipeline_bubble"] > 0
    assert run.ledger["other"] <= OTHER_MOST * math.fsum(run.ledger.values()), run.ledger
