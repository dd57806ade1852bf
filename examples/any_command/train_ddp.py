"""An ordinary PyTorch program: DistributedDataParallel on the standard library's own text.

It knows nothing of Myriad. Rank, world size and master come from the environment, as torchrun and most launchers
set them; every ``--save-every`` steps rank 0 replaces its checkpoint atomically, and a start that finds one goes on
from it. The text, the batches and the first weights follow from fixed seeds, so equal runs end with equal bits.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sysconfig
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

CONTEXT, BATCH, WIDTH = 16, 32, 32  # bytes seen before the predicted one, samples of a rank, numbers a byte


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Predict the next byte of the standard library.")
    parser.add_argument("--folder", type=Path, default=Path("runs"), help="for checkpoint and weights.sha256")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--save-every", type=int, default=10, metavar="STEPS")
    parser.add_argument("--pause", type=float, default=0.05, metavar="S", help="a step of a larger model")
    return parser.parse_args()


def read_text() -> torch.Tensor:
    """One megabyte of Python as bytes, [N] uint8."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = b"".join(file.read_bytes() for file in files)[: 1 << 20]
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def batch_of(text: torch.Tensor, step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Contexts [BATCH, CONTEXT] and the bytes that follow them [BATCH], the same whenever asked again."""
    generator = torch.Generator().manual_seed(step * 4096 + rank)
    starts = torch.randint(len(text) - CONTEXT, (BATCH,), generator=generator)
    windows = text[starts[:, None] + torch.arange(CONTEXT + 1)].long()
    return windows[:, :-1], windows[:, -1]


def save(file: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """The file is the old checkpoint or the new one, never half of one."""
    temporary = file.with_suffix(".tmp")
    with temporary.open("wb") as out:
        torch.save({"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}, out)
        os.fsync(out.fileno())
    temporary.replace(file)


def load(file: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Steps that are done already: 0 without a checkpoint."""
    if not file.exists():
        return 0
    state = torch.load(file, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return int(state["step"])


def weights_sha256(model: nn.Module) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode() + tensor.numpy().tobytes())
    return digest.hexdigest()


def main() -> None:
    chosen = options()
    chosen.folder.mkdir(parents=True, exist_ok=True)
    checkpoint = chosen.folder / "checkpoint.pt"

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Embedding(256, WIDTH),
        nn.Flatten(),
        nn.Linear(CONTEXT * WIDTH, 128),
        nn.GELU(),
        nn.Linear(128, 256),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    done = load(checkpoint, model, optimizer)
    parallel = DistributedDataParallel(model)
    text = read_text()
    print(f"rank {rank} of {dist.get_world_size()} begins after step {done}", flush=True)

    for step in range(done + 1, chosen.steps + 1):
        contexts, following = batch_of(text, step, rank)
        loss = nn.functional.cross_entropy(parallel(contexts), following)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep(chosen.pause)
        if rank == 0 and step % chosen.save_every == 0:
            save(checkpoint, step, model, optimizer)
            print(f"step {step}: loss of rank 0 {loss.item():.4f}, saved", flush=True)

    if rank == 0:
        (chosen.folder / "weights.sha256").write_text(weights_sha256(model) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
