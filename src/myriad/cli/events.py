"""``myriad events``: what has happened, as sentences."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from myriad.cli.options import Json, State, complete_job, complete_node

OfJob = Annotated[
    str | None,
    typer.Argument(
        metavar="[JOB]", help="Only of this job.", show_default=False, autocompletion=complete_job
    ),
]
OfNode = Annotated[
    str | None,
    typer.Option(
        "--node", metavar="NODE", help="Only of this node.", show_default=False, autocompletion=complete_node
    ),
]
Follow = Annotated[bool, typer.Option("-f", "--follow", help="Go on, with a job until it has ended.")]


def events(
    job: OfJob = None, node: OfNode = None, follow: Follow = False, state: State = None, json: Json = False
) -> None:
    """Print the timeline of the cluster, a job or a node."""
    from myriad.cli import settings
    from myriad.cli.client import Client
    from myriad.cli.errors import CommandError, Exit
    from myriad.cli.output import document

    if json and follow:
        raise CommandError("--json prints one document and so cannot follow; leave out --follow", Exit.USAGE)
    client = Client(settings.load(state).state)
    if follow:
        _follow(client.stream("/events", job=job, node=node, follow=True))
        return
    answer = client.get("/events", job=job, node=node)
    if json:
        document(answer)
        return
    for event in answer["events"]:
        _print(event)


def _follow(pieces: Any) -> None:
    """Print events as their lines come in."""
    from json import loads
    from sys import stdout

    rest = b""
    for piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            _print(loads(line))
        stdout.flush()


def _print(event: dict[str, Any]) -> None:
    from myriad.cli.output import say

    say(f"{event['time']}  {event['text']}")
