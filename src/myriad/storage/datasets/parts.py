"""The parts of a data set in the making: what a piece of the input became, kept until all can be joined.

In the folder ``<prefix>.parts`` a part is, for each side of the split, a file of tokens and one of document
lengths, and a manifest that names their checksums. Its name is a hash of the piece (path, size, time and
range of each file) and of all that shapes its tokens, so a part that exists under its name is the part that
is wanted: after a kill the same command finds what is done, whatever the number of workers was.

Method: files are synced and renamed, the manifest last; checksums are compared when parts are joined.
Trade-off: the tokens are on disk twice until the data set is published.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any, Self

import msgspec
import numpy as np

from myriad.storage.datasets.documents import Document, Left, Meter, Unreadable, read
from myriad.storage.datasets.index import DTYPE_CODES, DatasetError, with_suffix
from myriad.storage.datasets.sources import Piece
from myriad.storage.datasets.tokenizers import Tokenizer, TokenizerFacts

FORMAT = 1  # to be raised when the same input would become other files
TRAIN, VALIDATION = "train", "validation"
NAMED_LIMIT = 100  # left out by name; beyond that they are only counted

Tell = Callable[[int, int, int], None]  # bytes read, documents and tokens of the piece at hand


class Recipe(msgspec.Struct, frozen=True, kw_only=True):
    """All that shapes the tokens of a piece besides its files."""

    tokenizer: TokenizerFacts
    text_key: str
    validation: float  # the share of documents on the validation side
    format: int = FORMAT

    @property
    def dtype_code(self) -> int:
        return 8 if self.tokenizer.vocab_size <= 1 << 16 else 4

    @property
    def dtype(self) -> np.dtype[Any]:
        return DTYPE_CODES[self.dtype_code]

    @property
    def sides(self) -> tuple[str, ...]:
        return (TRAIN, VALIDATION) if self.validation else (TRAIN,)


class PartSide(msgspec.Struct, frozen=True):
    documents: int
    tokens: int
    tokens_crc32: int
    lengths_crc32: int


class Report(msgspec.Struct, frozen=True, array_like=True):
    """Something left out: the number of its span in the piece, its line in the span, and why."""

    span: int
    line: int | None
    reason: str


class Part(msgspec.Struct, frozen=True):
    """The manifest. ``lines`` has the lines of each span, so that those of the next can be counted on."""

    sides: dict[str, PartSide]
    lines: list[int]
    named: list[Report]
    by_reason: dict[str, int]


class PartFolder:
    """``<prefix>.parts``."""

    def __init__(self, prefix: Path) -> None:
        self.path = with_suffix(prefix, ".parts")

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Only one build writes a prefix at a time. Raises DatasetError."""
        self.path.mkdir(parents=True, exist_ok=True)
        with (self.path / "lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise DatasetError(
                    f"another build is writing {self.path}; wait for it, or choose another --out"
                ) from None
            yield

    def file(self, name: str, side: str, suffix: str) -> Path:
        return self.path / f"{name}.{side}.{suffix}"

    def find(self, name: str, itemsize: int) -> Part | None:
        """The part of this name if it is whole, judged by the sizes of its files."""
        try:
            part = msgspec.json.decode((self.path / f"{name}.json").read_bytes(), type=Part)
            for side, facts in part.sides.items():
                tokens, lengths = self.file(name, side, "tokens"), self.file(name, side, "lengths")
                if tokens.stat().st_size != facts.tokens * itemsize:
                    return None
                if lengths.stat().st_size != facts.documents * 4:
                    return None
        except (OSError, msgspec.DecodeError):
            return None
        return part

    def drop(self, name: str) -> None:
        """A part that has proved damaged is made again by the next build."""
        (self.path / f"{name}.json").unlink(missing_ok=True)

    def discard(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)

    def discard_if_no_part(self) -> None:
        if not any(self.path.glob("*.train.tokens")):
            self.discard()


def name_of(piece: Piece, recipe: Recipe) -> str:
    return hashlib.sha256(msgspec.json.encode((piece, recipe))).hexdigest()[:24]


