"""The ledger of one allocation: every accelerator-second from grant to release has exactly one cause.

Method: time lines are tiled, never summed up from guesses. The allocation's time is cut into windows by what
the controller saw (starting, running, undetected failure, recovering); each node's time is cut by its role
(holding ranks, idle spare, down); a window of running is filled from the ranks' own step accounts. What the
accounts do not fill is ``lost_work`` when a later generation executed it again, else ``other``. So the lines
sum to (released - granted) x accelerators by construction, and :func:`allocation_ledger` asserts it.

Trade-off: windows are on the controller's clock and steps on each rank's own. They meet only in durations,
and what does not fit is never dropped: a shortfall goes where the unfilled time goes, an excess shrinks the
steps to the window. Measured on one host the two differ by the latency of a message, about 1 ms per
generation.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum, auto

from myriad.operations.accounts import Account, Accounts
from myriad.spec.causes import Cause

TOLERANCE = 1e-3  # of the total: what lines may miss it by (design 10); floats need about 1e-12


class Role(StrEnum):
    """What a node of an allocation is there for."""

    RANKS = auto()
    SPARE = auto()
    DOWN = auto()
    AWAY = auto()  # not yet in the allocation, or given back before its end: not owned by the job


@dataclass(frozen=True, slots=True)
class Tenure:
    """A node in one role from ``start_s`` to ``end_s`` on the controller's clock."""

    role: Role
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Allocation:
    """Nodes held from ``granted_s`` to ``released_s`` (or now); each node's tenures tile that time."""

    granted_s: float
    released_s: float
    accelerators: Mapping[str, int]  # by node
    tenures: Mapping[str, tuple[Tenure, ...]]  # by node, in order

    @property
    def wall_s(self) -> float:
        return self.released_s - self.granted_s

    @property
    def accelerator_seconds(self) -> float:
        """Of all nodes while they were in the allocation: wall time x accelerators where all stayed throughout."""
        return math.fsum(
            self.accelerators[node] * (tenure.end_s - tenure.start_s)
            for node, tenures in self.tenures.items()
            for tenure in tenures
            if tenure.role is not Role.AWAY
        )


@dataclass(frozen=True, slots=True)
class Generation:
    """One start of a job's workers in this allocation; times on the controller's clock, None: not reached."""

    number: int
    nodes: tuple[str, ...]  # in rank order
    workers_per_node: int
    begun_s: float  # the grant, or the verdict on the generation before
    ready_s: float | None  # its steps begin: all ranks restored (a job without step reports: forked)
    failed_s: float | None = None
    verdict_s: float | None = None
    ended_s: float | None = None
    redone: bool = False  # a later generation exists: what this one did after its kept steps is lost


@dataclass(frozen=True, slots=True)
class _Window:
    """A stretch of an allocation's time; ``generation`` is set where its ranks were running steps."""

    start_s: float
    end_s: float
    cause: Cause
    generation: Generation | None = None


def allocation_ledger(
    allocation: Allocation,
    generations: Sequence[Generation],
    accounts: Accounts,
    *,
    reports_steps: bool,
) -> dict[Cause, float]:
    """Accelerator-seconds by cause, in the order of :class:`Cause`; only the lines such a job can have.

    ``generations`` are those of this allocation, oldest first. Without ``reports_steps`` the time in which
    workers ran is one line, ``running_unattributed``.
    """
    windows = list(_windows(allocation, generations, reports_steps))
    spent: dict[Cause, list[float]] = {cause: [] for cause in lines(reports_steps)}
    for node, accelerators in allocation.accelerators.items():
        for tenure in _tiling(allocation, node):
            for cause, seconds in _node_time(tenure, node, windows, accounts):
                spent[cause].append(seconds * accelerators)
    ledger = {cause: math.fsum(parts) for cause, parts in spent.items()}
    _check(ledger, allocation.accelerator_seconds)
    return ledger


def add_ledgers(ledgers: Sequence[Mapping[Cause, float]]) -> dict[Cause, float]:
    """The ledger of several allocations of one job."""
    causes = {cause for ledger in ledgers for cause in ledger}
    return {
        cause: math.fsum(ledger.get(cause, 0.0) for ledger in ledgers) for cause in Cause if cause in causes
    }


def lines(reports_steps: bool) -> tuple[Cause, ...]:
    """The lines the ledger of a job has: without step reports there is no zero where nothing was measured."""
    unreported = (
        Cause.STARTUP,
        Cause.DETECTION,
        Cause.RECOVERY,
        Cause.SPARE_IDLE,
        Cause.NODE_DOWN,
        Cause.OTHER,
        Cause.RUNNING_UNATTRIBUTED,
    )
    if not reports_steps:
        return unreported
    return tuple(c for c in Cause if c.in_allocation and c is not Cause.RUNNING_UNATTRIBUTED)


