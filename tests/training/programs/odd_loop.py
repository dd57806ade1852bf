"""A loop with FSDP2 whose parameters are odd; it computes the same in every world size.

odd_loop.py STEPS SAVE_EVERY

The embedding is tied to the head, one linear layer is never used, one group of the optimizer is empty, and the
bias has two rows, so that from three ranks on some rank has none of it.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from myriad.training import session

STEPS, SAVE_EVERY, BATCH = int(sys.argv[1]), int(sys.argv[2]), 12


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 6)
        self.never_used = nn.Linear(6, 6)
        self.narrow = nn.Linear(6, 2)
        self.wide = nn.Linear(2, 6)
        self.head = nn.Linear(6, 10, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.wide(self.narrow(self.embedding(tokens)).tanh()))


torch.set_num_threads(1)
torch.manual_seed(0)
model = Odd().double()
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
fully_shard(model)
groups = [{"params": list(model.parameters())}, {"params": [], "lr": 1.0}]
optimizer = torch.optim.AdamW(groups, lr=1e-2, foreach=False)

run = session.start(steps=STEPS, checkpoint_every_steps=SAVE_EVERY)
start = run.restore(model, optimizer)
for number in range(start + 1, STEPS + 1):
    with run.step(number) as step:
        with step.data():
            whole = torch.randint(0, 10, (BATCH,), generator=torch.Generator().manual_seed(number))
            mine = whole[rank::world]
        loss = nn.functional.cross_entropy(model(mine), (mine + 1) % 10)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        step.consumed(position=number * BATCH)
        if rank == 0:
            step.report(loss=total.item() / world, tokens=BATCH)
assert all(not optimizer.state[p] for p in model.never_used.parameters()), "it never had a gradient"
run.finish()
dist.destroy_process_group()
