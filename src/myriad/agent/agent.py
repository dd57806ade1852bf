"""The agent: one per node. Executes commands, watches processes, holds snapshots, reports.

Single-threaded on one event loop. It never looks at a job's status: it starts what it is told to start,
kills what is fenced, and says what it sees. What follows from a command is decided in ``orders``; this is
the hands that do it, with real processes, channels and memory files.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from myriad.agent import system
from myriad.agent.copier import Copier
from myriad.agent.environment import environment
from myriad.agent.guard import Guard
from myriad.agent.link import Link
from myriad.agent.member import Member, Process
from myriad.agent.orders import Orders
from myriad.agent.peers import Copy, PeerClient, PeerError, PeerServer
from myriad.agent.template import TemplateClient
from myriad.spec.messages import (
    ChildExited,
    Committed,
    ControllerMessage,
    Copied,
    Dropped,
    Failure,
    Forked,
    ForkStore,
    ForkWorker,
    FromTemplate,
    FromWorker,
    Hello,
    Holding,
    Intervals,
    MemberStatus,
    Peer,
    PhaseDone,
    RankPlan,
    SaveFailed,
    ShardsSaved,
    SnapshotTaken,
    StartStore,
    StartWorkers,
    StepDone,
    StepReport,
    WorkerWelcome,
)
from myriad.storage.memory.channel import Channel, ChannelClosed, ChannelError, ChannelGarbled, close_all
from myriad.storage.memory.keeper import Owner, SnapshotKeeper
from myriad.storage.memory.retention import Use
from myriad.storage.memory.snapshot import SnapshotCorrupt

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
        self._folder = folder
        self._guard = guard
        self._orders = Orders(self)
        self._by_pid: dict[int, tuple[Member, Process]] = {}
        self._channels: dict[str, Channel[FromWorker]] = {}  # to workers, by process key
        self._template: TemplateClient | None = None
        self._keeper = SnapshotKeeper(self._dropped)
        generation_of = self._orders.generation
        self._peers = PeerServer("127.0.0.1", token, self._keeper, generation_of, self._deliver)
        self._client = PeerClient(token)
        port = self._peers.port
        hello = Hello(node=node, incarnation=incarnation, token=token, pid=os.getpid(), peer_port=port)
        self._link = Link(controller_file, hello, self._orders.statuses, self._receive)
        self._copier = Copier(self._client, self._keeper, self._link.undelivered, self._copied)
        self._leaving = asyncio.Event()
        self._background: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGCHLD, self._reap)
        loop.add_signal_handler(signal.SIGTERM, self._leaving.set)
        await self._peers.listen()
        works = (self._link.run(), self._watch_absence(), self._copier.run())
        tasks = [asyncio.create_task(work) for work in works]
        leaving = asyncio.create_task(self._leaving.wait())
        # The others end only by an error of ours: an agent that listens no more must not live on.
        ended, _ = await asyncio.wait((leaving, *tasks), return_when=asyncio.FIRST_COMPLETED)
        await self._link.flush()
        for task in (leaving, *tasks, *self._background):
            task.cancel()
        await asyncio.gather(leaving, *tasks, *self._background, return_exceptions=True)
        self._kill_everything()
        self._peers.close()
        self._keeper.close()
        for task in ended:
            task.result()

    # ------------------------------------------------------------ controller

    def _receive(self, message: ControllerMessage) -> None:
        log.info("%s", type(message).__name__)
        self._orders.receive(message)

    def tell(self, status: MemberStatus) -> None:
        self._link.update(status)

    def leave(self, why: str) -> None:
        log.warning("leaving: %s", why)
        self._leaving.set()

    # ------------------------------------------------------------ snapshots

    def committed(self, job: str, step: int, intervals: Intervals, processes: list[Process]) -> None:
        self._keeper.mark_durable(job, step)
        for process in processes:
            channel = self._channels.get(process.key)
            if channel is not None:
                with contextlib.suppress(ChannelError):
                    channel.send(Committed(step=step, intervals=intervals), timeout_s=0)

    def _dropped(self, owner: Owner) -> None:
        """A snapshot is no longer held: its worker may use the memory again."""
        channel = self._channels.get(owner.process)
        if channel is not None:
            with contextlib.suppress(ChannelError):
                channel.send(Dropped(buffer=owner.buffer), timeout_s=0)

    def _deliver(self, report: StepReport) -> None:
        """A report of a node that may be gone."""
        self._link.report(report)

    def _copied(self, copy: Copy, error: str) -> None:
        """A copy is made, or will not be: its rank may go on."""
        member = self._orders.members.get(copy.job)
        if member is None or member.generation != copy.generation or member.start is None:
            return
        member.copy_error = error
        if not error:
            self._keeper.keep_ranks(copy.job, member.kept_ranks)
        channel = self._channels.get(f"{copy.job}/{copy.generation}/{copy.rank}")
        if channel is not None:
            with contextlib.suppress(ChannelError):
                channel.send(Copied(step=copy.step), timeout_s=0)

    def holdings(self, job: str) -> tuple[Holding, ...]:
        return self._keeper.holdings(job)

    def forget(self, job: str) -> None:
        self._keeper.forget(job)

    # ------------------------------------------------------------ fencing

    def fence(self, member: Member, generation: int, grace_s: float) -> None:
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
        self._in_background(self._await_fence(member, generation, grace_s))

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
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
        self._orders.fenced(member, generation)

    # ------------------------------------------------------------ starting

    def prepare(self) -> None:
        self._need_template()

    def _need_template(self) -> TemplateClient:
        if self._template is None:
            self._template = TemplateClient(
                self._folder, self._guard, self._from_template, self._template_gone
            )
        return self._template

    def start_store(self, member: Member, order: StartStore) -> None:
        if order.torch:
            key = f"{member.job}/{order.generation}/store"
            member.processes[key] = Process(key, order.generation, None, from_template=True)
            self._need_template().send(ForkStore(key=key, host="127.0.0.1", world_size=1))
            return
        with socket.socket() as probe:  # the command's own rank 0 will listen here
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._orders.store_is_up(member, port)

    def start_workers(self, member: Member, order: StartWorkers) -> None:
        member.started_s = time.monotonic()
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
                log_path = str(logs / f"rank-{plan.rank:05d}.log")
                if plan.source is None:
                    self._start_worker(member, order, plan, log_path)
                else:
                    self._in_background(self._fetch_and_start(member, order, plan, plan.source, log_path))
        except OSError as error:
            member.error = f"{error.strerror}: {error.filename or order.job_dir}"

    async def _fetch_and_start(
        self, member: Member, order: StartWorkers, plan: RankPlan, source: Peer, log_path: str
    ) -> None:
        """A worker whose snapshot another node has a copy of."""
        assert order.restore_step is not None
        step, error = order.restore_step, ""
        try:
            found = await self._client.get(source, order.job, order.generation, plan.rank, step)
        except (PeerError, SnapshotCorrupt) as reason:
            error = f"rank {plan.rank} could not get its snapshot of step {step}: {reason}"
        if member.start is not order:  # fenced meanwhile
            if not error:
                os.close(found[0])
            return
        if not error:
            self._keeper.add(order.job, plan.rank, step, *found, Use(peer=True), verified=True)
            try:
                self._start_worker(member, order, plan, log_path)
            except OSError as reason:
                error = f"{reason.strerror}: {reason.filename or order.job_dir}"
        if error:
            self._orders.start_failed(member, error)

    def _start_worker(self, member: Member, order: StartWorkers, plan: RankPlan, log_path: str) -> None:
        key = f"{member.job}/{order.generation}/{plan.rank}"
        channel: Channel[FromWorker]
        channel, theirs = Channel.pair(FromWorker)
        process = Process(key, order.generation, plan.rank)
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
        self._channels[key] = channel
        asyncio.get_running_loop().add_reader(channel.fileno(), self._from_worker, member, process)

    def _welcome(self, channel: Channel[FromWorker], order: StartWorkers, plan: RankPlan) -> None:
        fds = []
        if plan.tier in ("memory", "peer"):
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
            intervals=order.intervals,
            durable_generation=order.durable_generation,
            copies=order.holder is not None,
        )
        channel.send(welcome, fds, timeout_s=0)

    def _born(self, member: Member, process: Process, pid: int) -> None:
        """A process has a pid: watch it, or kill it when its generation was fenced meanwhile."""
        process.pid = pid
        self._by_pid[pid] = (member, process)
        self._guard.add(pid)
        if process.doomed:
            system.kill_group(pid)
        elif process.rank is not None:
            self._orders.phase_passed(member, process.rank, "fork", time.monotonic())

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
                    self._orders.store_is_up(member, message.port)
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
        for member in list(self._orders.members.values()):
            for process in [p for p in member.processes.values() if p.from_template]:
                process.error_class = process.error_class or "TemplateLost"
                process.error = process.error or "the template process of its node died"
                if process.pid is not None:
                    system.kill_group(process.pid)
                self._ended(member, process, -int(signal.SIGKILL))

    def _find(self, key: str) -> tuple[Member, Process] | None:
        member = self._orders.members.get(key.split("/", 1)[0])
        process = member.processes.get(key) if member is not None else None
        return None if member is None or process is None else (member, process)

    def _from_worker(self, member: Member, process: Process) -> None:
        """Take in everything a worker has said."""
        channel = self._channels.get(process.key)
        try:
            while channel is not None and (received := channel.recv_nowait()) is not None:
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
                self._orders.phase_passed(member, process.rank, message.phase, time.monotonic())
            case StepDone():
                member.steps[process.rank] = message.report.step
                self._link.report(message.report)
            case SnapshotTaken():
                (fd,) = fds
                use = Use(message.durable, message.peer)
                owner = Owner(process.key, message.buffer)
                self._keeper.add(
                    member.job, process.rank, message.step, fd, message.size, message.crc32, use, owner=owner
                )
                holder = member.start.holder if member.start is not None else None
                if message.peer and holder is not None:
                    copy = Copy(holder, member.job, process.generation, process.rank, message.step)
                    self._copier.add(copy)
            case ShardsSaved():
                self._orders.shards_saved(member, message.shards)
            case SaveFailed():
                self._orders.save_failed(member, message.error)
            case Failure():
                self._orders.failing(member, process, message)

    def _close_channel(self, process: Process) -> None:
        channel = self._channels.pop(process.key, None)
        if channel is not None:
            asyncio.get_running_loop().remove_reader(channel.fileno())
            channel.close()

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
        if process.rank is not None and code != 0 and not process.doomed and not process.error:
            process.error = self._last_words(member, process.rank)
        self._orders.ended(member, process, code, time.monotonic())

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
            for process in self._orders.abandoned(self._link.away_since_s, time.monotonic()):
                if process.pid is not None:
                    system.kill_group(process.pid)

    def _kill_everything(self) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_signal_handler(signal.SIGCHLD)
        for member in self._orders.members.values():
            for process in member.processes.values():
                process.doomed = True
                self._close_channel(process)
                if process.pid is not None:
                    system.kill_group(process.pid)
        if self._template is not None:
            self._template.close()
