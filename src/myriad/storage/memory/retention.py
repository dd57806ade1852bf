"""Which of a rank's snapshots are kept. Pure, so that the simulator's agents keep the same ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

NEWEST_KEPT = 2
# Durable steps written but not yet known to be committed: one in flight, one more for a slow controller.
UNCOMMITTED_KEPT = 2
# Ranks wait at a peer step until their copy of the one before is made. So while one rank has just taken step s and
# copied s - k, another may still be copying s - k, and has only s - 2k at its holder: all three must be there.
PEER_KEPT = 3


class Use(NamedTuple):
    """What a snapshot is good for when newer ones exist: the same state is being saved durably, or copied."""

    durable: bool = False
    peer: bool = False


def kept_steps(snapshots: Mapping[int, Use], durable_step: int) -> set[int]:
    """Of ``snapshots`` (by step) those to keep; ``durable_step`` is the last committed one, -1 for none."""
    uncommitted = sorted(step for step, use in snapshots.items() if use.durable and step > durable_step)
    copied = sorted(step for step, use in snapshots.items() if use.peer)
    return {
        durable_step,
        *sorted(snapshots)[-NEWEST_KEPT:],
        *uncommitted[-UNCOMMITTED_KEPT:],
        *copied[-PEER_KEPT:],
    }
