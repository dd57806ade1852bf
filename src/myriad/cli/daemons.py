"""The two processes of a running cluster, started and stopped: the controller and the API server.

Both are daemons: sessions of their own, no terminal, output to log files in the state folder. Starting is
complete when both listen and every node's agent has joined; what is missing at the deadline is named. A state
belongs to one controller (it holds the state's lock), so the question whether one runs is put to its socket.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from myriad.cli.client import Client, server_entry
from myriad.cli.errors import CommandError, Exit
from myriad.runtime.admin import AdminClient, AdminRefused, ControllerUnreachable
from myriad.runtime.files import read_json
from myriad.runtime.paths import StateDir

START_DEADLINE_S = (
    30.0  # of `up` until everything has joined: processes start in about 1 s on an idle machine
)
STOP_DEADLINE_S = (
    30.0  # of `down` until controller and server have left: jobs get 5 s grace and 20 s to be fenced
)
POLL_S = 0.05
PING_DEADLINE_S = 2.0


@dataclass(frozen=True, slots=True)
class Daemon:
    """A started process, and where in its log file this life of it begins."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path
    log_start: int

    def check_alive(self) -> None:
        """CommandError when it has ended: it has said why in its log's last line."""
        if self.process.poll() is None:
            return
        with self.log.open("rb") as file:
            file.seek(self.log_start)
            lines = file.read().decode(errors="replace").strip().splitlines()
        why = lines[-1] if lines else f"it ended with code {self.process.returncode}"
        raise CommandError(f"the {self.name} did not start: {why} (log: {self.log})")

    def await_ready(self, until: float, ready: Callable[[], bool]) -> None:
        while not ready():
            self.check_alive()
            if time.monotonic() > until:
                raise CommandError(
                    f"the {self.name} has not answered after {START_DEADLINE_S:.0f} s; see {self.log}"
                )
            time.sleep(POLL_S)


@dataclass(slots=True)
class Daemons:
    """What this process has started. None: not yet, or it was running before."""

    controller: Daemon | None = None
    server: Daemon | None = None

    def kill(self) -> None:
        """End what was started, at once."""
        for daemon in (self.server, self.controller):
            if daemon is not None:
                daemon.process.kill()
                daemon.process.wait()


def ping(state: StateDir) -> dict[str, Any] | None:
    """The controller's answer, or None when none runs."""
    if not state.control_socket.exists():
        return None
    try:
        return AdminClient(state, deadline_s=PING_DEADLINE_S).call("ping")
    except (ControllerUnreachable, AdminRefused):
        return None


def start(state: StateDir, port: int) -> Daemons:
    """Start the server and then the controller, unless they answer already; returns when both do.

    The server comes first because it can fail on the user's port, and then nothing else has been started.
    """
    until = time.monotonic() + START_DEADLINE_S
    daemons = Daemons()
    try:
        if not server_answers(state):
            state.server_file.unlink(missing_ok=True)
            daemons.server = _spawn(state, "server", "myriad.server", "--port", str(port))
            daemons.server.await_ready(until, lambda: server_entry(state.root) is not None)
        if ping(state) is None:
            daemons.controller = _spawn(state, "controller", "myriad.engines")
            daemons.controller.await_ready(until, lambda: ping(state) is not None)
        if daemons.server is not None:
            daemons.server.await_ready(until, lambda: server_answers(state))
    except BaseException:
        daemons.kill()
        raise
    return daemons


def await_nodes(state: StateDir, daemons: Daemons) -> list[dict[str, Any]]:
    """The nodes, once every expected one has joined. CommandError naming those that have not."""
    until = time.monotonic() + START_DEADLINE_S
    client = Client(state.root)
    while True:
        nodes: list[dict[str, Any]] = client.get("/nodes")["nodes"]
        missing = [node["name"] for node in nodes if node["expected"] and not node["connected"]]
        if not missing:
            return nodes
        if daemons.controller is not None:
            daemons.controller.check_alive()
        if time.monotonic() > until:
            shown = ", ".join(missing[:8]) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
            raise CommandError(
                f"after {START_DEADLINE_S:.0f} s these nodes have not joined: {shown}; see "
                f'{state.log("controller")}, and stop the cluster with "myriad down"'
            )
        time.sleep(2 * POLL_S)


def stop(state: StateDir, cancel_jobs: bool) -> None:
    """Have the controller leave, and wait until it and the server have. CommandError when they do not."""
    server, controller = server_entry(state.root), read_json(state.controller_file)
    try:
        AdminClient(state).call("down", cancel_jobs=cancel_jobs)
    except AdminRefused as error:
        raise CommandError(error.message, Exit.REFUSED) from None
    except ControllerUnreachable as error:
        # It may have left between the question and the answer, which is what was asked for.
        if ping(state) is not None:
            raise CommandError(str(error), Exit.UNREACHABLE) from None
    for name, entry in (("controller", controller), ("server", server)):
        if entry is not None and not await_exit(int(entry["pid"]), STOP_DEADLINE_S):
            raise CommandError(
                f"the {name} (process {entry['pid']}) has not left after {STOP_DEADLINE_S:.0f} s; see {state.log(name)}"
            )


def end_agents(state: StateDir, deadline_s: float) -> None:
    """Wait for the agents of emulated nodes to leave; those that have not in time are killed with all they run."""
    import signal

    from myriad.engines.local import processes

    until = time.monotonic() + deadline_s
    while (left := agents(state)) and time.monotonic() < until:
        time.sleep(POLL_S)
    for pid in left:
        processes.send_all(processes.of_session(pid), signal.SIGKILL)


def agents(state: StateDir) -> list[int]:
    """Live agents of the state's nodes, by their command lines: a new one has written no file about itself yet."""
    nodes = os.fsencode(state.root.resolve() / "nodes") + b"/"
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            line = Path(f"/proc/{name}/cmdline").read_bytes().split(b"\0")
            if (
                b"myriad.agent" in line
                and any(word.startswith(nodes) for word in line)
                and running(int(name))
            ):
                found.append(int(name))
        except OSError:
            continue  # it has ended meanwhile
    return found


def await_exit(pid: int, deadline_s: float) -> bool:
    """Whether the process ends in time; one that has ended and is ours is reaped."""
    until = time.monotonic() + deadline_s
    while running(pid):
        if time.monotonic() > until:
            return False
        time.sleep(POLL_S)
    return True


def running(pid: int) -> bool:
    """Whether a process exists and has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def server_answers(state: StateDir) -> bool:
    entry = server_entry(state.root)
    if entry is None or not running(int(entry["pid"])):
        return False
    try:
        Client(state.root).get("/cluster")
    except CommandError:
        return False
    return True


def _spawn(state: StateDir, name: str, module: str, *options: str) -> Daemon:
    with state.log(name).open("ab") as log:
        process = subprocess.Popen(
            # -P: modules in the current folder are the user's, not ours.
            [sys.executable, "-P", "-m", module, "--state", str(state.root), *options],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        return Daemon(name, process, state.log(name), log_start=log.tell())
