"""Blocks of remote data sets on local NVMe, within a limit of bytes, shared by the ranks and jobs of a node.

Method: a block is a file of its own in the subfolder ``myriad-blocks``, named by the hash of (URL, ETag, size) and
its number, so a data set that was replaced is another one. It is written to a temporary name and renamed, and each
``CHUNK_BYTES`` of it have a CRC-32 that every read compares: a damaged block is a miss and is fetched again. All
writing is under one lock (flock), which the kernel takes from a process that dies; the sum of bytes stands in the
lock file and is counted anew whenever a writer did not get to its end. Where room is needed, the blocks that were
not read for the longest go, and only files of this form are ever removed: whatever has no remote origin is no block.

A job's data sets larger than the limit do not chase each other out: of each, the same share of blocks is kept, and
the rest is read from the origin by exact ranges. For samples drawn at random no order of eviction does better.

Trade-off: a read opens its block anew and checks 16 to 32 KiB, about 15 us, so that no unlinked file is held open
and no bit rots unseen. A block is not synced: after a loss of power its checksums tell. Keeping
one costs 14 ms, and one rank of a node does so at a time.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import re
import struct
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_log = logging.getLogger(__name__)

FOLDER = "myriad-blocks"
BLOCK_BYTES = 8 << 20  # a file system keeps files of this size in few extents; 1 TB are 125,000 of them
CHUNK_BYTES = 16 << 10  # checked together: a sample of 2,048 tokens lies in one or two
ROOM_SHARE = 0.05  # of the limit, freed at once, so that the folder is seldom listed
TOUCH_S = 60.0  # a block that is read more often is marked as used only so often
LOCK_TIMEOUT_S = 10.0  # the lock is held for one block's writing, or one listing of the folder

_NAME = re.compile(r"[0-9a-f]{32}-[0-9]{10}")
_TEMPORARY = ".tmp"
_HEADER = struct.Struct("<8sII")  # magic, bytes of data, CRC-32 of the table of checksums
_MAGIC = b"MYRBLK1\0"
_SUM = struct.Struct("<Q?")  # bytes of all blocks, and whether a writer is at work


class BlockCache:
    """Blocks in ``directory``, at most ``size`` bytes of them with their checksums."""

    def __init__(
        self,
        directory: Path,
        size: int,
        block_bytes: int = BLOCK_BYTES,
        touch_s: float = TOUCH_S,
    ) -> None:
        assert block_bytes > 0 and size > 0, (block_bytes, size)
        self.folder, self.size, self.block_bytes = directory / FOLDER, size, block_bytes
        self._touch_s = touch_s
        self._touched: dict[str, float] = {}
        self.broken = False  # cannot be written, as was said once
        self.share = 1.0  # of each object's blocks that are kept
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            self._give_up(error)

    def expect(self, total: int) -> None:
        """The job's data sets have ``total`` bytes; where that is more than the cache, a share of each is kept."""
        overhead = file_bytes(self.block_bytes) / self.block_bytes
        self.share = min(1.0, self.size * (1 - ROOM_SHARE) / max(1.0, total * overhead))
        if self.share < 1:
            _log.warning(
                "the cache in %s holds %.0f%% of the data sets, which have %s bytes; the rest is read from its "
                "origin each time",
                self.folder.parent,
                100 * self.share,
                f"{total:,}",
            )

    def of(self, url: str, etag: str | None, size: int) -> CachedObject:
        """The blocks of one object in one version."""
        origin = hashlib.sha256(f"{url}\0{etag}\0{size}\0{self.block_bytes}".encode()).hexdigest()[:32]
        return CachedObject(self, origin, size)

    def read(self, name: str, start: int, target: memoryview) -> bool:
        """Fill ``target`` with the block's bytes from ``start`` on; False where it is not there whole."""
        path = self.folder / name
        try:
            with path.open("rb", buffering=0) as file:
                if not _read_checked(file.fileno(), start, target):
                    return False
                self._touch(name, file.fileno())
        except OSError:
            return False
        return True

    def put(self, name: str, data: memoryview) -> None:
        """Keep a block; where that cannot be done, say so once and keep nothing from then on."""
        need = file_bytes(data.nbytes)
        if self.broken or need > self.size:
            return
        try:
            with self._locked() as lock:
                used = self._sum(lock)
                path = self.folder / name
                if path.exists():  # damaged, or put by another rank just now
                    used = max(0, used - path.stat().st_size)
                if used + need > self.size:
                    used = self._make_room(need, name)
                os.pwrite(lock, _SUM.pack(used, True), 0)
                _write(path, data)
                os.pwrite(lock, _SUM.pack(used + need, False), 0)
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        self.broken = True
        _log.warning(
            "the cache in %s cannot be written (%s); going on without adding to it",
            self.folder.parent,
            error.strerror or error,
        )

    def _touch(self, name: str, fd: int) -> None:
        """Mark the block as used, for the order of eviction."""
        now = time.monotonic()
        if now - self._touched.get(name, -self._touch_s) >= self._touch_s:
            self._touched[name] = now
            with contextlib.suppress(OSError):  # read-only: nothing is evicted there either
                os.utime(fd)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[int]:
        """The lock file's descriptor while this process alone may write."""
        fd = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            deadline = time.monotonic() + LOCK_TIMEOUT_S
            while True:
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() >= deadline:
                        raise TimeoutError(0, f"its lock was taken for {LOCK_TIMEOUT_S:g} s") from None
                    time.sleep(0.002)
            yield fd
        finally:
            os.close(fd)

    def _sum(self, lock: int) -> int:
        """Bytes of all blocks, from the lock file, or counted where its last writer did not come to an end."""
        said = os.pread(lock, _SUM.size, 0)
        used, writing = _SUM.unpack(said) if len(said) == _SUM.size else (0, True)
        if not writing:
            return int(used)
        return sum(size for _, _, size in self._blocks())

    def _blocks(self) -> list[tuple[int, str, int]]:
        """(last use in ns, name, bytes) of all blocks. Under the lock: what a dead writer has left is removed."""
        found = []
        with os.scandir(self.folder) as entries:
            for entry in entries:
                name = entry.name.removesuffix(_TEMPORARY)
                if not _NAME.fullmatch(name) or not entry.is_file(follow_symlinks=False):
                    continue
                if entry.name.endswith(_TEMPORARY):
                    os.unlink(entry.path)
                else:
                    status = entry.stat(follow_symlinks=False)
                    found.append((status.st_mtime_ns, entry.name, status.st_size))
        return sorted(found)

    def _make_room(self, need: int, keep: str) -> int:
        """Remove what was not read for the longest; the bytes that are left, ``keep`` not counted."""
        blocks = [block for block in self._blocks() if block[1] != keep]
        used = sum(size for _, _, size in blocks)
        goal = max(0, int(self.size * (1 - ROOM_SHARE)) - need)
        for _, name, size in blocks:
            if used <= goal:
                break
            if self._is_block(name):
                os.unlink(self.folder / name)
                self._touched.pop(name, None)
            used -= size
        return used

    def _is_block(self, name: str) -> bool:
        """Whether a file with the name of a block is one: anything else is somebody's."""
        with (self.folder / name).open("rb") as file:
            return file.read(len(_MAGIC)) == _MAGIC


