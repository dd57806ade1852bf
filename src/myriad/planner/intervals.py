"""How often to save, by tier: what a save costs against what a failure would lose.

Method: Daly's higher-order optimum for a save that stops training for ``cost_s`` and a failure every ``mtbf_s``
(Daly 2006, eq. 37; Young's formula is its first term). Each tier has its own: its failures are those it is the
nearest tier to survive. The optimum is flat: a rate twice too high costs 6 % more overhead, so an interval is rounded
to two digits and left alone until it is ``HYSTERESIS`` off.

Trade-off: the cost is the time that training stands still; what a save takes from it while both run is not in it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from myriad.spec.failures import FailureClass
from myriad.spec.fields import AUTO
from myriad.spec.job import CheckpointSpec
from myriad.spec.messages import Intervals, SaveCosts
from myriad.spec.units import format_duration

SaveTier = Literal["memory", "peer", "durable"]
# Until a save of each kind has been measured: soon, so that it is.
FIRST = Intervals(memory=1, peer=10, durable=10)
HYSTERESIS = 1.2  # a change smaller than this costs more in churn than it saves
LONGEST_S = 3600.0  # a posterior is no proof, and people look at checkpoints
STEP_MIN_S = 1e-6  # a step cannot be shorter
_WORDS = {
    FailureClass.PROCESS: "of processes",
    FailureClass.NODE: "of a node",
    FailureClass.DOMAIN: "of several nodes",
}


@dataclass(frozen=True, slots=True)
class Exposure:
    """What a tier protects against: a failure every ``mtbf_s`` seconds of the job; ``against`` says it in words."""

    mtbf_s: float
    against: str


@dataclass(frozen=True, slots=True)
class Choice:
    """The interval of each tier, and why."""

    intervals: Intervals
    why: Mapping[str, str]

    def sentences(self) -> dict[str, str]:
        """By tier: how often, and why."""
        found = {}
        for tier, why in self.why.items():
            every = getattr(self.intervals, tier)
            often = "never" if every == 0 else "every step" if every == 1 else f"every {every} steps"
            found[tier] = f"{often}, {why}"
        return found


def choose(
    wanted: CheckpointSpec,
    costs: SaveCosts | None,
    busy_s: float,
    exposures: Mapping[SaveTier, Exposure],
    current: Intervals,
) -> Choice:
    """The intervals that lose least. ``costs`` None: nothing was measured yet.

    ``busy_s`` is how long a durable checkpoint is being written, stopped or not: the next cannot begin before.
    """
    cost_s = {} if costs is None else _costs(costs)
    steps: dict[SaveTier, int] = {}
    why: dict[SaveTier, str] = {}
    fixed = _fixed(wanted)
    for tier in exposures:
        given, now = fixed[tier], getattr(current, tier)
        if given != AUTO:
            steps[tier], why[tier] = given, "as the job says"
        elif costs is not None and tier in costs.fixed:
            steps[tier], why[tier] = getattr(costs.intervals, tier), "as the program says"
        elif costs is None or not (tier in cost_s and costs.step_s > 0):
            steps[tier], why[tier] = now, "until one has been measured"
        else:
            least_s = busy_s if tier == "durable" else 0.0
            steps[tier], why[tier] = _moved(now, cost_s[tier], costs.step_s, exposures[tier], least_s)
    return Choice(Intervals(**steps), {str(tier): text for tier, text in why.items()})


def exposures(per_s: Mapping[FailureClass, float], survives_node: bool) -> dict[SaveTier, Exposure]:
    """What each tier is the nearest to survive, from the failures of a job a second. Where the loss of a node cannot be
    mended from copies and a spare, the durable checkpoint is for that as well."""

    def of(*classes: FailureClass) -> Exposure:
        mtbf_s = 1 / sum(per_s[each] for each in classes)
        what = " or ".join(_WORDS[each] for each in classes)
        return Exposure(mtbf_s, f"a failure {what} is expected every {format_duration(mtbf_s)}")

    deep = (FailureClass.DOMAIN,) if survives_node else (FailureClass.NODE, FailureClass.DOMAIN)
    return {"memory": of(FailureClass.PROCESS), "peer": of(FailureClass.NODE), "durable": of(*deep)}


def first(wanted: CheckpointSpec) -> Intervals:
    """What a job begins with."""
    fixed = _fixed(wanted)
    return Intervals(**{t: getattr(FIRST, t) if given == AUTO else given for t, given in fixed.items()})


def _moved(now: int, cost_s: float, step_s: float, exposure: Exposure, least_s: float) -> tuple[int, str]:
    best_s = max(daly_interval_s(cost_s, exposure.mtbf_s), least_s)
    best = interval_steps(best_s, step_s)
    steps = settled(now, best)
    why = (
        f"for it costs {format_duration(cost_s)}, {exposure.against}: best every "
        f"{format_duration(min(best_s, LONGEST_S))}, {best} steps of {format_duration(step_s)}"
    )
    return steps, why if steps == best else f"{why}, which is near enough"


def daly_interval_s(cost_s: float, mtbf_s: float) -> float:
    """Seconds of training between two saves, the save itself not counted."""
    assert cost_s >= 0 and mtbf_s > 0, (cost_s, mtbf_s)
    if cost_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = math.sqrt(cost_s / (2 * mtbf_s))
    return math.sqrt(2 * cost_s * mtbf_s) * (1 + ratio / 3 + ratio * ratio / 9) - cost_s


def interval_steps(seconds: float, step_s: float) -> int:
    """The interval in whole steps, two digits, at least 1 and at most an hour's."""
    steps = max(1.0, min(seconds, LONGEST_S) / max(step_s, STEP_MIN_S))
    unit = 10 ** max(0, math.floor(math.log10(steps)) - 1)
    return int(round(steps / unit) * unit)


def settled(current: int, best: int) -> int:
    """``best``, unless ``current`` is so near that a change is not worth it."""
    near = current > 0 and max(current / best, best / current) <= HYSTERESIS
    return current if near else best


def _fixed(wanted: CheckpointSpec) -> dict[SaveTier, int | Literal["auto"]]:
    return {
        "memory": wanted.snapshot_every_steps,
        "peer": wanted.peer_every_steps,
        "durable": wanted.every_steps,
    }


def _costs(costs: SaveCosts) -> dict[SaveTier, float]:
    """What was measured, by tier."""
    found: dict[SaveTier, float] = {
        "memory": costs.memory_s,
        "peer": costs.peer_s,
        "durable": costs.durable_s,
    }
    return {tier: seconds for tier, seconds in found.items() if seconds > 0}
