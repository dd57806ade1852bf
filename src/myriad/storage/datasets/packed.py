"""The packing index of a data set, opened: which pieces of documents a sequence holds.

Method: the header and the last number are checked when it is opened; a sequence costs two small reads, of its place in
the table and of its pieces, whatever the corpus.
"""

from __future__ import annotations

import os
import struct

import numpy as np

from myriad.storage.datasets.index import DatasetError, Index, read_sidecar, with_suffix
from myriad.storage.datasets.packing import HEADER, MAGIC, PIECE, Piece

PIECE_LIMIT_BYTES = 64 << 20  # of one sequence: more can only be damage


class PackingIndex:
    """``<prefix>.pack``; ``sequences`` of ``sequence_length`` places each. Raises DatasetError."""

    def __init__(self, index: Index, sequence_length: int) -> None:
        self.path, self._tokens = with_suffix(index.prefix, ".pack"), index.tokens
        sidecar = read_sidecar(index.prefix)
        packing = None if sidecar is None else sidecar.packing
        if packing is None or packing.sequence_length != sequence_length:
            found = (
                "not packed"
                if packing is None
                else f"packed for sequences of {packing.sequence_length} tokens"
            )
            raise DatasetError(
                f"the data set {index.prefix} is {found}: build it with `myriad data build --pack "
                f"{sequence_length}`, or leave data.packing out"
            )
        self.sequences, self._pieces = packing.sequences, packing.pieces
        if self.sequences == 0:
            raise DatasetError(f"{index.prefix} has no document of two tokens or more to be packed; add text")
        try:
            self._fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise DatasetError(
                f"{self.path} cannot be read ({error.strerror}); build the data set again"
            ) from None
        try:
            self._check(sequence_length)
        except BaseException:
            self.close()
            raise

    def pieces(self, sequence: int) -> list[Piece]:
        """(first token, places) of each piece of a sequence in [0, ``sequences``), in order."""
        assert 0 <= sequence < self.sequences, (sequence, self.sequences)
        first, end = struct.unpack("<QQ", self._read(self._table() + 8 * sequence, 16))
        size = (end - first) * PIECE.itemsize
        if not 0 < size <= PIECE_LIMIT_BYTES or end > self._pieces:
            raise self._damaged()
        found: list[Piece] = np.frombuffer(
            self._read(HEADER.size + first * PIECE.itemsize, size), PIECE
        ).tolist()
        if any(start < 0 or places < 1 or start + places >= self._tokens for start, places in found):
            raise self._damaged()
        return found

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _table(self) -> int:
        return HEADER.size + self._pieces * PIECE.itemsize

    def _check(self, sequence_length: int) -> None:
        size = os.fstat(self._fd).st_size
        want = (MAGIC, sequence_length, self.sequences, self._pieces, self._tokens)
        if (
            size != self._table() + 8 * (self.sequences + 1)
            or HEADER.unpack(self._read(0, HEADER.size)) != want
        ):
            raise self._damaged()

    def _read(self, offset: int, count: int) -> bytes:
        try:
            data = os.pread(self._fd, count, offset)
        except OSError as error:
            raise DatasetError(
                f"reading {self.path} failed: {error.strerror}; check the storage below it"
            ) from error
        if len(data) != count:
            raise self._damaged()
        return data

    def _damaged(self) -> DatasetError:
        return DatasetError(
            f"{self.path} is truncated, damaged or of another data set; build the data set again"
        )
