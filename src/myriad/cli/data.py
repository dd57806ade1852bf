"""``myriad data``: token datasets from text, what they have, and whether they are still what was built."""

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
Prefix = Annotated[
    Path,
    typer.Argument(metavar="PREFIX", help="As given to build, without .bin or .idx.", show_default=False),
]
VocabSize = Annotated[
    int | None,
    typer.Option("--vocab-size", metavar="N", min=1, help="Tokens of a bpe vocabulary.", show_default=False),
]


def group() -> typer.Typer:
    app = typer.Typer(help="Token datasets.", rich_markup_mode=None)
    app.callback()(_group)
    app.command("build")(build)
    app.command("show")(show)
    app.command("verify")(verify)
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


def show(prefix: Prefix, json: Json = False) -> None:
    """Say what a dataset has: documents, tokens, vocabulary, sizes. Reads no tokens."""
    from myriad.cli.output import document, say
    from myriad.spec.units import format_bytes
    from myriad.storage.datasets.index import open_index, read_sidecar

    index, sidecar = open_index(prefix), read_sidecar(prefix)
    facts: dict[str, Any] = {
        "prefix": str(prefix),
        "documents": index.documents,
        "sequences": index.sequences,
        "tokens": index.tokens,
        "dtype": index.dtype.name,
        "bytes": index.tokens * index.dtype.itemsize,
        "vocab_size": None if sidecar is None else sidecar.vocab_size,
        "tokenizer": None if sidecar is None else sidecar.tokenizer,
        "sha256": None if sidecar is None else sidecar.bin_sha256,
    }
    if json:
        document(facts)
        return
    made = "made elsewhere: no counts, vocabulary or hashes beside it"
    if sidecar is not None:
        made = f"tokenizer {sidecar.tokenizer}, a vocabulary of {sidecar.vocab_size:,}, sha256 {sidecar.bin_sha256[:16]}"
    size = format_bytes(facts["bytes"])
    say(
        f"{prefix}: {index.documents:,} documents, {index.tokens:,} tokens of {index.dtype.name} ({size}); {made}"
    )


def verify(prefix: Prefix, json: Json = False) -> None:
    """Read all of a dataset and compare it with the hashes it was built with. About 1 s a GB."""
    from myriad.cli.output import document, say
    from myriad.storage.datasets.index import verify as verify_dataset

    sidecar = verify_dataset(prefix)
    if json:
        document({"prefix": str(prefix), "tokens": sidecar.tokens, "sha256": sidecar.bin_sha256})
    else:
        say(f"{prefix}: as built, {sidecar.documents:,} documents, {sidecar.tokens:,} tokens")


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
