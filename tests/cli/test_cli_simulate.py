"""``myriad simulate --journal``: what is told of a journal that replays, of one that does not, and of no journal."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import pytest
from world import World

from myriad.cli import replayed
from myriad.cli.main import main
from myriad.runtime.paths import StateDir
from myriad.runtime.store import Journal


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """The state folder of a small life: a job that has ended."""
    world = World(nodes=3)
    job = world.start(nodes=2)
    world.finish(job)
    world.run()
    journal = Journal(StateDir(tmp_path))
    journal.append((e.now, e.event, list(e.changes), list(e.commands)) for e in world.journal)
    journal.close()
    return tmp_path


def alter(state: Path, statement: str) -> int:
    """Run SQL, in which ``:seq`` is the row of the job's submit; that number."""
    db = sqlite3.connect(state / "journal.db")
    with db:
        submit = "SELECT seq FROM journal WHERE CAST(event AS TEXT) LIKE '%JobSubmitted%'"
        seq: int = db.execute(submit).fetchone()[0]
        db.execute(statement, {"seq": seq})
    db.close()
    return seq


def test_identical(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for given in (state, state / "journal.db"):
        assert main(["simulate", "--journal", str(given)]) == 0
        shown = capsys.readouterr()
        assert shown.out.endswith(" changes replayed: identical\n") and not shown.err
    assert main(["simulate", "--journal", str(state), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["identical"] is True and found["difference"] is None
    assert min(found["events"], found["commands"], found["changes"]) > 10


def test_a_difference_is_shown_where_it_is(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seq = alter(
        state,
        "UPDATE journal SET commands=replace(CAST(commands AS TEXT), '\"generation\":1', '\"generation\":7') "
        "WHERE seq=:seq",
    )
    assert main(["simulate", "--journal", str(state)]) == 1
    head, where, what, *diff = capsys.readouterr().out.splitlines()
    assert head.startswith(f"{seq - 1} events, ") and head.endswith(" replayed: then a difference")
    assert where.startswith(f"event {seq} at 1970-01-01T00:16:40.") and '{"type":"JobSubmitted"' in where
    assert where.endswith("...") and len(where) < 300
    assert what == "its commands differ:"
    assert diff[:2] == ["--- recorded", "+++ replayed"]
    assert [line.split() for line in diff if line[:2] in ("- ", "+ ")] == [
        ["-", '"generation":', "7,"],
        ["+", '"generation":', "1,"],
    ]
    assert len(diff) <= 2 + 2 + 2 * replayed.CONTEXT_LINES
    assert main(["simulate", "--journal", str(state), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["identical"] is False
    assert (found["difference"]["seq"], found["difference"]["what"]) == (seq, "commands")


STORIES = [
    ("UPDATE journal SET commands='[{]' WHERE seq=:seq", "its commands differ:"),
    ("UPDATE journal SET commands=commands || ' ' WHERE seq=:seq", "its commands differ:"),
    ("UPDATE journal SET now=now + 1e18 WHERE seq=:seq", "its changes differ:"),
    ("DELETE FROM journal WHERE seq=:seq - 1", "is missing before it"),
    ("UPDATE journal SET event='{}' WHERE seq=:seq", "it cannot be replayed: ValidationError: "),
]


@pytest.mark.parametrize("statement, words", STORIES, ids=[words for _, words in STORIES])
def test_whatever_is_altered(
    statement: str, words: str, state: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seq = alter(state, statement)
    assert main(["simulate", "--journal", str(state)]) == 1
    shown = capsys.readouterr().out
    assert f"\nevent {seq} at " in shown and words in shown
    if words.endswith("differ:"):
        lines = shown.splitlines()[3:]
        assert any(line.startswith("-") for line in lines[2:]) and any(
            line.startswith("+") for line in lines[2:]
        )


def test_a_long_difference_is_cut() -> None:
    shown = replayed.first_part(json.dumps(list(range(1000))), json.dumps(["x" * 1000]))
    assert len(shown) == replayed.SHOWN_LINES_MAX + 1
    assert shown[-1] == "... and 965 more lines; --json has all"


def test_only_the_first_of_two_differences_is_shown() -> None:
    old = list(range(100))
    new = [*old]
    new[20], new[70] = -1, -2
    shown = replayed.first_part(json.dumps(old), json.dumps(new))
    assert [line for line in shown[2:] if line[0] in "-+"] == ["-  20,", "+  -1,"]


def test_no_journal_is_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "job.yaml").write_text("name: job\n" * 100)
    for name, words in (("none.db", "there is no journal"), ("job.yaml", "is not a journal")):
        assert main(["simulate", "--journal", str(tmp_path / name)]) == 2
        shown = capsys.readouterr()
        assert words in shown.err and shown.err.count("\n") == 1 and not shown.out
