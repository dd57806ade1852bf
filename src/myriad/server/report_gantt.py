"""Who was doing what, when: one bar per node over the life of a job, from the report's generations and node roles."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from myriad.cluster.state import by_name
from myriad.server.report_svg import Piece, escape, number, strip, ticks
from myriad.spec.units import format_duration

ACTIVITIES: dict[str, tuple[str, str]] = {  # name -> (colour, what it means)
    "spare": ("#a3acb6", "idle spare"),
    "fencing": ("#8a5a2b", "fencing: old processes killed"),
    "start": ("#d98a2b", "start: template loaded, workers forked"),
    "rendezvous": ("#eab552", "rendezvous: ranks connected"),
    "restore": ("#f3d795", "restore: state loaded"),
    "running": ("#1f9d78", "running steps"),
    "failed": ("#d9534a", "failed, not yet known"),
    "stopping": ("#c4c9cf", "stopping"),
    "down": ("#5f6874", "node down"),
}
# activity -> the field of a generation at which it ends, in order
_ENDS = (
    ("fencing", "fenced_s"),
    ("start", "forked_s"),
    ("rendezvous", "rendezvous_s"),
    ("restore", "restored_s"),
)


def gantt(report: Mapping[str, Any]) -> str:
    """The chart with its legend, or nothing for a job that never held a node."""
    end_s = max((a["released_s"] for a in report["allocations"]), default=0.0)
    if end_s <= 0:
        return ""
    pieces = node_pieces(report)
    rows = []
    for node in sorted(pieces, key=by_name):
        own = pieces[node]
        told = ", ".join(f"{p.title}" for p in own)
        rows.append(f'<span class="name" title="{escape(node)}">{escape(node)}</span>')
        rows.append(strip(own, end_s, f"{node}: {told}"))
    marks = "".join(
        f'<span style="left:{100 * at / end_s:.2f}%">{number(at)} s</span>' for at in ticks(0, end_s, 6)
    )
    used = {p.colour for own in pieces.values() for p in own}
    legend = "".join(
        f'<li><span class="key" style="background:{colour}"></span>{escape(meaning)}</li>'
        for colour, meaning in ACTIVITIES.values()
        if colour in used
    )
    return (
        f'<div class="gantt">{"".join(rows)}<span></span><div class="ticks" aria-hidden="true">{marks}</div></div>'
        f'<ul class="legend">{legend}</ul>'
    )


def node_pieces(report: Mapping[str, Any]) -> dict[str, list[Piece]]:
    """Node -> its coloured stretches, in seconds from the first grant."""
    found: dict[str, list[Piece]] = {}
    for allocation in report["allocations"]:
        own = [g for g in report["generations"] if g["allocation"] == allocation["number"]]
        windows = list(_activities(own, allocation["released_s"]))
        for node, roles in allocation["node_roles"].items():
            for role in roles:
                found.setdefault(node, []).extend(_role_pieces(role, windows))
    return found


def _role_pieces(role: Mapping[str, Any], windows: Sequence[tuple[str, float, float]]) -> Iterator[Piece]:
    if role["role"] == "away":
        return
    if role["role"] != "ranks":
        yield _piece(role["role"], role["start_s"], role["end_s"])
        return
    for name, start_s, end_s in windows:
        start_s, end_s = max(start_s, role["start_s"]), min(end_s, role["end_s"])
        if end_s > start_s:
            yield _piece(name, start_s, end_s)


def _piece(name: str, start_s: float, end_s: float) -> Piece:
    colour, meaning = ACTIVITIES[name]
    return Piece(
        start_s, end_s, colour, f"{meaning}, {format_duration(end_s - start_s)} from {start_s:.2f} s"
    )


def _activities(
    generations: Sequence[Mapping[str, Any]], released_s: float
) -> Iterator[tuple[str, float, float]]:
    """(activity, start, end) of the nodes that hold ranks, without gaps from the first start to the release."""
    for index, generation in enumerate(generations):
        last = index + 1 == len(generations)
        next_s = released_s if last else generations[index + 1]["begun_s"]
        stop_s = next((generation[f] for f in ("failed_s", "ended_s") if generation[f] is not None), next_s)
        at_s, waiting = generation["begun_s"], "running"
        for name, ending in _ENDS:
            if generation[ending] is None:
                if waiting == "running" and generation["first_step_s"] is None:
                    waiting = name  # how far it got
                continue
            end_s = max(at_s, min(generation[ending], stop_s))
            yield name, at_s, end_s
            at_s = end_s
        yield waiting, at_s, max(at_s, stop_s)
        at_s = max(at_s, stop_s)
        if generation["failed_s"] is not None:
            known_s = next_s if generation["verdict_s"] is None else min(generation["verdict_s"], next_s)
            yield "failed", at_s, max(at_s, known_s)
            at_s = max(at_s, known_s)
        yield "stopping", at_s, max(at_s, next_s)
