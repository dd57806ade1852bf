"""Whose silence the controller's process counts: of the nodes that are up, and of no other."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from pathlib import Path

from live import cluster_of
from myriad.control.events import (
    AgentConnected,
    AgentExited,
    AnyEvent,
    ClusterConfigured,
    ControllerStarted,
)
from myriad.runtime.engine import EngineHost
from myriad.runtime.loop import Runtime
from myriad.runtime.paths import StateDir
from myriad.spec.cluster import ClusterSpec


class NoNodes:
    """An engine that has nothing to start."""

    def attach(self, host: EngineHost) -> None: ...

    def start_agent(self, node: str, fenced: str) -> None: ...

    def living(self) -> Collection[str]:
        return ()

    def inject(self, kind: str, target: str) -> None: ...

    def check_inject(self, kind: str, target: str) -> str | None:
        return None

    def close(self) -> None: ...


class Life:
    """A controller's process that handles batches when told to, and dials itself."""

    def __init__(self, root: Path) -> None:
        spec = ClusterSpec.model_validate(cluster_of(3))
        self.runtime = Runtime(StateDir(root), spec, NoNodes())
        self.handle(
            ClusterConfigured(spec=spec.model_dump(mode="json"), jobs_dir=str(root)), ControllerStarted()
        )

    def handle(self, *events: AnyEvent) -> None:
        self.runtime._handle([(event, None) for event in events])

    def hello(self, node: str, incarnation: str) -> AgentConnected:
        """What the hub does at a hello, and what it posts."""
        self.runtime._hub.expect(node, incarnation)
        return AgentConnected(node=node, incarnation=incarnation)

    def counted(self) -> set[str]:
        return {node for node in ("n0", "n1", "n2") if self.runtime.silent_s(node) > 0}


def test_who_is_counted(tmp_path: Path) -> None:
    async def story() -> None:
        life = Life(tmp_path)
        waiting = life.hello("n1", "a")  # in the queue when the next batch is handled
        life.handle(life.hello("n0", "a"))
        assert life.counted() == {"n0", "n1"}
        life.handle(waiting, life.hello("n2", "a"))
        assert life.counted() == {"n0", "n1", "n2"}
        life.handle(AgentExited(node="n0", incarnation="a"))
        assert life.counted() == {"n1", "n2"}, "a node that is down is forgotten"
        life.handle(life.hello("n0", "a"))
        assert life.counted() == {"n1", "n2"}, "and a fenced agent that dials again is refused"
        life.handle(AgentExited(node="n1", incarnation="a"), life.hello("n1", "b"))
        assert life.counted() == {"n2"}, "nobody asked for another life of n1"
        await life.runtime._close()

    asyncio.run(story())
