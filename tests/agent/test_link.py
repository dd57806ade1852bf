"""What an agent says, and in which order, to a controller that goes away and comes back."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import msgspec

from myriad.agent.link import REPORTS_PER_BEAT_MAX, Link
from myriad.spec.messages import (
    Accepted,
    AgentMessage,
    Heartbeat,
    Hello,
    Members,
    MemberStatus,
    MemberUpdate,
    StepReport,
)

HELLO = Hello(node="n0", incarnation="a", token="secret", pid=1)
STATUS = MemberStatus(job="j1", generation=1, version=1, state="started", step=9)
DEADLINE_S = 10.0


def report(step: int) -> StepReport:
    return StepReport(job="j1", generation=1, rank=0, step=step, wall_s=0.1)


def test_reports_come_before_what_is_said_of_members(tmp_path: Path) -> None:
    """Nothing is acknowledged on the first connection, and more has queued up than fits in a beat."""
    many = 2 * REPORTS_PER_BEAT_MAX + 1

    async def story() -> None:
        heard: list[AgentMessage] = []
        told = asyncio.Event()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            decode = msgspec.json.Decoder(AgentMessage).decode
            while line := await reader.readline():
                heard.append(decode(line))
                if isinstance(heard[-1], Hello):
                    writer.write(msgspec.json.encode(Accepted(heartbeat_s=0.01)) + b"\n")
                if isinstance(heard[-1], MemberUpdate):
                    break
            writer.close()
            told.set()

        server = await asyncio.start_server(serve, "127.0.0.1", 0, limit=4 * 1024 * 1024)
        (tmp_path / "controller.json").write_text(
            json.dumps({"agent_port": server.sockets[0].getsockname()[1]})
        )
        link = Link(tmp_path / "controller.json", HELLO, lambda: (STATUS,), lambda message: None)
        for step in range(many):
            link.report(report(step))
        running = asyncio.create_task(link.run())
        try:
            for _ in range(2):
                while link.away_since_s is not None:
                    await asyncio.sleep(0.005)
                link.update(STATUS)
                await asyncio.wait_for(told.wait(), DEADLINE_S)
                told.clear()
                while link.away_since_s is None:
                    await asyncio.sleep(0.005)
                said = [each for each in heard if not isinstance(each, Heartbeat) or each.reports]
                kinds = [type(each) for each in said]
                assert kinds == [Hello, Heartbeat, Heartbeat, Heartbeat, Members, MemberUpdate]
                steps = [r.step for each in said if isinstance(each, Heartbeat) for r in each.reports]
                assert steps == list(range(many))
                assert said[4] == Members(members=(STATUS,))
                heard.clear()
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            server.close()

    asyncio.run(asyncio.wait_for(story(), 3 * DEADLINE_S))
