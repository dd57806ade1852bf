"""The table of the ledger's lines for ``docs/ledger.md``: who predicts, measures and acts on each, and what shows it.

One row per cause, checked to be complete: a cause without a row does not import.
"""

from __future__ import annotations

from dataclasses import dataclass

from myriad.spec.causes import Cause

NOBODY = "nobody yet"


@dataclass(frozen=True, slots=True)
class Line:
    """One row; ``shown_by`` is a command."""

    predicted_by: str
    measured_by: str
    acted_on_by: str
    shown_by: str = "`myriad report JOB`"


_STEP_CLOCK = "the worker's step clock (`training.clock`)"
_WAITS = "the step clock, split across ranks (`operations.waits`)"
_GENERATIONS = "the controller's generation times (`operations.ledger`)"
_ROLES = "the roles of the allocation's nodes (`operations.ledger`)"
_PLAN = "`myriad plan`, `myriad report JOB`"
_CLUSTER = "`myriad nodes`"

_LINES: dict[Cause, Line] = {
    Cause.COMPUTE: Line(
        "planner: FLOPs over measured speed", _STEP_CLOCK, "the layout the user picks", _PLAN
    ),
    Cause.ACTIVATION_RECOMPUTE: Line(NOBODY, "zero: the trainer recomputes nothing", NOBODY),
    Cause.EXPOSED_COMMUNICATION: Line(
        "planner: collectives on the fabric", _WAITS, "scheduler: smallest fabric domain, rank order", _PLAN
    ),
    Cause.PIPELINE_BUBBLE: Line(
        "planner: the ideal schedule", _WAITS, "`layout.microbatches` and `layout.pp`", _PLAN
    ),
    Cause.DATA_WAIT: Line(NOBODY, _STEP_CLOCK, "`data.prefetch`, `data.cache`"),
    Cause.CHECKPOINT_WAIT: Line(
        "planner: bytes over storage speed",
        _STEP_CLOCK,
        "`planner.intervals`; fixed by `checkpoint.every_steps` and its like",
        _PLAN,
    ),
    Cause.STRAGGLER_WAIT: Line(NOBODY, _WAITS, NOBODY),
    Cause.EVALUATION: Line(NOBODY, _STEP_CLOCK, "the user's loop"),
    Cause.STARTUP: Line(
        "planner: template and restore", _GENERATIONS, "agent: fork from a warm template", _PLAN
    ),
    Cause.DETECTION: Line(NOBODY, _GENERATIONS, "`heartbeat` of the cluster; process exits at once"),
    Cause.RECOVERY: Line(NOBODY, _GENERATIONS, "control: spares; agent: warm template, snapshots in memory"),
    Cause.LOST_WORK: Line(NOBODY, "steps a later generation did again", "the intervals in `checkpoint`"),
    Cause.SPARE_IDLE: Line(NOBODY, _ROLES, "`spares` of the job"),
    Cause.NODE_DOWN: Line(NOBODY, _ROLES, NOBODY),
    Cause.OTHER: Line(NOBODY, "what no other line explains", "whoever reads it: above 2 % it is a bug"),
    Cause.RUNNING_UNATTRIBUTED: Line(
        NOBODY, "running time of a job without step reports", "`myriad.training.session` splits it"
    ),
    Cause.IDLE_NO_DEMAND: Line(NOBODY, NOBODY, NOBODY, _CLUSTER),
    Cause.IDLE_BLOCKED_QUOTA: Line(NOBODY, NOBODY, NOBODY, _CLUSTER),
    Cause.IDLE_BLOCKED_FRAGMENTATION: Line(NOBODY, NOBODY, "scheduler: smallest domain that fits", _CLUSTER),
    Cause.IDLE_BLOCKED_RESERVATION: Line(NOBODY, NOBODY, NOBODY, _CLUSTER),
    Cause.SPARE: Line(NOBODY, NOBODY, NOBODY, _CLUSTER),
    Cause.DRAINING: Line(NOBODY, NOBODY, "`myriad drain`, `myriad undrain`", _CLUSTER),
    Cause.REPAIR: Line(NOBODY, NOBODY, NOBODY, _CLUSTER),
}

assert set(_LINES) == set(Cause), set(_LINES) ^ set(Cause)


_INTRODUCTION = (
    "Every accelerator-second has exactly one cause. The lines of a job's report sum to wall time x accelerators, "
    "from the grant of its nodes to their release. *Nobody yet* is meant literally."
)


def ledger_markdown() -> str:
    """All of ``docs/ledger.md``."""
    inside = [cause for cause in Cause if cause.in_allocation]
    outside = [cause for cause in Cause if not cause.in_allocation]
    parts = (
        "# The ledger",
        "Generated from `myriad.operations.ledger_doc`; do not edit.",
        _INTRODUCTION,
        "## Inside an allocation",
        _table(inside),
        "## Outside any allocation",
        _table(outside),
    )
    return "\n\n".join(parts) + "\n"


def _table(causes: list[Cause]) -> str:
    rows = [
        "| line | what it is | predicted by | measured by | acted on by | shown by |",
        "|---|---|---|---|---|---|",
    ]
    for cause in causes:
        line = _LINES[cause]
        cells = (
            f"`{cause.value}`",
            cause.meaning,
            line.predicted_by,
            line.measured_by,
            line.acted_on_by,
            line.shown_by,
        )
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)
