"""What the jobs of the virtual cluster do: workers that rendezvous, restore, step together, save and end.

A :class:`Run` is one generation of a model job: its ranks move in lock step, as collectives make them, and when
one is gone the others fail with PeerLost. A command's workers know nothing of each other. What a worker really
did (which step it restored, which checkpoint it marked) is what the controller's records are checked against.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from myriad.agent.member import Process
from myriad.simulator.scenario import JobPlan
from myriad.spec.messages import Failure, Intervals, RankPlan, StartWorkers, StepReport
from myriad.storage.memory.cadence import Cadence, Due
from myriad.storage.memory.retention import Use

if TYPE_CHECKING:
    from myriad.simulator.agent import VirtualAgent
    from myriad.simulator.cluster import VirtualCluster

EXIT_NOTICED_S = 0.01  # SIGCHLD, or a word from the template
RENDEZVOUS_S = 0.1
RENDEZVOUS_DEADLINE_S = 120.0
WRITTEN_LOOK_S = 0.05  # between two looks at whether all have written
SAVE_SLOW_S = 20.0
COMMIT_DEADLINE_S = 60.0  # for the commit of the last checkpoint
SAVE_RETRIES_S = 600.0
SAVE_RETRY_S = 2.0
COPY_LOOK_S = 0.05  # between two looks at whether a copy is made
PEER_LOST_S = 0.05  # until a rank notices that another has gone


class Worker:
    """One rank's process. ``step`` is the last one it has finished, restored ones included."""

    def __init__(self, agent: VirtualAgent, process: Process, order: StartWorkers, plan: RankPlan) -> None:
        assert process.rank is not None
        self.agent = agent
        self.process = process
        self.order = order
        self.job = order.job
        self.generation = order.generation
        self.rank = process.rank
        self.tier = plan.tier
        self.step = 0
        self.ended = False
        self.stopped_until = 0.0
        self.committed_step = order.durable_step
        self.cadence: Cadence | None = None  # of a job that steps
        self.began_s = 0.0  # the step in progress
        self.peer_step = self.copied_step = 0

    def end(self, code: int) -> None:
        """The process is gone; its agent notices a moment later."""
        if not self.ended:
            self.ended = True
            self.agent.node.finish(self)
            self.agent.note(f"rank {self.rank} generation {self.generation} ends with {code}", self.job)
            self.agent.local(lambda: self.agent.ended(self.process, code), EXIT_NOTICED_S)

    def fail(self, error_class: str, code: int = 1) -> None:
        """It raises an exception, and says so before it exits."""
        if not self.ended:
            self.agent.failing(self, Failure(error_class=error_class, message="it happened", step=self.step))
            self.end(code)

    def committed(self, step: int, intervals: Intervals) -> None:
        """The controller has journaled the checkpoint: rank 0 writes the marker."""
        self.committed_step = step
        if self.cadence is not None:
            self.cadence.wished = intervals
        if self.rank == 0:
            self.agent.node.cluster.marked(self.job, step, self.generation)

    def mark_restored(self) -> None:
        """The writer of the newest checkpoint may have died before the marker."""
        order = self.order
        if self.rank == 0 and order.durable_step is not None:
            self.agent.node.cluster.marked(self.job, order.durable_step, order.durable_generation)


