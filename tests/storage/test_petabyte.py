"""A data set of 1 PB opens in bounded memory and seeks in O(1): counted in bytes and system calls, not in time.

Emulated: the tokens. ``.bin`` (1 PB) and ``.idx`` (20 TB: 10^12 documents of 500 tokens) are sparse files in memory
of their full length, true in the header and at the ends of the tables, zeros elsewhere; ordinary file systems do not
take files of that size, so they are memfds with links to them. All sizes, offsets and the order are those of a real one.
"""

from __future__ import annotations

import os
import struct
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import pytest

from myriad.storage.datasets.index import HEADER, MAGIC, VERSION, Sidecar
from myriad.storage.datasets.loader import Loader, TokenDataset, open_mixture
from myriad.storage.datasets.packing import HEADER as PACK_HEADER
from myriad.storage.datasets.packing import MAGIC as PACK_MAGIC
from myriad.storage.datasets.packing import PIECE, Packing

S = 2048
PETABYTE, DOCUMENTS = 10**15, 10**12
TOKENS = PETABYTE // 2
RESIDENT_LIMIT = 4 << 20  # bytes by which opening, seeking and reading may grow the process
ALLOCATED_LIMIT = 1 << 20  # at any moment, by Python and numpy


def sparse(prefix: Path, tokens: int, documents: int) -> list[int]:
    """A data set of that size without its contents; the file descriptors that hold it."""
    length = tokens // documents
    idx, bin_ = os.memfd_create("idx"), os.memfd_create("bin")
    os.ftruncate(bin_, 2 * tokens)
    os.ftruncate(idx, HEADER.size + 12 * documents + 8 * (documents + 1))
    os.pwrite(idx, HEADER.pack(MAGIC, VERSION, 8, documents, documents + 1), 0)
    os.pwrite(idx, struct.pack("<i", length), HEADER.size + 4 * (documents - 1))
    os.pwrite(idx, struct.pack("<q", 2 * (tokens - length)), HEADER.size + 12 * documents - 8)
    Path(f"{prefix}.idx").symlink_to(f"/proc/{os.getpid()}/fd/{idx}")
    Path(f"{prefix}.bin").symlink_to(f"/proc/{os.getpid()}/fd/{bin_}")
    return [idx, bin_]


def write_token(bin_fd: int, at: int, token: int) -> None:
    os.pwrite(bin_fd, struct.pack("<H", token), 2 * at)


