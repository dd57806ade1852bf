"""The journal and its fold, the bounded reports, small files, and the clock."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from myriad.control.commands import StartAgent
from myriad.control.controller import Controller
from myriad.control.events import (
    AgentConnected,
    AgentExited,
    AnyEvent,
    ClusterConfigured,
    ControllerStarted,
    DrainRequested,
    JobSubmitted,
)
from myriad.control.records import Change, ClusterRecord, Drop, JobRecord, MemberRecord, NodeRecord
from myriad.runtime import files, store
from myriad.runtime.clock import HostClock
from myriad.runtime.paths import StateDir
from myriad.runtime.store import Journal, Reports, StateReader, StateTooNew
from myriad.spec.cluster import ClusterSpec
from myriad.spec.job import JobSpec
from myriad.spec.messages import StepReport


@pytest.fixture
def state_dir(state_root: Path) -> StateDir:
    state_root.mkdir()
    Reports(StateDir(state_root)).close()
    return StateDir(state_root)


def configured() -> ClusterConfigured:
    spec = ClusterSpec.model_validate(
        {
            "name": "c",
            "node_types": {"small": {"accelerators": 1, "cpus": 1, "memory": "1GiB"}},
            "nodes": [{"name": "n[0-3]", "type": "small", "rack": "r", "power_feed": "p", "leaf": "l"}],
            "fabric": {level: {"bandwidth": "1GB/s"} for level in ("node", "leaf", "core")},
        }
    )
    return ClusterConfigured(spec=spec.model_dump(mode="json"), jobs_dir="/jobs")


def submitted(number: int) -> JobSubmitted:
    spec = JobSpec.model_validate({"name": f"job {number}", "nodes": 2, "spares": 1, "command": "true"})
    return JobSubmitted(request=f"r{number}", spec=spec.model_dump(mode="json"))


# A life with updates, drops and re-insertions: a job whose nodes are lost is requeued and placed again.
LIFE: list[AnyEvent] = [
    configured(),
    ControllerStarted(),
    *(AgentConnected(node=f"n{i}", incarnation="a") for i in (2, 0, 1)),
    submitted(1),
    submitted(2),
    AgentExited(node="n0", incarnation="a"),
    AgentExited(node="n1", incarnation="a"),
    DrainRequested(node="n3"),
]


def live(journal: Journal, life: list[AnyEvent] = LIFE, now: float = 100.0) -> Controller:
    controller = Controller(journal.load())
    for event in life:
        now += 1.0
        commands = controller.handle(event, now)
        journal.append([(now, event, controller.changes, commands)])
    return controller


def test_the_fold_on_disk_is_the_live_state_in_the_same_order(state_dir: StateDir) -> None:
    journal = Journal(state_dir)
    controller = live(journal)
    journal.close()
    again = Journal(state_dir)
    loaded = again.load()
    assert list(loaded.records()) == list(controller.state.records())
    assert list(loaded.live) == list(controller.state.live) == ["j1", "j2"]
    assert list(loaded.members("j1")) == list(controller.state.members("j1"))
    assert loaded.requests == controller.state.requests
    assert again.last_seq == len(LIFE) and again.last_now == 100.0 + len(LIFE)
    again.close()


def test_a_member_that_was_dropped_and_came_back_is_last_on_disk_too(state_dir: StateDir) -> None:
    journal = Journal(state_dir)
    controller = live(journal)
    one, two = (MemberRecord(job="j", node=node, wanted="x", generation=1) for node in ("a", "b"))
    changes: list[Change] = [one, two, Drop(kind="MemberRecord", of="j/a"), one]
    for change in changes:
        controller.state.apply(change)
    journal.append([(200.0, ControllerStarted(), list(changes), [])])
    assert list(journal.load().table(MemberRecord)) == list(controller.state.table(MemberRecord))
    assert list(journal.load().members("j")) == ["b", "a"]
    journal.close()


def test_rows_say_what_happened_and_what_followed(state_dir: StateDir) -> None:
    journal = Journal(state_dir)
    live(journal)
    journal.close()
    with StateReader(state_dir) as reader:
        rows = reader.journal()
        assert [row.event for row in rows] == LIFE
        assert [row.seq for row in rows] == list(range(1, len(LIFE) + 1))
        assert [row.seq for row in reader.journal(after_seq=3, limit=2)] == [4, 5]
        assert rows[1].commands == [StartAgent(node=f"n{i}") for i in range(4)]
        assert reader.last_seq() == len(LIFE)
        assert reader.record(JobRecord, "j1") == reader.records(JobRecord)["j1"]
        assert reader.record(JobRecord, "j9") is None


def test_a_failed_commit_leaves_everything_as_it_was(state_dir: StateDir) -> None:
    journal = Journal(state_dir)
    controller = live(journal)
    commands = controller.handle(DrainRequested(node="n2"), 300.0)
    good = (300.0, DrainRequested(node="n2"), controller.changes, commands)

    def entries() -> Iterator[Any]:
        yield good
        raise OSError("the second event cannot be encoded")

    with pytest.raises(OSError, match="second event"):
        journal.append(entries())
    assert (journal.last_seq, journal.last_now) == (len(LIFE), 100.0 + len(LIFE))
    assert journal.load().node("n2").state != "drained"
    journal.append([good])
    with StateReader(state_dir) as reader:
        assert [row.seq for row in reader.journal()] == list(range(1, len(LIFE) + 2))
        assert reader.records(NodeRecord)["n2"].state == controller.state.node("n2").state
    journal.close()


def test_a_full_disk_is_an_error_and_not_a_gap(state_dir: StateDir) -> None:
    journal = Journal(state_dir)
    live(journal)
    pages = journal._db.execute("PRAGMA page_count").fetchone()[0]
    journal._db.execute(f"PRAGMA max_page_count={pages}")
    big = JobSubmitted(request="r", spec={"name": "x" * 1_000_000})
    with pytest.raises(sqlite3.OperationalError, match="full"):
        journal.append([(300.0, big, [], [])])
    assert journal.last_seq == len(LIFE)
    journal.append([(301.0, ControllerStarted(), [], [])])
    assert journal.last_seq == len(LIFE) + 1
    journal.close()


def test_a_newer_schema_is_refused(state_dir: StateDir) -> None:
    Journal(state_dir).close()
    db = sqlite3.connect(state_dir.journal)
    with db:
        db.execute("UPDATE meta SET value='999' WHERE key='schema'")
    db.close()
    with pytest.raises(
        StateTooNew, match="has schema 999 but this Myriad reads up to 1; use the newer version"
    ):
        Journal(state_dir)


def report(step: int, rank: int = 0, generation: int = 1, job: str = "j1") -> StepReport:
    return StepReport(job=job, generation=generation, rank=rank, step=step, wall_s=0.5)


def test_reports_come_back_in_order_and_once(state_dir: StateDir) -> None:
    Journal(state_dir).close()
    reports = Reports(state_dir)
    reports.add([report(2), report(1, rank=1), report(1), report(1, generation=2), report(9, job="j2")])
    reports.add([report(2)])
    reports.add([])
    reports.close()
    with StateReader(state_dir) as reader:
        found = [(r.generation, r.step, r.rank) for r in reader.step_reports("j1")]
        assert found == [(1, 1, 0), (1, 1, 1), (1, 2, 0), (2, 1, 0)]
        assert [r.step for r in reader.step_reports("j1", after_step=1)] == [2]
        assert reader.last_reports("j1") == [report(1, generation=2)]
        assert reader.last_reports("j9") == []


def test_the_oldest_reports_go_first(state_dir: StateDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "STEP_REPORTS_MAX", 10)
    Journal(state_dir).close()
    reports = Reports(state_dir)
    for step in range(1, 26):
        reports.add([report(step)])
    reports.add([report(25)])
    reports.close()
    with StateReader(state_dir) as reader:
        kept = [r.step for r in reader.step_reports("j1")]
        assert len(kept) <= 10 and kept[-1] == 25 and kept == list(range(kept[0], 26))


# ---------------------------------------------------------------- files and clock


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.json"
    files.write_json(path, {"a": 1})
    assert files.read_json(path) == {"a": 1} and path.stat().st_mode & 0o777 == 0o600

    def fails(source: object, target: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("os.replace", fails)
    with pytest.raises(OSError, match="no space"):
        files.write_json(path, {"a": 2})
    assert files.read_json(path) == {"a": 1} and [p.name for p in tmp_path.iterdir()] == ["x.json"]


def test_no_file_is_no_document(tmp_path: Path) -> None:
    assert files.read_json(tmp_path / "nothing.json") is None


def test_a_secret_is_made_once_and_private(tmp_path: Path) -> None:
    path = tmp_path / "token"
    first = files.secret(path)
    assert len(first) == 64 and files.secret(path) == first and path.stat().st_mode & 0o777 == 0o600


def test_the_clock_never_goes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = HostClock()
    before = clock.now()
    monkeypatch.setattr("time.time", lambda: 0.0)  # somebody sets the wall clock to 1970
    assert clock.now() >= before
    assert HostClock(floor=before).now() >= before, "nor over a restart"


def test_the_state_of_a_cluster_survives_as_written(state_dir: StateDir) -> None:
    journal = Journal(state_dir)
    controller = live(journal, LIFE[:2])
    journal.close()
    with StateReader(state_dir) as reader:
        assert reader.record(ClusterRecord, "cluster") == controller.state.get(ClusterRecord, "cluster")
