"""Objects behind a URL, read by ranges: grouped, many at a time, within a deadline, through the cache.

Method: the samples of a batch are known before any is read, so their ranges are looked up in the cache, the rest is
sorted and ranges less than ``GROUP_GAP_BYTES`` apart become one request, and all requests of all data sets go
out together, at most ``REQUESTS`` at a time. With a cache, blocks of it are filled on the way, a few a batch
(``FILL_BYTES``), so that a cold cache does not starve the rank for the sake of a warm one later. A request names
the object's ETag: an object that is replaced while in use is an error, never a mixture of two.

Trade-off: without a cache each sample costs its own bytes and about one round trip for 32 of them; with one, up to
FILL_BYTES more are read in each batch until what fits is there. Memory: one batch and the blocks on their way.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import obstore
from obstore.exceptions import BaseError, GenericError, PreconditionError

from myriad.storage.datasets.files import DataFile, DatasetError, Range
from myriad.storage.objects import ObjectError, ObjectMissing, open_store, sentences

if TYPE_CHECKING:
    from obstore import GetOptions

    from myriad.storage.datasets.cache import BlockCache, CachedObject

REQUESTS = 32  # at a time and rank: what hides 30 ms of latency behind 1,000 requests a second
GROUP_GAP_BYTES = 64 << 10  # a round trip moves several times as much
GROUP_BYTES = 8 << 20  # of one request: larger ones come in parallel
FILL_BYTES = 32 << 20  # of blocks that one batch adds to the cache
READ_RETRY_S = 120.0  # for storage that is gone to come back in mid-job; at a start it is said at once
RETRY_S = 0.5
NO_RANGES = "non-partial response"  # obstore's words for a server that answers a range with status 200


class RemoteFile:
    """An object opened for reading; ``size`` and ``etag`` are those it had then."""

    def __init__(self, url: str, cache: BlockCache | None = None) -> None:
        self.name = url
        folder, _, self.key = url.rpartition("/")
        self._found: dict[Range, bytearray] = {}
        try:
            self.store = open_store(folder).store
            with sentences(url, "read"):
                head = obstore.head(self.store, self.key)
        except ObjectMissing:
            raise FileNotFoundError(errno.ENOENT, "there is no such object", url) from None
        except ObjectError as error:
            raise DatasetError(str(error)) from None
        self.size, self.etag = int(head["size"]), head["e_tag"]
        self.cached: CachedObject | None = None if cache is None else cache.of(url, self.etag, self.size)

    def read_into(self, view: memoryview, offset: int) -> None:
        wanted = (offset, offset + view.nbytes)
        if wanted not in self._found:
            fetch_together([(self, [wanted])])
        view[:] = self._found[wanted]

    def hold(self, found: dict[Range, bytearray]) -> None:
        """What the next reads will ask for; what they have asked for until now is dropped."""
        self._found = found

    def close(self) -> None:
        self._found = {}


@dataclass(frozen=True)
class _Piece:
    """A part of a wanted range that lies in one block, and where its bytes go."""

    start: int
    end: int
    target: memoryview


@dataclass(frozen=True)
class _Request:
    """One range request and the pieces it answers; with ``block`` it is a whole block for the cache."""

    file: RemoteFile
    start: int
    end: int
    pieces: list[_Piece]
    block: int | None = None


def fetch_together(wanted: Sequence[tuple[DataFile, Sequence[Range]]]) -> None:
    """Have all these ranges at hand. Raises DatasetError, which names the object."""
    requests: list[_Request] = []
    answers: list[tuple[RemoteFile, dict[Range, bytearray]]] = []
    budget = FILL_BYTES
    for file, ranges in wanted:
        assert isinstance(file, RemoteFile), file
        found = {each: bytearray(each[1] - each[0]) for each in ranges}
        missing: list[_Piece] = []
        for (start, _), room in found.items():
            missing += [
                piece for piece in _pieces(file, start, memoryview(room)) if not _in_cache(file, piece)
            ]
        filling, budget = _fills(file, missing, budget)
        filled = {id(piece) for request in filling for piece in request.pieces}
        requests += filling + _groups(file, [piece for piece in missing if id(piece) not in filled])
        answers.append((file, found))
    if requests:
        _carry_out(requests)
    for file, found in answers:
        file.hold(found)


def _carry_out(requests: Sequence[_Request]) -> None:
    """Put what arrives into its pieces, and whole blocks into the cache."""
    try:
        results = asyncio.run(_get_all(requests))
    except BaseExceptionGroup as failed:  # of requests at the same time: the first tells
        raise failed.exceptions[0] from None
    for request, data in zip(requests, results, strict=True):
        for piece in request.pieces:
            piece.target[:] = data[piece.start - request.start : piece.end - request.start]
        if request.block is not None:
            assert request.file.cached is not None
            request.file.cached.put(request.block, data)


def _pieces(file: RemoteFile, start: int, target: memoryview) -> list[_Piece]:
    """A wanted range, cut where blocks of the cache meet."""
    end = start + target.nbytes
    inner = [] if file.cached is None else file.cached.edges(start, end)
    cuts = itertools.pairwise([start, *inner, end])
    return [_Piece(first, last, target[first - start : last - start]) for first, last in cuts]


def _in_cache(file: RemoteFile, piece: _Piece) -> bool:
    return file.cached is not None and file.cached.read(piece.start, piece.target)


def _fills(file: RemoteFile, missing: Sequence[_Piece], budget: int) -> tuple[list[_Request], int]:
    """Requests for whole blocks that are missing and may be kept, as far as the budget of bytes goes."""
    by_block: dict[int, list[_Piece]] = {}
    requests: list[_Request] = []
    cached = file.cached
    if cached is None:
        return requests, budget
    for piece in missing:
        block = cached.block_to_fill(piece.start)
        if block is not None:
            by_block.setdefault(block, []).append(piece)
    for block, pieces in by_block.items():
        start, end = cached.span(block)
        if requests and end - start > budget:
            break
        budget -= end - start
        requests.append(_Request(file, start, end, pieces, block))
    return requests, budget


def _groups(file: RemoteFile, missing: Sequence[_Piece]) -> list[_Request]:
    """Requests for exactly what is missing, with what lies close together in one."""
    requests: list[_Request] = []
    for piece in sorted(missing, key=lambda each: each.start):
        last = requests[-1] if requests else None
        end = max(piece.end, last.end) if last else piece.end
        if last and piece.start - last.end <= GROUP_GAP_BYTES and end - last.start <= GROUP_BYTES:
            requests[-1] = _Request(file, last.start, end, [*last.pieces, piece])
        else:
            requests.append(_Request(file, piece.start, piece.end, [piece]))
    return requests


async def _get_all(requests: Sequence[_Request]) -> list[memoryview]:
    """The bytes of each request; the first that fails ends the others."""
    slots = asyncio.Semaphore(REQUESTS)

    async def one(request: _Request) -> memoryview:
        async with slots:
            return await _get(request)

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(request)) for request in requests]
    return [task.result() for task in tasks]


async def _get(request: _Request) -> memoryview:
    """The bytes of a request; tried again while the storage is away, for READ_RETRY_S."""
    file = request.file
    options: GetOptions = {"range": (request.start, request.end)}
    if file.etag is not None:
        options["if_match"] = file.etag
    deadline = time.monotonic() + READ_RETRY_S
    while True:
        try:
            result = await obstore.get_async(file.store, file.key, options=options)
            data = memoryview(await result.bytes_async())
            break
        except GenericError as error:  # the server, or the way to it
            if NO_RANGES in str(error) or time.monotonic() >= deadline:
                raise _failed(file, error) from None
        except (BaseError, OSError, ValueError) as error:
            raise _failed(file, error) from None
        await asyncio.sleep(RETRY_S)
    if data.nbytes != request.end - request.start:
        raise DatasetError(f"{file.name} was truncated while in use; restore it")
    return data


def _failed(file: RemoteFile, error: Exception) -> DatasetError:
    """What became of an object in the middle of a job, in a sentence."""
    if isinstance(error, PreconditionError):
        return DatasetError(
            f"{file.name} was replaced while in use; give each version of a data set a name of its own"
        )
    if NO_RANGES in str(error):
        return DatasetError(
            f"the server of {file.name} does not answer requests for ranges as S3 does (status 206): use another "
            "server, or copy the data set to a file system"
        )
    try:
        with sentences(file.name, "read"):
            raise error
    except ObjectMissing:
        return DatasetError(f"{file.name} was removed while in use; restore it")
    except ObjectError as refused:
        return DatasetError(str(refused))
