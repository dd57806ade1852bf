"""The explorer itself: hundreds of schedules without a broken invariant, all that can be reached, byte for byte."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from myriad.cli.explored import explore as explore_in_processes
from myriad.simulator.coverage import REACHABLE, unknown, unvisited
from myriad.simulator.draw import draw
from myriad.simulator.explore import Tally, run
from myriad.simulator.scenario import Fault, JobPlan, Kind, Scenario
from myriad.simulator.shrink import Shrinker

SEEDS = 300
SEEDS_ALL = 20_000


def judge(tally: Tally) -> None:
    """Nothing broke, and everything that the controller can reach was reached."""
    for family, names in REACHABLE.items():
        for name in names:
            print(f"{tally.visits[family, name]:8d}  {family}: {name}")
    assert not tally.broken, [(outcome.seed, outcome.broken) for outcome in tally.broken[:5]]
    assert not unknown(tally.visits), "reached, and in no table"
    assert not unvisited(tally.visits), "never reached"


def test_no_invariant_breaks_and_everything_is_visited() -> None:
    tally = explore_in_processes(SEEDS, 0, 2)
    assert tally.schedules == SEEDS and tally.events > 50 * SEEDS
    judge(tally)


@pytest.mark.hours
@pytest.mark.timeout(3600)
def test_no_invariant_breaks_in_very_many_schedules() -> None:
    tally = explore_in_processes(SEEDS_ALL, 0, len(os.sched_getaffinity(0)))
    assert tally.schedules == SEEDS_ALL
    judge(tally)


def test_a_seed_is_the_same_byte_for_byte_in_every_process() -> None:
    """Also where strings hash in another way, so that no order of a set or dict of strings matters."""
    code = (
        "from myriad.simulator.draw import draw\n"
        "from myriad.simulator.explore import run\n"
        "for seed in range(40, 60):\n"
        "    found = run(draw(seed))\n"
        "    print(seed, found.digest, found.events, found.callbacks, found.virtual_s)\n"
    )
    shown = [
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert shown[0] == shown[1] and len(shown[0].splitlines()) == 20
    here = run(draw(40))
    assert shown[0].splitlines()[0].split()[:3] == ["40", here.digest, str(here.events)]


def test_telling_the_story_changes_nothing() -> None:
    for seed in range(10):
        quiet, told = run(draw(seed)), run(draw(seed), tell=True)
        assert (quiet.digest, quiet.callbacks) == (told.digest, told.callbacks)


def test_leaving_out_a_fault_does_not_change_what_the_others_draw() -> None:
    """A fault that hits nothing may go without a trace: the same journal to the byte."""
    job = JobPlan(at=1.0, nodes=2, steps=20)
    kill = Fault(at=5.0, kind=Kind.KILL_WORKER, index=3)
    idle = Fault(at=4.0, kind=Kind.CLOCK_JUMP, seconds=9.0)  # the controller's clock was read at its start
    with_it = Scenario(seed=7, nodes=3, jobs=(job,), faults=(idle, kill))
    without = Scenario(seed=7, nodes=3, jobs=(job,), faults=(kill,))
    assert run(with_it).digest == run(without).digest
    assert run(without).digest != run(Scenario(seed=7, nodes=3, jobs=(job,))).digest


def test_shrinking_keeps_what_matters_and_nothing_else() -> None:
    """A failure that takes two of twenty faults, on at least three nodes."""
    needed = {(Kind.CUT, 3), (Kind.KILL_NODE, 11)}
    noise = tuple(Fault(at=float(n), kind=Kind.DRAIN, index=n) for n in range(18))
    faults = (*noise[:7], Fault(at=7.25, kind=Kind.CUT, index=3), *noise[7:])
    faults = (*faults, Fault(at=30.5, kind=Kind.KILL_NODE, index=11, seconds=2.5))
    big = Scenario(
        seed=1, nodes=6, leaves=2, jobs=(JobPlan(at=1.0, nodes=2), JobPlan(at=2.0, nodes=3)), faults=faults
    )

    def play(scenario: Scenario) -> object:
        has = {(fault.kind, fault.index) for fault in scenario.faults}
        broken = needed <= has and scenario.nodes >= 3 and bool(scenario.jobs)
        return type("Found", (), {"where": "here" if broken else ""})

    shrinker = Shrinker(big, "here", play)  # type: ignore[arg-type]
    small = shrinker.shrink()
    assert {(fault.kind, fault.index) for fault in small.faults} == needed
    assert (small.nodes, small.leaves, len(small.jobs)) == (3, 1, 1)
    assert shrinker.runs < 200
