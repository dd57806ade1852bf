"""The ledger of one allocation: lines, their sum, and where each stretch of time goes."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from myriad.operations.accounts import Account, kept_until, sum_accounts
from myriad.operations.goodput import effective_accelerators, ettr, largest_loss
from myriad.operations.ledger import (
    Allocation,
    Generation,
    Role,
    Tenure,
    add_ledgers,
    allocation_ledger,
    lines,
)
from myriad.operations.waits import Pipeline
from myriad.spec.causes import Cause
from myriad.spec.messages import StepReport


def held(
    tenures: Mapping[str, list[tuple[Role, float, float]]], until_s: float, accelerators: int = 2
) -> Allocation:
    return Allocation(
        granted_s=0.0,
        released_s=until_s,
        accelerators=dict.fromkeys(tenures, accelerators),
        tenures={node: tuple(Tenure(*t) for t in roles) for node, roles in tenures.items()},
    )


def account(**seconds: float) -> Account:
    found = Account()
    for cause, value in seconds.items():
        found.add(Cause(cause), value)
    return found


def test_a_node_is_lost_and_a_spare_takes_over() -> None:
    """Two nodes of two accelerators and a spare; b dies at 40, is missed at 42; 10 s of steps 1-10 are kept."""
    allocation = held(
        {
            "a": [(Role.RANKS, 0, 100)],
            "b": [(Role.RANKS, 0, 40), (Role.DOWN, 40, 100)],
            "c": [(Role.SPARE, 0, 42), (Role.RANKS, 42, 100)],
        },
        100,
    )
    generations = [
        Generation(1, ("a", "b"), 2, 0.0, 10.0, failed_s=40.0, verdict_s=42.0, redone=True),
        Generation(2, ("a", "c"), 2, 42.0, 50.0, ended_s=95.0),
    ]
    accounts = {(1, rank): account(compute=20.0, data_wait=2.0, other=1.0) for rank in range(4)}
    accounts |= {(2, rank): account(compute=30.0, straggler_wait=10.0) for rank in range(4)}
    ledger = allocation_ledger(allocation, generations, accounts, reports_steps=True)
    found = {cause.value: seconds for cause, seconds in ledger.items() if seconds}
    assert found == pytest.approx(
        {
            "compute": 4 * 20 + 4 * 30,
            "data_wait": 4 * 2,
            "straggler_wait": 4 * 10,
            "startup": 4 * 10,
            "detection": 2 * 2,  # of the survivor; the dead node is down from its failure on
            "recovery": 4 * 8,
            "lost_work": 4 * 7,  # 10..40 is 30 s, of which the accounts fill 23
            "spare_idle": 2 * 42,
            "node_down": 2 * 60,
            "other": 4 * 1
            + 4 * (5 + 5),  # in the steps; 90..95 after the last step; 95..100 until the release
        }
    )
    assert math.fsum(ledger.values()) == pytest.approx(100 * 6, rel=1e-9)
    assert tuple(ledger) == lines(reports_steps=True)


def test_a_command_without_step_reports() -> None:
    allocation = held({"a": [(Role.RANKS, 0, 60)]}, 60)
    generations = [
        Generation(1, ("a",), 2, 0.0, 5.0, failed_s=20.0, verdict_s=21.0, redone=True),
        Generation(2, ("a",), 2, 21.0, 23.0, ended_s=58.0),
    ]
    ledger = allocation_ledger(allocation, generations, {}, reports_steps=False)
    assert {cause.value: seconds for cause, seconds in ledger.items()} == pytest.approx(
        {
            "startup": 10,
            "detection": 2,
            "recovery": 4,
            "spare_idle": 0,
            "node_down": 0,
            "other": 4,
            "running_unattributed": 2 * (15 + 35),
        }
    )
    assert effective_accelerators(ledger, 60) is None


@pytest.mark.parametrize(
    ("story", "generations", "want"),
    [
        ("never started", [], {"startup": 200}),
        ("still starting", [Generation(1, ("a",), 2, 0.0, None)], {"startup": 200}),
        (
            "failed before it was ready, then ran",
            [
                Generation(1, ("a",), 2, 0.0, None, failed_s=30.0, verdict_s=31.0, redone=True),
                Generation(2, ("a",), 2, 31.0, 40.0),
            ],
            {"startup": 60, "detection": 2, "recovery": 18, "other": 120},
        ),
        (
            "failed for good",
            [Generation(1, ("a",), 2, 0.0, 10.0, failed_s=30.0, verdict_s=31.0, ended_s=32.0)],
            {"startup": 20, "detection": 2, "other": 2 * (20 + 69)},
        ),
        (
            "requeued after the failure",
            [Generation(1, ("a",), 2, 0.0, 10.0, failed_s=30.0, verdict_s=31.0, redone=True)],
            {"startup": 20, "lost_work": 40, "detection": 2, "recovery": 138},
        ),
        (
            "facts out of order",
            [Generation(1, ("a",), 2, 5.0, 50.0, failed_s=30.0, verdict_s=20.0, ended_s=500.0, redone=True)],
            {"startup": 60, "recovery": 140},
        ),
    ],
)
def test_stretches_without_steps(story: str, generations: list[Generation], want: dict[str, float]) -> None:
    ledger = allocation_ledger(held({"a": [(Role.RANKS, 0, 100)]}, 100), generations, {}, reports_steps=True)
    assert {c.value: s for c, s in ledger.items() if s} == pytest.approx(want), story


def test_accounts_longer_than_the_controller_saw_are_shrunk() -> None:
    allocation = held({"a": [(Role.RANKS, 0, 30)]}, 30, accelerators=1)
    ledger = allocation_ledger(
        allocation,
        [Generation(1, ("a",), 1, 0.0, 10.0, ended_s=30.0)],
        {(1, 0): account(compute=20.0, data_wait=5.0)},
        reports_steps=True,
    )
    assert ledger[Cause.COMPUTE] == pytest.approx(16) and ledger[Cause.DATA_WAIT] == pytest.approx(4)
    assert ledger[Cause.OTHER] == 0


def test_workers_share_the_accelerators_of_their_node() -> None:
    allocation = held({"a": [(Role.RANKS, 0, 20)]}, 20, accelerators=8)
    ledger = allocation_ledger(
        allocation,
        [Generation(1, ("a",), 2, 0.0, 0.0, ended_s=20.0)],
        {(1, 0): account(compute=20.0), (1, 1): account(compute=10.0)},
        reports_steps=True,
    )
    assert ledger[Cause.COMPUTE] == pytest.approx(8 * 15) and ledger[Cause.OTHER] == pytest.approx(4 * 10)


def test_roles_that_leave_a_gap_are_our_bug() -> None:
    with pytest.raises(AssertionError, match="do not tile"):
        allocation_ledger(
            held({"a": [(Role.SPARE, 0, 10), (Role.RANKS, 20, 100)]}, 100), [], {}, reports_steps=True
        )


def test_kept_steps_of_repeated_failures() -> None:
    """Generation 3 went back behind generation 2's start: so part of generation 1's kept steps is lost too."""
    kept = kept_until({1: 0, 2: 8, 3: 5})
    assert kept[1] == 5 and kept[2] == 5 and kept[3] > 10**9
    reports = [
        StepReport(job="j", generation=g, rank=0, step=s, wall_s=1.0, compute_s=1.0)
        for g, steps in ((1, range(1, 11)), (2, range(9, 11)), (3, range(6, 13)))
        for s in steps
    ]
    accounts = sum_accounts(reports, kept, {1: 1, 2: 1, 3: 1}, Pipeline())
    assert {key: a.wall_s for key, a in accounts.items()} == {(1, 0): 5.0, (3, 0): 7.0}


def test_headline() -> None:
    ledger = {Cause.COMPUTE: 400.0, Cause.DATA_WAIT: 100.0, Cause.SPARE_IDLE: 300.0, Cause.STARTUP: 200.0}
    assert effective_accelerators(ledger, 100.0) == pytest.approx(4.0)
    assert ettr(ledger) == pytest.approx(500 / 700)
    loss = largest_loss(ledger, 100.0)
    assert loss is not None and loss.cause is Cause.SPARE_IDLE and loss.accelerators == pytest.approx(3.0)
    assert largest_loss({Cause.COMPUTE: 1.0, Cause.OTHER: 0.0}, 1.0) is None
    assert add_ledgers([ledger, ledger])[Cause.STARTUP] == 400.0


TIME = st.floats(0.0, 120.0, allow_nan=False)
MAYBE = st.none() | TIME


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.tuples(TIME, MAYBE, MAYBE, MAYBE, MAYBE), max_size=4),
    st.lists(st.tuples(st.floats(0, 80), st.floats(0, 80)), min_size=4, max_size=4),
    st.booleans(),
    st.floats(0.5, 99.5),
)
def test_lines_sum_to_the_whole_whatever_the_facts(
    times: list[tuple[float, float | None, float | None, float | None, float | None]],
    seconds: list[tuple[float, float]],
    reports_steps: bool,
    died_s: float,
) -> None:
    generations = [
        Generation(i + 1, ("a", "b"), 2, *row, redone=i + 1 < len(times)) for i, row in enumerate(times)
    ]
    accounts = {
        (g.number, rank): account(compute=pair[0], other=pair[1])
        for g in generations
        for rank, pair in enumerate(seconds)
    }
    allocation = held(
        {
            "a": [(Role.RANKS, 0, 100)],
            "b": [(Role.RANKS, 0, died_s), (Role.DOWN, died_s, 100)],
            "c": [(Role.SPARE, 0, 100)],
        },
        100,
        accelerators=4,
    )
    ledger = allocation_ledger(allocation, generations, accounts, reports_steps=reports_steps)
    assert min(ledger.values()) >= 0
    assert math.fsum(ledger.values()) == pytest.approx(1200, rel=1e-9)
