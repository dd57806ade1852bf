"""Data on stdout, talk on stderr, colour only where a person looks at a terminal that has it."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Sequence
from typing import Any, TextIO

_COLOURS = {"green": "32", "yellow": "33", "red": "31", "cyan": "36", "bold": "1"}
STATUS_COLOURS = {
    "PENDING": "yellow",
    "STARTING": "cyan",
    "RUNNING": "green",
    "RECOVERING": "yellow",
    "STOPPING": "cyan",
    "FAILED": "red",
    "TIMEOUT": "red",
    "down": "red",
    "drained": "yellow",
    "draining": "yellow",
    "busy": "green",
}


def say(text: str = "") -> None:
    """One line of data."""
    sys.stdout.write(text + "\n")


def talk(text: str) -> None:
    """One line beside the data."""
    sys.stdout.flush()
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def document(value: Any) -> None:
    """The one JSON document of a command run with --json."""
    say(json.dumps(value, indent=2, ensure_ascii=False))


def coloured(stream: TextIO) -> bool:
    """Whether colour belongs on this stream."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM", "dumb") != "dumb"


def paint(text: str, colour: str | None) -> str:
    """The text in a colour of ``_COLOURS``, where stdout takes colour."""
    if colour is None or not coloured(sys.stdout):
        return text
    return f"\x1b[{_COLOURS[colour]}m{text}\x1b[0m"


def table(header: Sequence[str], rows: Iterable[Sequence[object]], paint_column: str = "") -> None:
    """Columns as wide as their widest cell; the cells of ``paint_column`` in the colour of the status they name."""
    cells = [[shown(cell) for cell in row] for row in rows]
    widths = [max(map(width, column)) for column in zip(header, *cells, strict=True)]
    painted = header.index(paint_column) if paint_column else -1
    for line in (list(header), *cells):
        padded = [text + " " * (size - width(text)) for text, size in zip(line, widths, strict=True)]
        if 0 <= painted:
            padded[painted] = paint(padded[painted], STATUS_COLOURS.get(line[painted]))
        say("  ".join(padded).rstrip())


def width(text: str) -> int:
    """Terminal cells a text takes: two for wide characters, none for combining ones."""
    import unicodedata

    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text
    )


def shown(value: object) -> str:
    """A cell: ``-`` for what is not there, four digits of a float."""
    if value is None or value == "":
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def duration(seconds: float | None) -> str:
    from myriad.spec.units import format_duration

    return "-" if seconds is None else format_duration(seconds)


def names(listed: Sequence[str], most: int = 8) -> str:
    """``n1, n2``; after ``most`` names only how many more there are."""
    more = len(listed) - most
    return ", ".join(listed[:most]) + (f" and {more} more" if more > 0 else "") or "-"
