"""How long each agent has been silent, and what of it the controller should hear.

Anything an agent says is proof of life; silence is counted in heartbeat intervals on one monotonic clock.
Pure: whoever holds the connections says what was heard and when it is time to look.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from myriad.cluster.state import NodeState
from myriad.control.events import AgentConnected, AnyEvent, NodeSilent
from myriad.control.limits import DEAD_BEATS, SUSPECT_BEATS
from myriad.control.records import Change, NodeRecord
from myriad.control.state import State


class Liveness:
    """One count per node, of its agent's present life. Times in seconds on one monotonic clock."""

    def __init__(self, heartbeat_s: float) -> None:
        self._heartbeat_s = heartbeat_s
        self._heard: dict[str, tuple[str, float]] = {}  # node -> (incarnation, when)
        self._beats: dict[str, int] = {}  # node -> missed beats already reported
        self._looked_s: float | None = None

    @property
    def pause_s(self) -> float:
        """How often to look."""
        return self._heartbeat_s / 2

    def expect(self, node: str, incarnation: str, now_s: float) -> None:
        """Start counting: it has said what it runs, or was alive when the last controller ended."""
        self._heard[node] = (incarnation, now_s)

    def heard(self, node: str, incarnation: str, now_s: float) -> None:
        """A sign of life; of no meaning for a life that is not counted."""
        if node in self._heard and self._heard[node][0] == incarnation:
            self._heard[node] = (incarnation, now_s)

    def counts(self, node: str) -> bool:
        """Whether the silence of this node is counted."""
        return node in self._heard

    def forget(self, node: str, incarnation: str) -> None:
        """Stop counting that life of the agent: it is known to be over. A newer one is counted on."""
        if node in self._heard and self._heard[node][0] == incarnation:
            del self._heard[node]
            self._beats.pop(node, None)

    def silent_s(self, node: str, now_s: float) -> float:
        heard = self._heard.get(node)
        return 0.0 if heard is None else now_s - heard[1]

    def look(self, now_s: float) -> list[NodeSilent]:
        """A NodeSilent at every missed heartbeat from the third on."""
        looked_s, self._looked_s = self._looked_s, now_s
        if looked_s is not None and now_s - looked_s > self.pause_s + self._heartbeat_s:
            # Whoever looks was late itself: what agents said meanwhile is unread, not unsaid.
            self._heard = {node: (life, now_s) for node, (life, _) in self._heard.items()}
        found = []
        for node, (incarnation, heard_s) in self._heard.items():
            beats = min(int((now_s - heard_s) / self._heartbeat_s), DEAD_BEATS)
            if beats < SUSPECT_BEATS:
                self._beats.pop(node, None)
            elif beats > self._beats.get(node, 0):
                self._beats[node] = beats
                silent_s = now_s - heard_s
                found.append(NodeSilent(node=node, incarnation=incarnation, beats=beats, silent_s=silent_s))
        return found


def ended_lives(event: AnyEvent, changes: Iterable[Change], state: State) -> Iterator[tuple[str, str]]:
    """(node, incarnation) of agents whose silence says nothing any more once ``event`` has been handled."""
    for change in changes:
        if isinstance(change, NodeRecord) and change.state is NodeState.DOWN:
            yield change.name, change.incarnation
    if isinstance(event, AgentConnected) and state.node(event.node).state is NodeState.DOWN:
        yield event.node, event.incarnation  # refused, which changes no record
