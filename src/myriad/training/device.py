"""All that depends on the kind of accelerator: where tensors live, what carries collectives, timing.

Method: ``torch.accelerator`` names the device of whatever backend PyTorch was built with, so nothing here
or elsewhere names a vendor. ``cpu`` is tested; ``cuda`` has not yet been run on a GPU.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Device:
    """The device of one worker."""

    torch: torch.device

    @property
    def type(self) -> str:
        return self.torch.type

    @property
    def backend(self) -> str:
        """Name of the collective backend: gloo on CPU, nccl on CUDA, what a vendor registered elsewhere."""
        return dist.get_default_backend_for_device(self.torch)

    def synchronize(self) -> None:
        """Wait until queued work is done, so that a clock read after it is a time of the device."""
        if self.type != "cpu":
            torch.accelerator.synchronize()

    def autocast(self, dtype: str) -> AbstractContextManager[object]:
        """Matrix products in bfloat16 where the model's dtype asks for it."""
        if dtype == "bfloat16":
            return torch.autocast(self.type, torch.bfloat16)
        return nullcontext()


def has_accelerator() -> bool:
    """Asks the driver without initialising it, so the template may call it before forking."""
    return torch.accelerator.is_available()


def pick_device(local_rank: int) -> Device:
    """The accelerator number ``local_rank`` of this node, or the CPU where there is none."""
    if not has_accelerator():
        return Device(torch.device("cpu"))
    torch.accelerator.set_device_index(local_rank % torch.accelerator.device_count())
    kind = torch.accelerator.current_accelerator()
    assert kind is not None
    return Device(torch.device(kind.type, torch.accelerator.current_device_index()))
