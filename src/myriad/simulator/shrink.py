"""From a schedule that breaks an invariant to the smallest one found that breaks the same.

Method: greedy, to a fixed point: leave out faults and jobs (halves first, then one by one: Zeller's ddmin), then
make what is left simpler. A candidate counts only if it fails in the same way. A schedule runs in about 20 ms, so
a limit of a thousand runs is half a minute.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

import msgspec

from myriad.simulator.explore import Outcome, run
from myriad.simulator.scenario import Fault, JobPlan, Network, Scenario

RUNS_MAX = 1000

T = TypeVar("T")
replace = msgspec.structs.replace


class Shrinker:
    """Shrinks one scenario; ``runs`` counts the schedules tried."""

    def __init__(self, scenario: Scenario, where: str, play: Callable[[Scenario], Outcome] = run) -> None:
        self.best = scenario
        self.runs = 0
        self._where = where
        self._play = play

    def shrink(self) -> Scenario:
        """The smallest scenario found that still fails as the first one did."""
        while self._round() and self.runs < RUNS_MAX:
            pass
        return self.best

    def _round(self) -> bool:
        before = self.best
        self._leave_out(lambda s: s.faults, lambda s, left: replace(s, faults=left))
        self._leave_out(lambda s: s.jobs, lambda s, left: replace(s, jobs=left))
        for candidate in self._simpler():
            self._try(candidate)
        return self.best != before

    def _try(self, candidate: Scenario) -> bool:
        if candidate == self.best or self.runs >= RUNS_MAX:
            return False
        self.runs += 1
        if self._play(candidate).where != self._where:
            return False
        self.best = candidate
        return True

    def _leave_out(
        self,
        read: Callable[[Scenario], tuple[T, ...]],
        write: Callable[[Scenario, tuple[T, ...]], Scenario],
    ) -> None:
        """Drop runs of items, from half of them down to single ones."""
        size = max(1, len(read(self.best)) // 2)
        while True:
            start = 0
            while start < len(items := read(self.best)):
                left = items[:start] + items[start + size :]
                if not self._try(write(self.best, left)):
                    start += size
            if size == 1:
                return
            size //= 2

    def _simpler(self) -> Iterator[Scenario]:
        """Candidates, each made from the best so far at the moment it is asked for."""
        yield replace(self.best, network=Network())
        for field in ("jitter_s", "duplicate", "reorder"):
            yield replace(self.best, network=replace(self.best.network, **{field: 0.0}))
        yield replace(self.best, skew=0.0)
        yield replace(self.best, proof=True)
        yield replace(self.best, leaves=1)
        yield replace(self.best, accelerators=1)
        for nodes in range(1, self.best.nodes):
            yield replace(self.best, nodes=nodes)
        for number in range(len(self.best.jobs)):
            for simpler in _simpler_job(self.best.jobs[number]):
                if number < len(self.best.jobs):
                    yield replace(self.best, jobs=_put(self.best.jobs, number, simpler))
        for number in range(len(self.best.faults)):
            for fault in _simpler_fault(self.best.faults[number]):
                if number < len(self.best.faults):
                    yield replace(self.best, faults=_put(self.best.faults, number, fault))


def _put(items: tuple[T, ...], number: int, item: T) -> tuple[T, ...]:
    return (*items[:number], item, *items[number + 1 :])


def _simpler_job(job: JobPlan) -> Iterator[JobPlan]:
    plain = JobPlan(at=job.at, nodes=job.nodes)
    yield replace(plain, torch=job.torch)
    yield replace(job, at=float(int(job.at)))
    for field in (
        "nodes",
        "spares",
        "torch",
        "steps",
        "step_s",
        "snapshot_every",
        "save_every",
        "peer_every",
        "time_limit_s",
    ):
        value = 1 if field == "nodes" else getattr(plain, field)
        yield replace(job, **{field: value})
    yield replace(job, fails_at=None)


def _simpler_fault(fault: Fault) -> Iterator[Fault]:
    yield replace(fault, index=0)
    yield replace(fault, at=float(int(fault.at)))
    yield replace(fault, at=round(fault.at, 1))
    yield replace(fault, seconds=float(int(fault.seconds)))
