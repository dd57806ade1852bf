"""The order of samples as a run sees it: the union over the ranks is ``sample(seed, position)`` for positions in a row.

Drawn runs change everything a run may change: world size and global batch from segment to segment (a restart in
mid-epoch, a batch ramp-up), mixtures, skipped ranges, and where they are resumed. Each property is turned red by
each planted fault of a loader.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from myriad.storage.datasets.builder import build
from myriad.storage.datasets.loader import Batch, Loader, Mixture, TokenDataset
from myriad.storage.datasets.skipped import SkippedRanges

S = 4
SEED = 11
SAMPLES = (30, 17, 8)  # of the three sources

Ranges = list[tuple[int, int]]


@dataclass(frozen=True)
class Segment:
    """One start of a job's workers: so many data-parallel ranks, so many sequences each, so many steps."""

    dp_size: int
    local: int
    steps: int

    @property
    def batch(self) -> int:
        return self.dp_size * self.local


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[TokenDataset]]:
    folder = tmp_path_factory.mktemp("sources")
    found = []
    for number, size in enumerate(SAMPLES):
        (folder / f"{number}.txt").write_bytes(bytes((48 + number,)) * size * S)
        build([folder / f"{number}.txt"], folder / f"set{number}")
        found.append(TokenDataset(folder / f"set{number}", S))
    assert tuple(each.size for each in found) == SAMPLES
    yield found
    for each in found:
        each.close()


segments = st.lists(
    st.builds(Segment, st.sampled_from([1, 2, 3, 4, 6]), st.integers(1, 5), st.integers(1, 6)),
    min_size=1,
    max_size=4,
)
weights = st.lists(st.integers(1, 5), min_size=1, max_size=3)
ranges = st.lists(
    st.tuples(st.integers(0, 150), st.integers(0, 25)).map(lambda each: (each[0], sum(each))), max_size=4
)

Make = Callable[
    [int, int, Loader], Loader
]  # (rank, step of the run, the loader so far) -> the one to be used


def keep(_rank: int, _step: int, loader: Loader) -> Loader:
    return loader


def play(
    mixture: Mixture, run: list[Segment], start: int, skipped: Ranges, plant: Make = keep
) -> list[list[Batch]]:
    """The batches of all ranks, by step. Ranks must agree on the position after each step."""
    out: list[list[Batch]] = []
    position = start
    for segment in run:
        loaders = [
            Loader(mixture, SEED, segment.batch, rank, segment.dp_size, position, skipped)
            for rank in range(segment.dp_size)
        ]
        for _ in range(segment.steps):
            loaders = [plant(rank, len(out), loader) for rank, loader in enumerate(loaders)]
            out.append([loader.next() for loader in loaders])
            assert len({loader.position for loader in loaders}) == 1, "the ranks disagree on the position"
        position = loaders[0].position
    return out


def unskipped(start: int, skipped: Ranges) -> Iterator[int]:
    """The positions that are read, by the plainest rule there is."""
    return (at for at in itertools.count(start) if not any(first <= at < end for first, end in skipped))


def assert_in_order(mixture: Mixture, batches: list[list[Batch]], start: int, skipped: Ranges) -> None:
    """The union over the ranks, step by step, is ``sample(seed, position)`` for the next positions, with its tokens."""
    order, positions = mixture.order(SEED), unskipped(start, skipped)
    for step in batches:
        taken = [(batch, slot) for batch in step for slot in range(len(batch.sample_ids))]
        here = list(itertools.islice(positions, len(taken)))
        assert {batch.position for batch in step} == {here[0]}
        for at, (batch, slot) in zip(here, taken, strict=True):
            source, sample_id = order.sample(at)
            assert batch.sample_ids[slot] == mixture.first_ids[source] + sample_id, at
            row = mixture.datasets[source].read(sample_id).tolist()
            assert [*batch.tokens[slot].tolist(), batch.labels[slot][-1]] == row, at


def assert_each_once(mixture: Mixture, batches: list[list[Batch]]) -> None:
    """Of a run from position 0 without skips: no sample of a source is read twice before all have been read once."""
    seen: list[Counter[int]] = [Counter() for _ in mixture.datasets]
    for number in (each for step in batches for batch in step for each in batch.sample_ids):
        source = max(which for which, first in enumerate(mixture.first_ids) if first <= number)
        counts, size = seen[source], mixture.datasets[source].size
        assert counts[number] == sum(counts.values()) // size, f"sample {number} is not read once an epoch"
        counts[number] += 1


@settings(max_examples=25, deadline=None)
@given(shares=weights, run=segments, start=st.integers(0, 2**40), skips=ranges)
def test_the_union_over_ranks_is_the_pure_order(
    sources: list[TokenDataset], shares: list[int], run: list[Segment], start: int, skips: Ranges
) -> None:
    mixture = Mixture(sources[: len(shares)], shares)
    skipped = [(start + first, start + end) for first, end in skips]
    assert_in_order(mixture, play(mixture, run, start, skipped), start, skipped)


