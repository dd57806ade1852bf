"""The training state as one flat dict of named tensors: what snapshots, checkpoints and hashes are made of.

Method: a name maps to a tensor that shares its storage with the live parameter or moment, as a DTensor where
it is sharded. A memory snapshot takes each rank's local bytes; a durable checkpoint takes the DTensors, so
it can be loaded into another layout; the final hash takes whole tensors. Names: ``model.<parameter>`` and
``optimizer.<moment>.<parameter>``; trade-off: optimizer state that is not a tensor (a scheduler's, say) is the
caller's to derive from the step.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Collection, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from myriad.storage.memory.snapshot import Snapshot
from myriad.training.optimizer import ShardedAdamW
from myriad.training.shards import like, local

State = dict[str, Tensor]
_WRAPPERS = ("module.", "_orig_mod.")  # what DistributedDataParallel and torch.compile prefix to names


class StateMismatch(ValueError):
    """A snapshot does not fit the model and optimizer it is restored into."""


def trainer_state(model: nn.Module, optimizer: ShardedAdamW) -> State:
    """Of the built-in trainer: parameters and both moments, each under its global name."""
    state: State = {}
    for name, parameter in model.named_parameters():
        first, second = optimizer.moments[name]
        state[f"model.{name}"] = parameter.detach()
        state[f"optimizer.exp_avg.{name}"] = like(first, parameter)
        state[f"optimizer.exp_avg_sq.{name}"] = like(second, parameter)
    return state


def loop_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> State:
    """Of any PyTorch loop: parameters, buffers and every tensor in the optimizer's state."""
    state: State = {}
    for name, tensor in model.state_dict().items():
        if isinstance(tensor, Tensor):
            state[f"model.{plain_name(name)}"] = tensor
    names: dict[Tensor, str] = {p: plain_name(name) for name, p in model.named_parameters()}
    for parameter, values in optimizer.state.items():
        for key, value in values.items():
            if isinstance(value, Tensor):
                state[f"optimizer.{key}.{names[parameter]}"] = value
    return state


def create_optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Optimizers make their state in the first step: take one with zero gradients, before a restore.

    What it does to the parameters does not matter, since they are overwritten next.
    """
    if optimizer.state:
        return
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def drop_unsaved_state(model: nn.Module, optimizer: torch.optim.Optimizer, saved: Collection[str]) -> None:
    """Forget the optimizer's state of parameters that were saved without: they never had a gradient before."""
    for name, parameter in model.named_parameters():
        name = plain_name(name)
        keys = [key for key, value in optimizer.state[parameter].items() if isinstance(value, Tensor)]
        if f"model.{name}" in saved and not any(f"optimizer.{key}.{name}" in saved for key in keys):
            del optimizer.state[parameter]


def plain_name(name: str) -> str:
    """A parameter's name without what wrappers put before it."""
    while name.startswith(_WRAPPERS):
        name = name.split(".", 1)[1]
    return name


def raw(tensor: Tensor) -> Any:
    """The bytes of a contiguous CPU tensor as a writable buffer that shares its storage."""
    assert tensor.is_contiguous() and tensor.device.type == "cpu", (tensor.device, tensor.stride())
    return tensor.reshape(-1).view(torch.uint8).numpy()


def snapshot_entries(state: Mapping[str, Tensor]) -> dict[str, tuple[str, tuple[int, ...], Any]]:
    """This rank's bytes of every tensor, as ``storage.memory.snapshot`` takes them. Copies from a device."""
    entries = {}
    for name, tensor in state.items():
        part = local(tensor).contiguous().cpu()
        entries[name] = (str(part.dtype).removeprefix("torch."), tuple(part.shape), raw(part))
    return entries


def copy_from_snapshot(snapshot: Snapshot, state: Mapping[str, Tensor]) -> None:
    """Overwrite every tensor of ``state`` in place. Raises StateMismatch."""
    if snapshot.entries.keys() != state.keys():
        odd = min(snapshot.entries.keys() ^ state.keys())
        raise StateMismatch(
            f"{odd} is in only one of the snapshot and the model with its optimizer: the program changed "
            "between two starts; start the job anew"
        )
    for name, tensor in state.items():
        part, entry = local(tensor), snapshot.entries[name]
        if tuple(entry.shape) != tuple(part.shape):
            raise StateMismatch(f"{name} is {tuple(part.shape)} here and {entry.shape} in the snapshot")
        if part.is_contiguous() and part.device.type == "cpu":
            snapshot.copy_into(name, raw(part))
        else:
            staging = torch.empty(part.shape, dtype=part.dtype)
            snapshot.copy_into(name, raw(staging))
            part.copy_(staging)


def tensor_sha256(state: Mapping[str, Tensor]) -> dict[str, str]:
    """SHA-256 of each *whole* tensor's bytes, the same in every layout. Collective over sharded tensors."""
    # It warns that FSDP over tp takes two all-gathers; a gather only copies, so nothing can differ by it.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    hashes = {}
    for name, tensor in state.items():
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        hashes[name] = hashlib.sha256(raw(whole.detach().contiguous().cpu())).hexdigest()
    return hashes


def mesh_sha256(state: Mapping[str, Tensor]) -> str:
    """SHA-256 over names and hashes of all tensors of all ranks, in the order of the names. Collective.

    Stages of a pipeline hold different names; where several ranks hold one, they must agree.
    """
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, tensor_sha256(state))
    merged: dict[str, str] = {}
    for hashes in everyone:
        for name, value in hashes.items():
            assert merged.setdefault(name, value) == value, f"{name} differs between its replicas"
    lines = "".join(f"{name} {value}\n" for name, value in sorted(merged.items()))
    return hashlib.sha256(lines.encode()).hexdigest()
