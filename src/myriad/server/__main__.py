"""``python -m myriad.server --state DIR --port N``: serve one state on 127.0.0.1 until its cluster is gone.

One process, one event loop. The port is bound before anything else is started, so that a port in use is one
sentence and ``server.json`` (address and token, readable by its owner only) appears only once requests are
accepted. It leaves when the cluster has gone down (the state says closing, and no controller answers), when the
state's folder is gone, or on SIGTERM; while a controller is merely away it keeps answering from the records.
"""

from __future__ import annotations

import argparse
import errno
import os
import secrets
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

import uvicorn

from myriad.control.records import ClusterRecord
from myriad.runtime.admin import AdminClient, AdminRefused, ControllerUnreachable
from myriad.runtime.files import read_json, write_json
from myriad.runtime.paths import StateDir
from myriad.runtime.store import StateReader
from myriad.server.app import create_app

HOST = "127.0.0.1"
BACKLOG = 128  # connections waiting to be accepted
TOKEN_BYTES = 32
LEAVE_POLL_S = 0.5  # between two looks at whether the cluster is gone
PING_DEADLINE_S = 2.0
ARRIVAL_S = 60.0  # for a controller to come up on a new state, or on one that went down before
GRACE_S = 2  # for open requests after SIGTERM; followed streams end with it


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m myriad.server", description="Serve a state's HTTP API.")
    parser.add_argument("--state", type=Path, required=True, help="the state directory")
    parser.add_argument("--port", type=int, default=0, help="the port to listen on; 0 takes a free one")
    options = parser.parse_args(argv)
    state = StateDir(options.state)
    try:
        listener = listen(options.port)
    except (OSError, OverflowError) as error:
        sys.stderr.write(port_sentence(options.port, error) + "\n")
        return 1
    with listener:
        serve(state, listener)
    return 0


def listen(port: int) -> socket.socket:
    """A listening socket on the loopback address."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((HOST, port))
        listener.listen(BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener


def port_sentence(port: int, error: OSError | OverflowError) -> str:
    if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
        return f"port {port} on {HOST} is in use; choose another with --port, or --port 0 for any free one"
    return f"cannot listen on port {port} of {HOST} ({error}); choose another with --port"


def serve(state: StateDir, listener: socket.socket) -> None:
    """Answer requests until told to leave."""
    token = secrets.token_urlsafe(TOKEN_BYTES)
    app = create_app(state, token)
    config = uvicorn.Config(app, log_level="warning", lifespan="off", timeout_graceful_shutdown=GRACE_S)
    server = uvicorn.Server(config)
    url = f"http://{HOST}:{listener.getsockname()[1]}"
    entry = {"url": url, "token": token, "pid": os.getpid()}
    write_json(state.server_file, entry)
    done = threading.Event()
    watcher = threading.Thread(target=_watch, args=(state, server, done), name="leave-watch")
    watcher.start()
    for number in (signal.SIGTERM, signal.SIGINT):
        # uvicorn leaves on these, and then raises them again for whoever handled them before: nobody.
        signal.signal(number, lambda *_: None)
    try:
        server.run(sockets=[listener])
    finally:
        done.set()
        watcher.join()
        remove_own(state.server_file, entry)


def remove_own(path: Path, entry: dict[str, Any]) -> None:
    """Remove the file unless another server has written its own."""
    if read_json(path) == entry:
        path.unlink(missing_ok=True)


def _watch(state: StateDir, server: uvicorn.Server, done: threading.Event) -> None:
    """Have the server leave with its cluster; one that is about to come up has a while to do so."""
    seen, until = False, time.monotonic() + ARRIVAL_S
    while not done.wait(LEAVE_POLL_S):
        gone = cluster_gone(state)
        seen = seen or not gone
        if gone and (seen or time.monotonic() > until):
            server.should_exit = True
            return


def cluster_gone(state: StateDir) -> bool:
    """Whether no controller answers, and the state says that it has left for good or there is no state."""
    try:
        AdminClient(state, deadline_s=PING_DEADLINE_S).call("ping")
        return False
    except AdminRefused:
        return False
    except ControllerUnreachable:
        pass
    if not (state.journal.exists() and state.reports.exists()):
        return True
    with StateReader(state) as reader:
        cluster = reader.record(ClusterRecord, "cluster")
    return cluster is None or cluster.closing


if __name__ == "__main__":
    sys.exit(main())
