"""``myriad up``: start a cluster on a state directory, or take up the one that is there."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from myriad.cli.options import Json, Port, State

if TYPE_CHECKING:
    from myriad.runtime.paths import StateDir
    from myriad.spec.cluster import ClusterSpec

ClusterFile = Annotated[
    Path | None,
    typer.Option(
        "--cluster",
        metavar="FILE",
        help="The cluster's YAML file; needed the first time.",
        show_default=False,
    ),
]


def up(cluster: ClusterFile = None, state: State = None, port: Port = None, json: Json = False) -> None:
    """Start a cluster, or take up the one of the state.

    Starts the controller, the API server and one agent for each node.
    On a state that exists already, jobs that were running are taken up as they are.
    """
    from myriad.cli import daemons, settings
    from myriad.cli.client import server_entry
    from myriad.cli.output import document, say, talk
    from myriad.runtime.paths import StateDir

    chosen = settings.load(state, port)
    folder = StateDir(chosen.state)
    spec = configure(folder, cluster)
    measure(folder)
    talk(f'starting cluster "{spec.name}" with {len(spec.nodes)} nodes, state {folder.root}')
    started = daemons.start(folder, chosen.port)
    nodes = daemons.await_nodes(folder, started)
    entry = server_entry(folder.root)
    assert entry is not None, "the server has just answered"
    if json:
        joined = [node["name"] for node in nodes if node["connected"]]
        document({"state": str(folder.root), "url": entry["url"], "cluster": spec.name, "nodes": joined})
        return
    say(f"{len(nodes)} nodes have joined; the API listens on {entry['url']}, state {folder.root}")
    talk('next: "myriad submit job.yaml", "myriad ps", "myriad nodes"; "myriad down" stops the cluster')


def configure(folder: StateDir, file: Path | None) -> ClusterSpec:
    """The cluster of the state: its own file's, or the given one's, which becomes its own.

    A state that is served already is refused; one whose server has died is not.
    """
    from myriad.cli.daemons import ping, server_answers
    from myriad.cli.errors import CommandError, Exit
    from myriad.cli.files import read_cluster
    from myriad.runtime.files import write_atomic

    given = None if file is None else read_cluster(file)
    known = read_cluster(folder.cluster_file) if folder.cluster_file.exists() else None
    if (answer := ping(folder)) is not None and server_answers(folder):
        raise CommandError(
            f"a cluster is already running on state {folder.root} (controller process {answer['pid']}); use it, stop "
            f'it with "myriad down", or give another --state',
            Exit.REFUSED,
        )
    if known is not None:
        if given is not None and given != known:
            raise CommandError(
                f"state {folder.root} holds another cluster than {file}; leave --cluster out to take it up, or "
                f"give another --state",
                Exit.REFUSED,
            )
        return known
    if given is None or file is None:
        raise CommandError(
            f'there is no cluster in state {folder.root} yet; give its file: "myriad up --cluster cluster.yaml"',
            Exit.USAGE,
        )
    make_folder(folder.root)
    write_atomic(folder.cluster_file, file.read_bytes())
    return given


def make_folder(path: Path) -> None:
    """The state's folder, open to its owner only."""
    from myriad.cli.errors import CommandError

    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise CommandError(
            f"the state directory {path} cannot be made ({error.strerror}); give another with --state"
        ) from None


def measure(folder: StateDir) -> None:
    """Probe this machine once per state, while nothing runs on it yet."""
    import dataclasses

    from myriad.cli.probe import probe
    from myriad.runtime.files import write_json

    if not folder.probe_file.exists():
        write_json(folder.probe_file, dataclasses.asdict(probe(folder.root)))
