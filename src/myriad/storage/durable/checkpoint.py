"""Save and load a flat dict of tensors as a PyTorch DCP directory, with checksums and no pickled objects.

Method: DCP writes one file a rank, synced; each rank then checksums its own files, the lists are
gathered and the first rank writes the manifest. Loading needs no other rank: DCP plans from ``.metadata``
which pieces the local shards need, so a newcomer loads alone and the layout may have changed in between.
DCP itself loads a flipped byte without a word; here each file is checked before any byte of it is used.

``.metadata`` is a pickle. It is read by an unpickler that knows DCP's own data classes and nothing else;
tensors are read with ``weights_only``; entries that are pickled objects are refused. Nothing that a
file says is ever called.

Trade-off: a save reads its files once more for the checksums, from the page cache (0.2 to 1 s a GB). A load
reads each file that it needs a piece of once and whole, one at a time in memory: a restart into the same
layout reads each byte once per job (measured: 1.00 times the files), one into another layout reads a file
once for each rank that needs a piece of it (2.00 times the files where each of 2 ranks needs all of them).
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import platform
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import filesystem, metadata, state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.planner import ReadItem, SavePlan, SavePlanner

from myriad.spec.messages import FileSum
from myriad.storage.durable.manifest import (
    MANIFEST_NAME,
    CheckpointCorrupt,
    CheckpointError,
    Manifest,
    checkpoint_path,
    file_sum,
    read_manifest,
    read_summed,
    storage_error,
    sync_directory,
    write_manifest,
)

_METADATA_NAME = ".metadata"
Choose = Callable[[Manifest, Collection[str]], Mapping[str, torch.Tensor]]


def save(
    directory: str | os.PathLike[str],
    step: int,
    generation: int,
    tensors: Mapping[str, torch.Tensor],
    process_group: dist.ProcessGroup | None,
    *,
    position: int,
    layout: Mapping[str, Any],
    meta: Mapping[str, Any] | None = None,
) -> tuple[FileSum, ...]:
    """Write a checkpoint together with all ranks of ``process_group``: the files this rank wrote, synced.

    ``tensors`` are plain tensors (equal on all ranks that have the name) or DTensors; ranks may have
    different names. On return the manifest is written as well; the checkpoint is not yet committed.
    None as ``process_group`` saves alone, without any communication. Raises CheckpointError, on every
    rank when any rank fails; nothing of the attempt is left then. A step is saved once per generation.
    """
    assert all(isinstance(each, torch.Tensor) for each in tensors.values()), "tensors only"
    path = checkpoint_path(directory, step, generation)
    assert not (path / MANIFEST_NAME).exists(), f"{path} was saved before"
    rank = 0 if process_group is None else dist.get_rank(process_group)
    try:
        with _sentences(directory, "write"):
            state_dict_saver.save(
                dict(tensors),
                storage_writer=_Writer(path, single_file_per_rank=True, sync_files=True, thread_count=1),
                planner=DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
                process_group=process_group,
                no_dist=process_group is None,
            )
        mine = _own_files(directory, path, rank)
        outcomes = _agreed(mine, process_group)
        manifest = Manifest(
            step=step,
            generation=generation,
            position=position,
            world_size=len(outcomes),
            layout=dict(layout),
            versions={"torch": str(torch.__version__), "python": platform.python_version()},
            files=tuple(file for files in outcomes for file in files),
            meta=dict(meta or {}),
        )
        _agreed(_manifest_written(path, manifest) if rank == 0 else (), process_group)
    except CheckpointError:
        _discard(path, rank)
        raise
    assert not isinstance(mine, CheckpointError)
    return mine


def load(
    directory: str | os.PathLike[str],
    step: int,
    generation: int,
    tensors: Mapping[str, torch.Tensor] | Choose,
    verify: bool = True,
) -> Manifest:
    """Fill ``tensors`` (plain or DTensor, any layout) in place from a checkpoint, without other ranks.

    They may also be chosen by a function that is told the manifest and the names that were saved.
    Reads only the files that hold a piece of the local shards, each checked against the manifest before
    use. Raises CheckpointCorrupt naming the file, or CheckpointError when the checkpoint is missing or
    belongs to another model; the tensors may then be partly overwritten. No commit marker is needed: the
    caller knows from the journal that the checkpoint is committed.
    """
    path = checkpoint_path(directory, step, generation)
    manifest = read_manifest(path)
    if (manifest.step, manifest.generation) != (step, generation):
        raise CheckpointCorrupt(f"{path} holds step {manifest.step} of generation {manifest.generation}")
    with _sentences(directory, "read"):
        reader = _CheckedReader(path, manifest if verify else None)
        saved = reader.metadata.state_dict_metadata
        if not isinstance(tensors, Mapping):
            tensors = tensors(manifest, saved.keys())
        for name, tensor in tensors.items():
            _check_entry(name, tensor, saved.get(name))
        planner = _TensorPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        state_dict_loader.load(dict(tensors), storage_reader=reader, planner=planner, no_dist=True)
    return manifest


class _Writer(filesystem.FileSystemWriter):
    """DCP's writer, which reports what the storage said where torch reports that its own counts differ."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Any:
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, OSError):
                cause = cause.__context__
            raise (cause or error) from None


