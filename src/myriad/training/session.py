"""What turns a training loop into a job that Myriad can watch, account for and restart: one's own or ours.

    from myriad.training import session

    run = session.start(steps=1000)                       # after init_process_group
    start = run.restore(model, optimizer)                 # finished steps; 0 on a fresh start
    for number in range(start + 1, 1001):
        with run.step(number) as step:
            with step.data():
                batch = next_batch(number)
            loss = train(batch)
            step.report(loss=loss.item(), tokens=batch.numel())
    run.finish()

Method: the agent on this node holds the other end of a channel (MYRIAD_CHANNEL_FD). Each finished step sends
its time split; now and then the state goes to the agent as a sealed memfd, and less often all ranks save a durable
checkpoint as well: how often, the job says or the controller, from what a save costs (see ``cadence``). After a failure ``restore`` puts back
the newest state that every rank can read, bit for bit. Outside Myriad there is no channel and every call does
nothing, so the loop runs as it always did.

Time: a step's ``wall_s`` runs from the end of the step before (first: from the end of ``restore``) to the end of
its own snapshot and checkpoint, which count to the step they follow, so the reports tile the running time. A
step is reported before its snapshot is handed over: no restart begins from a step nobody knows. Inside ``with run.step`` all is compute except communication and the
sections one names; what lies between two steps is left unaccounted. What the end costs, ``saving`` and ``finish``,
counts to the last step, whose report is then sent once more.

With torch's DistributedDataParallel on three ranks or more, pass it ``find_unused_parameters=True`` if a restart
must be bit-identical: otherwise it re-sorts its buckets after the first step of each start, and sums in
another order than the run that never stopped (see ``replicate``).

Trade-off: a snapshot blocks the loop, which is a copy of the rank's state in memory; a durable checkpoint is written
from it while training goes on (see ``behind``).
"""

from __future__ import annotations

import atexit
import os
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from msgspec import structs
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from myriad.spec.messages import (
    Committed,
    Copied,
    Dropped,
    FromWorker,
    Intervals,
    Phase,
    PhaseDone,
    SaveFailed,
    ShardsSaved,
    SnapshotTaken,
    StepDone,
    StepReport,
    ToWorker,
    WorkerWelcome,
)
from myriad.storage.memory.buffers import Buffers
from myriad.storage.memory.cadence import Cadence
from myriad.storage.memory.channel import Channel, ChannelTimeout
from myriad.storage.memory.snapshot import SnapshotCorrupt, open_snapshot, take_snapshot
from myriad.training import commtime
from myriad.training.clock import Lap, StepClock
from myriad.training.durable import Durable, Policy
from myriad.training.leaving import wait_for_rest
from myriad.training.state import (
    State,
    copy_from_snapshot,
    create_optimizer_state,
    drop_unsaved_state,
    loop_state,
    snapshot_entries,
)
from myriad.training.uploads import Uploads

CHANNEL_VARIABLE = "MYRIAD_CHANNEL_FD"
WELCOME_TIMEOUT_S = 60.0  # the agent sends it right after the fork
COMMIT_TIMEOUT_S = 60.0  # for the controller to journal the last checkpoint
COPY_TIMEOUT_S = 120.0  # for the agent to copy a snapshot to a peer, or to give up


AGENT, WRITER = "agent", "writer"  # who may still need the bytes of a snapshot
# What was saved, and the files beside the message.
Saved = tuple[FromWorker, tuple[int, ...]]
# The names that were saved, and on how many ranks, to the tensors that are to be overwritten.
Fill = Callable[[Collection[str], int], State]


class CheckpointNotCommitted(RuntimeError):
    """The controller did not confirm the last checkpoint, so the job is not known to be saved."""


