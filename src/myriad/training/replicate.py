"""Replicated data parallelism: gradients summed over dp_replicate in buckets while backward still runs.

Method: as in torch's DistributedDataParallel (Li et al., 2020), parameters are put into buckets in reverse
order of use, and a bucket's all-reduce starts as soon as its last gradient of the last microbatch is there.
Why not that class itself: it rebuilds its buckets after the first step in the order in which gradients
arrived. A ring all-reduce adds its terms in an order that depends on the place in the bucket, so on three
ranks or more a job restarted at step n would add in another order than the one that never stopped, and its
losses would differ in the last bits. Here the buckets depend on the parameters alone. It also works inside
a pipeline and on DTensors, and its waiting is visible to ``commtime``.

Trade-off: gradients are copied into and out of the bucket (a memory pass each way).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from myriad.training.shards import local

BUCKET_BYTES = 25 << 20  # torch's default: large enough for full bandwidth, small enough to start early


class GradientReducer:
    """Sums gradients over ``group`` (None: over nobody) and completes tensor-parallel partial sums.

    Under sequence parallelism the gradients of norms and embedding are partial sums over tp, which nothing
    completes unless FSDP does. Call :meth:`begin` before a step's backward passes and :meth:`finish` after.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], group: dist.ProcessGroup | None) -> None:
        self._group = group
        self._bucket_of: dict[nn.Parameter, int] = {}
        self._buckets = fixed_buckets(parameters)
        for number, bucket in enumerate(self._buckets):
            for parameter in bucket:
                self._bucket_of[parameter] = number
                parameter.register_post_accumulate_grad_hook(self._ready)  # type: ignore[no-untyped-call]
        self._microbatches = 0
        self._seen: dict[nn.Parameter, int] = {}
        self._missing: list[int] = []
        self._flying: list[tuple[int, Tensor, dist.Work]] = []

    def begin(self, microbatches: int) -> None:
        """A step of so many backward passes starts."""
        self._microbatches = microbatches
        self._seen = dict.fromkeys(self._bucket_of, 0)
        self._missing = [len(bucket) for bucket in self._buckets]

    def finish(self) -> None:
        """Wait until every gradient is the sum over the group, in place."""
        assert not any(self._missing), f"{sum(self._missing)} parameters had no gradient"
        for number, flat, work in self._flying:
            work.wait()
            offset = 0
            for parameter in self._buckets[number]:
                grad = local(parameter.grad)
                grad.copy_(flat[offset : offset + grad.numel()].view_as(grad))
                offset += grad.numel()
        self._flying.clear()

    def _ready(self, parameter: Tensor) -> None:
        assert isinstance(parameter, nn.Parameter)
        self._seen[parameter] += 1
        if self._seen[parameter] < self._microbatches:
            return
        complete(parameter)
        number = self._bucket_of[parameter]
        self._missing[number] -= 1
        if self._missing[number] == 0 and self._group is not None:
            flat = torch.cat([local(p.grad).reshape(-1) for p in self._buckets[number]])
            work = dist.all_reduce(flat, group=self._group, async_op=True)
            assert work is not None
            self._flying.append((number, flat, work))


def fixed_buckets(parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Buckets of at most BUCKET_BYTES (or one parameter), of one dtype, last parameters first."""
    buckets: list[list[nn.Parameter]] = []
    size = 0
    for parameter in reversed(parameters):
        nbytes = local(parameter).numel() * parameter.element_size()
        if not buckets or size + nbytes > BUCKET_BYTES or buckets[-1][0].dtype != parameter.dtype:
            buckets.append([])
            size = 0
        buckets[-1].append(parameter)
        size += nbytes
    return buckets


def complete(parameter: nn.Parameter) -> None:
    """Cut a gradient as its parameter is cut: over tp it may be a partial sum (of the positions there)."""
    grad = parameter.grad
    if (
        isinstance(grad, DTensor)
        and isinstance(parameter, DTensor)
        and grad.placements != parameter.placements
    ):
        parameter.grad = grad.redistribute(placements=parameter.placements)
