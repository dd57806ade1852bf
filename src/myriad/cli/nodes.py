"""``myriad nodes``: the nodes."""

from __future__ import annotations

from typing import Any

from myriad.cli.options import Json, State

HEADER = (
    "NODE",
    "STATE",
    "JOB",
    "TYPE",
    "ACCELERATORS",
    "CPUS",
    "MEMORY",
    "LEAF",
    "RACK",
    "AGENT",
    "FOR",
    "REASON",
)


def nodes(state: State = None, json: Json = False) -> None:
    """List the nodes."""
    from myriad.cli import settings
    from myriad.cli.client import Client
    from myriad.cli.output import document, table

    answer = Client(settings.load(state).state).get("/nodes")
    if json:
        document(answer)
    else:
        table(HEADER, map(_row, answer["nodes"]), paint_column="STATE")


def _row(node: dict[str, Any]) -> tuple[object, ...]:
    from myriad.cli.output import duration
    from myriad.spec.units import format_bytes

    agent = "silent" if node["suspect"] else "connected" if node["connected"] else "away"
    return (
        node["name"],
        node["state"],
        node["job"],
        node["type"],
        node["accelerators"],
        node["hardware"]["cpus"],
        format_bytes(node["hardware"]["memory_bytes"]),
        node["leaf"],
        node["rack"],
        agent,
        duration(node["state_s"]),
        node["reason"],
    )
