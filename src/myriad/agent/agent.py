"""The agent: one per node. Executes commands, watches processes, holds snapshots, reports.

Single-threaded on one event loop. It never looks at a job's status: it starts what it is told to start,
kills what is fenced, and says what it sees. Commands are named by (job, generation); a repeated one is
answered with the present status, an older one is ignored, and a newer one fences everything before it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import time
from pathlib import Path

from myriad.agent import system
from myriad.agent.environment import environment
from myriad.agent.guard import Guard
from myriad.agent.link import Link
from myriad.agent.member import Member, Process
from myriad.agent.template import TemplateClient
from myriad.spec.messages import (
    ChildExited,
    Commit,
    Committed,
    ControllerMessage,
    Failure,
    Forget,
    Forked,
    ForkStore,
    ForkWorker,
    FromTemplate,
    FromWorker,
    Hello,
    PhaseDone,
    Prepare,
    RankPlan,
    Refused,
    ShardsSaved,
    Shutdown,
    SnapshotTaken,
    StartStore,
    StartWorkers,
    StepDone,
    StopWorkers,
    WorkerWelcome,
)
from myriad.storage.memory.channel import Channel, ChannelClosed, ChannelError, ChannelGarbled, close_all
from myriad.storage.memory.keeper import SnapshotKeeper

# Workers whose collectives have failed are killed when no controller has come back in this time.
ABSENT_DEADLINE_S = 60.0
# How often a fence looks whether the last grandchild of a killed group is gone.
FENCE_POLL_S = 0.01
# Of a failed worker's log, quoted in the job's detail when it said nothing itself.
LOG_TAIL_BYTES = 2_000
LOG_TAIL_LINES = 3

log = logging.getLogger("myriad.agent")


class Agent:
    """See the module. ``run`` returns when the agent is asked to exit."""

    def __init__(
        self, node: str, incarnation: str, folder: Path, controller_file: Path, token: str, guard: Guard
    ) -> None:
        self._node = node
        self._incarnation = incarnation
        self._folder = folder
        self._token = token
        self._guard = guard
        self._members: dict[str, Member] = {}
        self._by_pid: dict[int, tuple[Member, Process]] = {}
        self._template: TemplateClient | None = None
        self._keeper = SnapshotKeeper()
        self._link = Link(controller_file, self._hello, self._receive)
        self._leaving = asyncio.Event()
        self._shutting_down = False
        self._background: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGCHLD, self._reap)
        loop.add_signal_handler(signal.SIGTERM, self._leaving.set)
        tasks = [asyncio.create_task(self._link.run()), asyncio.create_task(self._watch_absence())]
        leaving = asyncio.create_task(self._leaving.wait())
        # The others end only by an error of ours: an agent that listens no more must not live on.
        ended, _ = await asyncio.wait((leaving, *tasks), return_when=asyncio.FIRST_COMPLETED)
        await self._link.flush()
        for task in (leaving, *tasks, *self._background):
            task.cancel()
        await asyncio.gather(leaving, *tasks, *self._background, return_exceptions=True)
        self._kill_everything()
        self._keeper.close()
        for task in ended:
            task.result()

    # ------------------------------------------------------------ controller

    def _hello(self) -> Hello:
        return Hello(
            node=self._node,
            incarnation=self._incarnation,
            token=self._token,
            pid=os.getpid(),
            members=tuple(member.status() for member in self._members.values() if member.generation),
        )

    def _receive(self, message: ControllerMessage) -> None:
        log.info("%s", type(message).__name__)
        match message:
            case Refused():
                log.warning("refused: %s", message.reason)
                self._leaving.set()
            case Prepare():
                if message.torch:
                    self._need_template()
            case StartStore() | StartWorkers() | StopWorkers():
                self._order(message)
            case Commit():
                self._commit(message)
            case Forget():
                self._forget(message.job)
            case Shutdown():
                self._shutting_down = True
                self._leave_if_idle()
            case _:
                pass

    def _order(self, order: StartStore | StartWorkers | StopWorkers) -> None:
        """A start or a stop of a generation: fence what is older, then do it."""
        member = self._members.setdefault(order.job, Member(order.job))
        stop = isinstance(order, StopWorkers)
        if order.generation < member.generation:
            return self._tell(member)
        if order.generation == member.generation:
            if isinstance(order, StartWorkers) and member.state == "store":
                return self._start_workers(member, order)
            if not stop:
                return self._tell(member) if not member.next else None
        waiting = member.next
        if waiting is not None and (waiting.generation, not stop) > (order.generation, True):
            return None
        member.next = order
        if isinstance(order, StopWorkers):
            self._fence(member, order.generation, order.grace_s)
        else:
            self._fence(member, order.generation - 1, 0.0)

    def _tell(self, member: Member) -> None:
        self._link.update(member.status())

    def _commit(self, message: Commit) -> None:
        self._keeper.mark_durable(message.job, message.step)
        member = self._members.get(message.job)
        if member is None or member.generation != message.generation:
            return
        member.committed(message.step)
        for process in member.processes.values():
            if process.channel is not None:
                with contextlib.suppress(ChannelError):
                    process.channel.send(Committed(step=message.step), timeout_s=0)

    def _forget(self, job: str) -> None:
        self._keeper.forget(job)
        member = self._members.get(job)
        if member is not None and not member.busy:
            del self._members[job]
        self._leave_if_idle()

    def _leave_if_idle(self) -> None:
        if self._shutting_down and not any(member.busy for member in self._members.values()):
            self._leaving.set()

    # ------------------------------------------------------------ fencing

    def _fence(self, member: Member, generation: int, grace_s: float) -> None:
        """Kill everything up to ``generation``; :meth:`_fenced` goes on when all of it is gone."""
        if self._template is not None:
            self._template.poll()  # exits that happened before this fence are exits, not our doing
        self._reap()
        number = signal.SIGTERM if grace_s else signal.SIGKILL
        for process in member.older(generation):
            if process.pid is None:
                process.doomed = True
            elif not system.is_zombie_or_gone(process.pid):
                process.doomed = True
                system.kill_group(process.pid, number)
        task = asyncio.create_task(self._await_fence(member, generation, grace_s))
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _await_fence(self, member: Member, generation: int, grace_s: float) -> None:
        deadline = time.monotonic() + grace_s
        groups = {p.pid for p in member.older(generation) if p.pid is not None}
        while True:
            left = member.older(generation)
            groups |= {p.pid for p in left if p.pid is not None}
            if not left and not groups & system.living_groups():
                break
            if not left or (grace_s and time.monotonic() >= deadline):
                # Leaders gone but grandchildren alive, or the grace is over.
                for group in groups:
                    system.kill_group(group)
            await asyncio.sleep(FENCE_POLL_S)
        self._fenced(member, generation)

    def _fenced(self, member: Member, generation: int) -> None:
        """Nothing up to ``generation`` is left: do what this was for, unless it takes a wider fence, which
        then is on its way."""
        order = member.next
        if order is None or order.generation - (not isinstance(order, StopWorkers)) > generation:
            return
        member.next = None
        match order:
            case StopWorkers():
                if not order.keep:
                    self._keeper.forget(member.job)
                member.holdings = self._keeper.holdings(member.job)
                exits, error = member.exits, member.error
                same = member.generation == order.generation
                member.begin(max(member.generation, order.generation), "stopped")
                if same:
                    member.exits, member.error = exits, error
                self._tell(member)
            case StartStore():
                member.holdings = self._keeper.holdings(member.job)
                member.begin(order.generation, "preparing")
                self._tell(member)  # the fence is done, however long the template takes
                self._start_store(member, order)
            case StartWorkers():
                member.begin(order.generation, "preparing")
                self._start_workers(member, order)
        self._leave_if_idle()

    # ------------------------------------------------------------ starting

    def _need_template(self) -> TemplateClient:
        if self._template is None:
            self._template = TemplateClient(
                self._folder, self._guard, self._from_template, self._template_gone
            )
        return self._template

    def _start_store(self, member: Member, order: StartStore) -> None:
        if order.torch:
            key = f"{member.job}/{order.generation}/store"
            member.processes[key] = Process(key, order.generation, None, from_template=True)
            self._need_template().send(ForkStore(key=key, host="127.0.0.1", world_size=1))
            return
        with socket.socket() as probe:  # the command's own rank 0 will listen here
            probe.bind(("127.0.0.1", 0))
            member.store_port = probe.getsockname()[1]
        member.state = "store"
        self._tell(member)

    def _start_workers(self, member: Member, order: StartWorkers) -> None:
        member.start = order
        member.state = "started"
        member.started_s = time.monotonic()
        member.holdings = ()
        if order.restore_step is None:
            self._keeper.forget(member.job)
        else:
            self._keeper.drop_newer(member.job, order.restore_step)
        if order.durable_step is not None:
            self._keeper.mark_durable(member.job, order.durable_step)
        logs = Path(order.job_dir) / "logs"
        try:
            logs.mkdir(parents=True, exist_ok=True)
            for plan in order.ranks:
                self._start_worker(member, order, plan, str(logs / f"rank-{plan.rank:05d}.log"))
        except OSError as error:
            member.error = f"{error.strerror}: {error.filename or order.job_dir}"
        self._tell(member)

    def _start_worker(self, member: Member, order: StartWorkers, plan: RankPlan, log_path: str) -> None:
        key = f"{member.job}/{order.generation}/{plan.rank}"
        channel: Channel[FromWorker]
        channel, theirs = Channel.pair(FromWorker)
        process = Process(key, order.generation, plan.rank, channel=channel)
        env = environment(order, plan, self._node, order.spec.get("env") or {})
        self._welcome(channel, order, plan)
        try:
            command = order.spec.get("command")
            if command is None:
                process.from_template = True
                request = ForkWorker(key=key, env=env, log_path=log_path, spec=order.spec)
                self._need_template().send(request, [theirs.fileno()])
            else:
                env["MYRIAD_CHANNEL_FD"] = str(theirs.fileno())
                spawned = system.spawn(command, env, theirs.fileno(), log_path, order.spec.get("workdir"))
                if spawned.error:
                    process.error_class, process.error = "CommandNotStarted", spawned.error
                self._born(member, process, spawned.pid)
        finally:
            theirs.close()
        member.processes[key] = process
        asyncio.get_running_loop().add_reader(channel.fileno(), self._from_worker, member, process)

    def _welcome(self, channel: Channel[FromWorker], order: StartWorkers, plan: RankPlan) -> None:
        fds = []
        if plan.tier == "memory":
            assert order.restore_step is not None
            fd = self._keeper.fd_for(order.job, plan.rank, order.restore_step)
            assert fd is not None, (
                f"{order.job} rank {plan.rank}: snapshot of step {order.restore_step} is gone"
            )
            fds = [fd]
        welcome = WorkerWelcome(
            job=order.job,
            job_name=order.job_name,
            generation=order.generation,
            rank=plan.rank,
            local_rank=plan.local_rank,
            world_size=order.world_size,
            job_dir=order.job_dir,
            restore_step=order.restore_step,
            restore_generation=order.restore_generation,
            tier=plan.tier,
            durable_step=order.durable_step,
        )
        channel.send(welcome, fds, timeout_s=0)

    def _born(self, member: Member, process: Process, pid: int) -> None:
        """A process has a pid: watch it, or kill it when its generation was fenced meanwhile."""
        process.pid = pid
        self._by_pid[pid] = (member, process)
        self._guard.add(pid)
        if process.doomed:
            system.kill_group(pid)
        elif process.rank is not None and member.pass_phase(process.rank, "fork", time.monotonic()):
            self._tell(member)

    # ------------------------------------------------------------ what processes say

    def _from_template(self, message: FromTemplate) -> None:
        match message:
            case Forked():
                found = self._find(message.key)
                if found is None:
                    system.kill_group(message.pid)
                    return
                member, process = found
                self._born(member, process, message.pid)
                if process.rank is None and not process.doomed:
                    member.store_port, member.state = message.port, "store"
                    self._tell(member)
            case ChildExited():
                found = self._find(message.key)
                if found is not None:
                    self._ended(*found, message.code)
            case _:
                pass

    def _template_gone(self) -> None:
        """The template died: its children die with it; the next start gets a new one."""
        log.warning("the template died")
        self._template = None
        for member in list(self._members.values()):
            for process in [p for p in member.processes.values() if p.from_template]:
                process.error_class = process.error_class or "TemplateLost"
                process.error = process.error or "the template process of its node died"
                if process.pid is not None:
                    system.kill_group(process.pid)
                self._ended(member, process, -int(signal.SIGKILL))

    def _find(self, key: str) -> tuple[Member, Process] | None:
        member = self._members.get(key.split("/", 1)[0])
        process = member.processes.get(key) if member is not None else None
        return None if member is None or process is None else (member, process)

    def _from_worker(self, member: Member, process: Process) -> None:
        """Take in everything a worker has said."""
        channel = process.channel
        try:
            while channel is not None and channel.fileno() >= 0:
                received = channel.recv_nowait()
                if received is None:
                    return
                message, fds = received
                if process.doomed or process.generation != member.generation:
                    close_all(fds)
                else:
                    self._take(member, process, message, fds)
        except ChannelGarbled as error:
            log.warning("worker %s: %s", process.key, error)
        except ChannelClosed:
            self._close_channel(process)

    def _take(self, member: Member, process: Process, message: FromWorker, fds: list[int]) -> None:
        assert process.rank is not None
        match message:
            case PhaseDone():
                if member.pass_phase(process.rank, message.phase, time.monotonic()):
                    self._tell(member)
            case StepDone():
                member.steps[process.rank] = message.report.step
                self._link.report(message.report)
            case SnapshotTaken():
                (fd,) = fds
                self._keeper.add(
                    member.job, process.rank, message.step, fd, message.size, message.crc32, message.durable
                )
            case ShardsSaved():
                if member.shard_saved(message.shards):
                    self._tell(member)
            case Failure():
                process.error_class, process.error = message.error_class, message.message
                if message.step is not None:
                    member.steps[process.rank] = message.step

    def _close_channel(self, process: Process) -> None:
        if process.channel is not None and process.channel.fileno() >= 0:
            asyncio.get_running_loop().remove_reader(process.channel.fileno())
            process.channel.close()

    # ------------------------------------------------------------ ends

    def _reap(self) -> None:
        """Wait for every child of ours that has ended, adopted orphans included."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            found = self._by_pid.get(pid)
            if found is not None and not found[1].from_template:
                self._ended(*found, os.waitstatus_to_exitcode(status))

    def _ended(self, member: Member, process: Process, code: int) -> None:
        if process.key not in member.processes:
            return
        self._from_worker(member, process)
        self._close_channel(process)
        if process.pid is not None:
            self._by_pid.pop(process.pid, None)
            system.kill_group(process.pid)  # what the worker itself has left behind
            self._guard.remove(process.pid)
        del member.processes[process.key]
        if process.rank is None:
            if not process.doomed and process.generation == member.generation:
                member.error = "its rendezvous store died"
                self._tell(member)
            return
        if code != 0 and not process.doomed and not process.error:
            process.error = self._last_words(member, process.rank)
        member.ended(process, code, time.monotonic())
        if not process.doomed:
            self._tell(member)

    def _last_words(self, member: Member, rank: int) -> str:
        """The end of a worker's log."""
        if member.start is None:
            return ""
        path = Path(member.start.job_dir) / "logs" / f"rank-{rank:05d}.log"
        try:
            with open(path, "rb") as file:
                file.seek(max(0, path.stat().st_size - LOG_TAIL_BYTES))
                lines = file.read().decode(errors="replace").strip().splitlines()
        except OSError:
            return ""
        return " / ".join(line.strip() for line in lines[-LOG_TAIL_LINES:])

    async def _watch_absence(self) -> None:
        """Without a controller nobody will restart a broken job: do not let its rest burn for ever."""
        while True:
            await asyncio.sleep(1.0)
            away = self._link.away_since_s
            now = time.monotonic()
            if away is None or now - away < ABSENT_DEADLINE_S:
                continue
            for member in self._members.values():
                if member.failed_s is not None and now - member.failed_s >= ABSENT_DEADLINE_S:
                    for process in member.older(member.generation):
                        if process.pid is not None:
                            system.kill_group(process.pid)

    def _kill_everything(self) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_signal_handler(signal.SIGCHLD)
        for member in self._members.values():
            for process in member.processes.values():
                process.doomed = True
                self._close_channel(process)
                if process.pid is not None:
                    system.kill_group(process.pid)
        if self._template is not None:
            self._template.close()
