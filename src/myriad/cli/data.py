"""``myriad data``: token datasets from text, what they have, and whether they are still what was built."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from myriad.cli.options import Json

if TYPE_CHECKING:
    from myriad.storage.datasets.builder import Progress
    from myriad.storage.datasets.index import Sidecar
    from myriad.storage.datasets.packing import Packing

PROGRESS_S = 1.0  # between two lines of progress

Paths = Annotated[
    list[Path],
    typer.Argument(
        metavar="PATH...",
        help="Files of text, .jsonl (also .gz or .zst) or .parquet, or folders of them.",
        show_default=False,
    ),
]
Out = Annotated[
    Path,
    typer.Option(
        "--out", metavar="PREFIX", help="Where to write PREFIX.bin, .idx and .json.", show_default=False
    ),
]
Kind = Annotated[
    str,
    typer.Option(
        "--tokenizer",
        metavar="bytes|bpe|FILE",
        help="bytes: a token is a byte; bpe: trained on the text itself; or a tokenizer.json of Hugging Face.",
    ),
]
End = Annotated[
    str | None,
    typer.Option(
        "--end-of-document",
        metavar="TOKEN",
        help="The token of the tokenizer file that ends a document; needed if it has no usual one.",
        show_default=False,
    ),
]
TextKey = Annotated[
    str, typer.Option("--text-key", metavar="KEY", help="Where a JSONL line or Parquet row has its text.")
]
Share = Annotated[
    float,
    typer.Option(
        "--validation",
        metavar="SHARE",
        min=0.0,
        max=0.5,
        help="The share of documents, chosen by their content's hash, that becomes PREFIX.validation.",
    ),
]
Workers = Annotated[
    int | None,
    typer.Option(
        "--workers", metavar="N", min=1, help="Processes; all CPUs if left out.", show_default=False
    ),
]
Strict = Annotated[
    bool, typer.Option("--strict", help="Refuse the first damaged document instead of leaving it out.")
]
Pack = Annotated[
    int | None,
    typer.Option(
        "--pack",
        metavar="LENGTH",
        min=1,
        help="Also pack whole documents into sequences of LENGTH tokens, for jobs with data.packing: documents.",
        show_default=False,
    ),
]
Prefix = Annotated[
    str,
    typer.Argument(
        metavar="PREFIX",
        help="As given to build, without .bin or .idx; or the URL it was copied to.",
        show_default=False,
    ),
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
    tokenizer: Kind = "bytes",
    vocab_size: VocabSize = None,
    end_of_document: End = None,
    text_key: TextKey = "text",
    validation: Share = 0.0,
    workers: Workers = None,
    strict: Strict = False,
    pack: Pack = None,
    json: Json = False,
) -> None:
    """Build a dataset from text, JSONL and Parquet.

    A text file, a line of JSONL or a row of Parquet is one document. Damaged ones are left out and told by file
    and line. A build that was killed is finished by the same command, which keeps what is done.
    """
    import os

    import msgspec

    from myriad.cli.output import document, say, talk
    from myriad.storage.datasets.builder import build as build_dataset

    with _progress() as progress:
        result = build_dataset(
            paths,
            out,
            tokenizer,
            vocab_size,
            progress,
            text_key=text_key,
            end_of_document=end_of_document,
            validation=validation,
            workers=workers or len(os.sched_getaffinity(0)),
            strict=strict,
            pack=pack,
        )
    for each in result.left_out:
        talk(f"left out: {each}")
    for reason, count in result.left_out_by_reason.items():
        talk(f"left out in all: {count:,} ({reason})")
    if json:
        document(msgspec.to_builtins(result))
        return
    for output in result.outputs:
        say(
            f"{output.prefix}: {output.documents:,} documents, {output.tokens:,} tokens, a vocabulary of "
            f"{result.vocab_size:,}, sha256 {output.sha256[:16]}"
        )
        if output.packing is not None:
            say(f"  {_packing(output.packing)}")


def show(prefix: Prefix, json: Json = False) -> None:
    """Say what a dataset has: documents, tokens, vocabulary, sizes. Reads no tokens."""
    from myriad.cli.output import document, say
    from myriad.spec.units import format_bytes
    from myriad.storage.datasets.index import open_index, read_sidecar

    index, sidecar = open_index(prefix), read_sidecar(prefix)
    facts: dict[str, Any] = {
        "prefix": prefix,
        "documents": index.documents,
        "sequences": index.sequences,
        "tokens": index.tokens,
        "dtype": index.dtype.name,
        "bytes": index.tokens * index.dtype.itemsize,
        "vocab_size": None if sidecar is None else sidecar.vocab_size,
        "tokenizer": None if sidecar is None else sidecar.tokenizer,
        "sha256": None if sidecar is None else sidecar.bin_sha256,
        "tokenizer_sha256": None if sidecar is None else sidecar.tokenizer_sha256,
        "sources": {} if sidecar is None else sidecar.sources,
        "source_bytes": None if sidecar is None else sidecar.source_bytes,
        "left_out": {} if sidecar is None else sidecar.left_out,
        "side": None if sidecar is None else sidecar.side,
        "validation": None if sidecar is None else sidecar.validation,
        "packing": None if sidecar is None or sidecar.packing is None else _packing_facts(sidecar.packing),
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
    if sidecar is not None:
        for line in _facts(sidecar):
            say(f"  {line}")


def verify(prefix: Prefix, json: Json = False) -> None:
    """Read all of a dataset and compare it with the hashes it was built with. About 1 s a GB."""
    from myriad.cli.output import document, say
    from myriad.storage.datasets.index import verify as verify_dataset

    sidecar = verify_dataset(prefix)
    if json:
        document({"prefix": prefix, "tokens": sidecar.tokens, "sha256": sidecar.bin_sha256})
    else:
        say(f"{prefix}: as built, {sidecar.documents:,} documents, {sidecar.tokens:,} tokens")


def _packing_facts(packing: Packing) -> dict[str, Any]:
    import msgspec

    return {**msgspec.to_builtins(packing), "efficiency": packing.efficiency}


def _packing(packing: Packing) -> str:
    return (
        f"packed for {packing.sequence_length:,} tokens: {packing.sequences:,} sequences, {packing.efficiency:.2%} full, "
        f"{packing.padding:,} tokens of padding, {packing.cut:,} longer documents cut"
    )


def _facts(sidecar: Sidecar) -> Iterator[str]:
    """What is known beside counts: where the text is from, what of it is missing, tokenizer and split."""
    from myriad.spec.units import format_bytes

    if sidecar.sources:
        kinds = ", ".join(f"{count:,} of {kind}" for kind, count in sidecar.sources.items())
        yield f"from files: {kinds} ({format_bytes(sidecar.source_bytes)})"
    for reason, count in sidecar.left_out.items():
        yield f"left out: {count:,} ({reason})"
    if sidecar.tokenizer_sha256 is not None:
        yield f"tokenizer file: sha256 {sidecar.tokenizer_sha256[:16]}"
    if sidecar.packing is not None:
        yield _packing(sidecar.packing)
    if sidecar.side is not None:
        yield f"the {sidecar.side} side of a validation share of {sidecar.validation:g}"


@contextmanager
def _progress() -> Iterator[Callable[[Progress], None]]:
    """A bar on a terminal, else a line with documents and tokens, at most one in PROGRESS_S."""
    import sys
    import time

    from myriad.cli.output import talk

    if sys.stderr.isatty():
        with _bar() as told:
            yield told
        return
    last = time.monotonic()

    def tell(progress: Progress) -> None:
        nonlocal last
        if time.monotonic() - last >= PROGRESS_S:
            last = time.monotonic()
            talk(f"{progress.documents:,} documents, {progress.tokens:,} tokens")

    yield tell


@contextmanager
def _bar() -> Iterator[Callable[[Progress], None]]:
    """The share of input bytes read, which is shown until the parts are joined."""
    from rich import progress as bars
    from rich.console import Console

    columns = (
        bars.BarColumn(),
        bars.TaskProgressColumn(),
        bars.TextColumn("{task.description}"),
        bars.TimeRemainingColumn(),
    )
    with bars.Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("reading", total=None)

        def tell(progress: Progress) -> None:
            words = f"{progress.documents:,} documents, {progress.tokens:,} tokens"
            bar.update(task, total=progress.total_bytes, completed=progress.read_bytes, description=words)

        yield tell
