"""``myriad ps``: the jobs."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from myriad.cli.options import Json, State

All = Annotated[bool, typer.Option("-a", "--all", help="Jobs that have ended too.")]

HEADER = ("JOB", "NAME", "STATUS", "REASON", "NODES", "STEP", "LOSS", "RUN", "RESTARTS")


def ps(all_jobs: All = False, state: State = None, json: Json = False) -> None:
    """List the jobs that have not ended."""
    from myriad.cli import settings
    from myriad.cli.client import Client
    from myriad.cli.output import document, table, talk

    answer = Client(settings.load(state).state).get("/jobs", ended=all_jobs)
    if json:
        document(answer)
        return
    table(HEADER, map(_row, answer["jobs"]), paint_column="STATUS")
    if not answer["jobs"] and not all_jobs:
        talk('no job is pending or running; "myriad ps -a" shows those that have ended')


def _row(job: dict[str, Any]) -> tuple[object, ...]:
    from myriad.cli.output import duration, names

    progress = job["progress"]
    of = f"/{progress['steps']}" if progress["steps"] else ""
    wanted = f"{job['nodes_wanted']}" + (f"+{job['spares_wanted']}" if job["spares_wanted"] else "")
    return (
        job["id"],
        job["name"],
        job["status"],
        job["reason"].replace("_", " "),
        names(job["nodes"], most=4) if job["nodes"] else f"({wanted})",
        f"{progress['step']}{of}" if progress["step"] or of else None,
        progress["loss"],
        duration(job["run_s"]),
        job["restarts"],
    )
