"""``myriad drain NODE``: take a node out of service."""

from __future__ import annotations

from typing import Annotated

import typer

from myriad.cli.options import Node, State

Reason = Annotated[
    str, typer.Option("--reason", metavar="TEXT", help="Why, for others to read.", show_default=False)
]


def drain(node: Node, reason: Reason = "", state: State = None) -> None:
    """Give a node no new work.

    A busy one leaves when its job does.
    """
    from myriad.cli import settings
    from myriad.cli.client import Client, node_path
    from myriad.cli.output import say

    client = Client(settings.load(state).state)
    client.post(node_path(node, "/drain"), {"reason": reason})
    say(state_of(client.get("/nodes")["nodes"], node))


def state_of(nodes: list[dict[str, str]], name: str) -> str:
    """``n1: draining (cabling)``."""
    node = next(node for node in nodes if node["name"] == name)
    return f"{name}: {node['state']}" + (f" ({node['reason']})" if node["reason"] else "")