def _windows(
    allocation: Allocation, generations: Sequence[Generation], reports_steps: bool
) -> Iterator[_Window]:
    """Cut the allocation's time: each stretch ends where the next begins, whatever order the facts claim."""
    at_s, end_s = allocation.granted_s, allocation.released_s
    starting = Cause.STARTUP
    for index, generation in enumerate(generations):
        following = generations[index + 1] if index + 1 < len(generations) else None
        stop_s = _stopped_s(generation, following, end_s)
        ready_s = stop_s if generation.ready_s is None else min(generation.ready_s, stop_s)
        running = Cause.OTHER if reports_steps else Cause.RUNNING_UNATTRIBUTED
        gave_up = Cause.RECOVERY if generation.redone else Cause.OTHER
        verdict_s = stop_s if generation.verdict_s is None else generation.verdict_s
        until = (
            (ready_s, starting, None),
            (stop_s, running, generation if reports_steps else None),
            (verdict_s, Cause.DETECTION, None),
            (end_s if following is None else following.begun_s, gave_up, None),
        )
        for limit_s, cause, steps in until:
            limit_s = min(max(at_s, limit_s), end_s)
            if limit_s > at_s:
                yield _Window(at_s, limit_s, cause, steps)
            at_s = limit_s
        starting = Cause.RECOVERY
    if at_s < end_s:  # no generation at all: the grant was never used
        yield _Window(at_s, end_s, Cause.STARTUP if not generations else Cause.OTHER)


def _stopped_s(generation: Generation, following: Generation | None, end_s: float) -> float:
    """When its ranks stopped making steps: the failure, else the end, else not yet."""
    for time_s in (generation.failed_s, generation.verdict_s, generation.ended_s):
        if time_s is not None:
            return time_s
    return following.begun_s if following is not None else end_s


def _tiling(allocation: Allocation, node: str) -> Iterator[Tenure]:
    at_s = allocation.granted_s
    for tenure in allocation.tenures[node]:
        assert math.isclose(tenure.start_s, at_s, abs_tol=1e-9) and tenure.end_s >= tenure.start_s, (
            f"the roles of {node} do not tile the allocation at {at_s}: {tenure}"
        )
        yield tenure
        at_s = tenure.end_s
    assert math.isclose(at_s, allocation.released_s, abs_tol=1e-9), (node, at_s, allocation.released_s)


def _node_time(
    tenure: Tenure, node: str, windows: Sequence[_Window], accounts: Accounts
) -> Iterator[tuple[Cause, float]]:
    """Seconds of one accelerator of ``node`` by cause; they sum to the tenure's length, or to 0 while it is away."""
    if tenure.role is Role.AWAY:
        return
    if tenure.role is not Role.RANKS:
        idle = Cause.SPARE_IDLE if tenure.role is Role.SPARE else Cause.NODE_DOWN
        yield idle, tenure.end_s - tenure.start_s
        return
    for window in windows:
        seconds = min(tenure.end_s, window.end_s) - max(tenure.start_s, window.start_s)
        if seconds <= 0:
            continue
        if window.generation is None or node not in window.generation.nodes:
            yield window.cause, seconds
        else:
            yield from _running_time(window.generation, node, seconds, accounts)


def _running_time(
    generation: Generation, node: str, seconds: float, accounts: Accounts
) -> Iterator[tuple[Cause, float]]:
    """Fill a stretch of running from the accounts of the node's workers, who share its accelerators evenly."""
    workers = generation.workers_per_node
    first = generation.nodes.index(node) * workers
    unfilled = Cause.LOST_WORK if generation.redone else Cause.OTHER
    for rank in range(first, first + workers):
        account = accounts.get((generation.number, rank), Account())
        shrink = min(1.0, seconds / account.wall_s) if account.wall_s > 0 else 1.0
        for cause, part_s in account.by_cause.items():
            yield cause, part_s * shrink / workers
        yield unfilled, max(0.0, seconds - account.wall_s) / workers


def _check(ledger: Mapping[Cause, float], total: float) -> None:
    assert all(seconds >= 0 for seconds in ledger.values()), ledger
    found = math.fsum(ledger.values())
    assert abs(found - total) <= TOLERANCE * total, f"ledger lines sum to {found}, not to {total}"
