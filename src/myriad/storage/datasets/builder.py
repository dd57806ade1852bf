"""Build a token data set from text files: each file is a document that ends with an end-of-document token.

Tokenizers: ``bytes`` (a token is a byte; 256 is the end of a document, so the vocabulary has 257 entries
and the model pads its own table where a layout needs that) and ``bpe`` (byte-level BPE trained on the
first 64 MiB of the same text, saved beside the data set). Ids are written as uint16 where they fit, else
as int32.

Method: two passes over each file, the first to see that all of it is UTF-8, the second to write, so that
a damaged file leaves no trace in the output. Everything streams in chunks of 1 MiB (a BPE chunk ends at
a line where it can) and lengths go through a temporary file, so memory does not grow with the corpus.
Files appear under their names only when whole and synced, the index last. About 60 MB/s for bytes and
2 MB/s for bpe, on one core.
"""

from __future__ import annotations

import codecs
import hashlib
import itertools
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

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

# What is taken from folders; a file that is named itself may have any ending.
TEXT_SUFFIXES = frozenset(
    [".c", ".cc", ".cfg", ".cpp", ".css", ".go", ".h", ".hpp", ".html", ".ini", ".java", ".js", ".md"]
    + [".py", ".pyi", ".rs", ".rst", ".sh", ".tex", ".toml", ".ts", ".txt", ".xml", ".yaml", ".yml"]
)
CHUNK_BYTES = 1 << 20
TABLE_CHUNK_ROWS = 1 << 16  # documents whose index entries are in memory at a time
DOCUMENT_LIMIT_BYTES = (1 << 31) - 2  # lengths are int32 in the index, and a token is at least a byte
BPE_TRAINING_LIMIT_BYTES = 64 << 20  # text beyond this moves the merges of a small vocabulary little
BPE_VOCAB_SIZE = 8192
BPE_END_OF_DOCUMENT = "<|end_of_document|>"
SKIPPED_NAMED_LIMIT = 100  # skipped files listed by name; beyond that they are only counted

Progress = Callable[[int, int], None]  # documents and tokens so far


@dataclass(frozen=True)
class BuildResult:
    """What was built and what was left out. ``sha256`` is that of the ``.bin``."""

    documents: int
    tokens: int
    vocab_size: int
    sha256: str
    skipped: tuple[tuple[str, str], ...]  # (path, reason) of the first SKIPPED_NAMED_LIMIT
    skipped_by_reason: dict[str, int]


class Tokenizer(Protocol):
    vocab_size: int
    end_of_document: int

    def encode(self, chunks: Iterator[bytes]) -> Iterator[NDArray[Any]]:
        """Token ids of one document given as UTF-8 pieces, piece by piece."""


class ByteTokenizer:
    vocab_size = 257
    end_of_document = 256

    def encode(self, chunks: Iterator[bytes]) -> Iterator[NDArray[Any]]:
        return (np.frombuffer(chunk, np.uint8) for chunk in chunks)


class BpeTokenizer:
    """Byte-level BPE of the ``tokenizers`` package, trained on ``texts``."""

    def __init__(self, texts: Iterator[str], vocab_size: int) -> None:
        try:
            from tokenizers import Tokenizer as Model
            from tokenizers import decoders, models, pre_tokenizers, trainers
        except ImportError:
            raise DatasetError(
                "the bpe tokenizer needs the package tokenizers: install myriad-cluster[train], "
                "or choose the bytes tokenizer"
            ) from None
        self._model = Model(models.BPE())
        self._model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        self._model.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[BPE_END_OF_DOCUMENT],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        self._model.train_from_iterator(texts, trainer)
        self.vocab_size = int(self._model.get_vocab_size())
        # The trainer numbers special tokens first.
        self.end_of_document = 0
        assert self._model.token_to_id(BPE_END_OF_DOCUMENT) == self.end_of_document

    def encode(self, chunks: Iterator[bytes]) -> Iterator[NDArray[Any]]:
        for text in _texts(chunks):
            yield np.array(self._model.encode(text).ids, dtype=np.int32)

    def to_json(self) -> str:
        return str(self._model.to_str())