class _CheckedReader(filesystem.FileSystemReader):
    """DCP's reader, on files that are read once and checked before use, and which unpickles no code.

    ``metadata`` is read here at once: DCP's own call would hide what is wrong with it.
    """

    def __init__(self, path: Path, manifest: Manifest | None) -> None:
        super().__init__(path)
        self.fs = _CheckedFiles(manifest)
        self.metadata = self._read_metadata(path / _METADATA_NAME)

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


class _CheckedFiles(filesystem.FileSystem):
    """Hands out a file as its bytes in memory, after they were found to be those of the manifest."""

    def __init__(self, manifest: Manifest | None) -> None:
        self._manifest = manifest

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.BytesIO]:
        assert mode == "rb", mode
        file = Path(path)
        try:
            found, stream = read_summed(file)
        except FileNotFoundError:
            raise CheckpointCorrupt(f"{file} is missing; use another checkpoint") from None
        if self._manifest is not None:
            want = self._manifest.file(file.name)
            if want is None:
                raise CheckpointCorrupt(f"{file} is not in the manifest; use another checkpoint")
            if found != want:
                raise CheckpointCorrupt(f"{file} fails its checksum; use another tier or an older checkpoint")
        yield stream


class _TensorPlanner(DefaultLoadPlanner):
    """Plans tensors only: DCP's own would unpickle an object entry without restriction."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise CheckpointCorrupt(f"{read_item.dest_index.fqn} is a pickled object, which is never loaded")


def _check_entry(name: str, tensor: torch.Tensor, saved: Any) -> None:
    if saved is None:
        raise CheckpointError(f"the checkpoint has no {name}: it belongs to another model; use its own")
    if not isinstance(saved, metadata.TensorStorageMetadata):
        raise CheckpointCorrupt(f"{name} is a pickled object, which is never loaded")
    if saved.size != tensor.size() or saved.properties.dtype != tensor.dtype:
        raise CheckpointError(
            f"{name} is {tuple(tensor.size())} {tensor.dtype} here and {tuple(saved.size)} "
            f"{saved.properties.dtype} in the checkpoint: it belongs to another model; use its own"
        )


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


@contextlib.contextmanager
def _sentences(directory: str | os.PathLike[str], doing: str) -> Iterator[None]:
    """DCP's exceptions (some are no ``Exception``) become one sentence that says what to do."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
            yield
    except CheckpointException as error:
        causes = [failure[0] for failure in error.failures.values()]
        raise _sentence(directory, doing, causes) from error
    except OSError as error:
        raise storage_error(directory, error, doing) from error


def _sentence(directory: str | os.PathLike[str], doing: str, causes: list[BaseException]) -> CheckpointError:
    """The most telling of the ranks' causes: our own, then the storage's, then whatever there is."""
    for cause in causes:
        if isinstance(cause, CheckpointError):
            return cause
    for cause in causes:
        if isinstance(cause, OSError):
            return storage_error(directory, cause, doing)
    return CheckpointError(f"could not {doing} a checkpoint in {os.fspath(directory)}: {causes[0]}")


Files = tuple[FileSum, ...]


def _own_files(directory: str | os.PathLike[str], path: Path, rank: int) -> Files | CheckpointError:
    """Checksums of what this rank wrote, its names synced; ranks whose pieces others hold wrote nothing."""
    try:
        files = sorted(path.glob(f"__{rank}_*.distcp"))
        if rank == 0:
            files.append(path / _METADATA_NAME)
            sync_directory(path.parent)
        sync_directory(path)
        return tuple(file_sum(file) for file in files)
    except OSError as error:
        return storage_error(directory, error, "write")


def _discard(path: Path, rank: int) -> None:
    """Remove this rank's part of a failed save, so that it does not fill the storage for the next one."""
    with contextlib.suppress(OSError):
        for file in [*path.glob(f"__{rank}_*"), *(path.glob(".metadata*") if rank == 0 else ())]:
            file.unlink(missing_ok=True)
        path.rmdir()  # succeeds for the last rank


def _manifest_written(path: Path, manifest: Manifest) -> Files | CheckpointError:
    try:
        write_manifest(path, manifest)
    except CheckpointError as error:
        return error
    return ()


def _agreed(outcome: Files | CheckpointError, process_group: dist.ProcessGroup | None) -> list[Files]:
    """Every rank's outcome, in rank order; the first rank's error is raised on all, so that none waits."""
    outcomes: list[Any] = [outcome]
    if process_group is not None:
        outcomes = [None] * dist.get_world_size(process_group)
        dist.all_gather_object(outcomes, outcome, group=process_group)
    for each in outcomes:
        if isinstance(each, CheckpointError):
            raise each
    return outcomes
