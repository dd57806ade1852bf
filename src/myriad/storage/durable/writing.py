"""Writing durable checkpoints: planned once, written often, and by any thread.

Method: DCP plans which rank writes which piece of which tensor; the plan is kept until some rank's tensors change.
A save then takes one small reduction (has anybody's plan changed?), one file a rank written straight from memory and
checksummed on the way, one gather of names and sums to the first rank, which writes ``.metadata`` and the manifest,
and one broadcast of the outcome. So all ranks succeed or all fail with the same sentence. What comes out is a plain
DCP directory.

Trade-off: a rank's file is written by one thread.
"""

from __future__ import annotations

import contextlib
import io
import os
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from isal.isal_zlib import crc32
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor

from myriad.spec.messages import FileSum
from myriad.storage.durable.framing import frame
from myriad.storage.durable.manifest import (
    MANIFEST_NAME,
    CheckpointError,
    Manifest,
    checkpoint_path,
    file_sum,
    storage_error,
    sync_directory,
    write_manifest,
)
from myriad.storage.durable.reading import METADATA_NAME

WRITE_BYTES = 1 << 20  # written and checksummed at a time: stays in the second-level cache
Files = tuple[FileSum, ...]
# The bytes of this rank's piece of the tensor with this name, contiguous.
Bytes = Callable[[str], memoryview]


@dataclass(frozen=True)
class _Plan:
    """What this rank writes, as long as ``signature`` says what its tensors are; ``whole`` is the first rank's."""

    signature: tuple[object, ...]
    mine: SavePlan
    whole: Metadata | None


@dataclass(frozen=True)
class _Written:
    """This rank's file, and where in it each piece is."""

    files: Files
    pieces: list[WriteResult]


