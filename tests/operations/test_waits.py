"""Planted delays land in their cause. Steps come from a small event simulation, not from the formula under test."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from myriad.operations.accounts import Account, sum_accounts
from myriad.operations.waits import Pipeline, split_waits
from myriad.spec.causes import Cause
from myriad.spec.messages import StepReport

STEP_S = 0.100  # compute of one rank and step
NETWORK_S = 0.010  # the collective itself, after the last arrival
DELAY_S = 0.050


def gpipe_end_s(
    compute: Sequence[Sequence[float]], outside: Sequence[float], microbatches: int
) -> list[float]:
    """When each rank is through with its part of a GPipe step. ``compute[stage][column]``, ``outside`` before it.

    A column is a chain of ranks through the stages; forward takes a third of a microbatch, backward two.
    """
    stages, columns = len(compute), len(compute[0])
    ends = [0.0] * (stages * columns)
    for column in range(columns):
        free = [outside[stage * columns + column] for stage in range(stages)]
        forward: dict[int, float] = dict.fromkeys(range(microbatches), 0.0)
        for stage in range(stages):
            for m in range(microbatches):
                forward[m] = max(free[stage], forward[m]) + compute[stage][column] / microbatches / 3
                free[stage] = forward[m]
        backward: dict[int, float] = dict.fromkeys(range(microbatches), 0.0)
        for stage in reversed(range(stages)):
            for m in range(microbatches):
                backward[m] = max(free[stage], backward[m]) + compute[stage][column] / microbatches / 1.5
                free[stage] = backward[m]
            ends[stage * columns + column] = free[stage]
    return ends


def step(
    stages: int = 1,
    columns: int = 4,
    microbatches: int = 1,
    *,
    planted: Mapping[str, Mapping[int, float]] | None = None,
    jitter: Sequence[float] | None = None,
) -> list[StepReport]:
    """One step of stages x columns ranks that end together in a collective; ``planted``: where -> rank -> seconds."""
    places = ("slow", "data", "checkpoint", "collective")
    slow, data, checkpoint, collective = ((planted or {}).get(place, {}) for place in places)
    world = stages * columns
    busy = [STEP_S + slow.get(rank, 0.0) + (jitter[rank] if jitter else 0.0) for rank in range(world)]
    before = [data.get(rank, 0.0) + checkpoint.get(rank, 0.0) for rank in range(world)]
    by_stage = [busy[stage * columns : (stage + 1) * columns] for stage in range(stages)]
    ends = gpipe_end_s(by_stage, before, microbatches)
    wall_s = max(ends) + NETWORK_S + max(collective.values(), default=0.0)
    return [
        StepReport(
            job="j1",
            generation=1,
            rank=rank,
            step=1,
            wall_s=wall_s,
            compute_s=busy[rank],
            communication_s=wall_s - busy[rank] - before[rank],
            data_s=data.get(rank, 0.0),
            checkpoint_s=checkpoint.get(rank, 0.0),
        )
        for rank in range(world)
    ]


def total(reports: Sequence[StepReport], pipeline: Pipeline) -> dict[Cause, float]:
    """Rank-seconds by cause of one step or two."""
    accounts = sum_accounts(reports, {1: 2}, {1: len({r.rank for r in reports})}, pipeline)
    return {
        cause: math.fsum(a.by_cause.get(cause, 0.0) for a in accounts.values())
        for cause in Cause
        if cause.in_allocation
    }


SHAPES = {
    "4 data-parallel ranks": (1, 4, 1),
    "8 ranks, 4 microbatches": (1, 8, 4),
    "the 3D layout: 2 stages of 4 ranks": (2, 4, 4),
    "4 stages of 2 ranks": (4, 2, 8),
}
# (what is planted, the causes it must land in with the seconds per planted second as a function of the ranks)
STORIES: dict[str, tuple[str, str, dict[Cause, Callable[[int], int]]]] = {
    "one slow rank": ("slow", "one", {Cause.STRAGGLER_WAIT: lambda n: n - 1, Cause.COMPUTE: lambda n: 1}),
    "one rank's loader": (
        "data",
        "one",
        {Cause.STRAGGLER_WAIT: lambda n: n - 1, Cause.DATA_WAIT: lambda n: 1},
    ),
    "every loader": ("data", "all", {Cause.DATA_WAIT: lambda n: n}),
    "one rank's save": (
        "checkpoint",
        "one",
        {Cause.STRAGGLER_WAIT: lambda n: n - 1, Cause.CHECKPOINT_WAIT: lambda n: 1},
    ),
    "every save": ("checkpoint", "all", {Cause.CHECKPOINT_WAIT: lambda n: n}),
    "every collective": ("collective", "all", {Cause.EXPOSED_COMMUNICATION: lambda n: n}),
    "one rank's collective": ("collective", "one", {Cause.EXPOSED_COMMUNICATION: lambda n: n}),
}


# A slow rank also stretches the pipeline's schedule: test_slow_rank_in_a_pipeline.
CASES = [
    (story, shape)
    for story in STORIES
    for shape in SHAPES
    if story != "one slow rank" or SHAPES[shape][0] == 1
]


@pytest.mark.parametrize(("story", "shape"), CASES)
def test_planted_delay_lands_in_its_cause(story: str, shape: str) -> None:
    where, who, expected = STORIES[story]
    stages, columns, microbatches = SHAPES[shape]
    world = stages * columns
    ranks = range(world) if who == "all" else [columns - 1]  # of the first stage
    pipeline = Pipeline(stages, microbatches)
    healthy = total(step(stages, columns, microbatches), pipeline)
    delayed = total(
        step(stages, columns, microbatches, planted={where: dict.fromkeys(ranks, DELAY_S)}), pipeline
    )
    for cause in healthy:
        grown = delayed[cause] - healthy[cause]
        planted = DELAY_S * (expected[cause](world) if cause in expected else 0)
        assert grown == pytest.approx(planted, abs=0.1 * DELAY_S), f"{cause.value}: {grown} for {planted}"


@pytest.mark.parametrize("rank", [0, 3, 7])
def test_slow_rank_in_a_pipeline(rank: int) -> None:
    """The ranks outside the slow chain wait for d; the chain itself also idles (p - 1) / m x d more or less."""
    pipeline = Pipeline(2, 4)
    healthy = total(step(2, 4, 4), pipeline)
    delayed = total(step(2, 4, 4, planted={"slow": {rank: DELAY_S}}), pipeline)
    grown = delayed[Cause.STRAGGLER_WAIT] - healthy[Cause.STRAGGLER_WAIT]
    assert grown == pytest.approx(7 * DELAY_S, rel=0.1)
    assert delayed[Cause.PIPELINE_BUBBLE] == pytest.approx(healthy[Cause.PIPELINE_BUBBLE], rel=1e-6)


def test_a_save_at_the_end_of_the_step_before() -> None:
    """The late rank's save is in one step's account, the others' wait in the next one's."""
    waiting, late = step(), 0
    after = [
        StepReport(
            job="j1",
            generation=1,
            rank=r.rank,
            step=2,
            wall_s=r.wall_s + (0.0 if r.rank == late else DELAY_S),
            compute_s=r.compute_s,
            communication_s=r.communication_s + (0.0 if r.rank == late else DELAY_S),
        )
        for r in waiting
    ]
    parts = total([*waiting, *after], Pipeline())
    assert parts[Cause.STRAGGLER_WAIT] == pytest.approx(3 * DELAY_S)
    assert parts[Cause.EXPOSED_COMMUNICATION] == pytest.approx(2 * 4 * NETWORK_S)


def test_what_an_early_rank_waits_in_its_first_step_is_start_up() -> None:
    """Rank 0 has restored long before the others; the generation is ready only when all have, and its steps begin then."""
    early = [
        msgspec.structs.replace(
            r,
            wall_s=r.wall_s + (DELAY_S if r.rank == 0 else 0.0),
            communication_s=r.communication_s + (DELAY_S if r.rank == 0 else 0.0),
        )
        for r in step()
    ]
    assert total(early, Pipeline()) == pytest.approx(total(step(), Pipeline()))


def test_a_late_start_hides_in_the_fill_of_the_pipeline() -> None:
    """Where the method stops: the last stage would have idled anyway for a microbatch's forward, a third of 25 ms."""
    pipeline = Pipeline(2, 4)
    healthy = total(step(2, 4, 4), pipeline)
    delayed = total(step(2, 4, 4, planted={"data": {7: DELAY_S}}), pipeline)
    hidden_s = STEP_S / 4 / 3
    grown = delayed[Cause.STRAGGLER_WAIT] - healthy[Cause.STRAGGLER_WAIT]
    truth = 7 * (DELAY_S - hidden_s)
    assert truth <= grown <= truth + 7 * min(hidden_s, NETWORK_S) + 1e-9
    assert delayed[Cause.DATA_WAIT] == pytest.approx(DELAY_S)


