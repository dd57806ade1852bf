"""The controller's disk: commits in frames, of which the last may tear when the machine or process dies.

A frame is (length, CRC-32, rows) and holds one commit, so a commit is there whole or not at all, as SQLite's
write-ahead log promises to the real runtime. What was synced stays; of what was only written, a crash keeps a
prefix of any length. Opening reads frames up to the first that is not whole and cuts the rest off.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence

import msgspec

from myriad.control.journal import Entry, Records, Row, decode_changes, write_row
from myriad.control.state import State

_HEAD = struct.Struct("<II")
_encode_rows = msgspec.msgpack.Encoder().encode
_decode_rows = msgspec.msgpack.Decoder(list[Row]).decode


class DiskError(Exception):
    """The disk refuses a write: full, or broken."""


class Disk:
    """One journal. ``refuses`` makes the next write fail."""

    def __init__(self) -> None:
        self._bytes = bytearray()
        self._synced = 0  # bytes that survive a crash
        self._read = 0  # bytes already checked and folded by an earlier opening
        self._records = Records()
        self.rows: list[Row] = []  # as of the last opening
        self.refuses = False

    def open(self) -> State:
        """The state as of the last whole commit; whatever follows it is cut off."""
        while (frame := self._frame(self._read)) is not None:
            rows, self._read = frame
            self.rows.extend(rows)
            for row in rows:
                self._records.fold(decode_changes(row.changes))
        del self._bytes[self._read :]
        self._synced = self._read
        return self._records.load()

    @property
    def last_seq(self) -> int:
        return self.rows[-1].seq if self.rows else 0

    @property
    def last_now(self) -> float:
        return self.rows[-1].now if self.rows else 0.0

    def write(self, seq: int, entries: Sequence[Entry]) -> None:
        """Append one commit whose first row is ``seq``; it is not safe before :meth:`sync`. Raises DiskError."""
        if self.refuses:
            raise DiskError("no space left on the journal's disk")
        payload = _encode_rows([write_row(seq + n, entry) for n, entry in enumerate(entries)])
        self._bytes += _HEAD.pack(len(payload), zlib.crc32(payload)) + payload

    def sync(self) -> None:
        self._synced = len(self._bytes)

    def crash(self, share: float) -> None:
        """Lose what was not synced, but for its first ``share`` (0 to 1)."""
        kept = self._synced + int((len(self._bytes) - self._synced) * share)
        del self._bytes[kept:]

    def image(self) -> bytes:
        """All bytes, synced or not."""
        return bytes(self._bytes)

    def _frame(self, offset: int) -> tuple[list[Row], int] | None:
        start = offset + _HEAD.size
        if len(self._bytes) < start:
            return None
        length, checksum = _HEAD.unpack_from(self._bytes, offset)
        payload = bytes(self._bytes[start : start + length])
        if len(payload) < length or zlib.crc32(payload) != checksum:
            return None
        return _decode_rows(payload), start + length
