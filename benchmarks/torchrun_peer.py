"""The peer of ``benchmarks.recovery``: the same training as a script for torchrun, resuming by DCP.

    torchrun --nproc-per-node 8 --max-restarts 3 benchmarks/torchrun_peer.py JOB.json

Model, mesh, optimizer, batches and step are Myriad's own modules, so both systems compute the same numbers;
starting, noticing a death, restarting and saving are torchrun's and torch.distributed.checkpoint's. Checkpoints
are written every ``checkpoint.every_steps``, fsynced as Myriad's are; ``.metadata`` is renamed into place last, so a
folder that has it is complete. Only what the layout needs is imported: each of the eight processes pays for it
again at every restart.

Lines on stdout, from one rank: ``begin N`` (attempt N, all ranks have joined), ``restored N`` (state in place) and,
after each step and its checkpoint, a line that begins as that of Myriad's own log.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import filesystem, state_dict_loader, state_dict_saver

from myriad.spec.job import JobSpec
from myriad.storage.datasets.loader import Loader, TokenDataset
from myriad.training.device import pick_device
from myriad.training.mesh import build_mesh
from myriad.training.optimizer import ShardedAdamW
from myriad.training.parallelize import build_model
from myriad.training.state import State, trainer_state
from myriad.training.step import Stepper


def main() -> None:
    """Train to the last step, from the newest complete checkpoint."""
    job = JobSpec.model_validate_json(Path(sys.argv[1]).read_text())
    assert job.model is not None and job.data is not None and job.optimizer is not None
    assert job.checkpoint.directory is not None
    attempt, place = os.environ["TORCHELASTIC_RESTART_COUNT"], Path(job.checkpoint.directory)
    torch.set_num_threads(1)
    torch.manual_seed(job.seed)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    device = pick_device(rank)
    mesh = build_mesh(job.layout, rank, device.type)
    teller = mesh.last_stage and mesh.is_first("tp", "dp_replicate", "dp_shard")
    if teller:
        print(f"begin {attempt}", flush=True)
    model = build_model(job.model, mesh, device, job.seed)
    optimizer = ShardedAdamW(list(model.named_parameters()), job.optimizer)
    stepper = Stepper(job, model, optimizer, mesh, device)
    state = trainer_state(model, optimizer)
    start = restore(place, state)
    optimizer.restored(start)
    batch = job.data.global_batch
    dataset = TokenDataset(job.data.path, job.data.sequence_length)
    loader = Loader(dataset, job.seed, batch, mesh.dp_rank, mesh.dp_size, start * batch)
    if teller:
        print(f"restored {attempt}", flush=True)
    for number in range(start + 1, job.optimizer.steps + 1):
        result = stepper.run(number, loader.next())
        if number % job.checkpoint.every_steps == 0:
            save(place, number, state, job.checkpoint.keep)
        if teller:
            print(f"step {number} of {job.optimizer.steps}: loss {result.loss:.4f}", flush=True)
    dist.destroy_process_group()


def complete(place: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    return sorted(file.parent for file in place.glob("step-*/.metadata"))


def restore(place: Path, state: State) -> int:
    """Load the newest complete checkpoint in place; the number of finished steps. Each rank reads what it needs."""
    found = complete(place)
    if not found:
        return 0
    state_dict_loader.load(state, checkpoint_id=found[-1], no_dist=True)
    return int(found[-1].name.removeprefix("step-"))


def save(place: Path, step: int, state: State, keep: int) -> None:
    """Write a checkpoint, fsynced, and remove the oldest ones."""
    folder = place / f"step-{step:09d}"
    state_dict_saver.save(state, storage_writer=filesystem.FileSystemWriter(folder, sync_files=True))
    if dist.get_rank() == 0:
        for old in complete(place)[:-keep]:
            shutil.rmtree(old)


if __name__ == "__main__":
    main()
