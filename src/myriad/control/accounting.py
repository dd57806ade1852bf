"""The ledger of a job, from the controller's records of it and its workers' step reports.

Method: records become the ledger's inputs (allocations with each node's roles, generations, the pipeline), step
reports become accounts per rank, and :mod:`myriad.operations.ledger` tiles each allocation with them. A
generation is *ready* when its first step begins, which is where start-up ends and step accounts take over.
:func:`job_ledger` is what the report of a live job and a simulated run both call, so a planted delay lands in the
same line in either. About 0.6 ms for 4 nodes, 3 generations and 100 reports.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import msgspec

from myriad.control.records import AllocationRecord, GenerationRecord, JobRecord, NodeRecord, SpecRecord
from myriad.control.state import State
from myriad.control.tenures import node_tenures
from myriad.operations.accounts import kept_until, sum_accounts
from myriad.operations.ledger import Allocation, Generation, add_ledgers, allocation_ledger
from myriad.operations.waits import Pipeline
from myriad.spec.causes import Cause
from myriad.spec.messages import StepReport


@dataclass(frozen=True, slots=True)
class JobRecords:
    """Everything the controller knows of one job. ``spec`` is JobSpec.model_dump; sequences are oldest first."""

    job: JobRecord
    spec: Mapping[str, Any]
    allocations: Sequence[AllocationRecord]
    generations: Sequence[GenerationRecord]
    nodes: Mapping[str, NodeRecord]  # at least those of the allocations

    def generations_of(self, allocation: AllocationRecord) -> list[GenerationRecord]:
        return [g for g in self.generations if g.allocation == allocation.number]


@dataclass(frozen=True, slots=True)
class JobLedger:
    """Where a job's accelerator-seconds went, allocation by allocation (oldest first) and in all."""

    allocations: tuple[Allocation, ...]
    of_allocation: tuple[dict[Cause, float], ...]

    @property
    def lines(self) -> dict[Cause, float]:
        """All allocations summed; empty for a job that never held a node."""
        return add_ledgers(self.of_allocation)

    @property
    def accelerator_seconds(self) -> float:
        """What the job owned, and what the lines sum to."""
        return math.fsum(a.accelerator_seconds for a in self.allocations)


def job_records(state: State, job: str) -> JobRecords:
    """What a controller's state says of one job now. Raises KeyError for an unknown job."""
    record = state.job(job)
    allocations = tuple(state.allocations(job))
    numbers = range(1, record.generation + 1)
    found = (state.get(GenerationRecord, f"{job}/{number:06d}") for number in numbers)
    generations = tuple(generation for generation in found if generation is not None)
    names = [name for a in allocations for name in (*a.nodes, *a.spares, *a.lost)]
    names += [name for generation in generations for name in generation.nodes]
    return JobRecords(
        job=record,
        spec=state.table(SpecRecord)[job].spec,
        allocations=allocations,
        generations=generations,
        nodes={name: state.node(name) for name in names},
    )


def job_ledger(records: JobRecords, reports: Sequence[StepReport], now_s: float) -> JobLedger:
    """Every accelerator-second the job held until ``now_s`` (the controller's clock) has one cause.

    ``reports`` come in any order. Each allocation's lines sum to what it owned by construction, which is asserted.
    """
    reports = sorted(reports, key=attrgetter("generation", "step", "rank"))
    own = by_generation(reports)
    records = _with_last_signs(records, own)
    worlds = {g.generation: world_size_of(records.job, g) for g in records.generations}
    kept = kept_until(restore_steps(records.generations))
    accounts = sum_accounts(reports, kept, worlds, pipeline_of(records.spec))
    reports_steps = bool(reports) or records.spec.get("model") is not None
    allocations = tuple(ledger_allocation(records, a, now_s) for a in records.allocations)
    generations = ledger_generations(records, own, reports_steps)
    return JobLedger(
        allocations,
        tuple(
            allocation_ledger(allocation, generations[record.number], accounts, reports_steps=reports_steps)
            for record, allocation in zip(records.allocations, allocations, strict=True)
        ),
    )


