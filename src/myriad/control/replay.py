"""A journal's events, once more: fed to a fresh controller they must yield the same bytes.

What is recorded is never trusted to explain itself: the controller starts from nothing and decides everything
again, and each decision is compared with what was written. A row that is missing, cannot be read, or makes the
controller fail is a difference too. About 20,000 events a second.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from myriad.control.controller import Controller
from myriad.control.journal import Row, decode_event, encode


@dataclass(frozen=True, slots=True)
class Difference:
    """The first row whose replay differs, and in what.

    ``what`` is ``changes`` or ``commands``; ``sequence`` when rows before this one are missing; ``error`` when
    the row cannot be read or decided on, and ``replayed`` then says why.
    """

    seq: int
    now: float
    event: str
    what: str
    recorded: str
    replayed: str


@dataclass(frozen=True, slots=True)
class Replay:
    """What was compared, and the first difference if there is one."""

    events: int
    commands: int
    changes: int
    difference: Difference | None


def replay(rows: Iterable[Row]) -> Replay:
    """Compare until the first difference. ``rows`` are a whole journal from its first event on."""
    controller = Controller()
    events = commands = changes = 0
    for row in rows:
        if row.seq != events + 1:
            found = _difference(row, "sequence", b"%d" % row.seq, b"%d" % (events + 1))
            return Replay(events, commands, changes, found)
        try:
            given = controller.handle(decode_event(row.event), row.now)
        except Exception as error:  # noqa: BLE001 (a live controller got past it, whatever it is)
            reason = f"{type(error).__name__}: {error}".encode()
            return Replay(events, commands, changes, _difference(row, "error", b"", reason))
        for what, recorded, replayed in (
            ("changes", row.changes, encode(controller.changes)),
            ("commands", row.commands, encode(given)),
        ):
            if recorded != replayed:
                return Replay(events, commands, changes, _difference(row, what, recorded, replayed))
        events, commands, changes = events + 1, commands + len(given), changes + len(controller.changes)
    return Replay(events, commands, changes, None)


def _difference(row: Row, what: str, recorded: bytes, replayed: bytes) -> Difference:
    """As text, whatever the bytes are."""
    event, old, new = (text.decode(errors="backslashreplace") for text in (row.event, recorded, replayed))
    return Difference(row.seq, row.now, event, what, old, new)
