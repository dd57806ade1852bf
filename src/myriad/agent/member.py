"""One job's part on this node: its generation, its processes, and what the controller may know of it.

Pure bookkeeping, no I/O: the agent calls it with what happened and sends ``status()`` whenever it has
changed. A generation only ever grows; whatever belongs to an older one is being killed or dead.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from myriad.spec.messages import (
    PHASES,
    Holding,
    MemberStatus,
    ShardSet,
    StartStore,
    StartWorkers,
    StopWorkers,
    WorkerExit,
)

State = Literal["preparing", "prepared", "store", "started", "exited", "stopped"]


@dataclass(slots=True)
class Process:
    """A worker or the store. ``pid`` is None between the request to the template and its answer."""

    key: str
    generation: int
    rank: int | None  # None: the store
    pid: int | None = None
    doomed: bool = False  # we have killed it, or will as soon as we know its pid
    from_template: bool = False
    error_class: str = ""
    error: str = ""


@dataclass(slots=True)
class Member:
    """See the module. ``next`` is what to do once the fence of older generations is complete."""

    job: str
    generation: int = 0
    version: int = 0
    state: State = "preparing"
    store_port: int = 0
    started_s: float = 0.0  # monotonic: when StartWorkers came
    start: StartWorkers | None = None
    processes: dict[str, Process] = field(default_factory=dict)
    phases: dict[str, float] = field(default_factory=dict)
    passed: dict[str, set[int]] = field(default_factory=dict)  # phase -> local ranks
    steps: dict[int, int] = field(default_factory=dict)  # rank -> last finished step
    exits: list[WorkerExit] = field(default_factory=list)
    shards: dict[int, ShardSet] = field(default_factory=dict)
    holdings: tuple[Holding, ...] = ()
    error: str = ""
    copy_error: str = ""  # why the last snapshot has no copy on another node
    save_error: str = ""  # why the last durable checkpoint was not written
    next: StartStore | StartWorkers | StopWorkers | None = None
    failed_s: float | None = None  # monotonic: first bad exit

    @property
    def ranks(self) -> set[int]:
        return {plan.rank for plan in self.start.ranks} if self.start is not None else set()

    @property
    def kept_ranks(self) -> set[int]:
        """Whose snapshots are kept here: the ranks of this node, and those it keeps copies for."""
        return self.ranks | (set(self.start.wards) if self.start is not None else set())

    @property
    def busy(self) -> bool:
        """Something of the job runs here or is about to."""
        return bool(self.processes) or self.next is not None

    def begin(self, generation: int, state: State) -> None:
        """Enter a newer generation: nothing of the older ones counts any more."""
        assert generation > self.generation or state == "stopped"
        self.generation = generation
        self.state = state
        self.store_port = 0
        self.start = None
        self.phases = {}
        self.passed = {phase: set() for phase in PHASES}
        self.steps = {}
        self.exits = []
        self.shards = {}
        self.error = ""
        self.copy_error = ""
        self.save_error = ""
        self.failed_s = None

    def pass_phase(self, rank: int, phase: str, now_s: float) -> bool:
        """Note a phase of one rank; True when now all ranks here have passed it."""
        passed = self.passed.setdefault(phase, set())
        passed.add(rank)
        if phase in self.phases or not passed >= self.ranks:
            return False
        self.phases[phase] = now_s - self.started_s
        return True

    def shard_saved(self, shard: ShardSet) -> bool:
        """Note one rank's durable shard; True when now all ranks here have saved that step."""
        self.shards[shard.rank] = shard
        self.save_error = ""
        return {r for r, s in self.shards.items() if s.step == shard.step} >= self.ranks

    def committed(self, step: int) -> None:
        self.shards = {rank: shard for rank, shard in self.shards.items() if shard.step > step}

    def ended(self, process: Process, code: int, now_s: float) -> None:
        """A worker is gone; an end that we brought about is no exit."""
        if process.doomed or process.rank is None or process.generation != self.generation:
            return
        self.exits.append(
            WorkerExit(
                rank=process.rank,
                pid=process.pid or 0,
                code=code,
                at_s=now_s - self.started_s,
                step=self.steps.get(process.rank),
                error_class=process.error_class,
                message=process.error,
            )
        )
        if code != 0 and self.failed_s is None:
            self.failed_s = now_s
        if self.state == "started" and {e.rank for e in self.exits} >= self.ranks:
            self.state = "exited"

    def older(self, generation: int) -> list[Process]:
        """Processes of ``generation`` and before."""
        return [p for p in self.processes.values() if p.generation <= generation]

    def status(self) -> MemberStatus:
        """A new version of all that the controller may know."""
        self.version += 1
        pids = {
            p.rank: p.pid
            for p in self.processes.values()
            if p.rank is not None and p.pid is not None and p.generation == self.generation
        }
        started = self.state in ("started", "exited")
        return MemberStatus(
            job=self.job,
            generation=self.generation,
            version=self.version,
            state=self.state,
            store_port=self.store_port,
            pids=pids,
            phases=dict(self.phases),
            step=min((self.steps.get(rank, 0) for rank in self.ranks), default=0),
            exits=tuple(self.exits),
            shards=tuple(self.shards[rank] for rank in sorted(self.shards)) if started else (),
            holdings=self.holdings,
            error=self.error,
            copy_error=self.copy_error,
            save_error=self.save_error,
        )
