"""A worker process of ``data build``: pieces of input on stdin, their parts in the folder, word of it on stdout.

One JSON document a line in both directions. The process ends at the end of its stdin, whatever it is doing:
a builder that was killed leaves no workers behind.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
import traceback
from pathlib import Path

import msgspec

from myriad.storage.datasets.index import DatasetError
from myriad.storage.datasets.parts import PartFolder, Recipe, write_part
from myriad.storage.datasets.sources import Piece
from myriad.storage.datasets.tokenizers import ByteTokenizer, ModelTokenizer, Tokenizer

WORDS_FD = 1  # a pipe to the builder


class Setup(msgspec.Struct, frozen=True):
    """The first line: ``tokenizer`` is the path of a tokenizer.json, or None for bytes."""

    prefix: str
    recipe: Recipe
    tokenizer: str | None


class Told(msgspec.Struct, frozen=True, tag=True):
    """How far the piece at hand has come."""

    read: int
    documents: int
    tokens: int


class Done(msgspec.Struct, frozen=True, tag=True):
    """The part is whole."""


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The sentence for the user."""

    sentence: str


class Failed(msgspec.Struct, frozen=True, tag=True):
    """A bug: its traceback."""

    traceback: str


Word = Told | Done | Refused | Failed


def main() -> None:
    lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    setup = msgspec.json.decode(sys.stdin.buffer.readline(), type=Setup)
    threading.Thread(target=_listen, args=(lines,), daemon=True).start()
    folder = PartFolder(Path(setup.prefix))
    try:
        tokenizer = load(setup)
        while True:
            piece = msgspec.json.decode(lines.get(), type=Piece)
            write_part(piece, setup.recipe, tokenizer, folder, lambda *counts: _say(Told(*counts)))
            _say(Done())
    except DatasetError as error:
        _say(Refused(str(error)))
    except OSError as error:
        _say(Refused(unwritable(Path(setup.prefix), error)))
    except Exception:  # noqa: BLE001 (the parent raises it)
        _say(Failed(traceback.format_exc()))


def load(setup: Setup) -> Tokenizer:
    if setup.tokenizer is None:
        return ByteTokenizer()
    facts = setup.recipe.tokenizer
    json = Path(setup.tokenizer).read_text(encoding="utf-8")
    return ModelTokenizer(facts.kind, json, facts.end_of_document)


def unwritable(prefix: Path, error: OSError) -> str:
    return (
        f"the data set {prefix} could not be written: {error.strerror} ({error.filename or prefix.parent}); "
        "free space there and run the same command again, or choose another output"
    )


def _listen(lines: queue.SimpleQueue[bytes]) -> None:
    for line in sys.stdin.buffer:
        lines.put(line)
    os._exit(0)


def _say(word: Word) -> None:
    try:
        os.write(WORDS_FD, msgspec.json.encode(word) + b"\n")
    except BrokenPipeError:
        os._exit(0)


if __name__ == "__main__":
    main()