class CheckpointWriter:
    """The checkpoints of one generation. All ranks of ``group`` call :meth:`save` for the same steps in the same order,
    one at a time, from any thread: ``group`` is for nothing else. None: one rank alone, without communication."""

    def __init__(
        self,
        directory: str | os.PathLike[str],
        generation: int,
        group: dist.ProcessGroup | None,
        layout: Mapping[str, Any],
        meta: Mapping[str, Any],
    ) -> None:
        self._directory, self._generation, self._group = directory, generation, group
        self._layout, self._meta = dict(layout), dict(meta)
        self._rank = 0 if group is None else dist.get_rank(group)
        self._world = 1 if group is None else dist.get_world_size(group)
        self._plan: _Plan | None = None

    def save(self, step: int, position: int, tensors: Mapping[str, torch.Tensor], data: Bytes) -> Files:
        """Write the checkpoint of ``step``: the files this rank wrote, synced.

        ``tensors`` say what each is (only names, shapes and layouts are read of them), ``data`` gives the bytes.
        Raises CheckpointError, on every rank when any rank fails; nothing of the attempt is left then.
        """
        path = checkpoint_path(self._directory, step, self._generation)
        assert not (path / MANIFEST_NAME).exists(), f"{path} was saved before"
        plan = self._planned(tensors)
        try:
            return self._finished(path, step, position, plan, self._written(path, plan, data))
        except CheckpointError:
            _discard(path, self._rank)
            raise

    # ------------------------------------------------------------ plan

    def _planned(self, tensors: Mapping[str, torch.Tensor]) -> _Plan:
        """The plan that fits ``tensors`` on all ranks: the one there is, or a new one."""
        signature = tuple((name, *_nature(tensor)) for name, tensor in tensors.items())
        if not self._anybody(self._plan is None or self._plan.signature != signature):
            assert self._plan is not None
            return self._plan
        planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(dict(tensors), is_coordinator=self._rank == 0)
        gathered, whole = self._gathered(planner.create_local_plan()), None
        plans: list[Any] = [None] * self._world
        if self._rank == 0:
            plans, whole = planner.create_global_plan(gathered)
        mine = [plans[0]]
        if self._group is not None:
            dist.scatter_object_list(mine, plans if self._rank == 0 else None, group_src=0, group=self._group)
        self._plan = _Plan(signature, planner.finish_plan(mine[0]), whole)
        return self._plan

    # ------------------------------------------------------------ data

    def _written(self, path: Path, plan: _Plan, data: Bytes) -> _Written | CheckpointError:
        """Write this rank's pieces; ranks whose pieces others hold write nothing."""
        try:
            path.mkdir(parents=True, exist_ok=True)
            if not plan.mine.items:
                return _Written((), [])
            name, pieces = f"__{self._rank}_0.distcp", []
            with (path / name).open("wb", buffering=0) as file:
                stream = _Summed(file)
                for item in plan.mine.items:
                    assert item.tensor_data is not None, f"{item.index.fqn} is no tensor"
                    begin, shape = stream.size, tuple(item.tensor_data.chunk.sizes)
                    head, tail = frame(item.tensor_data.properties.dtype, shape)
                    for part in (memoryview(head), data(item.index.fqn), memoryview(tail)):
                        stream.write(part)
                    where = filesystem._StorageInfo(name, begin, stream.size - begin)
                    pieces.append(WriteResult(item.index, stream.size - begin, where))
                os.fsync(file.fileno())
            sync_directory(path)
            return _Written((FileSum(name, stream.size, stream.crc32),), pieces)
        except OSError as error:
            return storage_error(self._directory, error, "write")

    def _finished(
        self, path: Path, step: int, position: int, plan: _Plan, mine: _Written | CheckpointError
    ) -> Files:
        """The first rank writes what belongs to all; every rank learns of the first error there was."""
        gathered = self._gathered(mine)
        outcome: list[Any] = [None]
        if self._rank == 0:
            outcome = [next((each for each in gathered if isinstance(each, CheckpointError)), None)]
            if outcome[0] is None:
                outcome = [self._completed(path, step, position, plan, gathered)]
        if self._group is not None:
            dist.broadcast_object_list(outcome, group_src=0, group=self._group)
        if isinstance(outcome[0], CheckpointError):
            raise outcome[0]
        assert isinstance(mine, _Written)
        return (*mine.files, outcome[0]) if self._rank == 0 else mine.files

    def _completed(
        self, path: Path, step: int, position: int, plan: _Plan, written: list[_Written]
    ) -> FileSum | CheckpointError:
        """Write ``.metadata`` and the manifest; the sum of the former."""
        assert plan.whole is not None
        try:
            writer = filesystem.FileSystemWriter(path, sync_files=True)
            writer.set_up_storage_writer(True)
            writer.finish(plan.whole, [each.pieces for each in written])
            sync_directory(path)
            sync_directory(path.parent)
            metadata = file_sum(path / METADATA_NAME)
            manifest = Manifest(
                step=step,
                generation=self._generation,
                position=position,
                world_size=self._world,
                layout=self._layout,
                versions={"torch": str(torch.__version__), "python": platform.python_version()},
                files=(*(file for each in written for file in each.files), metadata),
                meta=self._meta,
            )
            write_manifest(path, manifest)
        except OSError as error:
            return storage_error(self._directory, error, "write")
        except CheckpointError as error:
            return error
        return metadata

    # ------------------------------------------------------------ together

    def _anybody(self, yes: bool) -> bool:
        answer = torch.tensor(int(yes))
        if self._group is not None:
            dist.all_reduce(answer, op=dist.ReduceOp.MAX, group=self._group)
        return bool(answer)

    def _gathered(self, mine: Any) -> list[Any]:
        """Every rank's, in rank order, on the first one; nothing on the others."""
        if self._group is None:
            return [mine]
        gathered: list[Any] | None = [None] * self._world if self._rank == 0 else None
        dist.gather_object(mine, gathered, group_dst=0, group=self._group)
        return gathered or []


def local_bytes(tensor: torch.Tensor) -> memoryview:
    """This rank's piece of a plain or distributed tensor, on the CPU."""
    part = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    flat: Any = part.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy()
    return memoryview(flat) if flat.nbytes else memoryview(b"")


class _Summed:
    """A file with the size and the CRC-32 of what was written to it."""

    def __init__(self, file: io.FileIO) -> None:
        self._fd = file.fileno()
        self.size = self.crc32 = 0

    def write(self, data: memoryview) -> None:
        for begin in range(0, data.nbytes, WRITE_BYTES):
            chunk = data[begin : begin + WRITE_BYTES]
            written = 0
            while written < chunk.nbytes:
                written += os.write(self._fd, chunk[written:])
            self.crc32 = crc32(chunk, self.crc32)
        self.size += data.nbytes


def _nature(tensor: torch.Tensor) -> tuple[object, ...]:
    """What a plan depends on."""
    if isinstance(tensor, DTensor):
        return tuple(tensor.shape), tensor.dtype, tensor.placements, tensor.device_mesh
    return tuple(tensor.shape), tensor.dtype


def _discard(path: Path, rank: int) -> None:
    """Remove this rank's part of a failed save, so that it does not fill the storage for the next one."""
    with contextlib.suppress(OSError):
        for file in [*path.glob(f"__{rank}_*"), *(path.glob(".metadata*") if rank == 0 else ())]:
            file.unlink(missing_ok=True)
        path.rmdir()  # succeeds for the last rank