def pipeline_of(spec: Mapping[str, Any]) -> Pipeline:
    """How the job's step is scheduled; a command has no pipeline that we know of."""
    layout = spec.get("layout") or {}
    return Pipeline(layout.get("pp", 1), layout.get("microbatches", 1))


def world_size_of(job: JobRecord, generation: GenerationRecord) -> int:
    return len(generation.tiers) or job.world_size


def restore_steps(generations: Sequence[GenerationRecord]) -> dict[int, int]:
    """Generation -> the step it started from, 0 for the beginning."""
    return {g.generation: g.restore_step or 0 for g in generations}


def ledger_allocation(records: JobRecords, allocation: AllocationRecord, now_s: float) -> Allocation:
    """The allocation with each node's roles over time; up to ``now_s`` while it is held."""
    released_s = now_s if allocation.released_s is None else allocation.released_s
    released_s = max(released_s, allocation.granted_s)
    tenures = node_tenures(allocation, records.generations_of(allocation), records.nodes, released_s)
    return Allocation(
        granted_s=allocation.granted_s,
        released_s=released_s,
        accelerators={name: records.nodes[name].accelerators for name in tenures},
        tenures=tenures,
    )


def ledger_generations(
    records: JobRecords, own: Mapping[int, Sequence[StepReport]], reports_steps: bool
) -> dict[int, list[Generation]]:
    """Allocation -> its generations as the ledger wants them, oldest first; ``own``: see by_generation."""
    newest = max((g.generation for g in records.generations), default=0)
    found: dict[int, list[Generation]] = {a.number: [] for a in records.allocations}
    for g in records.generations:
        found[g.allocation].append(
            Generation(
                number=g.generation,
                nodes=g.nodes,
                workers_per_node=max(1, world_size_of(records.job, g) // len(g.nodes)),
                begun_s=g.begun_s,
                ready_s=ready_s(g, own.get(g.generation, ())) if reports_steps else g.forked_s,
                failed_s=g.failed_s,
                verdict_s=g.verdict_s,
                ended_s=g.ended_s,
                redone=g.generation < newest,
            )
        )
    return found


def by_generation(reports: Iterable[StepReport]) -> dict[int, list[StepReport]]:
    """Generation -> its step reports, in the order they come."""
    found: dict[int, list[StepReport]] = {}
    for report in reports:
        found.setdefault(report.generation, []).append(report)
    return found


def with_last_signs(records: JobRecords, reports: Sequence[StepReport]) -> JobRecords:
    """The records with each failure no earlier than the last step that any rank of its generation finished.

    A heartbeat may be half a second old when a node dies, and the ranks step together: while one of them finished
    steps, none of them was dead. What they did until then is work, not detection.
    """
    return _with_last_signs(records, by_generation(reports))


def _with_last_signs(records: JobRecords, own: Mapping[int, Sequence[StepReport]]) -> JobRecords:
    return dataclasses.replace(
        records, generations=[_with_last_sign(g, own.get(g.generation, ())) for g in records.generations]
    )


def _with_last_sign(generation: GenerationRecord, own: Sequence[StepReport]) -> GenerationRecord:
    start_s = ready_s(generation, own)
    if generation.failed_s is None or generation.verdict_s is None or start_s is None:
        return generation
    run_s: dict[int, float] = {}  # by rank
    for report in own:
        run_s[report.rank] = run_s.get(report.rank, 0.0) + report.wall_s
    stepped_s = start_s + max(run_s.values(), default=0.0)
    failed_s = min(max(generation.failed_s, stepped_s), generation.verdict_s)
    return msgspec.structs.replace(generation, failed_s=failed_s)


def ready_s(generation: GenerationRecord, own: Sequence[StepReport]) -> float | None:
    """When its first step began; where no restore was announced, the first step's end less its time.

    ``own`` are the generation's step reports.
    """
    if generation.restored_s is not None:
        return generation.restored_s
    if not own:
        return None
    if generation.first_step_s is None:
        return generation.forked_s
    first = min(r.step for r in own)
    return generation.first_step_s - max(r.wall_s for r in own if r.step == first)
