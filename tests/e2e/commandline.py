"""The command line as a user has it: ``myriad`` in a process of its own, and a program in plain processes beside it.

``Background`` holds a command that goes on (``myriad run``) while others act on its state. At the end of its block it
is interrupted as by Ctrl-C if it still runs, so that it takes its cluster down itself.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

EXAMPLES = Path(__file__).parents[2] / "examples"
DEADLINE_S = 90.0  # of a command; the longest ones follow a job of ten seconds on two shared cores
POLL_S = 0.02

Found = TypeVar("Found")


@dataclass(frozen=True, slots=True)
class Done:
    """How a command ended."""

    code: int
    out: str
    err: str

    def json(self) -> Any:
        return json.loads(self.out)


def environment() -> dict[str, str]:
    """This test's own, with the Python that runs it first in PATH and one thread a worker."""
    here = str(Path(sys.executable).parent)
    return {**os.environ, "PATH": f"{here}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}


def words(arguments: Sequence[object]) -> list[str]:
    return [sys.executable, "-m", "myriad.cli.main", *map(str, arguments)]


def myriad(*arguments: object, cwd: Path, deadline_s: float = DEADLINE_S) -> Done:
    """Run one command to its end."""
    ended = subprocess.run(
        words(arguments),
        cwd=cwd,
        env=environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=deadline_s,
        check=False,
    )
    return Done(ended.returncode, ended.stdout, ended.stderr)


class Background:
    """A command that runs beside the test; its output goes to files in ``cwd``."""

    def __init__(self, *arguments: object, cwd: Path) -> None:
        self._arguments = arguments
        self._cwd = cwd
        self._out, self._err = cwd / "command.out", cwd / "command.err"
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self._process = subprocess.Popen(
                words(self._arguments),
                cwd=self._cwd,
                env=environment(),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process is not None
        if self._process.poll() is None:
            self.interrupt()
            self._process.wait(DEADLINE_S)

    def interrupt(self) -> None:
        """What Ctrl-C sends."""
        assert self._process is not None
        self._process.send_signal(signal.SIGINT)

    def until(self, what: str, find: Callable[[], Found | None], deadline_s: float = DEADLINE_S) -> Found:
        """What ``find`` returns, as soon as it is something; fails at once when the command has ended."""
        assert self._process is not None
        deadline = time.monotonic() + deadline_s
        while (found := find()) is None:
            ended = self._process.poll() is not None
            assert not ended and time.monotonic() < deadline, f"never came: {what}\n{self._err.read_text()}"
            time.sleep(POLL_S)
        return found

    def end(self, deadline_s: float = DEADLINE_S) -> Done:
        """Wait for the command's own end."""
        assert self._process is not None
        code = self._process.wait(deadline_s)
        return Done(code, self._out.read_text(), self._err.read_text())


def by_hand(script: Path, *arguments: object, cwd: Path, processes: int) -> list[str]:
    """Run a program in plain processes with torchrun's variables, without Myriad; the output of each rank."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {
        **environment(),
        "WORLD_SIZE": str(processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), *map(str, arguments)],
            cwd=cwd,
            env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(processes)
    ]
    try:
        outputs = [rank.communicate(timeout=DEADLINE_S) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [rank.returncode for rank in ranks] == [0] * processes, outputs
    return [out for out, _ in outputs]


@contextmanager
def cluster_up(folder: Path, cluster: Mapping[str, Any]) -> Iterator[Path]:
    """A cluster between ``myriad up`` and ``myriad down``; yields its state folder."""
    state = folder / "state"
    file = write(folder / "cluster.yaml", cluster)
    started = myriad("up", "--cluster", file, "--state", state, "--port", 0, cwd=folder)
    assert started.code == 0, started
    try:
        yield state
    finally:
        ended = myriad("down", "--cancel-jobs", "--state", state, cwd=folder)
    assert ended.code == 0, ended


def write(file: Path, content: Mapping[str, Any]) -> Path:
    """A YAML file (JSON is YAML, as long as no character is escaped as a UTF-16 pair)."""
    file.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
    return file