class _Sources:
    """The text files below some paths, in a fixed order, with an account of those left out."""

    def __init__(self, paths: Sequence[str | os.PathLike[str]], exclude: Sequence[str]) -> None:
        self._paths = [Path(each) for each in paths]
        self._exclude = frozenset(exclude) | {"__pycache__"}
        for path in self._paths:
            if not path.exists():
                raise DatasetError(f"{path} does not exist; give files or folders of text")
        self.named: list[tuple[str, str]] = []
        self.by_reason: Counter[str] = Counter()

    def files(self) -> Iterator[Path]:
        """Every readable, non-empty file of UTF-8; the others are recorded."""
        self.named.clear()
        self.by_reason.clear()
        for path in self._candidates():
            reason = _defect(path)
            if reason is None:
                yield path
                continue
            self.by_reason[reason] += 1
            if len(self.named) < SKIPPED_NAMED_LIMIT:
                self.named.append((str(path), reason))

    def _candidates(self) -> Iterator[Path]:
        for path in self._paths:
            if not path.is_dir():
                yield path
                continue
            for folder, subfolders, names in os.walk(path):
                hidden = {each for each in subfolders if each.startswith(".")}
                subfolders[:] = sorted(set(subfolders) - self._exclude - hidden)
                for name in sorted(names):
                    if not name.startswith(".") and Path(name).suffix.lower() in TEXT_SUFFIXES:
                        yield Path(folder, name)


