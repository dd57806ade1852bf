"""``myriad logs JOB``: what the job's workers have written."""

from __future__ import annotations

from typing import Annotated

import typer

from myriad.cli.options import Job, State

Follow = Annotated[
    bool, typer.Option("-f", "--follow", help="Go on until the job has ended; return its exit code.")
]
Rank = Annotated[
    int | None, typer.Option("--rank", metavar="N", min=0, help="Only this rank.", show_default=False)
]
Tail = Annotated[
    int | None,
    typer.Option(
        "--tail", metavar="N", min=0, help="Begin with the last N lines of each rank.", show_default=False
    ),
]


def logs(job: Job, follow: Follow = False, rank: Rank = None, tail: Tail = None, state: State = None) -> None:
    """Print what a job's workers have written.

    Of all ranks, each line with its rank in front, or of one rank as it is.
    """
    import sys

    from myriad.cli import settings
    from myriad.cli.client import Client, job_path
    from myriad.cli.follow import exit_code
    from myriad.cli.output import talk

    client = Client(settings.load(state).state)
    view = client.get(job_path(job))
    wrote = False
    for piece in client.stream(job_path(view["id"], "/logs"), rank=rank, tail=tail, follow=follow):
        sys.stdout.buffer.write(piece)
        sys.stdout.buffer.flush()
        wrote = True
    if follow:
        raise typer.Exit(exit_code(client.get(job_path(view["id"]))))
    if not wrote:
        talk(f"{view['id']} has written nothing yet ({view['status']}: {view['detail']})")
