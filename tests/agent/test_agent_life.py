"""The agent as a real process under a make-believe controller: what it starts, kills, says and leaves behind."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Self

import msgspec
import pytest

import leaks
from myriad.planner.intervals import first
from myriad.spec.job import JobSpec
from myriad.spec.messages import (
    Accepted,
    AgentMessage,
    ControllerMessage,
    Forget,
    HeartbeatAck,
    Hello,
    Members,
    MemberStatus,
    MemberUpdate,
    RankPlan,
    Refused,
    Shutdown,
    StartStore,
    StartWorkers,
    StopWorkers,
)

DEADLINE_S = 20.0
ORPHAN_DEADLINE_S = 1.0
FOREVER = "sleep 600"


class Controller:
    """Accepts one agent, sends it what the test wants and keeps what it says."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.hellos = 0
        self.updates: list[MemberStatus] = []
        self.mute = False  # answers no hello
        self._writer: asyncio.StreamWriter | None = None
        self._server: asyncio.Server | None = None
        self.agent: subprocess.Popen[bytes] | None = None

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        port = self._server.sockets[0].getsockname()[1]
        (self.root / "controller.json").write_text(json.dumps({"agent_port": port}))
        (self.root / "token").write_text("secret")
        self.start_agent()
        await self.until(lambda: self.hellos)
        return self

    def start_agent(self) -> None:
        folder = self.root / "node"
        folder.mkdir(exist_ok=True)
        with open(folder / "agent.log", "ab") as log:
            self.agent = subprocess.Popen(
                [
                    *(sys.executable, "-m", "myriad.agent", "--node", "n0", "--incarnation", "a"),
                    *("--folder", str(folder), "--controller", str(self.root / "controller.json")),
                    *("--token-file", str(self.root / "token")),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    async def __aexit__(self, *_: object) -> None:
        assert self.agent is not None and self._server is not None
        self.agent.terminate()
        await asyncio.to_thread(self.agent.wait, DEADLINE_S)
        self.cut()
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        decode = msgspec.json.Decoder(AgentMessage).decode
        try:
            while line := await reader.readline():
                match decode(line):
                    case Hello():
                        self.hellos += 1
                        self._writer = writer
                        if not self.mute:
                            self.send(Accepted(heartbeat_s=0.2))
                    case Members(members=members):
                        self.updates += members
                    case MemberUpdate(member=member):
                        self.updates.append(member)
                    case beat:
                        self.send(HeartbeatAck(seq=beat.seq))
        except OSError:
            pass
        finally:
            writer.close()

    def send(self, message: ControllerMessage) -> None:
        assert self._writer is not None
        self._writer.write(msgspec.json.encode(message) + b"\n")

    def cut(self) -> None:
        if self._writer is not None:
            self._writer.close()

    async def until(self, predicate: Callable[[], Any], what: str = "") -> Any:
        deadline = time.monotonic() + DEADLINE_S
        while not (found := predicate()):
            log = (self.root / "node" / "agent.log").read_text()
            assert time.monotonic() < deadline, f"still not: {what}\n{self.updates}\n{log}"
            await asyncio.sleep(0.01)
        return found

    async def status(self, state: str, generation: int = 1, job: str = "j1", **fields: Any) -> MemberStatus:
        """The newest word on the job, once it is this."""

        def fits() -> MemberStatus | None:
            found = [s for s in self.updates if s.job == job][-1:]
            good = [s for s in found if (s.state, s.generation) == (state, generation)]
            good = [s for s in good if all(getattr(s, name) for name in fields)]
            return good[0] if good else None

        found = await self.until(fits, f"{job} {state} {generation}")
        assert isinstance(found, MemberStatus)
        return found

    # ------------------------------------------------------------ orders

    def start(
        self, command: Any, generation: int = 1, ranks: int = 1, job: str = "j1", **keys: Any
    ) -> StartWorkers:
        name = keys.pop("name", "test")
        spec = JobSpec.model_validate({"name": name, "nodes": 1, "command": command, **keys})
        order = StartWorkers(
            job=job,
            job_name=name,
            generation=generation,
            restarts=generation - 1,
            world_size=ranks,
            node_rank=0,
            ranks=tuple(RankPlan(rank=rank, local_rank=rank) for rank in range(ranks)),
            store_host="127.0.0.1",
            store_port=1234,
            job_dir=str(self.root / "jobs" / job),
            spec=spec.model_dump(mode="json"),
            intervals=first(spec.checkpoint),
        )
        self.send(order)
        return order

    async def run(self, command: Any, generation: int = 1, ranks: int = 1, **keys: Any) -> dict[int, int]:
        """Start workers and wait until they all run; rank -> pid."""
        self.start(command, generation, ranks, **keys)
        await self.until(lambda: self.updates and len(self.updates[-1].pids) == ranks, "all ranks run")
        return self.updates[-1].pids

    def log(self, rank: int = 0, job: str = "j1") -> str:
        return (self.root / "jobs" / job / "logs" / f"rank-{rank:05d}.log").read_text()

    def file(self, name: str) -> Path:
        return self.root / name

    async def number_in(self, name: str) -> int:
        """The process id that a worker has written to a file."""
        path = self.file(name)
        await self.until(lambda: path.exists() and path.read_text().endswith("\n"), f"{name} is written")
        return int(path.read_text())


Story = Callable[[Controller], Coroutine[Any, Any, None]]


def play(root: Path, story: Story) -> None:
    async def main() -> None:
        async with Controller(root) as controller:
            await story(controller)

    asyncio.run(main())


async def gone(controller: Controller, *pids: int, within_s: float = DEADLINE_S) -> None:
    deadline = time.monotonic() + within_s
    while alive := [leaks.describe(pid) for pid in pids if not leaks.is_gone(pid)]:
        assert time.monotonic() < deadline, f"still alive after {within_s} s: {alive}"
        await asyncio.sleep(0.01)


# ---------------------------------------------------------------- nothing is left behind


def test_a_killed_agent_leaves_no_orphan(tmp_path: Path) -> None:
    """Nor the grandchildren in a worker's process group; only what has left it by setsid can stay."""

    async def story(c: Controller) -> None:
        command = f"{FOREVER} & echo $! > {c.file('grandchild')}; ({FOREVER} & echo $! > {c.file('nested')}; wait) & wait"
        pids = await c.run(command, ranks=2)
        found = [*pids.values(), await c.number_in("grandchild"), await c.number_in("nested")]
        assert c.agent is not None
        c.agent.kill()
        await gone(c, *found, within_s=ORPHAN_DEADLINE_S)

    play(tmp_path, story)


def test_a_worker_that_ends_takes_what_it_left_in_the_background_along(tmp_path: Path) -> None:
    async def story(c: Controller) -> None:
        c.start(f"{FOREVER} & echo $! > {c.file('grandchild')}; exit 0")
        status = await c.status("exited")
        assert [e.code for e in status.exits] == [0]
        await gone(c, await c.number_in("grandchild"))

    play(tmp_path, story)


@pytest.mark.parametrize("message", [Refused(reason="declared dead"), None], ids=["refused", "SIGTERM"])
def test_an_agent_that_leaves_kills_all_it_has(tmp_path: Path, message: Refused | None) -> None:
    async def story(c: Controller) -> None:
        pids = await c.run(FOREVER, ranks=2)
        assert c.agent is not None
        if message is not None:
            c.send(message)
        else:
            c.agent.terminate()
        await gone(c, *pids.values())
        assert await asyncio.to_thread(c.agent.wait, DEADLINE_S) == 0

    play(tmp_path, story)


def test_shutdown_waits_for_the_job(tmp_path: Path) -> None:
    async def story(c: Controller) -> None:
        await c.run(f"until [ -e {c.file('go')} ]; do sleep 0.02; done")
        c.send(Shutdown())
        await asyncio.sleep(0.2)
        assert c.agent is not None and c.agent.poll() is None
        c.file("go").touch()
        await c.status("exited")
        c.send(StopWorkers(job="j1", generation=1, keep=False))
        assert await asyncio.to_thread(c.agent.wait, DEADLINE_S) == 0

    play(tmp_path, story)


def test_a_second_agent_of_a_node_gives_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(c: Controller) -> None:
        first = c.agent
        c.start_agent()
        second, c.agent = c.agent, first
        assert second is not None and await asyncio.to_thread(second.wait, DEADLINE_S) == 1
        assert "another agent of node n0 is alive" in (c.root / "node" / "agent.log").read_text()

    play(tmp_path, story)


# ---------------------------------------------------------------- fences


def test_a_fence_kills_a_stopped_worker_and_reports_no_exit(tmp_path: Path) -> None:
    async def story(c: Controller) -> None:
        pids = await c.run(FOREVER, ranks=2)
        os.kill(pids[1], signal.SIGSTOP)
        c.send(StopWorkers(job="j1", generation=1))
        status = await c.status("stopped")
        assert status.exits == () and status.pids == {}
        assert all(map(leaks.is_gone, pids.values()))

    play(tmp_path, story)


def test_a_fence_waits_for_grandchildren(tmp_path: Path) -> None:
    """They could still write to the job's files."""

    async def story(c: Controller) -> None:
        command = (
            f"(trap '' TERM; while :; do sleep 0.05; done) & echo $! > {c.file('grandchild')}; {FOREVER}"
        )
        await c.run(command)
        grandchild = await c.number_in("grandchild")
        c.send(StopWorkers(job="j1", generation=1, grace_s=0.2))
        await c.status("stopped")
        assert leaks.is_gone(grandchild)

    play(tmp_path, story)


def test_an_exit_before_the_fence_is_reported(tmp_path: Path) -> None:
    async def story(c: Controller) -> None:
        command = (
            f"if [ $RANK = 1 ]; then until [ -e {c.file('go')} ]; do sleep 0.02; done; exit 7; fi; {FOREVER}"
        )
        pids = await c.run(command, ranks=2)
        c.file("go").touch()
        await gone(c, pids[1])
        c.send(StopWorkers(job="j1", generation=1))
        status = await c.status("stopped")
        assert [(e.rank, e.code, e.pid) for e in status.exits] == [(1, 7, pids[1])]
        assert leaks.is_gone(pids[0])

    play(tmp_path, story)


def test_grace_lets_a_worker_end_by_itself(tmp_path: Path) -> None:
    async def story(c: Controller) -> None:
        command = (
            f"trap 'echo bye; exit 0' TERM; echo ready > {c.file('ready')}; while :; do sleep 0.02; done"
        )
        await c.run(command)
        await c.until(lambda: c.file("ready").exists())
        began = time.monotonic()
        c.send(StopWorkers(job="j1", generation=1, grace_s=30.0))
        await c.status("stopped")
        assert time.monotonic() - began < 15 and c.log().endswith("bye\n")

    play(tmp_path, story)


def test_grace_has_an_end(tmp_path: Path) -> None:
    async def story(c: Controller) -> None:
        pids = await c.run(f"trap '' TERM; echo ready > {c.file('ready')}; while :; do sleep 0.02; done")
        await c.until(lambda: c.file("ready").exists())
        c.send(StopWorkers(job="j1", generation=1, grace_s=0.3))
        await c.status("stopped")
        assert leaks.is_gone(pids[0])

    play(tmp_path, story)


# ---------------------------------------------------------------- orders are idempotent and fenced


def test_orders_repeated_late_and_of_the_future(tmp_path: Path) -> None:
    async def story(c: Controller) -> None:
        once = f"echo start >> {c.file('starts')}; {FOREVER}"
        order = c.start(once, generation=2)
        await c.status("started", 2, pids=True)
        for _ in range(3):
            c.send(order)
        stale = c.start(once, generation=1)
        c.send(StartStore(job="j1", generation=1, torch=False))
        c.send(StopWorkers(job="j1", generation=1))
        await c.until(lambda: len(c.updates) >= 6)
        assert {(s.state, s.generation) for s in c.updates[-4:]} == {("started", 2)}, stale
        assert not leaks.is_gone(c.updates[-1].pids[0])
        c.send(StopWorkers(job="j1", generation=9))
        await c.status("stopped", 9)
        c.start(once, generation=8)
        c.send(StopWorkers(job="j1", generation=9))
        await c.until(lambda: [s.generation for s in c.updates[-2:]] == [9, 9])
        assert c.file("starts").read_text() == "start\n"

    play(tmp_path, story)


def test_a_stop_of_what_was_never_started_is_confirmed(tmp_path: Path) -> None:
    async def story(c: Controller) -> None:
        c.send(StopWorkers(job="j7", generation=4))
        status = await c.status("stopped", 4, job="j7")
        assert status.exits == () and status.holdings == ()
        c.send(Forget(job="j7"))

    play(tmp_path, story)


def test_a_new_generation_fences_the_old_one_first(tmp_path: Path) -> None:
    async def story(c: Controller) -> None:
        old = (await c.run(FOREVER))[0]
        os.kill(old, signal.SIGSTOP)
        c.send(StartStore(job="j1", generation=2, torch=False))
        status = await c.status("store", 2)
        assert leaks.is_gone(old) and status.store_port > 0 and status.exits == ()
        new = (await c.run(FOREVER, generation=2))[0]
        assert not leaks.is_gone(new)

    play(tmp_path, story)


def test_what_changed_while_the_hello_was_answered_is_told(tmp_path: Path) -> None:
    async def story(c: Controller) -> None:
        pids = await c.run(f"until [ -e {c.file('go')} ]; do sleep 0.02; done; exit 5")
        c.mute = True
        c.cut()
        await c.until(lambda: c.hellos == 2, "the agent has dialled again")
        c.file("go").touch()
        await gone(c, *pids)
        await asyncio.sleep(0.1)
        c.send(Accepted(heartbeat_s=0.2))
        assert [e.code for e in (await c.status("exited")).exits] == [5]

    play(tmp_path, story)


# ---------------------------------------------------------------- commands


FAILURES: dict[str, tuple[dict[str, Any], int, str, str]] = {
    "not found": (
        {"command": ["no-such-program", "x"]},
        127, "CommandNotStarted", "command not found: no-such-program; check its name and PATH on the nodes",
    ),
    "not executable": (
        {"command": ["/etc/passwd"]}, 126, "CommandNotStarted", "cannot execute /etc/passwd: Permission denied",
    ),
    "no such folder": (
        {"command": "true", "workdir": "/no/such/folder"},
        1, "CommandNotStarted", "the working directory does not exist or cannot be entered: No such file or directory",
    ),
    "exits 3 and says why": ({"command": "echo first; echo oops >&2; exit 3"}, 3, "", "first / oops"),
    "killed": ({"command": "kill -9 $$"}, -9, "", ""),
}  # fmt: skip


@pytest.mark.parametrize("name", FAILURES)
def test_how_a_command_fails(tmp_path: Path, name: str) -> None:
    keys, code, error_class, message = FAILURES[name]

    async def story(c: Controller) -> None:
        c.start(**keys)
        (found,) = (await c.status("exited")).exits
        assert (found.code, found.error_class, found.message) == (code, error_class, message)

    play(tmp_path, story)


def test_a_log_that_cannot_be_written_is_the_agents_error(tmp_path: Path) -> None:
    async def story(c: Controller) -> None:
        c.file("jobs").write_text("a file where a folder should be")
        c.start("true")
        status = await c.until(lambda: [s for s in c.updates if s.error])
        assert status[0].error == f"Not a directory: {c.root}/jobs/j1/logs"
        assert status[0].exits == ()
        c.send(StopWorkers(job="j1", generation=1))
        await c.status("stopped")

    play(tmp_path, story)


def test_environment_names_and_logs(tmp_path: Path) -> None:
    """Values with newlines arrive whole; a job's name may be anything, since paths use its id."""
    dump = [sys.executable, "-c", "import json, os; print(json.dumps(dict(os.environ)))"]
    env = {"LINES": "one\ntwo\n\nfour", "QUOTES": "'\"$HOME`", "EMPTY": "", "GREEK": "\u03b1\u03b2"}
    name = "team/\u00fcber job; rm -rf /"

    async def story(c: Controller) -> None:
        c.start(dump, ranks=2, name=name, env=env)
        await c.status("exited")
        c.start(dump, generation=2, ranks=2, name=name, env=env)
        await c.status("exited", 2)
        first, second = map(json.loads, c.log(rank=1).splitlines())
        assert {key: first[key] for key in ("LINES", "QUOTES", "EMPTY", "GREEK")} == {
            key: env[key] for key in ("LINES", "QUOTES", "EMPTY", "GREEK")
        }
        want = {
            "RANK": "1",
            "LOCAL_RANK": "1",
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
            "GROUP_RANK": "0",
            "NODE_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "1234",
            "MYRIAD_JOB_ID": "j1",
            "MYRIAD_JOB_NAME": name,
            "MYRIAD_NODE": "n0",
            "MYRIAD_JOB_DIR": str(c.root / "jobs" / "j1"),
            "TORCHELASTIC_RUN_ID": "j1",
            "OMP_NUM_THREADS": "1",
            "GROUP_WORLD_SIZE": "1",
        }
        assert {key: first[key] for key in want} == want
        assert (first["MYRIAD_GENERATION"], second["MYRIAD_GENERATION"]) == ("1", "2"), (
            "the log is appended to"
        )
        assert (first["TORCHELASTIC_RESTART_COUNT"], second["TORCHELASTIC_RESTART_COUNT"]) == ("0", "1")

    play(tmp_path, story)


def test_a_worker_inherits_its_channel_and_nothing_else(tmp_path: Path) -> None:
    async def story(c: Controller) -> None:
        c.start("ls /proc/self/fd; echo channel $MYRIAD_CHANNEL_FD")
        await c.status("exited")
        *fds, channel = c.log().splitlines()
        extra = set(fds) - {"0", "1", "2"}
        assert channel.split()[1] in extra and len(extra) == 2, (
            f"{fds}: the channel, and the one ls itself opens"
        )

    play(tmp_path, story)
