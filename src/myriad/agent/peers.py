"""Copies of snapshots between the agents of a job's nodes.

Each transfer is a connection of its own: one line of JSON with the request, then the bytes one way and a line the
other way. A request names the generation and proves with the cluster's token that it belongs to it; a holder refuses
what comes from an older generation than the one it knows, so a fenced node can neither overwrite a copy nor read one.
A copy also carries the step reports that its rank could not deliver yet: who restores from it makes its holder deliver
them, since the node that should have is gone. Bytes go out by sendfile from the sealed memfd and come in to a memfd, checksummed piece by piece; a copy counts only
when it is whole, equal to its checksum and sealed.

Trade-off: receiving runs in the agent's only thread, in pieces of at most 256 KiB, at about 1 GB/s a core.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import os
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import msgspec

from myriad.spec.messages import Peer, StepReport
from myriad.storage.memory.keeper import SnapshotKeeper
from myriad.storage.memory.retention import Use
from myriad.storage.memory.snapshot import Incoming, SnapshotCorrupt

# For connecting and for each answer; a transfer has this and its bytes at the slowest rate that is worth waiting for.
ANSWER_DEADLINE_S = 10.0
SLOWEST_BYTES_PER_S = 20e6
LINE_MAX_BYTES = 4 << 20
PIECE_BYTES = 1 << 20
SNAPSHOT_MAX_BYTES = 1 << 40

log = logging.getLogger("myriad.agent.peers")


class Put(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Here comes a copy: ``size`` bytes follow."""

    job: str
    generation: int
    proof: str
    rank: int
    step: int
    size: int
    crc32: int
    reports: tuple[StepReport, ...] = ()