class Step:
    """One optimizer step in progress."""

    def __init__(self, number: int, clock: StepClock) -> None:
        self.number = number
        self.position: int | None = None
        self.reported: dict[str, Any] = {}
        self._clock = clock

    def data(self) -> AbstractContextManager[None]:
        """Time inside is spent waiting for data."""
        return self._clock.section("data")

    def evaluation(self) -> AbstractContextManager[None]:
        """Time inside is spent on evaluation."""
        return self._clock.section("evaluation")

    def consumed(self, samples: Sequence[int] = (), position: int | None = None) -> None:
        """Ids of the samples of this step (from one rank of those with equal data), and how many samples
        the whole job has consumed with it: the number ``Session.position`` has after a restore."""
        self.reported["samples"] = tuple(samples)
        self.position = position

    def report(
        self,
        *,
        loss: float | None = None,
        tokens: int = 0,
        flops: float = 0.0,
        grad_norm: float | None = None,
    ) -> None:
        """Figures of the whole global batch, from one rank of the job."""
        self.reported |= {"loss": loss, "tokens": tokens, "flops": flops, "grad_norm": grad_norm}


class Session:
    """One worker's link to its agent. Without a channel every method does nothing."""

    def __init__(self, channel: Channel[ToWorker] | None, welcome: WorkerWelcome, memory: list[int]) -> None:
        self.welcome = welcome
        self.current_step: int | None = None
        self.position = 0  # samples consumed by all finished steps
        self.last_step_s = 0.0  # wall time of the last finished step, its saves included
        self._channel = channel
        self._memory = memory  # the snapshot to restore from, if any
        self._clock = StepClock()
        self._policy = Policy(Path(welcome.job_dir) / "checkpoints")
        self._cadence = self._new_cadence()
        self._durable = Durable(welcome, self._policy)
        self._buffers = Buffers()
        self._capture: Callable[[], State] | None = None
        self._peer_step = self._copied_step = (
            0  # the last one handed over to be copied, and the last one that was
        )
        self._group: dist.ProcessGroup | None = None
        self._first = True
        self._last_report: StepReport | None = None
        self._uploads: Uploads | None = None

    def follow(self, policy: Policy) -> None:
        """Save as ``policy`` says from now on."""
        self._policy = policy
        self._cadence = self._new_cadence()
        self._durable = Durable(self.welcome, policy)

    def _new_cadence(self) -> Cadence:
        policy = self._policy
        return Cadence(
            self.welcome.intervals,
            self.welcome.copies,
            self.welcome.durable_step,
            policy.last_step,
            policy.fixed,
        )

    def phase(self, phase: Phase) -> None:
        """Tell the agent that this rank has passed a phase of its start."""
        self._send(PhaseDone(phase=phase))

    def restore(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
        """Put the saved state back in place; the number of finished steps (0: nothing saved). Collective."""
        if self._channel is None:
            return 0
        if isinstance(model, DistributedDataParallel):
            commtime.watch_ddp(model)
        if self.welcome.tier != "none":
            create_optimizer_state(model, optimizer)
        self.phase("rendezvous")
        return self.restore_state(
            lambda: loop_state(model, optimizer), lambda saved: drop_unsaved_state(model, optimizer, saved)
        )

    def restore_state(
        self, capture: Callable[[], State], fit: Callable[[Collection[str]], None] = lambda saved: None
    ) -> int:
        """As :meth:`restore`, for a state that ``capture`` returns as live tensors, now and at each save.

        ``fit`` is told the names that were saved before ``capture`` is asked what they are to overwrite.
        """
        self._capture = capture
        self._group = _checkpoint_group()
        step = self._load(capture, fit) if self.welcome.tier != "none" else 0
        self._durable.mark_restored()
        self._start_uploads()
        commtime.measure(self._clock if self._channel is not None else None)
        self.phase("restore")
        self._clock.lap()
        return step

    @contextmanager
    def step(self, number: int) -> Iterator[Step]:
        """Step ``number`` (1 is the first): times the block, then saves what is due and reports."""
        step = Step(number, self._clock)
        self.current_step = number
        with self._clock.section("compute"):
            yield step
        if step.position is not None:
            self.position = step.position
        if self._channel is None:
            return
        with self._clock.section("checkpoint"):
            self._take_committed()
            news = self._durable.news()
            saved = self._save_due(number)
        lap = self._clock.lap()
        self.last_step_s = lap.wall_s
        self._cadence.stepped(lap.wall_s - lap.parts_s.get("checkpoint", 0.0))
        # The report goes first: no step that a restart can begin from is ever without one.
        self._last_report = self._report(step, lap)
        self._send(StepDone(report=self._last_report))
        self._tell(news)
        self._hand_over(saved)
        if self._first:
            self.phase("first_step")
            self._first = False

    def finish(self) -> None:
        """After the last step: save unless that is done, and wait until the controller has confirmed."""
        commtime.measure(None)
        last = self.current_step if self.current_step is not None else self.welcome.restore_step
        if self._channel is None or last is None:
            return
        with self.saving():
            self._tell(self._durable.settle())
            self._durable.save_last(last, lambda: self._save_now(last), self._is_everyone)
            self._wait_for_commit(last)
            self._tell(self._durable.mark_last())
            if self._uploads is not None:
                self._uploads.finish()
        if self._last_report is not None:
            lap, report = self._clock.lap(), self._last_report
            saving_s = report.checkpoint_s + lap.parts_s.get("checkpoint", 0.0)
            whole = structs.replace(report, wall_s=report.wall_s + lap.wall_s, checkpoint_s=saving_s)
            self._send(StepDone(report=whole))
        self._buffers.close()

    def _save_now(self, last: int) -> None:
        self._hand_over(self._save(last, durable=True))
        self._tell(self._durable.settle())

    def saving(self) -> AbstractContextManager[None]:
        """Time inside counts as that of a checkpoint: for what a program itself writes at the end."""
        return self._clock.section("checkpoint")

    def _wait_for_commit(self, last: int) -> None:
        """Until the controller has confirmed the checkpoint of step ``last``. Raises CheckpointNotCommitted."""
        assert self._channel is not None
        deadline = time.monotonic() + COMMIT_TIMEOUT_S
        while self._durable.committed_step != last:
            try:
                message, _ = self._channel.recv(max(0.0, deadline - time.monotonic()))
            except ChannelTimeout:
                raise CheckpointNotCommitted(
                    f"the checkpoint of step {last} was not confirmed within {COMMIT_TIMEOUT_S:g} s: the "
                    "controller is away; start it again with `myriad up`"
                ) from None
            self._accept(message)

    def _load(self, capture: Callable[[], State], fit: Callable[[Collection[str]], None]) -> int:
        """Overwrite the live state from the tier the welcome names."""
        step = self.welcome.restore_step
        assert step is not None
        rng = {f"rng.{self.welcome.rank}": torch.get_rng_state()}

        def state(saved: Collection[str], world_size: int) -> State:
            """What to fill; the random states are of use to equally many ranks."""
            fit(saved)
            return capture() | (rng if world_size == self.welcome.world_size else {})

        loaded = bool(self._memory) and self._load_memory(step, state)
        together = self._is_everyone(not loaded)
        if not loaded:
            self._load_durable(step, state, self._group if together else None)
        for each in rng.values():
            torch.set_rng_state(each)
        return step

    def _load_memory(self, step: int, state: Fill) -> bool:
        """From the snapshot beside the welcome. False if it is damaged and storage has the same step."""
        (fd,) = self._memory
        self._memory.clear()
        try:
            with open_snapshot(fd) as snapshot:
                assert snapshot.step == step, (snapshot.step, step)
                copy_from_snapshot(snapshot, state(snapshot.entries, self.welcome.world_size))
                self.position = snapshot.position
        except SnapshotCorrupt as error:
            if self.welcome.durable_step != step or not self.welcome.durable_generation:
                raise
            print(f"{error}; loading step {step} from storage instead", file=sys.stderr, flush=True)
            return False
        finally:
            os.close(fd)
        return True

    def _is_everyone(self, yes: bool) -> bool:
        """Whether all ranks say yes."""
        answer = torch.tensor(int(yes))
        if self._group is not None:
            dist.all_reduce(answer, op=dist.ReduceOp.MIN, group=self._group)
        return bool(answer)

    def _load_durable(self, step: int, state: Fill, group: dist.ProcessGroup | None) -> None:
        """From storage, in any layout; in a group each file is read once for all its ranks."""
        from myriad.storage.durable.checkpoint import load

        generation = self.welcome.restore_generation or self.welcome.durable_generation
        manifest = load(
            self._policy.directory,
            step,
            generation,
            lambda manifest, saved: state(saved, manifest.world_size),
            process_group=group,
            remote=self._policy.remote,
        )
        self.position = manifest.position

    def _start_uploads(self) -> None:
        """Rank 0 keeps the program that copies committed checkpoints to object storage."""
        policy = self._policy
        if self._channel is not None and self.welcome.rank == 0 and policy.remote is not None:
            self._uploads = Uploads(
                policy.directory,
                policy.remote,
                policy.keep,
                lambda error: self._send(SaveFailed(error=error)),
            )

    def _save_due(self, step: int) -> list[Saved]:
        due = self._cadence.due(step)
        if not due.memory:
            return []
        began = time.perf_counter()
        if due.peer:
            self._wait_for_copy()
        saved = self._save(step, due.durable, due.peer)
        self._cadence.saved(due, time.perf_counter() - began)
        if due.durable:
            self._agree_on_intervals(step)
        return saved

    def _agree_on_intervals(self, step: int) -> None:
        """All ranks are at one step: what the first one was told holds for all."""
        words = torch.tensor(structs.astuple(self._cadence.wished))
        if self._group is not None:
            dist.broadcast(words, group_src=0, group=self._group)
        self._cadence.adopt(Intervals(*(int(word) for word in words)), step)

    def _wait_for_copy(self) -> None:
        """Until the copy of the last peer step is made: a node's copies are never more than one step behind its ranks."""
        assert self._channel is not None
        deadline = time.monotonic() + COPY_TIMEOUT_S
        while self._copied_step < self._peer_step:
            try:
                message, _ = self._channel.recv(max(0.0, deadline - time.monotonic()))
            except ChannelTimeout:
                print(
                    f"the copy of step {self._peer_step} was not made within {COPY_TIMEOUT_S:g} s",
                    file=sys.stderr,
                )
                return
            self._accept(message)

    def _save(self, step: int, durable: bool, peer: bool = False) -> list[Saved]:
        """A memory snapshot, to be handed over; the durable checkpoint of the same bytes is begun where asked.

        The first one of a job is waited for: where it cannot be written nothing may be restarted from beyond it, or
        the job would fail a little later each time and never be seen to fail in the same way.
        """
        assert self._capture is not None, "restore() comes before the first step"
        news = self._durable.settle() if durable else []
        state = {**self._capture(), f"rng.{self.welcome.rank}": torch.get_rng_state()}
        users = (AGENT, WRITER) if durable else (AGENT,)
        found = take_snapshot(
            snapshot_entries(state), step, {}, self._buffers, *users, position=self.position
        )
        self._peer_step = step if peer else self._peer_step
        first: list[FromWorker] = []
        if durable:
            number = found.buffer.number
            self._durable.begin(self.position, state, found, lambda: self._buffers.release(number, WRITER))
            if self._durable.saved_step is None:
                first = self._durable.settle()
        taken = SnapshotTaken(
            step=step,
            size=found.size,
            crc32=found.crc32,
            buffer=found.buffer.number,
            durable=durable,
            peer=peer,
        )
        return [
            *((each, ()) for each in news),
            (taken, (found.buffer.fd,)),
            *((each, ()) for each in first),
        ]

    def _hand_over(self, saved: list[Saved]) -> None:
        """Give the agent what was saved; from here on it can be restarted from."""
        for message, fds in saved:
            if isinstance(message, ShardsSaved):
                shards = structs.replace(message.shards, costs=self._cadence.costs())
                message = structs.replace(message, shards=shards)
            self._send(message, fds)

    def _tell(self, news: Sequence[FromWorker]) -> None:
        self._hand_over([(message, ()) for message in news])

    def _take_committed(self) -> None:
        """Act on confirmations that have arrived, without waiting."""
        assert self._channel is not None
        while (received := self._channel.recv_nowait()) is not None:
            self._accept(received[0])
        if self._uploads is not None:
            self._uploads.hear()

    def _accept(self, message: ToWorker) -> None:
        """A copy is made, memory is free again, or the controller has journaled a checkpoint."""
        if isinstance(message, Copied):
            self._copied_step = message.step
            return
        if isinstance(message, Dropped):
            self._buffers.release(message.buffer, AGENT)
            return
        assert isinstance(message, Committed), message
        self._cadence.wished = message.intervals
        self._durable.committed(message.step)

    def _report(self, step: Step, lap: Lap) -> StepReport:
        parts = lap.parts_s
        return StepReport(
            job=self.welcome.job,
            generation=self.welcome.generation,
            rank=self.welcome.rank,
            step=step.number,
            wall_s=lap.wall_s,
            compute_s=parts.get("compute", 0.0),
            communication_s=parts.get("communication", 0.0),
            data_s=parts.get("data", 0.0),
            checkpoint_s=parts.get("checkpoint", 0.0),
            evaluation_s=parts.get("evaluation", 0.0),
            **step.reported,
        )

    def _send(self, message: FromWorker, fds: Sequence[int] = ()) -> None:
        if self._channel is not None:
            self._channel.send(message, fds)


def connect(channel: Channel[ToWorker]) -> Session:
    """The session of a worker whose agent is at the other end of ``channel``."""
    welcome, fds = channel.recv(WELCOME_TIMEOUT_S)
    assert isinstance(welcome, WorkerWelcome), welcome
    return Session(channel, welcome, fds)


def start(
    steps: int | None = None,
    *,
    checkpoint_every_steps: int | None = None,
    snapshot_every_steps: int | None = None,
    peer_every_steps: int | None = None,
    directory: str | os.PathLike[str] | None = None,
    keep: int = 2,
    remote: str | None = None,
) -> Session:
    """The session of this process. ``steps`` is the number of the last step, if it is known.

    How often to save is what the job says under ``checkpoint``, unless it is said here. ``directory`` of durable
    checkpoints: by default ``checkpoints`` in the job's folder. ``remote``: where in object storage each is copied to
    behind training, ``s3://bucket/prefix`` of this job alone; credentials come from AWS_ variables.
    """
    number = os.environ.pop(CHANNEL_VARIABLE, None)  # popped: a child of ours must not speak for us
    if number is None:
        return Session(None, _nobody(), [])
    atexit.register(wait_for_rest)  # before anything the program registers itself, so it runs after that
    session = connect(Channel.from_fd(int(number), ToWorker))
    place = Path(directory) if directory is not None else Path(session.welcome.job_dir) / "checkpoints"
    said = {
        "memory": snapshot_every_steps,
        "peer": peer_every_steps,
        "durable": checkpoint_every_steps,
    }
    fixed = {tier: steps for tier, steps in said.items() if steps is not None}
    session.follow(Policy(place, keep, steps, fixed, remote))
    return session


def _nobody() -> WorkerWelcome:
    """What a process outside Myriad is told: a fresh start."""
    return WorkerWelcome(
        job="",
        job_name="",
        generation=0,
        rank=int(os.environ.get("RANK", "0")),
        local_rank=int(os.environ.get("LOCAL_RANK", "0")),
        world_size=int(os.environ.get("WORLD_SIZE", "1")),
        job_dir=".",
        restore_step=None,
        restore_generation=0,
        tier="none",
        durable_step=None,
        intervals=Intervals(1, 0, 1),
    )


def _checkpoint_group() -> dist.ProcessGroup | None:
    """Who saves together: all ranks, over gloo, since checkpoints are planned in host memory."""
    if not dist.is_initialized():
        return None
    if dist.get_backend() == "gloo":
        world: dist.ProcessGroup | None = dist.GroupMember.WORLD
        return world
    gloo: dist.ProcessGroup = dist.new_group(backend="gloo")
    return gloo
