"""A snapshot as an agent has it once its worker is gone."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from myriad.storage.memory.buffers import Buffers
from myriad.storage.memory.snapshot import take_snapshot, verify


def write_snapshot(
    entries: Mapping[str, tuple[str, tuple[int, ...], Any]],
    step: int,
    meta: Mapping[str, Any],
    *,
    position: int = 0,
) -> tuple[int, int, int]:
    """(fd, bytes, CRC-32) of a sealed snapshot; the fd is the caller's to close."""
    buffers = Buffers()
    taken = take_snapshot(entries, step, meta, buffers, "test", position=position)
    fd = os.dup(taken.buffer.fd)
    buffers.close()
    assert verify(fd, taken.size, taken.crc32)
    return fd, taken.size, taken.crc32
