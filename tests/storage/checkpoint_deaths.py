"""Saves that are killed: one process after another dies one call further into its second save.

``python checkpoint_deaths.py ROOT`` imports torch once and forks. The child of ROOT/<n> saves and commits step 1 in
peace; in the save of step 2 it kills itself before the n-th call that opens for writing, syncs, renames or makes a
folder. The last one survives. ROOT/torn dies by the kernel's hand in the middle of a write. Each prints a line of
JSON: its folder, and before what it died.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from myriad.storage.durable.checkpoint import save
from myriad.storage.durable.manifest import checkpoint_path, commit_marker

ROWS = 50_000
TORN_AT_BYTES = 100_000  # of the file of 200 kB that step 2 writes


def tensors(step: int) -> dict[str, torch.Tensor]:
    return {"x": torch.arange(ROWS, dtype=torch.float32) * step, "y": torch.full((3,), float(step))}


def save_and_commit(directory: Path, step: int) -> None:
    save(directory, step, 1, tensors(step), None, position=step, layout={})
    commit_marker(checkpoint_path(directory, step, 1))


class Killer:
    """Dies before call number ``left``; remembers in a pipe what the call would have been."""

    def __init__(self, directory: Path, left: int, told: int) -> None:
        self.directory, self.left, self.told = str(directory), left, told
        self.armed = False
        fsync = os.fsync
        os.fsync = lambda fd: (self.call("fsync", os.readlink(f"/proc/self/fd/{fd}")), fsync(fd))[1]
        sys.addaudithook(self.audit)

    def audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and not arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            return
        if event in ("open", "os.rename", "os.mkdir") and isinstance(arguments[0], str | os.PathLike):
            self.call(event, os.fspath(arguments[0]))

    def call(self, event: str, path: str) -> None:
        if not self.armed or not path.startswith(self.directory):
            return
        if self.left == 0:
            os.write(self.told, f"{event} {os.path.basename(path)}".encode())
            os.kill(os.getpid(), signal.SIGKILL)
        self.left -= 1


def killed(directory: Path, told: int, left: int) -> None:
    killer = Killer(directory, left, told)
    save_and_commit(directory, 1)
    killer.armed = True
    save_and_commit(directory, 2)


def torn(directory: Path, told: int) -> None:
    save_and_commit(directory, 1)
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # Python would turn it into an error
    resource.setrlimit(resource.RLIMIT_FSIZE, (TORN_AT_BYTES, TORN_AT_BYTES))
    os.write(told, b"write __0_0.distcp")
    save_and_commit(directory, 2)


def died(act: Callable[..., None], directory: Path, *arguments: int) -> bool:
    """Run ``act`` in a child; whether a signal ended it."""
    heard, told = os.pipe()
    if (pid := os.fork()) == 0:
        act(directory, told, *arguments)
        os._exit(0)
    status = os.waitpid(pid, 0)[1]
    os.close(told)
    line = {"folder": directory.name, "before": os.read(heard, 100).decode()}
    os.close(heard)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, status
    sys.stdout.write(json.dumps(line) + "\n")
    return os.WIFSIGNALED(status)


def main(root: Path) -> None:
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    assert died(torn, root / "torn")
    number = 0
    while died(killed, root / str(number), number):
        number += 1


if __name__ == "__main__":
    main(Path(sys.argv[1]))
