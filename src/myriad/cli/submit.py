"""``myriad submit``: hand in a job, and wait for its end if asked to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from myriad.cli.options import JobFile, Json, State

if TYPE_CHECKING:
    from myriad.cli.client import Client
    from myriad.spec.job import JobSpec

Wait = Annotated[bool, typer.Option("--wait", help="Follow the job and return its exit code.")]


def submit(file: JobFile, wait: Wait = False, state: State = None, json: Json = False) -> None:
    """Submit a job. Its relative paths count from the current folder unless it has a workdir."""
    from myriad.cli import follow, settings
    from myriad.cli.client import Client
    from myriad.cli.files import read_job
    from myriad.cli.output import document, say, talk

    job = read_job(file)
    client = Client(settings.load(state).state)
    job_id = send(client, job)
    if not wait:
        if json:
            document({"job": job_id, "name": job.name})
            return
        say(job_id)
        talk(f'submitted; "myriad why {job_id}" tells where it stands, "myriad logs -f {job_id}" follows it')
        return
    view = follow.wait(client, job_id)
    follow.tell_end(client, view)
    if json:
        document(view)
    raise typer.Exit(follow.exit_code(view))


def send(client: Client, job: JobSpec) -> str:
    """Submit under a fresh request key, which makes a repeated try harmless; the job's id."""
    import uuid

    body = {"request": uuid.uuid4().hex, "spec": job.model_dump(mode="json")}
    return str(client.post("/jobs", body)["job"])
