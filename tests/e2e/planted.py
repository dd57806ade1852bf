"""A small DistributedDataParallel loop with Myriad's session that can be slowed down where one wants.

PLANT names the places, separated by commas: ``loader`` (every rank, waiting for data), ``rank`` (rank 1,
while it computes), ``save`` (every rank, in the part of a save that training waits for), ``collective`` (every rank,
in waiting for the gradients' all-reduce). PLANT_SECONDS is how long each time, PLANT_STEPS and PLANT_SAVE_EVERY the length of the run
and of what a failure may cost. What a rank has really slept in each place goes to ``planted-RANK.json`` in the
job's folder, because a sleep is never shorter than asked and, on a busy machine, often longer.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from myriad.training import session

PLACES = tuple(filter(None, os.environ.get("PLANT", "").split(",")))
PLANT_S = float(os.environ.get("PLANT_SECONDS", "0.05"))
STEPS = int(os.environ.get("PLANT_STEPS", "20"))
SAVE_EVERY = int(os.environ.get("PLANT_SAVE_EVERY", "5"))
SLOW_SAVE = 6  # saves are rare: each is slowed down by so many times PLANT_S

slept_s: Counter[str] = Counter()
stepping = (
    False  # inside a step's own work: collectives of a restore are left alone, and so are those of a save
)


def plant(place: str, seconds: float = PLANT_S) -> None:
    """Sleep here if this place is to be slow."""
    if place in PLACES:
        began = time.perf_counter()
        time.sleep(seconds)
        slept_s[place] += time.perf_counter() - began


def slow_down_collectives_and_saves() -> None:
    """Wrap what torch waits in and what the session saves with, below the session's own measuring."""
    wait, save = dist.Work.wait, session.take_snapshot

    def slow_wait(self: dist.Work, *args: Any, **kwargs: Any) -> bool:
        if stepping and threading.current_thread() is threading.main_thread():
            plant("collective")
        return wait(self, *args, **kwargs)

    def slow_save(*args: Any, **kwargs: Any) -> Any:
        plant("save", SLOW_SAVE * PLANT_S)
        return save(*args, **kwargs)

    dist.Work.wait = slow_wait  # type: ignore[method-assign]
    session.take_snapshot = slow_save


def main() -> None:
    global stepping
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(nn.Linear(16, 16), find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    slow_down_collectives_and_saves()
    run = session.start(STEPS, checkpoint_every_steps=SAVE_EVERY, snapshot_every_steps=SAVE_EVERY)
    start = run.restore(model, optimizer)
    for number in range(start + 1, STEPS + 1):
        with run.step(number) as step:
            with step.data():
                plant("loader")
                batch = torch.full((4, 16), float(number + rank))
            stepping = True
            optimizer.zero_grad()
            loss = model(batch).square().mean()
            if rank == 1:
                plant("rank")
            loss.backward()
            optimizer.step()
            stepping = False
            step.consumed([number * world + rank], number * world)
            if rank == 0:
                step.report(loss=loss.item(), tokens=4 * world)
    Path(os.environ["MYRIAD_JOB_DIR"], f"planted-{rank}.json").write_text(json.dumps(slept_s))
    run.finish()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
