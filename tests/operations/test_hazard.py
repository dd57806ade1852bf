"""The posterior of the failure rate: what it believes before, after and long after failures."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from myriad.operations.hazard import AGE_DAYS, MEMORY_FAILURES, Evidence, observe, rate_per_node_day
from myriad.spec.failures import DAY_S, PUBLISHED_RATE, FailureClass

PRIOR = PUBLISHED_RATE[FailureClass.NODE]

# name: failures seen, node-days seen, the least and the most the rate may be, in failures a node-day
BELIEFS: dict[str, tuple[float, float, float, float]] = {
    "nothing seen: within ten times what fleets have": (0, 0, PRIOR, 10 * PRIOR),
    "a day of 1,250 nodes and none": (0, 1_250, PRIOR / 10, PRIOR),
    "as fleets have, a day of 1,250 nodes": (8, 1_250, PRIOR / 1.5, PRIOR * 1.5),
    "as fleets have, a week of 1,250 nodes": (57, 8_750, PRIOR / 1.2, PRIOR * 1.2),
    "two in an hour of four nodes": (2, 1 / 6, 3, 12),
    "three in a minute of four nodes": (3, 4 / 1440, 300, 1500),
}


@pytest.mark.parametrize("name", BELIEFS)
def test_belief(name: str) -> None:
    failures, days, least, most = BELIEFS[name]
    assert least <= rate_per_node_day(Evidence(failures, days), PRIOR) <= most


def seen(source: random.Random, rate: float, nodes: int, count: int) -> Iterator[tuple[float, float]]:
    """(seconds, node-days) until each of ``count`` failures."""
    for _ in range(count):
        seconds = source.expovariate(rate * nodes) * DAY_S
        yield seconds, seconds * nodes / DAY_S


@pytest.mark.parametrize("factor", (10.0, 0.1))
def test_a_change_is_followed_within_a_few_failures(factor: float) -> None:
    """The mean over 200 histories: within a factor of two after three times the memory."""
    found = []
    for seed in range(200):
        source, evidence, now = random.Random(seed), Evidence(), 0.0
        for rate, count in ((PRIOR, 40), (PRIOR * factor, round(3 * MEMORY_FAILURES))):
            for seconds, days in seen(source, rate, 1_250, count):
                now += seconds
                evidence = observe(evidence, now, days, failures=1)
        found.append(rate_per_node_day(evidence, PRIOR))
    assert 0.5 < sum(found) / len(found) / (PRIOR * factor) < 2


@given(
    st.floats(0, 1e4),
    st.floats(0, 1e7),
    st.floats(1e-6, 1e3),
    st.sampled_from(list(FailureClass)),
)
def test_failures_raise_the_rate_and_quiet_days_lower_it(
    failures: float, days: float, more: float, of: FailureClass
) -> None:
    prior = PUBLISHED_RATE[of]
    rate = rate_per_node_day(Evidence(failures, days), prior)
    assert 0 < rate < float("inf")
    assert rate_per_node_day(Evidence(failures + more, days), prior) >= rate
    assert rate_per_node_day(Evidence(failures, days + more), prior) <= rate * (1 + 1e-9)


def test_what_was_seen_is_forgotten_with_its_age() -> None:
    old = observe(Evidence(), 0.0, 100.0, failures=5)
    later = observe(old, AGE_DAYS * DAY_S, 0.0)
    assert later.failures == pytest.approx(5 / 2.718281828, abs=1e-6)
    assert later.node_days / later.failures == pytest.approx(old.node_days / old.failures)


def test_a_clock_that_goes_back_forgets_nothing() -> None:
    old = observe(Evidence(), 1e6, 100.0, failures=5)
    assert observe(old, 0.0, 0.0) == Evidence(old.failures, old.node_days, 0.0)
