"""What a worker's first step would import or build lazily, done once in the template.

Method: after the imports, rehearse one step of a tiny model as one rank of an imaginary dp_shard 2 x tp 2 mesh,
and one save. PyTorch's ``fake`` backend stands in for the network: its collectives return at once and it
starts no thread, so the template may still fork. This loads DTensor's sharding rules, FSDP2, the fused
optimizer and DCP, and children inherit them.

Trade-off: about 2 s in the template (not done where there is an accelerator, since a backward pass would
initialise it); an 8-rank start on 2 cores gets its first step 2 s earlier.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import torch
import torch._dynamo
import torch.distributed as dist
import torch.distributed.checkpoint
import torch.testing._internal.distributed.fake_pg  # registers the backend "fake"
from torch._C._distributed_c10d import HashStore

from myriad.spec.job import JobSpec
from myriad.storage.datasets.loader import Batch
from myriad.storage.durable.checkpoint import save
from myriad.training import worker  # noqa: F401  imports all that a worker runs
from myriad.training.device import Device, has_accelerator
from myriad.training.mesh import build_mesh
from myriad.training.optimizer import ShardedAdamW
from myriad.training.parallelize import build_model
from myriad.training.state import snapshot_entries, trainer_state
from myriad.training.step import Stepper

TINY = JobSpec.model_validate(
    {
        "name": "rehearsal",
        "nodes": 1,
        "model": {
            "layers": 2,
            "dim": 8,
            "heads": 2,
            "kv_heads": 2,
            "ffn_dim": 8,
            "vocab_size": 8,
        },
        "layout": {"dp_shard": 2, "tp": 2, "microbatches": 2},
        "data": {"path": "none", "sequence_length": 4, "global_batch": 4},
        "optimizer": {"steps": 1, "learning_rate": 1e-3},
    }
)


def up() -> None:
    """Import and rehearse; the process has one thread before and after."""
    torch.set_num_threads(1)
    if has_accelerator():
        return
    rehearse()


def rehearse() -> None:
    """Build, train one step and save as rank 0 of TINY's mesh, with nobody at the other end."""
    assert TINY.model is not None and TINY.optimizer is not None and TINY.data is not None
    dist.init_process_group("fake", store=HashStore(), rank=0, world_size=TINY.layout.world)
    device = Device(torch.device("cpu"))
    mesh = build_mesh(TINY.layout, 0, device.type)
    model = build_model(TINY.model, mesh, device, TINY.seed)
    optimizer = ShardedAdamW(list(model.named_parameters()), TINY.optimizer)
    sequences = TINY.data.global_batch // mesh.dp_size
    tokens = np.zeros((sequences, TINY.data.sequence_length), np.int64)
    Stepper(TINY, model, optimizer, mesh, device).run(1, Batch(tokens, tokens, (), 0))
    state = trainer_state(model, optimizer)
    snapshot_entries(state)
    with tempfile.TemporaryDirectory() as directory:
        save(Path(directory), 1, 0, state, None, position=0, layout={})
    dist.destroy_process_group()