class Get(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Send the copy that you have."""

    job: str
    generation: int
    proof: str
    rank: int
    step: int


class Answer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """``error`` empty: done, or the bytes follow."""

    error: str = ""
    size: int = 0
    crc32: int = 0


@dataclass(frozen=True, slots=True)
class Copy:
    """One snapshot on its way to ``holder``."""

    holder: Peer
    job: str
    generation: int
    rank: int
    step: int


class PeerError(OSError):
    """A copy could not be given or got; the sentence says why."""


Found = tuple[int, int, int]  # fd, bytes, CRC-32
Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

_decode_request = msgspec.json.Decoder(Put | Get).decode
_decode_answer = msgspec.json.Decoder(Answer).decode
_encode = msgspec.json.Encoder().encode


def proof(token: str, job: str, generation: int) -> str:
    """Shows that the sender knows the cluster's token, for this generation only."""
    text = f"peer/{job}/{generation}".encode()
    return hmac.new(token.encode(), text, hashlib.sha256).hexdigest()


def transfer_deadline_s(size: int) -> float:
    return ANSWER_DEADLINE_S + size / SLOWEST_BYTES_PER_S


class PeerServer:
    """The door for other agents. ``generation_of`` says which generation of a job this node knows, 0 for none;
    ``deliver`` takes the reports that came with a copy, when it is asked for."""

    def __init__(
        self,
        host: str,
        token: str,
        keeper: SnapshotKeeper,
        generation_of: Callable[[str], int],
        deliver: Callable[[StepReport], None],
    ) -> None:
        self._token, self._keeper, self._generation_of, self._deliver = token, keeper, generation_of, deliver
        self._reports: dict[
            tuple[str, int, int], tuple[StepReport, ...]
        ] = {}  # by job, rank, step of the copy
        self._socket = socket.create_server((host, 0))
        self._server: asyncio.Server | None = None

    @property
    def port(self) -> int:
        return int(self._socket.getsockname()[1])

    async def listen(self) -> None:
        self._server = await asyncio.start_server(self._serve, sock=self._socket, limit=LINE_MAX_BYTES)

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        self._socket.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            line = await asyncio.wait_for(reader.readline(), ANSWER_DEADLINE_S)
            request = _decode_request(line)
            why = self._refusal(request)
            if why:
                writer.write(_encode(Answer(error=why)) + b"\n")
            elif isinstance(request, Put):
                await asyncio.wait_for(self._take(request, reader), transfer_deadline_s(request.size))
                writer.write(_encode(Answer()) + b"\n")
            else:
                await self._give(request, writer)
            await asyncio.wait_for(writer.drain(), ANSWER_DEADLINE_S)
        except SnapshotCorrupt as error:
            writer.write(_encode(Answer(error=str(error))) + b"\n")
        except (OSError, ValueError, TimeoutError, asyncio.IncompleteReadError) as error:
            log.info("a copy was broken off: %s", error)
        finally:
            writer.close()

    def _refusal(self, request: Put | Get) -> str:
        if not hmac.compare_digest(request.proof, proof(self._token, request.job, request.generation)):
            return "the proof is wrong"
        known = self._generation_of(request.job)
        if request.generation < known:
            return f"generation {request.generation} of {request.job} is over; {known} is known here"
        if isinstance(request, Put) and request.generation != known:
            return f"generation {request.generation} of {request.job} is not known here"
        if isinstance(request, Put) and not 0 < request.size <= SNAPSHOT_MAX_BYTES:
            return f"a snapshot of {request.size} bytes"
        return ""

    async def _take(self, request: Put, reader: asyncio.StreamReader) -> None:
        incoming = Incoming(request.size, request.crc32)
        try:
            await _receive(incoming, reader)
            fd = incoming.seal()
        finally:
            incoming.close()
        if self._generation_of(request.job) != request.generation:
            os.close(fd)
            raise SnapshotCorrupt(f"generation {request.generation} of {request.job} has ended meanwhile")
        job, rank, step = request.job, request.rank, request.step
        self._keeper.add(job, rank, step, fd, request.size, request.crc32, Use(peer=True), verified=True)
        self._reports[job, rank, step] = request.reports
        for key in [key for key in self._reports if not self._keeper.holds(*key)]:
            del self._reports[key]

    async def _give(self, request: Get, writer: asyncio.StreamWriter) -> None:
        found = self._keeper.duplicate(request.job, request.rank, request.step)
        if found is None:
            error = f"there is no copy of rank {request.rank} step {request.step} here"
            writer.write(_encode(Answer(error=error)) + b"\n")
            return
        fd, size, crc32 = found
        for report in self._reports.pop((request.job, request.rank, request.step), ()):
            self._deliver(report)
        writer.write(_encode(Answer(size=size, crc32=crc32)) + b"\n")
        try:
            await _send_file(writer, fd, size)
        finally:
            os.close(fd)


class PeerClient:
    """Gives copies to other agents and gets them back. Raises PeerError with the reason."""

    def __init__(self, token: str) -> None:
        self._token = token

    async def put(self, copy: Copy, found: Found, reports: tuple[StepReport, ...]) -> None:
        """Make a copy; the fd is closed here. Returns once it is whole there."""
        (fd, size, crc32), to = found, copy.holder
        request = Put(
            job=copy.job,
            generation=copy.generation,
            proof=proof(self._token, copy.job, copy.generation),
            rank=copy.rank,
            step=copy.step,
            size=size,
            crc32=crc32,
            reports=reports,
        )

        async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await asyncio.wait_for(_send_file(writer, fd, size), transfer_deadline_s(size))
            await _answer(to, reader)

        try:
            await self._ask(to, request, talk)
        finally:
            os.close(fd)

    async def get(self, source: Peer, job: str, generation: int, rank: int, step: int) -> Found:
        """A copy from ``source``: (fd, bytes, CRC-32), verified and sealed."""
        request = Get(
            job=job, generation=generation, proof=proof(self._token, job, generation), rank=rank, step=step
        )
        got: list[Found] = []

        async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            answer = await _answer(source, reader)
            incoming = Incoming(answer.size, answer.crc32)
            try:
                await asyncio.wait_for(_receive(incoming, reader), transfer_deadline_s(answer.size))
                got.append((incoming.seal(), answer.size, answer.crc32))
            finally:
                incoming.close()

        await self._ask(source, request, talk)
        return got[0]

    async def _ask(self, peer: Peer, request: Put | Get, talk: Talk) -> None:
        writer = None
        try:
            reader, writer = await asyncio.wait_for(
                asyncio.open_connection(peer.host, peer.port, limit=LINE_MAX_BYTES), ANSWER_DEADLINE_S
            )
            writer.write(_encode(request) + b"\n")
            await talk(reader, writer)
        except TimeoutError:
            raise PeerError(f"node {peer.node} did not answer in time") from None
        except (OSError, ValueError, asyncio.IncompleteReadError) as error:
            if isinstance(error, PeerError):
                raise
            raise PeerError(f"node {peer.node}: {error}") from None
        finally:
            if writer is not None:
                writer.close()


async def _answer(peer: Peer, reader: asyncio.StreamReader) -> Answer:
    line = await asyncio.wait_for(reader.readline(), ANSWER_DEADLINE_S)
    if not line:
        raise PeerError(f"node {peer.node} has closed the connection")
    answer = _decode_answer(line)
    if answer.error:
        raise PeerError(f"node {peer.node} refuses: {answer.error}")
    return answer


async def _receive(incoming: Incoming, reader: asyncio.StreamReader) -> None:
    while incoming.missing:
        piece = await reader.read(min(incoming.missing, PIECE_BYTES))
        if not piece:
            raise SnapshotCorrupt(f"{incoming.missing} bytes of a copy did not arrive")
        incoming.feed(piece)


async def _send_file(writer: asyncio.StreamWriter, fd: int, size: int) -> None:
    with os.fdopen(os.dup(fd), "rb", buffering=0) as file:
        await asyncio.get_running_loop().sendfile(writer.transport, file, 0, size)
