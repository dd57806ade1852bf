"""The controller's state as tables of records, and the fold of changes into it.

``State.apply`` is the only way a table changes, in the live controller as in a restart, so the two
cannot drift apart. Iteration follows insertion order, which follows the journal: no hash order is
ever visible.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

from myriad.cluster.state import ClusterState, Node
from myriad.control.records import (
    AllocationRecord,
    AnyRecord,
    Change,
    ClusterRecord,
    Drop,
    GenerationRecord,
    HazardRecord,
    IntervalRecord,
    JobRecord,
    MemberRecord,
    NodeRecord,
    SpecRecord,
)
from myriad.spec.job import JobSpec

R = TypeVar("R", bound=AnyRecord)

KINDS: dict[str, type[AnyRecord]] = {
    cls.__name__: cls
    for cls in (
        ClusterRecord,
        NodeRecord,
        SpecRecord,
        JobRecord,
        AllocationRecord,
        MemberRecord,
        GenerationRecord,
        IntervalRecord,
        HazardRecord,
    )
}


class State:
    """All records, by class and key, with the indexes the controller needs."""

    def __init__(self, changes: Iterable[Change] = ()) -> None:
        self._tables: dict[str, dict[str, AnyRecord]] = {name: {} for name in KINDS}
        self._members: dict[str, dict[str, MemberRecord]] = {}  # job -> node -> record
        self._specs: dict[str, JobSpec] = {}  # parsed once per job
        self.live: dict[str, None] = {}  # ids of jobs that have not ended, in order of submission
        self.requests: dict[str, str] = {}  # idempotency key -> job
        self.cluster = ClusterState()
        for change in changes:
            self.apply(change)

    def apply(self, change: Change) -> None:
        """Fold one change into the tables and indexes."""
        if isinstance(change, Drop):
            gone = self._tables[change.kind].pop(change.of, None)
            if isinstance(gone, MemberRecord):
                del self._members[gone.job][gone.node]
            return
        self._tables[type(change).__name__][change.key] = change
        match change:
            case MemberRecord():
                self._members.setdefault(change.job, {})[change.node] = change
            case JobRecord():
                if change.status.final:
                    self.live.pop(change.id, None)
                else:
                    self.live.setdefault(change.id)
            case SpecRecord():
                if change.request:
                    self.requests[change.request] = change.job
            case NodeRecord():
                self.cluster.put(as_cluster_node(change))
            case _:
                pass

    # ------------------------------------------------------------ reading

    def table(self, cls: type[R]) -> dict[str, R]:
        return self._tables[cls.__name__]  # type: ignore[return-value]

    def get(self, cls: type[R], key: str) -> R | None:
        return self.table(cls).get(key)

    def job(self, job: str) -> JobRecord:
        return self.table(JobRecord)[job]

    def node(self, name: str) -> NodeRecord:
        return self.table(NodeRecord)[name]

    def members(self, job: str) -> dict[str, MemberRecord]:
        """node -> member, in order of joining."""
        return self._members.get(job, {})

    def allocation(self, job: str) -> AllocationRecord:
        """The newest allocation of a job."""
        found = [a for a in self.allocations(job)]
        assert found, f"{job} has no allocation"
        return found[-1]

    def allocations(self, job: str) -> Iterator[AllocationRecord]:
        number = 1
        while (record := self.get(AllocationRecord, f"{job}/{number}")) is not None:
            yield record
            number += 1

    def generation(self, job: str, generation: int) -> GenerationRecord:
        return self.table(GenerationRecord)[f"{job}/{generation:06d}"]

    def spec(self, job: str) -> JobSpec:
        if job not in self._specs:
            self._specs[job] = JobSpec.model_validate(self.table(SpecRecord)[job].spec)
        return self._specs[job]

    def records(self) -> Iterator[AnyRecord]:
        for table in self._tables.values():
            yield from table.values()


def as_cluster_node(record: NodeRecord) -> Node:
    """The scheduler's view: a node without a connected agent is not there."""
    return Node(
        name=record.name,
        type=record.type,
        accelerators=record.accelerators,
        leaf=record.leaf,
        rack=record.rack,
        power_feed=record.power_feed,
        state=record.state,
        job=record.job,
    )
