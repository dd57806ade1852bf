"""One handling of one event: the state it reads, the changes it makes, the commands it gives.

A turn is the only thing that may write the state, and it writes by whole records, so what is journaled
is exactly what was changed, in order. A put that changes nothing leaves no trace.
"""

from __future__ import annotations

from typing import Any

import msgspec

from myriad.cluster.state import NODE_EDGES, NodeState
from myriad.control.commands import AgentCommand, AnyCommand, ToAgent
from myriad.control.records import AnyRecord, Change, ClusterRecord, Drop, JobRecord, NodeRecord
from myriad.control.state import State
from myriad.control.status import EDGES, STATUS_OF, Reason
from myriad.fabric import Fabric


class Turn:
    """The context every transition function takes."""

    def __init__(self, state: State, fabric: Fabric | None, now: float) -> None:
        self.state = state
        self.fabric_or_none = fabric
        self.now = now
        self.changes: list[Change] = []
        self.commands: list[AnyCommand] = []
        self.reschedule = False

    @property
    def fabric(self) -> Fabric:
        assert self.fabric_or_none is not None, "the cluster is not configured yet"
        return self.fabric_or_none

    @property
    def cluster(self) -> ClusterRecord:
        record = self.state.get(ClusterRecord, "cluster")
        assert record is not None, "the cluster is not configured yet"
        return record

    def put(self, record: AnyRecord) -> None:
        """Insert or replace a record."""
        if self.state.get(type(record), record.key) == record:
            return
        self.state.apply(record)
        self.changes.append(record)

    def drop(self, record: AnyRecord) -> None:
        change = Drop(kind=type(record).__name__, of=record.key)
        self.state.apply(change)
        self.changes.append(change)

    def set_job(self, job: JobRecord, reason: Reason | None = None, **changes: Any) -> JobRecord:
        """Replace fields of a job; a new status must be one edge away from the old one."""
        if reason is not None and reason is not job.reason:
            new = STATUS_OF[reason]
            assert new is job.status or (job.status, new) in EDGES, f"{job.id}: {job.status} -> {new}"
            changes |= {"reason": reason, "changed_s": self.now}
        updated = msgspec.structs.replace(job, **changes)
        self.put(updated)
        return updated

    def set_node(self, node: NodeRecord, state: NodeState | None = None, **changes: Any) -> NodeRecord:
        """Replace fields of a node; a change of state makes the queue worth another look."""
        if state is not None and state is not node.state:
            assert (node.state, state) in NODE_EDGES, f"{node.name}: {node.state} -> {state}"
            changes |= {"state": state, "since_s": self.now}
            self.reschedule = True
        updated = msgspec.structs.replace(node, **changes)
        self.put(updated)
        return updated

    def give(self, command: AnyCommand) -> None:
        self.commands.append(command)

    def send(self, node: str, message: AgentCommand) -> None:
        """Give a command to a node's agent. Without a connection nothing is sent: the next hello of that
        agent makes the controller ask again for whatever is still wanted."""
        record = self.state.node(node)
        if record.connected:
            self.give(ToAgent(node=node, incarnation=record.incarnation, message=message))
