"""The generated page has one row for every cause, and each row all of its cells."""

from __future__ import annotations

from myriad.operations.ledger_doc import ledger_markdown
from myriad.spec.causes import Cause


def test_every_cause_has_one_complete_row() -> None:
    rows = [line for line in ledger_markdown().splitlines() if line.startswith("| `")]
    assert [row.split("`")[1] for row in rows] == [cause.value for cause in Cause]
    for row in rows:
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        assert len(cells) == 6 and all(cells), row
