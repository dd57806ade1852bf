"""Each sample once per epoch, judged from sample ids alone and from the true order."""

from __future__ import annotations

import random

import pytest

from myriad.operations.exactly_once import seen_once


def order(size: int, epochs: int) -> list[int]:
    generator = random.Random(7)
    found: list[int] = []
    for _ in range(epochs):
        epoch = list(range(size))
        generator.shuffle(epoch)
        found += epoch
    return found


def steps(ids: list[int], batch: int) -> dict[int, list[int]]:
    return {1 + at // batch: ids[at : at + batch] for at in range(0, len(ids) - batch + 1, batch)}


@pytest.mark.parametrize(("size", "batch"), [(10, 5), (10, 4), (7, 3), (5, 8), (1000, 4)])
@pytest.mark.parametrize("known", [True, False])
def test_epochs_in_any_order(size: int, batch: int, known: bool) -> None:
    ids = order(size, 3)[: 12 * batch]
    assert seen_once(steps(ids, batch), batch, epoch_samples=size if known else None)


@pytest.mark.parametrize(
    ("story", "change"),
    [
        ("a repeated sample", lambda s: {**s, 3: [*s[3][:3], s[1][0]]}),
        ("a missing sample", lambda s: {**s, 3: s[3][:3]}),
        ("a missing step", lambda s: {k: v for k, v in s.items() if k != 2}),
        ("a step twice", lambda s: {**s, 4: s[3]}),
        ("an id that is none", lambda s: {**s, 2: [*s[2][:3], 100]}),
    ],
)
def test_what_is_wrong_is_seen(story: str, change) -> None:  # type: ignore[no-untyped-def]
    healthy = steps(order(100, 1), 4)
    assert seen_once(healthy, 4, epoch_samples=100)
    assert not seen_once(change(healthy), 4, epoch_samples=100), story


def test_a_skipped_sample_is_seen_with_the_order() -> None:
    ids = order(100, 1)
    skipping = ids[:9] + ids[10:50]
    truth = steps(ids, 4)
    assert seen_once(steps(skipping, 4), 4, epoch_samples=100)  # within an unfinished epoch: cannot know
    assert not seen_once(steps(skipping, 4), 4, expected=truth.__getitem__)
    assert seen_once(steps(ids[:48], 4), 4, expected=truth.__getitem__)
