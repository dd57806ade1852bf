"""An agent of the virtual cluster: the production orders over make-believe processes.

``Orders`` decides, as in the real agent; here are only its hands. They do one small piece of work at a time, so
that a test can stop the agent, starve it or let it work out of turn between any two of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from myriad.agent.member import Member, Process
from myriad.agent.orders import Orders
from myriad.control.events import AgentConnected, AgentDisconnected, MemberReported
from myriad.spec.messages import (
    ControllerMessage,
    Failure,
    Holding,
    Intervals,
    MemberStatus,
    Phase,
    SaveCosts,
    ShardSet,
    StartStore,
    StartWorkers,
)

if TYPE_CHECKING:
    from world import World

TORCH_PHASES: tuple[Phase, ...] = ("rendezvous", "restore", "first_step")
STORE_PORT = 29500


class VirtualAgent:
    """One life of a node's agent. Its processes live in its members and die with it."""

    def __init__(self, world: World, node: str, life: int) -> None:
        self.world = world
        self.node = node
        self.incarnation = f"{node}.{life}"
        self.orders = Orders(self)
        self.held: dict[str, dict[int, set[int]]] = {}  # job -> rank -> steps of snapshots
        self.inbox: deque[ControllerMessage] = deque()
        self.outbox: deque[MemberStatus] = deque()
        self.todo: deque[Callable[[], None]] = deque()
        self.alive = True
        self.linked = False
        self.frozen = False  # a frozen agent neither reads nor works
        self.started: list[tuple[str, int, int]] = []  # every worker ever started: job, generation, rank

    @property
    def members(self) -> dict[str, Member]:
        return self.orders.members

    # ------------------------------------------------------------ connection

    def dial(self) -> None:
        self.linked = True
        members = self.orders.statuses()
        self.world.handle(AgentConnected(node=self.node, incarnation=self.incarnation, members=members))

    def redial(self) -> None:
        if not self.linked:
            self.dial()

    def cut(self) -> None:
        """The connection breaks; what was on its way is lost."""
        self.linked = False
        self.inbox.clear()
        self.outbox.clear()
        self.world.handle(AgentDisconnected(node=self.node, incarnation=self.incarnation))

    def die(self) -> None:
        self.alive = self.linked = False
        self.inbox.clear()
        self.outbox.clear()
        self.todo.clear()
        self.members.clear()

    def receive(self, message: ControllerMessage) -> None:
        self.orders.receive(message)

    # ------------------------------------------------------------ hands

    def tell(self, status: MemberStatus) -> None:
        if self.linked:
            self.outbox.append(status)

    def leave(self, why: str) -> None:
        """What it has said leaves before it does."""
        while self.outbox:
            self.report()
        self.world.agent_dies(self.node)

    def prepare(self) -> None:
        """A make-believe process needs no template."""

    def fence(self, member: Member, generation: int, grace_s: float) -> None:
        for process in member.older(generation):
            process.doomed = True
        self.todo.append(lambda: self._gone(member, generation))

    def _gone(self, member: Member, generation: int) -> None:
        for process in member.older(generation):
            self.orders.ended(member, process, -9, self.world.now)
        self.orders.fenced(member, generation)

    def start_store(self, member: Member, order: StartStore) -> None:
        if not order.torch:
            self.orders.store_is_up(member, STORE_PORT)
            return
        process = Process(f"{member.job}/{order.generation}/store", order.generation, None)
        member.processes[process.key] = process
        self.todo.append(lambda: self._store_is_up(member, process))

    def _store_is_up(self, member: Member, process: Process) -> None:
        if member.processes.get(process.key) is process and not process.doomed:
            self.orders.store_is_up(member, STORE_PORT)

    def start_workers(self, member: Member, order: StartWorkers) -> None:
        member.started_s = self.world.now
        newest = -1 if order.restore_step is None else order.restore_step
        for steps in self.held.get(member.job, {}).values():
            steps -= {step for step in steps if step > newest}
        for plan in order.ranks:
            if plan.tier == "memory":
                assert order.restore_step in self.held[order.job][plan.rank], (
                    f"{self.node} holds no such snapshot"
                )
            key = f"{order.job}/{order.generation}/{plan.rank}"
            process = Process(key, order.generation, plan.rank)
            member.processes[key] = process
            self.started.append((order.job, order.generation, plan.rank))
            self.todo.append(lambda process=process: self._born(member, process))  # type: ignore[misc]

    def _born(self, member: Member, process: Process) -> None:
        if member.processes.get(process.key) is not process or process.doomed:
            return
        process.pid = self.world.new_pid()
        self.pass_phase(member, process, "fork")
        assert member.start is not None
        if member.start.spec.get("model") is not None:
            for phase in TORCH_PHASES:
                self.todo.append(lambda phase=phase: self.pass_phase(member, process, phase))  # type: ignore[misc]

    def committed(self, job: str, step: int, intervals: Intervals, processes: list[Process]) -> None:
        """Nobody waits for it: the keeper drops nothing, and the tests decide when workers end."""

    def holdings(self, job: str) -> tuple[Holding, ...]:
        ranks = self.held.get(job, {})
        return tuple(Holding(rank, step, 1) for rank in sorted(ranks) for step in sorted(ranks[rank]))

    def forget(self, job: str) -> None:
        self.held.pop(job, None)

    # ------------------------------------------------------------ workers

    def pass_phase(self, member: Member, process: Process, phase: Phase) -> None:
        if member.processes.get(process.key) is process and not process.doomed:
            assert process.rank is not None
            self.orders.phase_passed(member, process.rank, phase, self.world.now)

    def worker(self, job: str, rank: int) -> tuple[Member, Process] | None:
        """A worker that runs and is not being killed."""
        member = self.members.get(job)
        for process in member.processes.values() if member is not None else ():
            if process.rank == rank and process.pid is not None and not process.doomed:
                assert member is not None
                return (member, process) if process.generation == member.generation else None
        return None

    def workers(self) -> list[tuple[str, int]]:
        found = [
            (m.job, p) for m in self.members.values() for p in m.processes.values() if p.rank is not None
        ]
        return [
            (job, p.rank) for job, p in found if p.rank is not None and self.worker(job, p.rank) is not None
        ]

    def exit(self, job: str, rank: int, code: int, step: int | None = None, error: str = "") -> None:
        found = self.worker(job, rank)
        assert found is not None, f"rank {rank} of {job} does not run on {self.node}"
        member, process = found
        if step is not None:
            member.steps[rank] = step
        if error:
            failure = Failure(error_class=error, message=f"{error} happened")
            self.orders.failing(member, process, failure)
        self.orders.ended(member, process, code, self.world.now)

    def save(self, job: str, rank: int, step: int, costs: SaveCosts | None = None) -> None:
        """Write one rank's part of a durable checkpoint, and keep its snapshot."""
        found = self.worker(job, rank)
        assert found is not None, f"rank {rank} of {job} does not run on {self.node}"
        member, _ = found
        member.steps[rank] = max(step, member.steps.get(rank, 0))
        self.world.written.add((job, member.generation, rank, step))
        self.held.setdefault(job, {}).setdefault(rank, set()).add(step)
        self.orders.shards_saved(member, ShardSet(rank=rank, step=step, seconds=0.1, files=(), costs=costs))

    def work(self) -> bool:
        """One delivery or piece of work, oldest first; False when there is nothing to do."""
        if not self.alive or self.frozen:
            return False
        if self.outbox:
            self.report()
        elif self.inbox:
            self.receive(self.inbox.popleft())
        elif self.todo:
            self.todo.popleft()()
        else:
            return False
        return True

    def report(self) -> None:
        status = self.outbox.popleft()
        self.world.handle(MemberReported(node=self.node, incarnation=self.incarnation, member=status))
