"""``myriad run``: one job on a private cluster that exists for as long as the job does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from myriad.cli.options import ClusterFile, JobFile, Json

if TYPE_CHECKING:
    from myriad.runtime.paths import StateDir

AGENTS_DEADLINE_S = 10.0  # for agents to leave after the controller, before they are killed

Keep = Annotated[
    Path | None,
    typer.Option("--state", metavar="DIR", help="Keep the state here; default: removed.", show_default=False),
]


def run(file: JobFile, cluster: ClusterFile, state: Keep = None, json: Json = False) -> None:
    """Run one job on a private cluster.

    Starts the cluster, follows the job, reports, takes everything down, and returns the job's exit code.
    Without --state all that the job wrote inside the state (its logs, checkpoints without a directory of
    their own) is removed at the end. Ctrl-C takes the cluster down too.
    """
    from myriad.cli import follow
    from myriad.cli.client import Client, job_path
    from myriad.cli.files import read_cluster, read_job
    from myriad.cli.output import document, talk
    from myriad.cli.report import tell
    from myriad.cli.submit import send
    from myriad.spec.admission import check

    job = read_job(file)
    check(job, read_cluster(cluster))
    with stopping_on_sigterm(), private_state(state) as folder, cluster_on(folder, cluster):
        client = Client(folder.root)
        job_id = send(client, job)
        view = follow.wait(client, job_id)
        follow.tell_end(client, view)
        found = client.get(job_path(job_id, "/report"))
        if json:
            document({"job": view, "report": found})
        else:
            tell(found)
        talk("taking the cluster down")
    raise typer.Exit(follow.exit_code(view))


@contextmanager
def private_state(keep: Path | None) -> Iterator[StateDir]:
    """The folder to keep, or a temporary one that is removed."""
    import shutil
    import tempfile

    from myriad.runtime.paths import StateDir

    if keep is not None:
        yield StateDir(keep.absolute())
        return
    folder = Path(tempfile.mkdtemp(prefix="myriad-run-"))
    try:
        yield StateDir(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def cluster_on(folder: StateDir, file: Path) -> Iterator[None]:
    """A running cluster; at the end its jobs are cancelled and no process of it is left."""
    from myriad.cli import daemons
    from myriad.cli.output import talk
    from myriad.cli.up import configure, measure

    spec = configure(folder, file)
    measure(folder)
    talk(f'starting cluster "{spec.name}" with {len(spec.nodes)} nodes')
    started = daemons.Daemons()
    try:
        started = daemons.start(folder, port=0)
        daemons.await_nodes(folder, started)
        yield
    finally:
        with unstoppable():
            take_down(folder, started)


def take_down(folder: StateDir, started: Any) -> None:
    """Ask everything to leave, wait for it, and kill what has not left in time."""
    from myriad.cli import daemons
    from myriad.cli.errors import CommandError
    from myriad.cli.output import talk

    patience_s = 0.0  # without a controller nobody tells the agents to leave
    try:
        if daemons.ping(folder) is not None:
            patience_s = AGENTS_DEADLINE_S
            daemons.stop(folder, cancel_jobs=True)
    except CommandError as error:
        talk(str(error))
    finally:
        started.kill()
        daemons.end_agents(folder, patience_s)


@contextmanager
def stopping_on_sigterm() -> Iterator[None]:
    """SIGTERM unwinds like Ctrl-C."""
    import signal

    from myriad.cli.errors import Terminated

    def terminate(number: int, frame: Any) -> None:
        raise Terminated

    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def unstoppable() -> Iterator[None]:
    """A second Ctrl-C does not leave processes behind; every wait in here has a deadline."""
    import signal

    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
