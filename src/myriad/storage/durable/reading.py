"""Read a DCP directory: each file once per job, checked before use, and nothing in it ever called.

Method: a file is read whole, its checksum compared with the manifest's in the same pass, and the pieces are taken
from memory. Where the ranks of a job load together, each file is read by one of those that need it and passed on
to the others down a binary tree, so that a restart reads each byte of durable storage once whatever the two
layouts are (measured on two ranks that each need all: 1.00 times the files; 2.00 when each loads alone).

``.metadata`` is a pickle. It is read by an unpickler that knows DCP's own data classes and nothing else;
tensors are read with ``weights_only``; entries that are pickled objects are refused. Nothing that a
file says is ever called.

Trade-off: a rank needs memory for one file beside its shards, and files that many ranks need pass one after
another. ``manifest.json`` is read by each rank. A rank that fails for a reason of its own (another model, say)
leaves the others waiting until it ends.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import pickle
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem

from myriad.spec.messages import FileSum
from myriad.storage.durable.manifest import (
    CheckpointCorrupt,
    CheckpointError,
    Manifest,
    read_summed,
    storage_error,
)
from myriad.storage.durable.remote import Remote

METADATA_NAME = ".metadata"
Read = TypeVar("Read")
log = logging.getLogger(__name__)


class CheckedReader(filesystem.FileSystemReader):
    """DCP's reader, on files that are read once and checked before use, and which unpickles no code.

    ``metadata`` is read here at once: DCP's own call would hide what is wrong with it.
    """

    def __init__(
        self,
        path: Path,
        manifest: Manifest | None,
        group: dist.ProcessGroup | None,
        fallback: Fallback | None = None,
    ) -> None:
        super().__init__(path)
        self._directory, self._group = path, group
        self.fs: _CheckedFiles = _CheckedFiles(manifest, fallback)
        if group is not None:
            self._share(METADATA_NAME, list(range(dist.get_world_size(group))), group)
        self.metadata = self._read_metadata(path / METADATA_NAME)

    def read_metadata(self, *args: Any, **kwargs: Any) -> metadata.Metadata:
        return self.metadata

    def _read_metadata(self, file: Path) -> metadata.Metadata:
        with self.fs.create_stream(file, "rb") as stream:
            try:
                found = _MetadataUnpickler(stream).load()
            except Exception as error:  # a damaged pickle can raise whatever its bytes spell
                raise CheckpointCorrupt(
                    f"{file} is no DCP metadata ({error}); use another checkpoint"
                ) from error
        if not isinstance(found, metadata.Metadata) or not isinstance(found.storage_data, dict):
            raise CheckpointCorrupt(f"{file} is no DCP metadata; use another checkpoint")
        return found

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Any:
        """As DCP's; in a group file by file, each read by the next of the ranks that need it."""
        if self._group is None:
            return super().read_data(plan, planner)
        items: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            items.setdefault(self.storage_data[item.storage_index].relative_path, []).append(item)
        needed: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(needed, sorted(items), group=self._group)
        read = super().read_data(replace(plan, items=[]), planner)
        for turn, name in enumerate(sorted(set().union(*needed))):
            if name in items:
                ranks = [rank for rank, names in enumerate(needed) if name in names]
                turn %= len(ranks)
                self._share(name, ranks[turn:] + ranks[:turn], self._group)
                read = super().read_data(replace(plan, items=items[name]), planner)
        return read

    def _share(self, name: str, ranks: list[int], group: dist.ProcessGroup) -> None:
        self.fs.held = (name, passed_on(lambda: self.fs.checked(self._directory / name), ranks, group))


class Fallback:
    """The copy of one checkpoint in object storage, asked for what the directory does not give.

    Both methods log what is read from where, and raise ``error``, what was wrong with the directory,
    with what is wrong with the copy added to it.
    """

    def __init__(self, url: str, name: str) -> None:
        self._url, self._name = url, name

    def manifest(self, error: CheckpointError) -> Manifest:
        return self._instead(error, lambda remote: remote.read_manifest(self._name))

    def file(self, want: FileSum, error: CheckpointError) -> io.BytesIO:
        return io.BytesIO(self._instead(error, lambda remote: remote.read_file(self._name, want)))

    def _instead(self, error: CheckpointError, read: Callable[[Remote], Read]) -> Read:
        log.warning("%s; reading it from %s/%s", error, self._url, self._name)
        try:
            return read(Remote(self._url))
        except CheckpointError as also:
            raise type(error)(f"{error}; nor from its copy: {also}") from None


