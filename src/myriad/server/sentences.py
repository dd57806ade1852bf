"""The journal told to people: one row becomes no, one or several sentences.

Method: a record's time fields are set once, by the row whose ``now`` they hold; a field that equals the row's
time is therefore news, and no earlier row has to be read to tell what a row changed. Rows of one instant are
told apart by what has been said in it. Trade-off: what no time field marks (step reports, snapshots, a member's
statuses) is not told here; telling a row costs about 10 us.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import TypedDict

from myriad.control import events as ev
from myriad.control.commands import InjectFault, ToAgent
from myriad.control.records import (
    AllocationRecord,
    Change,
    Drop,
    GenerationRecord,
    JobRecord,
    NodeRecord,
    SpecRecord,
)
from myriad.control.status import JobStatus, Reason
from myriad.runtime.store import JournalRow
from myriad.spec.messages import Commit
from myriad.spec.units import format_duration


class HumanEvent(TypedDict):
    """One sentence of the timeline. ``seq`` is the journal row's; a row may have several."""

    seq: int
    time: str
    kind: str
    job: str | None
    node: str | None
    text: str


# Finds the record of a job's generation as it is now.
FindGeneration = Callable[[str, int], GenerationRecord | None]

# The part of a generation's start that ends at each time field, in order.
_PHASES = (
    ("fenced_s", "fence"),
    ("store_s", "store"),
    ("forked_s", "start"),
    ("rendezvous_s", "rendezvous"),
    ("restored_s", "restore"),
    ("first_step_s", "first step"),
)


# Statuses that say no more than the allocation's, the failure's or the request's own sentence.
_TOLD_OTHERWISE = (JobStatus.STARTING, JobStatus.RECOVERING)


