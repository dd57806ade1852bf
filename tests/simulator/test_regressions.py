"""Schedules that once broke something, each as small as the explorer could make it: they must not any more.

A new one is made with ``myriad simulate --seed N --save tests/simulator/regressions/NAME.json``.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from myriad.simulator.explore import run
from myriad.simulator.scenario import read_found

FILES = sorted(Path(__file__).with_name("regressions").glob("*.json"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_it_breaks_nothing_any_more(file: Path) -> None:
    found = read_found(file.read_bytes())
    outcome = run(found.scenario, tell=True)
    assert not outcome.broken, "\n".join([outcome.broken, *found.scenario.lines(), *outcome.story])
