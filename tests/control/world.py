"""A small virtual cluster under the production controller: no threads, no processes, no clock of its own.

``World`` feeds events to ``Controller.handle`` and carries its commands to virtual agents. Messages of one
connection keep their order; whatever is on a connection when it is cut is lost. ``run`` delivers everything in
order; a test that wants another order picks from ``agents`` itself. A story takes about 2 ms.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from invariants import check_everything
from virtual_agent import VirtualAgent

from myriad.control.commands import AnyCommand, InjectFault, StartAgent, ToAgent
from myriad.control.controller import Controller
from myriad.control.events import (
    AgentDisconnected,
    AgentExited,
    AnyEvent,
    CancelRequested,
    ClusterConfigured,
    ControllerStarted,
    DownRequested,
    DrainRequested,
    JobSubmitted,
    NodeSilent,
    TimerFired,
    UndrainRequested,
)
from myriad.control.journal import Entry, Records
from myriad.control.records import AllocationRecord, GenerationRecord, JobRecord, NodeRecord
from myriad.control.state import State
from myriad.control.status import JobStatus
from myriad.spec.cluster import ClusterSpec
from myriad.spec.job import JobSpec
from myriad.spec.messages import ControllerMessage, SaveCosts

TICK_S = 0.001  # between two events
DELIVERIES_MAX = 20_000  # a story that needs more goes in circles


class World:
    """See the module. Nodes are n0, n1, ... dealt to ``leaves`` in blocks."""

    def __init__(self, nodes: int = 5, accelerators: int = 2, leaves: int = 1, boot: bool = True) -> None:
        self.now = 1000.0
        self.controller = Controller()
        self.journal: list[Entry] = []
        self.disk = Records()
        self.agents: dict[str, VirtualAgent] = {}
        self.harm: list[InjectFault] = []
        self.pids = 100
        self.submissions = 0
        self._turn = 0
        self.written: set[tuple[str, int, int, int]] = set()  # job, generation, rank, step
        self.committed: set[tuple[str, int, int]] = set()  # job, step, generation
        self.handle(ClusterConfigured(spec=_cluster(nodes, accelerators, leaves), jobs_dir="/jobs"))
        self.handle(ControllerStarted())
        if boot:
            self.run()

    # ------------------------------------------------------------ the loop

    @property
    def state(self) -> State:
        return self.controller.state

    def handle(self, event: AnyEvent) -> list[AnyCommand]:
        """Let the controller decide, check everything, then carry its commands out."""
        self.now += TICK_S
        before = {job.id: job for job in self.state.table(JobRecord).values()}
        commands = self.controller.handle(event, self.now)
        entry = Entry(self.now, event, tuple(self.controller.changes), tuple(commands))
        self.journal.append(entry)
        self.disk.fold(entry.changes)
        check_everything(self, before)
        for command in commands:
            self._execute(command)
        return commands

    def _execute(self, command: AnyCommand) -> None:
        match command:
            case ToAgent():
                agent = self.agents.get(command.node)
                if agent is not None and agent.linked and agent.incarnation == command.incarnation:
                    agent.inbox.append(command.message)
            case StartAgent():
                old = self.agents.get(command.node)
                if old is None or not old.alive:
                    life = 1 if old is None else int(old.incarnation.rpartition(".")[2]) + 1
                    agent = VirtualAgent(self, command.node, life)
                    self.agents[command.node] = agent
                    agent.todo.append(agent.dial)
            case InjectFault():
                self.harm.append(command)

    def run(self, until: Callable[[], object] | None = None) -> None:
        """Deliver and work in order until nothing is left to do, or until ``until`` holds."""
        for _ in range(DELIVERIES_MAX):
            if until is not None and until():
                return
            if not self._step():
                break
        else:
            raise AssertionError("the cluster does not come to rest")
        assert until is None or until(), "the story went on without what it waits for"

    def _step(self) -> bool:
        """One agent in turn does one thing; False when none has anything to do."""
        for _ in range(len(self.agents)):
            self._turn = (self._turn + 1) % len(self.agents)
            if list(self.agents.values())[self._turn].work():
                return True
        return False

    def tick(self, seconds: float) -> None:
        """Let time pass, deadlines firing at their moment, and everybody work."""
        self.pass_time(seconds, self.run)
        self.run()

    def pass_time(self, seconds: float, between: Callable[[], None] = lambda: None) -> None:
        """Only let time pass; ``between`` follows every deadline."""
        end = self.now + seconds
        while (due := self.controller.next_deadline()) is not None and due <= end:
            self.now = max(self.now, due)
            self.handle(TimerFired())
            after = self.controller.next_deadline()
            assert after is None or after > self.now, "a deadline that has fired is still due"
            between()
        self.now = max(self.now, end)

    def new_pid(self) -> int:
        self.pids += 1
        return self.pids

    # ------------------------------------------------------------ what people do

    def submit(self, nodes: int = 2, spares: int = 0, request: str = "", **keys: Any) -> str:
        """A ``command:`` job, or with ``torch=True`` a model job; returns its id."""
        self.submissions += 1
        spec = job_spec(nodes, spares, **keys)
        request = request or f"request {self.submissions}"
        self.handle(JobSubmitted(request=request, spec=spec))
        return self.state.requests[request]

    def start(self, **keys: Any) -> str:
        """Submit a job and let it run."""
        job = self.submit(**keys)
        self.run()
        assert self.job(job).status is JobStatus.RUNNING, self.job(job)
        return job

    def cancel(self, job: str) -> None:
        self.handle(CancelRequested(job=job))

    def drain(self, node: str, reason: str = "") -> None:
        self.handle(DrainRequested(node=node, reason=reason))

    def undrain(self, node: str) -> None:
        self.handle(UndrainRequested(node=node))

    def down(self, cancel_jobs: bool = False) -> None:
        self.handle(DownRequested(cancel_jobs=cancel_jobs))

    # ------------------------------------------------------------ what goes wrong

    def agent_dies(self, node: str) -> None:
        """The agent's process ends and all of the node's workers with it; the engine sees it."""
        agent = self.agents[node]
        linked = agent.linked
        agent.die()
        if linked:
            self.handle(AgentDisconnected(node=node, incarnation=agent.incarnation))
        self.handle(AgentExited(node=node, incarnation=agent.incarnation))

    def goes_silent(self, node: str, beats: int = 8) -> None:
        """Cut off and unheard: the agent and its workers live on."""
        agent = self.agents[node]
        if agent.linked:
            agent.cut()
        self.handle(NodeSilent(node=node, incarnation=agent.incarnation, beats=beats, silent_s=4.0))

    def reconnect(self, node: str) -> None:
        agent = self.agents[node]
        if agent.linked:
            agent.cut()
        agent.dial()

    def restart_controller(self, dial: bool = True) -> None:
        """Kill the controller and start one on what the journal has; connections break."""
        self.controller = Controller(self.disk.load())
        for agent in self.agents.values():
            agent.linked = False
            agent.inbox.clear()
            agent.outbox.clear()
        self.handle(ControllerStarted())
        for agent in list(self.agents.values()):
            if dial and agent.alive:
                agent.todo.appendleft(agent.dial)

    # ------------------------------------------------------------ workers

    def place(self, job: str, rank: int) -> VirtualAgent:
        """The agent that runs the rank."""
        for agent in self.agents.values():
            if agent.alive and agent.worker(job, rank) is not None:
                return agent
        raise AssertionError(f"rank {rank} of {job} runs nowhere")

    def exit(self, job: str, rank: int, code: int, step: int | None = None, error: str = "") -> None:
        self.place(job, rank).exit(job, rank, code, step, error)

    def finish(self, job: str) -> None:
        """Every worker exits with 0."""
        for rank in range(self.job(job).world_size):
            self.exit(job, rank, 0)

    def save(
        self,
        job: str,
        step: int,
        ranks: Iterable[int] | None = None,
        costs: SaveCosts | None = None,
    ) -> None:
        for rank in ranks if ranks is not None else range(self.job(job).world_size):
            self.place(job, rank).save(job, rank, step, costs)

    # ------------------------------------------------------------ reading

    def job(self, job: str) -> JobRecord:
        return self.state.job(job)

    def node(self, name: str) -> NodeRecord:
        return self.state.node(name)

    def allocation(self, job: str) -> AllocationRecord:
        return self.state.allocation(job)

    def generation(self, job: str, number: int | None = None) -> GenerationRecord:
        return self.state.generation(job, number or self.job(job).generation)

    def sent(self, kind: type[ControllerMessage], node: str | None = None) -> list[Any]:
        """All messages of a class that the controller has ever given for a node (or any)."""
        commands = (c for entry in self.journal for c in entry.commands if isinstance(c, ToAgent))
        return [c.message for c in commands if isinstance(c.message, kind) and node in (None, c.node)]


def job_spec(nodes: int = 2, spares: int = 0, torch: bool = False, **keys: Any) -> dict[str, Any]:
    """A specification as the controller gets it. ``torch`` for a model job on 2-accelerator nodes."""
    if torch:
        keys |= {
            "model": {
                "layers": 2,
                "dim": 16,
                "heads": 2,
                "kv_heads": 2,
                "ffn_dim": 32,
                "vocab_size": 256,
            },
            "layout": {"dp_replicate": nodes * 2},
            "data": {"path": "/data/text", "sequence_length": 16, "global_batch": nodes * 2},
            "optimizer": {"steps": 100, "learning_rate": 1e-3},
        }
    else:
        keys = {"command": "true", **keys}
    spec = JobSpec.model_validate({"name": "job", "nodes": nodes, "spares": spares, **keys})
    return spec.model_dump(mode="json")


def _cluster(nodes: int, accelerators: int, leaves: int) -> dict[str, Any]:
    per_leaf = -(-nodes // leaves)
    spec = {
        "name": "virtual",
        "node_types": {"small": {"accelerators": accelerators, "cpus": 1, "memory": "1GiB"}},
        "nodes": [
            {
                "name": f"n{i}",
                "type": "small",
                "rack": f"r{i // per_leaf}",
                "power_feed": "a",
                "leaf": f"l{i // per_leaf}",
            }
            for i in range(nodes)
        ],
        "fabric": {level: {"bandwidth": "1GB/s"} for level in ("node", "leaf", "core")},
    }
    return ClusterSpec.model_validate(spec).model_dump(mode="json")
