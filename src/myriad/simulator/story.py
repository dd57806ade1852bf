"""What happened to an object, from the first line that names it: events, changes, commands, and the world."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from myriad.control.commands import StartAgent, ToAgent
from myriad.control.journal import Entry
from myriad.control.records import AllocationRecord, JobRecord, NodeRecord

LINE_MAX = 220  # characters of one struct
# A job's whole specification, and what the virtual cluster has only one of.
_UNTOLD = frozenset(
    {"spec", "job_dir", "jobs_dir", "store_host", "store_port", "host", "job_name", "pids", "phases"}
)

Line = tuple[float, tuple[str, ...], str]


def tell(entry: Entry) -> Iterator[tuple[tuple[str, ...], str]]:
    """One handled event as (objects, text): the event, then what it changed, then what it commands."""
    event = entry.event
    named = (getattr(event, "node", ""), getattr(event, "job", ""))
    member = getattr(event, "member", None)
    yield (*named, getattr(member, "job", "")), f"EVENT {brief(event)}"
    for change in entry.changes:
        match change:
            case JobRecord():
                text = f"{change.status} ({change.reason}) generation {change.generation} {change.stage}"
                yield (change.id,), f"  {change.id} {text}: {change.detail}"
            case NodeRecord():
                yield (change.name, change.job or ""), f"  {change.name} {change.state} for {change.job}"
            case AllocationRecord():
                objects = (change.job, *change.nodes, *change.spares)
                yield objects, f"  {change.job} holds {change.nodes} + {change.spares}"
            case _:
                pass
    for command in entry.commands:
        match command:
            case ToAgent():
                objects = (command.node, getattr(command.message, "job", ""))
                yield objects, f"  to {command.node}: {brief(command.message)}"
            case StartAgent():
                yield (command.node,), f"  start the agent of {command.node}"
            case _:
                yield (), f"  {brief(command)}"


def brief(thing: object) -> str:
    """A struct's repr without what is at its default or says nothing here."""
    fields = getattr(thing, "__struct_fields__", ())
    defaults = dict(zip(reversed(fields), reversed(getattr(thing, "__struct_defaults__", ())), strict=False))
    said = [
        f"{name} {brief(value) if hasattr(value, '__struct_fields__') else value}"
        for name in fields
        if name not in _UNTOLD and (value := getattr(thing, name)) != defaults.get(name, ...) and value != ()
    ]
    text = f"{type(thing).__name__}({', '.join(said)})"
    return text if len(text) <= LINE_MAX else f"{text[:LINE_MAX]}..."


def about(story: Sequence[Line], objects: Iterable[str], last: int) -> list[str]:
    """The last lines that concern any of the objects (all lines when none is given), and every fault."""
    wanted = set(objects) - {""}
    lines = [
        f"{at:10.4f}  {text}"
        for at, named, text in story
        if not wanted or wanted & set(named) or text.startswith("FAULT")
    ]
    return lines[-last:]
