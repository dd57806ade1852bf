"""From a seed to a scenario: the cluster, the jobs, the faults, and the mix of faults itself.

Swarm testing (Groce et al. 2012): each seed allows only some kinds of fault, so that one kind cannot hide
what another would show, and some seeds have none at all.
"""

from __future__ import annotations

import random

from myriad.simulator.scenario import Fault, JobPlan, Kind, Network, Scenario

# Small on purpose: a bug that needs more nodes or jobs than this has not been seen.
NODES_MAX = 6
JOBS_MAX = 4
FAULTS_MAX = 24

# Seconds a fault lasts at most, where it lasts: beyond every deadline it can touch, sometimes.
_LASTS = {
    Kind.CRASH_CONTROLLER: 30.0,
    Kind.CRASH_IN_WRITE: 10.0,
    Kind.CRASH_AFTER_WRITE: 10.0,
    Kind.CRASH_IN_COMMANDS: 10.0,
    Kind.PAUSE_CONTROLLER: 40.0,
    Kind.JOURNAL_ERROR: 10.0,
    Kind.KILL_NODE: 60.0,
    Kind.PAUSE_AGENT: 60.0,
    Kind.PAUSE_NODE: 60.0,
    Kind.PAUSE_WORKER: 60.0,
    Kind.PARTITION: 60.0,
    Kind.LOSE: 5.0,
    Kind.SLOW_LINK: 30.0,
    Kind.STORAGE_ERROR: 30.0,
    Kind.STORAGE_SLOW: 30.0,
    Kind.DOWN: 20.0,
    Kind.DOWN_CANCEL: 20.0,
}
_ENDLESS = 500.0  # longer than the longest deadline but one


def draw(seed: int) -> Scenario:
    """The scenario of a seed, always the same one."""
    source = random.Random(f"scenario {seed}")
    nodes = source.randint(1, NODES_MAX)
    kinds = [kind for kind in Kind if source.random() < 0.4]
    quiet_at = source.choice((10.0, 30.0, 100.0))
    count = source.randint(0, FAULTS_MAX) if kinds and source.random() < 0.97 else 0
    faults = [_fault(source, kinds, quiet_at) for _ in range(count)]
    faults += [
        _undrain(source, fault) for fault in faults if fault.kind is Kind.DRAIN and source.random() < 0.5
    ]
    jobs = [_job(source, nodes, quiet_at) for _ in range(source.randint(1, JOBS_MAX))]
    return Scenario(
        seed=seed,
        nodes=nodes,
        accelerators=source.choice((1, 2, 2)),
        leaves=source.randint(1, 2),
        proof=source.random() < 0.6,
        skew=source.choice((0.0, 0.0, 0.01, 0.1)),
        network=_network(source),
        jobs=tuple(sorted(jobs, key=lambda job: job.at)),
        faults=tuple(sorted(faults, key=lambda fault: fault.at)),
        quiet_at=quiet_at,
    )


def _network(source: random.Random) -> Network:
    return Network(
        delay_s=source.choice((0.0, 0.001, 0.05)),
        jitter_s=source.choice((0.0, 0.01, 0.5)),
        duplicate=source.choice((0.0, 0.0, 0.05, 0.3)),
        reorder=source.choice((0.0, 0.0, 0.0, 0.1)),
    )


def _fault(source: random.Random, kinds: list[Kind], until: float) -> Fault:
    kind = source.choice(kinds)
    at = round(source.uniform(0.0, until), 3)
    seconds = 0.0
    if kind is Kind.CLOCK_JUMP:
        seconds = source.choice((-1e5, -5.0, 0.5, 30.0, 1e5))
    elif kind in _LASTS:
        longest = _ENDLESS if source.random() < 0.05 else _LASTS[kind] ** source.random()
        seconds = round(min(longest, source.uniform(0.1, longest)), 3)
    return Fault(at=at, kind=kind, index=source.randrange(1000), seconds=seconds)


def _undrain(source: random.Random, drain: Fault) -> Fault:
    """Who drains a node often wants it back at once."""
    at = round(drain.at + source.choice((0.1, 1.0, 10.0)), 3)
    return Fault(at=at, kind=Kind.UNDRAIN, index=source.randrange(1000))


def _job(source: random.Random, nodes: int, until: float) -> JobPlan:
    steps = source.randint(1, 40)
    return JobPlan(
        at=round(source.uniform(0.0, until * source.choice((0.1, 0.7))), 3),
        nodes=min(source.randint(1, 4), nodes + (source.random() < 0.05)),
        spares=source.choice((0, 1)),
        torch=source.random() < 0.7,
        steps=steps,
        step_s=source.choice((0.1, 0.5, 3.0)),
        snapshot_every=source.choice((1, 1, 3, None)),
        save_every=source.choice((2, 5, 100, None)),
        time_limit_s=source.choice((None, None, None, 5.0, 40.0)),
        fails_at=source.randint(1, steps) if source.random() < 0.15 else None,
        fails_with=source.choice((3, 3, -9)),
        peer_every=source.choice((0, 1, 2, 5, None)),
        snapshot_s=source.choice((0.0, 0.0, 0.02)),
    )
