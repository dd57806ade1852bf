"""Step reports summed into one account per worker: what each rank did in the steps that were kept.

Method: a step is *kept* when no later generation executed it again, which follows from the steps the later
generations restarted from. Reports are read once, grouped by (generation, step), so memory grows with
generations x ranks and not with steps. A rank whose report of a kept step never arrived (its node died with
it) is given that step's median wall time under ``other``: it was there, and nobody knows what it did.

A generation is ready, and its steps begin, when its last rank has restored. An early rank's first step began
before that: by as much as it is longer than the shortest, since all end together. That is start-up's or
recovery's time already, so it is taken off the rank's wait for the late one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from statistics import median_low

from myriad.operations.waits import Pipeline, split_waits
from myriad.spec.causes import Cause
from myriad.spec.messages import StepReport

ALL_STEPS = 2**63 - 1  # of the newest generation, every step is kept


@dataclass(slots=True)
class Account:
    """Seconds of one rank in the kept steps of one generation, by cause; the causes sum to ``wall_s``."""

    wall_s: float = 0.0
    by_cause: dict[Cause, float] = field(default_factory=dict)

    def add(self, cause: Cause, seconds: float) -> None:
        assert seconds >= 0, (cause, seconds)
        self.wall_s += seconds
        self.by_cause[cause] = self.by_cause.get(cause, 0.0) + seconds


Accounts = Mapping[tuple[int, int], Account]  # (generation, rank) -> account


def kept_until(restore_steps: Mapping[int, int]) -> dict[int, int]:
    """Generation -> the last of its steps that no later one executed again.

    ``restore_steps`` maps each generation to the step it started from (0: from the beginning).
    """
    limits, limit = {}, ALL_STEPS
    for generation in sorted(restore_steps, reverse=True):
        limits[generation] = limit
        limit = min(limit, restore_steps[generation])
    return limits


def sum_accounts(
    reports: Iterable[StepReport],
    kept: Mapping[int, int],
    world_sizes: Mapping[int, int],
    pipeline: Pipeline,
) -> dict[tuple[int, int], Account]:
    """The accounts of all ranks in the kept steps. ``reports`` come ordered by (generation, step).

    ``kept`` and ``world_sizes`` map generations to their last kept step and to their number of ranks.
    """
    accounts: dict[tuple[int, int], Account] = {}
    begun = 0  # the newest generation whose first step has been seen
    for (generation, step), group in groupby(reports, key=lambda r: (r.generation, r.step)):
        by_rank = list({report.rank: report for report in group}.values())
        first, begun = generation != begun, generation
        if step <= kept.get(generation, 0):
            _add_step(accounts, generation, by_rank, world_sizes[generation], pipeline, first)
    return accounts


def _add_step(
    accounts: dict[tuple[int, int], Account],
    generation: int,
    reports: Sequence[StepReport],
    world_size: int,
    pipeline: Pipeline,
    first: bool,
) -> None:
    waits = split_waits(reports, world_size, pipeline)
    shortest_s = min(report.wall_s for report in reports)
    for report in reports:
        rank_waits = waits[report.rank]
        early_s = min(report.wall_s - shortest_s, rank_waits.straggler_wait_s) if first else 0.0
        wall_s = report.wall_s - early_s
        parts = {
            Cause.COMPUTE: report.compute_s,
            Cause.EXPOSED_COMMUNICATION: rank_waits.exposed_communication_s,
            Cause.PIPELINE_BUBBLE: rank_waits.pipeline_bubble_s,
            Cause.STRAGGLER_WAIT: rank_waits.straggler_wait_s - early_s,
            Cause.DATA_WAIT: report.data_s,
            Cause.CHECKPOINT_WAIT: report.checkpoint_s,
            Cause.EVALUATION: report.evaluation_s,
        }
        account = accounts.setdefault((generation, report.rank), Account())
        # Sections are measured inside the step; a report whose parts exceed its wall is cut to it, never
        # believed.
        fitting = min(1.0, wall_s / total) if (total := math.fsum(parts.values())) > 0 else 1.0
        for cause, seconds in parts.items():
            account.add(cause, seconds * fitting)
        account.add(Cause.OTHER, max(0.0, wall_s - total))
    unheard = set(range(world_size)) - {report.rank for report in reports}
    if unheard:
        typical_s = median_low(report.wall_s for report in reports)
        for rank in unheard:
            accounts.setdefault((generation, rank), Account()).add(Cause.OTHER, typical_s)
