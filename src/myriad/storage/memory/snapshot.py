"""One rank's training state in one sealed memfd.

Layout: magic (8 bytes), header length (u64), header (JSON: step, position, meta, entries), the raw
bytes of each entry at offsets aligned to 64 bytes, and last the CRC-32 (u32) of all bytes before it.

Method: the bytes are copied into mapped memory and checksummed on the way, while they are in the cache (``buffers``
says whose memory). Before anybody restores from it the memfd is sealed, after which no process can change, shrink or
grow it. It is passed by SCM_RIGHTS and vanishes with its last holder, so a dead node leaves nothing behind.
The CRC-32 is ISA-L's (36 GB/s a core, zlib's 1.8 to 3.2), so that the copy itself is what takes time.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import struct
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

import msgspec
from isal.isal_zlib import crc32 as crc32_of

from myriad.storage.memory.buffers import Buffer, Buffers

MAGIC = b"MYRSNAP1"
_PREFIX = struct.Struct("<8sQ")  # magic, bytes of the header
_TRAILER = struct.Struct("<I")  # CRC-32 of all before it
ALIGNMENT_BYTES = 64  # of each entry: a cache line, and enough for any vector load
CHUNK_BYTES = 1 << 18  # copied and checksummed at a time: stays in the second-level cache
HEADER_LIMIT_BYTES = 64 << 20  # a header above this is damage, not a model with many parameters
SEAL_TIMEOUT_S, SEAL_RETRY_S = 1.0, 0.002  # for the memory of a dead process to be taken down
SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE


class SnapshotError(OSError):
    """The memory for a snapshot is not to be had."""


class SnapshotCorrupt(ValueError):
    """The bytes are not those that were written; use another tier."""


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """One tensor: ``dtype`` is the writer's word for it (for example ``bfloat16``), offset in bytes."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class _Header(msgspec.Struct, frozen=True):
    step: int
    position: int
    meta: dict[str, Any]
    entries: dict[str, Entry]


@dataclass(frozen=True)
class Snapshot:
    """An open, verified snapshot. The views stay valid until :meth:`close`, which refuses while any lives."""

    step: int
    position: int
    meta: dict[str, Any]
    entries: dict[str, Entry]
    size: int
    crc32: int
    _map: mmap.mmap

    def view(self, name: str) -> memoryview:
        """The raw bytes of one entry, read-only, without a copy."""
        entry = self.entries[name]
        return memoryview(self._map)[entry.offset : entry.offset + entry.nbytes]

    def copy_into(self, name: str, destination: Any) -> None:
        """Copy one entry into a writable contiguous buffer of the same number of bytes, in one copy."""
        target = _flat(destination)
        assert target.nbytes == self.entries[name].nbytes, (name, target.nbytes, self.entries[name])
        if target.nbytes:
            with self.view(name) as source:
                target[:] = source

    def close(self) -> None:
        self._map.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True)
class Taken:
    """A snapshot that was just written: its bytes are in ``buffer`` until that is released."""

    buffer: Buffer
    step: int
    crc32: int
    entries: dict[str, Entry]

    @property
    def size(self) -> int:
        return self.buffer.size

    def view(self, name: str) -> memoryview:
        """The raw bytes of one entry, without a copy."""
        entry = self.entries[name]
        return memoryview(self.buffer.map)[entry.offset : entry.offset + entry.nbytes]


def take_snapshot(
    entries: Mapping[str, tuple[str, tuple[int, ...], Any]],
    step: int,
    meta: Mapping[str, Any],
    buffers: Buffers,
    *users: str,
    position: int = 0,
) -> Taken:
    """Write ``name -> (dtype, shape, contiguous buffer)`` into memory of ``buffers``, for these users.

    ``meta`` must be JSON; ``position`` is the number of samples consumed. The entries' buffers may change once
    this returns. Raises SnapshotError when memory does not suffice.
    """
    sources = {name: _flat(buffer) for name, (_, _, buffer) in entries.items()}
    prefix, table, size = _lay_out(entries, sources, step, position, meta)
    try:
        buffer = buffers.take(size, *users)
    except OSError as error:
        raise SnapshotError(
            f"there is no memory for a snapshot of {size} bytes ({error.strerror}): "
            "spread the job over more nodes, or give each node more host memory"
        ) from error
    crc = _put(buffer.map, 0, memoryview(prefix), 0)
    end = len(prefix)
    for name, entry in table.items():
        crc = _put(buffer.map, end, memoryview(bytes(entry.offset - end)), crc)
        crc = _put(buffer.map, entry.offset, sources[name], crc)
        end = entry.offset + entry.nbytes
    _put(buffer.map, size - _TRAILER.size, memoryview(_TRAILER.pack(crc)), 0)
    assert end + _TRAILER.size == size, (end, size)
    return Taken(buffer, step, crc, table)


