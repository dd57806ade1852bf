"""How long does training stand still when a worker is killed? Myriad against torchrun with DCP resume.

    make bench NAME=recovery          (python -m benchmarks.recovery [--kills 3] [--seed N] [--publish])

A worker, drawn with the seed, gets SIGKILL at a drawn moment of a drawn step, several times a run; the same draws
for both systems, on two layouts of 8 ranks: DDP (dp_replicate 8) and dp_shard 2 x tp 2 x pp 2. With t(n) the instant
at which the line of a finished step appears in the log (see ``observe``: one observer, one clock for both),

    downtime = t(first step of the new workers) - t(last step of the old ones) - one median step,

the median being the system's own (Myriad's has a snapshot in each). Steps done again are counted apart, and
``regained`` is the same difference up to the first step that had not been done before: what a user waits until the
run is where it was.

Same in both: model, mesh, batches, optimizer and step (the very modules; the losses printed are compared), the
durable checkpoint every 10 steps, fsynced, below one folder, one thread a worker. Different, because it is the
product: Myriad forks workers from a template that has imported everything, and restarts them from a snapshot in
memory taken every step, which costs about 1 s a GB of state a step.

torchrun's best settings, as found on two cores. One node, so no other agent is waited for. ``--monitor-interval
0.01`` (default 0.1) to notice the death at once. ``--shutdown-timeout 1``, since survivors of a dead peer leave
within 40 ms or never. c10d rendezvous on loopback, with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, because by default
the workers of a restart find the dead ones' addresses in the launcher's store and gloo cannot connect (seen with
torch 2.13: no restart succeeded; also pytorch issue 135712). One thread a worker. Files and byte code in the page
cache from a short run before. What is left is eight interpreters that import torch, 3.3 s of CPU time each, of which
a bare DDP script with DCP would need 3.1 s.

The two systems run one after the other, so figures are only comparable on a machine that is idle otherwise; the
load is printed for that reason.

The cross-check in the table is the time from the last sign of life to the first step of all ranks as Myriad's own
controller journaled it (``myriad report``), which differs from the observed one by the step that was in flight.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness import ROOT, RUNS, Aim, arguments, conclude, machine, say, table
from benchmarks.observe import Kill, Observer, Recovery, RunFailed, measure
from myriad.control.records import GenerationRecord, JobRecord, MemberRecord
from myriad.runtime.clock import HostClock
from myriad.runtime.paths import StateDir
from myriad.runtime.store import StateReader
from myriad.spec.job import JobSpec

PLACE = RUNS / "recovery"
RANKS, NODES, EVERY = 8, 4, 10
STEPS = 10_000  # more than any run gets to: it is ended after the last recovery
START_DEADLINE_S = 120.0  # to the first step, and for one recovery; torchrun needs 10 to 30 s
# After so many seconds of a run no further kill is made, so that four runs stay below 8 minutes together.
ENOUGH_S = 60.0
END_DEADLINE_S = 40.0
MODEL = {"layers": 4, "dim": 96, "heads": 6, "kv_heads": 2, "ffn_dim": 256, "vocab_size": 264}
PEER_ENVIRONMENT = {"GLOO_SOCKET_IFNAME": "lo", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
CLUSTER = {
    "name": "recovery",
    "node_types": {"small": {"accelerators": RANKS // NODES, "cpus": 1, "memory": "4GiB"}},
    "nodes": [
        {"name": f"n[0-{NODES - 1}]", "type": "small", "rack": "r0", "power_feed": "a", "leaf": "leaf0"}
    ],
    "fabric": {
        "node": {"bandwidth": "10GB/s"},
        "leaf": {"bandwidth": "5GB/s"},
        "core": {"bandwidth": "5GB/s"},
    },
}


@dataclass(frozen=True)
class Layout:
    """A case: its name in figures, in words, the layout, and the rank that writes a line a step."""

    key: str
    words: str
    layout: Mapping[str, int]
    teller: int


LAYOUTS = (
    Layout("ddp8", "DDP on 8 ranks", {"dp_replicate": 8}, 0),
    Layout("3d", "dp_shard 2 x tp 2 x pp 2", {"pp": 2, "dp_shard": 2, "tp": 2, "microbatches": 2}, 4),
)


@dataclass(frozen=True)
class Outcome:
    """One system on one layout. ``phases`` is where the time went, in seconds, one entry a kill."""

    system: str
    recoveries: Sequence[Recovery]
    median_step_s: float
    losses: Mapping[int, str]
    phases: Sequence[Mapping[str, float]]

    @property
    def downtime_s(self) -> float:
        return statistics.median(each.downtime_s for each in self.recoveries)


def main() -> int:
    """Measure both layouts, print the tables, and end with the aims."""
    parser = arguments("recovery", "Downtime after the SIGKILL of a worker: Myriad against torchrun.")
    parser.add_argument("--kills", type=int, default=3, help="in each of the four runs, if time allows")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1000))
    parser.add_argument("--layouts", nargs="*", default=[each.key for each in LAYOUTS], help="ddp8, 3d")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # take everything down first
    about = machine()
    say(f"{about}\nseed {given.seed}")
    prepare()
    found: dict[str, list[Outcome]] = {}
    for layout in LAYOUTS:
        if layout.key in given.layouts:
            kills = draw(random.Random(f"{given.seed}/{layout.key}"), given.kills)
            found[layout.key] = compare(layout, kills)
    findings = [line for key, outcomes in found.items() for line in words_of(key, outcomes)]
    say()
    for line in findings:
        say(line)
    command = f"python -m benchmarks.recovery --seed {given.seed} --kills {given.kills}"
    return conclude("recovery", aims(found), command, {"machine": about, "findings": findings}, given.publish)


def prepare() -> None:
    """A fresh folder with a data set of real text."""
    shutil.rmtree(PLACE, ignore_errors=True)
    PLACE.mkdir(parents=True)
    sources = sorted(str(file) for file in Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    myriad(PLACE, "data", "build", *sources, "--out", str(PLACE / "text"))


def draw(rng: random.Random, kills: int) -> list[Kill]:
    """One in each interval between checkpoints but the first, so that each restart has one to come back to.

    Not in an interval's first two steps, so that the workers have run a few steps since the kill before.
    """
    return [
        Kill(EVERY * i + rng.randrange(3, EVERY + 1), rng.randrange(RANKS), rng.random())
        for i in range(1, kills + 1)
    ]


def job_of(layout: Layout, checkpoints: Path) -> dict[str, Any]:
    """The job as both systems read it."""
    return {
        "name": layout.key,
        "nodes": NODES,
        "model": MODEL,
        "layout": layout.layout,
        "data": {"path": str(PLACE / "text"), "sequence_length": 128, "global_batch": 8},
        "optimizer": {"steps": STEPS, "learning_rate": 2e-3, "warmup_steps": 5},
        "checkpoint": {
            "directory": str(checkpoints),
            "every_steps": EVERY,
            "snapshot_every_steps": 1,
            "peer_every_steps": 10,
        },
    }


def compare(layout: Layout, kills: Sequence[Kill]) -> list[Outcome]:
    """Both systems, one after the other; a system that fails is left out, with its reason printed."""
    say(f"\n== {layout.words}, a durable checkpoint every {EVERY} steps")
    for kill in kills:
        say(f"drawn: SIGKILL of rank {kill.rank} {kill.part:.2f} steps after step {kill.step}")
    outcomes = []
    for run in (run_myriad, run_torchrun):
        began = time.monotonic()
        try:
            outcomes.append(run(layout, kills))
        except (RunFailed, OSError) as error:
            say(f"{run.__name__}: {error}")
        seconds, load = time.monotonic() - began, os.getloadavg()[0]
        say(f"({run.__name__.removeprefix('run_')}: {seconds:.0f} s, load {load:.1f} at its end)")
    show(outcomes)
    return outcomes


# ---------------------------------------------------------------- Myriad


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def myriad(folder: Path, *words: str) -> str:
    """Run one command to its end; its standard output."""
    command = [sys.executable, "-m", "myriad.cli.main", *words]
    done = subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True, check=False)
    if done.returncode:
        raise RunFailed(f"myriad {' '.join(words[:2])} failed: {done.stderr.strip()}")
    return done.stdout


class Myriad:
    """A job on an emulated cluster; reads pids and generations from the controller's journal."""

    name = "Myriad"

    def __init__(self, state: Path, job: str, teller: int) -> None:
        self._state, self._job = StateDir(state), job
        self.log = self._state.log_file(job, teller)

    def pid(self, rank: int) -> int:
        with StateReader(self._state) as reader:
            generation = reader.records(JobRecord)[self._job].generation
            members = reader.records(MemberRecord).values()
        for member in members:
            status = member.status
            if status is not None and status.generation == generation and rank in status.pids:
                return status.pids[rank]
        raise RunFailed(f"rank {rank} of {self._job} has no process")

    def restarted_s(self, number: int, observer: Observer) -> float | None:
        with StateReader(self._state) as reader:
            generations = [g for g in reader.records(GenerationRecord).values() if g.job == self._job]
        return generations[number].forked_s if len(generations) > number else None


