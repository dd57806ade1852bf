"""One optimizer step on the whole mesh: microbatches, one small all-reduce, clipping, AdamW.

Method: losses and gradients are *sums* over tokens until everything is added up; then one all-reduce of
three float64 over the world carries loss sum, token count and squared gradient norm, and one multiplication
of the gradients does both the division by the global token count and the clipping. So masked tokens weigh
nothing wherever they lie, any layout divides by the same number, and clipping across pipeline, tensor and
data ranks costs one message of 24 bytes. Each shard is counted once: by the rank that is number 0 on every
axis that repeats it. Norms are accumulated in float64, so they do not depend on how tensors are cut.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from myriad.spec.job import JobSpec
from myriad.storage.datasets.loader import MASKED, Batch
from myriad.training.device import Device
from myriad.training.mesh import Mesh
from myriad.training.model import Decoder, token_loss
from myriad.training.optimizer import ShardedAdamW, gradient_factor
from myriad.training.parallelize import gradient_reducer, replicated_axes_first
from myriad.training.pipeline import build_schedule
from myriad.training.sharding import reduce_in_this_backward


class EmptyBatch(ValueError):
    """Every token of a global batch is masked, so there is no mean loss."""


@dataclass(frozen=True)
class StepResult:
    """What every rank knows after a step: mean loss (nats a token), gradient norm before clipping, tokens."""

    loss: float
    grad_norm: float
    tokens: int


class Stepper:
    """Runs optimizer steps of one rank; all ranks call :meth:`run` with their parts of one batch."""

    def __init__(
        self, job: JobSpec, model: Decoder, optimizer: ShardedAdamW, mesh: Mesh, device: Device
    ) -> None:
        assert job.model is not None and job.optimizer is not None
        self._dtype, self._clip_norm = job.model.dtype, job.optimizer.clip_norm
        self._microbatches = job.layout.microbatches
        self._model, self._optimizer, self._mesh, self._device = model, optimizer, mesh, device
        self._schedule = build_schedule(job, model, mesh, device) if mesh.size("pp") > 1 else None
        self._reducer = gradient_reducer(model, mesh)
        self._counted = [replicated_axes_first(parameter, mesh) for parameter in model.parameters()]

    def run(self, number: int, batch: Batch) -> StepResult:
        """Step ``number`` (1 is the first) on this rank's sequences."""
        tokens_BT = torch.from_numpy(batch.tokens).to(self._device.torch)
        labels_BT = torch.from_numpy(batch.labels).to(self._device.torch)
        documents_BT = None
        if batch.documents is not None:
            documents_BT = torch.from_numpy(batch.documents).to(self._device.torch)
        self._optimizer.zero_grad()
        if self._reducer is not None:
            self._reducer.begin(self._microbatches)
        with self._device.autocast(self._dtype):
            loss_sum = self._forward_backward(tokens_BT, labels_BT, documents_BT)
        if self._reducer is not None:
            self._reducer.finish()
        gradients = self._optimizer.gradients
        result = self._reduce(loss_sum, labels_BT, gradients)
        factor = gradient_factor(result.grad_norm, result.tokens, self._clip_norm)
        torch._foreach_mul_(gradients, factor)
        self._optimizer.step(number, gradients)
        self._device.synchronize()
        return result

    def _forward_backward(self, tokens_BT: Tensor, labels_BT: Tensor, documents_BT: Tensor | None) -> Tensor:
        """All microbatches; the sum of this rank's token losses (0 where it has none)."""
        losses: list[Tensor] = []
        if self._schedule is None:
            count = self._microbatches
            documents = repeat(None, count) if documents_BT is None else documents_BT.chunk(count)
            parts = zip(tokens_BT.chunk(count), labels_BT.chunk(count), documents, strict=True)
            for index, (tokens, labels, of) in enumerate(parts):
                reduce_in_this_backward(self._model, index == self._microbatches - 1)
                loss = token_loss(self._model(tokens, documents=of), labels)
                loss.backward()  # type: ignore[no-untyped-call]
                losses.append(loss.detach())
        else:
            inputs = (tokens_BT,) if self._mesh.first_stage else ()
            target = labels_BT if self._mesh.last_stage else None
            # Every stage reads the same sequences, so the documents need not travel between stages.
            more: dict[str, Any] = {} if documents_BT is None else {"documents": documents_BT}
            self._schedule.step(*inputs, target=target, losses=losses, return_outputs=False, **more)
        return torch.stack(losses).detach().sum() if losses else torch.zeros((), device=self._device.torch)

    def _reduce(self, loss_sum: Tensor, labels_BT: Tensor, gradients: list[Tensor]) -> StepResult:
        """Sum loss, tokens and squared norm over the world, each counted once."""
        squared = [
            torch.linalg.vector_norm(gradient, dtype=torch.float64).square()
            for gradient, counted in zip(gradients, self._counted, strict=True)
            if counted and gradient.numel()
        ]
        totals = torch.zeros(3, dtype=torch.float64, device=self._device.torch)
        if squared:
            totals[2] = torch.stack(squared).sum()
        if self._mesh.last_stage and self._mesh.is_first("tp"):
            totals[0] = loss_sum.double()
            totals[1] = (labels_BT != MASKED).sum().double()
        if self._mesh.device_mesh is not None:
            dist.all_reduce(totals)
        loss, tokens, norm = totals.tolist()
        if tokens == 0:
            raise EmptyBatch("every label of this batch is masked; give the data set labels to learn from")
        return StepResult(loss / tokens, math.sqrt(norm) / tokens, int(tokens))
