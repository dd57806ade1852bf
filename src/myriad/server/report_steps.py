"""What the steps say: losses, throughput, what was executed again, and whether each sample came exactly once.

A step may have been executed several times; the one that counts is its last, which is the only one no later
generation restarted before (:func:`myriad.operations.accounts.kept_until`). Losses travel as ``float.hex``,
so equal means equal bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import median

from myriad.operations.exactly_once import Expected, seen_once
from myriad.spec.messages import StepReport


@dataclass(frozen=True, slots=True)
class Execution:
    """One execution of one step by all ranks. ``wall_s`` is the median rank's."""

    generation: int
    step: int
    kept: bool
    wall_s: float
    loss: float | None
    tokens: int
    flops: float
    samples: tuple[int, ...]


def executions(reports: Sequence[StepReport], kept: Mapping[int, int]) -> list[Execution]:
    """One per (generation, step), in that order; ``reports`` come in that order. ``kept``: see ``kept_until``."""
    found = []
    for (generation, step), group in groupby(reports, key=lambda r: (r.generation, r.step)):
        ranks = sorted(group, key=lambda r: r.rank)
        found.append(
            Execution(
                generation=generation,
                step=step,
                kept=step <= kept.get(generation, 0),
                wall_s=median(r.wall_s for r in ranks),
                loss=next((r.loss for r in ranks if r.loss is not None), None),
                tokens=max(r.tokens for r in ranks),
                flops=max(r.flops for r in ranks),
                samples=tuple(sample for r in ranks for sample in r.samples),
            )
        )
    return found


def losses(steps: Sequence[Execution]) -> list[str | None]:
    """``float.hex`` of the loss of steps 1, 2, ... in their last execution; None where no rank's report arrived."""
    last = {e.step: e.loss for e in steps if e.kept}
    values = [last.get(step) for step in range(1, max(last, default=0) + 1)]
    if all(value is None for value in values):
        return []  # a loop that reports no loss
    return [None if value is None else value.hex() for value in values]


def redone_steps(steps: Sequence[Execution]) -> int:
    """Executions that were thrown away and had to be done again."""
    return sum(1 for e in steps if not e.kept)


def redone_losses_equal(steps: Sequence[Execution]) -> bool | None:
    """Whether every step executed again gave the same loss, bit for bit; None when none was."""
    last = {e.step: e.loss for e in steps if e.kept}
    again = [(e.loss, last[e.step]) for e in steps if not e.kept and e.loss is not None and e.step in last]
    pairs = [(was.hex(), now.hex()) for was, now in again if now is not None]
    return all(was == now for was, now in pairs) if pairs else None


def samples_seen_once(
    steps: Sequence[Execution],
    global_batch: int | None,
    epoch_samples: int | None = None,
    expected: Expected | None = None,
) -> bool | None:
    """Whether the kept executions consumed each sample exactly once; None when the job reports no samples.

    ``global_batch`` None (one's own loop): as many as the first step consumed.
    """
    samples = {e.step: e.samples for e in steps if e.kept}
    if not any(samples.values()):
        return None
    batch = global_batch or len(samples.get(1, ()))
    return seen_once(samples, batch, epoch_samples=epoch_samples, expected=expected)
