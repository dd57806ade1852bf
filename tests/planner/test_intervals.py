"""How often to save: the optimum, its rounding, its steadiness, and what is said of it."""

from __future__ import annotations

import math

import pytest

from myriad.planner.intervals import (
    FIRST,
    LONGEST_S,
    choose,
    daly_interval_s,
    exposures,
    first,
    interval_steps,
    settled,
)
from myriad.spec.failures import FailureClass
from myriad.spec.job import CheckpointSpec
from myriad.spec.messages import Intervals, SaveCosts

HOUR_S = 3600.0
RATES = {FailureClass.PROCESS: 1 / HOUR_S, FailureClass.NODE: 1e-4, FailureClass.DOMAIN: 1e-5}
AUTO = CheckpointSpec()


def waste(interval_s: float, cost_s: float, mtbf_s: float) -> float:
    """Expected time per second of work with exponential failures and free restarts (Daly 2006, eq. 20)."""
    return mtbf_s / interval_s * (math.exp((interval_s + cost_s) / mtbf_s) - 1)


# The optima of fault-tolerance literature: MTBF in hours, cost in seconds, interval in seconds.
@pytest.mark.parametrize(("mtbf_h", "cost_s", "want_s"), [(3.09, 60.0, 1116), (0.23, 60.0, 276)])
def test_known_optima(mtbf_h: float, cost_s: float, want_s: float) -> None:
    assert daly_interval_s(cost_s, mtbf_h * HOUR_S) == pytest.approx(want_s, abs=1)


@pytest.mark.parametrize("ratio", (1e-6, 1e-3, 0.01, 0.1, 0.5, 1.0))
def test_nothing_near_it_is_better(ratio: float) -> None:
    """The exact waste on a fine grid of intervals is at most 1 % less than at Daly's."""
    cost_s, mtbf_s = ratio, 1.0
    best = daly_interval_s(cost_s, mtbf_s)
    grid = [best * 1.02**power for power in range(-150, 150)]
    assert waste(best, cost_s, mtbf_s) <= 1.01 * min(waste(each, cost_s, mtbf_s) for each in grid)


def test_a_save_dearer_than_two_failures_waits_for_one() -> None:
    assert daly_interval_s(300.0, 100.0) == 100.0


@pytest.mark.parametrize(
    ("seconds", "step_s", "want"),
    [(0.0, 1.0, 1), (0.4, 1.0, 1), (9.6, 1.0, 10), (126.0, 1.0, 130), (1e9, 1.0, LONGEST_S), (5.0, 30.0, 1)],
)
def test_whole_steps(seconds: float, step_s: float, want: int) -> None:
    assert interval_steps(seconds, step_s) == want


@pytest.mark.parametrize(
    ("now", "best", "want"), [(100, 119, 100), (100, 121, 121), (100, 80, 80), (0, 5, 5)]
)
def test_it_stays_where_it_is_while_that_is_near(now: int, best: int, want: int) -> None:
    assert settled(now, best) == want


def costs(durable_s: float = 1.0, fixed: tuple[str, ...] = ()) -> SaveCosts:
    return SaveCosts(0.5, 0.01, 0.05, durable_s, Intervals(3, 30, 300), fixed)


def test_each_tier_has_its_own_failures_and_costs() -> None:
    found = choose(AUTO, costs(), 0.0, exposures(RATES, survives_node=True), FIRST)
    assert found.intervals == Intervals(
        memory=interval_steps(daly_interval_s(0.01, HOUR_S), 0.5),
        peer=interval_steps(daly_interval_s(0.05, 1e4), 0.5),
        durable=interval_steps(daly_interval_s(1.0, 1e5), 0.5),
    )
    assert found.sentences()["memory"] == (
        "every 17 steps, for it costs 10 ms, a failure of processes is expected every 1h 00m: "
        "best every 8.48 s, 17 steps of 500 ms"
    )


def test_without_copies_storage_is_for_lost_nodes_too() -> None:
    found = choose(AUTO, costs(), 0.0, exposures(RATES, survives_node=False), FIRST)
    assert found.intervals.durable == interval_steps(daly_interval_s(1.0, 1 / 1.1e-4), 0.5)
    assert "of a node or of several nodes" in found.why["durable"]


def test_what_is_fixed_stays() -> None:
    job = CheckpointSpec(every_steps=7, peer_every_steps=0)
    assert first(job) == Intervals(FIRST.memory, 0, 7)
    found = choose(job, costs(fixed=("memory",)), 0.0, exposures(RATES, True), first(job))
    assert found.intervals == Intervals(3, 0, 7)
    assert found.sentences() == {
        "memory": "every 3 steps, as the program says",
        "peer": "never, as the job says",
        "durable": "every 7 steps, as the job says",
    }


def test_before_anything_was_measured_it_begins_soon() -> None:
    found = choose(AUTO, None, 0.0, exposures(RATES, True), first(AUTO))
    assert found.intervals == FIRST
    assert found.sentences()["memory"] == "every step, until one has been measured"


def test_a_checkpoint_is_not_begun_before_the_last_is_written() -> None:
    found = choose(AUTO, costs(durable_s=1e-6), 600.0, exposures(RATES, True), FIRST)
    assert found.intervals.durable == 1200
