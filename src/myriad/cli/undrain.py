"""``myriad undrain NODE``: take a node back into service."""

from __future__ import annotations

from myriad.cli.options import Node, State


def undrain(node: Node, state: State = None) -> None:
    """Give a node work again.

    One that is down gets a new agent.
    """
    from myriad.cli import settings
    from myriad.cli.client import Client, node_path
    from myriad.cli.drain import state_of
    from myriad.cli.output import say

    client = Client(settings.load(state).state)
    client.post(node_path(node, "/undrain"))
    say(state_of(client.get("/nodes")["nodes"], node))
