"""Was every sample consumed exactly once? Judged from the sample ids of each step's last execution.

Method: after n samples of a data source with e samples, each id must have been seen floor(n / e) or that plus
one times: that is "once per epoch", tested at every step's end, and needs no knowledge of the order. Where
the order is known (``expected``, from the dataset's keyed permutation), each step is compared with the very
ids that stand at its positions, which also finds a sample that was skipped within an unfinished epoch.
O(samples).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

Expected = Callable[[int], Sequence[int]]  # step -> the sample ids that stand at its positions


def seen_once(
    samples_by_step: Mapping[int, Sequence[int]],
    global_batch: int,
    *,
    epoch_samples: int | None = None,
    expected: Expected | None = None,
) -> bool:
    """True when steps 1..last each consumed ``global_batch`` samples and none came twice within an epoch.

    ``epoch_samples`` None: the greatest id seen + 1, which is exact once an epoch is complete and otherwise
    stricter.
    """
    steps = sorted(samples_by_step)
    if steps != list(range(1, len(steps) + 1)):
        return False
    if any(len(samples_by_step[step]) != global_batch for step in steps):
        return False
    if expected is not None:
        return all(Counter(samples_by_step[step]) == Counter(expected(step)) for step in steps)
    size = epoch_samples or 1 + max((max(ids) for ids in samples_by_step.values()), default=0)
    return _once_per_epoch([samples_by_step[step] for step in steps], size)


def _once_per_epoch(steps: Sequence[Sequence[int]], size: int) -> bool:
    times: Counter[int] = Counter()
    having: Counter[int] = Counter({0: size})  # times seen -> number of ids
    consumed = 0
    for ids in steps:
        for sample in ids:
            if not 0 <= sample < size:
                return False
            having[times[sample]] -= 1
            times[sample] += 1
            having[times[sample]] += 1
        consumed += len(ids)
        epoch, rest = divmod(consumed, size)
        if having[epoch] != size - rest or having[epoch + 1] != rest:
            return False
    return True
