"""``myriad show JOB``: one job in full."""

from __future__ import annotations

from typing import Any

from myriad.cli.options import Job, Json, State


def show(job: Job, state: State = None, json: Json = False) -> None:
    """Show a job: its state, and which processes run on which node."""
    from myriad.cli import settings
    from myriad.cli.client import Client, job_path
    from myriad.cli.output import document

    view = Client(settings.load(state).state).get(job_path(job))
    if json:
        document(view)
    else:
        tell(view)


def tell(view: dict[str, Any]) -> None:
    """Facts, the table of nodes and processes, and the starts so far."""
    from myriad.cli.output import STATUS_COLOURS, paint, say, table

    status = paint(view["status"], STATUS_COLOURS.get(view["status"]))
    say(f"{view['id']}  {view['name']}  {status} ({view['reason'].replace('_', ' ')})")
    for name, value in _facts(view):
        if value:
            say(f"{name + ':':<18}{value}")
    if view["members"]:
        say()
        table(("NODE", "RANKS", "PIDS", "STATE", "STEP"), map(_member, view["members"]))
    if len(view["generations"]) > 1:
        say()
        table(
            ("GENERATION", "BEGUN", "START", "FROM STEP", "TIERS", "ENDED BY"),
            map(_start, view["generations"]),
        )


def _facts(view: dict[str, Any]) -> list[tuple[str, str | None]]:
    from myriad.cli.follow import progress_line
    from myriad.cli.output import duration

    code, durable = view["exit_code"], view["durable_step"]
    return [
        ("detail", view["detail"]),
        ("alert", "; ".join(view["alerts"])),
        ("submitted", f"{view['submitted']}, waited {duration(view['waited_s'])}"),
        ("run time", None if view["run_s"] is None else duration(view["run_s"])),
        ("time limit", view["time_limit"]),
        ("ended", view["ended"]),
        ("exit code", None if code is None else str(code)),
        ("progress", progress_line(view).partition(": ")[2] if view["progress"]["step"] else None),
        ("checkpoint", None if durable is None else f"step {durable} is durable"),
        *((f"saved to {tier}", text) for tier, text in view["saves"].items()),
        ("copies", view["copies"]),
        ("restarts", str(view["restarts"]) if view["restarts"] else None),
        ("spares", ", ".join(view["spares"])),
        ("lost", ", ".join(view["lost"])),
    ]


def _member(member: dict[str, Any]) -> tuple[object, ...]:
    pids = member["pids"]
    return (
        member["node"],
        " ".join(pids),
        " ".join(map(str, pids.values())),
        member["state"],
        member["step"],
    )


def _start(generation: dict[str, Any]) -> tuple[object, ...]:
    from myriad.cli.output import duration

    tiers = ", ".join(f"{count} {tier}" for tier, count in generation["tiers"].items())
    return (
        generation["generation"],
        generation["begun"],
        duration(generation["start_s"]),
        generation["restore_step"],
        tiers,
        generation["cause"],
    )
