"""What two ranks do together in ``test_checkpoint.py``.

``python checkpoint_ranks.py RENDEZVOUS STORY=DIRECTORY...`` imports torch once, forks two ranks with a
gloo group between them, and prints one line of JSON a story and rank.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from storage_faults import flip_bit
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from myriad.storage.durable.checkpoint import load, save
from myriad.storage.durable.manifest import CheckpointError, checkpoint_path, commit_marker, read_manifest

ROWS = 7  # does not divide by two: the ranks' shards differ in size


def whole(name: str, shape: tuple[int, ...] = (ROWS, 3)) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(map(ord, name)))
    return torch.randn(shape, generator=generator)


def state(mesh: DeviceMesh, zero: bool = False) -> dict[str, torch.Tensor]:
    """Sharded, replicated, and (as with a pipeline) owned by one rank only."""
    factor = 0.0 if zero else 1.0
    mine = f"stage{dist.get_rank()}"
    return {
        "sharded": distribute_tensor(whole("sharded") * factor, mesh, [Shard(0)]),
        "step": torch.tensor(3.0) * factor,
        f"{mine}.bias": whole(mine, (2,)).bfloat16() * factor,
    }


def save_and_load(directory: str) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2,))
    tensors = state(mesh)
    files = save(
        directory, 5, 2, tensors, dist.group.WORLD, position=40, layout={"dp_shard": 2}, meta={"seed": 1}
    )
    again = state(mesh, zero=True)
    manifest = load(directory, 5, 2, again)
    equal = all(
        torch.equal(local(again[name]), local(each)) and bool(local(again[name]).abs().sum() > 0)
        for name, each in tensors.items()
    )
    return {"files": [each.path for each in files], "equal": equal, "position": manifest.position}


def subgroup(directory: str) -> dict[str, Any]:
    """Only rank 1 saves, in a group of its own: any use of the world's group would hang or fail."""
    alone = dist.new_group([1])
    if dist.get_rank() == 0:
        return {"files": []}
    files = save(directory, 1, 1, {"x": whole("x")}, alone, position=0, layout={})
    return {"files": [each.path for each in files]}


def refused(directory: str) -> dict[str, Any]:
    """Both ranks must hear why, whichever of them the storage refused."""
    big = {f"big{dist.get_rank()}": torch.ones(400_000)}
    try:
        save(directory, 1, 1, big, dist.group.WORLD, position=0, layout={})
    except CheckpointError as error:
        return {"error": str(error)}
    return {"error": None}


def repeated(directory: str, saves: int = 200, kept: Callable[[], object] = lambda: None) -> dict[str, Any]:
    """Many saves: what this process has more of at the end than half way, where all that is lazy is loaded."""
    mesh = init_device_mesh("cpu", (2,))
    tensors = state(mesh) | {"large": distribute_tensor(torch.ones(200_000), mesh, [Shard(0)])}
    held = []
    for step in range(saves):
        if step == saves // 2:
            before = usage()
        save(directory, step, 1, tensors, dist.group.WORLD, position=step, layout={})
        commit_marker(checkpoint_path(directory, step, 1)) if dist.get_rank() == 0 else None
        held.append(kept())
    files, threads, memory = (after - half for half, after in zip(before, usage(), strict=True))
    return {
        "saves": saves,
        "files": files,
        "threads": threads,
        "memory_bytes_per_save": memory / (saves - saves // 2),
    }


def leaking(directory: str) -> dict[str, Any]:
    """As a leak would look: every save keeps a state, a descriptor and a thread."""

    def kept() -> object:
        thread = threading.Thread(target=time.sleep, args=(60,), daemon=True)
        thread.start()
        return torch.ones(100_000).clone(), os.open("/dev/null", os.O_RDONLY), thread

    return repeated(directory, 40, kept)


def usage() -> tuple[int, int, int]:
    """Open files, threads, and bytes of memory of this process."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return (
        len(os.listdir("/proc/self/fd")),
        len(os.listdir("/proc/self/task")),
        pages * os.sysconf("SC_PAGE_SIZE"),
    )


def reads(directory: str) -> dict[str, Any]:
    """Bytes of files this rank reads, over the bytes of all files: its own part, all, and all together with the other."""
    mesh = init_device_mesh("cpu", (2,))
    sharded = distribute_tensor(torch.ones(300_001), mesh, [Shard(0)])
    save(directory, 1, 1, {"x": sharded}, dist.group.WORLD, position=0, layout={})
    stored = sum(each.size for each in read_manifest(checkpoint_path(directory, 1, 1)).files)
    rows = {
        "own part": (torch.zeros_like(sharded), None),
        "all": (torch.zeros(300_001), None),
        "own part, together": (torch.zeros_like(sharded), dist.group.WORLD),
        "all, together": (torch.zeros(300_001), dist.group.WORLD),
    }
    factors = {}
    for name, (target, group) in rows.items():
        before = bytes_read()
        load(directory, 1, 1, {"x": target}, process_group=group)
        factors[name] = (bytes_read() - before) / stored
        assert bool(local(target).all())
    return factors


def refused_together(directory: str) -> dict[str, Any]:
    """One rank reads a damaged file for both: both must hear of it."""
    save(directory, 1, 1, {"x": whole("x")}, dist.group.WORLD, position=0, layout={})
    if dist.get_rank() == 0:
        flip_bit(checkpoint_path(directory, 1, 1) / "__0_0.distcp", 700)
    dist.barrier()
    try:
        load(directory, 1, 1, {"x": whole("x")}, process_group=dist.group.WORLD)
    except CheckpointError as error:
        return {"error": str(error)}
    return {"error": None}


def bytes_read() -> int:
    """By all read calls of this process so far, from storage or from the page cache."""
    return int(Path("/proc/self/io").read_text().split()[1])


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


STORIES = {
    each.__name__: each
    for each in (save_and_load, subgroup, refused, repeated, leaking, reads, refused_together)
}


def run_rank(rank: int, rendezvous: Path, stories: list[str]) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    for story in stories:
        name, _, directory = story.partition("=")
        result = {"story": name, "rank": rank, **STORIES[name](directory)}
        os.write(1, (json.dumps(result) + "\n").encode())  # one call: the ranks' lines do not mix
    dist.barrier()
    dist.destroy_process_group()


def main(rendezvous: str, *stories: str) -> int:
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    pids = []
    for rank in range(2):
        if (pid := os.fork()) == 0:
            code = 1
            try:
                run_rank(rank, Path(rendezvous), list(stories))
                code = 0
            except BaseException:  # noqa: BLE001 (reported here, and the exit code says so)
                traceback.print_exc()
            finally:
                os._exit(code)
        pids.append(pid)
    return max(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != 0 for pid in pids)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