class Run:
    """One generation of a job whose ranks step together."""

    def __init__(
        self, cluster: VirtualCluster, plan: JobPlan, job: str, world_size: int, noise: random.Random
    ):
        self._cluster = cluster
        self._heap = cluster.heap
        self._plan = plan
        self._job = job
        self._world_size = world_size
        self._noise = noise
        self._saving_s = 0.0  # when it began to save
        self._saved_step: int | None = None
        self._writing = False  # a durable checkpoint, behind the steps
        self._first = True
        self.workers: dict[int, Worker] = {}

    def join(self, worker: Worker) -> None:
        assert worker.rank not in self.workers, f"rank {worker.rank} of {worker.job} was started twice"
        self.workers[worker.rank] = worker
        order = worker.order
        worker.cadence = Cadence(
            order.intervals, order.holder is not None, order.durable_step, self._plan.steps
        )
        if len(self.workers) == 1:
            self._heap.after(RENDEZVOUS_DEADLINE_S, self._rendezvous_late)
        if len(self.workers) == self._world_size:
            self._later(RENDEZVOUS_S, self._rendezvous)

    def _later(self, seconds: float, do: Callable[[], None]) -> None:
        """Go on after about ``seconds``, once every rank is there and runs; without one the others fail."""

        def go() -> None:
            if any(worker.ended for worker in self.workers.values()):
                self._heap.after(PEER_LOST_S, self._peer_lost)
                return
            until = max(worker.stopped_until for worker in self.workers.values())
            if until > self._heap.now:
                self._heap.at(until, go)
            else:
                do()

        self._heap.after(seconds * self._noise.uniform(0.8, 1.5), go)

    def _peer_lost(self) -> None:
        for worker in self.workers.values():
            self._when_awake(worker, "PeerLost")

    def _when_awake(self, worker: Worker, error_class: str) -> None:
        if worker.stopped_until > self._heap.now and not worker.ended:
            self._heap.at(worker.stopped_until, lambda: self._when_awake(worker, error_class))
        else:
            worker.fail(error_class)

    def _rendezvous_late(self) -> None:
        if len(self.workers) < self._world_size:
            self._peer_lost()

    def _rendezvous(self) -> None:
        if not self._cluster.has_store(self._job, self.workers[0].generation):
            for worker in self.workers.values():
                worker.fail("DistNetworkError")
            return
        for worker in self.workers.values():
            worker.agent.phase_passed(worker, "rendezvous")
        self._later(RENDEZVOUS_S, self._restore)

    def _restore(self) -> None:
        for worker in self.workers.values():
            self._cluster.check_restore(worker)
            worker.step = worker.order.restore_step or 0
            worker.mark_restored()
            worker.agent.phase_passed(worker, "restore")
            worker.began_s = self._heap.now
        self._next()

    def _next(self) -> None:
        if self.workers[0].step >= self._plan.steps:
            self._finish()
        else:
            self._later(self._plan.step_s, self._step)

    def _step(self) -> None:
        step = self.workers[0].step + 1
        if step == self._plan.fails_at:
            self._fails_by_itself(self.workers[0])
            self._heap.after(PEER_LOST_S, self._peer_lost)
            return
        self._saving_s = self._heap.now
        dues = {self._cadence(worker).due(step) for worker in self.workers.values()}
        self._cluster.checks.save_together(self._job, step, dues)
        due = dues.pop()
        if due.memory and self._plan.snapshot_s:
            self._later(self._plan.snapshot_s, lambda: self._save_due(step, due))
        else:
            self._save_due(step, due)

    def _save_due(self, step: int, due: Due) -> None:
        if due.durable and self._writing:
            self._later(WRITTEN_LOOK_S, lambda: self._save_due(step, due))
        elif due.peer and any(w.copied_step < w.peer_step for w in self.workers.values()):
            self._later(COPY_LOOK_S, lambda: self._save_due(step, due))
        else:
            for worker in self.workers.values():
                self._stepped(worker, step, due)
            if due.durable:
                self._begin_save(step)
                words = self._cadence(self.workers[0]).wished
                for worker in self.workers.values():
                    self._cadence(worker).adopt(words, step)
            self._first = False
            self._next()

    def _fails_by_itself(self, worker: Worker) -> None:
        if self._plan.fails_with > 0:
            worker.fail("ValueError", self._plan.fails_with)
        else:
            worker.end(self._plan.fails_with)

    def _never_saved(self) -> bool:
        return self._saved_step is None and self.workers[0].order.durable_step is None

    def _all_fail(self, error_class: str) -> None:
        for worker in self.workers.values():
            worker.fail(error_class)

    def _storage_takes(self) -> bool:
        return self._heap.now >= self._cluster.storage.fails_until

    def _begin_save(self, step: int) -> None:
        """Write the durable checkpoint of ``step`` behind the steps: each rank its part in its own time."""
        storage = self._cluster.storage
        longest_s = SAVE_SLOW_S if self._heap.now < storage.slow_until else self._plan.save_s
        refused: list[Worker] = []

        def write(worker: Worker) -> None:
            if worker.stopped_until > self._heap.now:
                self._heap.at(worker.stopped_until, partial(write, worker))
            elif not self._storage_takes():
                refused.append(worker)
            elif not worker.ended:
                storage.write(self._job, step, worker.generation, worker.rank)

        def look() -> None:
            if any(worker.ended for worker in self.workers.values()):
                return
            written = self._cluster.storage.ranks(self._job, step, self.workers[0].generation)
            if len(written) + len(refused) < self._world_size:
                self._heap.after(WRITTEN_LOOK_S, look)
            else:
                self._written(step, bool(refused))

        self._writing = True
        for worker in self.workers.values():
            self._heap.after(longest_s * self._noise.uniform(0.2, 1.0), partial(write, worker))
        self._heap.after(longest_s, look)

    def _written(self, step: int, refused: bool) -> None:
        """Every rank knows what has come of the save, the same for all, and says so between two of its steps."""
        self._writing = False
        if not refused:
            self._saved_step = step
            for worker in self.workers.values():
                costs = self._cadence(worker).costs()
                self._between_steps(worker, partial(worker.agent.shards_saved, worker, step, costs))
        elif self._never_saved():
            self._all_fail("CheckpointError")
        else:
            for worker in self.workers.values():
                self._between_steps(worker, partial(worker.agent.save_failed, worker))

    def _between_steps(self, worker: Worker, say: Callable[[], None]) -> None:
        """Have a rank say something, when its step is done or it runs again."""

        def speak() -> None:
            if worker.stopped_until > self._heap.now:
                self._heap.at(worker.stopped_until, speak)
            elif not worker.ended:
                say()

        self._heap.after(self._plan.step_s * self._noise.uniform(0.0, 0.7), speak)

    def _stepped(self, worker: Worker, step: int, due: Due) -> None:
        """One rank has finished a step. Its report goes first."""
        worker.step = step
        now = self._heap.now
        self._cadence(worker).stepped(self._saving_s - worker.began_s)
        self._cadence(worker).saved(due, now - self._saving_s)
        worker.agent.step_done(worker, self._report(worker, step))
        worker.began_s = now
        self._hand_over(worker, step, due)
        if self._first:
            worker.agent.phase_passed(worker, "first_step")

    def _cadence(self, worker: Worker) -> Cadence:
        assert worker.cadence is not None, f"rank {worker.rank} of {worker.job} has not joined"
        return worker.cadence

    def _hand_over(self, worker: Worker, step: int, due: Due) -> None:
        if due.memory:
            worker.peer_step = step if due.peer else worker.peer_step
            worker.agent.snapshot_taken(worker, step, Use(due.durable, due.peer))

    def _report(self, worker: Worker, step: int) -> StepReport:
        return StepReport(
            job=self._job,
            generation=worker.generation,
            rank=worker.rank,
            step=step,
            wall_s=self._heap.now - worker.began_s,
            compute_s=(self._saving_s - worker.began_s) * 0.75,
            checkpoint_s=self._heap.now - self._saving_s,
            samples=(step,) if worker.rank == 0 else (),
        )

    def _finish(self, deadline_s: float | None = None) -> None:
        step = self.workers[0].step
        deadline_s = self._heap.now + SAVE_RETRIES_S if deadline_s is None else deadline_s
        if self._writing:
            self._later(WRITTEN_LOOK_S, lambda: self._finish(deadline_s))
        elif step in (self._saved_step, self.workers[0].order.durable_step):
            self._await_commit()
        elif self._heap.now >= deadline_s:
            self._all_fail("CheckpointNotSaved")
        elif self._storage_takes():
            for worker in self.workers.values():
                self._hand_over(worker, step, Due(memory=True, peer=False, durable=True))
            self._begin_save(step)
            self._later(WRITTEN_LOOK_S, lambda: self._finish(deadline_s))
        elif self._never_saved():
            self._all_fail("CheckpointError")
        else:
            self._later(SAVE_RETRY_S, lambda: self._finish(deadline_s))

    def _await_commit(self, deadline_s: float | None = None) -> None:
        deadline_s = self._heap.now + COMMIT_DEADLINE_S if deadline_s is None else deadline_s
        for worker in self.workers.values():
            if worker.ended or worker.stopped_until > self._heap.now:
                continue
            if worker.committed_step == worker.step:
                worker.end(0)
            elif self._heap.now >= deadline_s:
                worker.fail("CheckpointNotCommitted")
        if not all(worker.ended for worker in self.workers.values()):
            self._heap.after(PEER_LOST_S, lambda: self._await_commit(deadline_s))


class Runs:
    """All generations of all jobs."""

    def __init__(self, cluster: VirtualCluster) -> None:
        self._cluster = cluster
        self._runs: dict[tuple[str, int], Run] = {}

    def join(self, worker: Worker) -> None:
        """A worker begins to run its job's program."""
        plan = self._cluster.plan_of(worker.order.job_name)
        noise = self._cluster.stream(f"run {worker.job} {worker.generation} {worker.rank}")
        if plan.torch:
            key = worker.job, worker.generation
            if key not in self._runs:
                self._runs[key] = Run(self._cluster, plan, worker.job, worker.order.world_size, noise)
            self._runs[key].join(worker)
            return
        steps = plan.steps if plan.fails_at is None else plan.fails_at
        code = 0 if plan.fails_at is None else plan.fails_with
        self._end_command(
            worker, self._cluster.heap.now + steps * plan.step_s * noise.uniform(0.8, 1.5), code
        )

    def _end_command(self, worker: Worker, at: float, code: int) -> None:
        def end() -> None:
            if worker.stopped_until > self._cluster.heap.now:
                self._end_command(worker, worker.stopped_until, code)
            else:
                worker.end(code)

        self._cluster.heap.at(at, end)
