"""Sharded data parallelism (FSDP2, and HSDP where replicas exist too), applied from outside.

Method: ``fully_shard`` on every block and on the rest. Gradients are *summed* over the data-parallel ranks:
the division by the global number of tokens happens once, at the optimizer (``step``). In a pipeline the
parameters stay gathered between microbatches, because gathering them for each would multiply the traffic
by the number of microbatches; without one they are dropped after the forward pass.

Trade-off: on CPU there are no streams, so nothing of this communication is hidden (overlap 0).
"""

from __future__ import annotations

import warnings

from torch.distributed.fsdp import FSDPModule, fully_shard

from myriad.training.mesh import Mesh
from myriad.training.model import Decoder


def shard(model: Decoder, mesh: Mesh) -> None:
    """Shard the parameters of ``model`` (on the meta device) over dp_shard. No communication."""
    if mesh.size("dp_shard") == 1:
        return
    # With tp the logits are a view of a DTensor's local part; nothing here works on them in place.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view", category=UserWarning)
    submesh = mesh.sub("dp_replicate", "dp_shard")
    reshard = mesh.size("pp") == 1
    for block in model.layers.values():
        fully_shard(block, mesh=submesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=submesh, reshard_after_forward=reshard)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def reduce_in_this_backward(model: Decoder, last: bool) -> None:
    """Gradient accumulation: only the last microbatch's backward reduces the sum over the ranks."""
    if isinstance(model, FSDPModule):
        model.set_is_last_backward(last)
        model.set_requires_gradient_sync(last)
