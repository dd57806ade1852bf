"""What an agent has been told and what follows from it: the pure half of the agent.

Commands are named by (job, generation): a repeated one is answered with the present status, an older one is
ignored, and a newer one fences everything before it. All effects go through :class:`Hands`: the agent's own
kill processes and keep memory files, the simulator's are make-believe, and the decisions are the same ones.
"""

from __future__ import annotations

from typing import Protocol

from myriad.agent.member import Member, Process
from myriad.spec.messages import (
    Commit,
    ControllerMessage,
    Failure,
    Forget,
    Holding,
    Intervals,
    MemberStatus,
    Phase,
    Prepare,
    Refused,
    ShardSet,
    Shutdown,
    StartStore,
    StartWorkers,
    StopWorkers,
)

# Workers whose collectives have failed are killed when no controller has come back in this time.
ABSENT_DEADLINE_S = 60.0


class Hands(Protocol):
    """What the orders have done.

    Before it returns, a start may call :class:`Orders` back with what is up at once, and ``fence`` with ends
    that came before it; nothing else does.
    """

    def tell(self, status: MemberStatus) -> None:
        """Send a member's new status; without a connection the next hello carries it."""

    def fence(self, member: Member, generation: int, grace_s: float) -> None:
        """Kill everything up to ``generation``; :meth:`Orders.fenced` follows, later, when all of it is gone."""

    def prepare(self) -> None:
        """Have the template ready, if there is none yet."""

    def start_store(self, member: Member, order: StartStore) -> None:
        """Start a rendezvous store; :meth:`Orders.store_is_up` follows, at once when only a port is reserved."""

    def start_workers(self, member: Member, order: StartWorkers) -> None:
        """Start every rank of ``order`` and set ``member.started_s``; what was already started may pass its phase
        at once. An error of the agent's own goes into ``member.error``."""

    def committed(self, job: str, step: int, intervals: Intervals, processes: list[Process]) -> None:
        """The checkpoint of ``step`` is durable: tell the keeper of snapshots and these processes, and the processes
        how often they are to save."""

    def holdings(self, job: str) -> tuple[Holding, ...]:
        """The snapshots held for the job's ranks, all of them verified."""

    def forget(self, job: str) -> None:
        """Drop the job's snapshots."""

    def leave(self, why: str) -> None:
        """Kill everything and exit."""


