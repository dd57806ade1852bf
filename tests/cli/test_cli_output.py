"""Tables, colour and exit codes."""

from __future__ import annotations

import pytest

from myriad.cli import output
from myriad.cli.errors import Exit
from myriad.cli.follow import FINAL, exit_code, progress_line
from myriad.control.status import FINAL as FINAL_STATUSES


def test_columns_are_aligned_by_what_a_terminal_shows(capsys: pytest.CaptureFixture[str]) -> None:
    output.table(("NAME", "STEP"), [("plain", 1), ("日本", 22), ("e\u0301a", None)])
    assert capsys.readouterr().out.splitlines() == ["NAME   STEP", "plain  1", "日本   22", "e\u0301a     -"]


COLOUR_STORIES = [
    ("a terminal", True, {"TERM": "xterm"}, True),
    ("no terminal", False, {"TERM": "xterm"}, False),
    ("NO_COLOR", True, {"TERM": "xterm", "NO_COLOR": "1"}, False),
    ("a dumb terminal", True, {"TERM": "dumb"}, False),
    ("an unknown terminal", True, {}, False),
]


@pytest.mark.parametrize(
    ("case", "terminal", "env", "want"), COLOUR_STORIES, ids=[s[0] for s in COLOUR_STORIES]
)
def test_colour_only_where_it_is_wanted(
    monkeypatch: pytest.MonkeyPatch, case: str, terminal: bool, env: dict[str, str], want: bool
) -> None:
    class Stream:
        def isatty(self) -> bool:
            return terminal

    for name in ("TERM", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(output.sys, "stdout", Stream())
    assert (output.paint("FAILED", "red") != "FAILED") is want


EXIT_STORIES = [
    ("SUCCEEDED", 0, 0),
    ("FAILED", 3, 3),
    ("FAILED", None, 1),
    ("FAILED", -9, 1),
    ("CANCELLED", None, 1),
    ("TIMEOUT", None, 124),
]


@pytest.mark.parametrize(("status", "code", "want"), EXIT_STORIES)
def test_a_jobs_own_exit_code(status: str, code: int | None, want: int) -> None:
    assert exit_code({"status": status, "exit_code": code}) == want


def test_the_final_statuses_are_the_controllers() -> None:
    assert set(FINAL) == {status.value for status in FINAL_STATUSES}


def test_exit_codes_are_the_documented_ones() -> None:
    assert {code.name: code.value for code in Exit} == {
        "OK": 0,
        "FAILED": 1,
        "USAGE": 2,
        "NOT_FOUND": 3,
        "REFUSED": 4,
        "UNREACHABLE": 5,
        "TIMED_OUT": 124,
        "INTERRUPTED": 130,
        "TERMINATED": 143,
    }


def test_progress_says_what_is_known() -> None:
    progress = {"step": 4, "steps": 6, "loss": 4.6, "tokens_per_s": 12345.6}
    assert (
        progress_line({"id": "j1", "progress": progress}) == "j1: step 4 of 6, loss 4.6000, 12,346 tokens/s"
    )
    bare = {"step": 4, "steps": None, "loss": None, "tokens_per_s": None}
    assert progress_line({"id": "j1", "progress": bare}) == "j1: step 4"
