"""``python -m benchmarks.data``: how fast the loader reads, how late its latest batches are, how soon it resumes.

One file of 1.2 GB of uint16 tokens in the page cache (larger than any CPU cache here), samples of 2,048 tokens in shuffled
order, batches of 8, one core. Beside it, in turns in the same run: torchdata's StatefulDataLoader in process and with
worker processes, litdata and mosaicml-streaming, each in a virtual environment of its own made for the run, with the same
tokens in its own format and the settings its documentation names for speed (``benchmarks.data_peers``). Medians of the
rounds. A peer that cannot be installed or does not run has no value and a note that says why.

In-process loaders are pinned to one core. Those with workers have all cores, and are named so.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import struct
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.data_peers import PEERS, S, timed
from benchmarks.harness import ROOT, RUNS, Aim, arguments, conclude, machine, say, table
from myriad.storage.datasets.index import HEADER, MAGIC, VERSION
from myriad.storage.datasets.loader import Loader, TokenDataset

TOKENS = 600_000_000
BATCH = 8
STEP = 10_000_000  # to resume at
RESUMES = 50
SECONDS = 4.0  # of a round
WORKERS = 2
# Limits: installing a peer, a peer's part of a round, and when no new round begins.
INSTALL_S, PEER_S, TOTAL_S = 240.0, 100.0, 420.0
# Whether a peer shares this project's torch: it does where pip then finds all it needs. What imports torchvision takes
# the pair of both that pip finds, which is several GB.
PACKAGES = {"torchdata": True, "litdata": True, "mosaicml-streaming": False}
PIP = ("-m", "pip", "install", "--quiet", "--disable-pip-version-check")


@dataclass
class Found:
    """A loader's rounds, or why there are none."""

    name: str
    rounds: list[dict[str, Any]] = field(default_factory=list)
    note: str = ""

    def median(self, key: str) -> float | None:
        values = [each[key] for each in self.rounds if key in each]
        return statistics.median(values) if values else None


