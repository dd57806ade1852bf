"""Waiting for a job: what is told meanwhile, and the exit code that stands for how it ended."""

from __future__ import annotations

import time
from typing import Any

from myriad.cli.client import Client, job_path
from myriad.cli.errors import CommandError, Exit
from myriad.cli.output import talk

POLL_S = 0.3  # between two looks at a job
PROGRESS_S = 2.0  # between two lines of progress
LOG_LINES = 10  # of the log shown when a job has failed
FINAL = ("SUCCEEDED", "FAILED", "CANCELLED", "TIMEOUT")


def exit_code(job: dict[str, Any]) -> int:
    """The job's own code: 0, the command's, 124 for its time limit, else 1."""
    match job["status"]:
        case "SUCCEEDED":
            return Exit.OK
        case "FAILED" if (job["exit_code"] or 0) > 0:
            return int(job["exit_code"])
        case "TIMEOUT":
            return Exit.TIMED_OUT
        case _:
            return Exit.FAILED


def wait(client: Client, job_id: str) -> dict[str, Any]:
    """Follow a job until it has ended, telling its events and progress on stderr; its last view.

    A job that this cluster can never run, or has too few nodes for, is cancelled; CommandError with the reason.
    """
    after, shown_step, shown_at = 0, 0, 0.0
    while True:
        job = client.get(job_path(job_id))
        after = tell_events(client, job_id, after)
        if job["status"] in FINAL:
            return job
        if job["status"] == "PENDING":
            refuse_hopeless(client, job_id)
        step, now = job["progress"]["step"], time.monotonic()
        if step != shown_step and now - shown_at >= PROGRESS_S:
            talk(progress_line(job))
            shown_step, shown_at = step, now
        time.sleep(POLL_S)


def tell_events(client: Client, job_id: str, after: int) -> int:
    """Tell the job's events after that row of the journal; the row to go on from."""
    for event in client.get("/events", job=job_id, after=after)["events"]:
        talk(event["text"])
        after = max(after, event["seq"])
    return after


def refuse_hopeless(client: Client, job_id: str) -> None:
    why = client.get(job_path(job_id, "/why"))
    if why["reason"] == "resources" and why["tier"] in ("never", "limit"):
        client.post(job_path(job_id, "/cancel"))
        raise CommandError(f"{job_id} was cancelled, since it cannot start: {why['detail']}")


def progress_line(job: dict[str, Any]) -> str:
    """``j1: step 40 of 200, loss 5.312, 1.2e+04 tokens/s``."""
    progress = job["progress"]
    parts = [f"step {progress['step']}" + (f" of {progress['steps']}" if progress["steps"] else "")]
    if progress["loss"] is not None:
        parts.append(f"loss {progress['loss']:.4f}")
    if progress["tokens_per_s"] is not None:
        parts.append(f"{progress['tokens_per_s']:,.0f} tokens/s")
    return f"{job['id']}: {', '.join(parts)}"


def tell_end(client: Client, job: dict[str, Any]) -> None:
    """How the job ended, with the last lines of the log of the rank that failed first."""
    talk(f"{job['id']} {job['status']}: {job['detail']}")
    if job["status"] != "FAILED":
        return
    ranks = [g["culprit_rank"] for g in job["generations"] if g["culprit_rank"] is not None]
    rank = ranks[-1] if ranks else None
    log = b"".join(client.stream(job_path(job["id"], "/logs"), rank=rank, tail=LOG_LINES))
    for line in log.decode(errors="replace").splitlines()[-LOG_LINES:]:
        talk(f"  | {line}")
