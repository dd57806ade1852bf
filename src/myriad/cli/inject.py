"""``myriad inject``: do harm on purpose, on emulated clusters only."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from myriad.cli.options import State


class Fault(StrEnum):
    """What can be done to a node, or to the worker of a rank."""

    KILL_NODE = "kill-node"
    KILL_WORKER = "kill-worker"
    KILL_AGENT = "kill-agent"
    STOP = "stop"


Kind = Annotated[Fault, typer.Argument(metavar="FAULT", help="kill-node, kill-worker, kill-agent or stop.")]
Target = Annotated[str, typer.Argument(metavar="NAME", help="A node, or JOB/RANK for a worker.")]


def inject(fault: Kind, name: Target, state: State = None) -> None:
    """Do harm on purpose; emulated clusters only.

    Kill a node (its agent and workers), a worker or an agent; or stop one (SIGSTOP).
    """
    from myriad.cli import settings
    from myriad.cli.client import Client
    from myriad.cli.output import say

    client = Client(settings.load(state).state)
    client.post("/inject", {"kind": fault.value, "target": name}, repeatable=False)
    say(f'{fault.value} {name} is under way; "myriad events -f" shows what follows')
