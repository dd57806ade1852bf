"""Copies between agents: whole or not at all, only for the generation that is known, and back again."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
from storage_faults import sealed_copy

from myriad.agent.peers import Copy, PeerClient, PeerError, PeerServer, Put, proof
from myriad.spec.messages import Peer, StepReport
from myriad.storage.memory.keeper import SnapshotKeeper
from myriad.storage.memory.snapshot import open_snapshot
from sealed import write_snapshot

TOKEN = "secret"
DEADLINE_S = 30.0
BYTES = os.urandom(3 << 20)


def snapshot(step: int, data: bytes = BYTES) -> tuple[int, int, int]:
    return write_snapshot({"x": ("uint8", (len(data),), data)}, step, {})


def report(step: int) -> StepReport:
    return StepReport(job="j1", generation=2, rank=3, step=step, wall_s=0.1)


@dataclass
class Holder:
    """A node that knows generation ``generation`` of job j1, and its door."""

    generation: int = 2
    keeper: SnapshotKeeper = field(default_factory=SnapshotKeeper)
    delivered: list[StepReport] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.server = PeerServer(
            "127.0.0.1",
            TOKEN,
            self.keeper,
            lambda job: self.generation if job == "j1" else 0,
            self.delivered.append,
        )
        self.peer = Peer("n1", "127.0.0.1", self.server.port)

    def steps(self) -> list[tuple[int, int]]:
        return [(holding.rank, holding.step) for holding in self.keeper.holdings("j1")]

    async def put(
        self, step: int, generation: int = 2, job: str = "j1", token: str = TOKEN, **keys: Any
    ) -> None:
        copy = Copy(self.peer, job, generation, 3, step)
        await PeerClient(token).put(copy, keys.get("found") or snapshot(step), keys.get("reports", ()))

    async def get(self, step: int, generation: int = 3) -> tuple[int, int, int]:
        return await PeerClient(TOKEN).get(self.peer, "j1", generation, 3, step)


Story = Callable[[Holder], Coroutine[Any, Any, None]]


def play(story: Story) -> None:
    async def whole() -> None:
        holder = Holder()
        await holder.server.listen()
        try:
            await asyncio.wait_for(story(holder), DEADLINE_S)
        finally:
            holder.server.close()
            holder.keeper.close()

    before = len(os.listdir("/proc/self/fd"))
    asyncio.run(whole())
    assert len(os.listdir("/proc/self/fd")) == before, "every memory file is closed"


def test_there_and_back() -> None:
    async def story(holder: Holder) -> None:
        await holder.put(5, reports=(report(4), report(5)))
        assert holder.steps() == [(3, 5)] and holder.delivered == [], (
            "the owner may still deliver them itself"
        )
        fd, size, crc32 = await holder.get(5)
        with open_snapshot(fd, crc32) as found:
            assert found.size == size and bytes(found.view("x")) == BYTES
        os.close(fd)
        assert holder.delivered == [report(4), report(5)]

    play(story)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "an older generation": ({"generation": 1}, "generation 1 of j1 is over; 2 is known here"),
    "a generation not begun here": ({"generation": 3}, "generation 3 of j1 is not known here"),
    "another job": ({"job": "j2"}, "generation 2 of j2 is not known here"),
    "another cluster": ({"token": "guess"}, "the proof is wrong"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str) -> None:
    keys, why = REFUSED[name]

    async def story(holder: Holder) -> None:
        with pytest.raises(PeerError, match=f"node n1.*{why}"):
            await holder.put(5, **keys)
        assert holder.steps() == []

    play(story)


def test_a_fenced_node_gets_no_copy() -> None:
    async def story(holder: Holder) -> None:
        await holder.put(5)
        holder.generation = 4
        with pytest.raises(PeerError, match="generation 3 of j1 is over"):
            await holder.get(5)
        with pytest.raises(PeerError, match="no copy of rank 3 step 6"):
            await holder.get(6, generation=4)

    play(story)


def test_a_flipped_bit_on_the_way_is_no_copy() -> None:
    async def story(holder: Holder) -> None:
        fd, size, crc32 = snapshot(5)
        damaged = sealed_copy(fd, flip_bit_at=size // 2)
        os.close(fd)
        with pytest.raises(PeerError, match="fails its checksum"):
            await holder.put(5, found=(damaged, size, crc32))
        assert holder.steps() == []

    play(story)


async def first_half(holder: Holder) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, bytes]:
    """Send half of a copy; the connection, and the other half."""
    fd, size, crc32 = snapshot(5)
    whole = os.pread(fd, size, 0)
    os.close(fd)
    reader, writer = await asyncio.open_connection("127.0.0.1", holder.peer.port)
    put = Put(job="j1", generation=2, proof=proof(TOKEN, "j1", 2), rank=3, step=5, size=size, crc32=crc32)
    writer.write(msgspec.json.encode(put) + b"\n" + whole[: size // 2])
    await writer.drain()
    return reader, writer, whole[size // 2 :]


def test_a_copy_that_breaks_off_is_no_copy() -> None:
    async def story(holder: Holder) -> None:
        reader, writer, _ = await first_half(holder)
        writer.write_eof()
        assert b"did not arrive" in await reader.readline()
        writer.close()
        assert holder.steps() == []

    play(story)


def test_a_generation_that_ends_meanwhile_has_no_copy() -> None:
    async def story(holder: Holder) -> None:
        reader, writer, rest = await first_half(holder)
        await asyncio.sleep(0.1)
        holder.generation = 3
        writer.write(rest)
        assert b"has ended meanwhile" in await reader.readline()
        writer.close()
        assert holder.steps() == []

    play(story)


def test_a_holder_that_is_gone() -> None:
    async def story(holder: Holder) -> None:
        holder.server.close()
        with pytest.raises(PeerError, match="node n1: "):
            await holder.put(5)

    play(story)