@contextmanager
def one_core() -> Iterator[None]:
    """This process, and what it starts meanwhile, on one core."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(before)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def write_tokens(folder: Path) -> None:
    """``tokens.bin`` of random tokens below 50,000, and its index as of one document."""
    draw = np.random.default_rng(1)
    with (folder / "tokens.bin").open("wb") as file:
        for _ in range(TOKENS // 10_000_000):
            draw.integers(0, 50_000, 10_000_000, dtype=np.uint16).tofile(file)
    index = HEADER.pack(MAGIC, VERSION, 8, 1, 2) + struct.pack("<iqqq", TOKENS, 0, 0, 1)
    (folder / "tokens.idx").write_bytes(index)


def ours(folder: Path, resume: bool) -> dict[str, Any]:
    """A round of our loader, measured as the peers are."""
    with one_core(), TokenDataset(folder / "tokens", S) as dataset:
        loader = Loader(dataset, 7, BATCH, 0, 1)
        found = timed(lambda: (loader.next() for _ in repeat(None)), BATCH, SECONDS)
        if resume:
            found["resume_s"] = statistics.median(resumes(folder))
    return found


def resumes(folder: Path) -> Iterator[float]:
    """Seconds from the prefix and a position to the first batch; each time at another step, so nothing is cached."""
    for number in range(RESUMES):
        begin = time.perf_counter()
        with TokenDataset(folder / "tokens", S) as dataset:
            Loader(dataset, 7, BATCH, 0, 1, BATCH * (STEP + 1_000 * number)).next()
            yield time.perf_counter() - begin


class Environment:
    """A peer's own Python, which looks for packages among this project's too if the peer shares them."""

    def __init__(self, package: str, folder: Path) -> None:
        place = folder / "environments" / package
        self.python, self.note, self.versions = place / "bin" / "python", "", package
        try:
            _run([sys.executable, "-m", "venv", str(place)], INSTALL_S)
            if PACKAGES[package]:
                (own,) = place.glob("lib/python*/site-packages")
                (own / "shared.pth").write_text(sysconfig.get_path("purelib") + "\n")
            _run([str(self.python), *PIP, package], INSTALL_S)
            script = (
                f"from importlib.metadata import version as v; print(v('{package}'), 'torch', v('torch'))"
            )
            self.versions = f"{package} {_run([str(self.python), '-c', script], 60).strip()}"
        except (subprocess.SubprocessError, OSError) as error:
            self.note = f"{package} could not be installed: {_why(error)}"

    def round(self, name: str, folder: Path, workers: int, resume: bool) -> dict[str, Any]:
        """Raises SubprocessError where the peer does not run."""
        command = [str(self.python), "-P", str(ROOT / "benchmarks" / "data_peers.py"), name, str(folder)]
        command += ["--batch", str(BATCH), "--workers", str(workers), "--seconds", str(SECONDS)]
        command += ["--step", str(STEP if resume else 0)]
        say(f"$ {' '.join(command)}")
        if workers:
            return _last_line(_run(command, PEER_S))
        with one_core():
            return _last_line(_run(command, PEER_S))


def _run(command: list[str], limit_s: float) -> str:
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=limit_s,
        check=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    return done.stdout


def _last_line(text: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(text.strip().splitlines()[-1])
    return found


def _why(error: Exception) -> str:
    if isinstance(error, subprocess.CalledProcessError):
        lines = [line for line in (error.stderr or "").strip().splitlines() if line.strip()]
        told = [line for line in lines if not line.startswith("WARNING")]
        return (told or lines or [f"exit code {error.returncode}"])[-1][:200]
    if isinstance(error, subprocess.TimeoutExpired):
        return f"it took more than {error.timeout:.0f} s"
    return f"{type(error).__name__}: {error}"[:200]


SETTINGS = [(name, workers) for name in PACKAGES for workers in (0, WORKERS)]


def measure(folder: Path, rounds: int) -> tuple[Found, dict[tuple[str, int], Found], list[str]]:
    """Ours, the peers by (package, workers), and the versions of the peers."""
    began = time.monotonic()
    say("installing the peers, each in an environment of its own")
    with ThreadPoolExecutor(len(PACKAGES)) as pool:
        places = dict(zip(PACKAGES, pool.map(Environment, PACKAGES, repeat(folder)), strict=False))
    say(f"installed after {time.monotonic() - began:.0f} s")
    mine = Found("myriad, one core")
    peers = {
        (name, workers): Found(
            f"{name}, {f'{workers} workers, all cores' if workers else 'in process, one core'}",
            note=places[name].note,
        )
        for name, workers in SETTINGS
    }
    longest_s = 0.0
    for number in range(rounds):
        round_began = time.monotonic()
        if number and round_began - began + longest_s > TOTAL_S:
            say(f"no time for more than {number} of {rounds} rounds")
            break
        mine.rounds.append(ours(folder, True))
        for (name, workers), found in peers.items():
            if found.note or time.monotonic() - began > TOTAL_S:
                continue
            try:
                found.rounds.append(places[name].round(name, folder, workers, number == 0))
            except (subprocess.SubprocessError, OSError, ValueError) as error:
                found.note = f"{found.name} did not run: {_why(error)}"
        longest_s = max(longest_s, time.monotonic() - round_began)
        say(f"round {number + 1} of {rounds}: {time.monotonic() - began:.0f} s")
    return mine, peers, [place.versions for place in places.values() if not place.note]


def told(found: Found) -> list[str]:
    if not found.rounds:
        return [found.name, "-", "-", "-", "-"]
    rate, p50, p99 = (found.median(key) for key in ("tokens_per_s", "p50_s", "p99_s"))
    assert rate is not None and p50 is not None and p99 is not None
    resume = found.median("resume_s")
    return [
        found.name,
        f"{rate / 1e6:.1f}",
        f"{1e3 * p50:.3f}",
        f"{1e3 * p99:.3f}",
        "-" if resume is None else f"{1e3 * resume:.2f}",
    ]


def aims(mine: Found, peers: dict[tuple[str, int], Found]) -> list[Aim]:
    rate = mine.median("tokens_per_s")
    assert rate is not None
    found = [
        Aim("tokens_per_s_one_core", ">= 1e8", rate),
        Aim("resume_at_step_10M_s", "<= 0.001", mine.median("resume_s")),
    ]
    best: dict[str, float] = {}
    for (name, _), peer in peers.items():
        if (value := peer.median("tokens_per_s")) is not None:
            best[name] = max(value, best.get(name, 0.0))
    for name in dict.fromkeys(name for name, _ in peers):
        notes = [peer.note for (of, _), peer in peers.items() if of == name and peer.note]
        ratio = rate / best[name] if name in best else None
        found.append(
            Aim(f"ratio_to_{name}", ">= 5", ratio, "" if name in best else "; ".join(dict.fromkeys(notes)))
        )
    ratio = rate / max(best.values()) if best else None
    found.append(Aim("ratio_to_best_peer", ">= 5", ratio, "" if best else "no peer ran"))
    return found


def findings(mine: Found, peers: dict[tuple[str, int], Found], versions: list[str]) -> list[str]:
    lines = [
        f"{TOKENS:,} uint16 tokens ({2 * TOKENS / 1e9:.1f} GB), S = {S}, batches of {BATCH}; {', '.join(versions)}"
    ]
    for found in (mine, *peers.values()):
        if not found.rounds:
            lines.append(found.note or f"{found.name}: no time was left")
            continue
        _, rate, p50, p99, resume = told(found)
        line = f"{found.name}: {rate} million tokens/s; a batch in {p50} ms, 99 of 100 below {p99} ms"
        first = found.rounds[0]
        if "resumed_at" in first:
            line += f"; resumed in {resume} ms, {first['resumed_at']:,} batches into an epoch"
            line += "" if first["same_batch"] else ", with ANOTHER batch than the one that followed"
        elif resume != "-":
            line += f"; resumed at step {STEP:,} in {resume} ms"
        elif "resume_error" in first:
            line += f"; could not be resumed: {first['resume_error']}"
        lines.append(line)
    lines += [f"{name}: {PEERS[name].__doc__}" for name in PACKAGES]
    return lines


def main() -> int:
    parser = arguments("data", __doc__ or "")
    parser.add_argument("--rounds", type=int, default=3, help="of each loader, in turns, if time allows")
    given = parser.parse_args()
    about = machine()
    RUNS.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="data-", dir=RUNS))
    try:
        write_tokens(folder)
        mine, peers, versions = measure(folder, given.rounds)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    heads = ("loader", "million tokens/s", "batch, median ms", "batch, p99 ms", "resume ms")
    table(heads, [told(found) for found in (mine, *peers.values())])
    lines = findings(mine, peers, versions)
    say()
    for line in lines:
        say(line)
    command = f"python -m benchmarks.data --rounds {given.rounds}"
    return conclude("data", aims(mine, peers), command, {"machine": about, "findings": lines}, given.publish)


if __name__ == "__main__":
    sys.exit(main())
