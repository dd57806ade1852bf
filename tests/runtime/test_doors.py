"""The two doors of the controller: agents join with a secret, administrators over a private socket."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import msgspec
import pytest

from live import LiveCluster, cluster_of
from myriad.control.events import AgentConnected, AgentDisconnected, AnyEvent, MemberReported, NodeSilent
from myriad.runtime import hub as hub_module
from myriad.runtime import requests
from myriad.runtime.admin import AdminClient, AdminRefused, ControllerUnreachable, socket_address
from myriad.runtime.hub import Hub
from myriad.runtime.paths import StateDir
from myriad.spec.messages import (
    PROTOCOL_VERSION,
    Accepted,
    ControllerMessage,
    Heartbeat,
    HeartbeatAck,
    Hello,
    Members,
    MemberStatus,
    MemberUpdate,
    Message,
    Refused,
    Shutdown,
    StepReport,
)

HELLO = Hello(node="n0", incarnation="a", token="secret", pid=1)
DEADLINE_S = 10.0


class Door:
    """A hub on a free port, and what it posts and stores."""

    def __init__(self, heartbeat_s: float = 30.0) -> None:
        self.events: list[AnyEvent] = []
        self.reports: list[StepReport] = []
        self.hub = Hub(
            "secret", heartbeat_s, {"n0", "n1"}.__contains__, self.events.append, self.reports.extend
        )
        self.port = 0

    async def __aenter__(self) -> Self:
        self.port = await self.hub.listen("127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.hub.close()

    async def dial(self) -> Caller:
        return Caller(*await asyncio.open_connection("127.0.0.1", self.port))

    async def until(self, kind: type[Any]) -> Any:
        async def look() -> Any:
            while not (found := [e for e in self.events if isinstance(e, kind)]):
                await asyncio.sleep(0.005)
            return found[-1]

        return await asyncio.wait_for(look(), DEADLINE_S)


class Caller:
    """The other end of a connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    def say(self, message: Message | bytes) -> None:
        self.writer.write(message if isinstance(message, bytes) else msgspec.json.encode(message) + b"\n")

    async def hear(self) -> ControllerMessage | None:
        """The next message; None at the end of the connection."""
        line = await asyncio.wait_for(self.reader.readline(), DEADLINE_S)
        return msgspec.json.decode(line, type=ControllerMessage) if line else None

    async def close(self) -> None:
        self.writer.close()
        await self.writer.wait_closed()


