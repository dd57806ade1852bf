"""How often things fail, learned as they do: a posterior of the failure rate for each class of failure.

Method: failures of a class are Poisson in node-days, with a Gamma prior whose mean is what a published fleet
measured. A cluster may be a hundred times worse than that (and an emulated one, where a test kills a node a minute,
far more), so the prior is a mixture of such Gammas at powers of ten of the mean, each as much less likely as it is
farther away. A new cluster is therefore trusted no more than its first node-days allow, two failures move the
estimate anywhere, and none bring it to what fleets have. What was seen is forgotten with its age and with each
failure that follows, so that a change is followed: half of a tenfold rise within twice ``MEMORY_FAILURES`` failures.

Trade-off: a constant rate is estimated to a third, not better.
"""

from __future__ import annotations

import math

import msgspec

from myriad.spec.failures import DAY_S

AGE_DAYS = 7.0  # what was seen this long ago counts 1/e
# And so does what was seen this many failures ago. The estimate's spread is 1/sqrt of it, which costs 1.6 % of the
# overhead that is saved; more failures would follow a change more slowly.
MEMORY_FAILURES = 8.0
PRIOR_FAILURES = 1.3  # the prior's weight: as if 1.3 failures had been seen, 200 node-days at RSC-1's rate
_SCALES = tuple(10.0**power for power in range(-1, 7))
DIGITS = 9


class Evidence(msgspec.Struct, frozen=True, omit_defaults=True):
    """Failures seen in ``node_days``, both discounted to the time ``at_s``."""

    failures: float = 0.0
    node_days: float = 0.0
    at_s: float = 0.0


def observe(evidence: Evidence, now_s: float, node_days: float, failures: int = 0) -> Evidence:
    """``evidence`` with what has been seen since: ``failures`` in ``node_days``."""
    age = max(0.0, now_s - evidence.at_s) / (AGE_DAYS * DAY_S)
    kept = math.exp(-age)
    seen = Evidence(evidence.failures * kept, evidence.node_days * kept + node_days, now_s)
    forgotten = math.exp(-failures / MEMORY_FAILURES)
    # Rounded, so that a replay on a machine with another libm yields the same bytes.
    return Evidence(
        round(seen.failures * forgotten + failures, DIGITS), round(seen.node_days * forgotten, DIGITS), now_s
    )


def rate_per_node_day(evidence: Evidence, prior_mean: float) -> float:
    """The posterior mean of failures per node-day.

    A component of the prior has the mean ``prior_mean`` x scale, shape ``PRIOR_FAILURES`` and a probability that
    falls with its scale's distance from 1; the evidence weighs it by how well it foretold it.
    """
    found = []
    for scale in _SCALES:
        days = PRIOR_FAILURES / (prior_mean * scale)
        shape, rate = PRIOR_FAILURES + evidence.failures, days + evidence.node_days
        likelihood = PRIOR_FAILURES * math.log(days) - shape * math.log(rate)
        found.append((likelihood - abs(math.log(scale)), shape / rate))
    best = max(weight for weight, _ in found)
    weights = [math.exp(weight - best) for weight, _ in found]
    return math.fsum(w * mean for w, (_, mean) in zip(weights, found, strict=True)) / math.fsum(weights)
