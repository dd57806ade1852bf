"""Which step a job restarts from, and which tier each rank reads it from.

All ranks restart from ONE step: the newest one that every rank can read. A rank can read a memory
snapshot that its own node's agent holds, or the newest committed durable checkpoint; a newcomer has
no snapshot, so the loss of a node means the durable step, which survivors take from memory when their
agents kept that step's snapshot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from myriad.spec.messages import Tier


@dataclass(frozen=True, slots=True)
class RestorePoint:
    """``step`` None means from the beginning."""

    step: int | None
    generation: int  # of the durable checkpoint directory; 0 when no rank reads it
    tiers: tuple[Tier, ...]  # by rank


def choose(
    held: Sequence[frozenset[int]],
    durable_step: int | None,
    durable_generation: int,
) -> RestorePoint:
    """``held[rank]`` are the steps whose snapshot the rank's (new) node holds, verified."""
    common: set[int] = set(held[0]) if held else set()
    for steps in held[1:]:
        common &= set(steps)
    newest = max(common, default=None)
    tiers: tuple[Tier, ...]
    if newest is not None and (durable_step is None or newest >= durable_step):
        tiers = _all("memory", held)
        return RestorePoint(newest, 0, tiers)
    if durable_step is None:
        tiers = _all("none", held)
        return RestorePoint(None, 0, tiers)
    tiers = tuple("memory" if durable_step in steps else "durable" for steps in held)
    return RestorePoint(durable_step, durable_generation, tiers)


def _all(tier: Tier, held: Sequence[frozenset[int]]) -> tuple[Tier, ...]:
    return (tier,) * len(held)
