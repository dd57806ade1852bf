"""The controller's state, cut into small records that are replaced whole.

A *change* is either a record (put: insert or replace by its key) or a :class:`Drop`. The state is
the fold of all changes, which is what a restart loads: it never decides again. Records are small and
per node or per generation, so that one event of a 1,250-node job rewrites a few hundred bytes.
Times are seconds on the controller's clock.
"""

from __future__ import annotations

from typing import Any

import msgspec

from myriad.cluster.state import NodeState
from myriad.control.status import STATUS_OF, JobStatus, Reason
from myriad.operations.hazard import Evidence
from myriad.spec.messages import Intervals, MemberStatus, SaveCosts, WorkerExit


class Record(msgspec.Struct, frozen=True, tag_field="record", tag=True, kw_only=True, omit_defaults=True):
    """Base; ``key`` is unique among the records of one class."""

    @property
    def key(self) -> str:
        raise AssertionError("every record names its key")


class FailureSignature(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a failure looked like, to tell a crash loop from bad luck."""

    error_class: str
    step: int | None = None
    count: int = 1  # consecutive failures that looked the same
    nodes: tuple[str, ...] = ()  # where the first-failing rank was, each once
    alike: int = 0  # failures of this class in a row before it, whatever ran in between


class ClusterRecord(Record, frozen=True):
    """The cluster as configured (ClusterSpec.model_dump) and the counter of job ids."""

    spec: dict[str, Any]
    jobs_dir: str = ""  # on storage shared by the nodes and the server
    jobs: int = 0
    closing: bool = False

    @property
    def key(self) -> str:
        return "cluster"


class NodeRecord(Record, frozen=True):
    """One node. ``connected`` is whether its agent's connection is open now."""

    name: str
    type: str
    accelerators: int
    leaf: str
    rack: str
    power_feed: str
    state: NodeState
    since_s: float
    job: str | None = None
    incarnation: str = ""
    host: str = "127.0.0.1"
    peer_port: int = 0
    connected: bool = False
    expected: bool = True  # an agent was asked for and may join
    suspect: bool = False
    reason: str = ""

    @property
    def key(self) -> str:
        return self.name


class SpecRecord(Record, frozen=True):
    """A job's specification as submitted; written once."""

    job: str
    spec: dict[str, Any]
    request: str = ""  # the client's idempotency key

    @property
    def key(self) -> str:
        return self.job


class JobRecord(Record, frozen=True):
    """The moving part of a job. ``stage`` refines STARTING, RECOVERING and STOPPING:
    ``fence`` (old processes being killed), ``store`` (rendezvous store starting), ``workers``
    (workers starting)."""

    id: str
    name: str
    reason: Reason
    detail: str
    submitted_s: float
    changed_s: float
    generation: int = 0
    numbered: int = 0  # highest generation a store was given before the job lost its nodes: used up
    stage: str = ""
    stage_deadline_s: float | None = None
    time_limit_s: float | None = None  # absolute, from the first grant
    world_size: int = 0
    lead: str = ""  # node of the rendezvous store
    start_error: str = ""  # why the current generation could not be started
    granted_s: float | None = None
    ended_s: float | None = None
    exit_code: int | None = None
    outcome: Reason | None = None  # where STOPPING leads
    durable_step: int | None = None
    durable_generation: int = 0
    restarts: int = 0
    fruitless: int = 0  # restarts since the last progress
    failure: FailureSignature | None = None
    best_step: int = 0  # highest step known to be finished

    @property
    def key(self) -> str:
        return self.id

    @property
    def status(self) -> JobStatus:
        return STATUS_OF[self.reason]

    @property
    def ending(self) -> bool:
        """True while a controller has to wait for this job's processes to end."""
        return self.status is JobStatus.STOPPING


class Move(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A node joins an allocation after its grant, or is given back before its release."""

    node: str
    at_s: float
    joins: bool = True


class AllocationRecord(Record, frozen=True):
    """The nodes a job holds: ``nodes`` in rank order, ``spares`` idle beside them, ``lost`` dead ones
    that still count until the release. A node without ``moves`` counts from the grant to the release."""

    job: str
    nodes: tuple[str, ...]
    spares: tuple[str, ...]
    lost: tuple[str, ...]
    granted_s: float
    released_s: float | None = None
    number: int = 1
    moves: tuple[Move, ...] = ()

    @property
    def key(self) -> str:
        return f"{self.job}/{self.number}"


class MemberRecord(Record, frozen=True):
    """One node's part in a job: what was last asked of its agent and what it last said."""

    job: str
    node: str
    wanted: str  # prepared | store | started | stopped
    generation: int  # the generation `wanted` speaks of
    status: MemberStatus | None = None
    exits: tuple[WorkerExit, ...] = ()  # of the job's current generation
    saved_step: int = 0  # newest durable step whose shards of all ranks here are written

    @property
    def key(self) -> str:
        return f"{self.job}/{self.node}"


class GenerationRecord(Record, frozen=True):
    """The timeline of one start of a job's workers; the ledger and the report are made from it."""

    job: str
    generation: int
    allocation: int
    nodes: tuple[str, ...]
    begun_s: float  # grant, or the verdict on the generation before
    fenced_s: float | None = None
    store_s: float | None = None
    forked_s: float | None = None
    rendezvous_s: float | None = None
    restored_s: float | None = None
    first_step_s: float | None = None
    # how it ended
    failed_s: float | None = None  # last sign of life of what failed
    verdict_s: float | None = None
    ended_s: float | None = None  # the last process was seen gone
    cause: str = ""
    culprit_node: str = ""
    culprit_rank: int | None = None
    replacement: dict[str, str] = {}  # lost node -> the node that took over, going into the next
    # where it started from
    restore_step: int | None = None
    restore_generation: int = 0
    intervals: Intervals | None = None  # how often it saves, to begin with
    tiers: tuple[str, ...] = ()  # by rank
    sources: dict[int, str] = {}  # rank -> node, of those that restored from a copy

    @property
    def key(self) -> str:
        return f"{self.job}/{self.generation:06d}"


class IntervalRecord(Record, frozen=True):
    """How often a job saves and why; ``counted_s`` is how far the time of its nodes has been counted."""

    job: str
    process: Evidence = Evidence()
    counted_s: float | None = None
    costs: SaveCosts | None = None
    busy_s: float = 0.0  # that writing the last durable checkpoint took
    intervals: Intervals | None = None
    why: dict[str, str] = {}  # by tier

    @property
    def key(self) -> str:
        return self.job


class HazardRecord(Record, frozen=True):
    """What has been seen of failures that are nobody's doing, in all jobs."""

    node: Evidence = Evidence()
    domain: Evidence = Evidence()

    @property
    def key(self) -> str:
        return "cluster"


class Drop(msgspec.Struct, frozen=True, tag_field="record", tag=True, kw_only=True):
    """Removes a record."""

    kind: str  # class name
    of: str  # key


AnyRecord = (
    ClusterRecord
    | NodeRecord
    | SpecRecord
    | JobRecord
    | AllocationRecord
    | MemberRecord
    | GenerationRecord
    | IntervalRecord
    | HazardRecord
)
Change = AnyRecord | Drop
