"""How long the main thread is blocked in communication, whoever was late.

Method: every path on which PyTorch makes a Python program wait for a collective or a message ends in one of
two calls, which are wrapped once per process: ``torch.distributed.Work.wait`` (plain collectives, FSDP2,
pipeline messages) and ``_functional_collectives.wait_tensor`` (DTensor, hence tensor parallelism). Our own
gradient all-reduce (``replicate``) waits through the first. Starting a collective is not counted.

Trade-off: a collective that C++ waits for by itself is not seen: torch's DistributedDataParallel waits in
its reducer at the end of ``backward``; ``watch_ddp`` puts that wait where it is seen. On an
accelerator a wait only orders streams and returns at once, so there these figures are a lower bound
(not yet run on a GPU). A wrapped wait costs about 1.5 us more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as functional
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from myriad.training.clock import StepClock

_clock: StepClock | None = None  # of the one session of this process
_installed = False


def measure(clock: StepClock | None) -> None:
    """Book waits of the main thread as communication on ``clock`` (None: on nobody)."""
    global _clock
    _clock = clock
    _install()


def _install() -> None:
    global _installed
    if _installed:
        return
    _installed = True
    work_wait: Callable[..., bool] = dist.Work.wait
    tensor_wait: Callable[[Tensor], Tensor] = functional.wait_tensor

    def wait(self: dist.Work, *args: Any, **kwargs: Any) -> bool:
        if _clock is None:
            return work_wait(self, *args, **kwargs)
        with _clock.section("communication"):
            return work_wait(self, *args, **kwargs)

    def wait_tensor(tensor: Tensor) -> Tensor:
        if _clock is None:
            return tensor_wait(tensor)
        with _clock.section("communication"):
            return tensor_wait(tensor)

    dist.Work.wait = wait  # type: ignore[method-assign]
    functional.wait_tensor = wait_tensor


def watch_ddp(model: DistributedDataParallel) -> None:
    """Make the gradient all-reduce of torch's DistributedDataParallel wait where it is seen.

    A communication hook like torch's own, which starts one all-reduce a bucket and lets them overlap with
    backward; but when the last bucket has started, nothing is left to compute, so it waits there for all of
    them instead of leaving that to C++. Raises RuntimeError where the model has a hook already.
    """
    # No annotations below: torch compares them as objects, and here they are text.
    flying: list[tuple[dist.Work, Tensor, Future[Tensor]]] = []

    def reduce(state, bucket):  # type: ignore[no-untyped-def]
        mean = bucket.buffer().div_(dist.get_world_size(model.process_group))
        work = dist.all_reduce(mean, group=model.process_group, async_op=True)
        assert work is not None
        future: Future[Tensor] = Future()
        flying.append((work, mean, future))
        if bucket.is_last():
            for each, reduced, promised in flying:
                each.wait()
                promised.set_result(reduced)
            flying.clear()
        return future

    model.register_comm_hook(None, reduce)
