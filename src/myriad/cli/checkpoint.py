"""``myriad checkpoint``: what is in a checkpoint directory, and whether it is still what was written."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from myriad.cli.options import Json

if TYPE_CHECKING:
    from myriad.storage.durable.manifest import Checkpoint, Manifest

Directory = Annotated[
    Path,
    typer.Argument(
        metavar="DIR", help="A checkpoint directory: checkpoint.directory of the job.", show_default=False
    ),
]


def group() -> typer.Typer:
    app = typer.Typer(help="Durable checkpoints.", rich_markup_mode=None)
    app.callback()(_group)
    app.command("ls")(ls)
    app.command("verify")(verify)
    return app


def _group() -> None:
    """Durable checkpoints."""


def ls(directory: Directory, json: Json = False) -> None:
    """List the checkpoints of a directory, newest first.

    One that is not committed was never confirmed by the controller: a job does not restart from it.
    """
    from myriad.cli.output import document, table

    rows = [_described(each) for each in _found(directory)]
    if json:
        document(rows)
        return
    heads = ("step", "generation", "committed", "ranks", "position", "files", "size")
    table(heads, [[_cell(head, row) for head in heads] for row in rows])


def verify(directory: Directory, json: Json = False) -> None:
    """Read all files of all checkpoints of a directory and compare them with their checksums.

    About 1 s a GB. Exits with 1 when a checkpoint that bears the mark of a commit is damaged.
    """
    from myriad.cli.errors import Exit
    from myriad.cli.output import document, say
    from myriad.storage.durable.manifest import MARKER_NAME, damage

    found = [(each, damage(each.path)) for each in _found(directory)]
    if json:
        document([{**_described(each), "damage": list(damages)} for each, damages in found])
    else:
        for each, damages in found:
            state = "committed" if each.committed else "not committed"
            say(f"{each.path.name} ({state}): {'; '.join(damages) or 'as written'}")
    # The marker names its manifest, so a damaged manifest makes a checkpoint look uncommitted.
    if any(damages and (each.path / MARKER_NAME).exists() for each, damages in found):
        raise typer.Exit(Exit.FAILED)


def _found(directory: Path) -> tuple[Checkpoint, ...]:
    """The checkpoints there; CommandError where there are none, or none can be listed."""
    from myriad.cli.errors import CommandError, Exit
    from myriad.storage.durable.manifest import CheckpointError, list_checkpoints

    if not directory.exists():
        raise CommandError(f"there is no directory {directory}", Exit.NOT_FOUND)
    try:
        found = list_checkpoints(directory)
    except CheckpointError as error:
        raise CommandError(str(error)) from None
    if not found:
        raise CommandError(
            f"{directory} has no checkpoints; give the directory in which step-N.gen-G lie", Exit.NOT_FOUND
        )
    return found


def _described(checkpoint: Checkpoint) -> dict[str, Any]:
    manifest = _manifest(checkpoint)
    return {
        "path": str(checkpoint.path),
        "step": checkpoint.step,
        "generation": checkpoint.generation,
        "committed": checkpoint.committed,
        "ranks": None if manifest is None else manifest.world_size,
        "position": None if manifest is None else manifest.position,
        "files": None if manifest is None else len(manifest.files),
        "size": None if manifest is None else sum(file.size for file in manifest.files),
        "layout": None if manifest is None else manifest.layout,
        "versions": None if manifest is None else manifest.versions,
    }


def _manifest(checkpoint: Checkpoint) -> Manifest | None:
    """None for one that is still being written, or damaged."""
    from myriad.storage.durable.manifest import CheckpointError, read_manifest

    try:
        return read_manifest(checkpoint.path)
    except CheckpointError:
        return None


def _cell(head: str, row: dict[str, Any]) -> object:
    from myriad.spec.units import format_bytes

    value = row[head]
    if head == "committed":
        return "yes" if value else "no"
    return format_bytes(value) if head == "size" and value is not None else value
