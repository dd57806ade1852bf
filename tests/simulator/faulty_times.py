"""A run through times of few failures, ten times as many, and few again, on virtual time."""

from __future__ import annotations

import random
from dataclasses import dataclass

from myriad.control.records import IntervalRecord, JobRecord
from myriad.control.status import JobStatus
from myriad.simulator.cluster import VirtualCluster
from myriad.simulator.faults import play
from myriad.simulator.scenario import Fault, JobPlan, Kind, Scenario

STEP_S = 60.0
SAVE_S = 60.0  # that training stands still for: the snapshot
NODES, SPARES = 2, 1
DARK_S = 120.0  # a node's power is away
SLOWNESS = 1.15  # the mean of what the virtual cluster makes of a second


@dataclass(frozen=True)
class Phase:
    """``failures`` of nodes, one every ``mtbf_s`` in the mean."""

    mtbf_s: float
    failures: int

    @property
    def seconds(self) -> float:
        return self.mtbf_s * self.failures


CALM, ROUGH = Phase(21_600.0, 15), Phase(2_160.0, 75)
PHASES = (CALM, ROUGH, CALM)


@dataclass(frozen=True)
class Life:
    """What a run came to: lost accelerator-seconds, and the durable interval at the end of each phase."""

    lost: float
    every: tuple[int, ...]
    restarts: int


def scenario(seed: int, every: int | None) -> Scenario:
    """The failures of a seed fall at the same moments whatever the interval. The job is three quarters of what could
    be done without any, so that it ends in the last phase; the failures go on until it does."""
    source = random.Random(f"times {seed}")
    faults: list[Fault] = []
    began = 0.0
    for number, phase in enumerate(PHASES):
        seconds = phase.seconds * (4 if number == len(PHASES) - 1 else 1)
        at = began
        while (at := at + source.expovariate(1 / phase.mtbf_s)) < began + seconds:
            hit = Fault(at=round(at, 3), kind=Kind.KILL_NODE, index=source.randrange(1000), seconds=DARK_S)
            # People put the node back, and look a second time.
            back = [Fault(at=hit.at + after, kind=Kind.UNDRAIN) for after in (150.0, 300.0)]
            faults += [hit, *back]
        began += seconds
    steps = int(0.75 * sum(phase.seconds for phase in PHASES) / (STEP_S * SLOWNESS))
    job = JobPlan(
        at=0.0,
        nodes=NODES,
        spares=SPARES,
        steps=steps,
        step_s=STEP_S,
        snapshot_s=SAVE_S,
        save_every=every,
        snapshot_every=steps,
    )
    return Scenario(
        seed=seed,
        nodes=NODES + SPARES,
        accelerators=1,
        jobs=(job,),
        faults=tuple(sorted(faults, key=lambda fault: fault.at)),
        quiet_at=began,
    )


def live(seed: int, every: int | None) -> Life:
    """Run the job with a fixed durable interval in steps, or with the production policy (None)."""
    cluster = VirtualCluster(scenario(seed, every), events_max=1_000_000)
    play(cluster)

    def record() -> JobRecord | None:
        return next(iter(cluster.state.table(JobRecord).values()), None)

    def ended() -> bool:
        found = record()
        return found is not None and found.status.final

    intervals, until = [], 0.0
    for phase in PHASES[:-1]:
        until += phase.seconds
        cluster.run(until, ended)
        intervals.append(_interval(cluster))
    assert cluster.run(cluster.scenario.quiet_at, ended), f"seed {seed}: the job did not end"
    intervals.append(_interval(cluster))
    job = record()
    assert job is not None and job.status is JobStatus.SUCCEEDED, job
    assert job.ended_s is not None and job.granted_s is not None
    useful_s = cluster.scenario.jobs[0].steps * STEP_S * SLOWNESS
    return Life((job.ended_s - job.granted_s - useful_s) * NODES, tuple(intervals), job.restarts)


def _interval(cluster: VirtualCluster) -> int:
    found = cluster.state.table(IntervalRecord)["j1"].intervals
    assert found is not None
    return found.durable
