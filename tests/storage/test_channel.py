"""Packets between two ends: order, files, EOF, deadlines, limits, and what a stranger may send."""

from __future__ import annotations

import os
import selectors
import socket
from collections.abc import Iterator

import pytest

from myriad.planner.intervals import FIRST
from myriad.spec.messages import Committed, Failure, FromWorker, PhaseDone, SnapshotTaken, ToWorker
from myriad.storage.memory.channel import (
    FDS_PER_PACKET_LIMIT,
    PACKET_LIMIT_BYTES,
    Channel,
    ChannelClosed,
    ChannelGarbled,
    ChannelTimeout,
    close_all,
)

Ends = tuple[Channel[FromWorker], Channel[ToWorker]]


def open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture
def ends() -> Iterator[Ends]:
    """(the agent's end, the worker's end), with no file left open afterwards."""
    before = open_fds()
    agent: Channel[FromWorker]
    agent, other = Channel.pair(FromWorker)
    worker: Channel[ToWorker] = Channel.from_fd(other.detach(), ToWorker)
    with agent, worker:
        yield agent, worker
    assert open_fds() == before


def test_messages_keep_their_order_and_type(ends: Ends) -> None:
    agent, worker = ends
    sent = [
        PhaseDone(phase="restore"),
        Failure(error_class="X", message="a\nb\u4e07"),
        PhaseDone(phase="fork"),
    ]
    for msg in sent:
        worker.send(msg)
    assert [agent.recv(1)[0] for _ in sent] == sent
    agent.send(Committed(step=7, intervals=FIRST))
    assert worker.recv(1) == (Committed(step=7, intervals=FIRST), [])


def test_files_ride_along_and_are_not_inheritable(ends: Ends) -> None:
    agent, worker = ends
    fd = os.memfd_create("payload")
    os.write(fd, b"bytes")
    worker.send(SnapshotTaken(step=1, size=5, crc32=0, buffer=1), [fd])
    os.close(fd)
    msg, fds = agent.recv(1)
    assert isinstance(msg, SnapshotTaken) and len(fds) == 1
    assert os.pread(fds[0], 9, 0) == b"bytes" and not os.get_inheritable(fds[0])
    close_all(fds)


def test_the_largest_packet_passes_and_a_larger_one_is_our_bug(ends: Ends) -> None:
    agent, worker = ends
    overhead = len(b'{"type":"Failure","error_class":"X","message":""}')
    largest = Failure(error_class="X", message="y" * (PACKET_LIMIT_BYTES - overhead))
    worker.send(largest, timeout_s=1)
    assert agent.recv(1)[0] == largest
    with pytest.raises(AssertionError, match="Failure of"):
        worker.send(Failure(error_class="X", message="y" * PACKET_LIMIT_BYTES))
    with pytest.raises(AssertionError):
        worker.send(PhaseDone(phase="fork"), [0] * (FDS_PER_PACKET_LIMIT + 1))


def test_an_event_loop_sees_readiness_and_nothing_blocks(ends: Ends) -> None:
    agent, worker = ends
    assert agent.recv_nowait() is None
    with selectors.DefaultSelector() as selector:
        selector.register(agent, selectors.EVENT_READ)
        assert selector.select(0) == []
        worker.send(PhaseDone(phase="fork"))
        assert len(selector.select(1)) == 1
    assert agent.recv_nowait() == (PhaseDone(phase="fork"), [])


def test_deadlines_pass_in_both_directions(ends: Ends) -> None:
    agent, worker = ends
    with pytest.raises(ChannelTimeout, match="sent nothing"):
        agent.recv(0.01)
    with pytest.raises(ChannelTimeout, match="took no message"):
        for _ in range(10_000):  # nobody reads: the queue fills and the sender does not wait for ever
            worker.send(Failure(error_class="X", message="y" * 10_000), timeout_s=0)


def test_eof_comes_after_the_last_words(ends: Ends) -> None:
    agent, worker = ends
    worker.send(Failure(error_class="X", message="last words"))
    worker.close()
    assert agent.recv(1)[0] == Failure(error_class="X", message="last words")
    for _ in range(2):
        with pytest.raises(ChannelClosed):
            agent.recv(1)
    with pytest.raises(ChannelClosed):
        agent.send(Committed(step=1, intervals=FIRST))


def test_last_words_survive_a_death_with_unread_packets(ends: Ends) -> None:
    agent, worker = ends
    agent.send(
        Committed(step=1, intervals=FIRST)
    )  # the worker dies without reading it: the kernel reports a reset first
    worker.send(Failure(error_class="X", message="last words"))
    worker.close()
    assert agent.recv(1)[0] == Failure(error_class="X", message="last words")
    with pytest.raises(ChannelClosed):
        agent.recv(1)


@pytest.mark.parametrize(
    "packet",
    [
        b"not json",
        b"{}",
        b'{"type":"Committed","step":1}',
        b'{"type":"PhaseDone","phase":"lunch"}',
        b"\xff\xfe",
    ],
)
def test_a_stranger_on_the_channel_is_refused_without_harm(packet: bytes) -> None:
    before = open_fds()
    agent: Channel[FromWorker]
    agent, other = Channel.pair(FromWorker)
    with agent, other:
        socket.send_fds(other, [packet], [other.fileno()])
        with pytest.raises(ChannelGarbled):
            agent.recv(1)
        other.send(b"x" * (PACKET_LIMIT_BYTES + 1))
        with pytest.raises(ChannelGarbled, match="cut off"):
            agent.recv(1)
        socket.send_fds(other, [b'{"type":"PhaseDone","phase":"fork"}'], [0] * (FDS_PER_PACKET_LIMIT + 5))
        with pytest.raises(ChannelGarbled, match="cut off"):
            agent.recv(1)
        other.send(b'{"type":"PhaseDone","phase":"fork"}')
        assert agent.recv(1)[0] == PhaseDone(phase="fork")
    assert open_fds() == before
