"""A recorded life replays byte for byte, and whatever was altered in it is found at its row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import pytest
from world import World

from myriad.control.controller import Controller
from myriad.control.events import AnyEvent, DrainRequested, JobSubmitted
from myriad.control.journal import Entry, Row, decode_event, write_row
from myriad.control.replay import replay


@pytest.fixture(scope="module")
def life() -> list[Row]:
    """Two jobs, a lost node, a silent one, a restart of the controller, a drain, a cancel and an end."""
    world = World(nodes=6)
    model = world.start(nodes=2, spares=1, torch=True)
    world.save(model, step=10)
    world.run()
    world.agent_dies("n0")
    world.run()
    command = world.submit(nodes=2, request="once")
    world.submit(nodes=2, request="once")  # does nothing
    world.run()
    world.restart_controller()
    world.run()
    world.goes_silent("n1")
    world.run()
    world.tick(30.0)
    world.undrain("n0")
    world.undrain("n1")
    world.drain("n5", "a fan")
    world.cancel(command)
    world.run()
    world.finish(model)
    world.run()
    entries = (Entry(e.now, e.event, e.changes, e.commands) for e in world.journal)
    return [write_row(seq, entry) for seq, entry in enumerate(entries, 1)]


def first(life: list[Row], kind: type[AnyEvent], commands: bool = False) -> int:
    """Index of the first row of this event (with commands)."""
    return next(
        index
        for index, row in enumerate(life)
        if isinstance(decode_event(row.event), kind) and (row.commands != b"[]" or not commands)
    )


def test_a_life_replays(life: list[Row]) -> None:
    found = replay(life)
    assert found.difference is None
    assert found.events == len(life) > 50
    assert found.commands > 20 and found.changes > 50


def test_every_prefix_of_a_life_is_a_life(life: list[Row]) -> None:
    assert replay([]).events == 0
    assert replay(life[:7]).events == 7 and replay(life[:7]).difference is None


@dataclass(frozen=True)
class Altered:
    """``alter`` changes the row of that index, which is the first of ``event`` (that gave commands)."""

    name: str
    alter: Callable[[list[Row], int], None]
    what: str
    event: type[AnyEvent] = JobSubmitted
    commands: bool = False


def drop(rows: list[Row], index: int) -> None:
    del rows[index]


def with_(**fields: Callable[[Row], object]) -> Callable[[list[Row], int], None]:
    def alter(rows: list[Row], index: int) -> None:
        new = {name: change(rows[index]) for name, change in fields.items()}
        rows[index] = msgspec.structs.replace(rows[index], **new)

    return alter


def flipped(data: bytes) -> bytes:
    """One bit of the byte in the middle, which lies in some name or number."""
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


ALTERED = (
    Altered(
        "a byte of a command",
        with_(commands=lambda row: flipped(row.commands)),
        "commands",
        commands=True,
    ),
    Altered("a command too few", with_(commands=lambda row: b"[]"), "commands", commands=True),
    Altered("a byte of a change", with_(changes=lambda row: flipped(row.changes)), "changes"),
    Altered("a time", with_(now=lambda row: row.now + 0.25), "changes"),
    Altered("a dropped row", drop, "sequence"),
    Altered("a dropped row that did nothing", drop, "sequence"),
    Altered("another event", with_(event=lambda row: row.event.replace(b'"n5"', b'"n4"')), "changes", DrainRequested),
    Altered("an event of a node that never was", with_(event=lambda row: row.event.replace(b'"n5"', b'"x5"')), "error",
            DrainRequested),
    Altered("an event that is no JSON", with_(event=lambda row: row.event[:-1]), "error"),
    Altered("bytes that are no text", with_(event=lambda row: b"\xff\xfe"), "error"),
)  # fmt: skip


@pytest.mark.parametrize("story", ALTERED, ids=lambda story: story.name)
def test_what_was_altered_is_found(story: Altered, life: list[Row]) -> None:
    index = first(life, story.event, story.commands)
    if "nothing" in story.name:
        index = next(i for i, row in enumerate(life) if row.changes == row.commands == b"[]")
    rows = list(life)
    story.alter(rows, index)
    found = replay(rows)
    assert found.difference is not None
    assert found.difference.what == story.what, found.difference
    row = rows[index]
    assert (found.difference.seq, found.difference.now) == (row.seq, row.now)
    assert found.difference.seq == life[index].seq + (story.what == "sequence")
    assert found.events == index
    assert found.difference.recorded != found.difference.replayed


def test_a_controller_that_depends_on_its_process_is_found(
    life: list[Row], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bug that replay is there for: here, commands in another order whenever there are several."""
    original = Controller.handle
    monkeypatch.setattr(Controller, "handle", lambda self, event, now: original(self, event, now)[::-1])
    several = next(
        row for row in life if row.commands.count(b'"type"') > 1 and row.commands.startswith(b"[{")
    )
    found = replay(life).difference
    assert found is not None and found.what == "commands"
    assert found.seq <= several.seq and sorted(found.recorded) == sorted(found.replayed)
