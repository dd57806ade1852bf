"""What must hold after every event, whatever has happened before (design 5).

The controller's records are compared with themselves (edges, counters, deadlines) and with what the virtual
cluster really did (which processes run where, who wrote which checkpoint). Each broken one says so in a sentence
and names its objects, whose story the explorer then tells.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from myriad.cluster.state import NodeState
from myriad.control.blame import FRUITLESS_RESTARTS_MAX
from myriad.control.commands import ToAgent
from myriad.control.events import TimerFired
from myriad.control.journal import Entry
from myriad.control.records import AllocationRecord, GenerationRecord, JobRecord, NodeRecord
from myriad.control.state import State
from myriad.control.status import EDGES, STATUS_OF, JobStatus, Reason
from myriad.spec.messages import Commit, StartWorkers
from myriad.storage.memory.cadence import Due

if TYPE_CHECKING:
    from myriad.simulator.cluster import VirtualCluster, VirtualNode
    from myriad.simulator.training import Worker


class Broken(Exception):
    """An invariant does not hold. ``objects`` are names of jobs and nodes."""

    def __init__(self, sentence: str, *objects: str) -> None:
        super().__init__(sentence)
        self.objects = objects


class Checks:
    """All invariants of one run. ``durable`` are the checkpoints whose commit is safe in the journal."""

    def __init__(self, cluster: VirtualCluster) -> None:
        self._cluster = cluster
        self.durable: set[tuple[str, int, int]] = set()  # job, step, generation
        self.checked = 0

    def before(self, state: State) -> Mapping[str, JobRecord]:
        """The job records as they are before the next event."""
        return dict(state.table(JobRecord))

    def after(self, state: State, before: Mapping[str, JobRecord], entry: Entry) -> None:
        """Everything that an event can break."""
        self.checked += 1
        kinds = {type(change) for change in entry.changes}
        if NodeRecord in kinds:
            counters_equal_a_recount(state)
        if NodeRecord in kinds or JobRecord in kinds or AllocationRecord in kinds:
            nodes_and_jobs_agree(state)
        if JobRecord in kinds:
            statuses_follow_edges(before, entry)
            generations_only_grow(state, before)
            no_job_is_lost(state, before)
            waiting_has_a_deadline(state)
            budgets_hold(state)
            self.checkpoints_are_whole(state, before)
            self.nobody_waits_for_nothing(entry)
        if GenerationRecord in kinds or AllocationRecord in kinds or JobRecord in kinds:
            self.ledgers_sum(state, entry)
        for command in entry.commands:
            if isinstance(command, ToAgent):
                self.command_is_allowed(state, command)
        self.accelerators_have_one_owner(state)

    # ------------------------------------------------------------ against the virtual cluster

    def worker_begins(self, node: VirtualNode, worker: Worker) -> None:
        """A process starts on a node: it must be the only generation there, and the only one of its rank."""
        for other in node.workers:
            if (other.job, other.generation) != (worker.job, worker.generation):
                raise Broken(
                    f"{node.name} runs {other.job} generation {other.generation} and now {worker.job} generation "
                    f"{worker.generation}",
                    *(node.name, other.job, worker.job),
                )
        for other in self._cluster.living_workers():
            same = (other.job, other.generation, other.rank) == (worker.job, worker.generation, worker.rank)
            if same and other is not worker:
                raise Broken(
                    f"rank {worker.rank} of {worker.job} generation {worker.generation} runs on "
                    f"{other.agent.node.name} and on {node.name}",
                    *(node.name, other.agent.node.name, worker.job),
                )

    def accelerators_have_one_owner(self, state: State) -> None:
        """A node that the controller counts on runs nothing but what the controller has put there."""
        for node in self._cluster.nodes.values():
            if not node.workers or node.agent is None:
                continue
            record = state.node(node.name)
            if record.state is NodeState.DOWN or record.incarnation != node.agent.incarnation:
                continue
            for worker in node.workers:
                if record.job != worker.job:
                    raise Broken(
                        f"{node.name} still runs {worker.job} and is {record.state} for {record.job}",
                        *(node.name, worker.job, record.job or ""),
                    )

    def worker_restores(self, worker: Worker) -> None:
        """What a worker is told to restore must exist, and be no older than what was promised."""
        order = worker.order
        step = order.restore_step
        if (step or 0) < (order.durable_step or 0):
            raise Broken(f"{worker.job} restarts from {step}, behind its checkpoint", worker.job)
        if worker.tier == "durable":
            key = (worker.job, step or 0, order.restore_generation)
            if key not in self.durable:
                raise Broken(f"{worker.job} restores {key}, which was never committed", worker.job)

    def save_together(self, job: str, step: int, dues: set[Due]) -> None:
        """All ranks save the same after a step: a checkpoint of some of them would never be whole."""
        if len(dues) != 1:
            raise Broken(f"{job}: its ranks do not agree on what to save after step {step}: {dues}", job)

    def marker_written(self, job: str, step: int, generation: int) -> None:
        if (job, step, generation) not in self.durable:
            raise Broken(f"{job}: the marker of step {step} generation {generation} has no commit", job)

    def job_committed(self, job: JobRecord) -> None:
        """A job record is safe in the journal."""
        if job.durable_step is not None:
            self.durable.add((job.id, job.durable_step, job.durable_generation))

    def submit_answered(self, request: str, job: str, known: str) -> None:
        if job != known:
            raise Broken(f"request {request} was answered with {known} and now with {job}", job, known)

    def checkpoints_are_whole(self, state: State, before: Mapping[str, JobRecord]) -> None:
        """A checkpoint becomes durable only when every rank of the current generation has written its part."""
        for name, job in state.table(JobRecord).items():
            old = before.get(name)
            if job.durable_step is None or (old is not None and old.durable_step == job.durable_step):
                continue
            if job.durable_generation != job.generation:
                raise Broken(f"{name} took a checkpoint of generation {job.durable_generation}", name)
            written = self._cluster.storage.ranks(name, job.durable_step, job.generation)
            if written < set(range(job.world_size)):
                raise Broken(f"{name} took step {job.durable_step}, written only by {sorted(written)}", name)

    def nobody_waits_for_nothing(self, entry: Entry) -> None:
        """Once all is mended a start does not run into its deadline: whatever got lost is asked for again."""
        if not self._cluster.mended or not isinstance(entry.event, TimerFired):
            return
        for change in entry.changes:
            if isinstance(change, JobRecord) and " did not " in change.start_error:
                raise Broken(
                    f"{change.id}: {change.start_error}, although nothing is broken any more", change.id
                )

    def command_is_allowed(self, state: State, command: ToAgent) -> None:
        """Workers start only for the current generation on nodes of the job; commits name committed steps."""
        message = command.message
        if isinstance(message, StartWorkers):
            job = message.job
            if message.generation != state.job(job).generation:
                raise Broken(f"{job}: workers of generation {message.generation} are started", job)
            if state.node(command.node).job != job:
                raise Broken(f"{job} starts workers on {command.node}, not its own", job, command.node)
            if len(message.ranks) * len(state.allocation(job).nodes) != message.world_size:
                raise Broken(f"{job}: {command.node} starts {len(message.ranks)} ranks", job, command.node)
        elif isinstance(message, Commit):
            job_now = state.job(message.job)
            known = (message.job, message.step, message.generation) in self.durable
            if not known and (job_now.durable_step, job_now.durable_generation) != (
                message.step,
                message.generation,
            ):
                raise Broken(f"{message.job}: a commit of step {message.step}, which was not", message.job)

    def ledgers_sum(self, state: State, entry: Entry) -> None:
        """The ledger of every job whose time line has changed sums to what the job held."""
        from myriad.control.accounting import job_ledger, job_records

        changed = {
            change.id if isinstance(change, JobRecord) else change.job
            for change in entry.changes
            if isinstance(change, JobRecord | GenerationRecord | AllocationRecord)
        }
        for job in sorted(changed):
            job_ledger(job_records(state, job), (), entry.now)


# ---------------------------------------------------------------- the controller's records alone


def counters_equal_a_recount(state: State) -> None:
    try:
        state.cluster.check()
    except AssertionError as error:
        raise Broken(f"a counter of the cluster has drifted: {error}") from error


def statuses_follow_edges(before: Mapping[str, JobRecord], entry: Entry) -> None:
    if set(STATUS_OF) != set(Reason) or set(STATUS_OF.values()) != set(JobStatus):
        raise Broken("a reason belongs to no status, or a status has no reason")
    steps = {name: job.status for name, job in before.items()}
    for change in entry.changes:
        if isinstance(change, JobRecord):
            old = steps.get(change.id, JobStatus.PENDING)
            if old is not change.status and (old, change.status) not in EDGES:
                raise Broken(f"{change.id}: {old} to {change.status}", change.id)
            steps[change.id] = change.status


def nodes_and_jobs_agree(state: State) -> None:
    """Every node of a running allocation points to its job unless it was lost, and the other way round."""
    held: dict[str, str] = {}
    for name in state.live:
        job = state.job(name)
        if not job.status.allocated:
            continue
        allocation = state.allocation(name)
        if not len(set(allocation.nodes)) == len(allocation.nodes) == state.spec(name).nodes:
            raise Broken(f"{name} holds {allocation.nodes}", name)
        if set(allocation.nodes) & set(allocation.spares):
            raise Broken(f"{name} has a node twice: {allocation}", name)
        for node in (*allocation.nodes, *allocation.spares):
            if state.node(node).job == name:
                if node in held:
                    raise Broken(f"{node} is in {held[node]} and {name}", node, held[node], name)
                held[node] = name
            elif job.stage != "fence" and job.status is not JobStatus.STOPPING:
                raise Broken(f"{name} goes on with {node}, which it does not hold", name, node)
    for node, record in state.table(NodeRecord).items():
        if record.job != held.get(node):
            raise Broken(f"{node} says {record.job}, the jobs say {held.get(node)}", node, record.job or "")
        busy = record.state in (NodeState.BUSY, NodeState.SPARE, NodeState.DRAINING)
        if busy != (record.job is not None):
            raise Broken(f"{node} is {record.state} with job {record.job}", node)
    for allocation in state.table(AllocationRecord).values():
        newest = state.allocation(allocation.job) is allocation
        ended = not (newest and state.job(allocation.job).status.allocated)
        if ended != (allocation.released_s is not None):
            raise Broken(f"{allocation} was released, or not", allocation.job)


def generations_only_grow(state: State, before: Mapping[str, JobRecord]) -> None:
    for name, old in before.items():
        new = state.job(name)
        if new is old:
            continue
        again = new.restarts > old.restarts or (new.status.allocated and not old.status.allocated)
        if new.generation < old.generation or (again and new.generation == old.generation):
            raise Broken(f"{name} goes from generation {old.generation} to {new.generation}", name)
        if (new.durable_step or 0) < (old.durable_step or 0):
            raise Broken(f"{name} lost a durable step", name)
        if new.best_step < old.best_step or new.restarts < old.restarts:
            raise Broken(f"{name} forgot progress", name)


def no_job_is_lost(state: State, before: Mapping[str, JobRecord]) -> None:
    """Jobs neither vanish nor rise from the dead; every one says why it is where it is."""
    for name, old in before.items():
        if old.status.final and state.job(name) != old:
            raise Broken(f"{name} had ended and changed", name)
    for name, job in state.table(JobRecord).items():
        final = job.status.final
        if (name in state.live) == final or (job.ended_s is not None) != final:
            raise Broken(f"{name} is {job.status}, live: {name in state.live}, ended at {job.ended_s}", name)
        if not job.detail:
            raise Broken(f"{name} does not say why it is {job.status}", name)
        if (job.outcome is not None) != (job.status is JobStatus.STOPPING):
            raise Broken(f"{name}: {job.status} with outcome {job.outcome}", name)


def waiting_has_a_deadline(state: State) -> None:
    for name in state.live:
        job = state.job(name)
        waits = job.status.allocated and job.status is not JobStatus.RUNNING
        if waits != (job.stage_deadline_s is not None):
            raise Broken(f"{name} is {job.status} with deadline {job.stage_deadline_s}", name)


def budgets_hold(state: State) -> None:
    for name in state.live:
        if state.job(name).fruitless > FRUITLESS_RESTARTS_MAX + 1:
            raise Broken(f"{name} was restarted {state.job(name).fruitless} times for nothing", name)
