"""What ``myriad simulate --explore`` and ``--seed`` do: play schedules of faults, and tell what broke and how."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Iterable

    from myriad.simulator.explore import Outcome, Tally
    from myriad.simulator.scenario import Scenario

BATCH_SEEDS = 25  # given to a process at a time: about half a second
BROKEN_SHOWN_MAX = 10
GIT_DEADLINE_S = 5.0


def explore(count: int, first: int, workers: int) -> Tally:
    """Play ``count`` seeds from ``first`` on, in ``workers`` processes."""
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing import get_context

    from myriad.simulator.explore import Tally
    from myriad.simulator.explore import explore as play

    seeds = range(first, first + count)
    batches = [seeds[start : start + BATCH_SEEDS] for start in range(0, count, BATCH_SEEDS)]
    tally = Tally()
    if workers == 1 or len(batches) == 1:
        found: Iterable[Tally] = map(play, batches)
        _add_up(tally, found, count)
        return tally
    context = get_context("fork")  # this process has one thread, and its children need no second import
    with ProcessPoolExecutor(
        min(workers, len(batches)), context, initializer=_leave_ctrl_c_to_parent
    ) as pool:
        try:
            _add_up(tally, pool.map(play, batches), count)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return tally


def _leave_ctrl_c_to_parent() -> None:
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _add_up(tally: Tally, found: Iterable[Tally], count: int) -> None:
    for part in found:
        tally.add(part)
        if sys.stderr.isatty():
            sys.stderr.write(f"\r{tally.schedules:,} of {count:,} schedules, {len(tally.broken)} broken ")
            sys.stderr.flush()
    if sys.stderr.isatty():
        sys.stderr.write("\r\x1b[K")


def tell_tally(tally: Tally, first: int) -> None:
    """The counts, what of the controller was visited, and the seeds that broke something."""
    from myriad.cli.output import say

    say(
        f"{tally.schedules:,} schedules (seeds {first} to {first + tally.schedules - 1}), {tally.events:,} events, "
        f"{tally.virtual_s / 3600:,.0f} virtual hours: {len(tally.broken) or 'no'} broken"
    )
    tell_coverage(tally.visits)
    for outcome in tally.broken[:BROKEN_SHOWN_MAX]:
        say(f"seed {outcome.seed}: {outcome.broken}")
    more = len(tally.broken) - BROKEN_SHOWN_MAX
    if more > 0:
        say(f"and {more} more; --json has all")


def tell_coverage(visits: Counter[tuple[str, str]]) -> None:
    from myriad.cli.output import table
    from myriad.simulator.coverage import REACHABLE, unknown, unvisited

    missing, strange = unvisited(visits), unknown(visits)
    rows = []
    for family, names in REACHABLE.items():
        left = [name for of, name in missing if of == family]
        odd = [f"{name} (in no table)" for of, name in strange if of == family]
        rows.append((family, len(names) - len(left), len(names), ", ".join([*left, *odd])))
    table(("visited", "", "of", "not visited"), rows)


def tally_document(tally: Tally) -> dict[str, Any]:
    from myriad.simulator.coverage import REACHABLE

    visits = {
        family: {name: tally.visits[family, name] for name in names} for family, names in REACHABLE.items()
    }
    return {
        "schedules": tally.schedules,
        "events": tally.events,
        "virtual_s": tally.virtual_s,
        "commit": commit(),
        "broken": [{"seed": outcome.seed, "broken": outcome.broken} for outcome in tally.broken],
        "visits": visits,
    }


def play_one(scenario: Scenario, saved: Path | None) -> tuple[Outcome, Scenario]:
    """Play a scenario; when it breaks something, also the smallest one that does, kept in ``saved``."""
    from myriad.simulator.explore import run
    from myriad.simulator.shrink import Shrinker

    found = run(scenario, tell=True)
    if not found.broken:
        if saved is not None:
            from myriad.cli.errors import CommandError, Exit

            raise CommandError(f"nothing broke, so there is nothing to keep in {saved}", Exit.USAGE)
        return found, scenario
    smallest = Shrinker(scenario, found.where).shrink()
    if saved is not None:
        _save(saved, found, smallest)
    return found, smallest


def _save(file: Path, found: Outcome, scenario: Scenario) -> None:
    from myriad.cli.errors import CommandError, Exit
    from myriad.runtime.files import write_atomic
    from myriad.simulator.scenario import Found, write_found

    try:
        write_atomic(file, write_found(Found(found.broken, commit(), scenario)), 0o644)
    except OSError as error:
        raise CommandError(f"{file} cannot be written: {error.strerror}", Exit.USAGE) from None


def tell_one(found: Outcome, played: Scenario, smallest: Scenario, saved: Path | None) -> None:
    """What one schedule came to; when it broke something: where, its story, and the way on."""
    from myriad.cli.output import say
    from myriad.simulator.explore import run

    if not found.broken:
        for line in played.lines():
            say(line)
        say(
            f"{found.events:,} events in {found.virtual_s:,.0f} virtual s, journal sha256 {found.digest}: not broken"
        )
        return
    say(f"seed {found.seed}, commit {commit()}")
    say(f"BROKEN: {found.broken}")
    say()
    say("The smallest schedule found that breaks the same:")
    for line in smallest.lines():
        say(f"  {line}")
    say()
    say("Its story:")
    for line in run(smallest, tell=True).story:
        say(f"  {line}")
    say()
    if saved is None:
        name = f"tests/simulator/regressions/seed-{found.seed}.json"
        say(f"make it a test: myriad simulate --seed {found.seed} --save {name}")
    else:
        say(f"kept in {saved}; play it again: myriad simulate --scenario {saved}")


def one_document(found: Outcome, smallest: Scenario) -> dict[str, Any]:
    import msgspec

    return {
        "seed": found.seed,
        "commit": commit(),
        "broken": found.broken or None,
        "events": found.events,
        "virtual_s": found.virtual_s,
        "journal_sha256": found.digest,
        "smallest": msgspec.to_builtins(smallest) if found.broken else None,
    }


def read_scenario(file: Path) -> Scenario:
    """A kept scenario; CommandError (usage) for anything else."""
    import msgspec

    from myriad.cli.errors import CommandError, Exit
    from myriad.simulator.scenario import read_found

    try:
        return read_found(file.read_bytes()).scenario
    except OSError as error:
        raise CommandError(f"{file} cannot be read: {error.strerror}", Exit.USAGE) from None
    except msgspec.MsgspecError as error:
        raise CommandError(
            f"{file} is no kept scenario ({error}); make one with: myriad simulate --seed N --save FILE",
            Exit.USAGE,
        ) from None


def commit() -> str:
    """The commit that runs, with a mark when files differ from it; the version where there is no checkout."""
    import subprocess

    import myriad

    folder = Path(myriad.__file__).parent
    asked = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        done = subprocess.run(asked, capture_output=True, text=True, timeout=GIT_DEADLINE_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return f"version {myriad.__version__}"
    return done.stdout.strip()
