"""A loop whose first rank fails while a durable save is in flight, because the second rank's storage is slow.

ends_in_mid_save.py SECONDS
"""

import os
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from myriad.storage.durable.writing import CheckpointWriter
from myriad.training import session

SLOW_S = float(sys.argv[1])

torch.set_num_threads(1)
dist.init_process_group("gloo")
model = nn.Linear(64, 64)
optimizer = torch.optim.AdamW(model.parameters())
run = session.start(steps=10, checkpoint_every_steps=1, snapshot_every_steps=1)
run.restore(model, optimizer)
written = CheckpointWriter._written


def slow(self: CheckpointWriter, path: Any, *rest: Any) -> Any:
    if path.name.startswith("step-2.") and dist.get_rank() == 1:
        time.sleep(SLOW_S)
    return written(self, path, *rest)


CheckpointWriter._written = slow
for number in (1, 2):  # the first checkpoint of a job is waited for, the second is not
    with run.step(number) as step:
        optimizer.zero_grad()
        model(torch.ones(2, 64)).sum().backward()
        optimizer.step()
        step.consumed([number], number)
if dist.get_rank() == 0:
    raise ValueError("a mistake of the user's")
time.sleep(SLOW_S + 1.0)
os._exit(0)
