"""Which of a rank's snapshots are kept. Pure, so that the simulator's agents keep the same ones."""

from __future__ import annotations

from collections.abc import Mapping

NEWEST_KEPT = 2
# Durable steps written but not yet known to be committed: one in flight, one more for a slow controller.
UNCOMMITTED_KEPT = 2


def kept_steps(snapshots: Mapping[int, bool], durable_step: int) -> set[int]:
    """Of ``snapshots`` (step -> whether it is also saved durably) those to keep; ``durable_step`` is the last
    committed one, -1 for none."""
    uncommitted = sorted(step for step, durable in snapshots.items() if durable and step > durable_step)
    return {durable_step, *sorted(snapshots)[-NEWEST_KEPT:], *uncommitted[-UNCOMMITTED_KEPT:]}
