"""From the controller's records to the ledger's inputs: the allocation, its generations, the pipeline.

A generation is *ready* when its first step begins, which is where start-up ends and step accounts take over.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from myriad.control.records import AllocationRecord, GenerationRecord, JobRecord, NodeRecord
from myriad.operations.ledger import Allocation, Generation
from myriad.operations.waits import Pipeline
from myriad.server.report_roles import node_tenures
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
    spares = int(records.spec.get("spares") or 0)
    tenures = node_tenures(allocation, records.generations_of(allocation), records.nodes, spares, released_s)
    return Allocation(
        granted_s=allocation.granted_s,
        released_s=released_s,
        accelerators={name: records.nodes[name].accelerators for name in tenures},
        tenures=tenures,
    )


def ledger_generations(
    records: JobRecords, allocation: AllocationRecord, reports: Sequence[StepReport], reports_steps: bool
) -> list[Generation]:
    """The allocation's generations as the ledger wants them, oldest first."""
    newest = max((g.generation for g in records.generations), default=0)
    return [
        Generation(
            number=g.generation,
            nodes=g.nodes,
            workers_per_node=max(1, world_size_of(records.job, g) // len(g.nodes)),
            begun_s=g.begun_s,
            ready_s=ready_s(g, reports) if reports_steps else g.forked_s,
            failed_s=g.failed_s,
            verdict_s=g.verdict_s,
            ended_s=g.ended_s,
            redone=g.generation < newest,
        )
        for g in records.generations_of(allocation)
    ]


def with_last_signs(records: JobRecords, reports: Sequence[StepReport]) -> JobRecords:
    """The records with each failure no earlier than the last step that any rank of its generation finished.

    A heartbeat may be half a second old when a node dies, and the ranks step together: while one of them finished
    steps, none of them was dead. What they did until then is work, not detection.
    """
    return dataclasses.replace(
        records, generations=[_with_last_sign(g, reports) for g in records.generations]
    )


def _with_last_sign(generation: GenerationRecord, reports: Sequence[StepReport]) -> GenerationRecord:
    start_s = ready_s(generation, reports)
    if generation.failed_s is None or generation.verdict_s is None or start_s is None:
        return generation
    run_s: dict[int, float] = {}  # by rank
    for report in reports:
        if report.generation == generation.generation:
            run_s[report.rank] = run_s.get(report.rank, 0.0) + report.wall_s
    stepped_s = start_s + max(run_s.values(), default=0.0)
    failed_s = min(max(generation.failed_s, stepped_s), generation.verdict_s)
    return msgspec.structs.replace(generation, failed_s=failed_s)


def ready_s(generation: GenerationRecord, reports: Sequence[StepReport]) -> float | None:
    """When its first step began; where no restore was announced, the first step's end less its time."""
    if generation.restored_s is not None:
        return generation.restored_s
    own = [r for r in reports if r.generation == generation.generation]
    if not own:
        return None
    if generation.first_step_s is None:
        return generation.forked_s
    first = min(r.step for r in own)
    return generation.first_step_s - max(r.wall_s for r in own if r.step == first)
