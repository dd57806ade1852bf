"""Between a DTensor and this rank's part of it, without copying or communicating."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor


def local(tensor: Tensor | None) -> Tensor:
    """This rank's part of a DTensor, sharing its storage; a plain tensor is its own part."""
    assert tensor is not None
    tensor = tensor.detach()
    if not isinstance(tensor, DTensor):
        return tensor
    with torch.no_grad():
        part = tensor.to_local()
    return part.wait() if isinstance(part, AsyncCollectiveTensor) else part


def like(shard: Tensor, parameter: Tensor) -> Tensor:
    """This rank's ``shard`` as the DTensor that is cut as ``parameter`` is, sharing its storage."""
    if not isinstance(parameter, DTensor):
        return shard
    return DTensor.from_local(
        shard,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
