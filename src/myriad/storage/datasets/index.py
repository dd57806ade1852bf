"""The Megatron ``.bin/.idx`` layout: tokens in one file, where each document begins in the other.

``.idx``: magic (9 bytes), version (u64), dtype code (u8), number of sequences (u64), number of document
marks (u64), lengths in tokens (i32 each), byte offsets in ``.bin`` (i64 each), document marks (i64 each:
the sequence each document begins with, and last the number of sequences). ``.bin``: all tokens, without
gaps. Beside them this project keeps ``.json``: counts, vocabulary and hashes; sets made by Megatron
itself have none and are read all the same.

Opening reads the header and the last entry of each table, whatever the size of the corpus and whether it is a
path or a URL: a file cut short anywhere is found by its length, locally in about 50 us. Single changed bytes are
found by :func:`verify`, which reads everything.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import struct
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from myriad.storage.datasets.files import (
    DataFile,
    DatasetError,
    Prefix,
    fetch_all,
    open_file,
    read,
    read_all,
)
from myriad.storage.datasets.packing import Packing

__all__ = [
    "DTYPE_CODES",
    "HEADER",
    "MAGIC",
    "VERSION",
    "DatasetError",
    "Index",
    "Sidecar",
    "file_sha256",
    "open_index",
    "read_sidecar",
    "verify",
    "with_suffix",
]

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")  # magic, version, dtype code, sequences, document marks
DTYPE_CODES: dict[int, np.dtype[Any]] = {
    1: np.dtype("<u1"),
    2: np.dtype("<i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    8: np.dtype("<u2"),
}
HASH_CHUNK_BYTES = 1 << 20
HASH_CHUNKS = 16  # asked for together, so that a remote file comes in parallel
SIDECAR_LIMIT_BYTES = 1 << 24  # it has counts and hashes: a few hundred bytes


class Sidecar(msgspec.Struct, frozen=True, kw_only=True):
    """The ``.json`` beside a data set. ``end_of_document`` is a token id below ``vocab_size``.

    What has a default is not known of data sets built by version 0.1.
    """

    documents: int
    tokens: int
    vocab_size: int
    end_of_document: int
    tokenizer: str  # "bytes", or "bpe" or "file" with the file ``<prefix>.tokenizer.json``
    dtype: str
    bin_sha256: str
    idx_sha256: str
    tokenizer_sha256: str | None = None
    sources: dict[str, int] = {}  # files by kind
    source_bytes: int = 0
    left_out: dict[str, int] = {}  # files, lines and rows by reason
    side: str | None = None  # "train" or "validation", where the documents were split
    validation: float = 0.0  # the share asked for
    packing: Packing | None = None  # what ``<prefix>.pack`` has, where the set was built with one


@dataclass(frozen=True)
class Index:
    """What the header and the ends of the tables say. The tables of a local one are mapped on demand."""

    prefix: str
    dtype: np.dtype[Any]
    sequences: int
    documents: int
    tokens: int

    @property
    def bin_path(self) -> str:
        return f"{self.prefix}.bin"

    @property
    def idx_path(self) -> str:
        return f"{self.prefix}.idx"

    def lengths(self) -> NDArray[np.int32]:
        """Tokens of each sequence, int32 [sequences], mapped."""
        return np.memmap(self.idx_path, np.int32, "r", HEADER.size, (self.sequences,))

    def pointers(self) -> NDArray[np.int64]:
        """Byte offset of each sequence in ``.bin``, int64 [sequences], mapped."""
        return np.memmap(self.idx_path, np.int64, "r", HEADER.size + 4 * self.sequences, (self.sequences,))


def with_suffix(prefix: Prefix, suffix: str) -> Path:
    """``prefix`` + ``suffix`` of a local data set; a dot inside the prefix's own name stays."""
    return Path(f"{os.fspath(prefix)}{suffix}")


def open_index(prefix: Prefix) -> Index:
    """Read and check the data set's index. O(1). Raises DatasetError."""
    prefix = os.fspath(prefix)
    try:
        with closing(open_file(f"{prefix}.idx")) as idx:
            index = _read_index(prefix, idx)
        with closing(open_file(index.bin_path)) as bin_:
            bin_bytes = bin_.size
    except FileNotFoundError as error:
        raise DatasetError(
            f"there is no data set at {prefix}: {error.filename} is missing; "
            "build it with `myriad data build`, or correct data.path"
        ) from None
    except OSError as error:
        raise DatasetError(f"the data set at {prefix} cannot be read: {error.strerror}") from None
    if bin_bytes != index.tokens * index.dtype.itemsize:
        raise DatasetError(
            f"{index.bin_path} has {bin_bytes} bytes where its index says {index.tokens * index.dtype.itemsize}: "
            "it is truncated or belongs to another index; copy or build the data set again"
        )
    return index


