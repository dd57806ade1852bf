"""Learning rate, clipping and AdamW against their textbook forms."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from myriad.spec.job import OptimizerSpec
from myriad.training.optimizer import ShardedAdamW, gradient_factor, learning_rate
from myriad.training.replicate import BUCKET_BYTES, fixed_buckets

SPEC = OptimizerSpec(steps=110, learning_rate=1.0, min_learning_rate=0.1, warmup_steps=10)


@pytest.mark.parametrize(
    ("step", "want"),
    [(1, 0.1), (5, 0.5), (10, 1.0), (60, 0.55), (110, 0.1), (35, 0.1 + 0.9 * (2 + 2**0.5) / 4)],
)
def test_learning_rate(step: int, want: float) -> None:
    assert learning_rate(SPEC, step) == pytest.approx(want, rel=1e-12)


def test_learning_rate_without_warmup_or_decay_room() -> None:
    flat = SPEC.model_copy(update={"warmup_steps": 0})
    assert learning_rate(flat, 1) < 1.0
    assert learning_rate(SPEC.model_copy(update={"steps": 10}), 10) == 1.0


def test_gradient_factor_divides_and_clips() -> None:
    assert gradient_factor(norm=0.5, tokens=4, clip_norm=1.0) == 0.25
    assert gradient_factor(norm=2.0, tokens=4, clip_norm=1.0) == pytest.approx(0.125, rel=1e-6)
    assert gradient_factor(norm=2.0, tokens=4, clip_norm=None) == 0.25
    assert math.isnan(gradient_factor(norm=math.nan, tokens=1, clip_norm=1.0)) is False


def test_equals_torch_adamw_with_its_clipping() -> None:
    torch.manual_seed(0)
    ours = nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 3)).double()
    theirs = nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 3)).double()
    theirs.load_state_dict(ours.state_dict())
    spec = SPEC.model_copy(update={"weight_decay": 0.3})
    sharded = ShardedAdamW(list(ours.named_parameters()), spec)
    groups = [
        {"params": [p for p in theirs.parameters() if p.ndim >= 2], "weight_decay": 0.3},
        {"params": [p for p in theirs.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    reference = torch.optim.AdamW(groups, lr=1.0, betas=(spec.beta1, spec.beta2), eps=spec.eps)
    for step in range(1, 6):
        x = torch.randn(4, 5, dtype=torch.float64)
        for model in (ours, theirs):
            model.zero_grad()
            model(x).square().sum().backward()
        norm = nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
        for group in reference.param_groups:
            group["lr"] = learning_rate(spec, step)
        reference.step()
        gradients = sharded.gradients
        torch._foreach_mul_(gradients, gradient_factor(norm.item(), 1, 0.5))
        sharded.step(step, gradients)
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.allclose(mine, other, rtol=1e-10, atol=1e-12)


def test_buckets_depend_on_the_parameters_alone() -> None:
    big = BUCKET_BYTES // 4
    parameters = [nn.Parameter(torch.empty(n)) for n in (10, 20, big - 25, 30)]
    buckets = fixed_buckets(parameters)
    assert [[p.numel() for p in bucket] for bucket in buckets] == [[30], [big - 25, 20], [10]]
    mixed = [nn.Parameter(torch.empty(2)), nn.Parameter(torch.empty(2, dtype=torch.float64))]
    assert [len(bucket) for bucket in fixed_buckets(mixed)] == [1, 1]
