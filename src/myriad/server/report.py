"""The report of a job as one JSON document: what it did, what each failure cost, and where every second went.

Made from the controller's records and the workers' step reports alone, so a report can be made again at any
time, of a running job too (up to ``now_s``). Times are seconds from the first grant; ``ledger`` is in
accelerator-seconds and sums to ``wall_time_s x accelerators``. A run of 8 ranks x 10,000 steps
takes about 2 s.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from myriad.control.records import GenerationRecord
from myriad.operations.accounts import kept_until, sum_accounts
from myriad.operations.exactly_once import Expected
from myriad.operations.goodput import effective_accelerators, ettr, largest_loss
from myriad.operations.ledger import Allocation, add_ledgers, allocation_ledger
from myriad.server.report_inputs import (
    JobRecords,
    ledger_allocation,
    ledger_generations,
    pipeline_of,
    ready_s,
    restore_steps,
    with_last_signs,
    world_size_of,
)
from myriad.server.report_recoveries import recoveries, timeline
from myriad.server.report_steps import (
    Execution,
    executions,
    losses,
    redone_losses_equal,
    redone_steps,
    samples_seen_once,
)
from myriad.spec.arithmetic import mfu
from myriad.spec.causes import Cause
from myriad.spec.messages import StepReport

REPORT_VERSION = 1


@dataclass(frozen=True, slots=True)
class Beside:
    """What a report may be set beside: the plan, an unbroken run, the data's true order, the accelerator's peak."""

    predicted: Mapping[str, float | None] | None = None  # cause -> accelerator-seconds
    reference_losses: Sequence[str | None] | None = None  # of another job, from its report
    peak_flops_per_s: float | None = None  # of one accelerator
    epoch_samples: int | None = None
    expected_samples: Expected | None = None


def build_report(
    records: JobRecords, reports: Sequence[StepReport], now_s: float, beside: Beside | None = None
) -> dict[str, Any]:
    """The report as plain JSON values. ``now_s`` is the controller's clock, for what has not ended yet."""
    beside = beside or Beside()
    reports = sorted(reports, key=lambda r: (r.generation, r.step, r.rank))
    records = with_last_signs(records, reports)
    steps = executions(reports, kept_until(restore_steps(records.generations)))
    allocations = [ledger_allocation(records, a, now_s) for a in records.allocations]
    ledgers = _ledgers(records, reports, allocations)
    return {
        "version": REPORT_VERSION,
        **_identity(records),
        **_worth(allocations, add_ledgers(ledgers), steps, beside),
        "ledger": {cause.value: seconds for cause, seconds in add_ledgers(ledgers).items()},
        "predicted_ledger": None if beside.predicted is None else dict(beside.predicted),
        **_steps(records, reports, steps, beside),
        "recoveries": recoveries(records.generations, steps),
        "timeline": timeline(records.allocations, records.generations, steps),
        "generations": [_generation(records, g) for g in records.generations],
        "allocations": [
            _allocation(records, record.number, allocation, ledger)
            for record, allocation, ledger in zip(records.allocations, allocations, ledgers, strict=True)
        ],
    }


def _identity(records: JobRecords) -> dict[str, Any]:
    job = records.job
    return {
        "job": job.id,
        "name": job.name,
        "status": job.status.value,
        "reason": job.reason.value,
        "detail": job.detail,
        "exit_code": job.exit_code,
        "restarts": job.restarts,
        "nodes": records.spec.get("nodes"),
        "spares": records.spec.get("spares", 0),
        "layout": records.spec.get("layout") if records.spec.get("model") else None,
    }


def _ledgers(
    records: JobRecords, reports: Sequence[StepReport], allocations: Sequence[Allocation]
) -> list[dict[Cause, float]]:
    kept = kept_until(restore_steps(records.generations))
    worlds = {g.generation: world_size_of(records.job, g) for g in records.generations}
    accounts = sum_accounts(reports, kept, worlds, pipeline_of(records.spec))
    reports_steps = bool(reports) or records.spec.get("model") is not None
    return [
        allocation_ledger(
            allocation,
            ledger_generations(records, record, reports, reports_steps),
            accounts,
            reports_steps=reports_steps,
        )
        for record, allocation in zip(records.allocations, allocations, strict=True)
    ]


