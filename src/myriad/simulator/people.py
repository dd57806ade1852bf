"""Users and operators: they ask, and ask again when they hear nothing. Requests are checked as the real ones are."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from myriad.cluster.state import NodeState
from myriad.control.events import (
    AnyEvent,
    CancelRequested,
    DownRequested,
    DrainRequested,
    InjectRequested,
    JobSubmitted,
    UndrainRequested,
)
from myriad.control.records import ClusterRecord, JobRecord, NodeRecord
from myriad.simulator.scenario import JobPlan
from myriad.spec.fields import AUTO
from myriad.spec.job import JobSpec

if TYPE_CHECKING:
    from myriad.simulator.cluster import VirtualCluster

ASK_AGAIN_S = 3.0
REQUEST_S = 0.005


class People:
    """``plans`` are the jobs by name; ``answered`` the requests whose submit was confirmed, with the job."""

    def __init__(self, cluster: VirtualCluster) -> None:
        self._cluster = cluster
        self.plans: dict[str, JobPlan] = {}
        self.specs: dict[str, dict[str, Any]] = {}
        self.answered: dict[str, str] = {}

    def submit(self, number: int, plan: JobPlan) -> None:
        name = f"job-{number}"
        self.plans[name] = plan
        self.specs[name] = job_spec(name, plan, self._cluster.scenario.accelerators)
        self.ask_for(name)

    def ask_for(self, name: str) -> None:
        """Submit, or submit once more: the request's key is the same."""

        def heard() -> None:
            job = self._cluster.state.requests[name]
            known = self.answered.setdefault(name, job)
            self._cluster.checks.submit_answered(name, job, known)

        self._ask(lambda: JobSubmitted(request=name, spec=self.specs[name]), heard)

    def cancel(self, index: int) -> None:
        jobs = list(self._cluster.state.table(JobRecord))
        if jobs:
            job = jobs[index % len(jobs)]
            self._ask(lambda: CancelRequested(job=job) if self._cluster.state.get(JobRecord, job) else None)

    def drain(self, node: str) -> None:
        self._ask(lambda: DrainRequested(node=node, reason="noisy fan"))

    def out_of_service(self) -> list[str]:
        """Nodes that an operator may want back."""
        out = (NodeState.DOWN, NodeState.DRAINED, NodeState.DRAINING)
        return [n.name for n in self._cluster.state.table(NodeRecord).values() if n.state in out]

    def undrain(self, node: str) -> None:
        self._ask(lambda: UndrainRequested(node=node))

    def down(self, cancel_jobs: bool) -> None:
        self._ask(lambda: DownRequested(cancel_jobs=cancel_jobs), again=False)

    def inject(self, index: int) -> None:
        """One of the faults a person may ask for, at one of the targets there are."""
        nodes = [n for n in self._cluster.nodes.values() if n.agent is not None]
        workers = self._cluster.living_workers()
        if index % 2 and workers:
            worker = workers[index // 2 % len(workers)]
            kind, target = ("kill-worker", "stop")[index // 2 % 2], f"{worker.job}/{worker.rank}"
        elif nodes:
            kind = ("kill-node", "kill-agent", "stop")[index // 2 % 3]
            target = nodes[index // 2 % len(nodes)].name
        else:
            return
        self._ask(lambda: InjectRequested(kind=kind, target=target), again=False)  # type: ignore[arg-type]

    def _ask(
        self,
        make: Callable[[], AnyEvent | None],
        heard: Callable[[], None] = lambda: None,
        again: bool = True,
    ) -> None:
        """Have the controller take an event; ask again until it has answered. ``make`` may refuse by None."""
        controller, heap = self._cluster.controller, self._cluster.heap
        answered = False

        def done() -> None:
            nonlocal answered
            answered = True
            heard()

        def arrive() -> None:
            event = make()
            if event is not None and self._cluster.state.get(ClusterRecord, "cluster") is not None:
                controller.post(event, done)

        def retry() -> None:
            if not answered:
                self._ask(make, heard)

        if controller.alive:
            heap.after(REQUEST_S, lambda: controller.inbound(arrive))
        if again:
            heap.after(ASK_AGAIN_S, retry)


def job_spec(name: str, plan: JobPlan, accelerators: int) -> dict[str, Any]:
    """The job's specification as the controller gets it."""
    keys: dict[str, Any] = {"name": name, "nodes": plan.nodes, "spares": plan.spares}
    if plan.time_limit_s is not None:
        keys["time_limit"] = plan.time_limit_s
    if plan.torch:
        ranks = plan.nodes * accelerators
        keys |= {
            "model": {"layers": 2, "dim": 16, "heads": 2, "kv_heads": 2, "ffn_dim": 32, "vocab_size": 256},
            "layout": {"dp_replicate": ranks},
            "data": {"path": "/data/text", "sequence_length": 16, "global_batch": ranks},
            "optimizer": {"steps": plan.steps, "learning_rate": 1e-3},
            "checkpoint": {
                "every_steps": AUTO if plan.save_every is None else plan.save_every,
                "snapshot_every_steps": AUTO if plan.snapshot_every is None else plan.snapshot_every,
                "peer_every_steps": AUTO if plan.peer_every is None else plan.peer_every,
            },
        }
    else:
        keys["command"] = "true"
    return JobSpec.model_validate(keys).model_dump(mode="json")
