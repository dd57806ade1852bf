"""``myriad report JOB``: where a job's accelerator-seconds went, and what its failures cost."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from myriad.cli.options import Job, Json, State, complete_job

Html = Annotated[
    Path | None,
    typer.Option(
        "--html", metavar="FILE", help="Write it as one HTML file, readable offline.", show_default=False
    ),
]
Reference = Annotated[
    str | None,
    typer.Option(
        "--reference",
        metavar="JOB",
        help="Compare the losses with an unbroken run's.",
        show_default=False,
        autocompletion=complete_job,
    ),
]


def report(
    job: Job, html: Html = None, reference: Reference = None, state: State = None, json: Json = False
) -> None:
    """Account for every accelerator-second of a job."""
    from myriad.cli import settings
    from myriad.cli.client import Client, job_path
    from myriad.cli.output import document, talk

    client = Client(settings.load(state).state)
    found = client.get(job_path(job, "/report"), reference=reference)
    if html is not None:
        write_html(html, found)
        talk(f"wrote {html}")
    if json:
        document(found)
    elif html is None:
        tell(found)


def write_html(file: Path, found: dict[str, Any]) -> None:
    from myriad.cli.errors import CommandError
    from myriad.server.report_html import render_html

    try:
        file.write_text(render_html(found), encoding="utf-8")
    except OSError as error:
        raise CommandError(f"{file} cannot be written ({error.strerror}); give another file") from None


def tell(found: dict[str, Any]) -> None:
    """The headline, the ledger, the recoveries."""
    from myriad.cli.output import duration, say
    from myriad.server.ledger_table import ledger_rows, ledger_text
    from myriad.server.report_html import headline

    say(f"{found['job']}  {found['name']}  {found['status']}, {duration(found['wall_time_s'])} of wall time")
    say(headline(found))
    for name, key in (("MFU", "mfu"), ("ETTR", "ettr")):
        if found[key] is not None:
            say(f"{name} {100 * found[key]:.1f} %")
    if (equal := found.get("losses_equal_reference")) is not None:
        say(f"every loss {'equals' if equal else 'does NOT equal'} the reference run's, bit for bit")
    say()
    say(ledger_text(ledger_rows(found["predicted_ledger"], found["ledger"])))
    for recovery in found["recoveries"]:
        say()
        for line in recovery_lines(recovery):
            say(line)


def recovery_lines(recovery: dict[str, Any]) -> list[str]:
    """What failed, who took over, from where, and how long each phase took."""
    from myriad.cli.output import duration

    taken = "".join(f"; {new} takes over from {old}" for old, new in recovery["replacement"].items())
    tiers = ", ".join(f"{n} from {tier}" for tier, n in recovery["tier_counts"].items() if tier != "none")
    origin = f"restarted from step {recovery['restore_step']} ({tiers})" if tiers else "started again"
    known = {phase: seconds for phase, seconds in recovery["seconds"].items() if seconds is not None}
    phases = ", ".join(f"{phase} {duration(seconds)}" for phase, seconds in known.items())
    down = "" if recovery["downtime_s"] is None else f"down for {duration(recovery['downtime_s'])}: "
    return [
        f"generation {recovery['generation']}: {recovery['cause']}{taken}",
        f"  {origin}, {recovery['lost_steps']} steps done again",
        f"  {down}{phases}",
    ]