@pytest.fixture
def sets(tmp_path: Path) -> Iterator[dict[str, tuple[Path, int]]]:
    """One of 1 PB and one of 1 GB: name to (prefix, descriptor of .bin)."""
    huge = sparse(tmp_path / "huge", TOKENS, DOCUMENTS)
    small = sparse(tmp_path / "small", TOKENS // 10**6, DOCUMENTS // 10**6)
    yield {"huge": (tmp_path / "huge", huge[1]), "small": (tmp_path / "small", small[1])}
    for fd in huge + small:
        os.close(fd)


@dataclass
class Cost:
    """Of reading with system calls: how many, and how many bytes; and the most memory at a time."""

    calls: int = 0
    read_bytes: int = 0
    resident: int = 0
    allocated: int = 0


def _io() -> tuple[int, int]:
    facts = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(facts["syscr"]), int(facts["rchar"])


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@contextmanager
def counted() -> Iterator[Cost]:
    """What the body reads, less what the counting itself does."""
    cost = Cost()
    idle = [_io(), _io()]
    resident = _resident()
    tracemalloc.start()
    before = _io()
    yield cost
    after = _io()
    cost.allocated = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    cost.calls, cost.read_bytes = (
        b - a - (i1 - i0) for a, b, i0, i1 in zip(before, after, *idle, strict=True)
    )
    cost.resident = _resident() - resident


def work(prefix: Path) -> None:
    """Open, resume far into the data, read two batches there."""
    with TokenDataset(prefix, S) as dataset:
        for position in (0, dataset.size // 2, dataset.size - 5, 7 * dataset.size + 3):
            loader = Loader(dataset, 3, 8, 1, 2, position)
            loader.next()
            loader.next()


def mixed(prefix: Path) -> None:
    with open_mixture([(prefix, 5), (Path(f"{prefix}"), 2)], S) as mixture:
        for position in (0, 10**7, mixture.datasets[0].size, 10**15 // S):
            Loader(mixture, 3, 8, 1, 2, position).next()


@pytest.mark.parametrize("job", [work, mixed], ids=lambda each: each.__name__)
def test_opening_and_seeking_cost_the_same_at_any_size(
    sets: dict[str, tuple[Path, int]], job: Callable[[Path], None]
) -> None:
    job(sets["small"][0])  # imports and caches
    costs = {}
    for name in ("small", "huge"):
        with counted() as cost:
            job(sets[name][0])
        costs[name] = cost
    small, huge = costs["small"], costs["huge"]
    assert (huge.calls, huge.read_bytes) == (small.calls, small.read_bytes)
    assert huge.calls < 100 and huge.read_bytes < 64 * 2 * (S + 1) + 10_000
    assert huge.resident < RESIDENT_LIMIT and huge.allocated < ALLOCATED_LIMIT, huge


def test_reading_a_table_is_seen_by_the_count(sets: dict[str, tuple[Path, int]]) -> None:
    """Negative control: an open that reads the lengths of all documents costs 10^6 x 4 bytes in the small set alone."""
    with counted() as cost, TokenDataset(sets["small"][0], S) as dataset:
        lengths = np.fromfile(dataset.index.idx_path, np.int32, dataset.index.sequences, offset=HEADER.size)
    assert cost.read_bytes > 4_000_000 and cost.allocated > 4_000_000 > lengths.max()


def test_every_offset_of_a_petabyte_is_reached(sets: dict[str, tuple[Path, int]]) -> None:
    """No product overflows: tokens written at the far ends are read back through the order."""
    prefix, bin_fd = sets["huge"]
    with TokenDataset(prefix, S) as dataset:
        assert dataset.index.tokens == TOKENS and dataset.index.documents == DOCUMENTS
        assert dataset.size == (TOKENS - 1) // S == 244_140_624_999
        last = dataset.size - 1
        for sample_id in (last, last // 2 + 1, 2**31 // S + 1, 2**32 + 1):
            write_token(bin_fd, sample_id * S, 7)
            write_token(bin_fd, sample_id * S + S, 9)
            row = dataset.read(sample_id)
            assert (row[0], row[S]) == (7, 9)
        batch = Loader(dataset, 3, 4, 0, 1, 10**15).next()
        assert all(0 <= each < dataset.size for each in batch.sample_ids)


def test_short_samples_of_a_petabyte(sets: dict[str, tuple[Path, int]]) -> None:
    """The most samples there can be: 5 x 10^14 of one token each."""
    with TokenDataset(sets["huge"][0], 1) as dataset:
        assert dataset.size == TOKENS - 1
        ids = [each for loader in (Loader(dataset, 3, 64, 0, 1, 2**60),) for each in loader.next().sample_ids]
        assert len(set(ids)) == 64 and max(ids) > dataset.size // 2


def test_a_packed_petabyte(sets: dict[str, tuple[Path, int]]) -> None:
    """Two small reads find the pieces of any of 2.4 x 10^11 packed sequences."""
    prefix, bin_fd = sets["huge"]
    sequences, pieces = TOKENS // S, DOCUMENTS
    packing = Packing(sequence_length=S, sequences=sequences, pieces=pieces, padding=0, cut=0, sha256="")
    sidecar = Sidecar(
        documents=DOCUMENTS,
        tokens=TOKENS,
        vocab_size=257,
        end_of_document=256,
        tokenizer="bytes",
        dtype="uint16",
        bin_sha256="",
        idx_sha256="",
        packing=packing,
    )
    Path(f"{prefix}.json").write_bytes(msgspec.json.encode(sidecar))
    pack = os.memfd_create("pack")
    try:
        os.ftruncate(pack, PACK_HEADER.size + PIECE.itemsize * pieces + 8 * (sequences + 1))
        os.pwrite(pack, PACK_HEADER.pack(PACK_MAGIC, S, sequences, pieces, TOKENS), 0)
        last = np.array([(TOKENS - 40, 20), (TOKENS - 15, 5)], PIECE)
        os.pwrite(pack, last.tobytes(), PACK_HEADER.size + PIECE.itemsize * (pieces - 2))
        os.pwrite(
            pack,
            struct.pack("<QQ", pieces - 2, pieces),
            PACK_HEADER.size + PIECE.itemsize * pieces + 8 * (sequences - 1),
        )
        Path(f"{prefix}.pack").symlink_to(f"/proc/{os.getpid()}/fd/{pack}")
        write_token(bin_fd, TOKENS - 21, 7)
        rows = np.empty((3, S), np.int64)
        with counted() as cost, TokenDataset(prefix, S, packed=True) as dataset:
            dataset.read_packed(sequences - 1, *rows)
    finally:
        os.close(pack)
    assert rows[0, 19] == 7 and rows[2, :26].tolist() == [0] * 20 + [1] * 5 + [-1]
    assert cost.calls < 40 and cost.read_bytes < 20_000 and cost.allocated < ALLOCATED_LIMIT
