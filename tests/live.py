"""A real cluster for a test: the controller process, its agents and their workers, on this machine.

``LiveCluster`` is a context manager that leaves nothing behind: at the end it takes the cluster down, and
if a process of it is still alive then, kills it and fails. Waiting always has a deadline, and an expired one
says what was missing. Start to finish takes about 1.5 s for three nodes.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import leaks
from myriad.cluster.state import NodeState
from myriad.control.records import GenerationRecord, JobRecord, MemberRecord, NodeRecord
from myriad.control.status import JobStatus
from myriad.runtime.admin import AdminClient, AdminRefused, ControllerUnreachable
from myriad.runtime.paths import StateDir
from myriad.runtime.store import StateReader

MARK = "MYRIAD_LIVE_CLUSTER"
START_DEADLINE_S = 30.0
DOWN_DEADLINE_S = 30.0
POLL_S = 0.03
CONTROLLER = (sys.executable, "-m", "myriad.engines")


def cluster_of(
    nodes: int = 3, accelerators: int = 1, leaves: int = 1, heartbeat_s: float = 0.5
) -> dict[str, Any]:
    """A cluster file's content: nodes n0, n1, ... dealt to leaves in blocks of equal size."""
    per_leaf = -(-nodes // leaves)
    return {
        "name": "test",
        "node_types": {"small": {"accelerators": accelerators, "cpus": 1, "memory": "1GiB"}},
        "nodes": [
            {
                "name": f"n{i}",
                "type": "small",
                "rack": f"r{i // per_leaf}",
                "power_feed": "a",
                "leaf": f"leaf{i // per_leaf}",
            }
            for i in range(nodes)
        ],
        "fabric": {
            "node": {"bandwidth": "10GB/s"},
            "leaf": {"bandwidth": "1GB/s"},
            "core": {"bandwidth": "1GB/s"},
        },
        "heartbeat": heartbeat_s,
    }


class Missing(AssertionError):
    """A deadline has passed; the message says what was waited for and what there was."""


class LiveCluster:
    """See the module. ``root`` is the state folder; ``controller`` the program, given ``--state ROOT``."""

    def __init__(
        self,
        root: Path,
        cluster: Mapping[str, Any] | None = None,
        controller: Sequence[str] = CONTROLLER,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.state_dir = StateDir(root)
        self.cluster = dict(cluster if cluster is not None else cluster_of())
        self.admin = AdminClient(self.state_dir)
        self._program = tuple(controller)
        self._mark = uuid.uuid4().hex
        self._env = {**os.environ, "OMP_NUM_THREADS": "1", **(env or {}), MARK: self._mark}
        self.controller: subprocess.Popen[bytes] | None = None

    # ------------------------------------------------------------ life

    def __enter__(self) -> Self:
        self.state_dir.root.mkdir(parents=True, exist_ok=True)
        self.state_dir.cluster_file.write_text(json.dumps(self.cluster))  # JSON is YAML
        try:
            self.start_controller()
            self.wait_for_nodes()
        except BaseException:
            self._destroy()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None and self.processes():
                self.down()
        finally:
            left = self._destroy()
        if left and error is None:
            raise AssertionError(f"had to kill processes of the cluster: {'; '.join(left)}\n{self._logs()}")

    def start_controller(self, controller: Sequence[str] | None = None, wait: bool = True) -> None:
        """Start the controller process on the state as it is; ``wait`` until it answers."""
        program = [*(controller or self._program), "--state", str(self.state_dir.root)]
        with open(self.state_dir.log("controller"), "ab") as log:
            self.controller = subprocess.Popen(
                program,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._env,
                start_new_session=True,
            )
        if wait:
            self.wait_for_controller()

    def wait_for_controller(self) -> None:
        assert self.controller is not None
        deadline = time.monotonic() + START_DEADLINE_S
        while True:
            try:
                if self.admin.call("ping")["pid"] == self.controller.pid:
                    return
            except ControllerUnreachable:
                pass
            code = self.controller.poll()
            if code is not None or time.monotonic() >= deadline:
                raise Missing(f"no answer of the controller (exit code {code})\n{self._logs()}")
            time.sleep(POLL_S)

    def kill_controller(self, number: signal.Signals = signal.SIGKILL) -> None:
        assert self.controller is not None
        self.controller.send_signal(number)
        self.controller.wait(DOWN_DEADLINE_S)

    def restart_controller(self, kill: bool = True) -> None:
        """End the controller by SIGKILL (or SIGTERM) and start a new one on the same state."""
        self.kill_controller(signal.SIGKILL if kill else signal.SIGTERM)
        self.start_controller()

    def down(self, cancel_jobs: bool = True) -> None:
        """Take the cluster down the official way, and wait until everything is gone."""
        if self.controller is None or self.controller.poll() is not None:
            self.start_controller()
        assert self.controller is not None
        self.admin.call("down", cancel_jobs=cancel_jobs)
        try:
            self.controller.wait(DOWN_DEADLINE_S)
        except subprocess.TimeoutExpired:
            raise Missing(f"the controller did not leave after down\n{self._logs()}") from None
        if cancel_jobs:
            leaks.wait_until(lambda: not self.processes(), leaks.GRACE_S)

    def processes(self) -> list[int]:
        """All live processes of this cluster: controller, agents, guards, templates, workers."""
        entry = f"{MARK}={self._mark}"
        return [
            pid
            for pid in (int(name) for name in os.listdir("/proc") if name.isdigit())
            if leaks.has_environment(pid, entry) and not leaks.is_gone(pid)
        ]

    def _destroy(self) -> list[str]:
        """Kill whatever is left; returns it in words."""
        left = self.processes()
        words = [leaks.describe(pid) for pid in left]
        while left:
            leaks.kill(left)
            leaks.wait_until(lambda: not self.processes(), 0.2)
            left = self.processes()
        if self.controller is not None:
            self.controller.wait(DOWN_DEADLINE_S)
        return words

    # ------------------------------------------------------------ asking

    def submit(self, spec: Mapping[str, Any] | None = None, request: str | None = None, **keys: Any) -> str:
        """Submit a job (a dict, or its keys: ``name`` is "test" and ``nodes`` 1 unless given)."""
        document = {"name": "test", "nodes": 1, **(spec or {}), **keys}
        return str(self.admin.call("submit", request=request or uuid.uuid4().hex, spec=document)["job"])

    def cancel(self, job: str) -> None:
        self.admin.call("cancel", job=job)

    def inject(self, kind: str, target: str) -> None:
        """kill-node, kill-agent, kill-worker or stop of a node or of JOB/RANK; tried again while the
        worker is not there yet."""
        deadline = time.monotonic() + START_DEADLINE_S
        while True:
            try:
                self.admin.call("inject", kind=kind, target=target)
                return
            except AdminRefused:
                if time.monotonic() >= deadline:
                    raise
                time.sleep(POLL_S)

    def reader(self) -> StateReader:
        return StateReader(self.state_dir)

    def job(self, job: str) -> JobRecord:
        with self.reader() as reader:
            record = reader.record(JobRecord, job)
        assert record is not None, f"there is no job {job}"
        return record

    def nodes(self) -> dict[str, NodeRecord]:
        with self.reader() as reader:
            return reader.records(NodeRecord)

    def generations(self, job: str) -> list[GenerationRecord]:
        with self.reader() as reader:
            return [g for g in reader.records(GenerationRecord).values() if g.job == job]

    def pids(self, job: str) -> dict[int, int]:
        """rank -> pid, as the agents last said."""
        with self.reader() as reader:
            members = [m for m in reader.records(MemberRecord).values() if m.job == job]
        return {rank: pid for m in members if m.status is not None for rank, pid in m.status.pids.items()}

    def log_text(self, job: str, rank: int = 0) -> str:
        path = self.state_dir.log_file(job, rank)
        return path.read_text() if path.exists() else ""

    # ------------------------------------------------------------ waiting

    def wait(self, what: str, predicate: Callable[[StateReader], Any], deadline_s: float = 30.0) -> Any:
        """The first truthy answer of ``predicate``; Missing names ``what`` after ``deadline_s``."""
        deadline = time.monotonic() + deadline_s
        with self.reader() as reader:
            while True:
                found = predicate(reader)
                if found:
                    return found
                if time.monotonic() >= deadline:
                    raise Missing(
                        f"after {deadline_s:g} s still not: {what}\n{self._story()}\n{self._logs()}"
                    )
                time.sleep(POLL_S)

    def wait_for(
        self, job: str, predicate: Callable[[JobRecord], object], deadline_s: float = 30.0, what: str = ""
    ) -> JobRecord:
        """The job's record as soon as ``predicate`` holds for it."""

        def holds(reader: StateReader) -> JobRecord | None:
            record = reader.record(JobRecord, job)
            return record if record is not None and predicate(record) else None

        found = self.wait(what or f"what the test wants of job {job}", holds, deadline_s)
        assert isinstance(found, JobRecord)
        return found

    def wait_for_status(self, job: str, status: JobStatus, deadline_s: float = 30.0) -> JobRecord:
        """Fails at once when the job has ended otherwise."""
        record = self.wait_for(
            job, lambda j: j.status is status or j.status.final, deadline_s, f"{job} in {status}"
        )
        if record.status is not status:
            raise Missing(f"{job} is not {status}\n{self._story()}\n{self._logs()}")
        return record

    def wait_for_end(self, job: str, deadline_s: float = 30.0) -> JobRecord:
        return self.wait_for(job, lambda j: j.status.final, deadline_s, f"the end of {job}")

    def wait_for_nodes(self, deadline_s: float = START_DEADLINE_S) -> None:
        """Until every node's agent has joined."""

        def joined(reader: StateReader) -> bool:
            nodes = reader.records(NodeRecord).values()
            return bool(nodes) and all(n.state is not NodeState.DOWN for n in nodes)

        self.wait("every node has joined", joined, deadline_s)

    def _story(self) -> str:
        with self.reader() as reader:
            jobs = [
                f"  {j.id} {j.status} {j.reason} {j.stage} generation {j.generation}: {j.detail}"
                for j in reader.records(JobRecord).values()
            ]
            nodes = [f"  {n.name} {n.state} {n.reason}" for n in reader.records(NodeRecord).values()]
        return "\n".join(["what there is:", *jobs, *nodes])

    def _logs(self) -> str:
        """The ends of all logs, for a person who has to find out why."""
        files = [self.state_dir.log("controller")]
        files += sorted(self.state_dir.root.glob("nodes/*/*.log"))
        files += sorted(self.state_dir.root.glob("jobs/*/logs/*.log"))
        parts = []
        for file in files:
            if file.exists() and (text := file.read_text(errors="replace").strip()):
                parts.append(f"--- {file.relative_to(self.state_dir.root)}\n{text[-1500:]}")
        return "\n".join(parts)
