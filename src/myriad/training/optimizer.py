"""AdamW on this rank's shards, the learning rate as a function of the step, and clipping.

Method: AdamW works element by element, so it needs no DTensor: torch's fused AdamW runs on the local shards,
which share their storage with the sharded parameters (per-tensor DTensor dispatch costs about 50 us an
operation, a dozen operations a parameter). Norm weights and everything one-dimensional are not decayed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from myriad.spec.job import OptimizerSpec
from myriad.training.shards import local


class ShardedAdamW:
    """AdamW over the local shards of named parameters. ``moments`` are its state, by parameter name."""

    def __init__(self, named: Sequence[tuple[str, nn.Parameter]], spec: OptimizerSpec) -> None:
        self._spec = spec
        self._parameters = [parameter for _, parameter in named]
        self._shards = [local(parameter) for parameter in self._parameters]
        decayed = [s for s, p in zip(self._shards, self._parameters, strict=True) if p.ndim >= 2]
        plain = [s for s, p in zip(self._shards, self._parameters, strict=True) if p.ndim < 2]
        groups = [
            {"params": decayed, "weight_decay": spec.weight_decay},
            {"params": plain, "weight_decay": 0.0},
        ]
        self._adamw = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=spec.learning_rate,
            betas=(spec.beta1, spec.beta2),
            eps=spec.eps,
            fused=True,
        )
        self.moments: dict[str, tuple[Tensor, Tensor]] = {}
        for (name, _), shard in zip(named, self._shards, strict=True):
            first, second = torch.zeros_like(shard), torch.zeros_like(shard)
            self._adamw.state[shard] = {
                "step": torch.zeros((), dtype=torch.float32, device=shard.device),
                "exp_avg": first,
                "exp_avg_sq": second,
            }
            self.moments[name] = (first, second)

    @property
    def gradients(self) -> list[Tensor]:
        """This rank's shard of every gradient, in the order of the parameters."""
        return [local(parameter.grad) for parameter in self._parameters]

    def step(self, number: int, gradients: Sequence[Tensor]) -> None:
        """Apply step ``number`` (1 is the first)."""
        rate = learning_rate(self._spec, number)
        for group in self._adamw.param_groups:
            group["lr"] = rate
        for parameter, shard, gradient in zip(self._parameters, self._shards, gradients, strict=True):
            assert shard.data_ptr() == local(parameter).data_ptr(), "a shard has moved"
            shard.grad = gradient
        self._adamw.step()
        for shard in self._shards:
            shard.grad = None

    def zero_grad(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    def restored(self, step: int) -> None:
        """Moments were overwritten with those after ``step``: count the bias correction on from there."""
        for state in self._adamw.state.values():
            state["step"].fill_(step)


def learning_rate(spec: OptimizerSpec, step: int) -> float:
    """Of step ``step`` (1 is the first): linear from 0 over the warmup, then a cosine to the minimum.

    A function of the step alone, so a restart needs no scheduler state. The last step gets the minimum.
    """
    if step <= spec.warmup_steps:
        return spec.learning_rate * step / spec.warmup_steps
    done = (step - spec.warmup_steps) / max(1, spec.steps - spec.warmup_steps)
    cosine = 0.5 * (1.0 + math.cos(math.pi * min(1.0, done)))
    return spec.min_learning_rate + (spec.learning_rate - spec.min_learning_rate) * cosine


def gradient_factor(norm: float, tokens: float, clip_norm: float | None) -> float:
    """What summed gradients are multiplied by: 1 / tokens, and less where their norm exceeds the limit.

    ``norm`` is that of the mean gradient. The small term is torch's, against division by zero.
    """
    clip = 1.0 if clip_norm is None else min(1.0, clip_norm / (norm + 1e-6))
    return clip / tokens
