"""Random histories: every invariant after every event, an end for every job, and exact replay."""

from __future__ import annotations

import pytest
from chaos import Chaos, everything_back, heal, replays
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from myriad.control.records import JobRecord
from myriad.control.status import JobStatus, Reason

SEEDS = st.integers(0, 2**32 - 1)
STEPS = st.integers(1, 300)
QUIET = settings(
    max_examples=200,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
    database=None,
    phases=(Phase.generate, Phase.shrink),  # to explain a failure costs minutes and says little here
)


@given(seed=SEEDS, steps=STEPS)
@QUIET
def test_every_job_ends_or_says_what_it_waits_for(seed: int, steps: int) -> None:
    world = Chaos(seed, steps).run()
    heal(world)
    for job in world.state.table(JobRecord).values():
        waits = job.status is JobStatus.PENDING and job.reason in (Reason.RESOURCES, Reason.NODE_DEFICIT)
        assert job.status.final or waits, f"once the faults have stopped: {job}"
    everything_back(world)
    for job in world.state.table(JobRecord).values():
        fits = world.state.spec(job.id).nodes + world.state.spec(job.id).spares <= len(world.agents)
        assert job.status.final or not fits, f"on a whole cluster: {job}"
    replays(world)


@pytest.mark.slow
@given(seed=SEEDS, steps=st.integers(200, 1500))
@settings(QUIET, max_examples=250)
def test_long_histories(seed: int, steps: int) -> None:
    world = Chaos(seed, steps).run()
    heal(world)
    everything_back(world)
    replays(world)
