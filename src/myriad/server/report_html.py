"""The report as one HTML page that opens anywhere, offline, in ten years: no script, no font, no request.

Method: :func:`render_html` turns the dictionary of :mod:`myriad.server.report` into sections; every string
that came from a user goes through ``escape``, and a content policy forbids whatever might slip through. Each
chart has a title, a description and a table with the same numbers. A report of 10,000 steps makes a page of
below 0.1 MB.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from myriad.server.ledger_table import NOT_MEASURED, NOT_PREDICTED, amount, ledger_rows
from myriad.server.report_gantt import gantt
from myriad.server.report_style import COLOURS, OUTSIDE_COLOUR, STYLE
from myriad.server.report_svg import Piece, Plot, Range, escape, number, strip, two_bars
from myriad.spec.causes import Cause
from myriad.spec.units import format_duration

MAX_ROWS = 200  # of a table of steps: beyond, rows are left out and said to be
POLICY = "default-src 'none'; style-src 'unsafe-inline'"
PHASES = ("detection", "fencing", "start", "rendezvous", "restore", "first_step")

Report = Mapping[str, Any]


def render_html(report: Report) -> str:
    """The whole page for a report as made by ``build_report`` (or read back from its JSON)."""
    sections = (
        _header(report),
        _facts(report),
        _ledger(report),
        _curves(report),
        _timeline(report),
        _recoveries(report),
        _footer(report),
    )
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{escape(POLICY)}">\n'
        f"<title>{escape(report['name'])}: Myriad report</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(section for section in sections if section)
        + "\n</main>\n</body>\n</html>\n"
    )


def headline(report: Report) -> str:
    """The one sentence, as plain text: what was owned, what it was worth, where most of the rest went."""
    owned, effective = report["accelerators"], report["effective_accelerators"]
    text = f"{number(owned)} accelerators owned"
    text += "" if effective is None else f", {number(effective, 3)} effective"
    loss = report["largest_loss"]
    return (
        text
        if loss is None
        else f"{text}; largest loss: {_words(loss['cause'])} {number(loss['accelerators'], 3)}"
    )


def _words(cause: str) -> str:
    return cause.replace("_", " ")


def _header(report: Report) -> str:
    status = report["status"]
    kind = {"SUCCEEDED": "good", "FAILED": "bad", "TIMEOUT": "bad", "CANCELLED": "bad"}.get(status, "plain")
    spares = report["spares"]
    shape = [f"job {report['job']}", f"{report['nodes']} nodes" + (f" + {spares} spare" if spares else "")]
    layout = report["layout"] or {}
    degrees = [f"{k} {layout[k]}" for k in ("pp", "dp_replicate", "dp_shard", "tp") if layout.get(k, 1) > 1]
    shape += [" x ".join(degrees)] if degrees else []
    shape += [report["detail"]] if report["detail"] else []
    said = escape(headline(report)).replace("; largest loss: ", "; largest loss: <i>")
    said += "</i>" if "<i>" in said else ""
    return (
        f'<header><p class="soft small">Myriad report</p><div class="top"><h1>{escape(report["name"])}</h1>'
        f'<span class="pill {kind}">{escape(status)}</span></div>'
        f'<p class="soft">{escape(", ".join(shape))}</p><p class="headline">{said}</p></header>'
    )


def _facts(report: Report) -> str:
    facts: list[tuple[str, str, str]] = [
        ("Wall time", format_duration(report["wall_time_s"]), "from grant to release"),
        ("ETTR", _percent(report["ettr"]), "productive share of running time"),
    ]
    if report["mfu"] is not None:
        peak = f"of {number(report['peak_flops_per_s'] / 1e9)} GFLOP/s peak per accelerator"
        facts.append(("MFU", _percent(report["mfu"]), peak))
    downtimes = [r["downtime_s"] for r in report["recoveries"] if r["downtime_s"] is not None]
    note = f"{format_duration(sum(downtimes))} down in all" if downtimes else "no failure"
    facts.append(("Recoveries", str(len(report["recoveries"])), note))
    if report["losses"]:
        redone = report["redone_steps"]
        facts.append(
            ("Steps", str(len(report["losses"])), f"{redone} executed again" if redone else "none again")
        )
    if report["sample_ids_seen_once"] is not None:
        good = report["sample_ids_seen_once"]
        facts.append(("Each sample once", "yes" if good else "NO", "counting each step's last execution"))
    if "losses_equal_reference" in report:
        good = report["losses_equal_reference"]
        facts.append(("Bit-identical", "yes" if good else "NO", "every loss, to the unbroken run"))
    items = "".join(
        f'<div class="fact"><dt>{name}</dt><dd>{escape(value)}<span class="note">{escape(note)}</span></dd></div>'
        for name, value, note in facts
    )
    return f'<dl class="facts">{items}</dl>'


def _percent(share: float | None) -> str:
    return "not measured" if share is None else f"{100 * share:.3g} %"


def _ledger(report: Report) -> str:
    rows = ledger_rows(report["predicted_ledger"], report["ledger"])
    total = sum(measured or 0.0 for _, _, measured in rows)
    if total <= 0:
        return ""
    most = max(max(predicted or 0.0, measured or 0.0) for _, predicted, measured in rows)
    planned = report["predicted_ledger"] is not None
    pieces, at = [], 0.0
    for cause, _, measured in rows:
        share = measured or 0.0
        title = f"{_words(cause)}: {share:.2f} accelerator-seconds, {100 * share / total:.1f} %"
        pieces.append(Piece(at, at + share, COLOURS.get(cause, OUTSIDE_COLOUR), title))
        at += share
    body = "".join(_ledger_row(row, total, most, planned) for row in rows)
    head = '<th scope="col">Predicted</th>' if planned else ""
    foot = "<td></td>" if planned else ""
    key = "measured, and predicted below it (paler)" if planned else "measured"
    return (
        '<section class="card"><h2>Where every accelerator-second went</h2>'
        f'<p class="soft small">{number(total)} accelerator-seconds = {report["wall_time_s"]:.2f} s x '
        f"{number(report['accelerators'])} accelerators</p>"
        f"{strip(pieces, total, 'The ledger as one bar; the table below has the numbers', 'stack')}"
        f'<div class="scroll"><table><thead><tr><th scope="col">Cause</th>{head}<th scope="col">Measured</th>'
        f'<th scope="col">Share</th><th scope="col" class="left bars">{key}</th></tr></thead><tbody>{body}</tbody>'
        f'<tfoot><tr><th scope="row" class="left">sum</th>{foot}<td>{total:.2f}</td><td>100 %</td>'
        '<td class="bars"></td></tr></tfoot></table></div></section>'
    )


def _ledger_row(row: tuple[str, float | None, float | None], total: float, most: float, planned: bool) -> str:
    cause, predicted, measured = row
    colour = COLOURS.get(cause, OUTSIDE_COLOUR)
    left = f"<td>{_or_words(predicted, NOT_PREDICTED)}</td>" if planned else ""
    share = "" if measured is None else f"{100 * measured / total:.1f} %"
    return (
        f'<tr><th scope="row" title="{escape(Cause(cause).meaning)}"><span class="key" style="background:{colour}">'
        f"</span>{_words(cause)}</th>{left}<td>{_or_words(measured, NOT_MEASURED)}</td><td>{share}</td>"
        f'<td class="bars">{two_bars(predicted, measured, most, colour)}</td></tr>'
    )


def _or_words(seconds: float | None, absent: str) -> str:
    text = amount(seconds, absent)
    return text if seconds is not None else f'<span class="soft small">{text}</span>'


def _curves(report: Report) -> str:
    if not report["executions"]:
        return (
            '<section class="card"><h2>Steps</h2><p class="soft">This job sends no step reports, so its losses, '
            "throughput and waits are not known. A few lines of <code>myriad.training.session</code> in its loop "
            "add them.</p></section>"
        )
    loss, rate = _loss_curve(report), _throughput(report)
    return f'<div class="pair">{loss}{rate}</div>{_steps_table(report)}'


def _loss_curve(report: Report) -> str:
    counted = ((float(e["step"]), _real(e["loss"])) for e in report["executions"] if e["kept"])
    kept = sorted((step, loss) for step, loss in counted if loss is not None)
    if not kept:
        return ""
    reference = _points(report.get("reference_losses") or [])
    values = [loss for _, loss in kept + reference]
    plot = Plot(
        "Loss by step",
        f"{len(kept)} steps, loss from {number(kept[0][1])} to {number(kept[-1][1])}; failures are marked.",
        Range(0.0, max(kept[-1][0], 1.0)),
        Range.around(values),
    )
    legend = ['<li><span class="swatch"></span>last execution of each step</li>']
    for index, recovery in enumerate(report["recoveries"], 1):
        title = f"failure {index} after step {recovery['failed_step']}, restarted from step {recovery['restore_step']}"
        plot.band(recovery["restore_step"], recovery["failed_step"], title)
        plot.mark(recovery["failed_step"], str(index), title)
    plot.line(kept, "series")
    if reference:
        plot.line(reference, "reference")
        legend.append('<li><span class="swatch reference"></span>unbroken run</li>')
    return _chart(
        "Loss", "mean over the tokens of each step", plot, legend + _failure_legend(report, "redone")
    )


def _throughput(report: Report) -> str:
    executions = report["executions"]
    has_tokens = any(e["tokens_per_s"] for e in executions)
    unit = "tokens/s" if has_tokens else "steps/s"
    end_s = max(max(a["released_s"] for a in report["allocations"]), executions[-1]["at_s"])
    rates = [_rate(e, has_tokens) for e in executions]
    known = [rate for rate in rates if math.isfinite(rate)]
    plot = Plot(
        f"Throughput, {unit}, by time since the grant",
        f"Median {number(median(known) if known else math.nan)} {unit}; gaps are failures and recoveries.",
        Range(0.0, end_s),
        Range.around(rates, floor=0.0),
        "s",
    )
    moments = {g["generation"]: g for g in report["generations"]}
    for index, recovery in enumerate(report["recoveries"], 1):
        failed_s = moments[recovery["generation"]]["failed_s"]
        if failed_s is not None:
            down_s = recovery["downtime_s"] or 0.0
            title = f"failure {index}: {format_duration(down_s)} to the next finished step"
            plot.band(failed_s, failed_s + down_s, title)
            plot.mark(failed_s, str(index), title)
    for generation in moments:
        own = [e for e in executions if e["generation"] == generation]
        for kept, style in ((False, "thrown"), (True, "series")):
            points = [
                point
                for e in own
                if e["kept"] is kept
                for point in (
                    (e["at_s"] - e["wall_s"], _rate(e, has_tokens)),
                    (e["at_s"], _rate(e, has_tokens)),
                )
            ]
            plot.line(points, style)
    legend = ['<li><span class="swatch"></span>steps that counted</li>']
    if not all(e["kept"] for e in executions):
        legend.append('<li><span class="swatch thrown"></span>steps done again later</li>')
    return _chart(
        "Throughput", f"{unit} by time since the grant", plot, legend + _failure_legend(report, "down")
    )


def _rate(execution: Mapping[str, Any], has_tokens: bool) -> float:
    """NaN, which leaves a gap, where the rank that reports tokens died before it could."""
    if has_tokens:
        return float(execution["tokens_per_s"] or math.nan)
    return 1 / execution["wall_s"] if execution["wall_s"] > 0 else math.nan


def _failure_legend(report: Report, band: str) -> list[str]:
    if not report["recoveries"]:
        return []
    return [
        '<li><span class="swatch mark"></span>failure</li>',
        f'<li><span class="swatch band"></span>{band}</li>',
    ]


def _chart(title: str, subtitle: str, plot: Plot, legend: Sequence[str]) -> str:
    return (
        f'<section class="card"><h2>{title}</h2><p class="soft small">{escape(subtitle)}</p>{plot.render()}'
        f'<ul class="legend">{"".join(legend)}</ul></section>'
    )


def _steps_table(report: Report) -> str:
    executions = report["executions"]
    shown = executions[:: -(-len(executions) // MAX_ROWS)]
    rows = "".join(
        f'<tr><th scope="row">{e["step"]}</th><td>{e["generation"]}</td><td>{"yes" if e["kept"] else "done again"}</td>'
        f"<td>{_cell(_real(e['loss']), '#.6g')}</td><td>{e['wall_s']:.4f}</td><td>{_cell(e['tokens_per_s'], ',.0f')}</td>"
        f"<td>{e['at_s']:.2f}</td></tr>"
        for e in shown
    )
    some = "" if len(shown) == len(executions) else f", one in {-(-len(executions) // MAX_ROWS)}"
    columns = ("Step", "Generation", "Counted", "Loss", "Seconds", "Tokens/s", "Finished at, s")
    return (
        f'<section class="card"><h2>Steps</h2><details><summary>The numbers behind the curves '
        f"({len(executions)} executions{some})</summary>{_table(columns, rows)}</details></section>"
    )


def _timeline(report: Report) -> str:
    chart = gantt(report)
    if not chart:
        return ""
    rows = "".join(
        f'<tr><th scope="row">{event["at_s"]:.2f}</th><td class="left">{escape(event["event"])}</td>'
        f"<td>{'' if event['generation'] is None else event['generation']}</td>"
        f'<td class="left wrap">{escape(event["detail"])}</td></tr>'
        for event in report["timeline"]
    )
    columns = ("Seconds", "Event", "Generation", "Detail")
    return (
        '<section class="card"><h2>Timeline</h2><p class="soft small">what each node did, in seconds since the grant'
        f"</p>{chart}<details><summary>All {len(report['timeline'])} events</summary>"
        f"{_table(columns, rows, left=(1, 3))}</details></section>"
    )


def _recoveries(report: Report) -> str:
    if not report["recoveries"]:
        return ""
    rows = "".join(_recovery_row(index, r) for index, r in enumerate(report["recoveries"], 1))
    phases = [phase.replace("_", " ").capitalize() for phase in PHASES]
    columns = ("#", "Failure", "Restored", "Redone steps", *phases, "Down")
    return (
        '<section class="card"><h2>Recoveries</h2><p class="soft small">seconds by phase; down: from the last sign of '
        f"life to the end of the first new step</p>{_table(columns, rows, left=(1, 2))}</section>"
    )


def _recovery_row(index: int, r: Mapping[str, Any]) -> str:
    moves = ", ".join(f"{new} took over from {lost}" for lost, new in r["replacement"].items())
    tiers = ", ".join(
        f"{count} ranks from {tier}" for tier, count in r["tier_counts"].items() if tier != "none"
    )
    origin = f"step {r['restore_step']}" if r["restore_step"] else "the beginning"
    phases = "".join(f"<td>{_cell(r['seconds'][phase], '.3f')}</td>" for phase in PHASES)
    return (
        f'<tr><th scope="row">{index}</th>'
        f'<td class="left wrap">{escape(r["cause"] or "not said")}'
        f'<br><span class="soft small">{escape(moves or "same nodes")}</span></td>'
        f'<td class="left wrap">from {origin}<br><span class="soft small">{escape(tiers)}</span></td>'
        f"<td>{r['lost_steps']}</td>{phases}<td><b>{_cell(r['downtime_s'], '.3f')}</b></td></tr>"
    )


def _table(columns: Sequence[str], rows: str, left: Sequence[int] = ()) -> str:
    head = "".join(
        f'<th scope="col"{" class=left" if index in left else ""}>{name}</th>'
        for index, name in enumerate(columns)
    )
    return f'<div class="scroll" tabindex="0"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'


def _footer(report: Report) -> str:
    lines = [
        "Effective accelerators: useful compute accelerator-seconds over wall time.",
        "ETTR: productive time over the running time of the accelerators that held ranks.",
    ]
    if report["mfu"] is not None:
        lines.append("MFU: model FLOPs of the steps that counted over wall time x accelerators owned x peak.")
    return f"<footer>{''.join(f'<p>{line}</p>' for line in lines)}</footer>"


def _real(loss: str | None) -> float | None:
    return None if loss is None else float.fromhex(loss)


def _points(losses: Sequence[str | None]) -> list[tuple[float, float]]:
    found = [(float(step), _real(loss)) for step, loss in enumerate(losses, 1)]
    return [(step, loss) for step, loss in found if loss is not None]


def _cell(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)
