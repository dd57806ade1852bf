"""The journal and the step reports, in two SQLite files.

``journal.db``: one row per event with the changes and commands that followed, and beside it the records
that are the fold of all changes, written in the same transaction (WAL, synchronous=FULL, many events a
commit). A restart loads the records and decides nothing again. About 1 ms a commit on an SSD.
``reports.db``: step reports, outside replayed state; bounded, synchronous=NORMAL: a power cut may lose
the last reports, never an event.

``JournalFile`` reads one journal on its own, also of another machine's ended or crashed run, and changes nothing
beside it. About 300,000 rows a second.
"""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self, TypeVar
from urllib.parse import quote

import msgspec

from myriad.control.commands import AnyCommand
from myriad.control.events import AnyEvent, ClusterConfigured
from myriad.control.journal import (
    SCHEMA_VERSION,
    Entry,
    Row,
    decode_event,
    decode_record,
    encode,
    read_row,
    write_row,
)
from myriad.control.records import AnyRecord, Change, Drop
from myriad.control.state import State
from myriad.runtime.paths import StateDir
from myriad.spec.messages import StepReport

# Rows of step reports kept; about 400 bytes each. The oldest go first.
STEP_REPORTS_MAX = 2_000_000
# How long a reader or writer waits for another's lock before it gives up.
BUSY_TIMEOUT_MS = 10_000
# Rows that are read at once: bounds memory, and how long the file's snapshot is held.
ROWS_AT_ONCE = 500

R = TypeVar("R", bound=AnyRecord)

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


class JournalError(Exception):
    """A journal cannot be used: what is wrong with it and what to do, in one sentence."""


class StateTooNew(JournalError):
    """The state was written by a newer Myriad."""


class NoJournal(JournalError):
    """There is no such file."""


class JournalUnreadable(JournalError):
    """The file is there but this process cannot open it where it is."""


class NotAJournal(JournalError):
    """The file is something else, or its tables are missing."""


class JournalDamaged(JournalError):
    """The file was a journal once."""


class JournalEmpty(JournalError):
    """A journal without an event."""


class JournalCut(JournalError):
    """A journal that lacks its beginning."""


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
        found = _schema(self._db)
        if found is None:
            self._db.execute("INSERT INTO meta VALUES('schema', ?)", (str(SCHEMA_VERSION),))
        elif found > SCHEMA_VERSION:
            self._db.close()
            raise _too_new(f"the state in {state_dir.root}", found)
        last = self._db.execute("SELECT seq, now FROM journal ORDER BY seq DESC LIMIT 1").fetchone()
        self.last_seq: int = last[0] if last else 0
        self.last_now: float = last[1] if last else 0.0

    def load(self) -> State:
        """The state as of the last commit: the fold of all journaled changes."""
        rows = self._db.execute("SELECT value FROM records ORDER BY rowid").fetchall()
        return State(decode_record(row[0]) for row in rows)

    def append(self, entries: Iterable[tuple[float, AnyEvent, list[Change], list[AnyCommand]]]) -> None:
        """Commit events with what followed from them, all or nothing. Raises sqlite3.Error."""
        db = self._db
        seq, last_now = self.last_seq, self.last_now
        db.execute("BEGIN IMMEDIATE")
        try:
            for now, event, changes, commands in entries:
                seq += 1
                last_now = now
                row = write_row(seq, Entry(now, event, changes, commands))
                db.execute("INSERT INTO journal VALUES(?,?,?,?,?,?)", msgspec.structs.astuple(row))
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
            row = (type(change).__name__, change.key, encode(change))
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
        rows = [(r.job, r.generation, r.step, r.rank, encode(r)) for r in reports]
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
        found = (decode_record(row[0]) for row in self._journal.execute(query, (cls.__name__,)))
        return {record.key: record for record in found}  # type: ignore[misc]

    def record(self, cls: type[R], key: str) -> R | None:
        query = "SELECT value FROM records WHERE kind=? AND key=?"
        row = self._journal.execute(query, (cls.__name__, key)).fetchone()
        return None if row is None else decode_record(row[0])  # type: ignore[return-value]

    def journal(self, after_seq: int = 0, limit: int = 1000) -> list[JournalRow]:
        found = self._journal.execute(f"{_ROWS} LIMIT ?", (after_seq, limit))
        return [_decoded(Row(*row)) for row in found]

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


