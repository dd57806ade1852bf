"""Reading a job's members: who has stopped, who is ready, what they hold. No changes are made here."""

from __future__ import annotations

from myriad.control.records import JobRecord, MemberRecord
from myriad.control.state import State
from myriad.spec.messages import Holding, MemberStatus, WorkerExit


def is_lost(state: State, job: str, node: str) -> bool:
    """The node of the allocation has been down since the grant, even if a new agent is there by now:
    it comes back with nothing of the job, and perhaps for another one."""
    return state.node(node).job != job


def current_status(member: MemberRecord | None, generation: int) -> MemberStatus | None:
    """What the agent said of this very generation, if anything."""
    if member is None or member.status is None or member.status.generation != generation:
        return None
    return member.status


def is_fenced(member: MemberRecord | None, generation: int) -> bool:
    """No process of ``generation`` or older is left on the node, or none was ever asked for."""
    if member is None or member.wanted == "prepared":
        return True
    status = member.status
    if status is None:
        return False
    return status.generation > generation or (status.generation == generation and status.state == "stopped")


def unfenced(state: State, job: JobRecord) -> list[str]:
    """Nodes of the allocation that have not confirmed and are not known to be lost."""
    members = state.members(job.id)
    return [
        node
        for node in state.allocation(job.id).nodes
        if not is_lost(state, job.id, node) and not is_fenced(members.get(node), job.generation)
    ]


def unstopped(state: State, job: JobRecord) -> list[str]:
    """Nodes that may still run something of the job, whatever the generation."""
    members = state.members(job.id)
    return [
        node
        for node in state.allocation(job.id).nodes
        if not is_lost(state, job.id, node)
        and (member := members.get(node)) is not None
        and not is_fenced(member, member.generation)
    ]


def exits(state: State, job: JobRecord) -> list[tuple[str, WorkerExit]]:
    """(node, exit) of the current generation, earliest first by each node's own clock since the start."""
    found = [(node, e) for node, m in state.members(job.id).items() if m.generation for e in m.exits]
    return sorted(found, key=lambda item: (item[1].at_s, item[0]))


def lost_nodes(state: State, job: JobRecord) -> list[tuple[str, str]]:
    """(node, reason) of rank-holding nodes that are lost, in the order of their last change."""
    lost = [state.node(n) for n in state.allocation(job.id).nodes if is_lost(state, job.id, n)]
    return [(node.name, node.reason) for node in sorted(lost, key=lambda node: node.since_s)]


def held_steps(state: State, job: JobRecord, workers_per_node: int) -> list[frozenset[int]]:
    """By rank: the steps whose snapshot the rank's node holds."""
    members = state.members(job.id)
    held: list[frozenset[int]] = []
    for index, node in enumerate(state.allocation(job.id).nodes):
        holdings = _holdings(members.get(node))
        for rank in range(index * workers_per_node, (index + 1) * workers_per_node):
            held.append(frozenset(h.step for h in holdings if h.rank == rank))
    return held


def copied_steps(state: State, job: JobRecord, workers_per_node: int) -> list[dict[int, str]]:
    """By rank: the steps of whose snapshot another node of the job has a copy, and which node."""
    copies: list[dict[int, str]] = [{} for _ in range(job.world_size)]
    for index, node in enumerate(state.allocation(job.id).nodes):
        for holding in _holdings(state.members(job.id).get(node)):
            if holding.rank // workers_per_node != index and holding.rank < job.world_size:
                copies[holding.rank][holding.step] = node
    return copies


def _holdings(member: MemberRecord | None) -> tuple[Holding, ...]:
    """What a node has confirmed with the fence.

    One that comes in now had no rank in this generation: what it said before, perhaps when it had one, it may have
    dropped since.
    """
    if member is None or member.status is None or member.wanted == "prepared":
        return ()
    return member.status.holdings


def best_step(state: State, job: JobRecord) -> int:
    """The highest step any member says it has finished."""
    steps = [job.best_step]
    for member in state.members(job.id).values():
        if member.status is not None:
            steps.append(member.status.step)
        steps.extend(e.step for e in member.exits if e.step is not None)
    return max(steps)
