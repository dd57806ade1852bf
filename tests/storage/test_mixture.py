"""The order of a mixture: exact shares, every sample once per epoch of its source, the same from anywhere."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from myriad.storage.datasets.builder import build
from myriad.storage.datasets.index import DatasetError
from myriad.storage.datasets.loader import Loader, Mixture, TokenDataset
from myriad.storage.datasets.mixture import BLOCK, MixtureOrder, quotas
from myriad.storage.datasets.order import samples

SOURCES = st.lists(st.tuples(st.integers(1, 700), st.integers(1, 9)), min_size=1, max_size=4)


def order(sources: list[tuple[int, int]], seed: int = 5) -> MixtureOrder:
    return MixtureOrder(seed, [size for size, _ in sources], [weight for _, weight in sources])


def assert_each_once(mixture: MixtureOrder, sources: np.ndarray, ids: np.ndarray) -> None:
    """Each epoch of each source that lies wholly in the run holds every sample once."""
    for source, size in enumerate(mixture.sizes):
        mine = ids[sources == source]
        for first in range(0, len(mine) - size + 1, size):
            assert sorted(mine[first : first + size].tolist()) == list(range(size))


@settings(max_examples=60, deadline=None)
@given(sources=SOURCES, seed=st.integers(0, 2**64))
def test_every_sample_once_per_epoch_of_its_source(sources: list[tuple[int, int]], seed: int) -> None:
    mixture = order(sources, seed)
    assert_each_once(mixture, *mixture.samples_at(np.arange(3 * BLOCK, dtype=np.int64)))


@pytest.mark.parametrize("fault", ["skipped", "twice"])
def test_a_lost_or_repeated_sample_is_seen(fault: str) -> None:
    mixture = order([(100, 3), (70, 1)])
    positions = np.arange(3 * BLOCK, dtype=np.int64)
    positions[50:] += 1 if fault == "skipped" else -1
    with pytest.raises(AssertionError):
        assert_each_once(mixture, *mixture.samples_at(positions))


@settings(max_examples=60, deadline=None)
@given(sources=SOURCES, data=st.data())
def test_a_seek_reads_what_a_walk_reads(sources: list[tuple[int, int]], data: st.DataObject) -> None:
    """Any cut into batches, in any order of reading, and one position alone."""
    walked = order(sources).samples_at(np.arange(2 * BLOCK + 100, dtype=np.int64))
    cuts = sorted(data.draw(st.lists(st.integers(0, 2 * BLOCK + 100), min_size=2, max_size=6)))
    for first, end in reversed(list(itertools.pairwise(cuts))):
        for whole, part in zip(walked, order(sources).samples_at(np.arange(first, end)), strict=True):
            assert whole[first:end].tolist() == part.tolist()
    at = data.draw(st.integers(0, 2 * BLOCK))
    assert order(sources).sample(at) == (walked[0][at], walked[1][at])


@settings(max_examples=60, deadline=None)
@given(sources=SOURCES, block=st.integers(0, 2**40))
def test_shares_are_exact_in_every_block(sources: list[tuple[int, int]], block: int) -> None:
    mixture = order(sources)
    read, _ = mixture.samples_at(np.arange(block * BLOCK, (block + 1) * BLOCK))
    assert tuple(np.bincount(read, minlength=len(sources)).tolist()) == mixture.quotas
    total = sum(weight for _, weight in sources)
    for quota, (_, weight) in zip(mixture.quotas, sources, strict=True):
        assert abs(quota - BLOCK * weight / total) < 1


@settings(max_examples=40, deadline=None)
@given(sources=SOURCES, end=st.integers(0, 3 * BLOCK))
def test_consumed_counts_what_was_read(sources: list[tuple[int, int]], end: int) -> None:
    read, _ = order(sources).samples_at(np.arange(end, dtype=np.int64))
    assert order(sources).consumed(end) == tuple(np.bincount(read, minlength=len(sources)).tolist())


def test_a_mixture_of_one_is_the_plain_order() -> None:
    sources, ids = order([(1000, 7)], seed=1234).samples_at(np.arange(5000, dtype=np.int64))
    assert not sources.any() and ids.tolist() == samples(1234, 0, 5000, 1000).tolist()


def test_order_is_fixed_for_ever() -> None:
    # A checkpoint stores only the position: if this list changes, old runs can no longer be continued.
    mixture = order([(1000, 3), (50, 1)], seed=1234)
    assert [mixture.sample(position) for position in range(10**7, 10**7 + 6)] == [
        (0, 368),
        (0, 215),
        (0, 238),
        (0, 52),
        (0, 636),
        (0, 323),
    ]


def test_quotas_round_by_largest_remainder_and_refuse_a_share_of_nothing() -> None:
    assert quotas([3, 1]) == (768, 256) and quotas([1, 1, 1]) == (342, 341, 341)
    with pytest.raises(DatasetError, match="raise it, or leave that source out"):
        quotas([5000, 1])


def made(folder: Path, name: str, text: bytes, tokenizer: str = "bytes") -> TokenDataset:
    (folder / f"{name}.txt").write_bytes(text)
    build([folder / f"{name}.txt"], folder / name, tokenizer)  # type: ignore[arg-type]
    return TokenDataset(folder / name, 8)


def test_the_loader_reads_each_source_and_refuses_when_any_runs_out(tmp_path: Path) -> None:
    with made(tmp_path, "a", b"a" * 800) as a, made(tmp_path, "b", b"b" * 80) as b:
        loaders = [Loader(Mixture([a, b], [3, 1]), 5, 8, rank, 2, on_end="refuse") for rank in range(2)]
        seen: list[int] = []
        with pytest.raises(DatasetError, match=r"b.bin has 10 samples of 8 tokens, and this batch needs 1"):
            for _ in range(99):
                for batch in [loader.next() for loader in loaders]:
                    seen.extend(batch.sample_ids)
                    for row, number in zip(batch.tokens, batch.sample_ids, strict=True):
                        assert row[0] == (ord("a") if number < a.size else ord("b"))
        assert len(set(seen)) == len(seen) >= 16


def test_sources_of_two_tokenizers_are_refused_by_name(tmp_path: Path) -> None:
    text = b"some words of text, " * 50
    with (
        made(tmp_path, "a", text) as a,
        made(tmp_path, "b", text, "bpe") as b,
        pytest.raises(DatasetError, match=r"/a and .*/b are not of one tokenizer"),
    ):
        Mixture([a, b], [1, 1])
