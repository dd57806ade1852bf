"""Typed packets, with file descriptors, between two processes of one machine.

Method: a SOCK_SEQPACKET Unix socket pair. One packet is one message (msgspec JSON), the kernel keeps
the boundaries and the order, and SCM_RIGHTS carries open files (snapshots, channels) beside it. EOF
says that the other side is gone; no heartbeat is needed on this link.

Trade-off: a packet must fit into the socket's send buffer, so it is limited to 192 KiB, which every
Linux accepts at its default ``net.core.wmem_max`` (208 KiB) without privileges. Bulk data therefore
travels as a memfd and never as bytes. A round trip takes about 20 us.
"""

from __future__ import annotations

import array
import contextlib
import os
import select
import socket
import time
from collections.abc import Sequence
from typing import Any, Generic, Self, TypeVar

import msgspec

# Bytes of one encoded message. The kernel refuses a packet above SO_SNDBUF minus its bookkeeping.
PACKET_LIMIT_BYTES = 192 * 1024
# File descriptors beside one message: the worker's channel or one snapshot; never many.
FDS_PER_PACKET_LIMIT = 4
# Asked of the kernel, which doubles it: room for several full packets before a sender blocks.
SOCKET_BUFFER_BYTES = 4 * PACKET_LIMIT_BYTES

ReceivedT = TypeVar("ReceivedT")


class ChannelError(OSError):
    """Base of what can go wrong on a channel through the other side's doing."""


class ChannelClosed(ChannelError):
    """The other side has closed its end or died, and everything it sent has been received."""


class ChannelTimeout(ChannelError):
    """Nothing arrived, or the other side took nothing, before the deadline."""


class ChannelGarbled(ChannelError):
    """A packet arrived that is no message of the agreed type; the channel itself stays usable."""


class Channel(Generic[ReceivedT]):
    """One end of a packet channel that receives ``ReceivedT`` and sends any msgspec struct.

    Annotate the receiving type where the channel is made:
    ``channel: Channel[FromWorker] = Channel.from_fd(fd, FromWorker)``. Not safe for use by two
    threads at once. The socket is non-blocking and not inheritable by executed programs.
    """

    def __init__(self, end: socket.socket, decode_type: Any) -> None:
        assert end.family == socket.AF_UNIX and end.type == socket.SOCK_SEQPACKET, end
        end.setblocking(False)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER_BYTES)
        self._socket = end
        self._decoder = msgspec.json.Decoder(decode_type)
        self._encoder = msgspec.json.Encoder()
        self._buffer = bytearray()  # PACKET_LIMIT_BYTES from the first receive on

    @classmethod
    def pair(cls, decode_type: Any) -> tuple[Channel[ReceivedT], socket.socket]:
        """Our channel, and the other side's raw end: send its ``fileno()``, or inherit it, then close it."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        return cls(ours, decode_type), theirs

    @classmethod
    def from_fd(cls, fd: int, decode_type: Any) -> Channel[ReceivedT]:
        """Take over ``fd`` (inherited or received); closing the channel closes it."""
        os.set_inheritable(fd, False)
        return cls(socket.socket(fileno=fd), decode_type)

    def fileno(self) -> int:
        """For ``selectors`` and event loops; readable when a message or EOF waits. -1 once closed."""
        return self._socket.fileno()

    def close(self) -> None:
        """Close this end; the other side sees EOF after what was sent. May be called again."""
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def send(self, msg: msgspec.Struct, fds: Sequence[int] = (), timeout_s: float | None = None) -> None:
        """Send one message; ``fds`` are duplicated into the other process and stay ours to close.

        Waits while the other side's queue is full: at most ``timeout_s`` seconds (None: for ever,
        0: not at all), then raises ChannelTimeout. Raises ChannelClosed when the other side is gone.
        """
        packet = self._encoder.encode(msg)
        assert len(packet) <= PACKET_LIMIT_BYTES, f"{type(msg).__name__} of {len(packet)} bytes"
        assert len(fds) <= FDS_PER_PACKET_LIMIT, fds
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            try:
                sent = self._socket.sendmsg([packet], rights)
                assert sent == len(packet), (sent, len(packet))
                return
            except BlockingIOError:
                self._wait(select.POLLOUT, deadline, "took no message")
            except (BrokenPipeError, ConnectionResetError):
                raise ChannelClosed("the other side of the channel is gone") from None

    def recv(self, timeout_s: float | None = None) -> tuple[ReceivedT, list[int]]:
        """The next message and the file descriptors beside it, which are the caller's to close.

        Waits at most ``timeout_s`` seconds (None: for ever), then raises ChannelTimeout. Raises
        ChannelClosed at EOF, ChannelGarbled for a packet that is no message of our type.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while (received := self.recv_nowait()) is None:
            self._wait(select.POLLIN, deadline, "sent nothing")
        return received

    def recv_nowait(self) -> tuple[ReceivedT, list[int]] | None:
        """As :meth:`recv`, but None at once when nothing is there yet."""
        packet = self._receive_packet()
        if packet is None:
            return None
        size, fds, flags = packet
        try:
            if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
                raise ChannelGarbled(f"a packet above {PACKET_LIMIT_BYTES} bytes or its files were cut off")
            if size == 0:
                raise ChannelClosed("the other side of the channel is gone")
            msg: ReceivedT = self._decoder.decode(memoryview(self._buffer)[:size])
        except msgspec.DecodeError as error:
            close_all(fds)
            raise ChannelGarbled(f"a packet of {size} bytes is no message of this channel: {error}") from None
        except ChannelError:
            close_all(fds)
            raise
        return msg, fds

    def _receive_packet(self) -> tuple[int, list[int], int] | None:
        """(bytes now in the buffer, file descriptors, flags), or None when nothing is there."""
        if not self._buffer:
            self._buffer = bytearray(PACKET_LIMIT_BYTES)
        room = socket.CMSG_SPACE(FDS_PER_PACKET_LIMIT * array.array("i").itemsize)
        while True:
            try:
                size, ancillary, flags, _ = self._socket.recvmsg_into(
                    [self._buffer], room, socket.MSG_CMSG_CLOEXEC
                )
                return size, _files_beside(ancillary), flags
            except BlockingIOError:
                return None
            except ConnectionResetError:
                # The other side closed with our packets unread. The kernel reports that once, ahead of
                # its own packets still queued here (its last words): read on until the EOF.
                continue

    def _wait(self, event: int, deadline: float | None, failing: str) -> None:
        """Until the socket is ready (or closed); ChannelTimeout once ``deadline`` has passed."""
        left_s = None if deadline is None else deadline - time.monotonic()
        poll = select.poll()
        poll.register(self._socket, event)
        if (left_s is not None and left_s <= 0) or not poll.poll(None if left_s is None else left_s * 1000):
            raise ChannelTimeout(f"the other side of the channel {failing} before the deadline")


def close_all(fds: Sequence[int]) -> None:
    """Close received file descriptors; for messages whose files nobody wants."""
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)


def _files_beside(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    fds = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    return fds.tolist()
