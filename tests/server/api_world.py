"""A state directory with a history, written by the production controller and journal, without any process.

A test says what the agents report; the controller decides, and event, changes and commands are journaled as
the runtime does. Each event is one second after the one before, so times in expectations are whole.
"""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Any, Self

from live import cluster_of
from myriad.control import events as ev
from myriad.control.controller import Controller
from myriad.control.events import AnyEvent
from myriad.runtime.paths import StateDir
from myriad.runtime.store import Journal, Reports
from myriad.spec.cluster import ClusterSpec
from myriad.spec.fields import spec_from_mapping
from myriad.spec.job import JobSpec
from myriad.spec.messages import FileSum, Holding, MemberStatus, ShardSet, StepReport

START_S = 1_700_000_000.0  # 2023-11-14T22:13:20Z
ALL_PHASES = {"fork": 0.1, "rendezvous": 0.2, "restore": 0.3, "first_step": 0.4}

MODEL_JOB = {
    "name": "llama",
    "nodes": 2,
    "spares": 1,
    "model": {"layers": 2, "dim": 8, "heads": 2, "kv_heads": 2, "ffn_dim": 16, "vocab_size": 258},
    "layout": {"dp_shard": 2},
    "data": {"path": "tokens", "sequence_length": 8, "global_batch": 2},
    "optimizer": {"steps": 6, "learning_rate": 1e-3},
}


class World:
    """See the module. Close it before the folder goes."""

    def __init__(self, root: Path, nodes: int = 3) -> None:
        root.mkdir(parents=True)
        self.state_dir = StateDir(root)
        self.now_s = START_S
        self._journal = Journal(self.state_dir)
        self._reports = Reports(self.state_dir)
        self._controller = Controller()
        self._version = 0
        self.cluster = spec_from_mapping(ClusterSpec, cluster_of(nodes), "cluster")
        spec = self.cluster.model_dump(mode="json")
        self.happen(ev.ClusterConfigured(spec=spec, jobs_dir=str(self.state_dir.jobs)))
        self.happen(ev.ControllerStarted())
        for node in self.cluster.nodes:
            self.happen(ev.AgentConnected(node=node.name, incarnation=f"{node.name}-1"))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._journal.close()
        self._reports.close()

    def happen(self, event: AnyEvent) -> None:
        """One second later: decide and journal."""
        self.now_s += 1.0
        commands = self._controller.handle(event, self.now_s)
        self._journal.append([(self.now_s, event, self._controller.changes, commands)])

    def submit(self, spec: dict[str, Any]) -> str:
        job = spec_from_mapping(JobSpec, spec, "job").model_dump(mode="json")
        self.happen(ev.JobSubmitted(request=f"request {self.now_s}", spec=job))
        return f"j{len(self._controller.state.requests)}"

    def member(self, job: str, node: str, generation: int, state: Any, **fields: Any) -> None:
        """The agent of a node reports the status of its member."""
        self._version += 1
        status = MemberStatus(job=job, generation=generation, version=self._version, state=state, **fields)
        self.happen(ev.MemberReported(node=node, incarnation=f"{node}-1", member=status))

    def lose(self, node: str) -> None:
        self.happen(ev.AgentExited(node=node, incarnation=f"{node}-1", silent_s=0.25))

    def steps(self, job: str, generation: int, first: int, last: int) -> None:
        """Both ranks report steps; rank 0 holds the loss."""
        reports = []
        for step in range(first, last + 1):
            for rank in (0, 1):
                only = {"loss": 5.0 - step / 10, "tokens": 16} if rank == 0 else {}
                common = {"wall_s": 0.5, "compute_s": 0.4, "samples": (2 * step - 2 + rank,)}
                reports.append(
                    StepReport(job=job, generation=generation, rank=rank, step=step, **common, **only)
                )
        self._reports.add(reports)

    def happen_cancel(self, job: str) -> None:
        """Cancel, and every agent confirms."""
        self.happen(ev.CancelRequested(job=job))
        for node in self.cluster.nodes:
            if node.name in self._controller.state.members(job):
                self.member(job, node.name, 1, "stopped")

    # ------------------------------------------------------------ stories

    def run_command(self, spec: dict[str, Any]) -> str:
        """A command job up to RUNNING on one node."""
        job = self.submit(spec)
        self.member(job, "n0", 1, "store", store_port=1234)
        self.member(job, "n0", 1, "started", store_port=1234, pids={0: 4000}, phases={"fork": 0.1})
        return job

    def finish(self, job: str, node: str = "n0") -> None:
        """Every worker has ended with 0, and the rest is fenced."""
        self.member(job, node, 1, "exited", store_port=1234)
        self.member(job, node, 1, "stopped")

    def train_and_lose_a_node(self) -> str:
        """A model job on n0 and n1: four steps, the second durable; n1 dies; n2 takes over; two more steps."""
        job = self.submit(MODEL_JOB)
        self.member(job, "n0", 1, "store", store_port=1234)
        for rank, node in enumerate(("n0", "n1")):
            self.member(
                job, node, 1, "started", store_port=1234, pids={rank: 4000 + rank}, phases=ALL_PHASES, step=1
            )
        for rank, node in enumerate(("n0", "n1")):
            shard = ShardSet(rank=rank, step=2, seconds=0.1, files=(FileSum("x.distcp", 10, 1),))
            started = {"pids": {rank: 4000 + rank}, "phases": ALL_PHASES, "step": 2, "shards": (shard,)}
            self.member(job, node, 1, "started", store_port=1234, **started)
        self.steps(job, 1, 1, 4)
        self.lose("n1")
        held = (Holding(0, 2, 100), Holding(0, 4, 100))
        self.member(job, "n0", 1, "stopped", holdings=held)
        self.member(job, "n0", 2, "store", store_port=1235, holdings=held)
        for rank, node in enumerate(("n0", "n2")):
            self.member(
                job, node, 2, "started", store_port=1235, pids={rank: 5000 + rank}, phases=ALL_PHASES, step=3
            )
        self.steps(job, 2, 3, 4)
        return job
