"""What an allocation was worth: effective accelerators, ETTR and the largest loss.

Both are ratios of the ledger's lines to the time owned, so they count start-up and failures:
* effective accelerators = useful compute accelerator-seconds / wall time;
* ETTR = productive / (productive + unproductive) time of the accelerators that held ranks, where productive
  is all of the kept steps but their checkpoints (Kokolis et al. 2024, arXiv 2410.21680, section II). Idle
  spares and dead nodes are not the job's running time and are left out, as there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from myriad.spec.causes import Cause

PRODUCTIVE = (
    Cause.COMPUTE,
    Cause.ACTIVATION_RECOMPUTE,
    Cause.EXPOSED_COMMUNICATION,
    Cause.PIPELINE_BUBBLE,
    Cause.DATA_WAIT,
    Cause.STRAGGLER_WAIT,
    Cause.EVALUATION,
    Cause.RUNNING_UNATTRIBUTED,
)
NOT_RUNNING = (Cause.SPARE_IDLE, Cause.NODE_DOWN)


@dataclass(frozen=True, slots=True)
class Loss:
    """A ledger line, in accelerator-seconds and as the accelerators that did nothing else all the time."""

    cause: Cause
    accelerator_seconds: float
    accelerators: float


def effective_accelerators(ledger: Mapping[Cause, float], wall_s: float) -> float | None:
    """Accelerators that computed all the time would have done the same; None where compute is not measured."""
    if Cause.COMPUTE not in ledger or wall_s <= 0:
        return None
    return ledger[Cause.COMPUTE] / wall_s


def ettr(ledger: Mapping[Cause, float]) -> float | None:
    """Effective training time ratio in [0, 1]; None for an empty ledger."""
    running = sum(seconds for cause, seconds in ledger.items() if cause not in NOT_RUNNING)
    return sum(ledger.get(cause, 0.0) for cause in PRODUCTIVE) / running if running > 0 else None


def largest_loss(ledger: Mapping[Cause, float], wall_s: float) -> Loss | None:
    """The greatest line that is no useful work (compute, or running time nobody measured); None if all are zero."""
    useful = (Cause.COMPUTE, Cause.RUNNING_UNATTRIBUTED)
    losses = {cause: seconds for cause, seconds in ledger.items() if cause not in useful and seconds > 0}
    if not losses or wall_s <= 0:
        return None
    cause = max(losses, key=lambda c: losses[c])
    return Loss(cause, losses[cause], losses[cause] / wall_s)
