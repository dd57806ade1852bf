"""A torn journal: whatever part of the write-ahead log a crash leaves, the state is that of whole commits.

The files are copied while the real ``Journal`` has them open, as a power cut would leave them, and then cut or
altered at a drawn place. Commits are of several events, so half a commit would show.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_store import configured, submitted

from myriad.control.commands import AnyCommand
from myriad.control.controller import Controller
from myriad.control.events import (
    AgentConnected,
    AgentExited,
    AnyEvent,
    CancelRequested,
    ControllerStarted,
    UndrainRequested,
)
from myriad.control.journal import Records
from myriad.control.records import AnyRecord, Change
from myriad.control.replay import replay
from myriad.runtime.paths import StateDir
from myriad.runtime.store import Journal, JournalEmpty, JournalFile, NotAJournal

COMMITS = 24
EVENTS_A_COMMIT = 3
# The -wal's content is moved into journal.db before this commit, whose rows then overwrite its beginning.
CHECKPOINT_BEFORE = 16


@dataclass(frozen=True)
class Crash:
    """The files as they were after ``commits`` commits, ``safe`` of them in journal.db itself."""

    folder: Path
    commits: int
    safe: int

    @property
    def wal(self) -> Path:
        return self.folder / "journal.db-wal"


@dataclass(frozen=True)
class Written:
    """``states[n]`` are the records, in order, after n commits; a crash for each n beyond 0."""

    states: list[list[AnyRecord]]
    crashes: list[Crash]


def life() -> list[AnyEvent]:
    """Jobs that come and go on nodes that come and go."""
    events: list[AnyEvent] = [configured(), ControllerStarted()]
    events += [AgentConnected(node=f"n{i}", incarnation="a0") for i in range(4)]
    number = 0
    while len(events) < COMMITS * EVENTS_A_COMMIT:
        number += 1
        node = f"n{number % 4}"
        events += [
            submitted(number),
            AgentExited(node=node, incarnation=f"a{(number - 1) // 4}"),
            CancelRequested(job=f"j{number}"),
            UndrainRequested(node=node),
            AgentConnected(node=node, incarnation=f"a{(number - 1) // 4 + 1}"),
        ]
    return events[: COMMITS * EVENTS_A_COMMIT]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    return write(tmp_path_factory, Journal)


def write(tmp_path_factory: pytest.TempPathFactory, kind: type[Journal]) -> Written:
    root = tmp_path_factory.mktemp("state")
    journal, controller, records = kind(StateDir(root)), Controller(), Records()
    states: list[list[AnyRecord]] = [[]]
    crashes = []
    events = life()
    for commit in range(1, COMMITS + 1):
        if commit == CHECKPOINT_BEFORE:
            busy, _, _ = journal._db.execute("PRAGMA wal_checkpoint(RESTART)").fetchone()
            assert not busy
        entries: list[tuple[float, AnyEvent, list[Change], list[AnyCommand]]] = []
        for event in events[(commit - 1) * EVENTS_A_COMMIT : commit * EVENTS_A_COMMIT]:
            now = 100.0 + commit
            commands = controller.handle(event, now)
            entries.append((now, event, controller.changes, commands))
            records.fold(controller.changes)
        journal.append(entries)
        states.append(list(records.load().records()))
        folder = tmp_path_factory.mktemp("crash")
        for name in ("journal.db", "journal.db-wal"):
            shutil.copyfile(root / name, folder / name)
        safe = CHECKPOINT_BEFORE - 1 if commit >= CHECKPOINT_BEFORE else 0
        crashes.append(Crash(folder, commit, safe))
    journal.close()
    return Written(states, crashes)


def check(written: Written, crash: Crash, wal: bytes) -> int:
    """What both readers find with these bytes as -wal; the number of commits that are left."""
    with tempfile.TemporaryDirectory() as name:
        torn = Path(name)
        shutil.copyfile(crash.folder / "journal.db", torn / "journal.db")
        (torn / "journal.db-wal").write_bytes(wal)
        seen = rows_of(torn)
        journal = Journal(StateDir(torn))
        try:
            commits, half = divmod(journal.last_seq, EVENTS_A_COMMIT)
            assert half == 0, "half a commit"
            assert crash.safe <= commits <= crash.commits
            assert list(journal.load().records()) == written.states[commits]
            assert journal.last_now == (100.0 + commits if commits else 0.0)
            assert seen == journal.last_seq
            # It goes on where it was torn.
            journal.append([(1000.0, ControllerStarted(), [], [])])
        finally:
            journal.close()
        if commits:
            assert rows_of(torn) == seen + 1
    return commits


def rows_of(folder: Path) -> int:
    """Rows of the journal, which replay; 0 when not even its tables are left."""
    try:
        with JournalFile(folder) as journal:
            rows = list(journal.rows())
    except (NotAJournal, JournalEmpty):
        return 0
    assert [row.seq for row in rows] == list(range(1, len(rows) + 1))
    found = replay(row for row in rows if row.now < 1000.0)
    assert found.difference is None
    return len(rows)


@given(moment=st.integers(0, COMMITS - 1), place=st.floats(0.0, 1.0))
@example(moment=COMMITS - 1, place=0.0)
@example(moment=COMMITS - 1, place=1.0)
@settings(max_examples=60, deadline=None)
def test_a_log_cut_anywhere(written: Written, moment: int, place: float) -> None:
    crash = written.crashes[moment]
    wal = crash.wal.read_bytes()
    commits = check(written, crash, wal[: round(place * len(wal))])
    if place == 1.0:
        assert commits == crash.commits


@given(
    moment=st.integers(0, COMMITS - 1),
    place=st.floats(0.0, 1.0, exclude_max=True),
    mask=st.binary(min_size=1, max_size=600).filter(any),
)
@settings(max_examples=60, deadline=None)
def test_a_log_altered_anywhere(written: Written, moment: int, place: float, mask: bytes) -> None:
    """Some bytes are others than those written, as when a sector never reached the disk."""
    crash = written.crashes[moment]
    wal = bytearray(crash.wal.read_bytes())
    start = int(place * len(wal))
    for offset, bits in enumerate(mask, start):
        if offset < len(wal):
            wal[offset] ^= bits
    check(written, crash, bytes(wal))


def cut_at_each_frame(written: Written) -> set[int]:
    """The numbers of commits left by every cut of the last log before the checkpoint."""
    crash = written.crashes[CHECKPOINT_BEFORE - 2]
    wal = crash.wal.read_bytes()
    page = int.from_bytes(wal[8:12], "big")
    return {check(written, crash, wal[:end]) for end in range(32, len(wal) + 1, page + 24)}


def test_every_number_of_commits_can_be_left(written: Written) -> None:
    """The properties above are not about all or nothing."""
    assert cut_at_each_frame(written) == set(range(CHECKPOINT_BEFORE))


class HalfCommits(Journal):
    """Commits event by event."""

    def append(self, entries: Iterable[tuple[float, AnyEvent, list[Change], list[AnyCommand]]]) -> None:
        for entry in entries:
            super().append([entry])


class LateFold(Journal):
    """Writes the records after the commit of the rows instead of with it."""

    def append(self, entries: Iterable[tuple[float, AnyEvent, list[Change], list[AnyCommand]]]) -> None:
        late: list[Change] = []
        self._fold = late.append  # type: ignore[method-assign, assignment]
        super().append(entries)
        del self._fold
        for change in late:
            self._fold(change)


@pytest.mark.parametrize("kind", [HalfCommits, LateFold])
def test_a_writer_that_breaks_the_promise_is_caught(
    kind: type[Journal], tmp_path_factory: pytest.TempPathFactory
) -> None:
    broken = write(tmp_path_factory, kind)
    with pytest.raises(AssertionError):
        cut_at_each_frame(broken)
