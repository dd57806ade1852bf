"""Which node of an allocation held ranks, idled as a spare, was down, or was not there, and when.

An :class:`AllocationRecord` says who was there and since when. What a node did follows from the generations: a
generation's nodes hold ranks until the verdict on it, and a lost node is down from the failure of the last
generation it was in.

Where it stops: a node that is lost, comes back and holds ranks again counts as a spare while it was away.
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
    released_s: float,
) -> dict[str, tuple[Tenure, ...]]:
    """Node -> its roles from the grant to ``released_s``. ``generations`` are the allocation's, oldest first."""
    starts_s = [allocation.granted_s, *(g.begun_s for g in generations[1:]), released_s]
    found = {}
    for name in _names(allocation, generations):
        down_s = _down_s(name, allocation, generations, nodes[name])
        spans = [
            span
            for index in range(len(generations))
            for span in _spans(generations, index, name, starts_s[index], starts_s[index + 1], down_s)
        ]
        found[name] = _tile(
            _cut(spans, _absences(allocation, name, released_s)), allocation.granted_s, released_s
        )
    return found


def _names(allocation: AllocationRecord, generations: Sequence[GenerationRecord]) -> list[str]:
    """All nodes that were ever in the allocation, each once."""
    ran = [name for g in generations for name in g.nodes]
    return list(dict.fromkeys([*ran, *allocation.nodes, *allocation.spares, *allocation.lost]))


def _absences(allocation: AllocationRecord, name: str, released_s: float) -> list[tuple[float, float]]:
    """When between grant and release the node was not in the allocation."""
    moves = [move for move in allocation.moves if move.node == name]
    ends_s = [allocation.granted_s] if moves and moves[0].joins else []
    ends_s += [move.at_s for move in moves]
    if len(ends_s) % 2:
        ends_s.append(released_s)
    return list(zip(ends_s[::2], ends_s[1::2], strict=True))


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
    generations: Sequence[GenerationRecord],
    index: int,
    name: str,
    start_s: float,
    end_s: float,
    down_s: float | None,
) -> list[Span]:
    """The roles of a node, were it there, while generation ``index`` was the newest."""
    ran = index > 0 and name in generations[index - 1].nodes
    here = name in generations[index].nodes
    hands_s = min(max(generations[index].fenced_s or start_s, start_s), end_s)
    # A rank that is taken from a healthy node is so once the fence is complete, not yet at the verdict.
    spans = [(Role.RANKS if here or ran else Role.SPARE, start_s, hands_s)]
    spans.append((Role.RANKS if here else Role.SPARE, hands_s, end_s))
    if down_s is None or any(name in g.nodes for g in generations[index + 1 :]):
        return spans
    up = [(role, begins_s, min(ends_s, down_s)) for role, begins_s, ends_s in spans if begins_s < down_s]
    return [*up, (Role.DOWN, min(max(down_s, start_s), end_s), end_s)]


def _cut(spans: Sequence[Span], absences: Sequence[tuple[float, float]]) -> list[Span]:
    """The spans with AWAY where the node was not there."""
    for away_s, back_s in absences:
        cut: list[Span] = []
        for role, start_s, end_s in spans:
            cut.append((role, start_s, min(end_s, away_s)))
            cut.append((Role.AWAY, max(start_s, away_s), min(end_s, back_s)))
            cut.append((role, max(start_s, back_s), end_s))
        spans = [span for span in cut if span[1] < span[2]]
    return list(spans)


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
