"""The agent's connection to the controller: dial, say hello, beat, and dial again.

Step reports ride on heartbeats and are kept until acknowledged, so none is lost while the controller is
away (bounded: the oldest go first). Reports always leave before a member's status, also on a new connection,
so that whatever the controller learns from a status, the steps before it are already stored.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from myriad.spec.messages import (
    Accepted,
    AgentMessage,
    ControllerMessage,
    Heartbeat,
    HeartbeatAck,
    Hello,
    Members,
    MemberStatus,
    MemberUpdate,
    Refused,
    StepReport,
)

# Kept for a controller that is away; about 400 bytes each.
REPORTS_MAX = 50_000
# In one heartbeat: keeps a line well under the controller's limit.
REPORTS_PER_BEAT_MAX = 2_000
REDIAL_S = 0.2
DIAL_DEADLINE_S = 5.0
LINE_MAX_BYTES = 4 * 1024 * 1024

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(ControllerMessage).decode
log = logging.getLogger("myriad.agent.link")


class Link:
    """Keeps one connection alive. ``members`` says what runs here, ``receive`` takes commands."""

    def __init__(
        self,
        controller_file: Path,
        hello: Hello,
        members: Callable[[], tuple[MemberStatus, ...]],
        receive: Callable[[ControllerMessage], None],
    ) -> None:
        self._controller_file = controller_file
        self._hello = hello
        self._members = members
        self._receive = receive
        self._writer: asyncio.StreamWriter | None = None
        self._fresh: list[StepReport] = []
        self._unacknowledged: dict[int, tuple[StepReport, ...]] = {}
        self._seq = 0
        self._heartbeat_s = 1.0
        self.away_since_s: float | None = time.monotonic()

    def report(self, report: StepReport) -> None:
        """Queue a step report for the next heartbeat."""
        self._fresh.append(report)
        if len(self._fresh) > REPORTS_MAX:
            del self._fresh[: len(self._fresh) - REPORTS_MAX]

    def undelivered(self, job: str, rank: int) -> tuple[StepReport, ...]:
        """A rank's reports that nobody has acknowledged, at most what fits in one heartbeat: the newest."""
        sent = [report for reports in self._unacknowledged.values() for report in reports]
        found = [r for r in (*sent, *self._fresh) if r.job == job and r.rank == rank]
        return tuple(found[-REPORTS_PER_BEAT_MAX:])

    def update(self, status: MemberStatus) -> None:
        """Send a member's status now; without a connection the next one begins with it."""
        if self._writer is not None:
            self._beat()
            self._send(MemberUpdate(member=status))

    async def run(self) -> None:
        """Dial for ever."""
        while True:
            try:
                await self._one_connection()
            except (OSError, asyncio.IncompleteReadError, ValueError, TimeoutError) as error:
                log.debug("controller away: %s", error)
            if self.away_since_s is None:
                self.away_since_s = time.monotonic()
            await asyncio.sleep(REDIAL_S)

    async def _one_connection(self) -> None:
        endpoint = json.loads(self._controller_file.read_bytes())
        reader, writer = await asyncio.wait_for(
            asyncio.open_connection("127.0.0.1", int(endpoint["agent_port"]), limit=LINE_MAX_BYTES),
            DIAL_DEADLINE_S,
        )
        beats: asyncio.Task[None] | None = None
        try:
            writer.write(_encode(self._hello) + b"\n")
            answer = _decode(await asyncio.wait_for(reader.readline(), DIAL_DEADLINE_S))
            if isinstance(answer, Refused):
                self._receive(answer)
                return
            assert isinstance(answer, Accepted), answer
            self._heartbeat_s = answer.heartbeat_s
            self._writer = writer
            self.away_since_s = None
            for reports in reversed(self._unacknowledged.values()):
                self._fresh[:0] = reports
            self._unacknowledged.clear()
            while self._fresh:
                self._beat()
            self._send(Members(members=self._members()))
            beats = asyncio.create_task(self._beat_for_ever())
            while line := await reader.readline():
                message = _decode(line)
                if isinstance(message, HeartbeatAck):
                    self._unacknowledged.pop(message.seq, None)
                else:
                    self._receive(message)
        finally:
            self._writer = None
            if beats is not None:
                beats.cancel()
            writer.close()

    async def _beat_for_ever(self) -> None:
        while True:
            self._beat()
            await asyncio.sleep(self._heartbeat_s)

    def _beat(self) -> None:
        self._seq += 1
        reports = tuple(self._fresh[:REPORTS_PER_BEAT_MAX])
        del self._fresh[: len(reports)]
        if reports:
            self._unacknowledged[self._seq] = reports
        self._send(Heartbeat(seq=self._seq, reports=reports))

    def _send(self, message: AgentMessage) -> None:
        if self._writer is not None:
            self._writer.write(_encode(message) + b"\n")

    async def flush(self) -> None:
        """Let what was written leave, as far as the connection allows."""
        if self._writer is not None:
            try:
                await asyncio.wait_for(self._writer.drain(), REDIAL_S)
            except (OSError, TimeoutError):
                log.debug("pid %d: the last messages did not leave", os.getpid())
