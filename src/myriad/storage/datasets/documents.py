"""Documents out of a span of a file, one after the other, and an account of each that is damaged.

A text file is one document, a line of JSONL one, a row of Parquet one. What cannot be one is a
:class:`Left` with its line (of Parquet, its row) and a reason; reading goes on behind it, up to where
compressed data is cut short. Nothing is left out in silence.

Method: files stream in chunks of 1 MiB, also through gzip and zstd, whose output is taken in bounded
pieces (1 KiB of zstd is at most 32 MiB of text). A line is held whole, so one longer than
``LINE_LIMIT_BYTES`` is passed over; a text file may have 2 GiB, for it is read twice (first to see that all
of it is UTF-8) and never held. Trade-off: fields of a JSON line other than the text are not looked into
beyond their brackets and quotes. Figures: :mod:`builder`.
"""

from __future__ import annotations

import codecs
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from myriad.storage.datasets.index import DatasetError
from myriad.storage.datasets.sources import Kind, Span

CHUNK_BYTES = 1 << 20
LINE_LIMIT_BYTES = 32 << 20  # a line of JSONL, a value of Parquet; ten times the longest of novels
DOCUMENT_LIMIT_BYTES = (1 << 31) - 2  # lengths are int32 in the index, and a token is at least a byte
ZSTD_INPUT_BYTES = 1 << 10  # a block of 4 bytes may stand for 128 KiB, so this for 32 MiB
ZSTD_WINDOW_BYTES_MAX = 128 << 20  # what zstd itself accepts without --long
TELL_S = 0.2  # between two words of progress

_CUT_SHORT = "compressed data that ends too early"
_TOO_LONG = f"longer than {LINE_LIMIT_BYTES >> 20} MiB"
_NOT_UTF8 = "not UTF-8"


@dataclass(frozen=True)
class Document:
    """UTF-8 of one document in chunks; may be iterated more than once."""

    chunks: Iterable[bytes]


@dataclass(frozen=True)
class Left:
    """What is left out: a whole file, or the line (row of Parquet) with this number, the first being 1.

    In a span that does not begin its file, lines count from the span's beginning.
    """

    line: int | None
    reason: str


class Unreadable(Exception):
    """The rest of a file cannot be had; the text is the reason."""


class Meter:
    """How far a piece has been read. ``lines`` is for the reader's caller: the lines of the span so far."""

    def __init__(self, tell: Callable[[int], None]) -> None:
        self.read = 0
        self.lines = 0
        self._tell, self._told = tell, time.monotonic()

    def add(self, count: int) -> None:
        self.read += count
        now = time.monotonic()
        if now - self._told >= TELL_S:
            self._told = now
            self._tell(self.read)


def read(span: Span, text_key: str, meter: Meter) -> Iterator[Document | Left]:
    """All documents of a span in order. Raises DatasetError where a package is missing."""
    if not span.path.is_file():
        return iter([Left(None, "not a regular file")])
    if span.kind is Kind.PARQUET:
        from myriad.storage.datasets.parquet import rows

        return rows(span, text_key, meter)
    return _lines(span, text_key, meter) if span.kind is Kind.JSONL else _whole(span.path, meter)


def judged(text: bytes, line: int) -> Document | Left:
    """The document of one line or row whose text is known to be UTF-8."""
    return Document((text,)) if text else Left(line, "an empty document")


# ---------------------------------------------------------------- text


@dataclass(frozen=True)
class _Chunks:
    path: Path
    meter: Meter

    def __iter__(self) -> Iterator[bytes]:
        return _raw(self.path, 0, self.meter)


def _whole(path: Path, meter: Meter) -> Iterator[Document | Left]:
    decoder = codecs.getincrementaldecoder("utf-8")()
    size, newlines = 0, 0
    first = b""
    try:
        for chunk in _raw(path, 0, Meter(lambda _: None)):
            decoder.decode(chunk)
            newlines += chunk.count(b"\n")
            first = chunk if size == 0 else b""
            size += len(chunk)
        decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        # Bytes kept back by the decoder are the beginning of a character and hold no newline.
        found = error.object[: error.start].count(b"\n")
        yield Left(1 + newlines + found, _compressed(path) or _NOT_UTF8)
    except Unreadable as error:
        yield Left(1 + newlines, str(error))
    else:
        if size == 0:
            yield Left(None, "empty")
        elif size > DOCUMENT_LIMIT_BYTES:
            yield Left(None, "longer than 2 GiB")
        elif first:
            meter.add(size)
            yield Document((first,))
        else:
            yield Document(_Chunks(path, meter))


def _compressed(path: Path) -> str | None:
    if path.suffix.lower() in (".gz", ".zst"):
        return "compressed, but not named .jsonl.gz or .jsonl.zst"
    return None


# ---------------------------------------------------------------- JSONL


