"""Tensor parallelism with sequence parallelism, applied to a decoder from outside.

Method: DTensor's ``parallelize_module``. Query, key, value, gate and up are split by columns, output and
down by rows (Shoeybi et al., 2019); between them the residual stream is split along the sequence, so
norms work on 1/tp of the positions and every all-reduce becomes an all-gather and a reduce-scatter
(Korthikanti et al., 2022). Pipeline stages exchange the split stream: 1/tp of the bytes.

Trade-off: the logits are gathered over the vocabulary before the loss (V x T values per sequence on each
rank); a vocabulary-parallel loss would keep them split.
"""

from __future__ import annotations

from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from myriad.training.mesh import Mesh
from myriad.training.model import Decoder

SEQUENCE = Shard(1)  # dimension T of (B, T, D)


def split_tensors(model: Decoder, mesh: Mesh) -> None:
    """Make the parameters of ``model`` (on the meta device) DTensors over tp. No communication."""
    if mesh.size("tp") == 1:
        return
    tp = mesh.sub("tp")
    for block in model.layers.values():
        parallelize_module(block, tp, block_plan(), src_data_rank=None)
    plan: dict[str, ParallelStyle] = {}
    if model.embedding is not None:
        plan["embedding"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=SEQUENCE)
    if model.head is not None:
        plan["norm"] = SequenceParallel()
        plan["head"] = ColwiseParallel(input_layouts=SEQUENCE, output_layouts=Replicate())
    if plan:
        parallelize_module(model, tp, plan, src_data_rank=None)


def block_plan() -> dict[str, ParallelStyle]:
    """How each linear layer and norm of a block is split."""
    plan: dict[str, ParallelStyle] = {
        "attention_norm": SequenceParallel(),
        "attention": gather_sequence(),
        "attention.output": RowwiseParallel(output_layouts=SEQUENCE),
        "feed_forward_norm": SequenceParallel(),
        "feed_forward": gather_sequence(),
        "feed_forward.down": RowwiseParallel(output_layouts=SEQUENCE),
    }
    for name in (
        "attention.query",
        "attention.key",
        "attention.value",
        "feed_forward.gate",
        "feed_forward.up",
    ):
        plan[name] = ColwiseParallel()
    return plan


def gather_sequence() -> PrepareModuleInput:
    """All positions on every tp rank, once for all the linear layers that read them."""
    return PrepareModuleInput(input_layouts=(SEQUENCE,), desired_input_layouts=(Replicate(),))


def check_split(model: nn.Module) -> None:
    """Every parameter must be covered by the plan: a plain one would drift apart between tp ranks."""
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor), f"{name} is not in the tensor-parallel plan"
