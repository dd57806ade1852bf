"""Silence counted in beats of 1 s: what the controller hears of it, told as lives of one or two nodes.

A story is a list of moments: ``("heard", at_s)``, ``("look", at_s, reported)``, ... where ``reported`` are the
beats of each node in the order of joining; ``n0`` and ``n1`` are expected at 0 s.
"""

from __future__ import annotations

from typing import Any

import pytest

from myriad.control.events import NodeSilent
from myriad.control.limits import DEAD_BEATS, SUSPECT_BEATS
from myriad.control.liveness import Liveness

BEAT_S = 1.0

Story = list[tuple[Any, ...]]


def tell(story: Story, liveness: Liveness | None = None) -> None:
    """Live through a story; every look must report exactly these (node, beats)."""
    liveness = liveness or Liveness(BEAT_S)
    looked_s = 0.0
    for node in ("n0", "n1"):
        liveness.expect(node, "a", 0.0)
    for moment in story:
        match moment:
            case ("look", at_s, want):
                looked_s = at_s
                found = {silent.node: silent.beats for silent in liveness.look(at_s)}
                assert found == want, (at_s, found)
            case ("heard", node, at_s):
                liveness.heard(node, "a", at_s)
            case ("expect", node, at_s):
                liveness.expect(node, "b", at_s)
            case ("forget", node):
                liveness.forget(node, "a")
            case ("looks until", end_s):  # twice a beat, as often as one should
                while looked_s + liveness.pause_s <= end_s:
                    looked_s += liveness.pause_s
                    liveness.look(looked_s)
            case _:
                raise AssertionError(moment)


QUIET: dict[str, int] = {}
STORIES: dict[str, Story] = {
    "the third missed beat is the first that is reported": [
        ("heard", "n1", 1.5),
        ("looks until", 2.5),
        ("look", 2.9, QUIET),
        ("look", 3.0, {"n0": 3}),
    ],
    "each further beat is reported once": [
        ("heard", "n1", 2.9),
        ("looks until", 2.5),
        ("look", 3.2, {"n0": 3}),
        ("look", 3.7, QUIET),
        ("look", 4.2, {"n0": 4}),
        ("look", 4.2, QUIET),
        ("look", 5.2, {"n0": 5}),
    ],
    "a look that misses a beat reports the newest only": [
        ("heard", "n1", 2.9),
        ("looks until", 3.5),
        ("look", 5.0, {"n0": 5}),
    ],
    "no more than a verdict is reported": [
        ("looks until", 7.5),
        ("look", 8.0, {"n0": DEAD_BEATS, "n1": DEAD_BEATS}),
        ("look", 9.0, QUIET),
        ("looks until", 60.0),
        ("look", 60.5, QUIET),
    ],
    "a message begins the count afresh": [
        ("heard", "n1", 2.9),
        ("looks until", 3.0),
        ("heard", "n0", 3.125),
        ("look", 3.5, QUIET),
        ("look", 4.0, QUIET),
        ("heard", "n1", 4.0),
        ("looks until", 6.0),
        ("look", 6.125, {"n0": 3}),
    ],
    "a message just in time, late reports do not add up": [
        ("heard", "n0", 2.9),
        ("heard", "n1", 2.9),
        ("looks until", 5.5),
        ("look", 5.8, QUIET),
    ],
    "a new life begins afresh too": [
        ("heard", "n1", 2.9),
        ("looks until", 3.0),
        ("expect", "n0", 3.1),
        ("look", 4.0, QUIET),
    ],
    "a node that is down is not counted": [
        ("looks until", 2.5),
        ("forget", "n0"),
        ("look", 3.0, {"n1": 3}),
        ("looks until", 60.0),
        ("heard", "n0", 60.0),  # fenced, and still talking
        ("look", 61.0, QUIET),
    ],
    "a node that is back is reported from the third beat again": [
        ("looks until", 7.5),
        ("forget", "n0"),
        ("forget", "n1"),
        ("expect", "n0", 7.6),
        ("looks until", 10.5),
        ("look", 10.6, {"n0": 3}),
    ],
    "whoever looks late excuses everybody": [
        ("looks until", 2.5),
        ("look", 4.1, QUIET),
        ("looks until", 6.6),
        ("look", 7.1, {"n0": 3, "n1": 3}),
    ],
    "a look that is late by a beat and no more excuses nobody": [
        ("looks until", 2.5),
        ("look", 4.0, {"n0": 4, "n1": 4}),
    ],
    "the first look of all is never late": [("look", 3.0, {"n0": 3, "n1": 3})],
}


@pytest.mark.parametrize("story", STORIES)
def test_story(story: str) -> None:
    tell(STORIES[story])


def test_without_the_excuse_a_late_look_would_condemn_everybody() -> None:
    """The negative control: the same story told to a counter that does not know of its own lateness."""

    class Unforgiving(Liveness):
        def look(self, now_s: float) -> list[NodeSilent]:
            self._looked_s = now_s
            return super().look(now_s)

    with pytest.raises(AssertionError, match=r"4\.1, \{'n0': 4, 'n1': 4\}"):
        tell(STORIES["whoever looks late excuses everybody"], Unforgiving(BEAT_S))


def test_what_is_reported() -> None:
    liveness = Liveness(0.5)
    liveness.expect("n0", "a", 10.0)
    assert liveness.pause_s == 0.25
    assert liveness.silent_s("n0", 12.0) == 2.0 and liveness.silent_s("n9", 12.0) == 0.0
    assert liveness.look(12.0) == [NodeSilent(node="n0", incarnation="a", beats=4, silent_s=2.0)]
    assert SUSPECT_BEATS == 3
