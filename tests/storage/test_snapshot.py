"""Sealed memory snapshots: what is written is what is read, and anything else is refused."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from storage_faults import sealed_copy

from myriad.storage.memory.buffers import Buffers
from myriad.storage.memory.snapshot import (
    ALIGNMENT_BYTES,
    CHUNK_BYTES,
    SnapshotCorrupt,
    SnapshotError,
    open_snapshot,
    take_snapshot,
    verify,
)
from sealed import write_snapshot

Entries = dict[str, tuple[str, tuple[int, ...], Any]]


def entries_of(arrays: dict[str, Any]) -> Entries:
    return {name: (str(array.dtype), array.shape, array) for name, array in arrays.items()}


@pytest.fixture
def arrays() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {
        "weight": rng.standard_normal((300, 1000), np.float32),  # more than one chunk
        "scalar": np.array(3.5),
        "empty": np.empty((0, 4), np.float32),
        "name with / and \u4e07": rng.integers(0, 255, 7, np.uint8),
    }


@pytest.fixture
def written(arrays: dict[str, Any]) -> Iterator[tuple[int, int, int]]:
    fd, size, crc = write_snapshot(entries_of(arrays), 12, {"loss": 0.5}, position=96)
    yield fd, size, crc
    os.close(fd)


def test_a_snapshot_returns_what_was_written(arrays: dict[str, Any], written: tuple[int, int, int]) -> None:
    fd, size, crc = written
    assert os.fstat(fd).st_size == size and verify(fd, size, crc)
    with open_snapshot(fd, crc) as opened:
        assert (opened.step, opened.position, opened.meta) == (12, 96, {"loss": 0.5})
        assert (opened.size, opened.crc32, list(opened.entries)) == (size, crc, list(arrays))
        for name, array in arrays.items():
            entry = opened.entries[name]
            assert (entry.dtype, entry.shape) == (str(array.dtype), array.shape)
            assert entry.offset % ALIGNMENT_BYTES == 0
            back = np.zeros_like(array)
            opened.copy_into(name, back)
            assert np.array_equal(back, array)
        with opened.view("weight") as view:
            assert view.readonly and bytes(view) == arrays["weight"].tobytes()


def test_later_changes_of_the_source_change_nothing(arrays: dict[str, Any]) -> None:
    want = arrays["weight"].tobytes()
    fd, _, crc = write_snapshot(entries_of(arrays), 1, {})
    arrays["weight"][:] = 0
    with open_snapshot(fd, crc) as opened, opened.view("weight") as view:
        assert bytes(view) == want
    os.close(fd)


def test_nobody_can_change_a_sealed_snapshot(written: tuple[int, int, int]) -> None:
    fd, size, _ = written
    for attempt in (
        lambda: os.pwrite(fd, b"x", 0),
        lambda: os.ftruncate(fd, 1),
        lambda: os.ftruncate(fd, 2 * size),
    ):
        with pytest.raises(PermissionError):
            attempt()


def test_one_flipped_bit_anywhere_is_found(written: tuple[int, int, int]) -> None:
    fd, size, crc = written
    for at in [0, 9, 40, size // 2, CHUNK_BYTES, size - 5, size - 1]:
        copy = sealed_copy(fd, flip_bit_at=at)
        assert not verify(copy, size, crc), at
        with pytest.raises(SnapshotCorrupt, match="checksum"):
            open_snapshot(copy)
        os.close(copy)
    untouched = sealed_copy(fd)
    assert verify(untouched, size, crc)
    os.close(untouched)


def test_a_whole_snapshot_of_another_step_is_refused(written: tuple[int, int, int]) -> None:
    other, other_size, other_crc = write_snapshot({}, 13, {})
    assert verify(other, other_size, other_crc) and not verify(other, other_size, written[2])
    with pytest.raises(SnapshotCorrupt, match="checksum"):
        open_snapshot(other, written[2])
    os.close(other)


def test_cut_unsealed_or_foreign_files_are_refused(written: tuple[int, int, int], tmp_path: Any) -> None:
    fd, size, crc = written
    for cut in (1, size // 2, size - 3, size):
        copy = sealed_copy(fd, cut_bytes=cut)
        assert not verify(copy, size, crc)
        with pytest.raises(SnapshotCorrupt):
            open_snapshot(copy)
        os.close(copy)
    unsealed = sealed_copy(fd, seals=0)
    with pytest.raises(SnapshotCorrupt, match="not sealed"):
        open_snapshot(unsealed)
    assert verify(unsealed, size, crc), "it seals what nobody writes"
    os.close(unsealed)
    with (tmp_path / "file").open("w+b") as file, pytest.raises(SnapshotCorrupt):
        open_snapshot(file.fileno())


def test_no_memory_is_a_sentence_and_leaves_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    before = len(os.listdir("/proc/self/fd"))

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(SnapshotError, match="there is no memory for a snapshot of .* more host memory"):
        write_snapshot(entries_of({"x": np.ones(4)}), 1, {})
    assert len(os.listdir("/proc/self/fd")) == before


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.text(max_size=20), st.binary(max_size=200), max_size=30), st.integers(0, 2**62))
def test_any_names_sizes_and_positions_fit_the_header(data: dict[str, bytes], position: int) -> None:
    fd, size, crc = write_snapshot(
        {name: ("uint8", (len(value),), value) for name, value in data.items()}, 1, {}, position=position
    )
    with open_snapshot(fd, crc) as opened:
        assert opened.position == position and opened.size == size
        assert {name: bytes(opened.view(name)) for name in opened.entries} == data
    os.close(fd)


def test_memory_is_used_again_once_nobody_needs_it() -> None:
    buffers = Buffers()
    first = take_snapshot(entries_of({"x": np.ones(1000)}), 1, {}, buffers, "agent", "writer")
    held = os.dup(first.buffer.fd)
    buffers.release(first.buffer.number, "agent")
    second = take_snapshot(entries_of({"x": np.ones(1000)}), 2, {}, buffers, "agent")
    assert second.buffer is not first.buffer, "the writer still reads the first"
    with first.view("x") as view:
        assert np.frombuffer(view, np.float64).sum() == 1000
    buffers.release(first.buffer.number, "writer")
    buffers.release(first.buffer.number, "writer")
    third = take_snapshot(entries_of({"x": np.zeros(1000)}), 3, {}, buffers, "agent")
    assert third.buffer is first.buffer and third.size == first.size
    assert not verify(held, first.size, first.crc32), "it holds something else now"
    os.close(held)
    buffers.close()


def test_nobody_restores_from_what_can_still_be_written() -> None:
    """The agent seals it; the kernel refuses that while the worker has it mapped."""
    buffers = Buffers()
    taken = take_snapshot(entries_of({"x": np.ones(10)}), 1, {}, buffers, "agent")
    held = os.dup(taken.buffer.fd)
    assert not verify(held, taken.size, taken.crc32)
    with pytest.raises(SnapshotCorrupt, match="not sealed"):
        open_snapshot(held)
    buffers.close()
    assert verify(held, taken.size, taken.crc32)
    with pytest.raises(OSError, match="not permitted"):
        os.pwrite(held, b"x", 0)
    os.close(held)


def test_a_free_buffer_of_another_size_is_given_back() -> None:
    buffers, before = Buffers(), len(os.listdir("/proc/self/fd"))
    for step in range(20):
        taken = take_snapshot(entries_of({"x": np.ones(4096 * (step + 1))}), step, {}, buffers, "agent")
        buffers.release(taken.buffer.number, "agent")
    assert len(os.listdir("/proc/self/fd")) == before + 2, "one, and its mapping"
    buffers.close()
    assert len(os.listdir("/proc/self/fd")) == before
