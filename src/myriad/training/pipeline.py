"""Pipeline parallelism through ``torch.distributed.pipelining``.

Method: one stage per rank along pp and one schedule object that runs all microbatches of a step, forward
and backward: ``1f1b`` (memory of at most pp microbatches) or ``gpipe`` (all forwards first). Shapes are
given to the stage at construction: otherwise its first step would exchange them, which costs a run
of the model and a round trip per stage at every restart. Trade-off: one stage per rank, so the bubble is
(pp - 1) / (microbatches + pp - 1) of a step.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

from myriad.spec.job import JobSpec
from myriad.training.device import Device
from myriad.training.mesh import Mesh
from myriad.training.model import Decoder, token_loss
from myriad.training.parallelize import PARAMETER_DTYPES

SCHEDULES: dict[str, type[PipelineScheduleSingle]] = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}


def build_schedule(job: JobSpec, model: Decoder, mesh: Mesh, device: Device) -> PipelineScheduleSingle:
    """The schedule that runs this rank's stage. No communication."""
    stage = PipelineStage(
        model,
        mesh.coordinate("pp"),
        mesh.size("pp"),
        device.torch,
        input_args=(boundary(job, mesh, "input"),),
        output_args=(boundary(job, mesh, "output"),),
        group=mesh.group("pp"),
    )
    make = SCHEDULES[job.layout.schedule]
    return make(stage, job.layout.microbatches, loss_fn=token_loss, scale_grads=False)


def boundary(job: JobSpec, mesh: Mesh, side: str) -> Tensor:
    """Shape and dtype (on meta) of one microbatch where it enters or leaves this rank's stage."""
    assert job.model is not None and job.data is not None
    sequences = job.data.global_batch // (mesh.dp_size * job.layout.microbatches)
    length = job.data.sequence_length
    dtype = PARAMETER_DTYPES[job.model.dtype]
    if side == "input" and mesh.first_stage:
        return torch.empty(sequences, length, dtype=torch.int64, device="meta")
    if side == "output" and mesh.last_stage:
        logits = torch.bfloat16 if job.model.dtype == "bfloat16" else dtype
        return torch.empty(sequences, length, job.model.vocab_size, dtype=logits, device="meta")
    split = length // mesh.size("tp")  # sequence parallelism: each tp rank passes on its own positions
    return torch.empty(sequences, split, job.model.dim, dtype=dtype, device="meta", requires_grad=True)