def iso(now_s: float) -> str:
    """Seconds on the controller's clock (which counts from 1970, UTC) as ISO 8601 with milliseconds."""
    return datetime.fromtimestamp(now_s, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


class Narrator:
    """Tells rows in the order of the journal; may begin anywhere."""

    def __init__(self, find_generation: FindGeneration) -> None:
        self._find = find_generation
        self._instant: float | None = None
        self._told: set[tuple[object, ...]] = set()

    def tell(self, row: JournalRow) -> Iterator[HumanEvent]:
        """The sentences of one row: what happened, then what it led to."""
        if row.now != self._instant:
            self._instant, self._told = row.now, set()
        for kind, job, node, text in self._parts(row):
            if (kind, job, node, text) not in self._told:
                self._told.add((kind, job, node, text))
                yield HumanEvent(seq=row.seq, time=iso(row.now), kind=kind, job=job, node=node, text=text)

    def _parts(self, row: JournalRow) -> Iterator[_Part]:
        yield from _happening(row)
        for change in _last_versions(row.changes):
            match change:
                case GenerationRecord():
                    yield from self._generation(change, row.now)
                case AllocationRecord():
                    yield from _allocation(change, row.now)
                case JobRecord() if change.changed_s == row.now and not _told_otherwise(change):
                    yield "job", change.id, None, _job_text(change)
                case NodeRecord() if change.since_s == row.now and change.state.value not in (
                    "busy",
                    "spare",
                ):
                    reason = f" ({change.reason})" if change.reason else ""
                    yield "node", None, change.name, f"{change.name}: {change.state.value}{reason}"
                case _:
                    pass
        for command in row.commands:
            match command:
                case ToAgent(message=Commit() as commit):
                    yield (
                        "checkpoint",
                        commit.job,
                        None,
                        f"{commit.job}: checkpoint of step {commit.step} committed",
                    )
                case InjectFault():
                    yield "fault", None, None, f"fault injected: {command.kind} {command.target}"
                case _:
                    pass

    def _generation(self, record: GenerationRecord, now: float) -> Iterator[_Part]:
        job, number = record.job, record.generation
        if record.verdict_s == now:
            node = record.culprit_node or None
            yield "failure", job, node, f"{job}: {record.cause}; fencing generation {number}"
        if record.fenced_s == now and (number > 1 or record.restore_step is not None):
            before = self._find(job, number - 1)
            yield "restart", job, None, f"{job}: {_takeover(before)}{_restart(record)}"
        if record.first_step_s == now:
            yield "first_step", job, None, f"{job}: {_first_step(record)}"


_Part = tuple[str, str | None, str | None, str]


def _told_otherwise(job: JobRecord) -> bool:
    return job.status in _TOLD_OTHERWISE or job.reason is Reason.QUEUED


def _last_versions(changes: list[Change]) -> list[Change]:
    """Of the versions of a record that one row went through, the last; of a job, the last in each reason."""
    last: dict[tuple[object, ...], Change] = {}
    for change in changes:
        if not isinstance(change, Drop):
            reason = change.reason if isinstance(change, JobRecord) else None
            last[type(change), change.key, reason] = change
    return list(last.values())


def _happening(row: JournalRow) -> Iterator[_Part]:
    """The event itself, where it says more than its changes."""
    match row.event:
        case ev.ClusterConfigured(spec=spec):
            yield "cluster", None, None, f'cluster "{spec["name"]}" configured'
        case ev.ControllerStarted():
            yield "controller", None, None, "the controller has started"
        case ev.DownRequested(cancel_jobs=cancel):
            yield (
                "controller",
                None,
                None,
                f"the cluster goes down; jobs {'are cancelled' if cancel else 'keep running'}",
            )
        case ev.AgentConnected(node=node):
            yield "agent", None, node, f"{node}: agent connected"
        case ev.AgentDisconnected(node=node):
            yield "agent", None, node, f"{node}: the agent's connection closed"
        case ev.AgentExited(node=node):
            yield "agent", None, node, f"{node}: the agent's process is gone"
        case ev.NodeSilent(node=node):
            text = f"{node}: silent for {format_duration(row.event.silent_s)} ({row.event.beats} heartbeats)"
            yield "agent", None, node, text
        case ev.CancelRequested(job=job):
            yield "request", job, None, f"{job}: cancel requested"
        case ev.DrainRequested(node=node, reason=reason):
            yield "request", None, node, f"{node}: drain requested{f' ({reason})' if reason else ''}"
        case ev.UndrainRequested(node=node):
            yield "request", None, node, f"{node}: undrain requested"
        case ev.JobSubmitted(spec=spec):
            yield from _submitted(row.changes, str(spec["name"]))
        case _:
            pass


def _submitted(changes: list[Change], name: str) -> Iterator[_Part]:
    for change in changes:
        if isinstance(change, SpecRecord):  # a repeated request makes none
            yield "request", change.job, None, f"{change.job}: {name} submitted"


def _allocation(record: AllocationRecord, now: float) -> Iterator[_Part]:
    job = record.job
    if record.granted_s == now and record.released_s is None:
        spares = f" with {_named('spare', record.spares)}" if record.spares else ""
        yield "allocation", job, None, f"{job}: granted {_named('node', record.nodes)}{spares}"
    if record.released_s == now:
        yield (
            "allocation",
            job,
            None,
            f"{job}: nodes released after {format_duration(now - record.granted_s)}",
        )


def _job_text(job: JobRecord) -> str:
    code = f", exit code {job.exit_code}" if job.exit_code is not None and job.status.final else ""
    detail = f": {job.detail}" if job.detail else ""
    return f"{job.id}: {job.status} ({job.reason.value.replace('_', ' ')}{code}){detail}"


def _named(what: str, names: tuple[str, ...]) -> str:
    """``node n1``, ``nodes n1, n2``; the first eight."""
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return f"{what}{'' if len(names) == 1 else 's'} {', '.join(names[:8])}{more}"


def _takeover(before: GenerationRecord | None) -> str:
    if before is None or not before.replacement:
        return ""
    return ", ".join(f"{new} takes over from {old}" for old, new in before.replacement.items()) + "; "


def _restart(record: GenerationRecord) -> str:
    """Where all ranks begin, and from which tier."""
    if record.restore_step is None:
        return "all ranks start again"  # a command resumes by itself, if it can
    tiers = Counter(record.tiers)
    if len(tiers) == 1:
        source = f"all from {record.tiers[0]}"
    else:
        source = ", ".join(f"{count} from {tier}" for tier, count in tiers.items())
    return f"all ranks restart from step {record.restore_step} ({source})"


def _first_step(record: GenerationRecord) -> str:
    """How long the start took, by phase."""
    assert record.first_step_s is not None
    begun, parts = record.begun_s, []
    for field, phase in _PHASES:
        at: float | None = getattr(record, field)
        if at is not None and at > begun:
            parts.append(f"{phase} {format_duration(at - begun)}")
            begun = at
    total = format_duration(record.first_step_s - record.begun_s)
    return f"generation {record.generation} finished its first step after {total} ({', '.join(parts)})"
