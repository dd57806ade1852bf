"""``python -m benchmarks.publish``: make ``docs/benchmarks.md`` from the stored results; nothing is run again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.harness import RESULTS, ROOT, say

PAGE = ROOT / "docs" / "benchmarks.md"
HEAD = """# Benchmarks

Made by `python -m benchmarks.publish` from `benchmarks/results/`; do not edit. Each table is one run of the command
above it on the machine named below it. `make bench NAME=...` runs one again and ends with the same figures as one
line of JSON.
"""
WORDS = {True: "yes", False: "no", None: "not measured"}


def write_page() -> Path:
    """All stored results, by name; returns the page's path."""
    files = sorted(RESULTS.glob("*.json"))
    PAGE.write_text("\n".join([HEAD, *(section(json.loads(file.read_text())) for file in files)]))
    return PAGE


def section(result: dict[str, Any]) -> str:
    lines = [f"## {result['bench']}", "", f"`{result['command']}`", ""]
    lines += ["| figure | value | aim | holds |", "|---|---|---|---|"]
    for aim in result["aims"]:
        value = aim.get("note", "") if aim["value"] is None else f"{aim['value']:g}"
        lines.append(f"| {aim['name']} | {value} | {aim['aim']} | {WORDS[aim['holds']]} |")
    lines += ["", f"{result['date']}, {result['machine']}.", ""]
    lines += [f"* {line}" for line in result.get("findings", ())]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    say(f"wrote {write_page()}")
