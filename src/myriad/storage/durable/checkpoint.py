"""Save and load a flat dict of tensors as a PyTorch DCP directory, with checksums and no pickled objects.

Method: saving is ``writing``. On loading, DCP plans from ``.metadata`` which pieces the local
shards need, so the layout may have changed in between, and a newcomer can load alone. DCP itself loads a flipped
byte without a word; here no byte of a file is used before the file is checked (``reading``).
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import metadata, state_dict_loader
from torch.distributed.checkpoint.api import CheckpointException

from myriad.spec.messages import FileSum
from myriad.storage.durable.manifest import (
    CheckpointCorrupt,
    CheckpointError,
    Manifest,
    checkpoint_path,
    read_manifest,
    storage_error,
)
from myriad.storage.durable.reading import CheckedReader, Fallback, TensorPlanner
from myriad.storage.durable.writing import CheckpointWriter, local_bytes

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
    writer = CheckpointWriter(directory, generation, process_group, layout, meta or {})
    return writer.save(step, position, tensors, lambda name: local_bytes(tensors[name]))


def load(
    directory: str | os.PathLike[str],
    step: int,
    generation: int,
    tensors: Mapping[str, torch.Tensor] | Choose,
    verify: bool = True,
    process_group: dist.ProcessGroup | None = None,
    remote: str | None = None,
) -> Manifest:
    """Fill ``tensors`` (plain or DTensor, any layout) in place from a checkpoint.

    Without a ``process_group`` alone; with one all its ranks call together, and share what they read.
    They may also be chosen by a function that is told the manifest and the names that were saved.
    Reads only the files that hold a piece of the local shards, each checked against the manifest before
    use. Raises CheckpointCorrupt naming the file, or CheckpointError when the checkpoint is missing or
    belongs to another model; the tensors may then be partly overwritten. No commit marker is needed: the
    caller knows from the journal that the checkpoint is committed. What is missing or damaged there is
    read from its copy below the URL ``remote``, if there is one, verified in the same way.
    """
    path = checkpoint_path(directory, step, generation)
    fallback = Fallback(remote, path.name) if remote is not None and verify else None
    try:
        manifest = read_manifest(path)
    except CheckpointError as error:
        if fallback is None:
            raise
        manifest = fallback.manifest(error)
    if (manifest.step, manifest.generation) != (step, generation):
        raise CheckpointCorrupt(f"{path} holds step {manifest.step} of generation {manifest.generation}")
    with _sentences(directory, "read"):
        reader = CheckedReader(path, manifest if verify else None, process_group, fallback)
        saved = reader.metadata.state_dict_metadata
        if not isinstance(tensors, Mapping):
            tensors = tensors(manifest, saved.keys())
        for name, tensor in tensors.items():
            _check_entry(name, tensor, saved.get(name))
        planner = TensorPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        state_dict_loader.load(dict(tensors), storage_reader=reader, planner=planner, no_dist=True)
    return manifest


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