def is_validation(chunks: Any, share: float) -> bool:
    """The side of a document: its content's hash against a threshold, and nothing else."""
    digest = hashlib.blake2b(digest_size=8)
    for chunk in chunks:
        digest.update(chunk)
    return int.from_bytes(digest.digest(), "big") < share * 2.0**64


def write_part(piece: Piece, recipe: Recipe, tokenizer: Tokenizer, folder: PartFolder, tell: Tell) -> None:
    """Tokenize a piece into its part. Raises DatasetError, and OSError where the part cannot be written."""
    name = name_of(piece, recipe)
    with ExitStack() as stack:
        writers = {
            side: stack.enter_context(_Side(folder, name, side, recipe, tokenizer)) for side in recipe.sides
        }
        meter = Meter(
            lambda count: tell(
                count, sum(w.documents for w in writers.values()), sum(w.tokens for w in writers.values())
            )
        )
        lines, named, by_reason = _fill(piece, recipe, writers, meter)
        part = Part({side: writer.finish() for side, writer in writers.items()}, lines, named, by_reason)
    temporary = folder.path / f"{name}.{os.getpid()}.tmp"
    with temporary.open("wb") as file:
        file.write(msgspec.json.encode(part))
        sync(file)
    temporary.rename(folder.path / f"{name}.json")


def _fill(
    piece: Piece, recipe: Recipe, writers: dict[str, _Side], meter: Meter
) -> tuple[list[int], list[Report], dict[str, int]]:
    lines: list[int] = []
    named: list[Report] = []
    by_reason: Counter[str] = Counter()
    read_before = 0
    for number, span in enumerate(piece):
        meter.lines = 0
        try:
            for found in read(span, recipe.text_key, meter):
                if isinstance(found, Left):
                    by_reason[found.reason] += 1
                    if len(named) < NAMED_LIMIT:
                        named.append(Report(number, found.line, found.reason))
                else:
                    writers[_side(found, recipe)].write(found)
        except Unreadable as error:
            raise DatasetError(
                f"{span.path} was text and is now {error}; run the same command again"
            ) from None
        if span.changed():
            raise DatasetError(f"{span.path} changed while it was read; run the same command again")
        lines.append(meter.lines)
        read_before += span.end - span.start
        meter.read = read_before
        meter.add(0)
    return lines, named, dict(by_reason)


def _side(document: Document, recipe: Recipe) -> str:
    if recipe.validation and is_validation(document.chunks, recipe.validation):
        return VALIDATION
    return TRAIN


class _Side:
    """The two files of one side, under temporary names until :meth:`finish`."""

    def __init__(
        self, folder: PartFolder, name: str, side: str, recipe: Recipe, tokenizer: Tokenizer
    ) -> None:
        self.documents = self.tokens = 0
        self._dtype, self._tokenizer = recipe.dtype, tokenizer
        self._end = np.array(recipe.tokenizer.end_of_document, recipe.dtype).tobytes()
        self._finals = [folder.file(name, side, suffix) for suffix in ("tokens", "lengths")]
        self._files: list[IO[bytes]] = []
        self._checksums = [0, 0]

    def __enter__(self) -> Self:
        for final in self._finals:
            self._files.append(final.with_name(f"{final.name}.{os.getpid()}.tmp").open("wb"))
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files:
            Path(file.name).unlink(missing_ok=True)
            try:
                file.close()
            except OSError:
                pass  # what could not be written was told by the write before

    def write(self, document: Document) -> None:
        length = 0
        for ids in self._tokenizer.encode(document.chunks):
            self._put(0, ids.astype(self._dtype).tobytes())
            length += len(ids)
        self._put(0, self._end)
        self._put(1, np.int32(length + 1).tobytes())
        self.documents += 1
        self.tokens += length + 1

    def _put(self, which: int, data: bytes) -> None:
        self._files[which].write(data)
        self._checksums[which] = zlib.crc32(data, self._checksums[which])

    def finish(self) -> PartSide:
        for file, final in zip(self._files, self._finals, strict=True):
            sync(file)
            Path(file.name).rename(final)
        return PartSide(self.documents, self.tokens, *self._checksums)


def sync(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())
