"""``myriad down``: stop the cluster; jobs keep running unless told otherwise."""

from __future__ import annotations

from typing import Annotated

import typer

from myriad.cli.options import State

AGENTS_DEADLINE_S = 5.0  # for agents to leave by themselves, now that nothing runs

CancelJobs = Annotated[bool, typer.Option("--cancel-jobs", help="End the jobs too.")]


def down(cancel_jobs: CancelJobs = False, state: State = None) -> None:
    """Stop controller and server. Agents without a job exit; those with one keep it for the next `up`.

    With --cancel-jobs every agent of an emulated node is gone when this returns.
    """
    from myriad.cli import daemons, settings
    from myriad.cli.client import Client, Unreachable
    from myriad.cli.errors import CommandError
    from myriad.cli.output import say
    from myriad.runtime.paths import StateDir

    folder = StateDir(settings.load(state).state)
    if daemons.ping(folder) is None:
        raise Unreachable(folder.root)
    try:
        kept = [] if cancel_jobs else Client(folder.root).get("/jobs", ended=False)["jobs"]
    except CommandError:
        kept = []  # the server is gone; what matters is the controller
    daemons.stop(folder, cancel_jobs)
    if cancel_jobs:
        daemons.end_agents(folder, AGENTS_DEADLINE_S)  # one that is stopped hears nobody say so
    held = [job["id"] for job in kept if job["nodes"]]
    say(f"the cluster of state {folder.root} is down")
    if held:
        say(f'still running: {", ".join(held)}; "myriad up" takes them up again')
