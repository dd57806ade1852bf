"""One journal read by itself: of a run that goes on, has ended or has crashed; and what is no journal."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from test_store import LIFE, live

from myriad.control.journal import encode
from myriad.control.replay import replay
from myriad.runtime import store
from myriad.runtime.paths import StateDir
from myriad.runtime.store import (
    Journal,
    JournalCut,
    JournalDamaged,
    JournalEmpty,
    JournalError,
    JournalFile,
    JournalUnreadable,
    NoJournal,
    NotAJournal,
    StateTooNew,
)


@pytest.fixture
def ended(tmp_path: Path) -> Path:
    """The state folder of a run that ended as it should: journal.db alone."""
    folder = tmp_path / "ended"
    folder.mkdir()
    journal = Journal(StateDir(folder))
    live(journal)
    journal.close()
    assert [file.name for file in folder.iterdir()] == ["journal.db"]
    return folder


def content(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def crashed(tmp_path: Path, *suffixes: str) -> Path:
    """A copy of the files of a run in its middle."""
    running, copy = tmp_path / "running", tmp_path / "crashed"
    running.mkdir()
    copy.mkdir()
    journal = Journal(StateDir(running))
    live(journal)
    for suffix in ("", *suffixes):
        shutil.copyfile(running / f"journal.db{suffix}", copy / f"journal.db{suffix}")
    journal.close()
    return copy


@pytest.mark.parametrize("given", ["a folder", "a file", "a file of another name"])
def test_an_ended_run_is_read_and_nothing_is_written_beside_it(given: str, ended: Path) -> None:
    if given == "a file of another name":
        (ended / "journal.db").rename(ended / "kept #1?.db")
    before = content(ended)
    with JournalFile(ended if given == "a folder" else ended / next(iter(before))) as journal:
        rows = list(journal.rows())
        assert content(ended) == before
    assert [row.event for row in rows] == [encode(event) for event in LIFE]
    assert replay(rows).difference is None
    assert content(ended) == before


def test_a_crashed_run_is_read_with_its_log(tmp_path: Path) -> None:
    folder = crashed(tmp_path, "-wal")
    before = content(folder)
    with JournalFile(folder) as journal:
        assert len(list(journal.rows())) == len(LIFE)
    assert content(folder) == before


def test_a_crashed_state_is_read_where_it_is(tmp_path: Path) -> None:
    folder = crashed(tmp_path, "-wal", "-shm")
    before = content(folder)
    with JournalFile(folder) as journal:
        assert len(list(journal.rows())) == len(LIFE)
    after = content(folder)
    del before["journal.db-shm"], after["journal.db-shm"]  # its index is made anew
    assert after == before
    journal_again = Journal(StateDir(folder))
    assert journal_again.last_seq == len(LIFE)
    journal_again.close()


def test_a_writer_is_neither_blocked_nor_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "ROWS_AT_ONCE", 2)
    writer = Journal(StateDir(tmp_path))
    controller = live(writer)
    with JournalFile(tmp_path) as journal:
        rows = journal.rows()
        seen = [next(rows)]
        # While the reader is between two rows: a commit, and the log is moved into the file and cut.
        event = LIFE[1]
        commands = controller.handle(event, 200.0)
        writer.append([(200.0, event, controller.changes, commands)])
        busy, left, _ = writer._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        assert (busy, left) == (0, 0)
        seen += rows
    assert [row.seq for row in seen] == list(range(1, len(LIFE) + 2))
    assert replay(seen).difference is None
    writer.append([(201.0, event, [], [])])
    assert writer.last_seq == len(LIFE) + 2
    writer.close()


# ---------------------------------------------------------------- what is no whole journal


@dataclass(frozen=True)
class Spoilt:
    """A state folder after ``spoil`` gives this error, whose sentence has these words."""

    name: str
    spoil: Callable[[Path], object]
    error: type[JournalError]
    words: str


def sql(*statements: str) -> Callable[[Path], None]:
    def run(folder: Path) -> None:
        db = sqlite3.connect(folder / "journal.db")
        with db:
            for statement in statements:
                db.execute(statement)
        db.close()
        for suffix in ("-wal", "-shm"):
            (folder / f"journal.db{suffix}").unlink(missing_ok=True)

    return run


def replaced(content: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / "journal.db").write_bytes(content)


def folder_instead(folder: Path) -> None:
    (folder / "journal.db").unlink()
    (folder / "journal.db").mkdir()


def cut_short(folder: Path) -> None:
    file = folder / "journal.db"
    file.write_bytes(file.read_bytes()[:9000])


def overwritten(folder: Path) -> None:
    """The pages of the tables, not the first with their names."""
    file = folder / "journal.db"
    content = file.read_bytes()
    file.write_bytes(content[:4096] + b"\x5a" * (len(content) - 4096))


COPY_THE_LOG = "if it is a copy of a running or crashed cluster's, copy journal.db-wal beside it too"

SPOILT = (
    Spoilt("no file", lambda folder: (folder / "journal.db").unlink(), NoJournal,
           "there is no journal {}; give a state folder or its journal.db"),
    Spoilt("a folder in its place", folder_instead, NotAJournal, "{} is not a journal; give a state folder"),
    Spoilt("a text", replaced(b"seq,event\n" * 500), NotAJournal, "{} is not a journal; give a state folder"),
    Spoilt("an empty file", replaced(b""), NotAJournal, COPY_THE_LOG),
    Spoilt("a table is missing", sql("DROP TABLE journal"), NotAJournal, "no such table: journal"),
    Spoilt("a column is missing", sql("ALTER TABLE journal DROP COLUMN commands"), NotAJournal, "no such column"),
    Spoilt("cut short", cut_short, JournalDamaged, "copy journal.db and journal.db-wal again while no controller runs"),
    Spoilt("overwritten", overwritten, JournalDamaged, "the journal {} is damaged (database disk image is malformed)"),
    Spoilt("newer", sql("UPDATE meta SET value='999'"), StateTooNew,
           "the journal {} has schema 999 but this Myriad reads up to 1; use the newer version that wrote it"),
    Spoilt("newer from a row on", sql("UPDATE journal SET schema=2 WHERE seq=5"), StateTooNew, "row 5 of the journal {}"),
    Spoilt("no event", sql("DELETE FROM journal"), JournalEmpty, f"the journal {{}} holds no event; {COPY_THE_LOG}"),
    Spoilt("no beginning", sql("DELETE FROM journal WHERE seq < 3"), JournalCut,
           "begins with event 3, AgentConnected, instead of the first of its cluster; give a whole journal"),
    Spoilt("another first event", sql("UPDATE journal SET event=(SELECT event FROM journal WHERE seq=2) WHERE seq=1"),
           JournalCut, "begins with event 1, ControllerStarted, instead of"),
    Spoilt("an unreadable first event", sql("UPDATE journal SET event='?' WHERE seq=1"), JournalCut,
           "begins with event 1, which cannot be read, instead of"),
)  # fmt: skip


@pytest.mark.parametrize("story", SPOILT, ids=lambda story: story.name)
def test_what_is_no_whole_journal_is_said_in_a_sentence(story: Spoilt, ended: Path) -> None:
    story.spoil(ended)
    with pytest.raises(story.error) as raised, JournalFile(ended) as journal:
        list(journal.rows())
    text = str(raised.value)
    assert story.words.format(ended / "journal.db") in text
    assert "\n" not in text and not text.endswith(".")


def test_a_crashed_run_without_its_log_says_what_to_copy(tmp_path: Path) -> None:
    """Nothing had been moved to journal.db yet."""
    folder = crashed(tmp_path)
    with pytest.raises(NotAJournal, match="copy journal.db-wal beside it too"):
        JournalFile(folder)


def test_what_cannot_be_opened_says_what_to_copy(ended: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a folder that may not be written to: SQLite then cannot map the file -shm."""

    def refused(path: str) -> sqlite3.Connection:
        return sqlite3.connect(f"file:{path}/nowhere?mode=ro", uri=True)

    monkeypatch.setattr(store, "_open_reader", refused)
    with pytest.raises(JournalUnreadable, match="copy journal.db and journal.db-wal into a folder of yours"):
        JournalFile(ended)


def test_a_file_that_may_not_be_read(ended: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(source: Path, target: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("shutil.copyfile", refused)
    with pytest.raises(JournalUnreadable, match=r"cannot be read \(Permission denied\)"):
        JournalFile(ended)
