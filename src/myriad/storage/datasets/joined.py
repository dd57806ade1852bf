"""The parts of a data set joined into its files, in the order of the input, and given their names.

Method: parts are copied in chunks, their checksums compared on the way, into files that are synced before
they are renamed, the indices last: until then there is no data set, and after a kill the parts are still
there to be joined again. Memory is a chunk. This part is not parallel.
"""

from __future__ import annotations

import hashlib
import os
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from myriad.storage.datasets.documents import CHUNK_BYTES
from myriad.storage.datasets.index import (
    DTYPE_CODES,
    HEADER,
    MAGIC,
    VERSION,
    DatasetError,
    Sidecar,
    file_sha256,
    with_suffix,
)
from myriad.storage.datasets.packing import Packing, write_packing
from myriad.storage.datasets.parts import TRAIN, VALIDATION, PartFolder, PartSide, Recipe, sync
from myriad.storage.datasets.sources import Span

TABLE_CHUNK_ROWS = 1 << 16  # documents whose index entries are in memory at a time


@dataclass(frozen=True)
class Output:
    """One data set. ``sha256`` is that of its ``.bin``."""

    prefix: str
    documents: int
    tokens: int
    sha256: str
    packing: Packing | None = None


@dataclass
class Account:
    """What all parts together have and lack."""

    sides: dict[str, list[tuple[str, PartSide]]]  # by side: (name of the part, its facts), in order
    named: list[str] = field(default_factory=list)
    by_reason: Counter[str] = field(default_factory=Counter)

    def total(self, side: str) -> tuple[int, int]:
        """(documents, tokens)"""
        facts = [each for _, each in self.sides[side]]
        return sum(each.documents for each in facts), sum(each.tokens for each in facts)


def publish(
    prefix: Path,
    files: Sequence[Span],
    recipe: Recipe,
    tokenizer_json: str | None,
    folder: PartFolder,
    account: Account,
    pack: int | None,
) -> tuple[Output, ...]:
    """Join the parts, give the results their names, the indices last, and remove the parts."""
    renames: list[tuple[Path, Path]] = []
    outputs = []
    for side in recipe.sides:
        target = prefix if side == TRAIN else with_suffix(prefix, f".{VALIDATION}")
        joined = folder.path / f"joined.{side}"
        sha256 = _join(with_suffix(joined, ".bin"), folder, side, account)
        suffixes = [".bin", ".json", ".idx"]
        if tokenizer_json is not None:
            _write_whole(with_suffix(joined, ".tokenizer.json"), tokenizer_json.encode())
            suffixes.insert(0, ".tokenizer.json")
        documents, tokens = account.total(side)
        _write_index(
            with_suffix(joined, ".idx"), recipe.dtype_code, documents, folder, account.sides[side], side
        )
        packing = None
        if pack is not None:
            lengths = _lengths(folder, account.sides[side], side)
            packing = write_packing(with_suffix(joined, ".pack"), lengths, pack)
            suffixes.insert(0, ".pack")
        sidecar = Sidecar(
            documents=documents,
            tokens=tokens,
            vocab_size=recipe.tokenizer.vocab_size,
            end_of_document=recipe.tokenizer.end_of_document,
            tokenizer=recipe.tokenizer.kind,
            dtype=recipe.dtype.name,
            bin_sha256=sha256,
            idx_sha256=file_sha256(with_suffix(joined, ".idx")),
            tokenizer_sha256=recipe.tokenizer.sha256,
            sources=dict(sorted(Counter(str(file.kind) for file in files).items())),
            source_bytes=sum(file.size for file in files),
            left_out=dict(sorted(account.by_reason.items())),
            side=side if recipe.validation else None,
            validation=recipe.validation,
            packing=packing,
        )
        encoded = msgspec.json.format(msgspec.json.encode(sidecar), indent=2) + b"\n"
        _write_whole(with_suffix(joined, ".json"), encoded)
        renames += [(with_suffix(joined, suffix), with_suffix(target, suffix)) for suffix in suffixes]
        outputs.append(Output(str(target), documents, tokens, sha256, packing))
    _rename(renames)
    folder.discard()
    return tuple(outputs)


def _rename(renames: Sequence[tuple[Path, Path]]) -> None:
    """Until the indices have their names there is no data set."""
    indices = [each for each in renames if each[1].suffix == ".idx"]
    for _, final in indices:
        final.unlink(missing_ok=True)
        final.with_suffix(".pack").unlink(missing_ok=True)
    for temporary, final in [each for each in renames if each not in indices] + indices:
        temporary.rename(final)
    fd = os.open(indices[0][1].parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _join(target: Path, folder: PartFolder, side: str, account: Account) -> str:
    """Write all tokens of a side in order; the SHA-256 of the file. Raises DatasetError for a damaged part."""
    digest = hashlib.sha256()
    with target.open("wb") as file:
        for name, facts in account.sides[side]:
            for data in _checked(folder, name, side, "tokens", facts.tokens_crc32):
                file.write(data)
                digest.update(data)
        sync(file)
    return digest.hexdigest()


def _checked(folder: PartFolder, name: str, side: str, suffix: str, want: int) -> Iterator[bytes]:
    """A file of a part in chunks of whole entries."""
    found = 0
    path = folder.file(name, side, suffix)
    with path.open("rb", buffering=0) as file:
        while data := file.read(CHUNK_BYTES):
            found = zlib.crc32(data, found)
            yield data
    if found != want:
        folder.drop(name)
        raise DatasetError(f"{path} is damaged; run the same command again, which makes this part anew")


def _write_index(
    target: Path,
    code: int,
    documents: int,
    folder: PartFolder,
    parts: Sequence[tuple[str, PartSide]],
    side: str,
) -> None:
    """The whole ``.idx``: one sequence a document; the lengths are read twice from the parts."""
    with target.open("wb") as idx:
        idx.write(HEADER.pack(MAGIC, VERSION, code, documents, documents + 1))
        for lengths in _lengths(folder, parts, side):
            idx.write(lengths.tobytes())
        offset = 0
        for lengths in _lengths(folder, parts, side):
            ends = offset + np.cumsum(lengths.astype(np.int64)) * DTYPE_CODES[code].itemsize
            idx.write(np.concatenate(([offset], ends[:-1])).astype(np.int64).tobytes())
            offset = int(ends[-1])
        for first in range(0, documents + 1, TABLE_CHUNK_ROWS):
            last = min(first + TABLE_CHUNK_ROWS, documents + 1)
            idx.write(np.arange(first, last, dtype=np.int64).tobytes())
        sync(idx)


def _lengths(
    folder: PartFolder, parts: Sequence[tuple[str, PartSide]], side: str
) -> Iterator[NDArray[np.int32]]:
    for name, facts in parts:
        for data in _checked(folder, name, side, "lengths", facts.lengths_crc32):
            yield np.frombuffer(data, np.int32)


def _write_whole(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        sync(file)