REFUSALS = {
    "wrong token": (msgspec.structs.replace(HELLO, token="guess"), "the token is wrong"),
    "empty token": (msgspec.structs.replace(HELLO, token=""), "the token is wrong"),
    "non-ASCII token": (msgspec.structs.replace(HELLO, token="\u00e9"), "the token is wrong"),
    "unknown node": (msgspec.structs.replace(HELLO, node="n9"), "the cluster has no node n9"),
    "other version": (
        msgspec.structs.replace(HELLO, version=9),
        f"it speaks protocol 9, this controller {PROTOCOL_VERSION}",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_who_is_refused_hears_why(name: str) -> None:
    hello, why = REFUSALS[name]

    async def story() -> None:
        async with Door() as door:
            caller = await door.dial()
            caller.say(hello)
            assert await caller.hear() == Refused(reason=why)
            assert await caller.hear() is None
            await caller.close()
            assert door.events == [], "the controller never hears of it"

    asyncio.run(story())


GARBAGE = [
    b"\n",
    b"hello\n",
    b"{}\n",
    b"\xff\xfe\n",
    msgspec.json.encode(Heartbeat(seq=1)) + b"\n",
    b"x" * 100,
]


@pytest.mark.parametrize("line", GARBAGE)
def test_garbage_ends_the_connection_and_nothing_else(line: bytes) -> None:
    async def story() -> None:
        async with Door() as door:
            stranger = await door.dial()
            stranger.say(line)
            stranger.writer.write_eof()
            assert await stranger.hear() is None
            await stranger.close()
            good = await door.dial()
            good.say(HELLO)
            assert isinstance(await good.hear(), Accepted)
            good.say(b"garbage after a hello\n")
            assert await good.hear() is None
            assert isinstance(await door.until(AgentDisconnected), AgentDisconnected)
            await good.close()

    asyncio.run(story())


def test_too_many_agents(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_module, "AGENTS_MAX", 1)

    async def story() -> None:
        async with Door() as door:
            first, second, again = [await door.dial() for _ in range(3)]
            first.say(HELLO)
            assert isinstance(await first.hear(), Accepted)
            second.say(msgspec.structs.replace(HELLO, node="n1"))
            assert await second.hear() == Refused(reason="this controller serves at most 1 agents")
            again.say(HELLO)
            assert isinstance(await again.hear(), Accepted), "one that is here may reconnect"
            for caller in (first, second, again):
                await caller.close()

    asyncio.run(story())


def test_messages_both_ways() -> None:
    async def story() -> None:
        status = MemberStatus(job="j1", generation=1, version=1, state="started")
        report = StepReport(job="j1", generation=1, rank=0, step=1, wall_s=0.1)
        async with Door() as door:
            caller = await door.dial()
            caller.say(HELLO)
            assert await caller.hear() == Accepted(heartbeat_s=30.0)
            caller.say(Heartbeat(seq=7, reports=(report,)))
            assert await caller.hear() == HeartbeatAck(seq=7) and door.reports == [report]
            assert door.events == [], "nothing is known of an agent before it has said what it runs"
            caller.say(Members(members=(status,)))
            caller.say(MemberUpdate(member=status))
            assert await door.until(MemberReported) == MemberReported(
                node="n0", incarnation="a", member=status
            )
            assert door.events[0] == AgentConnected(node="n0", incarnation="a", members=(status,))
            door.hub.send("n0", "b", Shutdown())
            door.hub.send("n1", "a", Shutdown())
            door.hub.send("n0", "a", Refused(reason="enough"))
            assert await caller.hear() == Refused(reason="enough"), "other lives and nodes get nothing"
            assert await caller.hear() is None
            await caller.close()

    asyncio.run(story())


def test_a_newer_connection_takes_over() -> None:
    async def story() -> None:
        async with Door() as door:
            old, new = await door.dial(), await door.dial()
            for caller in (old, new):
                caller.say(HELLO)
                assert isinstance(await caller.hear(), Accepted)
            old.say(MemberUpdate(member=MemberStatus(job="old", generation=1, version=1, state="started")))
            assert await old.hear() is None
            door.hub.send("n0", "a", Shutdown())
            assert await new.hear() == Shutdown()
            assert not [e for e in door.events if isinstance(e, MemberReported | AgentDisconnected)]
            for caller in (old, new):
                await caller.close()

    asyncio.run(story())


def test_silence_is_counted_in_beats_and_forgotten_with_the_node() -> None:
    async def story() -> None:
        async with Door(heartbeat_s=0.05) as door:
            caller = await door.dial()
            caller.say(HELLO)
            assert isinstance(await caller.hear(), Accepted)
            caller.say(Members())
            watching = asyncio.create_task(door.hub.watch())
            silent = await door.until(NodeSilent)
            assert silent.node == "n0" and silent.incarnation == "a"
            assert silent.beats >= 3 and silent.silent_s >= 0.15
            door.hub.forget("n0", "a")
            count = len(door.events)
            await asyncio.sleep(0.3)
            assert len(door.events) == count and door.hub.silent_s("n0") == 0.0
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            await caller.close()

    asyncio.run(story())


# ---------------------------------------------------------------- the control socket


@contextmanager
def answering(state_root: Path, answer: bytes | None) -> Iterator[AdminClient]:
    """A control socket whose server answers one request with these bytes, or never (None)."""
    state_root.mkdir()
    state_dir = StateDir(state_root)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        with socket_address(state_dir.control_socket) as address:
            listener.bind(address)
        listener.listen()
        done = threading.Event()

        def serve() -> None:
            with listener.accept()[0] as link:
                if answer is None:
                    done.wait(DEADLINE_S)
                else:
                    link.makefile("rb").readline()
                    link.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield AdminClient(state_dir, deadline_s=0.3)
        finally:
            done.set()
            thread.join()


ANSWERS: dict[str, tuple[bytes | None, str]] = {
    "silence": (None, "the controller did not answer within 0.3 s; see "),
    "goes away": (b"", "the controller went away before it answered; ask again"),
    "half a line": (b'{"ok": tr', "the controller went away before it answered; ask again"),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_a_controller_in_trouble(state_root: Path, name: str) -> None:
    answer, want = ANSWERS[name]
    with answering(state_root, answer) as client, pytest.raises(ControllerUnreachable) as caught:
        client.call("ping")
    assert str(caught.value).startswith(want)


def test_a_refusal_and_an_answer(state_root: Path) -> None:
    line = json.dumps({"error": {"code": "not_found", "message": "there is no job j9"}}).encode() + b"\n"
    with (
        answering(state_root, line) as client,
        pytest.raises(AdminRefused, match="^there is no job j9$") as caught,
    ):
        client.call("cancel", job="j9")
    assert caught.value.code == "not_found"


def test_no_controller(tmp_path: Path) -> None:
    for root in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(ControllerUnreachable, match=f"^no controller is running for state {root}$"):
            AdminClient(StateDir(root)).call("ping")


def test_a_state_deep_in_the_file_system(tmp_path: Path) -> None:
    """A Unix socket's address has 108 bytes; a state's path may be longer."""
    deep = tmp_path / ("d" * 100) / ("e" * 100)
    deep.parent.mkdir()
    with answering(deep, b'{"ok": true}\n') as client:
        assert client.call("ping") == {"ok": True}


REQUESTS: dict[str, tuple[dict[str, Any], str, str]] = {
    "unknown op": ({"op": "fly"}, "invalid", "the controller knows no request 'fly'"),
    "no such job": ({"op": "cancel", "job": "j9"}, "not_found", "there is no job j9"),
    "no such node": ({"op": "drain", "node": "n9"}, "not_found", "the cluster has no node n9; see: myriad nodes"),
    "undrain no such node": (
        {"op": "undrain", "node": "n9"}, "not_found", "the cluster has no node n9; see: myriad nodes",
    ),
    "no such fault": (
        {"op": "inject", "kind": "hug", "target": "n0"},
        "invalid",
        "'hug' is no fault; use one of kill-node, kill-worker, kill-agent, stop",
    ),
    "no such worker": (
        {"op": "inject", "kind": "kill-worker", "target": "j1/0"},
        "not_found",
        "there is no running worker j1/0; name it JOB/RANK, see: myriad show JOB",
    ),
    "a job without a command": (
        {"op": "submit", "request": "r", "spec": {"name": "x", "nodes": 1}},
        "invalid",
        "job: the job has neither a command nor a model; add one of them",
    ),
    "a job with a bad type": (
        {"op": "submit", "request": "r", "spec": {"name": "x", "nodes": "many", "command": "true"}},
        "invalid",
        'job: nodes: "many" is given where a whole number is wanted',
    ),
}  # fmt: skip


def test_requests_are_checked(state_root: Path) -> None:
    """One live controller for all of them; it also survives what is no request at all."""
    with LiveCluster(state_root, cluster_of(1)) as cluster:
        for name, (request, code, want) in REQUESTS.items():
            arguments = dict(request)
            with pytest.raises(AdminRefused) as caught:
                cluster.admin.call(arguments.pop("op"), **arguments)
            assert caught.value.code == code, name
            assert caught.value.message.startswith(want), name
        for line in (b"not json\n", b"\n", b"", b"[1]\n", b'{"op": "submit"}\n', b'{"op": "drain"}\n'):
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
                with socket_address(cluster.state_dir.control_socket) as address:
                    link.connect(address)
                link.sendall(line)
                link.shutdown(socket.SHUT_WR)
                link.settimeout(DEADLINE_S)
                link.recv(65536)
        assert cluster.state_dir.control_socket.stat().st_mode & 0o777 == 0o600
        assert cluster.state_dir.agent_token.stat().st_mode & 0o777 == 0o600
        assert cluster.state_dir.controller_file.stat().st_mode & 0o777 == 0o600
        first = cluster.submit(command="true", request="same")
        assert cluster.submit(command="true", request="same") == first
        assert set(cluster.admin.call("ping")["nodes"]) == {"n0"}
        log = cluster.state_dir.log("controller").read_text()
        assert "Traceback" not in log, log


def test_another_user_gets_no_answer(state_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The peer's user id is asked of the kernel."""
    state_root.mkdir()
    monkeypatch.setattr(requests, "_peer_uid", lambda writer: os.getuid() + 1)

    async def story() -> None:
        server = requests.Requests(lambda: None, None, None, lambda: {"ok": True})  # type: ignore[arg-type, return-value]
        await server.listen(StateDir(state_root))
        try:
            with pytest.raises(ControllerUnreachable, match="went away"):
                await asyncio.to_thread(AdminClient(StateDir(state_root)).call, "ping")
            monkeypatch.undo()
            assert await asyncio.to_thread(AdminClient(StateDir(state_root)).call, "ping") == {"ok": True}
        finally:
            await server.close()

    asyncio.run(story())
