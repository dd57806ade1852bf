"""The server as a process: how it starts, refuses to, and leaves; and its changes on a real cluster."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2
import pytest
from api_world import World
from starlette.testclient import TestClient

import leaks
from live import LiveCluster, cluster_of
from myriad.control import events as ev
from myriad.control.status import JobStatus
from myriad.runtime.paths import StateDir
from myriad.server.app import create_app

DEADLINE_S = 60.0  # an import takes ten times as long on a busy machine


@contextmanager
def server(root: Path, port: int = 0) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "myriad.server", "--state", str(root), "--port", str(port)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def entry(root: Path, process: subprocess.Popen[str]) -> dict[str, str]:
    """What server.json says, once it is there."""
    file = StateDir(root).server_file
    assert leaks.wait_until(lambda: file.exists() or process.poll() is not None, DEADLINE_S)
    found: dict[str, str] = json.loads(file.read_text())
    return found


def test_it_says_where_it_listens_and_leaves_on_sigterm(state_root: Path) -> None:
    with World(state_root) as world, server(state_root) as process:
        world.run_command({"name": "job", "nodes": 1, "command": "true"})
        found = entry(state_root, process)
        assert (
            found["pid"] == process.pid and StateDir(state_root).server_file.stat().st_mode & 0o777 == 0o600
        )
        headers = {"authorization": f"Bearer {found['token']}"}
        with httpx2.Client(base_url=found["url"], headers=headers, trust_env=False) as api:
            assert api.get("/api/v1/jobs/job").json()["status"] == "RUNNING"
            # A stream that is open does not hold it up.
            with api.stream("GET", "/api/v1/jobs/j1/logs?follow=true"):
                process.send_signal(signal.SIGTERM)
                assert process.wait(DEADLINE_S) == 0
        assert not StateDir(state_root).server_file.exists()


def test_a_port_in_use_is_one_sentence(state_root: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, World(state_root):
        port = taken.getsockname()[1]
        with server(state_root, port) as process:
            assert process.wait(DEADLINE_S) == 1
            assert process.stderr is not None
            assert process.stderr.read() == (
                f"port {port} on 127.0.0.1 is in use; choose another with --port, or --port 0 for any free one\n"
            )
    assert not StateDir(state_root).server_file.exists()


def test_it_outlives_a_crashed_controller_and_leaves_with_the_cluster(state_root: Path) -> None:
    """No controller runs in this test, which is what a crash looks like; then the cluster has gone down."""
    with World(state_root) as world, server(state_root) as process:
        entry(state_root, process)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(1.5)
        world.happen(ev.DownRequested())
        assert process.wait(DEADLINE_S) == 0
    assert not StateDir(state_root).server_file.exists()


def test_changes_reach_the_controller_and_are_answered_once_journaled(state_root: Path) -> None:
    headers = {"authorization": "Bearer t"}
    app = create_app(StateDir(state_root), "t")
    with (
        LiveCluster(state_root, cluster_of(2)) as live,
        TestClient(app, base_url="http://myriad/api/v1", headers=headers) as api,
    ):
        spec = {"name": "job", "nodes": 1, "command": "sleep 60"}
        first = api.post("jobs", json={"request": "same", "spec": spec})
        again = api.post("jobs", json={"request": "same", "spec": spec})
        assert first.json() == again.json() == {"job": "j1"}
        live.wait_for_status("j1", JobStatus.RUNNING)

        bad = api.post("jobs", json={"request": "other", "spec": {**spec, "nodes": 0}})
        assert bad.status_code == 400 and bad.json()["error"]["code"] == "invalid"

        idle = next(name for name in ("n0", "n1") if api.get("jobs/j1").json()["nodes"] != [name])
        assert api.post(f"nodes/{idle}/drain", json={"reason": "dust"}).status_code == 200
        states = {node["name"]: node for node in api.get("nodes").json()["nodes"]}
        assert (states[idle]["state"], states[idle]["reason"]) == ("drained", "dust")
        assert all(0 <= node["silent_s"] < 5 for node in states.values())
        assert api.post(f"nodes/{idle}/undrain").status_code == 200
        assert api.post("nodes/n9/drain", json={}).json()["error"]["code"] == "not_found"
        assert api.post("inject", json={"kind": "kill-node", "target": "n9"}).status_code == 404

        answer = api.post("jobs/job/cancel")
        assert answer.status_code == 200, answer.text
        live.wait_for_end("j1")
        assert api.get("jobs/j1").json()["status"] == "CANCELLED"
        assert api.get("cluster").json()["controller"] is True
