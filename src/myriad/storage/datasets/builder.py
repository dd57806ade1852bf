"""Build a token data set from text, JSONL and Parquet, in parallel and so that it can be restarted.

Method: the input is cut into pieces (:mod:`sources`), each becomes a part on disk (:mod:`parts`), made in
this process or, with more than one worker, in processes of their own (:mod:`pool`); the parts are joined in
the order of the input. Neither the cut nor the workers shape a token, so the files are the same byte for
byte however they were made. Ids are uint16 where they fit, else int32. A document's side of the split
depends on its content alone: the same text is never on both sides, in whatever build.

Files appear under their names only when whole and synced, the indices last. A build that is killed leaves
its parts in ``<prefix>.parts``, where the same command finds them.

Measured with Python sources: 200 MB by bytes 84 MB per CPU second with 1 worker and 70 with 2, 69 MiB of
memory in the largest process; 24 MB by bpe, training included, 1.2 and 1.0, 290 MiB. On two cores shared
with a load of 7 two workers were no faster than one (31 MB/s by bytes).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from myriad.storage.datasets import pool
from myriad.storage.datasets.documents import Document, Meter, read
from myriad.storage.datasets.index import DatasetError
from myriad.storage.datasets.joined import Account, Output, publish
from myriad.storage.datasets.parts import (
    NAMED_LIMIT,
    Part,
    PartFolder,
    Recipe,
    name_of,
    write_part,
)
from myriad.storage.datasets.sources import Piece, Span, cut, scan
from myriad.storage.datasets.tokenizers import Tokenizer, choose
from myriad.storage.datasets.worker import Setup, Told, unwritable


@dataclass(frozen=True)
class Progress:
    """How far the reading is; parts kept from an earlier run count as read."""

    read_bytes: int
    total_bytes: int
    documents: int
    tokens: int


@dataclass(frozen=True)
class BuildResult:
    """What was built and what was left out; of that, the first NAMED_LIMIT as ``file:line: reason``."""

    outputs: tuple[Output, ...]  # the training side, and the validation side if there is one
    vocab_size: int
    left_out: tuple[str, ...]
    left_out_by_reason: dict[str, int]


class _BadInput(DatasetError):
    """Nothing can be built from this input, so nothing of it is kept."""


def build(
    paths: Sequence[str | os.PathLike[str]],
    out_prefix: str | os.PathLike[str],
    tokenizer: str = "bytes",
    vocab_size: int | None = None,
    progress: Callable[[Progress], None] | None = None,
    *,
    text_key: str = "text",
    end_of_document: str | None = None,
    validation: float = 0.0,
    workers: int = 1,
    strict: bool = False,
    pack: int | None = None,
) -> BuildResult:
    """Write ``<out_prefix>.bin``, ``.idx``, ``.json`` (and ``.tokenizer.json``) from files and folders.

    ``tokenizer`` is bytes, bpe or the path of a tokenizer.json; ``vocab_size`` is for bpe only. With a
    ``validation`` share the documents of that side become ``<out_prefix>.validation``. Damaged documents are
    left out and reported, or with ``strict`` the first one is refused. ``pack`` adds ``<out_prefix>.pack``: whole
    documents packed into sequences of so many tokens. Raises DatasetError.
    """
    assert workers >= 1 and 0 <= validation < 1 and (pack is None or pack > 0), (workers, validation, pack)
    prefix = Path(out_prefix)
    files = scan(paths)
    model = choose(tokenizer, vocab_size, end_of_document, _training(files, text_key))
    recipe = Recipe(tokenizer=model.facts, text_key=text_key, validation=validation)
    folder = PartFolder(prefix)
    try:
        with folder.locked():
            try:
                pieces = cut(files)
                _Maker(prefix, recipe, model, folder, progress).make(pieces, workers, strict)
                account = _account(pieces, recipe, folder, strict)
                outputs = publish(prefix, files, recipe, model.json, folder, account, pack)
                named, reasons = tuple(account.named), dict(account.by_reason)
                return BuildResult(outputs, recipe.tokenizer.vocab_size, named, reasons)
            except _BadInput:
                folder.discard()
                raise
            finally:
                folder.discard_if_no_part()
    except OSError as error:
        raise DatasetError(unwritable(prefix, error)) from error


def _training(files: Iterable[Span], text_key: str) -> Iterator[Iterable[bytes]]:
    for span in files:
        for found in read(span, text_key, Meter(lambda _: None)):
            if isinstance(found, Document):
                yield found.chunks


# ---------------------------------------------------------------- parts


class _Maker:
    """Makes the parts that are not there yet and tells of the progress."""

    def __init__(
        self,
        prefix: Path,
        recipe: Recipe,
        model: Tokenizer,
        folder: PartFolder,
        progress: Callable[[Progress], None] | None,
    ) -> None:
        self._recipe, self._model, self._folder, self._progress = recipe, model, folder, progress
        self._tokenizer_file = None if model.json is None else folder.path / "tokenizer.json"
        self._setup = Setup(
            str(prefix.absolute()), recipe, str(self._tokenizer_file) if self._tokenizer_file else None
        )
        self._counts: dict[str, tuple[int, int, int]] = {}  # by name of the part: bytes, documents, tokens
        self._total_bytes = 0

    def make(self, pieces: Sequence[Piece], workers: int, strict: bool) -> None:
        """Make all parts; with ``strict`` stop behind the first that lacks something."""
        for stale in self._folder.path.glob("*.tmp"):
            stale.unlink(missing_ok=True)
        if self._tokenizer_file is not None:
            assert self._model.json is not None
            self._tokenizer_file.write_text(self._model.json, encoding="utf-8")
        named = {name_of(piece, self._recipe): piece for piece in pieces}
        self._total_bytes = sum(map(_bytes, named.values()))
        wanted = [piece for name, piece in named.items() if self._found(name, piece) is None]
        on_word = self._hear_strictly if strict else self._hear
        if workers > 1 and len(wanted) > 1:
            pool.run(wanted, self._setup, workers, on_word)
            return
        for piece in wanted:
            write_part(piece, self._recipe, self._model, self._folder, self._teller(piece))
            if not on_word(piece, None):
                return

    def _teller(self, piece: Piece) -> Callable[[int, int, int], None]:
        return lambda *counts: self._tell(name_of(piece, self._recipe), counts)

    def _hear(self, piece: Piece, told: Told | None) -> bool:
        name = name_of(piece, self._recipe)
        if told is not None:
            self._tell(name, (told.read, told.documents, told.tokens))
        else:
            self._found(name, piece)
        return True

    def _hear_strictly(self, piece: Piece, told: Told | None) -> bool:
        self._hear(piece, told)
        part = None if told else self._folder.find(name_of(piece, self._recipe), self._recipe.dtype.itemsize)
        return part is None or not part.by_reason

    def _found(self, name: str, piece: Piece) -> Part | None:
        part = self._folder.find(name, self._recipe.dtype.itemsize)
        if part is not None:
            sides = part.sides.values()
            counts = (sum(each.documents for each in sides), sum(each.tokens for each in sides))
            self._tell(name, (_bytes(piece), *counts))
        return part

    def _tell(self, name: str, counts: tuple[int, int, int]) -> None:
        self._counts[name] = counts
        if self._progress is not None:
            read_bytes, documents, tokens = map(sum, zip(*self._counts.values(), strict=True))
            self._progress(Progress(read_bytes, self._total_bytes, documents, tokens))


def _bytes(piece: Piece) -> int:
    return sum(span.end - span.start for span in piece)


def _account(pieces: Sequence[Piece], recipe: Recipe, folder: PartFolder, strict: bool) -> Account:
    """Read all manifests in order. Raises _BadInput where nothing can be built of what they tell."""
    account = Account({side: [] for side in recipe.sides})
    before = 0  # lines of the file at hand in the spans before
    for piece in pieces:
        name = name_of(piece, recipe)
        part = folder.find(name, recipe.dtype.itemsize)
        if part is None:
            raise DatasetError(f"{folder.path} lost the part {name}; run the same command again")
        account.by_reason.update(part.by_reason)
        for number, span in enumerate(piece):
            before = 0 if span.start == 0 else before
            for report in part.named:
                if report.span == number and len(account.named) < NAMED_LIMIT:
                    line = "" if report.line is None else f":{before + report.line}"
                    account.named.append(f"{span.path}{line}: {report.reason}")
            before += part.lines[number]
        if strict and account.named:
            raise _BadInput(
                f"{account.named[0]}; mend or remove it, or leave --strict out to build without it"
            )
        for side, facts in part.sides.items():
            account.sides[side].append((name, facts))
    _refuse_empty(account, recipe)
    return account


def _refuse_empty(account: Account, recipe: Recipe) -> None:
    documents = {side: account.total(side)[0] for side in recipe.sides}
    if not any(documents.values()):
        left = ", ".join(f"{count} ({reason})" for reason, count in account.by_reason.items())
        raise _BadInput(
            f"there is no readable text in the given paths{'; left out: ' if left else ''}{left}; "
            "give files or folders of UTF-8 text, JSONL or Parquet"
        )
    for side in recipe.sides:
        if documents[side] == 0:
            raise _BadInput(
                f"of {sum(documents.values())} documents none is on the {side} side of a validation share of "
                f"{recipe.validation:g}; choose another share, or leave --validation out"
            )
