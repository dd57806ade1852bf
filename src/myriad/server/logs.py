"""A job's log files as one stream of bytes: tail, then follow until the job has ended.

Method: every rank's file is read forward from one offset, in whole lines, so that nothing is skipped or
told twice while it grows, restarts or ends. Whether the job has ended is asked *before* the files are read:
its processes are gone by then, so one more read has everything. Trade-off: files are polled (0.2 s), which
works on any shared file system where notification does not; an idle follower costs one stat per rank and poll.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import anyio
from starlette.concurrency import run_in_threadpool

POLL_S = 0.2  # between two looks at files that have not grown
READ_BYTES = 256 * 1024  # of one file at a time: bounds memory per follower and rank
MAX_LINE_BYTES = 64 * 1024  # a longer line is passed on in pieces
_FILE = re.compile(r"rank-(\d+)\.log")


class RankLog:
    """One file, read forward. With a prefix it is given out in whole lines; without, byte by byte as it is."""

    def __init__(self, path: Path, prefix: bytes, tail: int | None) -> None:
        self._path, self._prefix = path, prefix
        self._partial = b""
        self._offset = 0 if tail is None else tail_offset(path, tail)

    def read(self, end: int | None = None) -> bytes:
        """What has been added since the last call, READ_BYTES at most; stops at offset ``end`` when given."""
        size = READ_BYTES if end is None else min(READ_BYTES, end - self._offset)
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                fresh = file.read(max(0, size))
        except FileNotFoundError:
            return b""
        self._offset += len(fresh)
        if not self._prefix:
            return fresh
        *lines, self._partial = (self._partial + fresh).split(b"\n")
        if len(self._partial) > MAX_LINE_BYTES:
            lines, self._partial = [*lines, self._partial], b""
        return b"".join(self._prefix + line + b"\n" for line in lines)

    def more(self, end: int | None = None) -> bool:
        """Whether bytes wait to be read."""
        size = file_size(self._path)
        return self._offset < (size if end is None else min(size, end))

    def rest(self) -> bytes:
        """The last line, when it has no end yet."""
        partial, self._partial = self._partial, b""
        return self._prefix + partial + b"\n" if partial else b""


class JobLogs:
    """The files of a job: of one rank, or of all ranks with each line prefixed ``[rank 3] ``."""

    def __init__(self, folder: Path, rank: int | None, tail: int | None, follow: bool) -> None:
        self._folder, self._rank, self._tail = folder, rank, tail
        self._logs: dict[int, RankLog] = {}
        self._look()
        # Without follow the answer ends where the files ended when it was asked for.
        self._ends = None if follow else {r: file_size(self._folder / log_name(r)) for r in self._logs}

    def read(self) -> bytes:
        """The next piece of every file; empty when all have been read to their end."""
        if self._ends is not None:
            return self._read_to(self._ends)
        self._look()
        while True:
            piece = b"".join(log.read() for log in self._logs.values())
            if piece or not any(log.more() for log in self._logs.values()):
                return piece

    def rest(self) -> bytes:
        return b"".join(log.rest() for log in self._logs.values())

    def _read_to(self, ends: dict[int, int]) -> bytes:
        while True:
            piece = b"".join(log.read(ends[rank]) for rank, log in self._logs.items())
            if piece or not any(log.more(ends[rank]) for rank, log in self._logs.items()):
                return piece

    def _look(self) -> None:
        """Begin the files that have appeared. What appears after the first look is given out from its head."""
        if self._rank is not None:
            self._logs.setdefault(self._rank, RankLog(self._folder / log_name(self._rank), b"", self._tail))
        elif self._folder.is_dir():
            names = (_FILE.fullmatch(path.name) for path in self._folder.iterdir())
            for rank in sorted(int(name[1]) for name in names if name):
                if rank not in self._logs:
                    prefix = f"[rank {rank}] ".encode()
                    self._logs[rank] = RankLog(self._folder / log_name(rank), prefix, self._tail)
        self._tail = None


def log_name(rank: int) -> str:
    return f"rank-{rank:05d}.log"


def file_size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def tail_offset(path: Path, lines: int) -> int:
    """Where the last ``lines`` lines begin; reads backwards, so a long file costs what its tail costs."""
    size = file_size(path)
    if lines <= 0 or size == 0:
        return size
    with path.open("rb") as file:
        start, found, end = size, 0, size
        while start > 0:
            start = max(0, end - READ_BYTES)
            file.seek(start)
            block = file.read(end - start)
            at = len(block)
            while (at := block.rfind(b"\n", 0, at)) >= 0:
                if start + at == size - 1:
                    continue  # the newline that ends the last line begins no other
                found += 1
                if found == lines:
                    return start + at + 1
            end = start
    return 0


async def stream(logs: JobLogs, ended: Callable[[], bool], follow: bool) -> AsyncIterator[bytes]:
    """The bytes of ``logs``; with ``follow``, until ``ended`` says that the job is final."""
    while True:
        last = not follow or await run_in_threadpool(ended)
        while piece := await run_in_threadpool(logs.read):
            yield piece
        if last:
            if rest := logs.rest():
                yield rest
            return
        await anyio.sleep(POLL_S)
