"""``python -m myriad.agent``: the process on a node. Started by an engine, not by people."""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import json
import logging
import os
import sys
import time
from pathlib import Path

from myriad.agent import system
from myriad.agent.agent import Agent
from myriad.agent.guard import Guard

# A guard kills and leaves within milliseconds.
LOCK_WAIT_S = 5.0
LOCK_POLL_S = 0.02


def main() -> int:
    """Run until told to leave; 1 when another agent of this node is alive."""
    parser = argparse.ArgumentParser(prog="python -m myriad.agent")
    for name in ("node", "incarnation"):
        parser.add_argument(f"--{name}", required=True)
    for name in ("folder", "controller", "token-file"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s", stream=sys.stderr)
    lock = os.open(arguments.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    if not _take(lock):
        logging.getLogger("myriad.agent").error("another agent of node %s is alive", arguments.node)
        return 1
    _write_identity(arguments.folder / "agent.json", arguments.incarnation)
    os.set_inheritable(lock, False)
    guard = Guard()  # first of all: it must hold nothing of ours
    system.become_subreaper()
    agent = Agent(
        node=arguments.node,
        incarnation=arguments.incarnation,
        folder=arguments.folder,
        controller_file=arguments.controller,
        token=arguments.token_file.read_text(),
        guard=guard,
    )
    try:
        asyncio.run(agent.run())
    finally:
        guard.close()
    return 0


def _take(lock: int) -> bool:
    """Take the node's lock. The guard of an agent that has just died holds it until its work is done."""
    deadline = time.monotonic() + LOCK_WAIT_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(LOCK_POLL_S)


def _write_identity(path: Path, incarnation: str) -> None:
    pid = os.getpid()
    identity = {"pid": pid, "start_ticks": system.start_ticks(pid), "incarnation": incarnation}
    temporary = path.with_suffix(".new")
    temporary.write_text(json.dumps(identity))
    os.replace(temporary, path)


if __name__ == "__main__":
    sys.exit(main())
