"""Which step a job restarts from, and which tier each rank reads it from.

All ranks restart from ONE step: the newest one that every rank can read. A rank can read a memory snapshot that its
own node's agent holds, a copy of it that another node's agent holds, or the newest committed durable checkpoint. So
when a node is lost its newcomer gets the copies from their holder, and when both are lost the durable step remains,
which survivors take from memory when their agents kept that step's snapshot.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from myriad.spec.messages import Tier


@dataclass(frozen=True, slots=True)
class RestorePoint:
    """``step`` None means from the beginning."""

    step: int | None
    generation: int  # of the durable checkpoint directory; 0 when no rank reads it
    tiers: tuple[Tier, ...]  # by rank
    sources: dict[int, str]  # rank -> node, of those that read a copy


def choose(
    held: Sequence[frozenset[int]],
    copies: Sequence[Mapping[int, str]],
    durable_step: int | None,
    durable_generation: int,
) -> RestorePoint:
    """``held[rank]`` are the steps whose snapshot the rank's (new) node holds, ``copies[rank]`` those of which
    another node has a copy; all of them verified."""
    common = frozenset.intersection(*(own | set(copy) for own, copy in zip(held, copies, strict=True)))
    newest = max(common, default=None)
    if newest is not None and (durable_step is None or newest >= durable_step):
        step, rest = newest, None
    elif durable_step is None:
        none: Tier = "none"
        return RestorePoint(None, 0, (none,) * len(held), {})
    else:
        step, rest = durable_step, durable_generation
    tiers: list[Tier] = []
    sources: dict[int, str] = {}
    for rank, (own, copy) in enumerate(zip(held, copies, strict=True)):
        if step in own:
            tiers.append("memory")
        elif step in copy:
            tiers.append("peer")
            sources[rank] = copy[step]
        else:
            assert rest is not None
            tiers.append("durable")
    return RestorePoint(step, rest or 0, tuple(tiers), sources)
