"""One seed, one schedule: draw it, live it through, mend everything, and see that every job finds its end."""

from __future__ import annotations

import hashlib
import math
import re
import traceback
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from myriad.control.accounting import job_ledger, job_records, restore_steps
from myriad.control.journal import decode_changes
from myriad.control.records import AllocationRecord, JobRecord
from myriad.control.replay import replay
from myriad.control.status import JobStatus
from myriad.operations.accounts import kept_until
from myriad.operations.exactly_once import seen_once
from myriad.simulator.checks import Broken
from myriad.simulator.cluster import VirtualCluster
from myriad.simulator.draw import draw
from myriad.simulator.faults import play
from myriad.simulator.scenario import Scenario
from myriad.simulator.story import about

# After the faults: restarts stop at a budget and each takes a few deadlines, the longest of them 600 s.
SETTLE_S = 20_000.0
# Operators ask for their nodes again until they are back.
PATIENCE_S = 30.0
LINGER_S = 30.0  # after the last job has ended: nothing may be left running
STORY_LINES = 60


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one schedule came to. ``digest`` is of all journal bytes: two runs of a seed must agree on it."""

    seed: int
    events: int  # handled by the controller
    callbacks: int  # of the virtual cluster
    virtual_s: float
    digest: str
    visits: Counter[tuple[str, str]]
    broken: str = ""  # the sentence, if an invariant broke
    where: str = ""  # the kind of failure, the same for the same bug however long the schedule
    story: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Tally:
    """Many schedules together. ``broken`` are the outcomes in which something broke, without their stories."""

    schedules: int = 0
    events: int = 0
    callbacks: int = 0
    virtual_s: float = 0.0
    visits: Counter[tuple[str, str]] = field(default_factory=Counter)
    broken: list[Outcome] = field(default_factory=list)

    def add(self, other: Tally) -> None:
        self.schedules += other.schedules
        self.events += other.events
        self.callbacks += other.callbacks
        self.virtual_s += other.virtual_s
        self.visits += other.visits
        self.broken += other.broken


def explore(seeds: Iterable[int]) -> Tally:
    """Play the schedules of these seeds, all of them, whatever breaks."""
    tally = Tally()
    for seed in seeds:
        found = run(draw(seed))
        broken = [found] if found.broken else []
        tally.add(Tally(1, found.events, found.callbacks, found.virtual_s, found.visits, broken))
    return tally


def run(scenario: Scenario, tell: bool = False) -> Outcome:
    """Play a scenario to its end. ``tell`` also keeps the story, at half the speed."""
    cluster: VirtualCluster | None = None
    broken, where = "", ""
    objects: tuple[str, ...] = ()
    try:
        cluster = VirtualCluster(scenario, trace=tell)
        live_through(cluster)
    except Broken as error:
        broken, where, objects = str(error), _kind(str(error)), error.objects
    except Exception as error:  # noqa: BLE001  whatever production code raises here would have ended it
        last = traceback.extract_tb(error.__traceback__)[-1]
        broken = f"{type(error).__name__} in {last.name}: {error}"
        where = f"{type(error).__name__} in {last.name}"
        objects = tuple(re.findall(r"\b[jn]\d+\b", str(error)))
    if cluster is None:
        return Outcome(scenario.seed, 0, 0, 0.0, "", Counter(), broken, where)
    digest = hashlib.sha256(cluster.controller.disk.image()).hexdigest()
    story = about(cluster.story, objects, STORY_LINES) if cluster.story is not None and broken else []
    heap = cluster.heap
    visits = cluster.coverage.visits
    return Outcome(scenario.seed, cluster.events, heap.ran, heap.now, digest, visits, broken, where, story)


def _kind(sentence: str) -> str:
    """The sentence without names and numbers."""
    return re.sub(r"\b[jn]\d+\b|\d+(\.\d+)?", "#", sentence)


def live_through(cluster: VirtualCluster) -> None:
    """Everything that a schedule goes through. Raises Broken, or whatever production code raises."""
    play(cluster)
    cluster.run(until=cluster.scenario.quiet_at)
    cluster.mend()
    _ask_back(cluster)
    cluster.heap.after(PATIENCE_S, lambda: _patience(cluster))
    if not cluster.run(cluster.heap.now + SETTLE_S, lambda: _at_rest(cluster)):
        raise Broken(*_restless(cluster))
    cluster.run(cluster.heap.now + LINGER_S)
    final(cluster)


def _ask_back(cluster: VirtualCluster) -> None:
    """The operator puts every node that is out of service back."""
    for node in cluster.people.out_of_service():
        cluster.people.undrain(node)


def _patience(cluster: VirtualCluster) -> None:
    _ask_back(cluster)
    if not _at_rest(cluster):
        cluster.heap.after(PATIENCE_S, lambda: _patience(cluster))


def _at_rest(cluster: VirtualCluster) -> bool:
    return len(cluster.people.answered) == len(cluster.scenario.jobs) and not _unfinished(cluster)


def _unfinished(cluster: VirtualCluster) -> list[JobRecord]:
    """Jobs that have not ended although the cluster is large enough for them."""
    state = cluster.state
    size = len(cluster.nodes)
    left = [state.job(name) for name in state.live]
    return [
        job
        for job in left
        if job.status is not JobStatus.PENDING
        or state.spec(job.id).nodes + (state.spec(job.id).spares if job.generation == 0 else 0) <= size
    ]


def _restless(cluster: VirtualCluster) -> tuple[str, ...]:
    left = _unfinished(cluster)
    said = "; ".join(f"{job.id} is {job.status} ({job.reason}): {job.detail}" for job in left)
    return (f"faults have stopped and jobs do not end: {said}", *(job.id for job in left))


def final(cluster: VirtualCluster) -> None:
    """What must hold once everything has come to rest."""
    state = cluster.state
    for request, job in cluster.people.answered.items():
        if state.requests.get(request) != job:
            raise Broken(f"{job} was confirmed and is gone", job)
    if len(state.table(JobRecord)) != len(cluster.people.answered):
        raise Broken(f"{len(state.table(JobRecord))} jobs from {len(cluster.people.answered)} submissions")
    for node in cluster.nodes.values():
        for worker in node.workers:
            raise Broken(
                f"{node.name} runs rank {worker.rank} of {worker.job} for ever", node.name, worker.job
            )
    _replays(cluster)
    for record in state.table(JobRecord).values():
        _ended_well(cluster, record)


def _ended_well(cluster: VirtualCluster, job: JobRecord) -> None:
    """A job that is done: its last checkpoint is there, and its ledger sums."""
    plan = cluster.plan_of(job.name)
    if job.status is JobStatus.SUCCEEDED and plan.torch:
        if (job.id, plan.steps, job.durable_generation) not in cluster.storage.markers:
            raise Broken(f"{job.id} has succeeded without its last checkpoint", job.id)
        if plan.fails_at is not None:
            raise Broken(f"{job.id} has succeeded, which its program cannot", job.id)
    reports = [report for _, report in sorted(cluster.reports.get(job.id, {}).items())]
    records = job_records(cluster.state, job.id)
    # A report may be overtaken by the status that follows it only where order is not kept.
    if job.status is JobStatus.SUCCEEDED and plan.torch and not cluster.scenario.network.reorder:
        kept = kept_until(restore_steps(records.generations))
        samples = {r.step: r.samples for r in reports if r.samples and r.step <= kept[r.generation]}
        if len(samples) != plan.steps or not seen_once(samples, 1, expected=lambda step: (step,)):
            raise Broken(
                f"{job.id} has trained on {len(samples)} of {plan.steps} samples, or not once", job.id
            )
    ledger = job_ledger(records, reports, cluster.controller.clock())
    lines, held = math.fsum(ledger.lines.values()), _held(cluster, job.id)
    if not math.isclose(lines, held, rel_tol=1e-9, abs_tol=1e-3):
        raise Broken(f"the ledger of {job.id} has {lines} accelerator-seconds, it held {held}", job.id)


def _held(cluster: VirtualCluster, job: str) -> float:
    """Accelerator-seconds that the job held, counted from its allocations in the journal and nothing else."""
    held, since, owned = 0.0, 0.0, 0
    for row in cluster.controller.disk.rows:
        for change in decode_changes(row.changes):
            if isinstance(change, AllocationRecord) and change.job == job:
                held += owned * (row.now - since)
                nodes = {*change.nodes, *change.spares, *change.lost}
                since, owned = row.now, 0 if change.released_s is not None else len(nodes)
    return held * cluster.scenario.accelerators


def _replays(cluster: VirtualCluster) -> None:
    """The journal's events in a fresh controller give the same bytes, and its fold is the state."""
    disk = cluster.controller.disk
    again = disk.open()
    found = replay(disk.rows).difference
    if found is not None:
        raise Broken(f"row {found.seq} ({found.event}) gave {found.replayed} instead of {found.recorded}")
    if list(again.records()) != list(cluster.state.records()) or list(again.live) != list(cluster.state.live):
        raise Broken("the fold of the journal is not the controller's state")
