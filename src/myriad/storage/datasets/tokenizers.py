"""From the bytes of a document to token ids: ``bytes``, ``bpe`` trained on the text itself, or a given file.

``bytes``: a token is a byte; 256 is the end of a document, so the vocabulary has 257 entries and the model
pads its own table where a layout needs that. ``bpe``: byte-level BPE trained on the first 64 MiB of the
same text. A file: a Hugging Face ``tokenizer.json``, of which neither truncation, padding nor added
beginnings are used. What looks like a special token inside a text is encoded as text: no document can
end another.

Method: a document up to 1 MiB is encoded whole; a longer one in pieces that end at a line where there is
one. Trade-off: tokens that would cross such an end are cut, at most one a MiB. Figures: :mod:`builder`.
"""

from __future__ import annotations

import codecs
import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from myriad.storage.datasets.documents import CHUNK_BYTES
from myriad.storage.datasets.index import DatasetError

BPE_TRAINING_LIMIT_BYTES = 64 << 20  # text beyond this moves the merges of a small vocabulary little
BPE_VOCAB_SIZE = 8192
BPE_END_OF_DOCUMENT = "<|end_of_document|>"
# What published tokenizers call the end of a document, the more specific first.
ENDS_OF_DOCUMENT = (
    *(BPE_END_OF_DOCUMENT, "<|endoftext|>", "<|end_of_text|>", "<|eos|>", "<eos>", "</s>", "[EOS]"),
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
)


class TokenizerFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What the data set says of its tokenizer; ``sha256`` is that of ``<prefix>.tokenizer.json``, if any."""

    kind: str  # "bytes", "bpe" or "file"
    vocab_size: int  # every id is below it
    end_of_document: int
    sha256: str | None


class Tokenizer(Protocol):
    @property
    def facts(self) -> TokenizerFacts: ...

    @property
    def json(self) -> str | None:
        """The text of the tokenizer's file, or None for bytes."""

    def encode(self, chunks: Iterable[bytes]) -> Iterator[NDArray[Any]]:
        """Token ids of one document given as UTF-8 pieces, piece by piece."""


class ByteTokenizer:
    facts = TokenizerFacts(kind="bytes", vocab_size=257, end_of_document=256, sha256=None)
    json = None

    def encode(self, chunks: Iterable[bytes]) -> Iterator[NDArray[Any]]:
        for chunk in chunks:
            for at in range(0, len(chunk), CHUNK_BYTES):
                yield np.frombuffer(chunk, np.uint8, min(CHUNK_BYTES, len(chunk) - at), at)


class ModelTokenizer:
    """A ``tokenizer.json`` in the hands of the package ``tokenizers``. Raises DatasetError.

    ``end_of_document`` is a token, its id, or None for the first of ``ENDS_OF_DOCUMENT`` that is there.
    """

    def __init__(self, kind: str, json: str, end_of_document: str | int | None) -> None:
        library = _library()
        self.json = json
        try:
            self._model = library.Tokenizer.from_str(json)
        except Exception as error:  # noqa: BLE001 (the package raises nothing narrower)
            raise DatasetError(
                f"the tokenizer file is no tokenizer.json of Hugging Face ({error}); give one, or choose bytes or bpe"
            ) from None
        self._model.no_truncation()
        self._model.no_padding()
        self._model.encode_special_tokens = True
        self.facts = TokenizerFacts(
            kind=kind,
            vocab_size=max(self._model.get_vocab().values(), default=-1) + 1,
            end_of_document=(
                end_of_document if isinstance(end_of_document, int) else self._end(end_of_document)
            ),
            sha256=hashlib.sha256(json.encode()).hexdigest(),
        )

    def encode(self, chunks: Iterable[bytes]) -> Iterator[NDArray[Any]]:
        for text in texts(chunks):
            yield np.array(self._model.encode(text, add_special_tokens=False).ids, dtype=np.int32)

    def _end(self, wanted: str | None) -> int:
        for token in ENDS_OF_DOCUMENT if wanted is None else (wanted,):
            if (found := self._model.token_to_id(token)) is not None:
                return int(found)
        missing = (
            f"the tokenizer has no token {wanted!r}; name"
            if wanted is not None
            else f"the tokenizer has none of the known ends of a document ({' '.join(ENDS_OF_DOCUMENT[1:-1])}); name"
        )
        raise DatasetError(f"{missing} one of its own with --end-of-document")


def choose(
    name: str, vocab_size: int | None, end_of_document: str | None, training: Iterator[Iterable[bytes]]
) -> Tokenizer:
    """``bytes``, ``bpe`` (trained on documents of ``training``) or the path of a file. Raises DatasetError."""
    if name in ("bytes", "bpe") and end_of_document is not None:
        raise DatasetError(f"the {name} tokenizer has its own end of a document: leave --end-of-document out")
    if name == "bytes":
        has = ByteTokenizer.facts.vocab_size
        if vocab_size not in (None, has):
            raise DatasetError(
                f"the bytes tokenizer has {has} tokens, not {vocab_size}: "
                "leave the vocabulary size out, or choose bpe"
            )
        return ByteTokenizer()
    if name == "bpe":
        return _trained(training, BPE_VOCAB_SIZE if vocab_size is None else vocab_size)
    if vocab_size is not None:
        raise DatasetError("a tokenizer file has its own vocabulary: leave the vocabulary size out")
    try:
        json = Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise DatasetError(
            f"the tokenizer {name} cannot be read ({reason}); give bytes, bpe or the path of a tokenizer.json"
        ) from None
    return ModelTokenizer("file", json, end_of_document)


def texts(chunks: Iterable[bytes]) -> Iterator[str]:
    """The same text in pieces of about a chunk that end after a line where there is one."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    held = ""
    for chunk in chunks:
        for at in range(0, len(chunk), CHUNK_BYTES):
            if len(held) >= CHUNK_BYTES // 2:  # what a cut has left behind is joined to what follows
                end = held.rfind("\n") + 1 or len(held)
                yield held[:end]
                held = held[end:]
            held += decoder.decode(chunk[at : at + CHUNK_BYTES])
    if held := held + decoder.decode(b"", final=True):
        yield held


def _trained(training: Iterator[Iterable[bytes]], vocab_size: int) -> ModelTokenizer:
    least = ByteTokenizer.facts.vocab_size
    if vocab_size < least:
        raise DatasetError(
            f"a byte-level bpe vocabulary has at least {least} tokens, not {vocab_size}: "
            "ask for more, or choose bytes"
        )
    library = _library()
    model = library.Tokenizer(library.models.BPE())
    model.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BPE_END_OF_DOCUMENT],
        initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    model.train_from_iterator(_up_to_limit(training), trainer)
    return ModelTokenizer("bpe", str(model.to_str()), BPE_END_OF_DOCUMENT)


def _up_to_limit(training: Iterator[Iterable[bytes]]) -> Iterator[str]:
    left = BPE_TRAINING_LIMIT_BYTES
    for document in training:
        for text in texts(document):
            yield text
            left -= len(text.encode())
            if left <= 0:
                return


def _library() -> Any:
    try:
        import tokenizers
    except ImportError:
        raise DatasetError(
            "this tokenizer needs the package tokenizers: install myriad-cluster[data], "
            "or choose the bytes tokenizer"
        ) from None
    return tokenizers
