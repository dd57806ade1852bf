"""What the runtime needs of an engine: where nodes come from.

An engine starts agents and, where it can, proves their death. It never looks at a job's status: it
executes commands and posts events.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from myriad.control.events import AnyEvent
from myriad.control.state import State
from myriad.runtime.paths import StateDir


class EngineHost(Protocol):
    """What an engine may use of the runtime. Called on the runtime's event loop only."""

    state_dir: StateDir

    @property
    def state(self) -> State: ...

    def post(self, event: AnyEvent) -> None:
        """Queue an event for the controller."""

    def silent_s(self, node: str) -> float:
        """Seconds since the last message of the node's agent arrived."""


class Engine(Protocol):
    """Where nodes come from."""

    def attach(self, host: EngineHost) -> None:
        """Called once, before any other method, with the event loop running."""

    def start_agent(self, node: str, fenced: str) -> None:
        """Start the agent of a node unless one is alive there. Failures are retried at the next ask.

        An agent of the life ``fenced`` is ended instead, and its end posted: the controller then asks again.
        """

    def living(self) -> Collection[str]:
        """Nodes whose agent is known to be alive, whether or not it is connected."""

    def inject(self, kind: str, target: str) -> None:
        """Do harm to a node, an agent or a worker (emulated engines)."""

    def check_inject(self, kind: str, target: str) -> str | None:
        """A sentence when this harm cannot be done, None when it can."""

    def close(self) -> None:
        """Let go of everything; agents stay alive."""
