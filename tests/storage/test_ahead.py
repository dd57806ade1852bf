"""A reader that is ahead of its rank: the same batches, whatever the depth; errors and deaths said by name."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import numpy as np
import pytest

import leaks
from myriad.storage.datasets.ahead import ReadAhead, ReaderLost
from myriad.storage.datasets.builder import build
from myriad.storage.datasets.index import DatasetError
from myriad.storage.datasets.loader import Batch, Loader, open_mixture
from myriad.storage.datasets.reader import Setup

S = 8


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> tuple[tuple[str, float], ...]:
    """Two data sets of 100 and 25 samples, three to one."""
    folder = tmp_path_factory.mktemp("sets")
    for name, size in {"a": 800, "b": 200}.items():
        (folder / f"{name}.txt").write_bytes(bytes(range(97, 122)) * (size // 25))
        build([folder / f"{name}.txt"], folder / name)
    return ((str(folder / "a"), 3.0), (str(folder / "b"), 1.0))


def setup_of(parts: tuple[tuple[str, float], ...], depth: int = 2, **more: Any) -> Setup:
    known = {"seed": 5, "global_batch": 6, "dp_rank": 1, "dp_size": 2, "position": 12, "on_end": "repeat"}
    return Setup(parts=parts, sequence_length=S, depth=depth, **(known | more))


def plain(setup: Setup, steps: int) -> list[Batch]:
    """What a rank without a reader reads."""
    s = setup
    with open_mixture(s.parts, s.sequence_length) as mixture:
        loader = Loader(
            mixture, s.seed, s.global_batch, s.dp_rank, s.dp_size, s.position, s.skipped, s.on_end
        )
        return [loader.next() for _ in range(steps)]


def same(one: list[Batch], other: list[Batch]) -> bool:
    return len(one) == len(other) and all(
        np.array_equal(a.tokens, b.tokens)
        and np.array_equal(a.labels, b.labels)
        and a.tokens.dtype == b.tokens.dtype
        and (a.sample_ids, a.position) == (b.sample_ids, b.position)
        for a, b in zip(one, other, strict=True)
    )


@pytest.mark.parametrize("depth", [1, 2, 7])
def test_the_batches_are_those_of_a_loader(parts: tuple[tuple[str, float], ...], depth: int) -> None:
    setup = setup_of(parts, depth, skipped=((20, 31),))
    want = plain(setup, 10)
    with ReadAhead(setup) as ahead:
        found = [ahead.next() for _ in range(10)]
        assert ahead.position == found[-1].position + 6
    assert same(found, want)
    assert not same(found, plain(setup_of(parts, position=13, skipped=((20, 31),)), 10)), "a control"


def test_a_batch_is_the_ranks_own(parts: tuple[tuple[str, float], ...]) -> None:
    """Slots are filled again; what was taken out of them before does not change, and may be written to."""
    setup = setup_of(parts, depth=1)
    with ReadAhead(setup) as ahead:
        found = [ahead.next() for _ in range(8)]
    assert same(found, plain(setup, 8))
    found[0].tokens[:] = 0


STORIES: list[tuple[str, dict[str, Any], str]] = [
    ("at the start", {"parts": (("nowhere/text", 1.0),)}, "there is no data set at nowhere/text"),
    ("at the end", {"on_end": "refuse", "position": 120}, "has 25 samples of 8 tokens, and this batch needs"),
]


@pytest.mark.parametrize(("name", "changes", "sentence"), STORIES, ids=[story[0] for story in STORIES])
def test_an_error_of_the_data_set_arrives_as_its_sentence(
    parts: tuple[tuple[str, float], ...], name: str, changes: dict[str, Any], sentence: str
) -> None:
    with ReadAhead(setup_of(**({"parts": parts} | changes))) as ahead, pytest.raises(DatasetError) as raised:
        for _ in range(20):
            ahead.next()
    assert sentence in str(raised.value)


def test_what_was_read_before_an_error_is_used(parts: tuple[tuple[str, float], ...]) -> None:
    setup = setup_of(parts, depth=4, on_end="refuse", position=60)
    with open_mixture(parts, S) as mixture:
        order = mixture.order(5)
        left = next(n for n in range(30) if order.consumed(60 + 6 * (n + 1))[1] > 25)
    with ReadAhead(setup) as ahead:
        found = [ahead.next() for _ in range(left)]
        with pytest.raises(DatasetError, match="set data.on_end to repeat"):
            ahead.next()
    assert left > 0 and same(found, plain(setup, left))


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def drain(ahead: ReadAhead) -> None:
    """Take what was ready, until the reader's silence or death shows."""
    for _ in range(10):
        ahead.next()


def test_a_killed_reader_is_named(parts: tuple[tuple[str, float], ...]) -> None:
    with ReadAhead(setup_of(parts)) as ahead:
        ahead.next()
        os.kill(ahead.pid, signal.SIGKILL)
        with pytest.raises(
            ReaderLost, match=rf"data-parallel rank 1 \(pid {ahead.pid}\) was killed by SIGKILL"
        ):
            drain(ahead)


def test_a_hanging_reader_is_named_within_its_deadline(parts: tuple[tuple[str, float], ...]) -> None:
    with ReadAhead(setup_of(parts)) as ahead:
        ahead.next()  # its start is not what is measured
        ahead._deadline_s = 1.0
        with (
            stopped(ahead.pid),
            pytest.raises(ReaderLost, match="has read no batch for 1 s; check the storage"),
        ):
            drain(ahead)


RANK = """
import os, sys
from myriad.storage.datasets.ahead import ReadAhead
import msgspec
from myriad.storage.datasets.reader import Setup
ahead = ReadAhead(msgspec.json.decode(sys.argv[1], type=Setup))
ahead.next()
print(ahead.pid, flush=True)
sys.stdin.read()
"""


def test_the_reader_dies_with_its_rank(parts: tuple[tuple[str, float], ...]) -> None:
    rank = subprocess.Popen(
        [sys.executable, "-c", RANK, msgspec.json.encode(setup_of(parts)).decode()],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with rank:
        assert rank.stdout is not None
        reader = int(rank.stdout.readline())
        assert os.getpgid(reader) == os.getpgid(rank.pid), "the fence kills the worker's process group"
        rank.kill()
    assert leaks.wait_until(lambda: leaks.is_gone(reader), 5.0)


def test_the_reader_imports_no_torch() -> None:
    code = "import sys, myriad.storage.datasets.reader; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
