"""``myriad plan``: what a job will need and where its time will go, before it runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from myriad.cli.options import ClusterFile, JobFile, Json, State

if TYPE_CHECKING:
    from myriad.planner import Plan, Probe


def plan(file: JobFile, cluster: ClusterFile, state: State = None, json: Json = False) -> None:
    """Predict a job's memory, step time and ledger.

    Speeds are those measured for the state directory; without one, this machine is measured now (2 s).
    """
    from myriad.cli import settings
    from myriad.cli.errors import Exit
    from myriad.cli.files import read_cluster, read_job
    from myriad.cli.output import document, talk
    from myriad.planner import plan as predict

    job, spec = read_job(file), read_cluster(cluster)
    found = predict(job, spec, measured(settings.load(state).state))
    if json:
        document(as_document(found))
    else:
        tell(found)
    for refusal in found.refusals:
        talk(refusal)
    if found.refusals:
        raise typer.Exit(Exit.FAILED)


def measured(folder: Path) -> Probe:
    """The state's own probe, or a new one that is not kept."""
    import tempfile

    from myriad.cli.probe import probe
    from myriad.planner import Probe
    from myriad.runtime.files import read_json
    from myriad.runtime.paths import StateDir

    if (known := read_json(StateDir(folder).probe_file)) is not None:
        return Probe(**known)
    with tempfile.TemporaryDirectory(prefix="myriad-probe-") as scratch:
        return probe(Path(scratch))


def as_document(found: Plan) -> dict[str, Any]:
    """All fields of the plan, and what follows from them."""
    import dataclasses

    import msgspec

    document = dataclasses.asdict(found)
    document["ledger"] = {
        cause.value: amount for cause, amount in found.ledger.items() if cause.in_allocation
    }
    document["step"]["total_s"] = found.step.total_s
    document["saves"]["intervals"] = msgspec.structs.asdict(found.saves.intervals)
    return document | {"tokens_per_s": found.tokens_per_s, "wall_time_s": found.wall_time_s}


def tell(found: Plan) -> None:
    """The plan as facts, its predicted ledger, and what to know before using it."""
    from myriad.cli.output import duration, say, table
    from myriad.server.ledger_table import NOT_PREDICTED, amount
    from myriad.spec.causes import Cause
    from myriad.spec.units import format_bytes

    memory = found.memory
    table(
        (found.job, ""),
        (
            ("nodes", f"{found.node_count} of type {found.node_type}, {found.workers_per_node} workers each"),
            ("parameters", f"{found.parameters:,}"),
            ("steps", f"{found.steps:,} of {found.tokens_per_step:,} tokens"),
            (
                "host memory",
                f"{format_bytes(memory.in_host_memory)} of {format_bytes(memory.host_share)} a worker",
            ),
            ("checkpoint", format_bytes(found.checkpoint_bytes)),
            *((f"saved to {tier}", why) for tier, why in found.saves.sentences().items()),
            (
                "step time",
                f"at least {duration(found.step.total_s)}, {found.tokens_per_s:,.0f} tokens/s at most",
            ),
            (
                "MFU",
                ", ".join(f"at most {100 * mfu:.1f} % ({kind})" for kind, mfu in found.mfu_bound.items()),
            ),
            ("wall time", f"at least {duration(found.wall_time_s)}"),
        ),
    )
    say()
    lines = [
        cause for cause in found.ledger if cause.in_allocation and cause is not Cause.RUNNING_UNATTRIBUTED
    ]
    table(
        ("CAUSE", "ACCELERATOR-SECONDS"), ((c.value, amount(found.ledger[c], NOT_PREDICTED)) for c in lines)
    )
    say()
    for note in found.notes:
        say(f"note: {note}")
