"""One's own training loop in plain PyTorch, as it was before Myriad. ``train.py`` is the same with a few lines more.

Predicts the next byte of the standard library's own text, in one process or, where a launcher has set RANK and
WORLD_SIZE, in several with DistributedDataParallel. Seeds are fixed, so equal runs end with equal bits.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEPS, PAUSE_S = 60, 0.05  # the pause stands for a larger model
CONTEXT, BATCH, WIDTH = 16, 64, 32  # bytes seen before the predicted one, samples of a step, numbers a byte


def read_text() -> torch.Tensor:
    """One megabyte of Python as bytes, [N] uint8."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = b"".join(file.read_bytes() for file in files)[: 1 << 20]
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def order_of(text: torch.Tensor) -> torch.Tensor:
    """Every sample of the text once, shuffled. Sample i is the CONTEXT + 1 bytes from i x CONTEXT on."""
    return torch.randperm((len(text) - 1) // CONTEXT, generator=torch.Generator().manual_seed(0))


def windows(text: torch.Tensor, samples: list[int]) -> torch.Tensor:
    """[samples, CONTEXT + 1] bytes: what is seen, and what follows."""
    return text[torch.tensor(samples)[:, None] * CONTEXT + torch.arange(CONTEXT + 1)].long()


def weights_sha256(model: nn.Module) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode() + tensor.numpy().tobytes())
    return digest.hexdigest()


def main() -> None:
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Embedding(256, WIDTH),
        nn.Flatten(),
        nn.Linear(CONTEXT * WIDTH, 128),
        nn.GELU(),
        nn.Dropout(0.1),
        nn.Linear(128, 256),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    text = read_text()
    order = order_of(text)

    first = 1
    parallel = DistributedDataParallel(model) if world > 1 else model
    for number in range(first, STEPS + 1):
        samples = order[(number - 1) * BATCH + rank : number * BATCH : world].tolist()
        batch = windows(text, samples)
        loss = nn.functional.cross_entropy(parallel(batch[:, :-1]), batch[:, -1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.detach() / world
        if world > 1:
            dist.all_reduce(mean)
        if rank == 0:
            print(f"step {number}: loss {mean.item().hex()}", flush=True)
        time.sleep(PAUSE_S)

    if rank == 0:
        Path("weights.sha256").write_text(weights_sha256(model) + "\n")
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