def open_snapshot(fd: int, crc32: int | None = None) -> Snapshot:
    """Map and verify a snapshot; ``fd`` stays the caller's and may be closed at once.

    ``crc32``, where known, is compared as well. Raises SnapshotCorrupt.
    """
    size = os.fstat(fd).st_size
    if not _sealed(fd):
        raise SnapshotCorrupt("the snapshot is not sealed, so its bytes cannot be trusted to stay")
    stored = _checksum(fd, size)
    if stored is None or (crc32 is not None and crc32 != stored):
        raise SnapshotCorrupt(f"the snapshot of {size} bytes fails its checksum")
    return _mapped(fd, size, stored)


def _mapped(fd: int, size: int, crc32: int) -> Snapshot:
    # Private, not shared: older kernels refuse a shared mapping of a memfd sealed against writing.
    mapped = mmap.mmap(fd, size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)
    try:
        header = _read_header(mapped, size)
    except SnapshotCorrupt:
        mapped.close()
        raise
    return Snapshot(header.step, header.position, header.meta, header.entries, size, crc32, mapped)


class Incoming:
    """A snapshot of ``size`` bytes that arrives in pieces, written to a memfd and checksummed on the way."""

    def __init__(self, size: int, crc32: int) -> None:
        self._size, self._crc32 = size, crc32
        self._crc = 0
        self._got = 0
        self._fd = os.memfd_create("myriad-copy", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)

    @property
    def missing(self) -> int:
        """Bytes still to come."""
        return self._size - self._got

    def feed(self, piece: bytes) -> None:
        """Take the next bytes, at most ``missing``."""
        assert len(piece) <= self.missing, (len(piece), self.missing)
        body = max(0, self._size - _TRAILER.size - self._got)
        self._crc = crc32_of(memoryview(piece)[:body], self._crc)
        written = 0
        while written < len(piece):
            written += os.pwrite(self._fd, memoryview(piece)[written:], self._got + written)
        self._got += len(piece)

    def seal(self) -> int:
        """The whole snapshot's fd, the caller's from now on. Raises SnapshotCorrupt."""
        trailer = os.pread(self._fd, _TRAILER.size, max(0, self._size - _TRAILER.size))
        if self.missing or self._crc != self._crc32 or trailer != _TRAILER.pack(self._crc):
            raise SnapshotCorrupt(f"a copy of {self._size} bytes fails its checksum")
        fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, SEALS)
        fd, self._fd = self._fd, -1
        return fd

    def close(self) -> None:
        """Give up what has arrived, unless it was sealed."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def verify(fd: int, size: int, crc32: int) -> bool:
    """Whether ``fd`` is a snapshot of exactly these bytes that nobody can change any more: it is sealed here, which
    the kernel refuses while somebody has it mapped for writing. Reads all of it: about 0.2 s a GB."""
    return os.fstat(fd).st_size == size and _seal(fd) and _checksum(fd, size) == crc32


def _lay_out(
    entries: Mapping[str, tuple[str, tuple[int, ...], Any]],
    buffers: Mapping[str, memoryview],
    step: int,
    position: int,
    meta: Mapping[str, Any],
) -> tuple[bytes, dict[str, Entry], int]:
    """(magic, length and header, padded; entries in file order; bytes of the whole file)."""

    def table(start: int) -> tuple[dict[str, Entry], int]:
        placed, end = {}, start
        for name, (dtype, shape, _) in entries.items():
            offset = _aligned(end)
            placed[name] = Entry(dtype, tuple(shape), offset, buffers[name].nbytes)
            end = offset + buffers[name].nbytes
        return placed, end

    # Offsets are written in the header, whose length moves them: reserve for the longest they can get. Whole pages, so
    # that another digit of the step seldom makes a snapshot of another size, which no buffer in use would fit.
    data_bytes = table(0)[1]
    draft = msgspec.json.encode(_Header(step, position, dict(meta), table(0)[0]))
    digits = len(str(data_bytes + len(draft) + 64 * (len(entries) + 2)))
    needed = _PREFIX.size + len(draft) + digits * len(entries)
    start = -(-needed // mmap.PAGESIZE) * mmap.PAGESIZE
    placed, end = table(start)
    header = msgspec.json.encode(_Header(step, position, dict(meta), placed)).ljust(start - _PREFIX.size)
    assert _PREFIX.size + len(header) == start, (len(header), start)
    return _PREFIX.pack(MAGIC, len(header)) + header, placed, end + _TRAILER.size


def _put(target: mmap.mmap, offset: int, data: memoryview, crc: int) -> int:
    """Copy ``data`` to ``offset``, chunk by chunk, and return the checksum continued over it."""
    for begin in range(0, data.nbytes, CHUNK_BYTES):
        chunk = data[begin : begin + CHUNK_BYTES]
        target[offset + begin : offset + begin + chunk.nbytes] = chunk
        crc = crc32_of(chunk, crc)
    return crc


def _checksum(fd: int, size: int) -> int | None:
    """The CRC-32 of the body, or None when the stored one differs or bytes are missing."""
    if size < _PREFIX.size + _TRAILER.size:
        return None
    crc = 0
    for chunk in _chunks(fd, size - _TRAILER.size):
        crc = crc32_of(chunk, crc)
    return crc if os.pread(fd, _TRAILER.size, size - _TRAILER.size) == _TRAILER.pack(crc) else None


def _chunks(fd: int, size: int) -> Iterator[memoryview]:
    buffer = memoryview(bytearray(min(CHUNK_BYTES, size)))
    offset = 0
    while offset < size:
        count = os.preadv(fd, [buffer[: size - offset]], offset)
        if count == 0:
            return  # shorter than it says: the checksum will not match
        yield buffer[:count]
        offset += count


def _seal(fd: int) -> bool:
    """Seal it unless it is sealed; whether it now is.

    The kernel takes the memory of a process down when that has ended already, and refuses until then.
    """
    deadline = time.monotonic() + SEAL_TIMEOUT_S
    while not _sealed(fd):
        try:
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
        except OSError as error:
            if error.errno != errno.EBUSY or time.monotonic() >= deadline:
                return False
            time.sleep(SEAL_RETRY_S)
    return True


def _sealed(fd: int) -> bool:
    try:
        return fcntl.fcntl(fd, fcntl.F_GET_SEALS) & SEALS == SEALS
    except OSError:  # no memfd
        return False


def _read_header(mapped: mmap.mmap, size: int) -> _Header:
    magic, length = _PREFIX.unpack_from(mapped)
    if magic != MAGIC or length > min(size - _PREFIX.size, HEADER_LIMIT_BYTES):
        raise SnapshotCorrupt("this is no snapshot, or its header is damaged")
    try:
        header = msgspec.json.decode(mapped[_PREFIX.size : _PREFIX.size + length], type=_Header)
    except msgspec.DecodeError as error:
        raise SnapshotCorrupt(f"the snapshot's header is damaged: {error}") from None
    if any(e.offset < 0 or e.nbytes < 0 or e.offset + e.nbytes > size for e in header.entries.values()):
        raise SnapshotCorrupt("the snapshot's header names bytes beyond its end")
    return header


def _flat(buffer: Any) -> memoryview:
    """The buffer's bytes as one row; empty and zero-dimensional ones included."""
    view = memoryview(buffer)
    assert view.c_contiguous, "a snapshot is taken of contiguous buffers"
    return view.cast("B") if view.nbytes else memoryview(bytearray())


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
