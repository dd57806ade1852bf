"""The controller process: events in, journal commit, commands out.

Group commit: all events that have queued up while the last commit was on its way to the disk are handled
and committed together; commands leave only after the commit. An assertion that fails in the controller
ends the process with nothing executed: the state on disk is the one before, and agents keep jobs running.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import time
from typing import Any

from myriad.cluster.state import NodeState
from myriad.control.commands import AnyCommand, InjectFault, StartAgent, ToAgent
from myriad.control.controller import Controller
from myriad.control.events import AnyEvent, ClusterConfigured, ControllerStarted, TimerFired
from myriad.control.liveness import ended_lives
from myriad.control.records import ClusterRecord, NodeRecord
from myriad.control.state import State
from myriad.runtime.clock import HostClock
from myriad.runtime.engine import Engine
from myriad.runtime.files import read_json, secret, write_json
from myriad.runtime.hub import Hub
from myriad.runtime.paths import StateDir
from myriad.runtime.requests import Requests
from myriad.runtime.store import Journal, Reports
from myriad.spec.cluster import ClusterSpec

# How long a leaving controller waits for agents without a job to exit: one may be about to dial again.
LEAVE_DEADLINE_S = 5.0
# Events handled and committed together at most: bounds the time to the first command's departure.
BATCH_MAX = 256

log = logging.getLogger("myriad.runtime")


class StateBusy(Exception):
    """Another controller holds the state."""


class Runtime:
    """One controller process on one state folder."""

    def __init__(self, state_dir: StateDir, cluster: ClusterSpec, engine: Engine) -> None:
        self.state_dir = state_dir
        self._cluster = cluster
        self._engine = engine
        self._lock_fd = lock_state(state_dir)
        self._journal = Journal(state_dir)
        self._reports = Reports(state_dir)
        self._controller = Controller(self._journal.load())
        self._clock = HostClock(self._journal.last_now)
        self._queue: asyncio.Queue[tuple[AnyEvent, asyncio.Future[None] | None]] = asyncio.Queue()
        self._hub = Hub(
            token=secret(state_dir.agent_token),
            heartbeat_s=cluster.heartbeat,
            known=lambda node: self.state.get(NodeRecord, node) is not None,
            post=self.post,
            store=self._reports.add,
        )
        self._leave_by_s: float | None = None  # set once the cluster goes down
        self._requests = Requests(lambda: self.state, engine, self._commit, self._status)

    # ------------------------------------------------------------ for engines (EngineHost)

    @property
    def state(self) -> State:
        return self._controller.state

    def post(self, event: AnyEvent) -> None:
        self._queue.put_nowait((event, None))

    def silent_s(self, node: str) -> float:
        return self._hub.silent_s(node)

    # ------------------------------------------------------------ the loop

    async def run(self) -> None:
        """Serve until the cluster is asked to go down. Raises OSError when it cannot listen."""
        await self._open()
        watcher = asyncio.create_task(self._hub.watch())
        try:
            while not self._may_leave():
                batch = await self._next_batch()
                if watcher.done():
                    watcher.result()
                if batch:
                    self._handle(batch)
        finally:
            watcher.cancel()
            await self._close()

    async def _open(self) -> None:
        self._engine.attach(self)
        known = read_json(self.state_dir.controller_file) or {}
        try:
            port = await self._hub.listen("127.0.0.1", int(known.get("agent_port", 0)))
        except OSError:  # somebody took the old port; agents read the new one from the file
            port = await self._hub.listen("127.0.0.1", 0)
        if self.state.get(ClusterRecord, "cluster") is None:
            spec = self._cluster.model_dump(mode="json")
            self.post(ClusterConfigured(spec=spec, jobs_dir=str(self.state_dir.jobs)))
        for node in self.state.table(NodeRecord).values():
            if node.state is not NodeState.DOWN:
                self._hub.expect(node.name, node.incarnation)
        self.post(ControllerStarted())
        write_json(
            self.state_dir.controller_file,
            {"pid": os.getpid(), "agent_port": port, "started_s": self._clock.now()},
        )
        await self._requests.listen(self.state_dir)

    async def _close(self) -> None:
        self._engine.close()
        await self._requests.close()
        await self._hub.close()
        self._journal.close()
        self._reports.close()
        self.state_dir.control_socket.unlink(missing_ok=True)
        os.close(self._lock_fd)

    def _may_leave(self) -> bool:
        cluster = self.state.get(ClusterRecord, "cluster")
        if cluster is None or not cluster.closing or not self._queue.empty():
            return False
        if any(self.state.job(job).ending for job in self.state.live):
            return False
        if self._leave_by_s is None:
            self._leave_by_s = self._clock.now() + LEAVE_DEADLINE_S
        idle = [node for node in self._engine.living() if self.state.node(node).job is None]
        return not idle or self._clock.now() >= self._leave_by_s

    async def _next_batch(self) -> list[tuple[AnyEvent, asyncio.Future[None] | None]]:
        due = self._controller.next_deadline()
        batch: list[tuple[AnyEvent, asyncio.Future[None] | None]] = []
        if self._queue.empty():
            moments = [moment for moment in (due, self._leave_by_s) if moment is not None]
            timeout = max(0.0, min(moments) - self._clock.now()) if moments else None
            with contextlib.suppress(TimeoutError):
                batch.append(await asyncio.wait_for(self._queue.get(), timeout))
        while len(batch) < BATCH_MAX and not self._queue.empty():
            batch.append(self._queue.get_nowait())
        if due is not None and due <= self._clock.now():
            # Last: what has already been said, or a controller's start, may make the deadline void.
            batch.append((TimerFired(), None))
        return batch

    def _handle(self, batch: list[tuple[AnyEvent, asyncio.Future[None] | None]]) -> None:
        entries = []
        ended: list[tuple[str, str]] = []  # node and incarnation
        for event, _ in batch:
            now = self._clock.now()
            commands = self._controller.handle(event, now)
            entries.append((now, event, self._controller.changes, commands))
            ended += ended_lives(event, self._controller.changes, self.state)
        self._journal.append(entries)
        for _, event, _, commands in entries:
            log.debug("%s", event)
            for command in commands:
                self._execute(command)
        for _, waiting in batch:
            if waiting is not None and not waiting.done():
                waiting.set_result(None)
        for node, incarnation in ended:
            self._hub.forget(node, incarnation)

    def _execute(self, command: AnyCommand) -> None:
        match command:
            case ToAgent():
                self._hub.send(command.node, command.incarnation, command.message)
            case StartAgent():
                self._engine.start_agent(command.node, command.fenced)
            case InjectFault():
                self._engine.inject(command.kind, command.target)

    async def _commit(self, event: AnyEvent) -> None:
        """Handle an event and return once it is journaled."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.put_nowait((event, done))
        await done

    def _status(self) -> dict[str, Any]:
        nodes = {name: {"silent_s": self._hub.silent_s(name)} for name in self.state.table(NodeRecord)}
        return {"pid": os.getpid(), "now": self._clock.now(), "monotonic": time.monotonic(), "nodes": nodes}


def lock_state(state_dir: StateDir) -> int:
    """Take the state's lock for the life of this process. Raises StateBusy."""
    state_dir.jobs.mkdir(parents=True, exist_ok=True)
    fd = os.open(state_dir.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(fd)
        raise StateBusy(f"another controller is running on the state {state_dir.root}") from error
    return fd
