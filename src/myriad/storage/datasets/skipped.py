"""Positions that a run passes over, without a walk: the n-th sample that is read stands at ``positions([n])``.

Method: ranges are merged and sorted once; a binary search tells how many positions the ranges before the n-th
sample take. So a rank computes its own slots of many batches at once, never those of the other ranks, and a
seek costs the same wherever it leads: log2 of the number of ranges.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray


class SkippedRanges:
    """Ranges [first, end) of positions that are passed over; they may touch or overlap."""

    def __init__(self, ranges: Iterable[tuple[int, int]] = ()) -> None:
        merged: list[tuple[int, int]] = []
        for first, end in sorted(ranges):
            assert 0 <= first <= end, (first, end)
            if first == end:
                continue
            if merged and first <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
            else:
                merged.append((first, end))
        self.ranges = tuple(merged)
        lengths = np.array([end - first for first, end in merged], np.int64)
        self._before = np.concatenate(([0], np.cumsum(lengths))).astype(np.int64)  # [ranges + 1]
        self._firsts = (
            np.array([first for first, _ in merged], np.int64) - self._before[:-1]
        )  # in samples read

    def number(self, position: int) -> int:
        """How many positions before ``position`` are not skipped: the number of the next sample to be read."""
        return position - sum(min(end, position) - first for first, end in self.ranges if first < position)

    def positions(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """The positions of samples numbered as by :meth:`number`, int64 of the same shape."""
        return numbers + self._before[np.searchsorted(self._firsts, numbers, side="right")]
