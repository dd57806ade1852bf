"""``myriad why JOB``: why a job is where it is."""

from __future__ import annotations

from myriad.cli.options import Job, Json, State


def why(job: Job, state: State = None, json: Json = False) -> None:
    """Tell why a job is in its state.

    For a pending one also how final that is: never as written, blocked by a limit, or waiting its turn.
    """
    from myriad.cli import settings
    from myriad.cli.client import Client, job_path
    from myriad.cli.output import document, say

    answer = Client(settings.load(state).state).get(job_path(job, "/why"))
    if json:
        document(answer)
    else:
        say(answer["sentence"])