def test_without_a_delay_there_is_no_straggler() -> None:
    """Negative control: equal ranks wait for nobody, and all their waiting is the network's."""
    parts = total(step(), Pipeline())
    assert parts[Cause.STRAGGLER_WAIT] == pytest.approx(0.0, abs=1e-12)
    assert parts[Cause.EXPOSED_COMMUNICATION] == pytest.approx(4 * NETWORK_S)
    assert parts[Cause.PIPELINE_BUBBLE] == 0.0


def test_a_delay_in_every_rank_is_nobodys_straggling() -> None:
    parts = total(step(planted={"slow": dict.fromkeys(range(4), DELAY_S)}), Pipeline())
    assert parts[Cause.STRAGGLER_WAIT] == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize(("stages", "microbatches"), [(2, 2), (2, 8), (4, 4), (4, 16), (8, 8)])
def test_bubble_of_the_ideal_schedule(stages: int, microbatches: int) -> None:
    """GPipe, equal stages: each of the p stages idles (p - 1) / m of its compute."""
    parts = total(step(stages, 2, microbatches), Pipeline(stages, microbatches))
    assert parts[Cause.PIPELINE_BUBBLE] == pytest.approx(2 * stages * STEP_S * (stages - 1) / microbatches)
    assert parts[Cause.EXPOSED_COMMUNICATION] == pytest.approx(2 * stages * NETWORK_S)


