"""``myriad cancel JOB``: end a job."""

from __future__ import annotations

from myriad.cli.options import Job, State


def cancel(job: Job, state: State = None) -> None:
    """End a job. One that has ended already is left as it is."""
    from myriad.cli import settings
    from myriad.cli.client import Client, job_path
    from myriad.cli.output import say

    client = Client(settings.load(state).state)
    view = client.get(job_path(job))
    client.post(job_path(view["id"], "/cancel"))
    view = client.get(job_path(view["id"]))
    say(f"{view['id']}: {view['status']} ({view['reason'].replace('_', ' ')})")
