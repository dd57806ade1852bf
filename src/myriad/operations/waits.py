"""Why a rank stood blocked in communication: the schedule, a late rank, or the network.

Method, for one step and from durations only (timestamps of two hosts are never compared). Every step has a
collective over the whole mesh, which ends for all ranks at one moment. So the rank that waited least arrived
last, and what another rank waited beyond it is the time from its own arrival to the last one's: whatever kept
the late rank busy, and even when that was at the end of its step before (a save), where a comparison of busy
times in one step would miss it. A rank's ``communication_s`` is cut in this order:

1. ``pipeline_bubble``: with p stages, m microbatches and a stage's compute c (the median over its ranks), the
   ideal schedule takes ``(m + p - 1) / m x max(c)`` (GPipe, Huang et al. 2019, section 2; 1F1B has the same
   bubble). What it leaves a stage idle, ``ideal - c``, is due to the schedule or an unequal cut of the model.
2. ``straggler_wait``: the rank's ``communication_s + c`` of its stage beyond the smallest such sum of any
   rank. Without a pipeline c is the same for all, and this is its communication beyond that of the last rank
   to arrive.
3. ``exposed_communication``: the rest, which no rank's lateness explains.

Each part takes at most what the earlier ones left, so parts are never negative and sum to
``communication_s``.

Where it stops being exact:
* two ranks that are late at *different* collectives of one step hide behind each other, and overlapped
  collectives are not in ``communication_s``: both make ``straggler_wait`` a lower bound;
* a stage of one rank has no peers: its slowness looks like an unequal cut and counts as ``pipeline_bubble``
  (the lower median tells them apart from two ranks per stage on);
* a late start of a later stage hides in the fill of the pipeline. The hidden part is still counted as others'
  wait, by at most their exposed communication.

Cost: O(ranks) per step, about 20 us for 8 ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median_low

from myriad.spec.messages import StepReport


@dataclass(frozen=True, slots=True)
class Pipeline:
    """How a step is scheduled. Stages are consecutive blocks of ranks (pp is the mesh's outermost axis)."""

    stages: int = 1
    microbatches: int = 1

    def ideal_s(self, slowest_stage_compute_s: float) -> float:
        """The ideal schedule's seconds: fill, m microbatches at the slowest stage's pace, drain."""
        return slowest_stage_compute_s * (self.microbatches + self.stages - 1) / self.microbatches


NO_PIPELINE = Pipeline()


@dataclass(frozen=True, slots=True)
class Waits:
    """One rank's ``communication_s`` of one step, in three parts that sum to it."""

    pipeline_bubble_s: float
    straggler_wait_s: float
    exposed_communication_s: float


def split_waits(
    reports: Sequence[StepReport], world_size: int, pipeline: Pipeline = NO_PIPELINE
) -> dict[int, Waits]:
    """Rank -> the parts of its wait, for the reports of one step of one generation (one report per rank).

    A rank whose report is missing cannot be seen to be late: waiting for it counts as communication.
    """
    compute_s = _stage_compute_s(reports, world_size, pipeline)
    if not compute_s:
        return {}
    ideal_s = pipeline.ideal_s(max(compute_s.values()))
    last_s = min(report.communication_s + compute_s[report.rank] for report in reports)
    waits = {}
    for report in reports:
        own_s = compute_s[report.rank]
        bubble_s = min(report.communication_s, ideal_s - own_s) if pipeline.stages > 1 else 0.0
        left_s = report.communication_s - bubble_s
        straggler_s = min(left_s, report.communication_s + own_s - last_s)
        waits[report.rank] = Waits(bubble_s, straggler_s, left_s - straggler_s)
    return waits


def _stage_compute_s(reports: Sequence[StepReport], world_size: int, pipeline: Pipeline) -> dict[int, float]:
    """Rank -> the median compute of its pipeline stage in this step."""
    assert world_size % pipeline.stages == 0, (world_size, pipeline.stages)
    ranks_per_stage = world_size // pipeline.stages
    of_stage: dict[int, list[float]] = {}
    for report in reports:
        assert 0 <= report.rank < world_size, (report.rank, world_size)
        of_stage.setdefault(report.rank // ranks_per_stage, []).append(report.compute_s)
    typical = {stage: median_low(seconds) for stage, seconds in of_stage.items()}
    return {report.rank: typical[report.rank // ranks_per_stage] for report in reports}
