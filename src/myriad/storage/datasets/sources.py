"""What a data set is built from: files of text, JSONL and Parquet, in a fixed order, cut into pieces of work.

Method: folders are walked in the order of names; each file becomes spans (the whole file, or byte ranges
of a large uncompressed JSONL or Parquet file), and spans become pieces of about ``PIECE_BYTES_MIN``, or of
a ``PIECES_MAX``-th of the corpus where that is more. The cut depends on nothing but the files, so it is
the same for any number of workers; what is written does not depend on the cut at all. Trade-off: a
compressed file cannot be entered in its middle and is one piece, whatever its size. Memory
grows by one small record a file, not with their sizes.
"""

from __future__ import annotations

import itertools
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from enum import StrEnum
from pathlib import Path

import msgspec

from myriad.storage.datasets.index import DatasetError

# What is taken from folders; a file that is named itself may have any ending, and is text by default.
TEXT_SUFFIXES = frozenset(
    [".c", ".cc", ".cfg", ".cpp", ".css", ".go", ".h", ".hpp", ".html", ".ini", ".java", ".js", ".md"]
    + [".py", ".pyi", ".rs", ".rst", ".sh", ".tex", ".toml", ".ts", ".txt", ".xml", ".yaml", ".yml"]
)
PIECE_BYTES_MIN = 8 << 20  # a part costs a few synced files: little beside 8 MiB of work
PIECES_MAX = 4096  # files in the folder of parts stay in the thousands
FILE_COST_BYTES = 4096  # opening a file takes about as long as reading this much


class Kind(StrEnum):
    TEXT = "text"  # the file is one document
    JSONL = "jsonl"  # a line is one document
    PARQUET = "parquet"  # a row is one document


class Span(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The bytes [start, end) of a file; of JSONL the lines, of Parquet the row groups that begin in them.

    ``name`` is the absolute path as bytes, since file names need not be UTF-8. ``size`` and ``mtime_ns``
    are the file's when it was listed; both are 0 where it could not be looked at.
    """

    name: bytes
    kind: Kind
    size: int
    mtime_ns: int
    start: int
    end: int

    @property
    def path(self) -> Path:
        return Path(os.fsdecode(self.name))

    def changed(self) -> bool:
        """Whether the file is no longer the one that was listed."""
        return _size_and_time(self.path) != (self.size, self.mtime_ns)


Piece = tuple[Span, ...]  # what one worker reads at a time


def scan(paths: Sequence[str | os.PathLike[str]]) -> list[Span]:
    """All files of ``paths``, whole, in order. Raises DatasetError where a path does not exist."""
    given = [Path(each) for each in paths]
    for path in given:
        if not path.exists():
            raise DatasetError(f"{path} does not exist; give files or folders of text")
    spans = []
    for path in _walk(given):
        size, mtime_ns = _size_and_time(path)
        spans.append(Span(os.fsencode(path.absolute()), kind_of(path.name), size, mtime_ns, 0, size))
    return spans


def kind_of(name: str) -> Kind:
    lower = name.lower()
    if lower.endswith((".jsonl", ".jsonl.gz", ".jsonl.zst")):
        return Kind.JSONL
    return Kind.PARQUET if lower.endswith(".parquet") else Kind.TEXT


def cut(files: Sequence[Span]) -> list[Piece]:
    """The same files as pieces of work, in order."""
    target = max(PIECE_BYTES_MIN, sum(file.size for file in files) // PIECES_MAX + 1)
    pieces: list[Piece] = []
    group: list[Span] = []
    weight = 0
    for file in files:
        for span in _spans(file, target):
            group.append(span)
            weight += span.end - span.start + FILE_COST_BYTES
            if weight >= target:
                pieces.append(tuple(group))
                group, weight = [], 0
    return [*pieces, tuple(group)] if group else pieces


def _spans(file: Span, target: int) -> Iterator[Span]:
    if file.kind is Kind.TEXT or file.name.lower().endswith((b".gz", b".zst")):
        yield file
        return
    count = max(1, file.size // target)
    edges = [file.size * i // count for i in range(count + 1)]
    for start, end in itertools.pairwise(edges):
        yield msgspec.structs.replace(file, start=start, end=end)


def _walk(paths: Iterable[Path]) -> Iterator[Path]:
    for path in paths:
        if not path.is_dir():
            yield path
            continue
        for folder, subfolders, names in os.walk(path):
            subfolders[:] = sorted(each for each in subfolders if not _passed_over(each))
            for name in sorted(names):
                if not name.startswith(".") and (
                    Path(name).suffix.lower() in TEXT_SUFFIXES or kind_of(name) is not Kind.TEXT
                ):
                    yield Path(folder, name)


def _passed_over(folder: str) -> bool:
    return folder.startswith(".") or folder == "__pycache__"


def _size_and_time(path: Path) -> tuple[int, int]:
    try:
        status = path.stat()
    except OSError:
        return 0, 0
    return (status.st_size, status.st_mtime_ns) if stat.S_ISREG(status.st_mode) else (0, 0)
