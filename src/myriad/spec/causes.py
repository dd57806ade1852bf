"""The ledger's causes: every accelerator-second the cluster owns has exactly one of these.

The enumeration is closed and lives in ``spec`` because four rooms must agree on it: the planner predicts the
causes, the simulator fills them, operations measures them and one renderer prints them side by side. The
order of the members is the order of the report.
"""

from __future__ import annotations

from enum import StrEnum, auto


class Cause(StrEnum):
    """Where an accelerator-second went. ``cause.value`` is the ledger line's name in JSON and in reports."""

    # Inside an allocation.
    COMPUTE = auto()
    ACTIVATION_RECOMPUTE = auto()
    EXPOSED_COMMUNICATION = auto()
    PIPELINE_BUBBLE = auto()
    DATA_WAIT = auto()
    CHECKPOINT_WAIT = auto()
    STRAGGLER_WAIT = auto()
    EVALUATION = auto()
    STARTUP = auto()
    DETECTION = auto()
    RECOVERY = auto()
    LOST_WORK = auto()
    SPARE_IDLE = auto()
    NODE_DOWN = auto()
    OTHER = auto()
    # A job that sends no step reports: its time in RUNNING, never a guess.
    RUNNING_UNATTRIBUTED = auto()
    # Outside any allocation. Blocked idleness is split by what blocked it.
    IDLE_NO_DEMAND = auto()
    IDLE_BLOCKED_QUOTA = auto()
    IDLE_BLOCKED_FRAGMENTATION = auto()
    IDLE_BLOCKED_RESERVATION = auto()
    SPARE = auto()
    DRAINING = auto()
    REPAIR = auto()

    @property
    def in_allocation(self) -> bool:
        """Whether the second was spent inside a job's allocation, and so belongs to that job's report."""
        return self not in _OUTSIDE

    @property
    def meaning(self) -> str:
        """One phrase for reports and the generated documentation."""
        return _MEANINGS[self]


_OUTSIDE = frozenset(
    {
        Cause.IDLE_NO_DEMAND,
        Cause.IDLE_BLOCKED_QUOTA,
        Cause.IDLE_BLOCKED_FRAGMENTATION,
        Cause.IDLE_BLOCKED_RESERVATION,
        Cause.SPARE,
        Cause.DRAINING,
        Cause.REPAIR,
    }
)

_MEANINGS: dict[Cause, str] = {
    Cause.COMPUTE: "forward, backward and optimizer arithmetic that moved the training forward",
    Cause.ACTIVATION_RECOMPUTE: "activations computed again in the backward pass to save memory",
    Cause.EXPOSED_COMMUNICATION: "waiting in collectives after the last rank had arrived",
    Cause.PIPELINE_BUBBLE: "pipeline stages idle by the schedule",
    Cause.DATA_WAIT: "waiting for the next batch",
    Cause.CHECKPOINT_WAIT: "training stopped for a snapshot or a durable checkpoint",
    Cause.STRAGGLER_WAIT: "waiting in collectives for a slower rank to arrive",
    Cause.EVALUATION: "evaluation inside the training job",
    Cause.STARTUP: "from the grant of the nodes to the first step",
    Cause.DETECTION: "from a failure to the controller's knowing of it",
    Cause.RECOVERY: "from the failure's detection to the first new step",
    Cause.LOST_WORK: "steps that had to be executed again",
    Cause.SPARE_IDLE: "spare nodes of a job that wait for a failure",
    Cause.NODE_DOWN: "nodes of an allocation that are dead and not yet given back",
    Cause.OTHER: "measured, but explained by no other line",
    Cause.RUNNING_UNATTRIBUTED: "running time of a job that reports no steps",
    Cause.IDLE_NO_DEMAND: "free, and no job waits",
    Cause.IDLE_BLOCKED_QUOTA: "free, and jobs wait for quota",
    Cause.IDLE_BLOCKED_FRAGMENTATION: "free, and jobs wait because too few free nodes are close together",
    Cause.IDLE_BLOCKED_RESERVATION: "free, and kept for a job with a reservation",
    Cause.SPARE: "spare nodes of the cluster that wait for a failure",
    Cause.DRAINING: "drained, or finishing before a drain",
    Cause.REPAIR: "down, in repair, burning in or on probation",
}

assert set(_MEANINGS) == set(Cause)
