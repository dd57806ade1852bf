"""``myriad simulate --explore`` and ``--seed``: what is told of schedules that hold, of one that breaks, and of nonsense."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from myriad.cli.main import main
from myriad.control import members
from myriad.control.status import STATUS_OF


@pytest.fixture
def no_fence(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted bug: every node counts as fenced at once."""
    monkeypatch.setattr(members, "is_fenced", lambda member, generation: True)


def test_schedules_that_hold(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--explore", "30", "--seed", "1000", "--workers", "1"]) == 0
    head, columns, *families = capsys.readouterr().out.splitlines()
    assert re.fullmatch(
        r"30 schedules \(seeds 1000 to 1029\), [\d,]+ events, \d+ virtual hours: no broken", head
    )
    assert columns.split() == ["visited", "of", "not", "visited"]
    counts = {line[:16].strip(): [int(n) for n in re.findall(r"\b\d+\b", line)[:2]] for line in families}
    assert counts["job reasons"][1] == len(STATUS_OF)
    assert all(visited <= of for visited, of in counts.values()) and len(counts) == 6


def test_processes_share_the_seeds(capsys: pytest.CaptureFixture[str]) -> None:
    found = []
    for workers in ("1", "2"):
        assert main(["simulate", "--explore", "60", "--workers", workers, "--json"]) == 0
        found.append(json.loads(capsys.readouterr().out))
    assert found[0] == found[1] and found[0]["schedules"] == 60 and found[0]["broken"] == []
    assert found[0]["visits"]["commands"]["StartWorkers"] > 0


@pytest.mark.usefixtures("no_fence")
def test_a_schedule_that_breaks_is_told_made_small_and_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", "--explore", "40", "--workers", "1"]) == 1
    shown = capsys.readouterr().out
    seed = re.search(r"^seed (\d+): ", shown, re.MULTILINE)
    assert seed is not None and f"\nseed {seed[1]}, commit " in shown and "\nBROKEN: " in shown
    again = f"make it a test: myriad simulate --seed {seed[1]} --save tests/simulator/regressions/seed-{seed[1]}.json"
    assert again in shown
    smallest = shown.split("The smallest schedule found that breaks the same:\n")[1].split("\n\n")[0]
    assert len(smallest.splitlines()) <= 8, smallest
    kept = tmp_path / "kept.json"
    assert main(["simulate", "--seed", seed[1], "--save", str(kept)]) == 1
    assert f"kept in {kept}; play it again: myriad simulate --scenario {kept}" in capsys.readouterr().out
    assert main(["simulate", "--scenario", str(kept)]) == 1
    assert "BROKEN: " in capsys.readouterr().out
    assert main(["simulate", "--scenario", str(kept), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["broken"] and len(found["smallest"].get("faults", [])) <= 4


def test_one_seed_is_byte_for_byte_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    shown = []
    for _ in range(2):
        assert main(["simulate", "--seed", "17"]) == 0
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1] and re.search(r"journal sha256 [0-9a-f]{64}: not broken$", shown[0].strip())


STORIES = [
    ([], "say what to simulate: --explore N, --seed N, --scenario or --journal FILE"),
    (["--explore", "3", "--journal", "x"], "--explore and --journal exclude each other: give one of them"),
    (["--seed", "3", "--scenario", "x"], "--scenario and --seed exclude each other: give one of them"),
    (["--explore", "3", "--save", "x"], "--save goes with --seed or --scenario"),
    (["--seed", "3", "--workers", "2"], "--workers goes with --explore"),
    (["--seed", "17", "--save", "x"], "nothing broke, so there is nothing to keep in x"),
    (["--scenario", "nowhere.json"], "nowhere.json cannot be read: No such file or directory"),
]


@pytest.mark.parametrize(("options", "want"), STORIES, ids=lambda value: " ".join(value)[:30])
def test_nonsense_is_one_sentence(
    options: list[str], want: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["simulate", *options]) == 2
    shown = capsys.readouterr()
    assert not shown.out and shown.err.strip() == want
    assert not list(tmp_path.iterdir())


def test_a_file_that_is_no_scenario(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "other.json"
    other.write_text('{"broken": 3}')
    assert main(["simulate", "--scenario", str(other)]) == 2
    assert "is no kept scenario (" in capsys.readouterr().err


def test_the_commit_of_the_code_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--seed", "17", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["commit"] and found["broken"] is None
