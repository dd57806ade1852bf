"""``myriad checkpoint``: what is in a checkpoint directory, whether it is still what was written, and its ways in and out."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from myriad.cli.options import Json

if TYPE_CHECKING:
    from myriad.cli.places import Place
    from myriad.storage.durable.manifest import Checkpoint, Manifest

Directory = Annotated[
    str,
    typer.Argument(
        metavar="DIR",
        help="A checkpoint directory, or s3://bucket/prefix: checkpoint.directory or checkpoint.remote of the job.",
        show_default=False,
    ),
]


class Dtype(StrEnum):
    FLOAT64 = "float64"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


Keep = Annotated[
    int,
    typer.Option("--keep", metavar="N", min=1, help="Committed checkpoints to keep.", show_default=False),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what would be removed, and remove nothing.")]
NewFolder = Annotated[
    Path, typer.Argument(metavar="OUT", help="The folder to write; it must not exist.", show_default=False)
]
Folder = Annotated[
    Path,
    typer.Argument(
        metavar="FOLDER",
        help="A Hugging Face folder: config.json and safetensors files.",
        show_default=False,
    ),
]
Into = Annotated[
    str,
    typer.Argument(
        metavar="DIR",
        help="The checkpoint directory, or s3://bucket/prefix, to write step-0.gen-0 into.",
        show_default=False,
    ),
]
AtStep = Annotated[
    int | None,
    typer.Option("--step", metavar="N", min=0, help="Not the newest checkpoint.", show_default=False),
]
AsDtype = Annotated[
    Dtype | None,
    typer.Option("--dtype", help="Convert the weights; without it they are as trained.", show_default=False),
]


def group() -> typer.Typer:
    app = typer.Typer(help="Durable checkpoints.", rich_markup_mode=None)
    app.callback()(_group)
    app.command("ls")(ls)
    app.command("verify")(verify)
    app.command("prune")(prune)
    app.command("export")(export)
    app.command("import")(import_)
    return app


def _group() -> None:
    """Durable checkpoints."""


def ls(directory: Directory, json: Json = False) -> None:
    """List the checkpoints of a directory, newest first.

    One that is not committed was never confirmed by the controller: a job does not restart from it.
    """
    from myriad.cli.output import document, table

    at = _place(directory)
    rows = [_described(at, each) for each in _found(at)]
    if json:
        document(rows)
        return
    heads = ("step", "generation", "committed", "ranks", "position", "files", "size")
    table(heads, [[_cell(head, row) for head in heads] for row in rows])


def verify(directory: Directory, json: Json = False) -> None:
    """Read all files of all checkpoints of a directory and compare them with their checksums.

    About 1 s a GB. Exits with 1 when a checkpoint that bears the mark of a commit is damaged.
    """
    from myriad.cli.errors import CommandError, Exit
    from myriad.cli.output import document, say
    from myriad.storage.durable.manifest import CheckpointError

    at = _place(directory)
    try:
        found = [(each, at.damage(each)) for each in _found(at)]
        failed = any(damages and at.has_marker(each) for each, damages in found)
    except CheckpointError as error:
        raise CommandError(str(error)) from None
    if json:
        document([{**_described(at, each), "damage": list(damages)} for each, damages in found])
    else:
        for each, damages in found:
            state = "committed" if each.committed else "not committed"
            say(f"{each.path.name} ({state}): {'; '.join(damages) or 'as written'}")
    # The marker names its manifest, so a damaged manifest makes a checkpoint look uncommitted.
    if failed:
        raise typer.Exit(Exit.FAILED)


def prune(directory: Directory, keep: Keep, dry_run: DryRun = False, json: Json = False) -> None:
    """Remove all but the newest committed checkpoints.

    What is not committed goes too where a newer one is; the newest committed one and all that is newer stay. A job
    does the same by itself, with its checkpoint.keep.
    """
    from myriad.cli.errors import CommandError
    from myriad.cli.output import document, say
    from myriad.spec.units import format_bytes
    from myriad.storage.durable.manifest import CheckpointError

    at = _place(directory)
    _found(at)
    try:
        sizes = {each.path: at.stored_bytes(each) for each in at.prunable(keep)}
        gone = at.prunable(keep) if dry_run else at.prune(keep)
    except CheckpointError as error:
        raise CommandError(str(error)) from None
    freed = sum(sizes.get(each.path, 0) for each in gone)
    if json:
        paths = [at.shown(each) for each in gone]
        document({"removed": paths, "freed_bytes": freed, "dry_run": dry_run})
        return
    for each in gone:
        state = "committed" if each.committed else "not committed"
        say(f"{each.path.name} ({state}): {format_bytes(sizes.get(each.path, 0))}")
    say(f"{'would free' if dry_run else 'freed'} {format_bytes(freed)}, {len(gone)} checkpoints")


def export(
    directory: Directory, out: NewFolder, step: AtStep = None, dtype: AsDtype = None, json: Json = False
) -> None:
    """Write the model of a committed checkpoint as a Hugging Face folder of Llama's layout.

    It holds config.json and safetensors; the optimizer's state stays behind. Only checkpoints of model: jobs.
    """
    from myriad.cli.errors import CommandError
    from myriad.cli.output import document, say
    from myriad.spec.units import format_bytes
    from myriad.storage.durable.manifest import CheckpointError

    huggingface = _huggingface()
    at = _place(directory)
    checkpoint = _committed(at, step)
    try:
        with at.local(checkpoint) as found:
            size = huggingface.export_folder(found, out, None if dtype is None else dtype.value)
    except CheckpointError as error:
        raise CommandError(str(error)) from None
    if json:
        document({"checkpoint": at.shown(checkpoint), "folder": str(out), "bytes": size})
    else:
        say(f"{out}: the model of {checkpoint.path.name}, {format_bytes(size)}")


def import_(folder: Folder, directory: Into, json: Json = False) -> None:
    """Write the model of a Hugging Face folder of Llama's layout as a committed checkpoint of step 0.

    Only safetensors are read; a folder with pickled weights is refused.
    """
    from myriad.cli.errors import CommandError
    from myriad.cli.output import document, say
    from myriad.spec.units import format_bytes
    from myriad.storage.durable.manifest import CheckpointError, stored_bytes

    huggingface = _huggingface()
    at = _place(directory)
    try:
        with at.receiving() as into:
            path = huggingface.import_folder(folder, into)
            size = stored_bytes(path)
    except CheckpointError as error:
        raise CommandError(str(error)) from None
    if json:
        document({"folder": str(folder), "checkpoint": f"{at.where}/{path.name}", "bytes": size})
    else:
        say(f"{at.where}/{path.name}: the model of {folder}, {format_bytes(size)}")


def _huggingface() -> Any:
    """The module that needs torch; CommandError where the core is installed alone."""
    from myriad.cli.errors import CommandError

    try:
        from myriad.storage.durable import huggingface
    except ModuleNotFoundError as error:
        raise CommandError(
            f"{error.name} is not installed here: pip install 'myriad-cluster[train]', or go where jobs run"
        ) from None
    return huggingface


def _committed(at: Place, step: int | None) -> Checkpoint:
    """The newest committed checkpoint, of that step if one is named."""
    from myriad.cli.errors import CommandError, Exit

    committed = [each for each in _found(at) if each.committed]
    of_step = [each for each in committed if step is None or each.step == step]
    if not of_step:
        there = ", ".join(str(each.step) for each in committed) or "none"
        what = "checkpoint" if step is None else f"checkpoint of step {step}"
        raise CommandError(f"{at.where} has no committed {what}; committed steps: {there}", Exit.NOT_FOUND)
    return of_step[0]


def _place(directory: str) -> Place:
    from myriad.cli.errors import CommandError
    from myriad.cli.places import place
    from myriad.storage.durable.manifest import CheckpointError

    try:
        return place(directory)
    except CheckpointError as error:
        raise CommandError(str(error)) from None


def _found(at: Place) -> tuple[Checkpoint, ...]:
    """The checkpoints there; CommandError where there are none, or none can be listed."""
    from myriad.cli.errors import CommandError, Exit
    from myriad.storage.durable.manifest import CheckpointError

    try:
        found = at.checkpoints()
        if not found and not at.exists():
            raise CommandError(f"there is no directory {at.where}", Exit.NOT_FOUND)
    except CheckpointError as error:
        raise CommandError(str(error)) from None
    if not found:
        raise CommandError(
            f"{at.where} has no checkpoints; give the directory in which step-N.gen-G lie", Exit.NOT_FOUND
        )
    return found


def _described(at: Place, checkpoint: Checkpoint) -> dict[str, Any]:
    manifest = _manifest(at, checkpoint)
    return {
        "path": at.shown(checkpoint),
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


def _manifest(at: Place, checkpoint: Checkpoint) -> Manifest | None:
    """None for one that is still being written, or damaged."""
    from myriad.storage.durable.manifest import CheckpointError

    try:
        return at.manifest(checkpoint)
    except CheckpointError:
        return None


def _cell(head: str, row: dict[str, Any]) -> object:
    from myriad.spec.units import format_bytes

    value = row[head]
    if head == "committed":
        return "yes" if value else "no"
    return format_bytes(value) if head == "size" and value is not None else value