class _CheckedFiles(filesystem.FileSystem):
    """Hands out a file as its bytes in memory, after they were found to be those of the manifest."""

    def __init__(self, manifest: Manifest | None, fallback: Fallback | None) -> None:
        self._manifest, self._fallback = manifest, fallback
        self.held: tuple[str, io.BytesIO] | None = None  # a file that this rank has got from another

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.BytesIO]:
        assert mode == "rb", mode
        file = Path(path)
        if self.held is not None and self.held[0] == file.name:
            yield self.held[1]
        else:
            yield self.checked(file)

    def checked(self, file: Path) -> io.BytesIO:
        """The file's bytes, from its copy where it is not as it was written. Raises CheckpointError."""
        try:
            return self._local(file)
        except CheckpointError as error:
            want = None if self._manifest is None else self._manifest.file(file.name)
            if self._fallback is None or want is None:
                raise
            return self._fallback.file(want, error)

    def _local(self, file: Path) -> io.BytesIO:
        try:
            found, stream = read_summed(file)
        except FileNotFoundError:
            raise CheckpointCorrupt(f"{file} is missing; use another checkpoint") from None
        except OSError as error:
            raise storage_error(file.parent, error, "read") from error
        if self._manifest is not None:
            want = self._manifest.file(file.name)
            if want is None:
                raise CheckpointCorrupt(f"{file} is not in the manifest; use another checkpoint")
            if found != want:
                raise CheckpointCorrupt(f"{file} fails its checksum; use another tier or an older checkpoint")
        return stream


def passed_on(read: Callable[[], io.BytesIO], ranks: Sequence[int], group: dist.ProcessGroup) -> io.BytesIO:
    """What the first of ``ranks`` of the group reads, on all of them, down a binary tree; its error as well."""
    place = ranks.index(dist.get_rank(group))
    box: list[Any] = [None]  # the size, or why there is none
    stream = io.BytesIO()
    if place == 0:
        try:
            stream = read()
            box = [len(stream.getbuffer())]
        except CheckpointError as error:
            box = [error]
    else:
        parent = dist.get_global_rank(group, ranks[(place - 1) // 2])
        dist.recv_object_list(box, src=parent, group=group)
        if isinstance(box[0], int):
            stream = io.BytesIO(bytes(box[0]))
            dist.recv(torch.frombuffer(stream.getbuffer(), dtype=torch.uint8), src=parent, group=group)
    for child in ranks[2 * place + 1 : 2 * place + 3]:
        to = dist.get_global_rank(group, child)
        dist.send_object_list(box, dst=to, group=group)
        if isinstance(box[0], int):
            dist.send(torch.frombuffer(stream.getbuffer(), dtype=torch.uint8), dst=to, group=group)
    if isinstance(box[0], CheckpointError):
        raise box[0]
    return stream


class TensorPlanner(DefaultLoadPlanner):
    """Plans tensors only: DCP's own would unpickle an object entry without restriction."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise CheckpointCorrupt(f"{read_item.dest_index.fqn} is a pickled object, which is never loaded")


class _MetadataUnpickler(pickle.Unpickler):
    """Knows the classes of DCP's metadata; anything else in the file is refused before it is called."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED:
            return _ALLOWED[module, name]
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        raise pickle.UnpicklingError(f"{module}.{name} is not allowed here")


def _layout(name: str) -> torch.layout:
    found = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(found, torch.layout):
        raise pickle.UnpicklingError(f"{name!r} is no tensor layout")
    return found


_ALLOWED: dict[tuple[str, str], Any] = {
    **{
        (metadata.__name__, each.__name__): each
        for each in (
            metadata.Metadata,
            metadata.MetadataIndex,
            metadata.StorageMeta,
            metadata.TensorStorageMetadata,
            metadata.BytesStorageMetadata,
            metadata.ChunkStorageMetadata,
            metadata.TensorProperties,
            metadata._MEM_FORMAT_ENCODING,
        )
    },
    (filesystem.__name__, "_StorageInfo"): filesystem._StorageInfo,
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): _layout,
    ("pathlib", "PosixPath"): Path,
    ("pathlib._local", "PosixPath"): Path,
}
