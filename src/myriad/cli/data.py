"""``myriad data build``: token datasets from text."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from myriad.cli.options import Json

PROGRESS_S = 1.0  # between two lines of progress


class Tokenizer(StrEnum):
    BYTES = "bytes"
    BPE = "bpe"


Paths = Annotated[
    list[Path], typer.Argument(metavar="PATH...", help="Text files, or folders of them.", show_default=False)
]
Out = Annotated[
    Path,
    typer.Option(
        "--out", metavar="PREFIX", help="Where to write PREFIX.bin, .idx and .json.", show_default=False
    ),
]
Kind = Annotated[
    Tokenizer, typer.Option("--tokenizer", help="bytes: a token is a byte; bpe: trained on the text itself.")
]
VocabSize = Annotated[
    int | None,
    typer.Option("--vocab-size", metavar="N", min=1, help="Tokens of a bpe vocabulary.", show_default=False),
]


def group() -> typer.Typer:
    app = typer.Typer(help="Token datasets.", rich_markup_mode=None)
    app.callback()(_group)
    app.command("build")(build)
    return app


def _group() -> None:
    """Token datasets."""


def build(
    paths: Paths,
    out: Out,
    tokenizer: Kind = Tokenizer.BYTES,
    vocab_size: VocabSize = None,
    json: Json = False,
) -> None:
    """Build a dataset from text; each file is one document."""
    import dataclasses

    from myriad.cli.output import document, say, talk
    from myriad.storage.datasets.builder import build as build_dataset

    result = build_dataset(paths, out, tokenizer.value, vocab_size, progress=_progress())
    for reason, count in result.skipped_by_reason.items():
        talk(f"left out: {count} files that are {reason}")
    if json:
        document({"prefix": str(out), **dataclasses.asdict(result)})
    else:
        say(
            f"{out}: {result.documents:,} documents, {result.tokens:,} tokens, a vocabulary of "
            f"{result.vocab_size:,}, sha256 {result.sha256[:16]}"
        )


def _progress() -> Any:
    """Tells documents and tokens, at most once in PROGRESS_S."""
    import time

    from myriad.cli.output import talk

    told = time.monotonic()

    def tell(documents: int, tokens: int) -> None:
        nonlocal told
        if time.monotonic() - told >= PROGRESS_S:
            told = time.monotonic()
            talk(f"{documents:,} documents, {tokens:,} tokens")

    return tell
