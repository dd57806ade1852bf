"""Which node of an allocation held ranks, idled as a spare, was down, or was not there, and when.

An :class:`AllocationRecord` keeps where its nodes ended; how they came there follows from the generations: a
generation's nodes hold ranks until the verdict on it, a lost node is down from the failure of the last generation
it was in, and a replacement held no ranks before. Replacements come from the spares first and from the cluster's
free nodes only then, which tells those that were idle spares since the grant from those that joined later.

Where it stops: after a requeue a job may get fewer spares than it asked for; were it then also given a free node
in place of a lost one, that node would be counted as a spare from the grant on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from myriad.cluster.state import NodeState
from myriad.control.records import AllocationRecord, GenerationRecord, NodeRecord
from myriad.operations.ledger import Role, Tenure

Span = tuple[Role, float, float]


def node_tenures(
    allocation: AllocationRecord,
    generations: Sequence[GenerationRecord],
    nodes: Mapping[str, NodeRecord],
    spares: int,
    released_s: float,
) -> dict[str, tuple[Tenure, ...]]:
    """Node -> its roles from the grant to ``released_s``. ``generations`` are the allocation's, oldest first.

    ``spares`` is how many the job asked for.
    """
    starts_s = [allocation.granted_s, *(g.begun_s for g in generations[1:]), released_s]
    since_grant = _since_grant(allocation, generations, spares)
    return {
        name: _tile(
            [
                span
                for index, generation in enumerate(generations)
                for span in _spans(
                    allocation,
                    generations,
                    index,
                    name,
                    Role.SPARE if name in since_grant else Role.AWAY,
                    (starts_s[index], starts_s[index + 1]),
                    _down_s(name, allocation, generations, nodes[name]),
                )
            ],
            allocation.granted_s,
            released_s,
        )
        for name in _names(allocation, generations)
    }


def _names(allocation: AllocationRecord, generations: Sequence[GenerationRecord]) -> list[str]:
    """All nodes that were ever in the allocation, each once."""
    ran = [name for g in generations for name in g.nodes]
    return list(dict.fromkeys([*ran, *allocation.nodes, *allocation.spares, *allocation.lost]))


def _since_grant(
    allocation: AllocationRecord, generations: Sequence[GenerationRecord], spares: int
) -> set[str]:
    """The nodes of the first generation, and those that must have been its spares."""
    first = generations[0].nodes if generations else allocation.nodes
    later = list(dict.fromkeys(name for g in generations[1:] for name in g.nodes if name not in first))
    idle = [name for name in _names(allocation, generations) if name not in first and name not in later]
    return {*first, *[*idle, *later][: max(spares, len(idle))]}


def _down_s(
    name: str, allocation: AllocationRecord, generations: Sequence[GenerationRecord], node: NodeRecord
) -> float | None:
    """When a lost node of the allocation went down; None for one that did not."""
    last = next((g for g in reversed(generations) if name in g.nodes), None)
    if last is None:  # an idle spare
        lost = name in allocation.lost and node.state is NodeState.DOWN
        return node.since_s if lost else None
    unreplaced = last is generations[-1] and last.culprit_node == name and last.culprit_rank is None
    if name in allocation.lost or unreplaced:
        return last.verdict_s if last.failed_s is None else last.failed_s
    return None


def _spans(
    allocation: AllocationRecord,
    generations: Sequence[GenerationRecord],
    index: int,
    name: str,
    before: Role,
    during: tuple[float, float],
    down_s: float | None,
) -> list[Span]:
    """The roles of a node while generation ``index`` was the newest; ``before`` is its role until it first ran."""
    start_s, end_s = during
    if name in generations[index].nodes:
        role = Role.RANKS
    elif not any(name in g.nodes for g in generations[:index]):
        role = before
    elif name in allocation.spares or any(name in g.nodes for g in generations[index:]):
        role = Role.SPARE  # moved away from, and kept
    else:
        role = Role.AWAY if down_s is None else Role.DOWN
    ran_later = any(name in g.nodes for g in generations[index + 1 :])
    if down_s is None or ran_later:
        return [(role, start_s, end_s)]
    dies_s = min(max(down_s, start_s), end_s)
    return [(role, start_s, dies_s), (Role.DOWN, dies_s, end_s)]


def _tile(spans: Sequence[Span], granted_s: float, released_s: float) -> tuple[Tenure, ...]:
    """Adjacent spans of one role become one; none has no length; they tile grant to release."""
    found: list[Tenure] = []
    at_s = granted_s
    for role, _, end_s in spans:
        end_s = min(max(end_s, at_s), released_s)
        if end_s > at_s and found and found[-1].role is role:
            found[-1] = Tenure(role, found[-1].start_s, end_s)
        elif end_s > at_s:
            found.append(Tenure(role, at_s, end_s))
        at_s = end_s
    if at_s < released_s:
        found.append(Tenure(found[-1].role if found else Role.RANKS, at_s, released_s))
    return tuple(found)