def read_sidecar(prefix: Prefix) -> Sidecar | None:
    """The ``.json`` beside the data set, or None where there is none. Raises DatasetError."""
    name = f"{os.fspath(prefix)}.json"
    try:
        with closing(open_file(name)) as file:
            return msgspec.json.decode(read_all(file, SIDECAR_LIMIT_BYTES), type=Sidecar)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        raise DatasetError(f"{name} cannot be read ({error}); build the data set again") from None


def verify(prefix: Prefix) -> Sidecar:
    """Read all of a data set and compare it with its hashes. About 1 s a GB. Raises DatasetError."""
    prefix = os.fspath(prefix)
    index, sidecar = open_index(prefix), read_sidecar(prefix)
    if sidecar is None:
        raise DatasetError(f"{prefix}.json is missing, so there is no hash to compare with")
    hashes = [(index.bin_path, sidecar.bin_sha256), (index.idx_path, sidecar.idx_sha256)]
    if sidecar.packing is not None:
        hashes.append((f"{prefix}.pack", sidecar.packing.sha256))
    if sidecar.tokenizer_sha256 is not None:
        hashes.append((f"{prefix}.tokenizer.json", sidecar.tokenizer_sha256))
    for path, want in hashes:
        try:
            found = file_sha256(path)
        except OSError as error:
            reason = error.strerror or "it is missing"
            raise DatasetError(f"{path} cannot be read ({reason}); copy or build it again") from None
        if found != want:
            raise DatasetError(f"{path} is not what was built: its hash differs; copy or build it again")
    return sidecar


def file_sha256(name: Prefix) -> str:
    """Of a file or an object. Raises OSError, DatasetError."""
    digest, buffer = hashlib.sha256(), memoryview(bytearray(HASH_CHUNK_BYTES))
    with closing(open_file(name)) as file:
        edges = [*range(0, file.size, HASH_CHUNK_BYTES), file.size]
        for first in range(0, len(edges) - 1, HASH_CHUNKS):
            chunks = list(itertools.pairwise(edges[first : first + HASH_CHUNKS + 1]))
            fetch_all([(file, chunks)])
            for start, end in chunks:
                file.read_into(buffer[: end - start], start)
                digest.update(buffer[: end - start])
    return digest.hexdigest()


def _read_index(prefix: str, file: DataFile) -> Index:
    path = file.name
    if file.size < HEADER.size:
        raise DatasetError(f"{path} is truncated: {file.size} bytes are no header; build the data set again")
    magic, version, code, sequences, marks = HEADER.unpack(read(file, 0, HEADER.size))
    if magic != MAGIC:
        raise DatasetError(f"{path} is no Megatron index: it begins with {magic!r}; give the prefix of one")
    if version != VERSION or code not in DTYPE_CODES:
        raise DatasetError(
            f"{path} has version {version} and dtype code {code}, which this reader does not know; "
            "build the data set again with this version"
        )
    want = HEADER.size + 12 * sequences + 8 * marks
    if file.size != want or sequences < 1 or marks < 2:
        raise DatasetError(
            f"{path} has {file.size} bytes where its header says {want}: it is truncated or damaged; "
            "copy or build the data set again"
        )
    dtype = DTYPE_CODES[code]
    lengths_end, pointers_end = HEADER.size + 4 * sequences, HEADER.size + 12 * sequences
    fetch_all([(file, [(lengths_end - 4, lengths_end), (pointers_end - 8, pointers_end)])])
    (last_length,) = struct.unpack("<i", read(file, lengths_end - 4, lengths_end))
    (last_pointer,) = struct.unpack("<q", read(file, pointers_end - 8, pointers_end))
    if last_length < 0 or last_pointer < 0 or last_pointer % dtype.itemsize:
        raise DatasetError(f"{path} is damaged at its end; copy or build the data set again")
    return Index(prefix, dtype, sequences, marks - 1, last_pointer // dtype.itemsize + last_length)