def run_myriad(layout: Layout, kills: Sequence[Kill]) -> Outcome:
    """On four emulated nodes of two accelerators, by the ordinary commands."""
    folder = PLACE / f"{layout.key}-myriad"
    folder.mkdir()
    (folder / "cluster.yaml").write_text(json.dumps(CLUSTER))
    (folder / "job.yaml").write_text(json.dumps(job_of(layout, folder / "checkpoints")))
    state = ("--state", "state")
    try:
        myriad(folder, "up", "--cluster", "cluster.yaml", "--port", "0", *state)
        job = myriad(folder, "submit", "job.yaml", *state).strip()
        system = Myriad(folder / "state", job, layout.teller)
        recoveries, median_s, observer = measure(system, kills, HostClock(), START_DEADLINE_S, ENOUGH_S)
        report = json.loads(myriad(folder, "report", job, "--json", *state))
    finally:
        myriad(folder, "down", "--cancel-jobs", *state)
    phases = [{**each["seconds"], "cross-check": each["downtime_s"]} for each in report["recoveries"]]
    return Outcome(system.name, recoveries, median_s, losses_of(observer), phases)


# ---------------------------------------------------------------- torchrun


class Torchrun:
    """The peer's launcher in a process of its own; its workers are its children."""

    name = "torchrun"

    def __init__(self, folder: Path, job: Path) -> None:
        self.log = folder / "log"
        self.log.touch()
        self.command = [
            *(sys.executable, "-m", "torch.distributed.run"),
            *("--nnodes=1", f"--nproc-per-node={RANKS}", "--max-restarts=3", "--monitor-interval=0.01"),
            *("--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1"),
            *("--shutdown-timeout=1", str(ROOT / "benchmarks" / "torchrun_peer.py"), str(job)),
        ]
        with self.log.open("ab") as log, (folder / "errors").open("ab") as errors:
            self._process = subprocess.Popen(
                self.command,
                cwd=folder,
                env={**environment(), **PEER_ENVIRONMENT},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=errors,
            )

    def pid(self, rank: int) -> int:
        for pid in self._children():
            if f"RANK={rank}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                return pid
        raise RunFailed(f"rank {rank} has no process")

    def restarted_s(self, number: int, observer: Observer) -> float | None:
        return observer.line_s(f"begin {number}")

    def end(self) -> None:
        """SIGTERM, which torchrun passes on; then SIGKILL for whoever is left."""
        workers = self._children()
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(END_DEADLINE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for pid in workers:
            if (
                Path(f"/proc/{pid}/cmdline").exists()
                and b"torchrun_peer" in Path(f"/proc/{pid}/cmdline").read_bytes()
            ):
                os.kill(pid, signal.SIGKILL)

    def _children(self) -> list[int]:
        pid = self._process.pid
        return [
            int(word)
            for task in Path(f"/proc/{pid}/task").glob("*/children")
            for word in task.read_text().split()
        ]


@contextmanager
def torchrun(folder: Path, layout: Layout) -> Iterator[Torchrun]:
    folder.mkdir()
    job = folder / "job.json"
    job.write_text(JobSpec.model_validate(job_of(layout, folder / "checkpoints")).model_dump_json())
    system = Torchrun(folder, job)
    try:
        yield system
    finally:
        system.end()


def run_torchrun(layout: Layout, kills: Sequence[Kill]) -> Outcome:
    """The peer, after a short run of it that fills the page cache."""
    with torchrun(PLACE / f"{layout.key}-warm", layout) as system:
        variables = " ".join(f"{name}={value}" for name, value in PEER_ENVIRONMENT.items())
        say(f"$ OMP_NUM_THREADS=1 {variables} {' '.join(system.command)}")
        warm = Observer(system.log, HostClock())
        warm.until("a first step of the warm-up", lambda: bool(warm.steps), START_DEADLINE_S)
    with torchrun(PLACE / f"{layout.key}-torchrun", layout) as system:
        recoveries, median_s, observer = measure(system, kills, HostClock(), START_DEADLINE_S, ENOUGH_S)
    phases = []
    for number, each in enumerate(recoveries, 1):
        begin_s, restored_s = observer.line_s(f"begin {number}"), observer.line_s(f"restored {number}")
        assert begin_s is not None and restored_s is not None
        phases.append(
            {
                "kill to all joined": begin_s - each.killed_at_s,
                "model and restore": restored_s - begin_s,
                "first_step": each.first_at_s - restored_s,
            }
        )
    return Outcome(system.name, recoveries, median_s, losses_of(observer), phases)


# ---------------------------------------------------------------- words and figures


def losses_of(observer: Observer) -> dict[int, str]:
    return {seen.number: seen.loss for seen in observer.steps}


def show(outcomes: Sequence[Outcome]) -> None:
    """One row a kill, and where the time went."""
    rows = []
    for outcome in outcomes:
        for each in outcome.recoveries:
            rows.append(
                [
                    outcome.system,
                    f"{each.kill.rank}",
                    f"{each.last_step}",
                    f"{each.downtime_s:.2f}",
                    f"{each.redone}",
                    f"{each.regained_s:.2f}",
                    f"{outcome.median_step_s:.3f}",
                ]
            )
    table(["system", "rank", "last step", "downtime s", "redone steps", "regained s", "median step s"], rows)
    for outcome in outcomes:
        for phase in outcome.phases:
            parts = ", ".join(f"{name} {seconds:.2f}" for name, seconds in phase.items())
            say(f"{outcome.system}: {parts}")


def words_of(key: str, outcomes: Sequence[Outcome]) -> list[str]:
    """The figures of a layout as sentences for the page."""
    found = []
    for outcome in outcomes:
        redone = ", ".join(str(each.redone) for each in outcome.recoveries)
        downtimes = ", ".join(f"{each.downtime_s:.2f}" for each in outcome.recoveries)
        regained = ", ".join(f"{each.regained_s:.2f}" for each in outcome.recoveries)
        found.append(
            f"{key}, {outcome.system}: downtime {downtimes} s; redone steps {redone}; where it was after "
            f"{regained} s; median step {outcome.median_step_s:.3f} s"
        )
    if len(outcomes) == 2:
        both = outcomes[0].losses.keys() & outcomes[1].losses.keys()
        same = sum(outcomes[0].losses[step] == outcomes[1].losses[step] for step in both)
        found.append(f"{key}: {same} of {len(both)} steps that both ran have the same printed loss")
    return found


def aims(found: Mapping[str, Sequence[Outcome]]) -> list[Aim]:
    """The three of issue 2."""
    value = {key: {each.system: each.downtime_s for each in outcomes} for key, outcomes in found.items()}
    ddp_s = value.get("ddp8", {}).get("Myriad")
    note = "" if ddp_s is not None else "Myriad's run on this layout failed or was left out"
    result = [Aim("ddp8_worker_kill_downtime_s", "<= 3", ddp_s, note)]
    for layout in LAYOUTS:
        ours, theirs = (value.get(layout.key, {}).get(name) for name in ("Myriad", "torchrun"))
        name = f"{layout.key}_ratio_to_torchrun"
        if ours is None or theirs is None:
            missing = "Myriad" if ours is None else "torchrun"
            result.append(Aim(name, "<= 0.2", None, f"{missing}'s run on this layout failed or was left out"))
        else:
            result.append(Aim(name, "<= 0.2", ours / theirs))
    return result


if __name__ == "__main__":
    sys.exit(main())
