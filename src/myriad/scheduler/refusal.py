"""Why a job is not placed, as a sentence a person can act on.

A sentence is built next to the decision from the same numbers, is deterministic, and is the one that
the command line, the API and the dashboard show. Codes are Slurm's words for a pending job's reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from myriad.cluster import ClusterState, NodeState

# never: no state of this cluster runs it as written. limit: it would need more than there is or than it
# may have. turn: it fits the cluster and waits for nodes that others hold.
RefusalTier = Literal["never", "limit", "turn"]

MAX_JOBS_NAMED = 3  # a sentence names this many of the jobs ahead, so that it stays one line


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why not: how final it is, Slurm's word for it, and the sentence."""

    tier: RefusalTier
    code: str
    sentence: str


def counted(number: int, what: str) -> str:
    """``1 node``, ``2 nodes``."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def demand(nodes: int, spares: int, node_type: str | None) -> str:
    """``needs 5 nodes (4 and 1 spare) of type small``."""
    parts = [f"needs {counted(nodes + spares, 'node')}"]
    if spares:
        parts.append(f"({nodes} and {counted(spares, 'spare')})")
    if node_type is not None:
        parts.append(f"of type {node_type}")
    return " ".join(parts)


def not_free(cluster: ClusterState, node_type: str | None) -> str:
    """What the nodes that are not free do: `` (3 busy, 1 down)``, or nothing when all are free."""
    others = [
        f"{tally.nodes} {state.value}"
        for state, tally in cluster.by_state(node_type).items()
        if state is not NodeState.FREE
    ]
    return f" ({', '.join(others)})" if others else ""


def behind(sentence: str, ahead: Sequence[str]) -> str:
    """The sentence, with the jobs that were considered first in this pass."""
    if not ahead:
        return sentence
    named = ", ".join(ahead[:MAX_JOBS_NAMED])
    more = len(ahead) - MAX_JOBS_NAMED
    return f"{sentence}; behind {named}" + (f" and {more} more" if more > 0 else "")