class _Output:
    """Temporary files beside the data set that take their names in :meth:`publish`, or vanish."""

    def __init__(self, prefix: Path, stack: ExitStack) -> None:
        self._prefix, self._stack = prefix, stack
        self._finished: list[tuple[Path, Path]] = []
        prefix.parent.mkdir(parents=True, exist_ok=True)

    def create(self, suffix: str) -> IO[bytes]:
        final = with_suffix(self._prefix, suffix)
        temporary = final.with_name(f".{final.name}.{os.getpid()}.tmp")
        self._stack.callback(temporary.unlink, missing_ok=True)
        self._finished.append((temporary, final))
        return self._stack.enter_context(temporary.open("w+b"))

    def publish(self) -> None:
        """Rename in the order of creation, the index being the last; until then there is no data set."""
        with_suffix(self._prefix, ".idx").unlink(missing_ok=True)
        for temporary, final in self._finished:
            temporary.rename(final)
        fd = os.open(self._prefix.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def build(
    paths: Sequence[str | os.PathLike[str]],
    out_prefix: str | os.PathLike[str],
    tokenizer: Literal["bytes", "bpe"] = "bytes",
    vocab_size: int | None = None,
    progress: Progress | None = None,
    exclude: Sequence[str] = (),
) -> BuildResult:
    """Write ``<out_prefix>.bin``, ``.idx``, ``.json`` (and ``.tokenizer.json``) from text files and folders.

    ``vocab_size`` is for bpe only; ``exclude`` names folders that are passed over, at any depth. Raises
    DatasetError where a path is missing, nothing is readable or the output cannot be written; single
    damaged files are left out and reported.
    """
    prefix = Path(out_prefix)
    sources = _Sources(paths, exclude)
    model = _tokenizer(tokenizer, vocab_size, sources)
    try:
        with ExitStack() as stack:
            return _build(sources, prefix, tokenizer, model, progress, stack)
    except OSError as error:
        raise DatasetError(
            f"the data set {prefix} could not be written: {error.strerror} "
            f"({error.filename or prefix.parent}); free space there, or choose another output"
        ) from error


def _build(
    sources: _Sources,
    prefix: Path,
    name: str,
    model: Tokenizer,
    progress: Progress | None,
    stack: ExitStack,
) -> BuildResult:
    code = 8 if model.vocab_size <= 1 << 16 else 4
    output = _Output(prefix, stack)
    bin_ = output.create(".bin")
    spool = stack.enter_context(tempfile.TemporaryFile(dir=prefix.parent))  # noqa: SIM115
    documents, tokens, digest = _write_tokens(sources, model, DTYPE_CODES[code], bin_, spool, progress)
    if documents == 0:
        raise DatasetError(
            "there is no readable text in the given paths"
            + "".join(f"; {count} files are {reason}" for reason, count in sources.by_reason.items())
            + "; give files or folders of UTF-8 text"
        )
    _sync(bin_)
    if isinstance(model, BpeTokenizer):
        _write_whole(output.create(".tokenizer.json"), model.to_json().encode())
    sidecar_file, idx = output.create(".json"), output.create(".idx")
    _write_index(idx, code, documents, spool)
    _sync(idx)
    sidecar = Sidecar(
        documents=documents,
        tokens=tokens,
        vocab_size=model.vocab_size,
        end_of_document=model.end_of_document,
        tokenizer=name,
        dtype=DTYPE_CODES[code].name,
        bin_sha256=digest,
        idx_sha256=file_sha256(Path(idx.name)),
    )
    _write_whole(sidecar_file, msgspec.json.format(msgspec.json.encode(sidecar), indent=2) + b"\n")
    output.publish()
    return BuildResult(
        documents, tokens, model.vocab_size, digest, tuple(sources.named), dict(sources.by_reason)
    )


def _tokenizer(name: str, vocab_size: int | None, sources: _Sources) -> Tokenizer:
    if name == "bytes":
        if vocab_size not in (None, ByteTokenizer.vocab_size):
            raise DatasetError(
                f"the bytes tokenizer has {ByteTokenizer.vocab_size} tokens, not {vocab_size}: "
                "leave the vocabulary size out, or choose bpe"
            )
        return ByteTokenizer()
    assert name == "bpe", name
    wanted = BPE_VOCAB_SIZE if vocab_size is None else vocab_size
    if wanted < ByteTokenizer.vocab_size:
        raise DatasetError(
            f"a byte-level bpe vocabulary has at least {ByteTokenizer.vocab_size} tokens, not {wanted}: "
            "ask for more, or choose bytes"
        )
    return BpeTokenizer(_training_texts(sources), wanted)


def _training_texts(sources: _Sources) -> Iterator[str]:
    left = BPE_TRAINING_LIMIT_BYTES
    for path in sources.files():
        for text in _texts(_chunks(path)):
            yield text
            left -= len(text.encode())
            if left <= 0:
                return


def _write_tokens(
    sources: _Sources,
    model: Tokenizer,
    dtype: np.dtype[Any],
    bin_: IO[bytes],
    spool: IO[bytes],
    progress: Progress | None,
) -> tuple[int, int, str]:
    """(documents, tokens, SHA-256 of ``bin_``); the length of each document (i32) goes to ``spool``."""
    documents = tokens = 0
    digest = hashlib.sha256()
    end = np.array([model.end_of_document])
    for path in sources.files():
        length = 0
        for ids in itertools.chain(model.encode(_chunks(path)), (end,)):
            data = ids.astype(dtype).tobytes()
            bin_.write(data)
            digest.update(data)
            length += len(ids)
        spool.write(np.int32(length).tobytes())
        documents, tokens = documents + 1, tokens + length
        if progress is not None:
            progress(documents, tokens)
    return documents, tokens, digest.hexdigest()


def _write_index(idx: IO[bytes], code: int, documents: int, spool: IO[bytes]) -> None:
    """The whole ``.idx``: one sequence a document; the lengths are read back from ``spool``."""
    idx.write(HEADER.pack(MAGIC, VERSION, code, documents, documents + 1))
    for lengths in _rows(spool):
        idx.write(lengths.tobytes())
    offset = 0
    for lengths in _rows(spool):
        ends = offset + np.cumsum(lengths.astype(np.int64)) * DTYPE_CODES[code].itemsize
        idx.write(np.concatenate(([offset], ends[:-1])).astype(np.int64).tobytes())
        offset = int(ends[-1])
    for first in range(0, documents + 1, TABLE_CHUNK_ROWS):
        idx.write(np.arange(first, min(first + TABLE_CHUNK_ROWS, documents + 1), dtype=np.int64).tobytes())


def _rows(spool: IO[bytes]) -> Iterator[NDArray[np.int32]]:
    spool.seek(0)
    while data := spool.read(4 * TABLE_CHUNK_ROWS):
        yield np.frombuffer(data, np.int32)


def _defect(path: Path) -> str | None:
    """Why a file is left out, or None where all of it is text."""
    if not path.is_file():
        return "not a regular file"
    decoder = codecs.getincrementaldecoder("utf-8")()
    size = 0
    try:
        for chunk in _chunks(path):
            decoder.decode(chunk)
            size += len(chunk)
        decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        return "not UTF-8"
    except OSError as error:
        return f"unreadable ({error.strerror})"
    if size == 0:
        return "empty"
    return "longer than 2 GiB" if size > DOCUMENT_LIMIT_BYTES else None


def _chunks(path: Path) -> Iterator[bytes]:
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(CHUNK_BYTES):
            yield chunk


def _texts(chunks: Iterable[bytes]) -> Iterator[str]:
    """The same text in pieces that end after a line where there is one, so that few words are cut."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    rest = ""
    for chunk in chunks:
        head, newline, rest_of_chunk = decoder.decode(chunk).rpartition("\n")
        if newline:
            yield rest + head + newline
            rest = rest_of_chunk
        else:
            rest += rest_of_chunk
            if len(rest) >= CHUNK_BYTES:
                yield rest
                rest = ""
    if rest := rest + decoder.decode(b"", final=True):
        yield rest


def _write_whole(file: IO[bytes], data: bytes) -> None:
    file.write(data)
    _sync(file)


def _sync(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())
