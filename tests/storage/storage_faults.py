"""Faults that storage's tests plant: damaged files and snapshots, small and read-only file systems, other users."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from myriad.storage.memory.snapshot import SEALS


@contextmanager
def mounted_tmpfs(folder: Path, options: str) -> Iterator[Path]:
    """A small file system of its own; skips where we may not mount."""
    folder.mkdir(exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", options, "myriad-test", str(folder)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode != 0:
        pytest.skip("mounting a small tmpfs needs root with CAP_SYS_ADMIN")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def sealed_copy(fd: int, flip_bit_at: int | None = None, cut_bytes: int = 0, seals: int = SEALS) -> int:
    """Another memfd with the same bytes but for the damage asked for."""
    data = bytearray(os.pread(fd, os.fstat(fd).st_size, 0))
    if flip_bit_at is not None:
        data[flip_bit_at] ^= 0x10
    copy = os.memfd_create("copy", os.MFD_ALLOW_SEALING)
    os.write(copy, data[: len(data) - cut_bytes])
    if seals:
        fcntl.fcntl(copy, fcntl.F_ADD_SEALS, seals)
    return copy


def flip_bit(file: Path, at: int) -> None:
    """Invert one bit of byte ``at`` in place."""
    with file.open("r+b") as opened:
        opened.seek(at)
        (byte,) = opened.read(1)
        opened.seek(at)
        opened.write(bytes([byte ^ 4]))


def as_nobody(folder: Path, program: str, *arguments: str) -> str:
    """What ``program`` prints when run in ``folder`` by a user without rights; root only.

    It imports as root, and from a working directory opened as root the folders above do not matter. It has
    ``become_nobody()``.
    """
    if os.geteuid() != 0:
        pytest.skip("needs root, to become a user without rights")
    become = "import os, sys\ndef become_nobody(): os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
    done = subprocess.run(
        [sys.executable, "-c", become + program, *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
