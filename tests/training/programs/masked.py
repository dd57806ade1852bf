"""Three steps on batches in which the ranks have very different numbers of masked tokens.

masked.py LAYOUT        # "dp_replicate 2" and the like; prints one line of "loss norm" a step
"""

import os
import sys

import numpy as np
import torch
import torch.distributed as dist

from myriad.spec.job import JobSpec
from myriad.storage.datasets.loader import Batch
from myriad.training.device import Device
from myriad.training.mesh import build_mesh
from myriad.training.optimizer import ShardedAdamW
from myriad.training.parallelize import build_model
from myriad.training.rendezvous import join
from myriad.training.step import Stepper

SEQUENCES, LENGTH = 8, 16
axis, size = sys.argv[1].split()
job = JobSpec.model_validate(
    {
        "name": "masked",
        "nodes": 1,
        "model": {"layers": 2, "dim": 16, "heads": 2, "kv_heads": 2, "ffn_dim": 32, "vocab_size": 32}
        | {"dtype": "float64"},
        "layout": {axis: int(size), "microbatches": 2},
        "data": {"path": "none", "sequence_length": LENGTH, "global_batch": SEQUENCES},
        "optimizer": {"steps": 3, "learning_rate": 1e-2},
    }
)
assert job.model is not None and job.optimizer is not None
torch.set_num_threads(1)
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
if rank == 0:  # the ranks of a real job find a store that runs already
    from torch._C._distributed_c10d import TCPStore

    store = TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=True, wait_for_workers=False)
device = Device(torch.device("cpu"))
join(rank, world, 1, device)
mesh = build_mesh(job.layout, rank, "cpu")
model = build_model(job.model, mesh, device, 5)
optimizer = ShardedAdamW(list(model.named_parameters()), job.optimizer)
stepper = Stepper(job, model, optimizer, mesh, device)
random = np.random.default_rng(3)
for number in range(1, 4):
    tokens = random.integers(0, 32, (SEQUENCES, LENGTH))
    labels = random.integers(0, 32, (SEQUENCES, LENGTH))
    labels[:3] = -100  # whole sequences, so some microbatches count nothing
    labels[3, 4:] = -100
    mine = slice(mesh.dp_rank * SEQUENCES // mesh.dp_size, (mesh.dp_rank + 1) * SEQUENCES // mesh.dp_size)
    result = stepper.run(number, Batch(tokens[mine], labels[mine], (), 0))
    assert result.tokens == 4 * LENGTH + 4, result
    if rank == 0:
        print(result.loss.hex(), result.grad_norm.hex(), flush=True)
dist.barrier()  # rank 0 holds the store
# By the door that production workers take. A thread of gloo's that still waits for the interpreter's lock, to drop
# the tensors of a finished collective, aborts the process when the interpreter begins to end.
os._exit(0)
