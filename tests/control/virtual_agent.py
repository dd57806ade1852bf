"""An agent of the virtual cluster: the production bookkeeping over make-believe processes.

It follows orders as ``myriad.agent.agent`` does (fence what is older, then start), one small piece of work at a
time, so that a test can stop it, starve it or let it work out of turn between any two of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from myriad.agent.member import Member, Process
from myriad.control.events import AgentConnected, AgentDisconnected, MemberReported
from myriad.spec.messages import (
    Commit,
    ControllerMessage,
    Forget,
    Holding,
    MemberStatus,
    Phase,
    Refused,
    ShardSet,
    Shutdown,
    StartStore,
    StartWorkers,
    StopWorkers,
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
        self.members: dict[str, Member] = {}
        self.held: dict[str, dict[int, set[int]]] = {}  # job -> rank -> steps of snapshots
        self.inbox: deque[ControllerMessage] = deque()
        self.outbox: deque[MemberStatus] = deque()
        self.todo: deque[Callable[[], None]] = deque()
        self.alive = True
        self.linked = False
        self.frozen = False  # a frozen agent neither reads nor works
        self.started: list[tuple[str, int, int]] = []  # every worker ever started: job, generation, rank

    # ------------------------------------------------------------ connection

    def dial(self) -> None:
        self.linked = True
        members = tuple(m.status() for m in self.members.values() if m.generation)
        event = AgentConnected(node=self.node, incarnation=self.incarnation, members=members)
        self.world.handle(event)

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

    def _tell(self, member: Member) -> None:
        status = member.status()
        if self.linked:
            self.outbox.append(status)

    # ------------------------------------------------------------ commands

    def receive(self, message: ControllerMessage) -> None:
        match message:
            case Refused():
                self.world.agent_dies(self.node)
            case StartStore() | StartWorkers() | StopWorkers():
                self._order(message)
            case Commit():
                member = self.members.get(message.job)
                if member is not None and member.generation == message.generation:
                    member.committed(message.step)
            case Forget():
                self.held.pop(message.job, None)
                member = self.members.get(message.job)
                if member is not None and not member.busy:
                    del self.members[message.job]
            case Shutdown():
                if not any(member.busy for member in self.members.values()):
                    self.world.agent_dies(self.node)
            case _:
                pass

    def _order(self, order: StartStore | StartWorkers | StopWorkers) -> None:
        member = self.members.setdefault(order.job, Member(order.job))
        stop = isinstance(order, StopWorkers)
        if order.generation < member.generation:
            return self._tell(member)
        if order.generation == member.generation:
            if isinstance(order, StartWorkers) and member.state == "store":
                return self._start_workers(member, order)
            if not stop:
                return self._tell(member) if not member.next else None
        waiting = member.next
        if waiting is not None and (waiting.generation, not stop) > (order.generation, True):
            return None
        member.next = order
        limit = order.generation if stop else order.generation - 1
        for process in member.older(limit):
            process.doomed = True
        self.todo.append(lambda: self._fenced(member, limit))
        return None

    def _fenced(self, member: Member, limit: int) -> None:
        for process in member.older(limit):
            del member.processes[process.key]
        order = member.next
        if order is None or order.generation - (not isinstance(order, StopWorkers)) > limit:
            return
        member.next = None
        member.holdings = self._holdings(member.job)
        match order:
            case StopWorkers():
                if not order.keep:
                    self.held.pop(member.job, None)
                    member.holdings = ()
                exits, error, same = member.exits, member.error, member.generation == order.generation
                member.begin(max(member.generation, order.generation), "stopped")
                if same:
                    member.exits, member.error = exits, error
                self._tell(member)
            case StartStore():
                member.begin(order.generation, "preparing")
                self._tell(member)
                self._start_store(member, order)
            case StartWorkers():
                member.begin(order.generation, "preparing")
                self._start_workers(member, order)

    def _holdings(self, job: str) -> tuple[Holding, ...]:
        ranks = self.held.get(job, {})
        return tuple(Holding(rank, step, 1) for rank in sorted(ranks) for step in sorted(ranks[rank]))

    def _start_store(self, member: Member, order: StartStore) -> None:
        key = f"{member.job}/{order.generation}/store"
        if order.torch:
            member.processes[key] = Process(key, order.generation, None)
            self.todo.append(lambda: self._store_is_up(member, key))
        else:
            self._store_is_up(member, None)

    def _store_is_up(self, member: Member, key: str | None) -> None:
        if key is None or key in member.processes:
            member.store_port, member.state = STORE_PORT, "store"
            self._tell(member)

    def _start_workers(self, member: Member, order: StartWorkers) -> None:
        member.start = order
        member.state = "started"
        member.holdings = ()
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
        self._tell(member)

    def _born(self, member: Member, process: Process) -> None:
        if member.processes.get(process.key) is not process or process.doomed:
            return
        process.pid = self.world.new_pid()
        assert process.rank is not None
        if member.pass_phase(process.rank, "fork", self.world.now):
            self._tell(member)
        assert member.start is not None
        if member.start.spec.get("model") is not None:
            for phase in TORCH_PHASES:
                self.todo.append(lambda phase=phase: self.pass_phase(member, process, phase))  # type: ignore[misc]

    # ------------------------------------------------------------ workers

    def pass_phase(self, member: Member, process: Process, phase: Phase) -> None:
        if member.processes.get(process.key) is process and not process.doomed:
            assert process.rank is not None
            if member.pass_phase(process.rank, phase, self.world.now):
                self._tell(member)

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
        process.error_class, process.error = error, error and f"{error} happened"
        del member.processes[process.key]
        member.ended(process, code, self.world.now)
        self._tell(member)

    def save(self, job: str, rank: int, step: int) -> None:
        """Write one rank's part of a durable checkpoint, and keep its snapshot."""
        found = self.worker(job, rank)
        assert found is not None, f"rank {rank} of {job} does not run on {self.node}"
        member, _ = found
        member.steps[rank] = max(step, member.steps.get(rank, 0))
        self.world.written.add((job, member.generation, rank, step))
        self.held.setdefault(job, {}).setdefault(rank, set()).add(step)
        if member.shard_saved(ShardSet(rank=rank, step=step, seconds=0.1, files=())):
            self._tell(member)

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
