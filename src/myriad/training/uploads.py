"""Rank 0's end of the program that copies checkpoints to object storage.

Method: the program (``storage.durable.uploader``) belongs to this worker's process group, so the fence that kills the
worker kills it too, and it dies when the pipe to it closes. What it says is read without waiting, once a step; a
copy that fails is told to the agent like a save that fails and changes nothing else. At the end of the job the worker waits
for the copy of the last checkpoint, which is time of checkpoints.

Trade-off: starting it costs 5 ms of the worker and, on the same node, 0.3 s of a core at the lowest priority.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from myriad.storage.durable.uploader import END_RETRIES_S, END_WORD, Said

PROGRAM = "myriad.storage.durable.uploader"
RESTART_S = 5.0  # after it has died
# At the end, without a word: it reports each file, and gives up by itself before.
SILENCE_S = 2 * END_RETRIES_S


class Uploads:
    """The running program; ``failed`` is told why a copy failed, or "" once it has been made after all."""

    def __init__(self, directory: Path, url: str, keep: int, failed: Callable[[str], None]) -> None:
        self._failed, self._error = failed, ""
        self._program = [sys.executable, "-m", PROGRAM, os.path.abspath(directory), url, str(keep)]
        self._ended_s: float | None = None  # since when it is not there, through no doing of ours
        self._start()

    def _start(self) -> None:
        self._rest, self._ended_s = b"", None
        self._process = subprocess.Popen(
            self._program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
        )

    def hear(self, timeout_s: float = 0.0) -> bool:
        """Take what it has said; False while it is not there. It is started again RESTART_S after its end."""
        if self._ended_s is not None:
            if time.monotonic() - self._ended_s < RESTART_S:
                return False
            self._start()
        assert self._process.stdout is not None
        out = self._process.stdout.fileno()
        while select.select([out], [], [], timeout_s)[0]:
            data = os.read(out, 1 << 16)
            if not data:
                self._gone()
                return False
            *lines, self._rest = (self._rest + data).split(b"\n")
            for line in lines:
                self._heard(msgspec.json.decode(line, type=Said))
            timeout_s = 0.0
        return True

    def finish(self) -> None:
        """Wait until the newest committed checkpoint has its copy, or the program has given up; it has ended then."""
        if self._ended_s is not None:
            self._start()
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has died; the end of its output says so
            self._process.stdin.write(f"{END_WORD}\n".encode())
        deadline = time.monotonic() + SILENCE_S
        while self.hear(1.0):
            if time.monotonic() > deadline:
                self._process.kill()

    def _heard(self, said: Said) -> None:
        if said.error:
            print(said.error, file=sys.stderr, flush=True) if said.error != self._error else None
            self._error = said.error
            self._failed(said.error)
        elif said.copied is not None:
            print(f"the checkpoint of step {said.copied} has its copy in object storage", flush=True)
            if self._error:
                self._error = ""
                self._failed("")

    def _gone(self) -> None:
        """It ends when it is told to, and otherwise only by a fault of its own or of the machine."""
        code = self._process.wait()
        self._ended_s = time.monotonic()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
        if code != 0:
            self._failed(
                self._error or f"copying checkpoints to object storage has ended with exit code {code}"
            )
