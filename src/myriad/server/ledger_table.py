"""The ledger as lines: one place decides which are shown, in which order and in which words.

The terminal's table, the HTML report and the demo all print what :func:`ledger_rows` returns.
"""

from __future__ import annotations

from collections.abc import Mapping

from myriad.spec.causes import Cause

NOT_PREDICTED = "not predicted"
NOT_MEASURED = "not measured"


def ledger_rows(
    predicted: Mapping[str, float | None] | None, measured: Mapping[str, float] | None
) -> list[tuple[str, float | None, float | None]]:
    """(cause, predicted, measured) in accelerator-seconds, in the order of :class:`Cause`.

    None on the left is "not predicted", on the right "not measured". A line is left out when both sides lack
    it.
    """
    predicted, measured = predicted or {}, measured or {}
    unknown = (predicted.keys() | measured.keys()) - {cause.value for cause in Cause}
    assert not unknown, f"not causes of the ledger: {sorted(unknown)}"
    return [
        (cause.value, predicted.get(cause.value), measured.get(cause.value))
        for cause in Cause
        if predicted.get(cause.value) is not None or cause.value in measured
    ]


def ledger_text(rows: list[tuple[str, float | None, float | None]]) -> str:
    """The rows as a table for a terminal: cause, predicted, measured, share of what was measured."""
    total = sum(measured for _, _, measured in rows if measured is not None)
    lines = [f"{'cause':<24}{'predicted':>15}{'measured':>15}{'share':>9}"]
    for cause, predicted, measured in rows:
        share = f"{100 * measured / total:.1f} %" if measured is not None and total > 0 else ""
        left, right = amount(predicted, NOT_PREDICTED), amount(measured, NOT_MEASURED)
        lines.append(f"{cause:<24}{left:>15}{right:>15}{share:>9}")
    if total > 0:
        lines.append(f"{'sum':<24}{'':>15}{total:>15.2f}{'100.0 %':>9}")
    lines.append("in accelerator-seconds")
    return "\n".join(lines)


def amount(seconds: float | None, absent: str) -> str:
    """``12.34``, or the words for a missing value."""
    return absent if seconds is None else f"{seconds:.2f}"
