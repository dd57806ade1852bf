"""The interval of durable checkpoints follows the failure rate, and loses less than any fixed one."""

from __future__ import annotations

from statistics import mean

import pytest
from faulty_times import live

from myriad.control import intervals

# Steps; the best for the calm is about 26, for the rough 8.
GRID = (4, 6, 9, 13, 18, 25, 35, 50, 70, 100)
SEEDS = 50


@pytest.mark.slow
def test_the_interval_shortens_and_lengthens_with_the_rate_of_failures() -> None:
    for seed in range(3):
        calm, rough, calm_again = live(seed, None).every
        assert calm > 1.5 * rough and calm_again > 1.5 * rough, (seed, calm, rough, calm_again)


@pytest.mark.hours
@pytest.mark.timeout(7200)
def test_it_loses_less_than_every_fixed_interval() -> None:
    """Mean of 50 seeds; about 15 minutes on one core."""
    lost = {every: mean(live(seed, every).lost for seed in range(SEEDS)) for every in GRID}
    own = mean(live(seed, None).lost for seed in range(SEEDS))
    table = ", ".join(f"every {every}: {seconds:,.0f}" for every, seconds in lost.items())
    print(f"lost accelerator-seconds, mean of {SEEDS} seeds: the policy {own:,.0f}; {table}")
    assert own < min(lost.values()), table


@pytest.mark.slow
def test_a_policy_that_hears_of_no_failure_does_not_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: without the count of failures the interval only ever lengthens, and more is lost."""
    original = intervals.count
    hearing = live(0, None)
    monkeypatch.setattr(intervals, "count", lambda turn, job, failed=None: original(turn, job))
    deaf = live(0, None)
    assert deaf.every[1] >= deaf.every[0] and deaf.lost > 1.2 * hearing.lost, (deaf, hearing)