class JournalFile:
    """One journal by itself, read-only: that of a state folder, or a copy of its ``journal.db``.

    Whatever state its run is in: going on, ended, or crashed with the newest rows in ``journal.db-wal`` beside it.
    A file that is in use is read where it is, in short transactions: its writer is neither blocked nor kept from
    moving the -wal's content. Any other is read from a private copy, because SQLite writes files of its own beside
    a database in this mode even to read it. Use it as a context manager.
    """

    def __init__(self, path: Path) -> None:
        """Raises JournalError."""
        self.path = path
        self._held = contextlib.ExitStack()
        with self._held as held, self._sentences():
            self.path = StateDir(path).journal if path.is_dir() else path
            self._check_there()
            self._db = _open_reader(str(self._in_place_or_copied(held)))
            held.callback(self._db.close)
            schema = _schema(self._db)
            self._db.execute(f"{_ROWS} LIMIT 0", (0,))
            if schema is not None and schema > SCHEMA_VERSION:
                raise _too_new(f"the journal {self.path}", schema)
            self._held = held.pop_all()

    def rows(self) -> Iterator[Row]:
        """All rows in order, as they are when they are reached. Raises JournalError."""
        after_seq = 0
        while found := self._next(after_seq):
            if after_seq == 0:
                self._check_first(found[0])
            for row in found:
                if row.schema > SCHEMA_VERSION:
                    raise _too_new(f"row {row.seq} of the journal {self.path}", row.schema)
                yield row
            after_seq = found[-1].seq
        if after_seq == 0:
            raise JournalEmpty(f"the journal {self.path} holds no event{self._wal_too()}")

    def _next(self, after_seq: int) -> list[Row]:
        with self._sentences():
            query = f"{_ROWS} LIMIT {ROWS_AT_ONCE}"
            return [Row(*row) for row in self._db.execute(query, (after_seq,))]

    def _check_there(self) -> None:
        if not self.path.exists():
            raise NoJournal(f"there is no journal {self.path}; give a state folder or its journal.db")
        if not self.path.is_file():
            raise NotAJournal(f"{self.path} is not a journal; give a state folder or its journal.db")

    def _check_first(self, row: Row) -> None:
        try:
            event = decode_event(row.event)
        except (msgspec.DecodeError, UnicodeDecodeError):
            event = None
        if row.seq != 1 or not isinstance(event, ClusterConfigured):
            raise JournalCut(
                f"the journal {self.path} begins with event {row.seq}, {_name(event)}, instead of the first of its "
                "cluster; give a whole journal"
            )

    def _in_place_or_copied(self, held: contextlib.ExitStack) -> Path:
        """-shm is there as long as a process has the file open, and after a crash."""
        if _beside(self.path, "-shm").exists():
            return self.path
        copy = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="myriad-journal-"))) / "journal.db"
        shutil.copyfile(self.path, copy)
        with contextlib.suppress(FileNotFoundError):
            shutil.copyfile(_beside(self.path, "-wal"), _beside(copy, "-wal"))
        return copy

    @contextlib.contextmanager
    def _sentences(self) -> Iterator[None]:
        """Errors of SQLite and of the file system as JournalError."""
        try:
            yield
        except OSError as error:
            raise JournalUnreadable(
                f"the journal {self.path} cannot be read ({error.strerror}); give one that you may read"
            ) from error
        except sqlite3.DatabaseError as error:
            raise self._sentence(error) from error

    def _sentence(self, error: sqlite3.DatabaseError) -> JournalError:
        match error.sqlite_errorcode & 0xFF:  # the primary code of an extended one
            case sqlite3.SQLITE_NOTADB:
                return NotAJournal(f"{self.path} is not a journal; give a state folder or its journal.db")
            case sqlite3.SQLITE_ERROR:  # a table or a column is not there
                return NotAJournal(f"{self.path} is not a journal ({error}){self._wal_too()}")
            case sqlite3.SQLITE_CORRUPT | sqlite3.SQLITE_IOERR:
                return JournalDamaged(
                    f"the journal {self.path} is damaged ({error}); if it is a copy, copy journal.db and "
                    "journal.db-wal again while no controller runs"
                )
            case _:
                return JournalUnreadable(
                    f"the journal {self.path} cannot be opened where it is ({error}); copy journal.db and "
                    "journal.db-wal into a folder of yours and give that copy"
                )

    def _wal_too(self) -> str:
        wal = _beside(self.path, "-wal").name
        return f"; if it is a copy of a running or crashed cluster's, copy {wal} beside it too"

    def close(self) -> None:
        self._held.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


_ROWS = (
    # Whoever edits a journal by hand may leave text where bytes were.
    "SELECT seq, schema, now, CAST(event AS BLOB), CAST(changes AS BLOB), CAST(commands AS BLOB) "
    "FROM journal WHERE seq > ? ORDER BY seq"
)


def _decoded(row: Row) -> JournalRow:
    entry = read_row(row)
    return JournalRow(row.seq, entry.now, entry.event, list(entry.changes), list(entry.commands))


def _schema(db: sqlite3.Connection) -> int | None:
    found = db.execute("SELECT CAST(value AS INTEGER) FROM meta WHERE key='schema'").fetchone()
    return None if found is None else int(found[0])


def _too_new(what: str, found: int) -> StateTooNew:
    return StateTooNew(
        f"{what} has schema {found} but this Myriad reads up to {SCHEMA_VERSION}; "
        "use the newer version that wrote it"
    )


def _beside(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)


def _name(event: AnyEvent | None) -> str:
    return "which cannot be read" if event is None else type(event).__name__


def _open_reader(path: str) -> sqlite3.Connection:
    db = sqlite3.connect(f"file:{quote(path)}?mode=ro", uri=True, timeout=BUSY_TIMEOUT_MS / 1000)
    db.execute("PRAGMA query_only=1")
    return db
