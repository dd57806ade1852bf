"""The local engine: each node of the cluster is an agent process (and its children) on this machine.

Agents are sessions of their own, not tied to the controller's life: a new controller finds the old ones
by (pid, start time) in their node folder. A pidfd tells at once when an agent is gone, which is proof
of death, so a lost emulated node is confirmed in milliseconds rather than in heartbeats.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Collection

from myriad.control.events import AgentExited
from myriad.control.records import MemberRecord, NodeRecord
from myriad.engines.local import processes
from myriad.runtime.engine import EngineHost
from myriad.runtime.files import read_json

log = logging.getLogger("myriad.engine")


class LocalEngine:
    """Emulates nodes on one machine. Implements :class:`myriad.runtime.engine.Engine`."""

    def __init__(self) -> None:
        self._host: EngineHost | None = None
        self._watched: dict[str, tuple[str, int]] = {}  # node -> (incarnation, pidfd)
        self._children: dict[int, subprocess.Popen[bytes]] = {}  # our own agents, to be reaped

    @property
    def host(self) -> EngineHost:
        assert self._host is not None, "attach comes first"
        return self._host

    def attach(self, host: EngineHost) -> None:
        self._host = host

    def start_agent(self, node: str, fenced: str) -> None:
        if node in self._watched:
            if fenced and self._watched[node][0] == fenced:
                self.inject("kill-node", node)  # it may be stopped, and would never hear that it was given up
            return
        known = read_json(self.host.state_dir.node_dir(node) / "agent.json")
        if known is not None and processes.is_alive(known["pid"], known["start_ticks"]):
            self._watch(node, str(known["incarnation"]), int(known["pid"]))
            return
        incarnation = uuid.uuid4().hex
        folder = self.host.state_dir.node_dir(node)
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / "agent.log", "ab") as output:
            child = subprocess.Popen(
                [
                    *(sys.executable, "-P", "-m", "myriad.agent"),
                    *("--node", node, "--incarnation", incarnation),
                    *("--folder", str(folder), "--controller", str(self.host.state_dir.controller_file)),
                    *("--token-file", str(self.host.state_dir.agent_token)),
                ],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        self._children[child.pid] = child
        self._watch(node, incarnation, child.pid)

    def _watch(self, node: str, incarnation: str, pid: int) -> None:
        pidfd = os.pidfd_open(pid)
        self._watched[node] = (incarnation, pidfd)
        asyncio.get_running_loop().add_reader(pidfd, self._gone, node, incarnation, pid, pidfd)

    def _gone(self, node: str, incarnation: str, pid: int, pidfd: int) -> None:
        asyncio.get_running_loop().remove_reader(pidfd)
        os.close(pidfd)
        del self._watched[node]
        child = self._children.pop(pid, None)
        code = child.wait() if child is not None else None
        log.info("agent of %s (pid %d) is gone, code %s", node, pid, code)
        self.host.post(AgentExited(node=node, incarnation=incarnation, silent_s=self.host.silent_s(node)))

    def living(self) -> Collection[str]:
        return self._watched.keys()

    # ------------------------------------------------------------ harm

    def check_inject(self, kind: str, target: str) -> str | None:
        if "/" in target or kind == "kill-worker":
            if self._worker(target) is None:
                return f"there is no running worker {target}; name it JOB/RANK, see: myriad show JOB"
            return None
        if self.host.state.get(NodeRecord, target) is None:
            return f"the cluster has no node {target}; see: myriad nodes"
        if target not in self._watched:
            return f"node {target} has no running agent"
        return None

    def inject(self, kind: str, target: str) -> None:
        log.info("inject %s %s", kind, target)
        number = signal.SIGSTOP if kind == "stop" else signal.SIGKILL
        worker = self._worker(target)
        if worker is not None:
            processes.send_all([worker], number)
            return
        watched = read_json(self.host.state_dir.node_dir(target) / "agent.json")
        if watched is None or target not in self._watched:
            return
        leader = int(watched["pid"])
        processes.send_all([leader] if kind == "kill-agent" else processes.of_session(leader), number)

    def _worker(self, target: str) -> int | None:
        """Process id of worker JOB/RANK."""
        job, _, rank = target.rpartition("/")
        if not rank.isdigit():
            return None
        for member in self.host.state.table(MemberRecord).values():
            if member.job == job and member.status is not None and int(rank) in member.status.pids:
                return member.status.pids[int(rank)]
        return None

    def close(self) -> None:
        for _, pidfd in self._watched.values():
            asyncio.get_running_loop().remove_reader(pidfd)
            os.close(pidfd)
        self._watched.clear()
        for child in self._children.values():
            child.returncode = child.poll() or 0  # it outlives us on purpose: no warning about it
        self._children.clear()
