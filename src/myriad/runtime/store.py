"""The journal and the step reports, in two SQLite files.

``journal.db``: one row per event with the changes and commands that followed, and beside it the records
that are the fold of all changes, written in the same transaction (WAL, synchronous=FULL, many events a
commit). A restart loads the records and decides nothing again. About 1 ms a commit on an SSD.
``reports.db``: step reports, outside replayed state; bounded, synchronous=NORMAL: a power cut may lose
the last reports, never an event.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Self, TypeVar
from urllib.parse import quote

import msgspec

from myriad.control.commands import AnyCommand
from myriad.control.events import AnyEvent
from myriad.control.records import AnyRecord, Change, Drop
from myriad.control.state import State
from myriad.runtime.paths import StateDir
from myriad.spec.messages import StepReport

SCHEMA_VERSION = 1
# Rows of step reports kept; about 400 bytes each. The oldest go first.
STEP_REPORTS_MAX = 2_000_000
# How long a reader or writer waits for another's lock before it gives up.
BUSY_TIMEOUT_MS = 10_000

R = TypeVar("R", bound=AnyRecord)

_encode = msgspec.json.Encoder().encode
_decode_record = msgspec.json.Decoder(AnyRecord).decode
_decode_event = msgspec.json.Decoder(AnyEvent).decode
_decode_changes = msgspec.json.Decoder(list[Change]).decode
_decode_commands = msgspec.json.Decoder(list[AnyCommand]).decode
_decode_report = msgspec.json.Decoder(StepReport).decode

_JOURNAL_TABLES = """
CREATE TABLE IF NOT EXISTS meta(key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS journal(
  seq INTEGER PRIMARY KEY, schema INTEGER NOT NULL, now REAL NOT NULL,
  event BLOB NOT NULL, changes BLOB NOT NULL, commands BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS records(
  kind TEXT NOT NULL, key TEXT NOT NULL, value BLOB NOT NULL, UNIQUE(kind, key));
"""
_REPORT_TABLES = """
CREATE TABLE IF NOT EXISTS step_reports(
  job TEXT NOT NULL, generation INTEGER NOT NULL, step INTEGER NOT NULL, rank INTEGER NOT NULL,
  report BLOB NOT NULL, PRIMARY KEY(job, generation, step, rank));
"""


class StateTooNew(Exception):
    """The state was written by a newer Myriad."""


@dataclass(frozen=True, slots=True)
class JournalRow:
    seq: int
    now: float
    event: AnyEvent
    changes: list[Change]
    commands: list[AnyCommand]


def _open(path: str, synchronous: str, tables: str) -> sqlite3.Connection:
    db = sqlite3.connect(path, isolation_level=None, timeout=BUSY_TIMEOUT_MS / 1000)
    db.execute("PRAGMA journal_mode=WAL")
    db.execute(f"PRAGMA synchronous={synchronous}")
    db.executescript(tables)
    return db


class Journal:
    """The writer's side of ``journal.db``; one per state, guarded by the state's lock."""

    def __init__(self, state_dir: StateDir) -> None:
        self._db = _open(str(state_dir.journal), "FULL", _JOURNAL_TABLES)
        found = self._db.execute("SELECT value FROM meta WHERE key='schema'").fetchone()
        if found is None:
            self._db.execute("INSERT INTO meta VALUES('schema', ?)", (str(SCHEMA_VERSION),))
        elif int(found[0]) > SCHEMA_VERSION:
            self._db.close()
            raise StateTooNew(
                f"the state in {state_dir.root} has schema {found[0]} but this Myriad reads up to "
                f"{SCHEMA_VERSION}; use the newer version that wrote it"
            )
        last = self._db.execute("SELECT seq, now FROM journal ORDER BY seq DESC LIMIT 1").fetchone()
        self.last_seq: int = last[0] if last else 0
        self.last_now: float = last[1] if last else 0.0

    def load(self) -> State:
        """The state as of the last commit: the fold of all journaled changes."""
        rows = self._db.execute("SELECT value FROM records ORDER BY rowid").fetchall()
        return State(_decode_record(row[0]) for row in rows)

    def append(self, entries: Iterable[tuple[float, AnyEvent, list[Change], list[AnyCommand]]]) -> None:
        """Commit events with what followed from them, all or nothing. Raises sqlite3.Error."""
        db = self._db
        seq, last_now = self.last_seq, self.last_now
        db.execute("BEGIN IMMEDIATE")
        try:
            for now, event, changes, commands in entries:
                seq += 1
                last_now = now
                row = (
                    seq,
                    SCHEMA_VERSION,
                    now,
                    _encode(event),
                    _encode(changes),
                    _encode(commands),
                )
                db.execute("INSERT INTO journal VALUES(?,?,?,?,?,?)", row)
                for change in changes:
                    self._fold(change)
            db.execute("COMMIT")
        except BaseException:
            if db.in_transaction:  # a full disk has already rolled back
                db.execute("ROLLBACK")
            raise
        self.last_seq, self.last_now = seq, last_now

    def _fold(self, change: Change) -> None:
        if isinstance(change, Drop):
            self._db.execute("DELETE FROM records WHERE kind=? AND key=?", (change.kind, change.of))
        else:
            row = (type(change).__name__, change.key, _encode(change))
            # An update keeps the rowid, so the order of rowids is the order of the live tables.
            self._db.execute(
                "INSERT INTO records VALUES(?,?,?) ON CONFLICT(kind, key) DO UPDATE SET value=excluded.value",
                row,
            )

    def close(self) -> None:
        self._db.close()


class Reports:
    """The writer's side of ``reports.db``."""

    def __init__(self, state_dir: StateDir) -> None:
        self._db = _open(str(state_dir.reports), "NORMAL", _REPORT_TABLES)

    def add(self, reports: Iterable[StepReport]) -> None:
        """Store reports; one seen before is replaced by itself."""
        rows = [(r.job, r.generation, r.step, r.rank, _encode(r)) for r in reports]
        if not rows:
            return
        self._db.execute("BEGIN IMMEDIATE")
        self._db.executemany("INSERT OR REPLACE INTO step_reports VALUES(?,?,?,?,?)", rows)
        last = self._db.execute("SELECT max(rowid) FROM step_reports").fetchone()[0]
        self._db.execute("DELETE FROM step_reports WHERE rowid <= ?", (last - STEP_REPORTS_MAX,))
        self._db.execute("COMMIT")

    def close(self) -> None:
        self._db.close()


class StateReader:
    """Read-only view of a state for the server and the command line; never blocks the writer."""

    def __init__(self, state_dir: StateDir) -> None:
        self._journal = _open_reader(str(state_dir.journal))
        self._reports = _open_reader(str(state_dir.reports))

    def records(self, cls: type[R]) -> dict[str, R]:
        """All records of a class by key, in the order they were first made."""
        query = "SELECT value FROM records WHERE kind=? ORDER BY rowid"
        found = (_decode_record(row[0]) for row in self._journal.execute(query, (cls.__name__,)))
        return {record.key: record for record in found}  # type: ignore[misc]

    def record(self, cls: type[R], key: str) -> R | None:
        query = "SELECT value FROM records WHERE kind=? AND key=?"
        row = self._journal.execute(query, (cls.__name__, key)).fetchone()
        return None if row is None else _decode_record(row[0])  # type: ignore[return-value]

    def journal(self, after_seq: int = 0, limit: int = 1000) -> list[JournalRow]:
        query = "SELECT seq, now, event, changes, commands FROM journal WHERE seq > ? ORDER BY seq LIMIT ?"
        return [
            JournalRow(seq, now, _decode_event(event), _decode_changes(changes), _decode_commands(commands))
            for seq, now, event, changes, commands in self._journal.execute(query, (after_seq, limit))
        ]

    def last_seq(self) -> int:
        found = self._journal.execute("SELECT max(seq) FROM journal").fetchone()[0]
        return int(found or 0)

    def step_reports(self, job: str, after_step: int = 0) -> Iterator[StepReport]:
        """Reports of a job by (generation, step, rank); only steps beyond ``after_step``."""
        query = "SELECT report FROM step_reports WHERE job=? AND step>? ORDER BY generation, step, rank"
        for (report,) in self._reports.execute(query, (job, after_step)):
            yield _decode_report(report)

    def last_reports(self, job: str) -> list[StepReport]:
        """Reports of the newest step of the newest generation."""
        query = (
            "SELECT report FROM step_reports WHERE job=?1 AND (generation, step) = (SELECT generation, step "
            "FROM step_reports WHERE job=?1 ORDER BY generation DESC, step DESC LIMIT 1) ORDER BY rank"
        )
        return [_decode_report(row[0]) for row in self._reports.execute(query, (job,))]

    def close(self) -> None:
        self._journal.close()
        self._reports.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _open_reader(path: str) -> sqlite3.Connection:
    db = sqlite3.connect(f"file:{quote(path)}?mode=ro", uri=True, timeout=BUSY_TIMEOUT_MS / 1000)
    db.execute("PRAGMA query_only=1")
    return db
