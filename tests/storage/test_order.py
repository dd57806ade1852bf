"""The order of samples: a bijection in every epoch, the same alone and in a vector, and spread evenly."""

from __future__ import annotations

import time

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from myriad.storage.datasets.order import sample, samples, samples_at


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(-(2**70), 2**70), size=st.integers(1, 3000), epoch=st.integers(0, 2**40))
def test_every_epoch_is_a_bijection(seed: int, size: int, epoch: int) -> None:
    ids = samples(seed, epoch * size, size, size)
    assert sorted(ids.tolist()) == list(range(size))


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**64), size=st.integers(1, 2**50), data=st.data())
def test_alone_and_in_a_vector_are_equal(seed: int, size: int, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, 2**60))
    count = data.draw(st.integers(0, 20))
    want = [sample(seed, position, size) for position in range(start, start + count)]
    assert samples(seed, start, count, size).tolist() == want
    assert all(0 <= each < size for each in want)
    shuffled = np.array(range(start, start + count), np.int64)[::-1]
    assert samples_at(seed, shuffled, size).tolist() == want[::-1]


def test_order_is_fixed_for_ever() -> None:
    # A checkpoint stores only the position: if this list changes, old runs can no longer be continued.
    assert samples(1234, 995, 10, 1000).tolist() == [176, 116, 42, 290, 363, 338, 771, 895, 111, 370]


def test_epochs_and_seeds_differ() -> None:
    first, second = samples(7, 0, 500, 500), samples(7, 500, 500, 500)
    assert (first != second).sum() > 450 and (first != samples(8, 0, 500, 500)).sum() > 450


def test_positions_are_spread_evenly() -> None:
    """Ids of the first tenth fall evenly over ten bins (chi-squared, 9 degrees, below the 1e-6 tail)."""
    for size in (1000, 4097, 100_000):
        ids = samples(3, 0, size // 10, size)
        counts = np.bincount(ids * 10 // size, minlength=10)
        expected = len(ids) / 10
        assert ((counts - expected) ** 2 / expected).sum() < 45, size


def test_seek_costs_the_same_anywhere() -> None:
    def seconds(position: int) -> float:
        times = []
        for _ in range(50):
            begin = time.perf_counter()
            sample(1, position, 10**12)
            times.append(time.perf_counter() - begin)
        return min(times)

    sample(1, 10**11, 10**12)
    assert seconds(10**11 + 5) < 1e-3 and seconds(5) < 1e-3