def _lines(span: Span, key: str, meter: Meter) -> Iterator[Document | Left]:
    suffix = span.path.suffix.lower()
    if suffix == ".gz":
        chunks = _gunzip(_raw(span.path, 0, meter))
    elif suffix == ".zst":
        chunks = _unzstd(_raw(span.path, 0, meter))
    else:
        chunks = _range(span, meter)
    line_type = msgspec.defstruct("Line", [("text", str)], rename={"text": key})
    decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(line_type)
    meter.lines = 0
    try:
        for line in split_lines(chunks, LINE_LIMIT_BYTES):
            meter.lines += 1
            yield Left(meter.lines, _TOO_LONG) if line is None else _parsed(line, decoder, key, meter.lines)
    except Unreadable as error:
        yield Left(meter.lines + 1, str(error))
        return
    if meter.lines == 0 and span.start == 0:
        yield Left(None, "empty")


def _parsed(line: bytes, decoder: msgspec.json.Decoder[Any], key: str, number: int) -> Document | Left:
    try:
        return judged(decoder.decode(line).text.encode(), number)
    except (msgspec.DecodeError, RecursionError) as error:
        return Left(number, _defect(line, key, error))


def _defect(line: bytes, key: str, error: Exception) -> str:
    """Why a line is no document, in words that do not vary with its content."""
    if not line.strip():
        return "an empty line"
    try:
        line.decode()
        value = msgspec.json.decode(line)
    except UnicodeDecodeError:
        return _NOT_UTF8
    except msgspec.DecodeError:
        return "not JSON"
    except RecursionError:
        return "nested too deeply"
    if not isinstance(value, dict):
        return "no JSON object"
    if key not in value:
        return f"without the key {key!r}"
    assert isinstance(error, msgspec.ValidationError), error
    return f"no text under the key {key!r}"


def split_lines(chunks: Iterable[bytes], limit: int) -> Iterator[bytes | None]:
    """Lines without their newlines; None for one longer than ``limit``, which is read but not held."""
    held: list[bytes] = []
    size = 0
    for chunk in chunks:
        first, *others = chunk.split(b"\n")
        size += len(first)
        if size <= limit:
            held.append(first)
        else:
            held.clear()
        for part in others:
            yield b"".join(held) if size <= limit else None
            held, size = [part], len(part)
    if size:
        yield b"".join(held) if size <= limit else None


# ---------------------------------------------------------------- bytes


def _raw(path: Path, start: int, meter: Meter) -> Iterator[bytes]:
    try:
        with path.open("rb", buffering=0) as file:
            file.seek(start)
            while chunk := file.read(CHUNK_BYTES):
                meter.add(len(chunk))
                yield chunk
    except OSError as error:
        raise Unreadable(f"unreadable ({error.strerror})") from None


def _range(span: Span, meter: Meter) -> Iterator[bytes]:
    """The lines that begin in [start, end), to the end of the last; bytes before and after are not yielded."""
    position = max(span.start - 1, 0)
    begun = span.start == 0
    for chunk in _raw(span.path, position, meter):
        if not begun:
            newline = chunk.find(b"\n")
            position += len(chunk) if newline < 0 else newline + 1
            if position >= span.end:
                return  # no line begins in this span
            if newline < 0:
                continue
            chunk, begun = chunk[newline + 1 :], True
        if position + len(chunk) >= span.end:
            newline = chunk.find(b"\n", max(span.end - 1 - position, 0))
            if newline >= 0:
                yield chunk[: newline + 1]
                return
        yield chunk
        position += len(chunk)


def _gunzip(chunks: Iterable[bytes]) -> Iterator[bytes]:
    machine: Any = None
    for chunk in chunks:
        while chunk or machine is not None:
            machine = machine or zlib.decompressobj(wbits=31)
            try:
                yield machine.decompress(chunk, CHUNK_BYTES)
            except zlib.error as error:
                raise Unreadable(f"damaged gzip data ({_sentence(error)})") from None
            chunk = machine.unused_data.lstrip(b"\0") if machine.eof else machine.unconsumed_tail
            if machine.eof:
                machine = None
            elif not chunk:
                break
    if machine is not None:
        yield machine.flush()
        if not machine.eof:
            raise Unreadable(_CUT_SHORT)


def _sentence(error: zlib.error) -> str:
    return str(error).partition(": ")[2] or "not gzip"


def _unzstd(chunks: Iterable[bytes]) -> Iterator[bytes]:
    try:
        import zstandard
    except ImportError:
        raise DatasetError("reading .zst needs zstandard: install myriad-cluster[data]") from None
    machine: Any = None
    for chunk in chunks:
        left = memoryview(chunk)
        while left:
            if machine is None:
                limited = zstandard.ZstdDecompressor(max_window_size=ZSTD_WINDOW_BYTES_MAX)
                machine = limited.decompressobj()
            taken, left = left[:ZSTD_INPUT_BYTES], left[ZSTD_INPUT_BYTES:]
            try:
                yield machine.decompress(taken)
            except zstandard.ZstdError as error:
                raise Unreadable(f"damaged zstd data ({str(error).rpartition(': ')[2]})") from None
            if machine.eof:
                left = memoryview(machine.unused_data + bytes(left))
                machine = None
    if machine is not None:
        raise Unreadable(_CUT_SHORT)