@settings(max_examples=25, deadline=None)
@given(shares=weights, run=segments)
def test_each_sample_once_per_epoch_of_its_source(
    sources: list[TokenDataset], shares: list[int], run: list[Segment]
) -> None:
    mixture = Mixture(sources[: len(shares)], shares)
    assert_each_once(mixture, play(mixture, run, 0, []))


@settings(max_examples=15, deadline=None)
@given(shares=weights, run=segments, other=segments)
def test_a_resume_anywhere_with_any_world_reads_on(
    sources: list[TokenDataset], shares: list[int], run: list[Segment], other: list[Segment]
) -> None:
    """What follows a saved position is the same whether the run is continued as it was or on other ranks."""
    mixture = Mixture(sources[: len(shares)], shares)
    saved = sum(segment.batch for segment in run for _ in range(segment.steps))

    def flat(batches: list[list[Batch]]) -> list[int]:
        return [each for step in batches for batch in step for each in batch.sample_ids]

    whole, tail = flat(play(mixture, [*run, *other], 0, [])), flat(play(mixture, other, saved, []))
    assert whole[saved:] == tail
    one = flat(play(mixture, [Segment(1, 1, len(tail))], saved, []))
    assert one == tail


@settings(max_examples=25, deadline=None)
@given(shares=weights, run=segments, skips=ranges)
def test_nothing_behind_a_skipped_range_moves(
    sources: list[TokenDataset], shares: list[int], run: list[Segment], skips: Ranges
) -> None:
    mixture = Mixture(sources[: len(shares)], shares)
    with_skips = [
        each for step in play(mixture, run, 0, skips) for batch in step for each in batch.sample_ids
    ]
    last = next(itertools.islice(unskipped(0, skips), len(with_skips) - 1, None))
    (plain,) = play(mixture, [Segment(1, last + 1, 1)], 0, [])
    kept = [plain[0].sample_ids[at] for at in itertools.takewhile(lambda at: at <= last, unskipped(0, skips))]
    assert with_skips == kept


# ---------------------------------------------------------------- negative controls


def moved_from_step_2(by: int) -> Make:
    """From step 2 on all ranks stand ``by`` samples too far, once."""

    def plant(rank: int, step: int, loader: Loader) -> Loader:
        if step != 2:
            return loader
        dp_size = loader.global_batch // loader.local
        return Loader(loader.mixture, SEED, loader.global_batch, rank, dp_size, loader.position + by)

    return plant


def neighbours_slot(rank: int, step: int, loader: Loader) -> Loader:
    """At step 2 rank 0 begins to read what rank 1 reads."""
    if step != 2 or rank != 0:
        return loader
    dp_size = loader.global_batch // loader.local
    return Loader(loader.mixture, SEED, loader.global_batch, 1, dp_size, loader.position)


FAULTS: dict[str, Make] = {
    "one sample skipped": moved_from_step_2(1),
    "one sample repeated": moved_from_step_2(-1),
    "a rank reads its neighbour's slot": neighbours_slot,
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("shares", [[1], [3, 1, 1]])
def test_a_planted_fault_breaks_every_property(
    sources: list[TokenDataset], fault: str, shares: list[int]
) -> None:
    mixture = Mixture(sources[: len(shares)], shares)
    run = [Segment(2, 4, 1), Segment(3, 2, 30)]
    good, bad = play(mixture, run, 0, []), play(mixture, run, 0, [], FAULTS[fault])
    assert_in_order(mixture, good, 0, [])
    assert_each_once(mixture, good)
    with pytest.raises(AssertionError):
        assert_in_order(mixture, bad, 0, [])
    with pytest.raises(AssertionError, match="is not read once an epoch"):
        assert_each_once(mixture, bad)


def test_a_range_that_moves_what_follows_is_noticed(sources: list[TokenDataset]) -> None:
    mixture = Mixture(sources[:1], [1])
    batches = play(mixture, [Segment(2, 2, 6)], 0, [(5, 8)])
    assert_in_order(mixture, batches, 0, [(5, 8)])
    for wrong in ([(5, 7)], [(5, 9)], [(6, 9)], []):
        with pytest.raises(AssertionError):
            assert_in_order(mixture, batches, 0, wrong)


@settings(max_examples=100, deadline=None)
@given(skips=ranges, start=st.integers(0, 200))
def test_skipped_ranges_number_what_a_walk_numbers(skips: Ranges, start: int) -> None:
    skipped = SkippedRanges(skips)
    first = skipped.number(start)
    walked = list(itertools.islice(unskipped(start, skips), 40))
    assert skipped.positions(np.arange(first, first + 40)).tolist() == walked