@dataclass(frozen=True)
class CachedObject:
    """One remote object's blocks."""

    cache: BlockCache
    origin: str
    size: int

    @property
    def kept(self) -> int:
        """How many of its blocks, from the first one on, may be in the cache."""
        return int(-(-self.size // self.cache.block_bytes) * self.cache.share)

    def edges(self, start: int, end: int) -> range:
        """Where blocks meet inside the bytes [start, end)."""
        step = self.cache.block_bytes
        return range((start // step + 1) * step, end, step)

    def span(self, block: int) -> tuple[int, int]:
        """The object's bytes that are in the block."""
        step = self.cache.block_bytes
        return block * step, min((block + 1) * step, self.size)

    def block_to_fill(self, offset: int) -> int | None:
        """The block of ``offset``, which was found missing, if it is one to be kept and there is a way to."""
        block = offset // self.cache.block_bytes
        return block if block < self.kept and not self.cache.broken else None

    def read(self, offset: int, target: memoryview) -> bool:
        """Fill ``target``, which lies in one block, from the cache; False where it is not there whole."""
        block = offset // self.cache.block_bytes
        return block < self.kept and self.cache.read(
            self._name(block), offset - block * self.cache.block_bytes, target
        )

    def put(self, block: int, data: memoryview) -> None:
        self.cache.put(self._name(block), data)

    def _name(self, block: int) -> str:
        return f"{self.origin}-{block:010d}"


def file_bytes(data_bytes: int) -> int:
    """Bytes of a block's file: header, one checksum a chunk, data."""
    return _HEADER.size + 4 * -(-data_bytes // CHUNK_BYTES) + data_bytes


def _write(path: Path, data: memoryview) -> None:
    """Whole or not at all."""
    checksums = struct.pack(f"<{-(-data.nbytes // CHUNK_BYTES)}I", *_checksums(data))
    temporary = path.with_name(path.name + _TEMPORARY)
    try:
        with temporary.open("wb", buffering=0) as file:
            for part in (_HEADER.pack(_MAGIC, data.nbytes, zlib.crc32(checksums)), checksums, data):
                left = memoryview(part)
                while left:
                    left = left[file.write(left) :]
        temporary.rename(path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def _read_checked(fd: int, start: int, target: memoryview) -> bool:
    """Fill ``target`` with the bytes of the block from ``start`` on, if header and checksums agree."""
    header = os.pread(fd, _HEADER.size, 0)
    if len(header) < _HEADER.size:
        return False
    magic, size, table_crc32 = _HEADER.unpack(header)
    end = start + target.nbytes
    if magic != _MAGIC or end > size:
        return False
    checksums = os.pread(fd, 4 * -(-size // CHUNK_BYTES), _HEADER.size)
    if zlib.crc32(checksums) != table_crc32:
        return False
    first, last = start // CHUNK_BYTES, -(-end // CHUNK_BYTES)
    data_at = _HEADER.size + len(checksums)
    low = first * CHUNK_BYTES
    data = memoryview(os.pread(fd, min(last * CHUNK_BYTES, size) - low, data_at + low))
    want = struct.unpack_from(f"<{last - first}I", checksums, 4 * first)
    if low + data.nbytes < end or tuple(_checksums(data)) != want:
        return False
    target[:] = data[start - low : end - low]
    return True


def _checksums(data: memoryview) -> Iterator[int]:
    return (zlib.crc32(data[at : at + CHUNK_BYTES]) for at in range(0, data.nbytes, CHUNK_BYTES))
