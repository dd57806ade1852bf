"""The journal's rows: how an event and what followed from it are written, read and folded.

One row per event: (sequence number, schema, time, event, changes, commands), the last three as JSON. The fold of
all changes is the state, so a restart loads it and decides nothing again. Where rows are kept is the runtime's
affair (SQLite) or the simulator's (a virtual disk that may tear); what is in them is said here once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec

from myriad.control.commands import AnyCommand
from myriad.control.events import AnyEvent
from myriad.control.records import AnyRecord, Change, Drop
from myriad.control.state import State

SCHEMA_VERSION = 1

encode = msgspec.json.Encoder().encode
decode_record = msgspec.json.Decoder(AnyRecord).decode
decode_event = msgspec.json.Decoder(AnyEvent).decode
decode_changes = msgspec.json.Decoder(list[Change]).decode
decode_commands = msgspec.json.Decoder(list[AnyCommand]).decode


@dataclass(frozen=True, slots=True)
class Entry:
    """One handled event: when, what, and what followed."""

    now: float
    event: AnyEvent
    changes: Sequence[Change]
    commands: Sequence[AnyCommand]


class Row(msgspec.Struct, frozen=True, array_like=True):
    """An entry as it is written."""

    seq: int
    schema: int
    now: float
    event: bytes
    changes: bytes
    commands: bytes


def write_row(seq: int, entry: Entry) -> Row:
    return Row(
        seq, SCHEMA_VERSION, entry.now, encode(entry.event), encode(entry.changes), encode(entry.commands)
    )


def read_row(row: Row) -> Entry:
    """Raises msgspec.ValidationError for a row that this version did not write."""
    return Entry(row.now, decode_event(row.event), decode_changes(row.changes), decode_commands(row.commands))


class Records:
    """The fold of changes as written: (kind, key) -> record; an update stays in its place."""

    def __init__(self) -> None:
        self.rows: dict[tuple[str, str], bytes] = {}

    def fold(self, changes: Iterable[Change]) -> None:
        for change in changes:
            if isinstance(change, Drop):
                self.rows.pop((change.kind, change.of), None)
            else:
                self.rows[type(change).__name__, change.key] = encode(change)

    def load(self) -> State:
        return State(decode_record(row) for row in self.rows.values())
