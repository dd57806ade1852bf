"""A plain PyTorch loop with DistributedDataParallel or FSDP2 and the session's lines; runs with and without an agent.

own_loop.py STEPS OUT [ddp|fsdp]
"""

import hashlib
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from myriad.training import session

STEPS, OUT, KIND = int(sys.argv[1]), sys.argv[2], sys.argv[3]

torch.set_num_threads(1)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), nn.Dropout(0.1), nn.Tanh(), nn.Linear(32, 1))
dist.init_process_group("gloo")
if KIND == "ddp":
    model = DistributedDataParallel(model, find_unused_parameters=True)
else:
    fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
torch.manual_seed(1 + dist.get_rank())  # dropout differs between ranks

run = session.start(steps=STEPS, checkpoint_every_steps=4)
start = run.restore(model, optimizer)
for number in range(start + 1, STEPS + 1):
    with run.step(number) as step:
        with step.data():
            generator = torch.Generator().manual_seed(1000 * number + dist.get_rank())
            x = torch.randn(8, 16, generator=generator)
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        step.consumed([number * 10 + dist.get_rank()], position=number * 16)
        if dist.get_rank() == 0:
            step.report(loss=total.item() / dist.get_world_size(), tokens=16)
run.finish()

whole = {k: v.full_tensor() if hasattr(v, "full_tensor") else v for k, v in model.state_dict().items()}
if dist.get_rank() == 0:
    digest = hashlib.sha256(b"".join(v.detach().numpy().tobytes() for v in whole.values())).hexdigest()
    with open(OUT, "w") as file:
        file.write(digest)
dist.destroy_process_group()
