"""The failures of a job and what it took to come back, from the generations' own timeline."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from myriad.control.records import AllocationRecord, GenerationRecord
from myriad.server.report_steps import Execution

# phase -> (field where it begins, field where it ends), of the generation that follows the failure
PHASES = {
    "fencing": ("begun_s", "fenced_s"),
    "start": ("fenced_s", "forked_s"),
    "rendezvous": ("forked_s", "rendezvous_s"),
    "restore": ("rendezvous_s", "restored_s"),
    "first_step": ("restored_s", "first_step_s"),
}


def recoveries(generations: Sequence[GenerationRecord], steps: Sequence[Execution]) -> list[dict[str, Any]]:
    """One entry for each failed generation that another followed, oldest first.

    ``seconds`` by phase and ``downtime_s`` (last sign of life to the end of the first new step) are None
    where the following generation did not get that far. ``queued_s`` is time without an allocation in
    between.
    """
    return [_recovery(failed, following, steps) for failed, following in pairwise(generations)]


def _recovery(
    failed: GenerationRecord, following: GenerationRecord, steps: Sequence[Execution]
) -> dict[str, Any]:
    restore_step = following.restore_step or 0
    verdict_s = following.begun_s if failed.verdict_s is None else failed.verdict_s
    failed_s = verdict_s if failed.failed_s is None else failed.failed_s
    seconds = {"detection": _between(failed_s, verdict_s)}
    for phase, (start, end) in PHASES.items():
        seconds[phase] = _between(getattr(following, start), getattr(following, end))
    return {
        "generation": failed.generation,
        "cause": failed.cause,
        "culprit_node": failed.culprit_node or None,
        "culprit_rank": failed.culprit_rank,
        "replacement": dict(failed.replacement),
        "failed_step": progress(failed, steps),
        "restore_step": restore_step,
        "tiers": list(following.tiers),
        "tier_counts": dict(sorted(Counter(following.tiers).items())),
        "lost_steps": max(0, progress(failed, steps) - restore_step),
        "seconds": seconds,
        "queued_s": _between(verdict_s, following.begun_s),
        "downtime_s": _between(failed_s, following.first_step_s),
    }


def progress(generation: GenerationRecord, steps: Sequence[Execution]) -> int:
    """The last step finished when the generation ended."""
    own = (e.step for e in steps if e.generation == generation.generation)
    return max(generation.restore_step or 0, max(own, default=0))


def timeline(
    allocations: Sequence[AllocationRecord],
    generations: Sequence[GenerationRecord],
    steps: Sequence[Execution],
) -> list[dict[str, Any]]:
    """What happened, in order; ``at_s`` counts from the first grant."""
    if not allocations:
        return []
    origin_s = allocations[0].granted_s
    found: list[dict[str, Any]] = []

    def add(at_s: float | None, event: str, generation: int | None, detail: str = "") -> None:
        if at_s is not None:
            found.append(
                {"at_s": at_s - origin_s, "event": event, "generation": generation, "detail": detail}
            )

    for allocation in allocations:
        count = len(allocation.nodes) + len(allocation.spares) + len(allocation.lost)
        add(allocation.granted_s, "granted", None, f"{count} nodes")
    for g in generations:
        add(g.forked_s, "started", g.generation, f"workers on {', '.join(g.nodes)}")
        origin = f"from step {g.restore_step}" if g.restore_step else "from the beginning"
        add(g.restored_s, "restored", g.generation, origin)
        add(g.first_step_s, "first step", g.generation, f"step {(g.restore_step or 0) + 1} finished")
        add(g.failed_s, "failed", g.generation, f"{_culprit(g)}, after step {progress(g, steps)}")
        add(g.verdict_s, "verdict", g.generation, _verdict(g))
        add(g.ended_s, "ended", g.generation, "last process gone")
    for allocation in allocations:
        add(allocation.released_s, "released", None, "nodes given back")
    return sorted(found, key=lambda event: float(event["at_s"]))


def _verdict(generation: GenerationRecord) -> str:
    moves = [f"{new} takes over from {lost}" for lost, new in generation.replacement.items()]
    return "; ".join([generation.cause or "stopped", *moves])


def _culprit(generation: GenerationRecord) -> str:
    if generation.culprit_rank is not None and generation.culprit_node:
        return f"rank {generation.culprit_rank} on {generation.culprit_node}"
    return generation.culprit_node or "no node named"


def _between(start_s: float | None, end_s: float | None) -> float | None:
    return None if start_s is None or end_s is None else max(0.0, end_s - start_s)
