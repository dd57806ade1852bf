"""Where ``myriad checkpoint`` looks: a directory, or what lies below a URL in object storage, by the same verbs.

Trade-off: an export from a URL, and an import to one, pass through a temporary folder of the checkpoint's size (TMPDIR).
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from myriad.storage.durable.manifest import Checkpoint, Manifest


class Place(Protocol):
    """All methods raise CheckpointError."""

    where: str

    def exists(self) -> bool: ...
    def checkpoints(self) -> tuple[Checkpoint, ...]: ...
    def shown(self, checkpoint: Checkpoint) -> str: ...
    def manifest(self, checkpoint: Checkpoint) -> Manifest: ...
    def damage(self, checkpoint: Checkpoint) -> tuple[str, ...]: ...
    def has_marker(self, checkpoint: Checkpoint) -> bool: ...
    def stored_bytes(self, checkpoint: Checkpoint) -> int: ...
    def prunable(self, keep: int) -> tuple[Checkpoint, ...]: ...
    def prune(self, keep: int) -> tuple[Checkpoint, ...]: ...
    @contextmanager
    def local(self, checkpoint: Checkpoint) -> Iterator[Checkpoint]:
        """The same checkpoint, as a directory."""

    @contextmanager
    def receiving(self) -> Iterator[Path]:
        """A directory; the committed checkpoint that is in it at the end is here afterwards."""


def place(where: str) -> Place:
    """Raises CheckpointError for a URL that cannot be meant."""
    from myriad.storage.objects import is_url

    return _Url(where) if is_url(where) else _Directory(where)


class _Directory:
    def __init__(self, where: str) -> None:
        from myriad.storage.durable import manifest

        self.where, self._path, self._of = where, Path(where), manifest

    def exists(self) -> bool:
        return self._path.exists()

    def checkpoints(self) -> tuple[Checkpoint, ...]:
        return self._of.list_checkpoints(self._path)

    def shown(self, checkpoint: Checkpoint) -> str:
        return str(checkpoint.path)

    def manifest(self, checkpoint: Checkpoint) -> Manifest:
        return self._of.read_manifest(checkpoint.path)

    def damage(self, checkpoint: Checkpoint) -> tuple[str, ...]:
        return self._of.damage(checkpoint.path)

    def has_marker(self, checkpoint: Checkpoint) -> bool:
        return (checkpoint.path / self._of.MARKER_NAME).exists()

    def stored_bytes(self, checkpoint: Checkpoint) -> int:
        return self._of.stored_bytes(checkpoint.path)

    def prunable(self, keep: int) -> tuple[Checkpoint, ...]:
        return self._of.prunable(self._path, keep)

    def prune(self, keep: int) -> tuple[Checkpoint, ...]:
        return self._of.prune(self._path, keep)

    @contextmanager
    def local(self, checkpoint: Checkpoint) -> Iterator[Checkpoint]:
        yield checkpoint

    @contextmanager
    def receiving(self) -> Iterator[Path]:
        yield self._path


class _Url:
    def __init__(self, where: str) -> None:
        from myriad.storage.durable.remote import Remote

        self._remote = Remote(where)
        self.where = self._remote.url

    def exists(self) -> bool:
        return True  # a prefix is no folder: nothing below it and no such prefix are the same

    def checkpoints(self) -> tuple[Checkpoint, ...]:
        return self._remote.list_checkpoints()

    def shown(self, checkpoint: Checkpoint) -> str:
        return f"{self.where}/{checkpoint.path.name}"

    def manifest(self, checkpoint: Checkpoint) -> Manifest:
        return self._remote.read_manifest(checkpoint.path.name)

    def damage(self, checkpoint: Checkpoint) -> tuple[str, ...]:
        return self._remote.damage(checkpoint.path.name)

    def has_marker(self, checkpoint: Checkpoint) -> bool:
        return self._remote.has_marker(checkpoint.path.name)

    def stored_bytes(self, checkpoint: Checkpoint) -> int:
        return self._remote.stored_bytes(checkpoint.path.name)

    def prunable(self, keep: int) -> tuple[Checkpoint, ...]:
        return self._remote.prunable(keep)

    def prune(self, keep: int) -> tuple[Checkpoint, ...]:
        return self._remote.prune(keep)

    @contextmanager
    def local(self, checkpoint: Checkpoint) -> Iterator[Checkpoint]:
        with tempfile.TemporaryDirectory() as folder:
            yield replace(checkpoint, path=self._remote.download(checkpoint.path.name, Path(folder)))

    @contextmanager
    def receiving(self) -> Iterator[Path]:
        from myriad.storage.durable.manifest import list_checkpoints

        with tempfile.TemporaryDirectory() as folder:
            yield Path(folder)
            for each in list_checkpoints(folder):
                self._remote.copy_up(each.path)
