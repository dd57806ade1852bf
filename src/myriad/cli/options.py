"""The arguments and options that several commands share, so that they are spelled and explained once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def complete_job(incomplete: str) -> list[str]:
    """Ids and names of jobs, for the shell; nothing when no cluster answers."""
    from myriad.cli.client import Client
    from myriad.cli.errors import CommandError
    from myriad.cli.settings import load

    try:
        jobs = Client(load().state).get("/jobs")["jobs"]
    except CommandError:
        return []
    known = [text for job in jobs for text in (job["id"], job["name"])]
    return [text for text in dict.fromkeys(known) if text.startswith(incomplete)]


def complete_node(incomplete: str) -> list[str]:
    """Names of nodes, for the shell."""
    from myriad.cli.client import Client
    from myriad.cli.errors import CommandError
    from myriad.cli.settings import load

    try:
        nodes = Client(load().state).get("/nodes")["nodes"]
    except CommandError:
        return []
    return [node["name"] for node in nodes if node["name"].startswith(incomplete)]


State = Annotated[
    Path | None,
    typer.Option("--state", metavar="DIR", help="The cluster's state directory.", show_default=False),
]
Port = Annotated[
    int | None,
    typer.Option("--port", metavar="N", help="Port of the HTTP API; 0 takes a free one.", show_default=False),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
Job = Annotated[
    str,
    typer.Argument(
        metavar="JOB", help="A job's id, or the newest job of that name.", autocompletion=complete_job
    ),
]
Node = Annotated[str, typer.Argument(metavar="NODE", help="A node's name.", autocompletion=complete_node)]
ClusterFile = Annotated[
    Path, typer.Option("--cluster", metavar="FILE", help="The cluster's YAML file.", show_default=False)
]
JobFile = Annotated[Path, typer.Argument(metavar="FILE", help="The job's YAML file.", show_default=False)]
