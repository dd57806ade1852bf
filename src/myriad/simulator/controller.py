"""The controller's process in the virtual cluster: the production Controller in a runtime that may die anywhere.

The order of things is the real runtime's: a batch of events is handled, its commit is written and synced, and only
then do commands leave and people get their answers. A crash may fall between any two of these; what it leaves on
the disk is all that the next life knows.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, auto
from typing import TYPE_CHECKING

from myriad.cluster.state import NodeState
from myriad.control.commands import AnyCommand, InjectFault, StartAgent, ToAgent
from myriad.control.controller import Controller
from myriad.control.events import (
    AgentConnected,
    AgentDisconnected,
    AgentExited,
    AnyEvent,
    ClusterConfigured,
    ControllerStarted,
    MemberReported,
    TimerFired,
)
from myriad.control.journal import Entry
from myriad.control.liveness import Liveness, ended_lives
from myriad.control.records import ClusterRecord, NodeRecord
from myriad.control.state import State
from myriad.simulator.disk import Disk, DiskError
from myriad.simulator.network import Connection
from myriad.spec.messages import Refused, StepReport

if TYPE_CHECKING:
    from myriad.simulator.agent import VirtualAgent
    from myriad.simulator.cluster import VirtualCluster

BATCH_MAX = 256
TURN_S = 0.0005  # from an event's arrival until it is handled
SYNC_S = 0.005  # of one commit at most
LEAVE_DEADLINE_S = 5.0
JOBS_DIR = "/jobs"


class CrashPoint(Enum):
    """Where in its next commit the process dies."""

    IN_WRITE = auto()
    AFTER_WRITE = auto()
    IN_COMMANDS = auto()


class VirtualController:
    """All lives of the controller process, one after the other (a lock lets no two run)."""

    def __init__(self, cluster: VirtualCluster) -> None:
        self._cluster = cluster
        self._heap = cluster.heap
        self._noise = cluster.stream("controller")
        self._controller = Controller()
        self._liveness = Liveness(cluster.heartbeat_s)
        self._links: dict[str, tuple[VirtualAgent, Connection]] = {}
        self._queue: list[tuple[AnyEvent, Callable[[], None] | None]] = []
        self._backlog: list[Callable[[], None]] = []  # what arrives while the process is stopped
        self._watched: set[str] = set()  # agents whose end the engine will see
        self._busy = False
        self._due_at: float | None = None  # the timer that is set
        self._looking = False
        self._leave_by_s: float | None = None
        self._clock_base = 0.0
        self._seq = 0  # of the last row written
        self.disk = Disk()
        self.life = 0
        self.alive = False
        self.stopped_until = 0.0
        self.crash_point: CrashPoint | None = None
        self.wall_offset_s = 1.7e9
        self.downtime_s = 1.0  # until somebody starts the next life

    @property
    def state(self) -> State:
        return self._controller.state

    def clock(self) -> float:
        """As the real one's: wall time when the process began, monotonic from there, never before its last."""
        return self._clock_base + self._heap.now

    # ------------------------------------------------------------ lives

    def boot(self) -> None:
        if self.alive or self.stopped_until > self._heap.now:
            return
        state = self.disk.open()
        self.disk.refuses = False
        self.life += 1
        self.alive = True
        self._controller = Controller(state)
        self._cluster.coverage.begin(state)
        self._liveness = Liveness(self._cluster.heartbeat_s)
        self._clock_base = max(self.wall_offset_s + self._heap.now, self.disk.last_now) - self._heap.now
        self._links, self._queue, self._backlog, self._watched = {}, [], [], set()
        self._busy, self._due_at, self._looking, self._leave_by_s = False, None, False, None
        self._seq = self.disk.last_seq
        self._cluster.note(f"controller life {self.life} begins after row {self.disk.last_seq}", "controller")
        if state.get(ClusterRecord, "cluster") is None:
            self.post(ClusterConfigured(spec=self._cluster.spec, jobs_dir=JOBS_DIR))
        for node in state.table(NodeRecord).values():
            if node.state is not NodeState.DOWN:
                self._liveness.expect(node.name, node.incarnation, self._heap.now)
        self.post(ControllerStarted())
        self.watch()

    def die(self, torn_share: float = 0.0) -> None:
        """The process is gone: so are its memory and its connections, and what was not synced may be."""
        if not self.alive:
            return
        self.alive = False
        self.stopped_until = self._heap.now
        self.crash_point = None
        self.disk.crash(torn_share)
        self._cluster.note("controller dies", "controller")
        for _, connection in self._links.values():
            connection.close_by_controller()
        self._heap.after(self.downtime_s, self.boot)

    def inbound(self, do: Callable[[], None]) -> None:
        """Something reaches the process; it takes it in when it runs."""
        if not self.alive:
            return
        if self.stopped_until > self._heap.now:
            self._backlog.append(do)
        else:
            do()

    def stop(self, until: float) -> None:
        """SIGSTOP until then."""
        self.stopped_until = max(self.stopped_until, until)
        life = self.life
        self._heap.at(self.stopped_until, lambda: self.go_on(life))

    def go_on(self, life: int) -> None:
        if not self._lives(life) or self.stopped_until > self._heap.now:
            return
        backlog, self._backlog = self._backlog, []
        for do in backlog:
            do()
            if not self._lives(life):
                return  # it has died of this one: nobody is left to take in the rest
        self._looking = False
        self._look(life)
        self._wake()

    def _later(self, delay_s: float, do: Callable[[], None]) -> None:
        """Only if this life is still there; when it is stopped, once it goes on."""
        life = self.life

        def arrived() -> None:
            if self._lives(life):
                self.inbound(do)

        self._heap.after(delay_s, arrived)

    def _lives(self, life: int) -> bool:
        return self.alive and self.life == life

    # ------------------------------------------------------------ the loop

    def post(self, event: AnyEvent, done: Callable[[], None] | None = None) -> None:
        self._queue.append((event, done))
        self._wake()

    def _wake(self) -> None:
        if not self._busy and self.alive:
            self._busy = True
            self._later(TURN_S * self._noise.random(), self._turn)

    def _turn(self) -> None:
        """Handle what has queued up, and commit it."""
        batch, self._queue = self._queue[:BATCH_MAX], self._queue[BATCH_MAX:]
        due = self._controller.next_deadline()
        if due is not None and due <= self.clock():
            batch.append((TimerFired(), None))
        entries: list[Entry] = []
        ended: list[tuple[str, str]] = []
        for event, _ in batch:
            now = self.clock()
            before = self._cluster.checks.before(self.state)
            commands = self._controller.handle(event, now)
            entry = Entry(now, event, self._controller.changes, commands)
            entries.append(entry)
            ended += ended_lives(event, entry.changes, self.state)
            self._cluster.handled(entry)
            self._cluster.checks.after(self.state, before, entry)
        try:
            self.disk.write(self._seq + 1, entries)
        except DiskError:
            self.die()
            return
        self._seq += len(entries)
        if self.crash_point is CrashPoint.IN_WRITE:
            self.die(torn_share=self._noise.random())
            return
        self._later(SYNC_S * self._noise.random(), lambda: self._synced(batch, entries, ended))

    def _synced(
        self,
        batch: list[tuple[AnyEvent, Callable[[], None] | None]],
        entries: list[Entry],
        ended: list[tuple[str, str]],
    ) -> None:
        """The commit is safe: let commands leave, and people hear."""
        self.disk.sync()
        self._cluster.committed(entries)
        if self.crash_point is CrashPoint.AFTER_WRITE:
            self.die()
            return
        commands = [command for entry in entries for command in entry.commands]
        if self.crash_point is CrashPoint.IN_COMMANDS and commands:
            commands = commands[: self._noise.randrange(len(commands))]
            self._execute_all(commands)
            self.die()
            return
        self._execute_all(commands)
        for _, done in batch:
            if done is not None:
                done()
        for node, incarnation in ended:
            self._liveness.forget(node, incarnation)
        self._busy = False
        if self._may_leave():
            self.die()
            return
        self._set_timer()
        if self._queue:
            self._wake()

    def _set_timer(self) -> None:
        due = self._controller.next_deadline()
        if due is None:
            return
        at = max(due - self._clock_base, self._heap.now)
        if self._due_at is None or at < self._due_at or self._due_at <= self._heap.now:
            self._due_at = at
            self._later(at - self._heap.now, self._timer)

    def _timer(self) -> None:
        self._due_at = None
        due = self._controller.next_deadline()
        if due is not None and due <= self.clock():
            self._wake()
        else:
            self._set_timer()

    def _execute_all(self, commands: list[AnyCommand]) -> None:
        for command in commands:
            match command:
                case ToAgent():
                    self._send(command)
                case StartAgent():
                    self._watched.add(command.node)
                    self._cluster.start_agent(command.node, command.fenced)
                case InjectFault():
                    self._cluster.inject(command.kind, command.target)

    def _send(self, command: ToAgent) -> None:
        agent, connection = self._links.get(command.node, (None, None))
        if agent is None or connection is None or agent.incarnation != command.incarnation:
            return
        message = command.message
        connection.to_agent(lambda: agent.local(lambda: agent.receive(message)))
        if isinstance(message, Refused):
            connection.close_by_controller()

    def _may_leave(self) -> bool:
        cluster = self.state.get(ClusterRecord, "cluster")
        if cluster is None or not cluster.closing or self._queue:
            return False
        if any(self.state.job(job).ending for job in self.state.live):
            return False
        if self._leave_by_s is None:
            self._leave_by_s = self._heap.now + LEAVE_DEADLINE_S
            self._later(LEAVE_DEADLINE_S, self._wake)
        living = [name for name in self._watched if self._cluster.agent_of(name) is not None]
        idle = [name for name in living if self.state.node(name).job is None]
        return not idle or self._heap.now >= self._leave_by_s

    # ------------------------------------------------------------ agents

    def greet(self, agent: VirtualAgent, connection: Connection, accept: Callable[[], None]) -> None:
        """An agent says hello on a new connection."""
        life, node = self.life, agent.node.name

        def take() -> None:
            self._links[node] = (agent, connection)
            connection.to_agent(lambda: agent.local(accept))

        def ended() -> None:
            if self.life == life:
                self.inbound(lambda: self._disconnected(agent, connection))

        connection.on_end(
            agent=lambda: agent.local(lambda: agent.connection_ended(connection)), controller=ended
        )
        connection.to_controller(lambda: self.inbound(take) if self.life == life else None)

    def _disconnected(self, agent: VirtualAgent, connection: Connection) -> None:
        node = agent.node.name
        if self._links.get(node) == (agent, connection):
            del self._links[node]
            self.post(AgentDisconnected(node=node, incarnation=agent.incarnation))
            self.watch()

    def carry(
        self, agent: VirtualAgent, connection: Connection, said: AgentConnected | MemberReported
    ) -> None:
        """What an agent says of its members travels to the controller."""

        def take() -> None:
            if isinstance(said, AgentConnected):
                self._liveness.expect(said.node, said.incarnation, self._heap.now)
            self.post(said)

        self._carry(agent, connection, take)

    def carry_reports(
        self,
        agent: VirtualAgent,
        connection: Connection,
        reports: list[StepReport],
        acknowledge: Callable[[list[StepReport]], None],
    ) -> None:
        """Step reports travel to their store, and the acknowledgement back."""

        def store() -> None:
            self._cluster.store_reports(reports)
            connection.to_agent(lambda: agent.local(lambda: acknowledge(reports)))

        self._carry(agent, connection, store)

    def _carry(self, agent: VirtualAgent, connection: Connection, take: Callable[[], None]) -> None:
        life, node = self.life, agent.node.name

        def arrived() -> None:
            if self.life == life and self._links.get(node) == (agent, connection):
                self._liveness.heard(node, agent.incarnation, self._heap.now)
                take()

        connection.to_controller(lambda: self.inbound(arrived))

    def agent_exited(self, agent: VirtualAgent) -> None:
        """The engine sees the end of an agent that it watches."""
        node = agent.node.name
        if self.alive and node in self._watched:
            self._watched.discard(node)
            silent_s = self._liveness.silent_s(node, self._heap.now)
            event = AgentExited(node=node, incarnation=agent.incarnation, silent_s=silent_s)
            self._later(TURN_S, lambda: self.post(event))

    # ------------------------------------------------------------ silence

    def watch(self) -> None:
        """Somebody may have stopped beating: look until everybody is heard again or known to be down.

        While all beat there is nothing to see, so nobody looks; the first look only takes note of that.
        """
        if self.alive and not self._looking:
            self._look(self.life)

    def _look(self, life: int) -> None:
        if not self._lives(life) or self.stopped_until > self._heap.now:
            self._looking = False
            return
        all_beat = True
        for name in self._cluster.nodes:
            agent, connection = self._links.get(name, (None, None))
            if agent is not None and connection is not None and self._beats(agent, connection):
                self._liveness.heard(name, agent.incarnation, self._heap.now)
            elif self._liveness.counts(name):
                all_beat = False
        for silent in self._liveness.look(self._heap.now):
            self.post(silent)
        self._looking = not all_beat
        if self._looking:
            self._heap.after(self._liveness.pause_s, lambda: self._look(life))

    def _beats(self, agent: VirtualAgent, connection: Connection) -> bool:
        runs = agent.alive and agent.linked and agent.stopped_until <= self._heap.now
        return runs and connection.passing
