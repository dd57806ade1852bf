"""The classes of failure, and how often each happened where somebody counted.

Sources: Meta's RSC-1 for hardware, 6.5 failures in 1,000 node-days, and for all that ends a job, 22 (Kokolis et al.
2024); Llama 3 405B: 35 of 419 interruptions were switches and cables (Dubey et al. 2024, table 5).
"""

from __future__ import annotations

from enum import StrEnum


class FailureClass(StrEnum):
    """What a failure takes with it, which says the nearest tier that survives it."""

    PROCESS = "process"  # workers; their agents hold their snapshots
    NODE = "node"  # one node and all in its memory; another node has copies
    DOMAIN = "domain"  # several nodes at once: a rack, a switch, a power feed


# Failures per node-day, before anything was seen.
PUBLISHED_RATE = {
    FailureClass.PROCESS: 2.2e-2 - 6.5e-3,
    FailureClass.NODE: 6.5e-3,
    FailureClass.DOMAIN: 6.5e-3 * 35 / 419,
}
DAY_S = 86400.0
