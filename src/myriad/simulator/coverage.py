"""What a run, or many, have visited of what the controller can do: edges, reasons, tiers, events and commands."""

from __future__ import annotations

from collections import Counter
from typing import get_args

from myriad.cluster.state import NODE_EDGES, NodeState
from myriad.control.commands import AgentCommand, InjectFault, StartAgent, ToAgent
from myriad.control.events import AnyEvent
from myriad.control.journal import Entry
from myriad.control.records import GenerationRecord, JobRecord, NodeRecord
from myriad.control.state import State
from myriad.control.status import EDGES, STATUS_OF, JobStatus, Reason
from myriad.spec.messages import Tier

# Everything that the controller can reach, from the tables that it asserts and the types it may use.
REACHABLE: dict[str, tuple[str, ...]] = {
    "job transitions": tuple(sorted(f"{old} -> {new}" for old, new in EDGES)),
    "job reasons": tuple(sorted(STATUS_OF)),
    "node transitions": tuple(sorted(f"{old} -> {new}" for old, new in NODE_EDGES)),
    "events": tuple(sorted(kind.__name__ for kind in get_args(AnyEvent))),
    "restore tiers": tuple(sorted(get_args(Tier))),
    "commands": tuple(sorted(kind.__name__ for kind in (*get_args(AgentCommand), StartAgent, InjectFault))),
}


class Coverage:
    """Visits by (family, name). Coverages add up."""

    def __init__(self) -> None:
        self.visits: Counter[tuple[str, str]] = Counter()
        self._jobs: dict[str, tuple[JobStatus, Reason]] = {}
        self._nodes: dict[str, NodeState] = {}

    def event(self, entry: Entry) -> None:
        visits = self.visits
        visits["events", type(entry.event).__name__] += 1
        for change in entry.changes:
            if isinstance(change, JobRecord):
                self._job(change)
            elif isinstance(change, GenerationRecord) and change.restored_s == entry.now:
                for tier in change.tiers:
                    visits["restore tiers", tier] += 1
            elif isinstance(change, NodeRecord):
                old = self._nodes.get(change.name)
                self._nodes[change.name] = change.state
                if old is not None and old is not change.state:
                    visits["node transitions", f"{old} -> {change.state}"] += 1
        for command in entry.commands:
            name = type(command.message if isinstance(command, ToAgent) else command).__name__
            visits["commands", name] += 1

    def _job(self, job: JobRecord) -> None:
        old = self._jobs.get(job.id)
        self._jobs[job.id] = job.status, job.reason
        if old is None or old[1] is not job.reason:
            self.visits["job reasons", job.reason] += 1
        if old is not None and old[0] is not job.status:
            self.visits["job transitions", f"{old[0]} -> {job.status}"] += 1

    def begin(self, state: State) -> None:
        """A new controller begins from the disk: what follows is no transition from what was lost."""
        self._jobs = {job.id: (job.status, job.reason) for job in state.table(JobRecord).values()}
        self._nodes = {node.name: node.state for node in state.table(NodeRecord).values()}


def unvisited(visits: Counter[tuple[str, str]]) -> list[tuple[str, str]]:
    """What could have been visited and was not."""
    return [
        (family, name) for family, names in REACHABLE.items() for name in names if not visits[family, name]
    ]


def unknown(visits: Counter[tuple[str, str]]) -> list[tuple[str, str]]:
    """What was visited and is in no table: a table is wrong."""
    return sorted(place for place in visits if place[1] not in REACHABLE[place[0]])