def test_a_stage_of_one_rank_cannot_tell_slow_from_unequal() -> None:
    """Where the method stops: with no peer in the stage, the delay counts as the cut of the model."""
    parts = total(step(2, 1, 4, planted={"slow": {0: DELAY_S}}), Pipeline(2, 4))
    assert parts[Cause.STRAGGLER_WAIT] == pytest.approx(0.0, abs=1e-12)
    assert parts[Cause.PIPELINE_BUBBLE] > DELAY_S


SECONDS = st.floats(0.0, 10.0, allow_nan=False)
RANKS = st.lists(st.tuples(SECONDS, SECONDS, SECONDS, SECONDS, SECONDS), min_size=1, max_size=8)


@settings(max_examples=200, deadline=None)
@given(RANKS, st.sampled_from([1, 2, 4]), st.integers(1, 8))
def test_parts_are_non_negative_and_sum_to_the_wait(
    ranks: list[tuple[float, ...]], stages: int, microbatches: int
) -> None:
    reports = [
        StepReport(
            job="j1",
            generation=1,
            rank=rank,
            step=1,
            wall_s=sum(parts),
            compute_s=parts[0],
            communication_s=parts[1],
            data_s=parts[2],
            checkpoint_s=parts[3],
            evaluation_s=parts[4],
        )
        for rank, parts in enumerate(ranks)
    ]
    waits = split_waits(reports, 8, Pipeline(stages, microbatches))
    assert set(waits) == set(range(len(ranks)))
    for report in reports:
        found = waits[report.rank]
        parts = (found.pipeline_bubble_s, found.straggler_wait_s, found.exposed_communication_s)
        assert min(parts) >= 0
        assert math.fsum(parts) == pytest.approx(report.communication_s, abs=1e-9)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.floats(0.0, 0.002), min_size=8, max_size=8),
    st.integers(0, 7),
    st.floats(0.05, 0.5),
)
def test_straggler_under_noise(jitter: list[float], rank: int, delay_s: float) -> None:
    """Ranks that differ by up to 2 % do not hide a delay of half a step and more."""
    healthy = total(step(1, 8, jitter=jitter), Pipeline())
    delayed = total(step(1, 8, jitter=jitter, planted={"slow": {rank: delay_s}}), Pipeline())
    grown = delayed[Cause.STRAGGLER_WAIT] - healthy[Cause.STRAGGLER_WAIT]
    assert 0.9 * 7 * delay_s <= grown <= 1.1 * 7 * delay_s + 1e-9


def test_a_missing_report_is_other_and_a_report_that_claims_too_much_is_cut() -> None:
    reports = step()[:3]
    accounts = sum_accounts(reports, {1: 1}, {1: 4}, Pipeline())
    assert accounts[1, 3].by_cause == {Cause.OTHER: reports[0].wall_s}
    greedy = StepReport(job="j1", generation=1, rank=0, step=1, wall_s=1.0, compute_s=3.0, data_s=1.0)
    account: Account = sum_accounts([greedy], {1: 1}, {1: 1}, Pipeline())[1, 0]
    assert account.wall_s == pytest.approx(1.0)
    assert account.by_cause[Cause.COMPUTE] == pytest.approx(0.75)
