"""From a job and a mesh to this rank's part of the model, ready to train.

Method: the stage's modules are built on the meta device (no memory), split over tp, sharded over dp_shard,
and only then given memory. Each parameter is drawn *whole* from a generator of its own, seeded by (job
seed, parameter name), and this rank keeps its slice: every layout starts from the same numbers, bit for
bit, and no rank needs more than its shards plus one whole parameter. Trade-off: each rank draws all
parameters of its stage (about 5 ns a number).
"""

from __future__ import annotations

import hashlib
import math

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from myriad.spec.job import ModelSpec
from myriad.training.device import Device
from myriad.training.mesh import Mesh
from myriad.training.model import Decoder, StageSpan
from myriad.training.replicate import GradientReducer
from myriad.training.sharding import shard
from myriad.training.shards import local
from myriad.training.tensor_parallel import check_split, split_tensors

# With bfloat16 the matrix products run in it (autocast) while parameters and moments stay float32.
PARAMETER_DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.float32}
EMBEDDING_STD = 0.02  # GPT-2's, for every matrix


def build_model(spec: ModelSpec, mesh: Mesh, device: Device, seed: int) -> Decoder:
    """This rank's shards of its pipeline stage, initialised from ``seed``. No communication."""
    span = StageSpan.of(spec.layers, mesh.coordinate("pp"), mesh.size("pp"))
    with torch.device("meta"):
        model = Decoder(spec, span).to(PARAMETER_DTYPES[spec.dtype])
    split_tensors(model, mesh)
    if mesh.size("tp") > 1:
        check_split(model)
    shard(model, mesh)
    model.to_empty(device=device.torch)
    initialise(model, spec, seed)
    return model


def gradient_reducer(model: Decoder, mesh: Mesh) -> GradientReducer | None:
    """What FSDP does not do: sum over dp_replicate, and complete partial sums over tp."""
    if mesh.size("dp_shard") > 1 or mesh.size("dp_replicate") * mesh.size("tp") == 1:
        return None
    group: dist.ProcessGroup | None = None
    if mesh.size("dp_replicate") > 1:
        group = mesh.group("dp_replicate")
    return GradientReducer(list(model.parameters()), group)


@torch.no_grad()
def initialise(model: Decoder, spec: ModelSpec, seed: int) -> None:
    """Fill every parameter in place with this rank's slice of the global initial value."""
    for name, parameter in model.named_parameters():
        whole = initial_value(name, parameter.shape, spec.layers, seed).to(parameter.dtype)
        if isinstance(parameter, DTensor):
            whole = distribute_tensor(
                whole.to(parameter.device), parameter.device_mesh, parameter.placements, src_data_rank=None
            )
        local(parameter).copy_(local(whole))


def initial_value(name: str, shape: torch.Size, layers: int, seed: int) -> Tensor:
    """The global initial value of a parameter (float32, CPU): a function of (seed, name, shape) alone.

    Norm weights are 1; matrices are normal with std 0.02, those that write to the residual stream with
    0.02 / sqrt(2 * layers) (Radford et al., 2019).
    """
    if len(shape) == 1:
        return torch.ones(shape)
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))
    std = EMBEDDING_STD
    if name.endswith(("attention.output.weight", "feed_forward.down.weight")):
        std /= math.sqrt(2 * layers)
    return torch.empty(shape).normal_(0.0, std, generator=generator)


def replicated_axes_first(parameter: nn.Parameter, mesh: Mesh) -> bool:
    """Whether this rank counts ``parameter`` in sums over the mesh: number 0 on each axis that repeats it."""
    axes = {"dp_replicate", "dp_shard", "tp"}
    if isinstance(parameter, DTensor):
        names = parameter.device_mesh.mesh_dim_names or ()
        for name, placement in zip(names, parameter.placements, strict=True):
            if not placement.is_replicate():  # not is_shard(): FSDP over tp makes strided shards
                axes.discard(name)
    return mesh.is_first(*axes)
