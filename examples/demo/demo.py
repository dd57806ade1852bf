"""The demo: train on four emulated nodes, lose one, carry on, and account for every second.

    make demo [SEED=7]

It drives the ordinary commands on an ordinary cluster and knows nothing that they do not: which node dies and
after which step is drawn from the seed, and on a terminal you may kill something else first. A second, unbroken
run of the same job is the reference. About 2 minutes on 2 cores.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from myriad.cli.client import Client, job_path
from myriad.cli.follow import tell_events
from myriad.cli.show import tell as show_job

HERE = Path(__file__).resolve().parent
CLUSTER = HERE.parent / "clusters" / "laptop.yaml"
JOB = HERE / "job.yaml"
FINAL = ("SUCCEEDED", "FAILED", "CANCELLED", "TIMEOUT")
POLL_S = 0.3
# Long enough for a person to read the table of processes and kill one.
PERSON_S = 15.0
JOB_DEADLINE_S = 600.0


def main() -> int:
    """Run the demo; 0 when the broken run equals the unbroken one bit for bit."""
    parser = argparse.ArgumentParser(description="Train, lose a node, carry on.")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1000))
    parser.add_argument("--runs", type=Path, default=Path("runs/demo"))
    arguments = parser.parse_args()
    place: Path = arguments.runs.resolve()
    prepare(place)
    with cluster(place):
        client = Client(place / "state")
        say(f"\n== 3. Train, and lose a node (seed {arguments.seed})")
        broken = submit(place)
        watch_and_break(client, place, broken, random.Random(arguments.seed))
        say("\n== 4. The same job again, unbroken")
        repair(client, place)
        reference = submit(place)
        Follower(client, reference).until(lambda view: False)
        say("\n== 5. What it cost")
        return conclude(client, place, broken, reference)


def say(text: str) -> None:
    print(text, flush=True)


def myriad(place: Path, *words: str, quiet: bool = False) -> str:
    """Run one command on the demo's state and show it; its standard output."""
    if not quiet:
        say(f"$ myriad {' '.join(words)}")
    command = [sys.executable, "-m", "myriad.cli.main", *words]
    done = subprocess.run(command, cwd=place, stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout


def prepare(place: Path) -> None:
    """A fresh folder with the dataset, the job and the cluster file; the plan, printed."""
    say("Emulated here: five nodes are five groups of processes on this one machine, their accelerators are")
    say("shares of its CPU, and their memory and network are its own. The control plane, the training and")
    say("the recovery are the real ones. Not yet run on a GPU.")
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    shutil.copy(CLUSTER, place / "cluster.yaml")
    shutil.copy(JOB, place / "job.yaml")
    (place / "data").mkdir()
    say("\n== 1. Real text: the sources of Python's standard library")
    source = str(Path(sysconfig.get_paths()["stdlib"]))
    sources = sorted(str(p) for p in Path(source).glob("*.py"))
    say(f"$ myriad data build {source}/*.py --out data/stdlib")
    say(myriad(place, "data", "build", *sources, "--out", "data/stdlib", quiet=True).strip())


@contextmanager
def cluster(place: Path) -> Iterator[None]:
    """The emulated cluster, taken down at the end whatever happens."""
    say("\n== 2. The cluster and the plan")
    state = ("--state", "state")
    try:
        say(myriad(place, "up", "--cluster", "cluster.yaml", *state).strip())
        say(myriad(place, "plan", "job.yaml", "--cluster", "cluster.yaml", *state).rstrip())
        yield
    finally:
        say(myriad(place, "down", "--cancel-jobs", *state).strip())


def submit(place: Path) -> str:
    return myriad(place, "submit", "job.yaml", "--state", "state").strip()


class Follower:
    """Follows one job and tells each of its events and every fifth step once."""

    def __init__(self, client: Client, job: str) -> None:
        self._client = client
        self._job = job
        self._after = 0
        self._shown = 0

    def look(self) -> dict[str, Any]:
        """The job now; what is new is told."""
        view = self._client.get(job_path(self._job))
        self._after = tell_events(self._client, self._job, self._after)
        progress = view["progress"]
        if progress["step"] >= self._shown + 5 and progress["loss"] is not None:
            self._shown = progress["step"]
            say(f"  step {self._shown} of {progress['steps']}, loss {progress['loss']:.4f}")
        return view

    def until(
        self, done: Callable[[dict[str, Any]], bool], deadline_s: float = JOB_DEADLINE_S
    ) -> dict[str, Any]:
        """Follow until ``done`` or the end of the job."""
        end = time.monotonic() + deadline_s
        while True:
            view = self.look()
            if view["status"] in FINAL or done(view):
                return view
            if time.monotonic() > end:
                raise TimeoutError(
                    f"{self._job} is still {view['status']} after {deadline_s:g} s: {view['detail']}"
                )
            time.sleep(POLL_S)


def watch_and_break(client: Client, place: Path, job: str, draw: random.Random) -> None:
    """Show the processes; let a person kill one, or kill a drawn node after a drawn step."""
    steps = int(yaml.safe_load(JOB.read_text())["optimizer"]["steps"])
    follower = Follower(client, job)
    view = follower.until(lambda view: view["progress"]["step"] >= 1)
    show_job(view)
    node, step = draw.choice(view["nodes"]), draw.randrange(steps // 4 + 1, steps // 2)
    if sys.stdout.isatty():
        say("\nkill -9 any of these, or wait and I kill a node")
        quiet_until = time.monotonic() + PERSON_S
        follower.until(lambda view: view["restarts"] > 0 or time.monotonic() > quiet_until)
    view = follower.until(lambda view: view["restarts"] > 0 or view["progress"]["step"] >= step)
    if view["restarts"]:
        say("you have killed something: watch it recover")
    elif view["status"] not in FINAL:
        say(myriad(place, "inject", "kill-node", node, "--state", "state").strip())
    follower.until(lambda view: False)


def repair(client: Client, place: Path) -> None:
    """What a repaired machine looks like to the cluster: lost nodes come back into service."""
    for node in client.get("/nodes")["nodes"]:
        if node["state"] == "down":
            say(myriad(place, "undrain", node["name"], "--state", "state").strip())


def conclude(client: Client, place: Path, broken: str, reference: str) -> int:
    """Compare, account, write the two reports."""
    words = ("report", broken, "--reference", reference, "--state", "state")
    found = json.loads(myriad(place, *words, "--json", quiet=True))
    hashes = [result_hash(place, job) for job in (broken, reference)]
    found["final_sha256"], found["reference_final_sha256"] = hashes
    (place / "report.json").write_text(json.dumps(found, indent=1))
    myriad(place, *words, "--html", "report.html", quiet=True)
    say(myriad(place, *words).rstrip())
    for recovery in found["recoveries"]:
        tiers = ", ".join(f"rank {rank} {tier}" for rank, tier in enumerate(recovery["tiers"]))
        say(f"  restored from: {tiers}")
    equal = bool(found["losses_equal_reference"]) and hashes[0] == hashes[1] and hashes[0] is not None
    sign = "=" if equal else "!="
    verdict = "every loss equal to the unbroken run, bit for bit" if equal else "the runs DIFFER"
    say(f"\n{verdict}; final weights sha256 {hashes[0]} {sign} {hashes[1]}")
    say(f"every sample consumed exactly once: {'yes' if found['sample_ids_seen_once'] else 'NO'}")
    say(f"wrote {place / 'report.json'} and {place / 'report.html'}")
    say('\nnext, after ". .venv/bin/activate":')
    say(
        "  your own script       cd examples/any_command && myriad run job.yaml --cluster ../clusters/laptop.yaml"
    )
    say("  plan before you run   myriad plan examples/demo/job.yaml --cluster examples/clusters/laptop.yaml")
    say("  how it works          docs/ARCHITECTURE.md")
    return 0 if equal and found["sample_ids_seen_once"] else 1


def result_hash(place: Path, job: str) -> str | None:
    """The hash of all parameters and optimizer state at the end of a job."""
    path = place / "state" / "jobs" / job / "result.json"
    return str(json.loads(path.read_text())["final_sha256"]) if path.exists() else None


if __name__ == "__main__":
    sys.exit(main())
