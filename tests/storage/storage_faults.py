"""Faults that storage's tests plant: damaged snapshots, small and read-only file systems."""

from __future__ import annotations

import fcntl
import os
import subprocess
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
