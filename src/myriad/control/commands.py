"""What the controller asks of the world. Executed by the runtime, after the journal's commit."""

from __future__ import annotations

import msgspec

from myriad.spec.messages import (
    Commit,
    Forget,
    Prepare,
    Refused,
    Shutdown,
    StartStore,
    StartWorkers,
    StopWorkers,
)

AgentCommand = Prepare | StartStore | StartWorkers | StopWorkers | Commit | Forget | Refused | Shutdown


class Command(msgspec.Struct, frozen=True, tag=True, kw_only=True, omit_defaults=True):
    """Base of all commands."""


class ToAgent(Command, frozen=True):
    """Deliver ``message`` to the agent of ``node`` if that incarnation is connected; else drop it.

    Dropping is safe: at the next hello the controller asks again for whatever is still wanted.
    """

    node: str
    incarnation: str
    message: AgentCommand


class StartAgent(Command, frozen=True):
    """Have the engine start the agent of ``node`` unless one is alive there.

    A living agent of the life ``fenced`` was declared dead, and may be too far gone to read that: the engine ends it
    with all it runs, where it can, and says so as of any agent's end.
    """

    node: str
    fenced: str = ""


class InjectFault(Command, frozen=True):
    """Have the engine do this harm (emulated engines only)."""

    kind: str
    target: str


AnyCommand = ToAgent | StartAgent | InjectFault
