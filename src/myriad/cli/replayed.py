"""What ``myriad simulate --journal`` does: replay a journal, and show where it differs from what was recorded."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from myriad.control.replay import Difference, Replay

# What is shown of a difference, in lines: around the first place, and in all.
CONTEXT_LINES = 3
SHOWN_LINES_MAX = 40
# What is shown of one line or of the event, in characters.
SHOWN_WIDTH_MAX = 200


def replayed(file: Path) -> Replay:
    """The replay of a file; CommandError (usage) when it is no whole journal."""
    from myriad.cli.errors import CommandError, Exit
    from myriad.control.replay import replay
    from myriad.runtime.store import JournalError, JournalFile

    try:
        with JournalFile(file) as journal:
            return replay(journal.rows())
    except JournalError as error:
        raise CommandError(str(error), Exit.USAGE) from None


def as_document(found: Replay) -> dict[str, Any]:
    import dataclasses

    return {"identical": found.difference is None, **dataclasses.asdict(found)}


def tell(found: Replay) -> None:
    """How much was compared, and the first difference."""
    from myriad.cli.output import say

    end = "identical" if found.difference is None else "then a difference"
    say(f"{found.events:,} events, {found.commands:,} commands, {found.changes:,} changes replayed: {end}")
    if found.difference is not None:
        for line in difference_lines(found.difference):
            say(line)


def difference_lines(found: Difference) -> list[str]:
    """Where it is, and the first differing part with a few lines around it."""
    where = f"event {found.seq} at {_time(found.now)}: {_cut(found.event)}"
    match found.what:
        case "sequence":
            return [where, f"event {found.replayed} is missing before it"]
        case "error":
            return [where, f"it cannot be replayed: {_cut(found.replayed)}"]
        case _:
            return [where, f"its {found.what} differ:", *first_part(found.recorded, found.replayed)]


def first_part(recorded: str, replayed: str) -> list[str]:
    """The first differing part of two JSON texts: ``-`` before what was recorded, ``+`` before the replayed."""
    import difflib

    old, new = _pretty(recorded), _pretty(replayed)
    if old == new:  # in how they are written
        old, new = _broken(recorded), _broken(replayed)
    lines = list(difflib.unified_diff(old, new, "recorded", "replayed", n=CONTEXT_LINES, lineterm=""))
    second = next((number for number, line in enumerate(lines[3:], 3) if line.startswith("@@")), len(lines))
    shown = [*lines[:2], *lines[3:second]]
    more = len(shown) - SHOWN_LINES_MAX
    tail = [f"... and {more} more lines; --json has all"] if more > 0 else []
    return [*map(_cut, shown[:SHOWN_LINES_MAX]), *tail]


def _time(now_s: float) -> str:
    """As ``myriad events`` shows it; in seconds when it was altered beyond any calendar."""
    from myriad.server.sentences import iso

    try:
        return iso(now_s)
    except (ValueError, OverflowError, OSError):
        return f"{now_s} s"


def _pretty(text: str) -> list[str]:
    import json

    try:
        return json.dumps(json.loads(text), indent=2, ensure_ascii=False).splitlines()
    except ValueError:
        return _broken(text)


def _broken(text: str) -> list[str]:
    """A text that may not be JSON, in lines that end where JSON's would."""
    return text.replace(",", ",\n").replace("{", "{\n").replace("}", "\n}").splitlines()


def _cut(text: str) -> str:
    return text if len(text) <= SHOWN_WIDTH_MAX else f"{text[:SHOWN_WIDTH_MAX]}..."
