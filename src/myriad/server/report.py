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

from myriad.control.accounting import (
    JobLedger,
    JobRecords,
    by_generation,
    job_ledger,
    ready_s,
    restore_steps,
    with_last_signs,
)
from myriad.control.records import GenerationRecord
from myriad.operations.accounts import kept_until
from myriad.operations.exactly_once import Expected
from myriad.operations.goodput import effective_accelerators, ettr, largest_loss
from myriad.operations.ledger import Allocation
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
    ledger = job_ledger(records, reports, now_s)
    return {
        "version": REPORT_VERSION,
        **_identity(records),
        **_worth(ledger, steps, beside),
        "ledger": {cause.value: seconds for cause, seconds in ledger.lines.items()},
        "predicted_ledger": None if beside.predicted is None else dict(beside.predicted),
        **_steps(records, reports, steps, beside),
        "recoveries": recoveries(records.generations, steps),
        "timeline": timeline(records.allocations, records.generations, steps),
        "generations": [_generation(records, g) for g in records.generations],
        "allocations": [
            _allocation(records, record.number, allocation, lines)
            for record, allocation, lines in zip(
                records.allocations, ledger.allocations, ledger.of_allocation, strict=True
            )
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


def _worth(ledger: JobLedger, steps: Sequence[Execution], beside: Beside) -> dict[str, Any]:
    """The headline: what was owned, and what it was worth."""
    lines = ledger.lines
    wall_s = math.fsum(a.wall_s for a in ledger.allocations)
    owned_s = ledger.accelerator_seconds
    flops = math.fsum(e.flops for e in steps if e.kept)
    peak = beside.peak_flops_per_s
    loss = largest_loss(lines, wall_s)
    return {
        "accelerators": _mean_accelerators(owned_s, wall_s),
        "wall_time_s": wall_s,
        "effective_accelerators": effective_accelerators(lines, wall_s),
        "largest_loss": None
        if loss is None
        else {
            "cause": loss.cause.value,
            "accelerator_seconds": loss.accelerator_seconds,
            "accelerators": loss.accelerators,
        },
        "mfu": mfu(flops, owned_s, 1, peak) if peak and flops > 0 and owned_s > 0 else None,
        "peak_flops_per_s": peak,
        "ettr": ettr(lines),
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
    seen_once = samples_seen_once(
        steps, data.get("global_batch"), beside.epoch_samples, beside.expected_samples
    )
    if data.get("sources") and beside.expected_samples is None:
        seen_once = None  # each source has epochs of its own, and the sets are no longer there to ask
    found: dict[str, Any] = {
        "losses": own,
        "sample_ids_seen_once": seen_once,
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
    ends_s, own = {}, by_generation(reports)
    for generation in records.generations:
        start_s = ready_s(generation, own.get(generation.generation, ()))
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
    records: JobRecords, number: int, allocation: Allocation, lines: Mapping[Cause, float]
) -> dict[str, Any]:
    origin_s = records.allocations[0].granted_s
    return {
        "number": number,
        "granted_s": allocation.granted_s - origin_s,
        "released_s": allocation.released_s - origin_s,
        "accelerators": _mean_accelerators(allocation.accelerator_seconds, allocation.wall_s),
        "wall_time_s": allocation.wall_s,
        "ledger": {cause.value: seconds for cause, seconds in lines.items()},
        "node_roles": {
            node: [
                {"role": t.role.value, "start_s": t.start_s - origin_s, "end_s": t.end_s - origin_s}
                for t in tenures
            ]
            for node, tenures in allocation.tenures.items()
        },
    }