def _worth(
    allocations: Sequence[Allocation],
    ledger: Mapping[Cause, float],
    steps: Sequence[Execution],
    beside: Beside,
) -> dict[str, Any]:
    """The headline: what was owned, and what it was worth."""
    wall_s = math.fsum(a.wall_s for a in allocations)
    owned_s = math.fsum(a.accelerator_seconds for a in allocations)
    flops = math.fsum(e.flops for e in steps if e.kept)
    peak = beside.peak_flops_per_s
    loss = largest_loss(ledger, wall_s)
    return {
        "accelerators": _mean_accelerators(owned_s, wall_s),
        "wall_time_s": wall_s,
        "effective_accelerators": effective_accelerators(ledger, wall_s),
        "largest_loss": None
        if loss is None
        else {
            "cause": loss.cause.value,
            "accelerator_seconds": loss.accelerator_seconds,
            "accelerators": loss.accelerators,
        },
        "mfu": mfu(flops, owned_s, 1, peak) if peak and flops > 0 and owned_s > 0 else None,
        "peak_flops_per_s": peak,
        "ettr": ettr(ledger),
    }


def _mean_accelerators(owned_s: float, wall_s: float) -> float | int:
    """Owned over the wall time; an integer where no node joined late or left early, 0 without time."""
    mean = owned_s / wall_s if wall_s > 0 else 0
    return round(mean) if math.isclose(mean, round(mean), rel_tol=1e-9) else mean


def _steps(
    records: JobRecords, reports: Sequence[StepReport], steps: Sequence[Execution], beside: Beside
) -> dict[str, Any]:
    data = records.spec.get("data") or {}
    own = losses(steps)
    found: dict[str, Any] = {
        "losses": own,
        "sample_ids_seen_once": samples_seen_once(
            steps, data.get("global_batch"), beside.epoch_samples, beside.expected_samples
        ),
        "redone_steps": redone_steps(steps),
        "redone_losses_equal": redone_losses_equal(steps),
        "executions": _executions(records, reports, steps),
    }
    if beside.reference_losses is not None:
        found["reference_losses"] = list(beside.reference_losses)
        found["losses_equal_reference"] = bool(own) and own == list(beside.reference_losses)
    return found


def _executions(
    records: JobRecords, reports: Sequence[StepReport], steps: Sequence[Execution]
) -> list[dict[str, Any]]:
    """Every execution of every step; ``at_s`` is its end, counted from the first grant."""
    if not records.allocations:
        return []
    origin_s = records.allocations[0].granted_s
    ends_s = {}
    for generation in records.generations:
        start_s = ready_s(generation, reports)
        ends_s[generation.generation] = (generation.begun_s if start_s is None else start_s) - origin_s
    found = []
    for e in steps:
        if e.generation not in ends_s:
            continue
        ends_s[e.generation] += e.wall_s
        found.append(
            {
                "step": e.step,
                "generation": e.generation,
                "kept": e.kept,
                "at_s": ends_s[e.generation],
                "wall_s": e.wall_s,
                "loss": None if e.loss is None else e.loss.hex(),
                "tokens_per_s": e.tokens / e.wall_s if e.tokens and e.wall_s > 0 else None,
            }
        )
    return found


def _generation(records: JobRecords, g: GenerationRecord) -> dict[str, Any]:
    origin_s = records.allocations[0].granted_s if records.allocations else g.begun_s
    names = (
        "begun",
        "fenced",
        "forked",
        "rendezvous",
        "restored",
        "first_step",
        "failed",
        "verdict",
        "ended",
    )
    moments = {f"{name}_s": getattr(g, f"{name}_s") for name in names}
    return {
        "generation": g.generation,
        "allocation": g.allocation,
        "nodes": list(g.nodes),
        "restore_step": g.restore_step or 0,
        "cause": g.cause,
        **{name: None if at_s is None else at_s - origin_s for name, at_s in moments.items()},
    }


def _allocation(
    records: JobRecords, number: int, allocation: Allocation, ledger: Mapping[Cause, float]
) -> dict[str, Any]:
    origin_s = records.allocations[0].granted_s
    return {
        "number": number,
        "granted_s": allocation.granted_s - origin_s,
        "released_s": allocation.released_s - origin_s,
        "accelerators": _mean_accelerators(allocation.accelerator_seconds, allocation.wall_s),
        "wall_time_s": allocation.wall_s,
        "ledger": {cause.value: seconds for cause, seconds in ledger.items()},
        "node_roles": {
            node: [
                {"role": t.role.value, "start_s": t.start_s - origin_s, "end_s": t.end_s - origin_s}
                for t in tenures
            ]
            for node, tenures in allocation.tenures.items()
        },
    }
