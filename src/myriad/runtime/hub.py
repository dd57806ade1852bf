"""Connections of agents: authenticate, hear heartbeats, pass messages both ways.

One line of JSON per message. Silence is counted by :class:`~myriad.control.liveness.Liveness` on this
host's monotonic clock. At 1,250 agents and one heartbeat each 0.5 s that is 2,500 small lines a second.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
from collections.abc import Callable, Iterable

import msgspec

from myriad.control.events import AgentConnected, AgentDisconnected, AnyEvent, MemberReported
from myriad.control.liveness import Liveness
from myriad.spec.messages import (
    PROTOCOL_VERSION,
    Accepted,
    AgentMessage,
    ControllerMessage,
    Heartbeat,
    HeartbeatAck,
    Hello,
    Members,
    MemberUpdate,
    Refused,
    StepReport,
)

# Beyond this the single event loop would fall behind; relays come with a later version.
AGENTS_MAX = 2_000
# A member status of a 16-accelerator node with its shards is a few kilobytes.
LINE_MAX_BYTES = 4 * 1024 * 1024
HELLO_DEADLINE_S = 10.0

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(AgentMessage).decode
log = logging.getLogger("myriad.hub")


class Hub:
    """All agents' connections. ``post`` queues an event, ``store`` keeps step reports durably."""

    def __init__(
        self,
        token: str,
        heartbeat_s: float,
        known: Callable[[str], bool],
        post: Callable[[AnyEvent], None],
        store: Callable[[Iterable[StepReport]], None],
    ) -> None:
        self._token = token
        self._heartbeat_s = heartbeat_s
        self._known = known
        self._post = post
        self._store = store
        self._links: dict[str, tuple[str, asyncio.StreamWriter]] = {}  # node -> (incarnation, link)
        self._liveness = Liveness(heartbeat_s)
        self._open: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None

    async def listen(self, host: str, port: int) -> int:
        """Accept agents; returns the port. Raises OSError when it cannot listen."""
        self._server = await asyncio.start_server(self._serve, host, port, limit=LINE_MAX_BYTES)
        return int(self._server.sockets[0].getsockname()[1])

    # ------------------------------------------------------------ liveness

    def expect(self, node: str, incarnation: str) -> None:
        """Start counting the silence of an agent that was alive when the last controller ended."""
        self._liveness.expect(node, incarnation, time.monotonic())

    def forget(self, node: str, incarnation: str) -> None:
        """Stop counting: the node is known to be down."""
        self._liveness.forget(node, incarnation)

    def silent_s(self, node: str) -> float:
        return self._liveness.silent_s(node, time.monotonic())

    async def watch(self) -> None:
        """Post what the controller should hear of silence, for ever."""
        while True:
            for silent in self._liveness.look(time.monotonic()):
                self._post(silent)
            await asyncio.sleep(self._liveness.pause_s)

    # ------------------------------------------------------------ one connection

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(writer)
        hello: Hello | None = None
        try:
            hello = await self._greet(reader, writer)
            if hello is not None:
                await self._listen_to(hello, reader, writer)
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError) as error:
            log.info("connection ended: %s", error)
        finally:
            self._open.discard(writer)
            if hello is not None and self._links.get(hello.node) == (hello.incarnation, writer):
                del self._links[hello.node]
                self._post(AgentDisconnected(node=hello.node, incarnation=hello.incarnation))
            writer.close()

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Hello | None:
        line = await asyncio.wait_for(reader.readline(), HELLO_DEADLINE_S)
        hello = _decode(line) if line else None
        if not isinstance(hello, Hello):
            return None
        why = ""
        if not hmac.compare_digest(hello.token.encode(), self._token.encode()):
            why = "the token is wrong"
        elif hello.version != PROTOCOL_VERSION:
            why = f"it speaks protocol {hello.version}, this controller {PROTOCOL_VERSION}"
        elif not self._known(hello.node):
            why = f"the cluster has no node {hello.node}"
        elif len(self._links) >= AGENTS_MAX and hello.node not in self._links:
            why = f"this controller serves at most {AGENTS_MAX} agents"
        if why:
            log.warning("refused an agent for node %s: %s", hello.node, why)
            self._write(writer, Refused(reason=why))
            await writer.drain()
            return None
        self._write(writer, Accepted(heartbeat_s=self._heartbeat_s))
        self._links[hello.node] = (hello.incarnation, writer)
        return hello

    async def _listen_to(
        self, hello: Hello, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        while line := await reader.readline():
            message = _decode(line)
            if self._links.get(hello.node) != (hello.incarnation, writer):
                return  # a newer connection of the node has taken over
            self._liveness.heard(hello.node, hello.incarnation, time.monotonic())
            match message:
                case Heartbeat():
                    self._store(message.reports)
                    self._write(writer, HeartbeatAck(seq=message.seq))
                case Members():
                    self._liveness.expect(hello.node, hello.incarnation, time.monotonic())
                    self._post(
                        AgentConnected(
                            node=hello.node,
                            incarnation=hello.incarnation,
                            host=hello.host,
                            peer_port=hello.peer_port,
                            members=message.members,
                        )
                    )
                case MemberUpdate():
                    self._post(
                        MemberReported(node=hello.node, incarnation=hello.incarnation, member=message.member)
                    )
                case Hello():
                    raise ValueError(f"a second hello from {hello.node}")

    # ------------------------------------------------------------ sending

    def send(self, node: str, incarnation: str, message: ControllerMessage) -> None:
        """Give a message to that life of the agent, if it is connected now."""
        life, writer = self._links.get(node, ("", None))
        if writer is None or life != incarnation:
            return
        self._write(writer, message)
        if isinstance(message, Refused):
            writer.close()

    def _write(self, writer: asyncio.StreamWriter, message: ControllerMessage) -> None:
        writer.write(_encode(message) + b"\n")

    async def close(self) -> None:
        """Stop listening and end every connection, after what was written has gone out."""
        if self._server is not None:
            self._server.close()
        for writer in list(self._open):
            writer.close()
        for writer in list(self._open):
            try:
                await asyncio.wait_for(writer.wait_closed(), HELLO_DEADLINE_S)
            except (OSError, TimeoutError):
                log.info("an agent's connection did not close in time")
