"""However it is read, it is the same: any state of the cache, any eviction, damage, depth and point of resumption."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from object_server import ObjectServer, object_server

from myriad.storage.datasets import cache as cache_module
from myriad.storage.datasets.ahead import ReadAhead
from myriad.storage.datasets.builder import build
from myriad.storage.datasets.cache import CHUNK_BYTES, BlockCache, file_bytes
from myriad.storage.datasets.loader import Batch, Loader, open_mixture
from myriad.storage.datasets.reader import Setup

S, SEED, BLOCK = 64, 5, CHUNK_BYTES
URLS = (("s3://bucket/a", 3.0), ("s3://bucket/b", 1.0))
SLOW = settings(
    max_examples=15,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectServer]:
    """Two data sets of 7 and 3 blocks of the cache."""
    folder = tmp_path_factory.mktemp("served")
    (folder / "bucket").mkdir()
    draw = np.random.default_rng(1)
    for name, tokens in {"a": 54_000, "b": 20_000}.items():
        (folder / f"{name}.txt").write_bytes(draw.integers(97, 123, tokens, np.uint8).tobytes())
        build([folder / f"{name}.txt"], folder / "bucket" / name)
    with object_server(folder) as server, pytest.MonkeyPatch.context() as patch:
        for key, value in server.environment.items():
            patch.setenv(key, value)
        yield server


def blocks_in(folder: Path) -> list[Path]:
    found = folder / cache_module.FOLDER
    return sorted(file for file in found.iterdir() if file.name != "lock") if found.exists() else []


def harm(draw: st.DataObject, folder: Path) -> None:
    """What may happen to a cache between two batches, by others or by the disk."""
    for file in blocks_in(folder):
        what = draw.draw(
            st.sampled_from(["nothing", "nothing", "evict", "flip", "cut", "empty"]), file.name[-2:]
        )
        if what == "evict":
            file.unlink()
        elif what == "flip":
            flip(file, draw.draw(st.integers(0, file.stat().st_size - 1)) if file.stat().st_size else 0)
        elif what in ("cut", "empty"):
            os.truncate(file, file.stat().st_size // 2 if what == "cut" else 0)


def flip(file: Path, at: int) -> None:
    data = bytearray(file.read_bytes())
    if data:
        data[at] ^= 4
    file.write_bytes(data)


def expected(served: ObjectServer, steps: int, batch: int) -> list[Batch]:
    """From the files themselves."""
    parts = [(str(served.folder / url.removeprefix("s3://")), weight) for url, weight in URLS]
    with open_mixture(parts, S) as mixture:
        loader = Loader(mixture, SEED, batch, 0, 1)
        return [loader.next() for _ in range(steps)]


def same(one: Batch, other: Batch) -> bool:
    return (
        np.array_equal(one.tokens, other.tokens)
        and np.array_equal(one.labels, other.labels)
        and (one.sample_ids, one.position) == (other.sample_ids, other.position)
    )


@SLOW
@given(draw=st.data())
def test_no_state_of_the_cache_changes_a_batch(
    served: ObjectServer, tmp_path_factory: pytest.TempPathFactory, draw: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("cache")
    batch = draw.draw(st.integers(1, 24), "batch")
    want, at = expected(served, 8, batch), 0
    while at < len(want):
        blocks = draw.draw(st.floats(0.5, 12), "blocks the cache holds")
        cache = BlockCache(folder, int(blocks * file_bytes(BLOCK)), BLOCK, touch_s=0)
        with open_mixture(URLS, S, cache=cache) as mixture:
            loader = Loader(mixture, SEED, batch, 0, 1, at * batch)
            for _ in range(draw.draw(st.integers(1, 5), "steps until a restart")):
                if at < len(want):
                    assert same(loader.next(), want[at])
                    at += 1
                    harm(draw, folder)


@settings(SLOW, max_examples=3)
@given(draw=st.data())
def test_no_depth_and_no_restart_changes_a_batch(
    served: ObjectServer, tmp_path_factory: pytest.TempPathFactory, draw: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("cache")
    batch = 2 * draw.draw(st.integers(1, 6), "batch")
    want, at = expected(served, 6, batch), 0
    while at < len(want):
        setup = Setup(
            parts=URLS,
            sequence_length=S,
            seed=SEED,
            global_batch=batch,
            dp_rank=0,
            dp_size=1,
            position=at * batch,
            on_end="repeat",
            depth=draw.draw(st.integers(1, 5), "depth"),
            cache=draw.draw(st.sampled_from([None, (str(folder), 64 << 20)]), "cache"),
        )
        with ReadAhead(setup) as ahead:
            for _ in range(draw.draw(st.integers(2, 6), "steps until a restart")):
                if at < len(want):
                    assert same(ahead.next(), want[at])
                    at += 1
        harm(draw, folder)


def test_a_cache_that_checks_nothing_would_be_noticed(
    served: ObjectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: with checksums that are always right, a flipped bit reaches a batch."""

    def after_flips() -> list[bool]:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        want = expected(served, 8, 16)
        for _ in range(2):  # fill it, then harm it
            with open_mixture(URLS, S, cache=BlockCache(folder, 1 << 20, BLOCK)) as mixture:
                loader = Loader(mixture, SEED, 16, 0, 1)
                found = [same(loader.next(), each) for each in want]
            for file in blocks_in(folder):
                data = np.fromfile(file, np.uint8)
                data[len(data) // 2 :] ^= 4
                data.tofile(file)
        return found

    assert after_flips() == [True] * 8
    monkeypatch.setattr(cache_module, "_checksums", lambda data: iter([7] * -(-data.nbytes // CHUNK_BYTES)))
    assert False in after_flips()


def test_a_warm_cache_asks_for_nothing(served: ObjectServer, tmp_path: Path) -> None:
    for warm in (False, True):
        with open_mixture(URLS, S, cache=BlockCache(tmp_path, 1 << 20, BLOCK)) as mixture:
            served.requests.clear()
            loader = Loader(mixture, SEED, 64, 0, 1)
            for _ in range(10):
                loader.next()
        assert (served.requests == []) is warm
