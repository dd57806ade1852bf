"""Every second of a step belongs to exactly one cause."""

from __future__ import annotations

import threading

import pytest

from myriad.training.clock import StepClock


class Watch:
    """A clock that stands still until it is told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_nested_sections_are_counted_once() -> None:
    watch = Watch()
    clock = StepClock(watch)
    watch.now += 1
    with clock.section("compute"):
        watch.now += 2
        with clock.section("data"):
            watch.now += 4
        with clock.section("communication"):
            watch.now += 8
        watch.now += 16
    watch.now += 32
    lap = clock.lap()
    assert lap.wall_s == 63
    assert lap.parts_s == {"other": 33, "compute": 18, "data": 4, "communication": 8}


def test_communication_inside_a_save_belongs_to_the_save() -> None:
    watch = Watch()
    clock = StepClock(watch)
    with clock.section("checkpoint"):
        watch.now += 1
        with clock.section("communication"):
            watch.now += 2
    assert clock.lap().parts_s == {"other": 0, "checkpoint": 3}


def test_laps_follow_each_other_without_a_gap() -> None:
    watch = Watch()
    clock = StepClock(watch)
    watch.now += 3
    with clock.section("compute"):
        watch.now += 1
        first = clock.lap()
        watch.now += 5
    second = clock.lap()
    assert (first.wall_s, second.wall_s) == (4, 5)
    assert second.parts_s == {"compute": 5, "other": 0}


def test_a_section_closes_on_an_exception() -> None:
    watch = Watch()
    clock = StepClock(watch)
    with pytest.raises(ValueError, match="planted"), clock.section("data"):
        watch.now += 1
        raise ValueError("planted")
    watch.now += 2
    assert clock.lap().parts_s == {"other": 2, "data": 1}


def test_other_threads_do_not_disturb() -> None:
    watch = Watch()
    clock = StepClock(watch)

    def elsewhere() -> None:
        with clock.section("communication"):
            watch.now += 7

    with clock.section("compute"):
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
    assert clock.lap().parts_s == {"other": 0, "compute": 7}
