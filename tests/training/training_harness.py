"""Plays the agent: drives the real template and real workers over real sockets, and keeps what they say.

One template serves all tests of a session, since its imports take seconds. ``Cluster.start`` forks the
workers of one generation; ``Generation.wait`` collects their messages until all have exited.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from myriad.planner.intervals import first
from myriad.spec.job import JobSpec
from myriad.spec.messages import (
    ChildExited,
    Committed,
    Failure,
    Forked,
    ForkStore,
    ForkWorker,
    FromTemplate,
    FromWorker,
    Intervals,
    PhaseDone,
    ShardsSaved,
    SnapshotTaken,
    StepDone,
    StepReport,
    TemplateReady,
    Tier,
    WorkerWelcome,
)
from myriad.storage.memory.channel import Channel, ChannelClosed
from myriad.storage.memory.snapshot import verify

RUN_TIMEOUT_S = 120.0


EVERY = Intervals(memory=1, peer=10, durable=100)  # of a program, which nothing here decides


@dataclass
class Held:
    """A memory snapshot the harness keeps, as an agent would."""

    step: int
    fd: int
    size: int
    crc32: int
    durable: bool


@dataclass
class Worker:
    """One rank of one generation, and all it said."""

    rank: int
    pid: int
    channel: Channel[FromWorker] | None
    phases: list[str] = field(default_factory=list)
    reports: list[StepReport] = field(default_factory=list)
    arrived_s: list[float] = field(default_factory=list)
    snapshots: dict[int, Held] = field(default_factory=dict)
    shards: list[ShardsSaved] = field(default_factory=list)
    failure: Failure | None = None
    code: int | None = None
    process: subprocess.Popen[bytes] | None = None  # of a command, which no template forks


class Generation:
    """The workers of one start."""

    def __init__(
        self, cluster: Cluster, number: int, workers: dict[int, Worker], intervals: Intervals, commit: bool
    ) -> None:
        self.cluster, self.number, self.workers, self.commit = cluster, number, workers, commit
        self.intervals = intervals
        self.on_step: Callable[[StepReport], None] = lambda report: None
        self._saved: dict[int, set[int]] = {}

    def wait(self, timeout_s: float = RUN_TIMEOUT_S) -> Generation:
        """Take messages until every worker has exited and its channel is drained."""
        deadline = time.monotonic() + timeout_s
        while any(w.code is None or w.channel is not None for w in self.workers.values()):
            assert time.monotonic() < deadline, f"not finished: {self.describe()}"
            self.poll(0.2)
        for worker in self.workers.values():
            for held in worker.snapshots.values():
                verify(held.fd, held.size, held.crc32)  # which seals it, as an agent does after a fence
        return self

    def poll(self, timeout_s: float) -> None:
        """Take what has arrived, waiting at most so long for the first."""
        channels = {w.channel.fileno(): w for w in self.workers.values() if w.channel is not None}
        template = self.cluster.template.fileno()
        ready, _, _ = select.select([*channels, template], [], [], timeout_s)
        for worker in self.workers.values():
            if worker.process is not None:
                worker.code = worker.process.poll()
        for fd in ready:
            if fd == template:
                self.cluster.take_template(self)
            else:
                self._take(channels[fd])

    def kill(self, rank: int, number: int = signal.SIGKILL) -> None:
        os.kill(self.workers[rank].pid, number)

    def losses(self) -> dict[int, str]:
        """Step to loss, as float hex."""
        found = {}
        for worker in self.workers.values():
            for report in worker.reports:
                if report.loss is not None:
                    assert report.step not in found, "two ranks reported a loss"
                    found[report.step] = report.loss.hex()
        return found

    def norms(self) -> dict[int, float]:
        reports = [r for w in self.workers.values() for r in w.reports]
        return {r.step: r.grad_norm for r in reports if r.grad_norm is not None}

    def samples(self) -> dict[int, list[int]]:
        """Step to all sample ids, over the ranks that report them."""
        found: dict[int, list[int]] = {}
        for worker in self.workers.values():
            for report in worker.reports:
                found.setdefault(report.step, []).extend(report.samples)
        return found

    def codes(self) -> list[int | None]:
        return [self.workers[rank].code for rank in sorted(self.workers)]

    def describe(self) -> str:
        logs = [
            self.cluster.log(rank).read_text()[-1500:]
            for rank in self.workers
            if self.cluster.log(rank).exists()
        ]
        state = {w.rank: (w.code, w.phases, len(w.reports), w.failure) for w in self.workers.values()}
        return f"{state}\n" + "\n".join(logs)

    def close(self) -> None:
        """Kill what is left and drop the snapshots."""
        for worker in self.workers.values():
            if worker.code is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(worker.pid, signal.SIGKILL)
        deadline = time.monotonic() + 10
        while any(w.code is None for w in self.workers.values()) and time.monotonic() < deadline:
            self.poll(0.2)
        for worker in self.workers.values():
            if worker.channel is not None:
                worker.channel.close()
            for held in worker.snapshots.values():
                os.close(held.fd)
            worker.snapshots.clear()

    def _take(self, worker: Worker) -> None:
        assert worker.channel is not None
        try:
            received = worker.channel.recv_nowait()
        except ChannelClosed:
            worker.channel.close()
            worker.channel = None
            return
        if received is None:
            return
        message, fds = received
        match message:
            case PhaseDone():
                worker.phases.append(message.phase)
            case StepDone():
                if worker.reports and worker.reports[-1].step == message.report.step:
                    del worker.reports[-1], worker.arrived_s[-1]  # the last one again, with what the end cost
                worker.reports.append(message.report)
                worker.arrived_s.append(time.monotonic())
                self.on_step(message.report)
            case SnapshotTaken():
                (fd,) = fds
                worker.snapshots[message.step] = Held(
                    message.step, fd, message.size, message.crc32, message.durable
                )
            case ShardsSaved():
                worker.shards.append(message)
                self._commit_when_all(message.shards.step, worker.rank)
            case Failure():
                worker.failure = message

    def _commit_when_all(self, step: int, rank: int) -> None:
        saved = self._saved.setdefault(step, set())
        saved.add(rank)
        if self.commit and len(saved) == len(self.workers):
            for worker in self.workers.values():
                if worker.channel is not None:
                    with contextlib.suppress(ChannelClosed):
                        worker.channel.send(Committed(step=step, intervals=self.intervals))


class Cluster:
    """One template process and the job directory of one test."""

    def __init__(self, template: Channel[FromTemplate], job_dir: Path) -> None:
        self.template, self.job_dir = template, job_dir
        self._forked: dict[str, Forked] = {}
        self._exited: dict[str, ChildExited] = {}
        self._serial = 0
        self._open: list[Generation] = []
        self._stores: list[int] = []
        (job_dir / "logs").mkdir(parents=True, exist_ok=True)

    def log(self, rank: int) -> Path:
        return self.job_dir / "logs" / f"rank-{rank:05d}.log"

    def start(
        self,
        job: JobSpec,
        *,
        restore: Generation | None = None,
        step: int | None = None,
        durable_generation: int | None = None,
        commit: bool = True,
        env: dict[str, str] | None = None,
    ) -> Generation:
        """Fork all workers; from ``restore``'s memory at ``step``, or from a durable checkpoint.

        The generation's number is one more than that of the last start, as a controller counts.
        """
        generation = len(self._open) + 1
        port = self._store(job.layout.world)
        workers = {}
        for rank in range(job.layout.world):
            channel, theirs = self._pair()
            key = self._key("worker")
            log = str(self.log(rank))
            request = ForkWorker(
                key=key,
                env=self._env(rank, job.layout.world, port) | (env or {}),
                log_path=log,
                spec=job.model_dump(mode="json"),
            )
            self.template.send(request, (theirs.fileno(),))
            theirs.close()
            every = first(job.checkpoint)
            self._welcome(
                channel, rank, job.layout.world, generation, every, restore, step, durable_generation
            )
            workers[rank] = Worker(rank, self._wait_forked(key).pid, channel)
        started = Generation(self, generation, workers, first(job.checkpoint), commit)
        self._open.append(started)
        return started

    def start_command(
        self,
        argv: list[str],
        world: int,
        *,
        restore: Generation | None = None,
        step: int | None = None,
        durable_generation: int | None = None,
    ) -> Generation:
        """Execute a command of one's own on so many ranks, each with a channel, as the agent does."""
        generation = len(self._open) + 1
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]  # free now; rank 0 of the command listens there itself
        workers = {}
        for rank in range(world):
            channel, theirs = self._pair()
            fd = theirs.fileno()
            with self.log(rank).open("ab") as log:
                process = subprocess.Popen(
                    [sys.executable, *argv],
                    env=os.environ | self._env(rank, world, port) | {"MYRIAD_CHANNEL_FD": str(fd)},
                    pass_fds=(fd,),
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            theirs.close()
            self._welcome(channel, rank, world, generation, EVERY, restore, step, durable_generation)
            workers[rank] = Worker(rank, process.pid, channel, process=process)
        started = Generation(self, generation, workers, EVERY, commit=True)
        self._open.append(started)
        return started

    def run(self, job: JobSpec, **how: Any) -> Generation:
        """Start, wait, and require that every worker succeeded."""
        generation = self.start(job, **how).wait()
        assert set(generation.codes()) == {0}, generation.describe()
        return generation

    def take_template(self, generation: Generation | None = None) -> None:
        message, _ = self.template.recv(10)
        if isinstance(message, Forked):
            self._forked[message.key] = message
        elif isinstance(message, ChildExited):
            self._exited[message.key] = message
            for each in self._open:
                for worker in each.workers.values():
                    if worker.pid == message.pid:
                        worker.code = message.code

    def close(self) -> None:
        for generation in self._open:
            generation.close()
        for pid in self._stores:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        keys = [key for key, forked in self._forked.items() if forked.pid in self._stores]
        while any(key not in self._exited for key in keys):
            self.take_template()

    def _welcome(
        self,
        channel: Channel[FromWorker],
        rank: int,
        world: int,
        generation: int,
        intervals: Intervals,
        restore: Generation | None,
        step: int | None,
        durable_generation: int | None,
    ) -> None:
        tier: Tier = "durable" if durable_generation is not None else "none"
        tier = "memory" if restore is not None else tier
        welcome = WorkerWelcome(
            job="job",
            job_name="tiny",
            generation=generation,
            rank=rank,
            local_rank=rank,
            world_size=world,
            job_dir=str(self.job_dir),
            restore_step=step,
            restore_generation=durable_generation or 0,
            tier=tier,
            durable_step=step if durable_generation is not None else None,
            intervals=intervals,
            durable_generation=durable_generation or 0,
        )
        fds = () if restore is None else (restore.workers[rank].snapshots[step or 0].fd,)
        channel.send(welcome, fds)

    def _store(self, world: int) -> int:
        key = self._key("store")
        self.template.send(ForkStore(key=key, host="127.0.0.1", world_size=world))
        forked = self._wait_forked(key)
        self._stores.append(forked.pid)
        return forked.port

    def _wait_forked(self, key: str) -> Forked:
        while key not in self._forked:
            self.take_template()
        return self._forked[key]

    def _key(self, kind: str) -> str:
        self._serial += 1
        return f"{self.job_dir}-{kind}-{self._serial}"

    def _pair(self) -> tuple[Channel[FromWorker], socket.socket]:
        return Channel.pair(FromWorker)

    def _env(self, rank: int, world: int, port: int) -> dict[str, str]:
        return {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
        }


@contextlib.contextmanager
def template_process() -> Iterator[tuple[Channel[FromTemplate], subprocess.Popen[bytes]]]:
    """The real template, started as an agent starts it; gone at the end."""
    channel: Channel[FromTemplate]
    channel, theirs = Channel.pair(FromTemplate)
    fd = theirs.fileno()
    process = subprocess.Popen(
        [sys.executable, "-m", "myriad.training.template"],
        env=os.environ | {"MYRIAD_TEMPLATE_FD": str(fd)},
        pass_fds=(fd,),
        start_new_session=True,
    )
    theirs.close()
    try:
        message, _ = channel.recv(120)
        assert isinstance(message, TemplateReady)
        yield channel, process
    finally:
        channel.close()
        process.wait(20)


def write_dataset(prefix: Path, tokens: int = 20_000, vocab: int = 257) -> Path:
    """Random tokens in the Megatron layout (one document), from a fixed seed."""
    import struct

    values = np.random.default_rng(7).integers(0, vocab, tokens).astype("<u2")
    prefix.parent.mkdir(parents=True, exist_ok=True)
    Path(f"{prefix}.bin").write_bytes(values.tobytes())
    index = struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, 8, 1, 2)
    index += (
        np.array([tokens], "<i4").tobytes()
        + np.array([0], "<i8").tobytes()
        + np.array([0, 1], "<i8").tobytes()
    )
    Path(f"{prefix}.idx").write_bytes(index)
    return prefix


def tiny_job(data: Path, **layout: Any) -> JobSpec:
    """A model of about 60,000 parameters; ``layout`` takes the degrees and, by prefix, other settings."""
    job = {
        "name": "tiny",
        "nodes": 1,
        "model": {
            "layers": 4,
            "dim": 32,
            "heads": 4,
            "kv_heads": 2,
            "ffn_dim": 64,
            "vocab_size": 264,
            "dtype": layout.pop("dtype", "float64"),
        },
        "data": {
            "path": str(data),
            "sequence_length": 32,
            "global_batch": layout.pop("global_batch", 8),
            "on_end": "repeat",
        },
        "optimizer": {
            "steps": layout.pop("steps", 20),
            "learning_rate": layout.pop("learning_rate", 1e-2),
            "min_learning_rate": 1e-4,
            "warmup_steps": 3,
            "clip_norm": 1.0,
        },
        "checkpoint": {
            "every_steps": layout.pop("every_steps", 100),
            "snapshot_every_steps": layout.pop("snapshot_every_steps", 1),
            "keep": layout.pop("keep", 10),
        },
        "seed": 11,
    }
    job["layout"] = layout
    return JobSpec.model_validate(job)
