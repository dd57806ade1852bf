"""The virtual cluster: nodes, agents, workers, links, storage and people around the production controller.

Only clock, network, processes and hardware are swapped. What decides (controller, scheduler, operations, the
agents' orders, the journal's rows) is what runs in production.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from myriad.control.journal import Entry
from myriad.control.records import JobRecord
from myriad.control.state import State
from myriad.simulator.agent import VirtualAgent
from myriad.simulator.checks import Broken, Checks
from myriad.simulator.controller import VirtualController
from myriad.simulator.coverage import Coverage
from myriad.simulator.heap import Heap
from myriad.simulator.network import Connection, Link
from myriad.simulator.people import People
from myriad.simulator.scenario import JobPlan, Scenario
from myriad.simulator.storage import SharedStorage
from myriad.simulator.training import Runs, Worker
from myriad.spec.cluster import ClusterSpec
from myriad.spec.messages import StartWorkers, StepReport

HEARTBEAT_S = 0.5
EVENTS_MAX = 5_000  # ten times what the longest of 2,000 schedules needs
BOOT_S = 0.5  # from the engine's order until an agent dials


class VirtualNode:
    """One node: its cable, its power, its agent, and the worker processes that really run on it."""

    def __init__(self, cluster: VirtualCluster, name: str) -> None:
        self.cluster = cluster
        self.name = name
        self.link = Link(cluster.heap)
        self.dark_until = 0.0  # no power
        self.agent: VirtualAgent | None = None
        self.lives = 0
        self.starting = False
        self.workers: list[Worker] = []

    def begin(self, worker: Worker) -> None:
        self.workers.append(worker)
        self.cluster.checks.worker_begins(self, worker)

    def finish(self, worker: Worker) -> None:
        self.workers.remove(worker)


class VirtualCluster:
    """One run of a scenario, from the first start of the controller on. ``trace`` keeps the story; more than
    ``events_max`` events mean that the controller goes in circles."""

    def __init__(self, scenario: Scenario, trace: bool = False, events_max: int = EVENTS_MAX) -> None:
        self.scenario = scenario
        self._events_max = events_max
        self.network = scenario.network
        self.heap = Heap()
        self.heartbeat_s = HEARTBEAT_S
        self.storage = SharedStorage()
        self.runs = Runs(self)
        self.spec = cluster_spec(scenario)
        self.nodes = {node["name"]: VirtualNode(self, node["name"]) for node in self.spec["nodes"]}
        self.coverage = Coverage()
        self.checks = Checks(self)
        self.people = People(self)
        self.reports: dict[str, dict[tuple[int, int, int], StepReport]] = {}
        self.events = 0
        self.mended = False  # faults have stopped
        self.settled = False  # has anything happened to a job since somebody looked?
        self.story: list[tuple[float, tuple[str, ...], str]] | None = [] if trace else None
        self._pids = 0
        self.controller = VirtualController(self)
        self.controller.boot()

    @property
    def state(self) -> State:
        return self.controller.state

    def stream(self, purpose: str) -> random.Random:
        """Random numbers for one purpose, whatever happens elsewhere."""
        return random.Random(f"{self.scenario.seed} {purpose}")

    def new_pid(self) -> int:
        self._pids += 1
        return self._pids

    def note(self, text: str, *objects: str) -> None:
        if self.story is not None:
            self.story.append((self.heap.now, objects, text))

    # ------------------------------------------------------------ engine

    def agent_of(self, node: str) -> VirtualAgent | None:
        """The living agent of a node."""
        return self.nodes[node].agent

    def start_agent(self, name: str, fenced: str) -> None:
        """Start an agent unless one is alive there or about to be, or the node has no power; end a fenced one."""
        node = self.nodes[name]
        if self.scenario.proof and node.agent is not None and node.agent.incarnation == fenced:
            node.agent.die()
            return
        if node.agent is None and not node.starting:
            node.starting = True
            self.heap.at(max(self.heap.now + BOOT_S, node.dark_until), lambda: self._agent_boots(node))

    def _agent_boots(self, node: VirtualNode) -> None:
        if node.dark_until > self.heap.now:
            self.heap.at(node.dark_until, lambda: self._agent_boots(node))
            return
        node.starting = False
        node.lives += 1
        self.note(f"agent life {node.lives} begins", node.name)
        node.agent = VirtualAgent(self, node, f"{node.name}.{node.lives}")

    def agent_died(self, agent: VirtualAgent) -> None:
        self.note("agent is gone", agent.node.name)
        if agent.node.agent is agent:
            agent.node.agent = None
        if self.scenario.proof:
            self.controller.agent_exited(agent)
        self.controller.watch()

    def inject(self, kind: str, target: str) -> None:
        """The harm that was asked for through the controller."""
        node, _, rank = target.rpartition("/")
        if rank.isdigit() and node:
            for worker in self.living_workers():
                if worker.job == node and worker.rank == int(rank):
                    self.harm_worker(worker, stop_s=5.0 if kind == "stop" else 0.0)
            return
        agent = self.agent_of(target)
        if agent is not None:
            if kind == "stop":
                self.stop_agent(agent, 5.0, workers=True)
            else:
                agent.die()

    def harm_worker(self, worker: Worker, stop_s: float) -> None:
        if stop_s:
            worker.stopped_until = max(worker.stopped_until, self.heap.now + stop_s)
        else:
            worker.end(-9)

    def stop_agent(self, agent: VirtualAgent, seconds: float, workers: bool) -> None:
        agent.stopped_until = max(agent.stopped_until, self.heap.now + seconds)
        self.heap.at(agent.stopped_until, agent.work)
        for worker in agent.node.workers if workers else ():
            self.harm_worker(worker, seconds)
        self.controller.watch()

    # ------------------------------------------------------------ what agents and workers need

    def connect(self, agent: VirtualAgent) -> Connection | None:
        """A connection to the controller, if one listens."""
        if not self.controller.alive:
            return None
        node = agent.node
        agent.dials += 1
        noise = self.stream(f"link {agent.incarnation} {agent.dials}")
        return Connection(self.heap, node.link, lambda: self.network, noise)

    def plan_of(self, name: str) -> JobPlan:
        return self.people.plans[name]

    def has_store(self, job: str, generation: int) -> bool:
        agents = (node.agent for node in self.nodes.values())
        return any(agent is not None and agent.has_store(job, generation) for agent in agents)

    def living_workers(self) -> list[Worker]:
        return [worker for node in self.nodes.values() for worker in node.workers]

    def take_copy(self, holder: str, worker: Worker, step: int, reports: list[StepReport]) -> bool:
        """Give a snapshot's copy to the agent of ``holder``; whether it has it now."""
        agent = self.agent_of(holder)
        return agent is not None and agent.take_copy(worker, step, reports)

    def give_copy(self, source: str, order: StartWorkers, rank: int) -> bool:
        """Whether the agent of ``source`` gives ``rank`` the copy that ``order`` wants restored."""
        agent, step = self.agent_of(source), order.restore_step
        return (
            agent is not None
            and step is not None
            and agent.give_copy(order.job, order.generation, rank, step)
        )

    def check_restore(self, worker: Worker) -> None:
        self.checks.worker_restores(worker)

    def marked(self, job: str, step: int, generation: int) -> None:
        """Rank 0 writes the marker of a checkpoint."""
        self.storage.mark(job, step, generation)
        self.checks.marker_written(job, step, generation)

    def store_reports(self, reports: list[StepReport]) -> None:
        for report in reports:
            self.reports.setdefault(report.job, {})[report.generation, report.step, report.rank] = report

    # ------------------------------------------------------------ what the controller does

    def handled(self, entry: Entry) -> None:
        """One event was handled; it is not safe yet."""
        self.events += 1
        if self.events > self._events_max:
            jobs = [self.state.job(name) for name in self.state.live]
            where = "; ".join(f"{job.id} is {job.status} generation {job.generation}" for job in jobs)
            raise Broken(f"the controller goes in circles: {where}", *(job.id for job in jobs))
        self.coverage.event(entry)
        if self.story is not None:
            self._tell(entry)

    def committed(self, entries: list[Entry]) -> None:
        """These entries are safe on the disk."""
        for entry in entries:
            for change in entry.changes:
                if isinstance(change, JobRecord):
                    self.settled = False
                    self.checks.job_committed(change)

    def _tell(self, entry: Entry) -> None:
        from myriad.simulator.story import tell

        for objects, text in tell(entry):
            self.note(text, *objects)

    # ------------------------------------------------------------ running

    def run(self, until: float, done: Callable[[], bool] = lambda: False) -> bool:
        """Let the world go on; True as soon as ``done`` holds (looked at when a job has changed)."""
        self.settled = False
        while True:
            if not self.settled:
                self.settled = True
                if done():
                    return True
            if not self.heap.step(until):
                return done()

    def mend(self) -> None:
        """Faults stop: power and links are back, what was stopped goes on, messages travel well."""
        now = self.heap.now
        self.mended = True
        self.network = type(self.network)()
        self.storage.fails_until = self.storage.slow_until = now
        controller = self.controller
        controller.crash_point, controller.downtime_s, controller.disk.refuses = None, 1.0, False
        if controller.stopped_until > now:
            controller.stopped_until = now
            controller.go_on(controller.life)
        controller.boot()
        for node in self.nodes.values():
            node.link.mend()
            node.dark_until = now
            for worker in node.workers:
                worker.stopped_until = now
            if node.agent is not None:
                node.agent.stopped_until = now
                node.agent.work()
        controller.watch()


def cluster_spec(scenario: Scenario) -> dict[str, Any]:
    """The specification that the controller gets: nodes n0, n1, ... dealt to leaves in blocks."""
    per_leaf = -(-scenario.nodes // scenario.leaves)
    nodes = [
        {
            "name": f"n{i}",
            "type": "small",
            "rack": f"r{i // per_leaf}",
            "power_feed": "a",
            "leaf": f"l{i // per_leaf}",
        }
        for i in range(scenario.nodes)
    ]
    spec = {
        "name": "virtual",
        "node_types": {"small": {"accelerators": scenario.accelerators, "cpus": 1, "memory": "1GiB"}},
        "nodes": nodes,
        "fabric": {level: {"bandwidth": "1GB/s"} for level in ("node", "leaf", "core")},
    }
    return ClusterSpec.model_validate(spec).model_dump(mode="json")


__all__ = ["Broken", "VirtualCluster", "VirtualNode", "cluster_spec"]
