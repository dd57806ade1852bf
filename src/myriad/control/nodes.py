"""Nodes: agents come, go silent, die and are asked back; operators drain and undrain.

A node without a living agent is DOWN. It comes back only when somebody asks (``expected``) and a *new*
agent says hello: a declared-dead agent that wakes up is refused, and kills what it has.
"""

from __future__ import annotations

from typing import Any

import msgspec

from myriad.cluster.state import NodeState
from myriad.control import intervals, jobs, limits
from myriad.control.commands import StartAgent, ToAgent
from myriad.control.events import (
    AgentConnected,
    AgentDisconnected,
    AgentExited,
    ClusterConfigured,
    ControllerStarted,
    DownRequested,
    DrainRequested,
    NodeSilent,
    UndrainRequested,
)
from myriad.control.records import ClusterRecord, NodeRecord
from myriad.control.turn import Turn
from myriad.spec.cluster import ClusterSpec
from myriad.spec.messages import Refused, Shutdown


def configure(turn: Turn, event: ClusterConfigured) -> None:
    """The first event of a state: every node is down until its agent says hello."""
    spec = ClusterSpec.model_validate(event.spec)
    turn.put(ClusterRecord(spec=event.spec, jobs_dir=event.jobs_dir))
    for node in spec.nodes:
        turn.put(
            NodeRecord(
                name=node.name,
                type=node.type,
                accelerators=spec.type_of(node).accelerators,
                leaf=node.leaf,
                rack=node.rack,
                power_feed=node.power_feed,
                state=NodeState.DOWN,
                since_s=turn.now,
                reason="its agent has not joined yet",
            )
        )


def controller_started(turn: Turn, event: ControllerStarted) -> None:
    """Ask for every agent that should be there; the engine starts those that are not."""
    turn.put(msgspec.structs.replace(turn.cluster, closing=False))
    jobs.renew_deadlines(turn)
    intervals.forget_absence(turn)
    for node in list(turn.state.table(NodeRecord).values()):
        node = turn.set_node(node, connected=False)
        if node.state is NodeState.DOWN and not node.expected:
            continue
        turn.give(StartAgent(node=node.name))
    turn.reschedule = True  # nodes may have become free while the cluster was closing


def connected(turn: Turn, event: AgentConnected) -> None:
    """An agent's hello: take a new agent in, reconcile a known one, refuse a fenced one."""
    node = turn.state.node(event.node)
    same = event.incarnation == node.incarnation
    if node.state is NodeState.DOWN and (same or not node.expected):
        why = "it was declared dead" if same else f"node {node.name} is down; undrain it first"
        turn.give(ToAgent(node=node.name, incarnation=event.incarnation, message=Refused(reason=why)))
        return
    if node.state is not NodeState.DOWN and not same and node.incarnation:
        # A second life of the agent: whatever the first one ran is gone with it.
        old = node
        lose(turn, node, "its agent was restarted", turn.now, expected=True)
        node = turn.state.node(event.node)
        if old.state in (NodeState.DRAINING, NodeState.DRAINED):
            node = turn.set_node(node, NodeState.DRAINED, reason=old.reason)
    joined: dict[str, Any] = {
        "incarnation": event.incarnation,
        "host": event.host,
        "peer_port": event.peer_port,
        "connected": True,
    }
    if node.state is NodeState.DOWN:
        turn.set_node(node, NodeState.FREE, suspect=False, reason="", job=None, **joined)
    else:
        turn.set_node(node, suspect=False, **joined)
    jobs.reconcile_node(turn, event.node, event.members)
    if turn.cluster.closing and turn.state.node(event.node).job is None:
        turn.send(event.node, Shutdown())


def disconnected(turn: Turn, event: AgentDisconnected) -> None:
    """A suspicion: healthy jobs keep running under an agent that cannot reach us."""
    node = turn.state.node(event.node)
    if node.incarnation == event.incarnation:
        turn.set_node(node, connected=False)


def exited(turn: Turn, event: AgentExited) -> None:
    """Proof of death. A fenced agent's end makes room for the one that was asked for."""
    node = turn.state.node(event.node)
    if node.incarnation != event.incarnation:
        return
    if node.state is not NodeState.DOWN:
        if turn.cluster.closing and node.job is None:
            # A node that was drained is not asked back by the next start of the cluster.
            drained = node.state is NodeState.DRAINED
            reason = node.reason if drained else "the cluster went down"
            turn.set_node(node, NodeState.DOWN, connected=False, expected=not drained, reason=reason)
        else:
            lose(turn, node, "its agent died", turn.now - event.silent_s)
    elif node.expected and not turn.cluster.closing:
        turn.give(StartAgent(node=node.name))


def silent(turn: Turn, event: NodeSilent) -> None:
    """Missed heartbeats. Two signals make a verdict: silence and a closed connection, or a long silence."""
    node = turn.state.node(event.node)
    if node.incarnation != event.incarnation or node.state is NodeState.DOWN:
        return
    if event.beats >= limits.DEAD_BEATS or (event.beats >= limits.SUSPECT_BEATS and not node.connected):
        lose(turn, node, f"no heartbeat for {event.silent_s:.1f} s", turn.now - event.silent_s)
    elif event.beats >= limits.SUSPECT_BEATS:
        turn.set_node(node, suspect=True)


def lose(turn: Turn, node: NodeRecord, reason: str, last_sign_s: float, expected: bool = False) -> None:
    """A node is down: its processes are dead or fenced from now on. ``expected``: a new agent is here."""
    job = node.job
    turn.send(node.name, Refused(reason=f"declared dead: {reason}"))  # it may still be able to read
    turn.set_node(
        node, NodeState.DOWN, connected=False, suspect=False, expected=expected, reason=reason, job=None
    )
    if job is not None:
        jobs.node_lost(turn, job, node.name, reason, last_sign_s)


def drain(turn: Turn, event: DrainRequested) -> None:
    """Take no new work. A busy node leaves when its job does."""
    node = turn.state.node(event.node)
    reason = event.reason or "drained by an operator"
    match node.state:
        case NodeState.FREE:
            turn.set_node(node, NodeState.DRAINED, reason=reason)
        case NodeState.BUSY | NodeState.SPARE:
            turn.set_node(node, NodeState.DRAINING, reason=reason)
        case NodeState.DOWN:
            turn.set_node(node, expected=False, reason=reason)
        case NodeState.DRAINING | NodeState.DRAINED:
            turn.set_node(node, reason=reason)


def undrain(turn: Turn, event: UndrainRequested) -> None:
    """Back into service; a node that is down gets a new agent."""
    node = turn.state.node(event.node)
    match node.state:
        case NodeState.DRAINED:
            turn.set_node(node, NodeState.FREE, reason="")
        case NodeState.DRAINING:
            assert node.job is not None
            spare = node.name in turn.state.allocation(node.job).spares
            turn.set_node(node, NodeState.SPARE if spare else NodeState.BUSY, reason="")
        case NodeState.DOWN:
            turn.set_node(node, expected=True, reason="its agent has not joined yet")
            turn.give(StartAgent(node=node.name, fenced=node.incarnation))
        case NodeState.FREE | NodeState.BUSY | NodeState.SPARE:
            turn.set_node(node, reason="")


def down(turn: Turn, event: DownRequested) -> None:
    """The controller is about to leave: idle agents exit, agents with a job keep it."""
    turn.put(msgspec.structs.replace(turn.cluster, closing=True))
    if event.cancel_jobs:
        jobs.cancel_all(turn)
    for node in list(turn.state.table(NodeRecord).values()):
        if node.job is None:
            turn.send(node.name, Shutdown())
