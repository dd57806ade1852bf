"""Several data sets read as one, each with its share of the samples: which source stands at a position.

Method: positions are cut into blocks of ``BLOCK``. In each block a source has a fixed whole number of
positions (largest remainder of its weight) and a permutation keyed by (seed, block) says which ones. The
n-th position of a source, over all blocks, reads the n-th sample of that source's own order, so each
source is passed through exactly once per epoch of its own. One source alone has every position, which is
the order of a plain data set.

Trade-off: shares are exact to one sample a block, not finer, and a share below about 1/1024 is refused; in
return a seek anywhere costs one block's permutation, and nothing is stored.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from myriad.storage.datasets.index import DatasetError
from myriad.storage.datasets.order import samples, samples_at

BLOCK = 1024  # positions: small enough that any batch of a run sees about the shares, and cheap to permute
CACHED_BLOCKS = 16  # patterns of 16 KiB: a batch spans few blocks, and the next batch the same ones


class MixtureOrder:
    """The pure order of a mixture of sources with ``sizes`` samples and ``weights`` of any scale."""

    def __init__(self, seed: int, sizes: Sequence[int], weights: Sequence[float]) -> None:
        assert len(sizes) == len(weights) > 0 and min(sizes) > 0 and min(weights) > 0, (sizes, weights)
        self.sizes = tuple(sizes)
        self.quotas = quotas(weights)
        self._block_seed = _derived(seed, "blocks")
        # The first source keeps the seed itself: a mixture of one is a plain data set, bit for bit.
        self._seeds = [seed, *(_derived(seed, f"source {each}") for each in range(1, len(sizes)))]
        self._pattern = functools.lru_cache(maxsize=CACHED_BLOCKS)(self._compute_pattern)

    def sample(self, position: int) -> tuple[int, int]:
        """(source, sample id within it) at ``position`` >= 0. Pure, O(1)."""
        sources, ids = self.samples_at(np.array([position], np.int64))
        return int(sources[0]), int(ids[0])

    def samples_at(self, positions: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(sources, sample ids within them) at any positions, each int64 [n]."""
        if len(self.sizes) == 1:
            return np.zeros_like(positions), samples_at(self._seeds[0], positions, self.sizes[0])
        sources, turns = np.empty_like(positions), np.empty_like(positions)
        blocks, offsets = np.divmod(positions, BLOCK)
        for block in np.unique(blocks):
            here = blocks == block
            source_of, turn_of = self._pattern(int(block))
            sources[here] = source_of[offsets[here]]
            turns[here] = turn_of[offsets[here]]
        turns += blocks * np.array(self.quotas, np.int64)[sources]
        ids = np.empty_like(positions)
        for source, size in enumerate(self.sizes):
            here = sources == source
            ids[here] = samples_at(self._seeds[source], turns[here], size)
        return sources, ids

    def consumed(self, end: int) -> tuple[int, ...]:
        """How many samples of each source the positions [0, ``end``) read."""
        block, rest = divmod(end, BLOCK)
        within = np.bincount(self._pattern(block)[0][:rest], minlength=len(self.sizes))
        return tuple(block * quota + int(more) for quota, more in zip(self.quotas, within, strict=True))

    def _compute_pattern(self, block: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """For each offset in a block: its source, and how many earlier ones have the same; int64 [BLOCK]."""
        shuffled = samples(self._block_seed, block * BLOCK, BLOCK, BLOCK)
        source_of = np.searchsorted(np.cumsum(self.quotas), shuffled, side="right").astype(np.int64)
        turn_of = np.empty(BLOCK, np.int64)
        for source, quota in enumerate(self.quotas):
            turn_of[source_of == source] = np.arange(quota)
        return source_of, turn_of


def quotas(weights: Sequence[float]) -> tuple[int, ...]:
    """Positions of each source in a block, by largest remainder. Raises DatasetError where one has none."""
    exact = [Fraction(each) for each in weights]
    shares = [each * BLOCK / sum(exact) for each in exact]
    counts = [int(each) for each in shares]
    by_remainder = sorted(range(len(shares)), key=lambda each: (counts[each] - shares[each], each))
    for each in by_remainder[: BLOCK - sum(counts)]:
        counts[each] += 1
    if 0 in counts:
        weight = weights[counts.index(0)]
        raise DatasetError(
            f"the weight {weight:g} is less than one sample in {BLOCK} of the mixture: "
            "raise it, or leave that source out"
        )
    return tuple(counts)


def _derived(seed: int, purpose: str) -> int:
    return int.from_bytes(hashlib.blake2b(f"{seed}/{purpose}".encode(), digest_size=8).digest(), "little")
