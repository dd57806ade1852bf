"""What all benchmarks share: aims, the machine in words, the last line, and the stored result.

A benchmark prints what it likes and ends with :func:`conclude`, whose last line is one JSON document:

    {"bench": "recovery", "aims": [{"name": "...", "value": 1.9, "aim": "<= 3", "holds": true}, ...]}

An aim that could not be measured has value null, holds null and a note that says why. The exit code is 0 whatever
holds: a benchmark measures, a person judges. With ``--publish`` the result is stored in ``benchmarks/results``
with its command, date and machine, and ``docs/benchmarks.md`` is made anew from all stored results.
"""

from __future__ import annotations

import argparse
import datetime
import json
import operator
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
RUNS = ROOT / "runs" / "bench"

_COMPARE: dict[str, Callable[[float, float], bool]] = {"<=": operator.le, ">=": operator.ge}


@dataclass(frozen=True)
class Aim:
    """One figure and what it should be, such as "<= 0.2". ``note`` says why there is no value."""

    name: str
    aim: str
    value: float | None
    note: str = ""

    @property
    def holds(self) -> bool | None:
        if self.value is None:
            return None
        sign, limit = self.aim.split()
        return _COMPARE[sign](self.value, float(limit))

    def document(self) -> dict[str, Any]:
        value = None if self.value is None else float(f"{self.value:.4g}")
        found = {"name": self.name, "value": value, "aim": self.aim, "holds": self.holds}
        return found | ({"note": self.note} if self.note else {})


def arguments(bench: str, description: str) -> argparse.ArgumentParser:
    """A parser with what every benchmark takes."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{bench}", description=description)
    parser.add_argument(
        "--publish", action="store_true", help="store the result and remake docs/benchmarks.md"
    )
    return parser


def say(text: str = "") -> None:
    print(text, flush=True)


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Columns padded to their widest cell; the first is text, the others are figures."""
    widths = [max(len(row[i]) for row in (heads, *rows)) for i in range(len(heads))]
    for row in (heads, *rows):
        cells = [
            row[0].ljust(widths[0]),
            *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)),
        ]
        say("  ".join(cells).rstrip())


def machine() -> str:
    """Processor, cores, memory and load of this machine, and the versions that matter."""
    from importlib.metadata import version

    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    cores = len(os.sched_getaffinity(0))
    return (
        f"{_processor()}, {cores} cores (load {os.getloadavg()[0]:.1f} at the start), {memory_gib:.0f} GiB, "
        f"Linux {platform.release()}, Python {platform.python_version()}, torch {version('torch')}"
    )


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def conclude(bench: str, aims: Sequence[Aim], command: str, about: Mapping[str, Any], publish: bool) -> int:
    """Print the last line, and store it with ``command`` and ``about`` (figures a reader wants) if asked to."""
    line = {"bench": bench, "aims": [aim.document() for aim in aims]}
    if publish:
        from benchmarks.publish import write_page

        date = datetime.datetime.now(datetime.UTC).date().isoformat()
        RESULTS.mkdir(parents=True, exist_ok=True)
        stored = {**line, "command": command, "date": date, **about}
        (RESULTS / f"{bench}.json").write_text(json.dumps(stored, indent=1) + "\n")
        say(f"wrote {write_page()}")
    say(json.dumps(line))
    return 0
