"""Job states, their reasons, and the edges between states.

Status and reason are two enums with a total mapping: every reason belongs to exactly one status, so
a record that names its reason cannot carry a status that contradicts it.
"""

from __future__ import annotations

from enum import StrEnum


class JobStatus(StrEnum):
    PENDING = "PENDING"
    STARTING = "STARTING"
    RUNNING = "RUNNING"
    RECOVERING = "RECOVERING"
    STOPPING = "STOPPING"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"
    TIMEOUT = "TIMEOUT"

    @property
    def final(self) -> bool:
        return self in FINAL

    @property
    def allocated(self) -> bool:
        """True while the job holds nodes."""
        return self in ALLOCATED


FINAL = frozenset({JobStatus.SUCCEEDED, JobStatus.FAILED, JobStatus.CANCELLED, JobStatus.TIMEOUT})
ALLOCATED = frozenset({JobStatus.STARTING, JobStatus.RUNNING, JobStatus.RECOVERING, JobStatus.STOPPING})


class Reason(StrEnum):
    """Why a job is in its status; :data:`STATUS_OF` maps each to exactly one status."""

    QUEUED = "queued"  # submitted, not yet looked at
    RESOURCES = "resources"  # not enough free nodes
    NODE_DEFICIT = "node_deficit"  # lost a node, no replacement; resumes when there is one
    FIRST_START = "first_start"
    RESUMED = "resumed"  # started again from a durable checkpoint
    PROGRESS = "progress"
    WORKER_FAILED = "worker_failed"
    NODE_FAILED = "node_failed"
    START_FAILED = "start_failed"  # a start-up deadline expired or an agent could not start it
    FINISHING = "finishing"  # every worker ended with 0
    CANCELLING = "cancelling"
    TIME_LIMIT_REACHED = "time_limit_reached"
    FAILING = "failing"
    REQUEUEING = "requeueing"
    COMPLETED = "completed"
    USER_ERROR = "user_error"  # the same error again on other hardware, or where there is none
    BUDGET_SPENT = "budget_spent"  # restarts without progress
    CANCELLED = "cancelled"
    TIME_LIMIT = "time_limit"


_S, _R = JobStatus, Reason
STATUS_OF: dict[Reason, JobStatus] = {
    _R.QUEUED: _S.PENDING,
    _R.RESOURCES: _S.PENDING,
    _R.NODE_DEFICIT: _S.PENDING,
    _R.FIRST_START: _S.STARTING,
    _R.RESUMED: _S.STARTING,
    _R.PROGRESS: _S.RUNNING,
    _R.WORKER_FAILED: _S.RECOVERING,
    _R.NODE_FAILED: _S.RECOVERING,
    _R.START_FAILED: _S.RECOVERING,
    _R.FINISHING: _S.STOPPING,
    _R.CANCELLING: _S.STOPPING,
    _R.TIME_LIMIT_REACHED: _S.STOPPING,
    _R.FAILING: _S.STOPPING,
    _R.REQUEUEING: _S.STOPPING,
    _R.COMPLETED: _S.SUCCEEDED,
    _R.USER_ERROR: _S.FAILED,
    _R.BUDGET_SPENT: _S.FAILED,
    _R.CANCELLED: _S.CANCELLED,
    _R.TIME_LIMIT: _S.TIMEOUT,
}

EDGES: frozenset[tuple[JobStatus, JobStatus]] = frozenset(
    {
        (_S.PENDING, _S.STARTING),
        (_S.PENDING, _S.CANCELLED),
        (_S.STARTING, _S.RUNNING),
        (_S.STARTING, _S.RECOVERING),
        (_S.STARTING, _S.STOPPING),
        (_S.RUNNING, _S.RECOVERING),
        (_S.RUNNING, _S.STOPPING),
        (_S.RECOVERING, _S.RUNNING),
        (_S.RECOVERING, _S.STOPPING),
        (_S.STOPPING, _S.SUCCEEDED),
        (_S.STOPPING, _S.FAILED),
        (_S.STOPPING, _S.CANCELLED),
        (_S.STOPPING, _S.TIMEOUT),
        (_S.STOPPING, _S.PENDING),
    }
)
