"""An agent of the virtual cluster: production orders (``myriad.agent.orders``) over make-believe processes.

What is swapped is what touches hardware: processes are objects that die when told to, snapshots are step
numbers, the connection is virtual. It takes in one thing at a time and nothing while it is stopped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from myriad.agent.member import Member, Process
from myriad.agent.orders import Orders
from myriad.control.events import AgentConnected, MemberReported
from myriad.simulator.network import Connection
from myriad.simulator.story import brief
from myriad.simulator.training import Worker
from myriad.spec.messages import (
    ControllerMessage,
    Failure,
    Holding,
    Intervals,
    MemberStatus,
    Peer,
    Phase,
    RankPlan,
    SaveCosts,
    ShardSet,
    StartStore,
    StartWorkers,
    StepReport,
)
from myriad.storage.memory.retention import Use, kept_steps

if TYPE_CHECKING:
    from myriad.simulator.cluster import VirtualCluster, VirtualNode

REDIAL_S = 0.2
DIAL_DEADLINE_S = 5.0  # for the answer to a hello
TEMPLATE_S = 2.0  # the first time; forks take FORK_S
FORK_S = 0.02
KILL_S = 0.02  # from a SIGKILL until the process is gone
SNAPSHOT_BYTES = 1
COPY_S = 0.1  # a snapshot's way to another node
STORE_PORT = 29500
ABSENCE_LOOK_S = 5.0


class VirtualAgent:
    """One life of a node's agent. Its processes die with it."""

    def __init__(self, cluster: VirtualCluster, node: VirtualNode, incarnation: str) -> None:
        self._cluster = cluster
        self._heap = cluster.heap
        self._noise = cluster.stream(f"agent {incarnation}")
        self._skew = 1.0 + cluster.scenario.skew * self._noise.uniform(-1, 1)
        self._todo: deque[Callable[[], None]] = deque()
        self._template = False
        self._held: dict[str, dict[int, dict[int, Use]]] = {}  # job -> rank -> step
        self._durable: dict[str, int] = {}
        self._carried: dict[tuple[str, int, int], list[StepReport]] = {}  # beside copies for other nodes
        self._fresh: list[StepReport] = []
        self._unacknowledged: list[StepReport] = []
        self._away_since_s: float | None = self.clock()
        self.node = node
        self.incarnation = incarnation
        self.orders = Orders(self)
        self.workers: dict[str, Worker] = {}  # by process key
        self.connection: Connection | None = None
        self.linked = False  # the controller has accepted the hello
        self.alive = True
        self.dials = 0
        self.stopped_until = 0.0
        self.dial()

    def clock(self) -> float:
        """Its own monotonic clock."""
        return self._heap.now * self._skew

    def note(self, text: str, *objects: str) -> None:
        self._cluster.note(text, self.node.name, *objects)

    # ------------------------------------------------------------ one thing at a time

    def local(self, do: Callable[[], None], delay_s: float = 0.0) -> None:
        """Have the agent take something in after ``delay_s``, or when it is no longer stopped."""
        self._heap.after(delay_s, lambda: self._arrived(do))

    def _arrived(self, do: Callable[[], None]) -> None:
        self._todo.append(do)
        self.work()

    def work(self) -> None:
        """Take in all that waits."""
        if self.stopped_until > self._heap.now:
            self._heap.at(self.stopped_until, self.work)
            return
        while self._todo and self.alive:
            self._todo.popleft()()

    # ------------------------------------------------------------ connection

    def dial(self) -> None:
        """Say hello; whatever happens on the way, it tries again."""
        if not self.alive or self.connection is not None:
            return
        connection = self._cluster.connect(self)
        if connection is None:
            self._heap.after(REDIAL_S * self._noise.uniform(1, 5), lambda: self._arrived(self.dial))
            return
        self.connection = connection
        self.local(lambda: self._unanswered(connection), DIAL_DEADLINE_S)
        self._cluster.controller.greet(self, connection, lambda: self._accepted(connection))

    def _accepted(self, connection: Connection) -> None:
        if self.connection is not connection:
            return
        self.linked = True
        self._away_since_s = None
        self._fresh[:0] = self._unacknowledged
        self._unacknowledged.clear()
        self._beat()
        there = AgentConnected(
            node=self.node.name, incarnation=self.incarnation, members=self.orders.statuses()
        )
        self._cluster.controller.carry(self, connection, there)

    def _unanswered(self, connection: Connection) -> None:
        if self.connection is connection and not self.linked:
            connection.close_by_agent()
            self.connection_ended(connection)

    def connection_ended(self, connection: Connection) -> None:
        if self.connection is connection:
            self.connection, self.linked = None, False
            if self._away_since_s is None:
                self._away_since_s = self.clock()
                self.local(self._look_for_controller, ABSENCE_LOOK_S)
            self.local(self.dial, REDIAL_S)

    def _look_for_controller(self) -> None:
        if self._away_since_s is None:
            return
        for process in self.orders.abandoned(self._away_since_s, self.clock()):
            self._kill(process)
        self.local(self._look_for_controller, ABSENCE_LOOK_S)

    def tell(self, status: MemberStatus) -> None:
        if self.linked and self.connection is not None:
            self._beat()
            report = MemberReported(node=self.node.name, incarnation=self.incarnation, member=status)
            self._cluster.controller.carry(self, self.connection, report)

    def report(self, report: StepReport) -> None:
        self._fresh.append(report)
        if len(self._fresh) == 1:
            self.local(self._beat, self._cluster.heartbeat_s)

    def _beat(self) -> None:
        if self._fresh and self.linked and self.connection is not None:
            reports, self._fresh = self._fresh, []
            self._unacknowledged += reports
            self._cluster.controller.carry_reports(self, self.connection, reports, self._acknowledged)

    def _acknowledged(self, reports: list[StepReport]) -> None:
        seen = set(map(id, reports))
        self._unacknowledged = [each for each in self._unacknowledged if id(each) not in seen]

    def receive(self, message: ControllerMessage) -> None:
        self.note(f"agent takes {brief(message)}", getattr(message, "job", ""))
        self.orders.receive(message)

    # ------------------------------------------------------------ hands: fences

    def fence(self, member: Member, generation: int, grace_s: float) -> None:
        for process in member.older(generation):
            worker = self.workers.get(process.key)
            if worker is not None and worker.ended:
                continue  # it has ended by itself, and nobody has noticed yet
            process.doomed = True
            if process.pid is None:
                continue
            if grace_s and worker is not None:
                ends_s = self._noise.uniform(0, 1.5 * grace_s)
                late = ends_s >= grace_s or worker.stopped_until > self._heap.now
                self._heap.after(grace_s if late else ends_s, partial(self._kill, process))
            else:
                self._kill(process)
        self._await_fence(member, generation)

    def _await_fence(self, member: Member, generation: int) -> None:
        left = member.older(generation)
        if left:
            self.local(lambda: self._await_fence(member, generation), KILL_S)
        else:
            self.local(lambda: self._fence_is_done(member, generation))

    def _fence_is_done(self, member: Member, generation: int) -> None:
        if member.older(generation):  # a wider fence has meanwhile come and started something
            self._await_fence(member, generation)
        else:
            self.orders.fenced(member, generation)

    def _kill(self, process: Process, code: int = -9) -> None:
        """The process is gone at once; the agent notices a little later."""
        worker = self.workers.get(process.key)
        if worker is not None:
            worker.end(code)
        else:
            self.local(lambda: self.ended(process, code), KILL_S)

    # ------------------------------------------------------------ hands: starts

    def prepare(self) -> None:
        self._template = True

    def _fork_s(self, torch: bool) -> float:
        first = torch and not self._template
        self._template = self._template or torch
        return (TEMPLATE_S if first else FORK_S) * self._noise.uniform(0.5, 2.0)

    def start_store(self, member: Member, order: StartStore) -> None:
        process = Process(f"{order.job}/{order.generation}/store", order.generation, None, from_template=True)
        if order.torch:
            member.processes[process.key] = process
        self.local(lambda: self._store_up(member, process, order.torch), self._fork_s(order.torch))

    def _store_up(self, member: Member, process: Process, torch: bool) -> None:
        if torch and member.processes.get(process.key) is not process:
            return
        if process.doomed:
            self.ended(process, -9)
        elif member.generation == process.generation and member.state == "preparing":
            process.pid = self._cluster.new_pid()
            self.orders.store_is_up(member, STORE_PORT)

    def start_workers(self, member: Member, order: StartWorkers) -> None:
        member.started_s = self.clock()
        if order.restore_step is None:
            self.forget(order.job)
        else:
            self._drop_newer(order.job, order.restore_step)
        if order.durable_step is not None:
            self._mark_durable(order.job, order.durable_step)
        for plan in order.ranks:
            if plan.source is None:
                self._start_worker(member, order, plan)
            else:
                self.local(partial(self._fetched, member, order, plan, plan.source), self._copy_s())

    def _fetched(self, member: Member, order: StartWorkers, plan: RankPlan, source: Peer) -> None:
        """The time that a copy takes to come has passed."""
        assert order.restore_step is not None
        if member.start is not order:
            return
        if not self._cluster.give_copy(source.node, order, plan.rank):
            self.orders.start_failed(
                member, f"rank {plan.rank} could not get its snapshot from {source.node}"
            )
            return
        self._keep(order.job, plan.rank, order.restore_step, Use(peer=True))
        self._start_worker(member, order, plan)

    def _start_worker(self, member: Member, order: StartWorkers, plan: RankPlan) -> None:
        key = f"{order.job}/{order.generation}/{plan.rank}"
        if plan.tier in ("memory", "peer"):
            held = self._held.get(order.job, {}).get(plan.rank, {})
            assert order.restore_step in held, f"{key}: its snapshot of {order.restore_step} is gone"
        torch = order.spec.get("model") is not None
        process = Process(key, order.generation, plan.rank, from_template=torch)
        member.processes[key] = process
        worker = Worker(self, process, order, plan)
        self.local(partial(self._born, member, worker), self._fork_s(torch))

    def _born(self, member: Member, worker: Worker) -> None:
        process = worker.process
        if member.processes.get(process.key) is not process:
            return
        if process.doomed:
            self.ended(process, -9)
            return
        process.pid = self._cluster.new_pid()
        self.workers[process.key] = worker
        self.node.begin(worker)
        self.phase_passed(worker, "fork")
        self._cluster.runs.join(worker)

    # ------------------------------------------------------------ hands: snapshots

    def committed(self, job: str, step: int, intervals: Intervals, processes: list[Process]) -> None:
        self._mark_durable(job, step)
        for process in processes:
            worker = self.workers.get(process.key)
            if worker is not None and not worker.ended:
                worker.committed(step, intervals)

    def holdings(self, job: str) -> tuple[Holding, ...]:
        held = self._held.get(job, {})
        return tuple(
            Holding(rank, step, SNAPSHOT_BYTES) for rank in sorted(held) for step in sorted(held[rank])
        )

    def forget(self, job: str) -> None:
        self._held.pop(job, None)
        self._durable.pop(job, None)

    def _mark_durable(self, job: str, step: int) -> None:
        self._durable[job] = step
        self._trim(job)

    def _drop_newer(self, job: str, step: int) -> None:
        for steps in self._held.get(job, {}).values():
            for newer in [each for each in steps if each > step]:
                del steps[newer]
        if self._durable.get(job, step) > step:
            del self._durable[job]

    def _trim(self, job: str) -> None:
        for steps in self._held.get(job, {}).values():
            kept = kept_steps(steps, self._durable.get(job, -1))
            for step in [each for each in steps if each not in kept]:
                del steps[step]

    # ------------------------------------------------------------ what workers say

    def heard(self, worker: Worker, do: Callable[[Member], None]) -> None:
        """Take in something a worker says, unless it is doomed or of an older generation by then."""

        def take() -> None:
            member = self.orders.members.get(worker.job)
            process = worker.process
            if member is not None and not process.doomed and process.generation == member.generation:
                do(member)

        self.local(take)

    def phase_passed(self, worker: Worker, phase: Phase) -> None:
        clock = self.clock()
        self.heard(worker, lambda member: self.orders.phase_passed(member, worker.rank, phase, clock))

    def step_done(self, worker: Worker, report: StepReport) -> None:
        def take(member: Member) -> None:
            member.steps[worker.rank] = report.step
            self.report(report)

        self.heard(worker, take)

    def snapshot_taken(self, worker: Worker, step: int, use: Use) -> None:
        def take(member: Member) -> None:
            self._keep(worker.job, worker.rank, step, use)
            if use.peer:
                self._cluster.heap.after(self._copy_s(), lambda: self._copy(worker, step))

        self.heard(worker, take)

    def _copy(self, worker: Worker, step: int) -> None:
        """The time that a copy takes has passed: the holder has it, if it is there and of the same generation."""
        holder = worker.order.holder
        assert holder is not None
        made = self.alive and step in self._held.get(worker.job, {}).get(worker.rank, {})
        waiting = [*self._unacknowledged, *self._fresh]
        reports = [r for r in waiting if (r.job, r.rank) == (worker.job, worker.rank)]
        made = made and self._cluster.take_copy(holder.node, worker, step, reports)

        def take(member: Member) -> None:
            if made and member.start is not None:
                self._held[worker.job] = {
                    rank: steps
                    for rank, steps in self._held.get(worker.job, {}).items()
                    if rank in member.kept_ranks
                }
            worker.copied_step = step

        self.heard(worker, take)

    def take_copy(self, worker: Worker, step: int, reports: list[StepReport]) -> bool:
        """Keep a copy for another node's worker, unless its generation is not the one known here."""
        if self.stopped_until > self._heap.now or self.orders.generation(worker.job) != worker.generation:
            return False
        self._keep(worker.job, worker.rank, step, Use(peer=True))
        self._carried[worker.job, worker.rank, step] = reports
        return True

    def give_copy(self, job: str, generation: int, rank: int, step: int) -> bool:
        """Give a copy to a node that starts ``generation``, if it is here; its reports are delivered from here."""
        if self.stopped_until > self._heap.now or self.orders.generation(job) > generation:
            return False
        if step not in self._held.get(job, {}).get(rank, {}):
            return False
        for report in self._carried.pop((job, rank, step), ()):
            self.report(report)
        return True

    def _copy_s(self) -> float:
        return COPY_S * self._noise.uniform(0.2, 3.0)

    def _keep(self, job: str, rank: int, step: int, use: Use) -> None:
        self._held.setdefault(job, {}).setdefault(rank, {})[step] = use
        self._trim(job)

    def shards_saved(self, worker: Worker, step: int, costs: SaveCosts) -> None:
        shards = ShardSet(rank=worker.rank, step=step, seconds=0.1, files=(), costs=costs)
        self.heard(worker, lambda member: self.orders.shards_saved(member, shards))

    def save_failed(self, worker: Worker) -> None:
        self.heard(worker, lambda member: self.orders.save_failed(member, "the storage is full"))

    def failing(self, worker: Worker, failure: Failure) -> None:
        self.heard(worker, lambda member: self.orders.failing(member, worker.process, failure))

    def ended(self, process: Process, code: int) -> None:
        """The agent notices the end of a process."""
        self.workers.pop(process.key, None)
        member = self.orders.members.get(process.key.split("/", 1)[0])
        if member is not None and member.processes.get(process.key) is process:
            self.orders.ended(member, process, code, self.clock())

    # ------------------------------------------------------------ ends

    def leave(self, why: str) -> None:
        self.note(f"agent leaves: {why}")
        self.die()

    def die(self) -> None:
        """The process ends, by itself or by force; the guard kills what it has started."""
        if not self.alive:
            return
        self.alive = False
        self._todo.clear()
        for worker in list(self.workers.values()):
            worker.end(-9)
        if self.connection is not None:
            connection, self.connection, self.linked = self.connection, None, False
            connection.close_by_agent()
        self._cluster.agent_died(self)

    def kill_store(self) -> None:
        """The rendezvous stores here die."""
        for process in self._processes():
            if process.rank is None and process.pid is not None:
                self._kill(process)

    def kill_template(self) -> None:
        """The template dies, and with it all that was forked or is about to be."""
        self._template = False
        for process in self._processes():
            if process.from_template:
                process.error_class, process.error = "TemplateLost", "the template process of its node died"
                if process.pid is None:
                    self.ended(process, -9)  # it never was
                else:
                    self._kill(process)

    def _processes(self) -> list[Process]:
        return [p for member in self.orders.members.values() for p in list(member.processes.values())]

    def has_store(self, job: str, generation: int) -> bool:
        member = self.orders.members.get(job)
        return self.alive and member is not None and f"{job}/{generation}/store" in member.processes