class Orders:
    """See the module. ``members`` has one entry for each job that this node has a part in."""

    def __init__(self, hands: Hands) -> None:
        self._hands = hands
        self._shutting_down = False
        self.members: dict[str, Member] = {}

    def generation(self, job: str) -> int:
        """The generation of a job that this node knows, 0 for a job it has no part in."""
        member = self.members.get(job)
        return 0 if member is None else member.generation

    def statuses(self) -> tuple[MemberStatus, ...]:
        """All that a hello says."""
        return tuple(member.status() for member in self.members.values() if member.generation)

    # ------------------------------------------------------------ from the controller

    def receive(self, message: ControllerMessage) -> None:
        match message:
            case Refused():
                self._hands.leave(f"refused: {message.reason}")
            case Prepare():
                if message.torch:
                    self._hands.prepare()
            case StartStore() | StartWorkers() | StopWorkers():
                self._order(message)
            case Commit():
                self._commit(message)
            case Forget():
                self._forget(message.job)
            case Shutdown():
                self._shutting_down = True
                self._leave_if_idle()
            case _:
                pass

    def _order(self, order: StartStore | StartWorkers | StopWorkers) -> None:
        """A start or a stop of a generation: fence what is older, then do it."""
        member = self.members.setdefault(order.job, Member(order.job))
        stop = isinstance(order, StopWorkers)
        if order.generation < member.generation:
            return self._tell(member)
        if order.generation == member.generation:
            if isinstance(order, StartWorkers) and member.state == "store" and member.next is None:
                return self._start_workers(member, order)
            if not stop:
                return self._tell(member) if not member.next else None
        waiting = member.next
        if waiting is not None and _rank(waiting) > _rank(order):
            return None
        member.next = order
        if isinstance(order, StopWorkers):
            self._hands.fence(member, order.generation, order.grace_s)
        else:
            self._hands.fence(member, order.generation - 1, 0.0)
        return None

    def _tell(self, member: Member) -> None:
        self._hands.tell(member.status())

    def _commit(self, message: Commit) -> None:
        member = self.members.get(message.job)
        if member is None or member.generation != message.generation:
            self._hands.committed(message.job, message.step, message.intervals, [])
            return
        member.committed(message.step)
        processes = list(member.processes.values())
        self._hands.committed(message.job, message.step, message.intervals, processes)

    def _forget(self, job: str) -> None:
        self._hands.forget(job)
        member = self.members.get(job)
        if member is not None and not member.busy:
            del self.members[job]
        self._leave_if_idle()

    def _leave_if_idle(self) -> None:
        if self._shutting_down and not any(member.busy for member in self.members.values()):
            self._hands.leave("the cluster goes down")

    # ------------------------------------------------------------ fences and starts

    def fenced(self, member: Member, generation: int) -> None:
        """Nothing up to ``generation`` is left: do what this was for, unless it takes a wider fence, which
        then is on its way."""
        order = member.next
        if order is None or order.generation - (not isinstance(order, StopWorkers)) > generation:
            return
        member.next = None
        match order:
            case StopWorkers():
                if not order.keep:
                    self._hands.forget(member.job)
                member.holdings = self._hands.holdings(member.job)
                exits, error = member.exits, member.error
                same = member.generation == order.generation
                member.begin(max(member.generation, order.generation), "stopped")
                if same:
                    member.exits, member.error = exits, error
                self._tell(member)
            case StartStore():
                member.holdings = self._hands.holdings(member.job)
                member.begin(order.generation, "preparing")
                self._tell(member)  # the fence is done, however long the store takes
                self._hands.start_store(member, order)
            case StartWorkers():
                member.begin(order.generation, "preparing")
                self._start_workers(member, order)
        self._leave_if_idle()

    def store_is_up(self, member: Member, port: int) -> None:
        """The rendezvous store of the present generation listens on ``port``."""
        member.store_port, member.state = port, "store"
        self._tell(member)

    def _start_workers(self, member: Member, order: StartWorkers) -> None:
        member.start = order
        member.state = "started"
        member.holdings = ()
        self._hands.start_workers(member, order)
        self._tell(member)

    def start_failed(self, member: Member, error: str) -> None:
        """The agent could not do what :meth:`Hands.start_workers` began."""
        member.error = error
        self._tell(member)

    # ------------------------------------------------------------ what processes say

    def phase_passed(self, member: Member, rank: int, phase: Phase, now_s: float) -> None:
        if member.pass_phase(rank, phase, now_s):
            self._tell(member)

    def shards_saved(self, member: Member, shards: ShardSet) -> None:
        if member.shard_saved(shards):
            self._tell(member)

    def save_failed(self, member: Member, error: str) -> None:
        """A durable checkpoint was not written: said once, however many ranks say the same."""
        if member.save_error != error:
            member.save_error = error
            self._tell(member)

    def failing(self, member: Member, process: Process, failure: Failure) -> None:
        """A worker says why it is about to exit."""
        assert process.rank is not None
        process.error_class, process.error = failure.error_class, failure.message
        if failure.step is not None:
            member.steps[process.rank] = failure.step

    def ended(self, member: Member, process: Process, code: int, now_s: float) -> None:
        """A process is gone, by itself or by our doing."""
        del member.processes[process.key]
        if process.rank is None:
            if not process.doomed and process.generation == member.generation:
                member.error = "its rendezvous store died"
                self._tell(member)
            return
        member.ended(process, code, now_s)
        if not process.doomed:
            self._tell(member)

    def abandoned(self, away_since_s: float | None, now_s: float) -> list[Process]:
        """Processes to kill: the rest of broken jobs that no controller has been there to restart."""
        if away_since_s is None or now_s - away_since_s < ABSENT_DEADLINE_S:
            return []
        return [
            process
            for member in self.members.values()
            if member.failed_s is not None and now_s - member.failed_s >= ABSENT_DEADLINE_S
            for process in member.older(member.generation)
        ]


def _rank(order: StartStore | StartWorkers | StopWorkers) -> tuple[int, bool, bool]:
    """What a waiting order gives way to: a newer generation, and within one a stop, then workers, then the store."""
    return order.generation, isinstance(order, StopWorkers), isinstance(order, StartWorkers)
