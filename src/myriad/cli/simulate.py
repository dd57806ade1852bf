"""``myriad simulate``: the production controller without a cluster, on drawn faults or a recorded journal."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from myriad.cli.options import Json

Explore = Annotated[
    int | None,
    typer.Option(
        "--explore", metavar="N", min=1, help="Play N schedules of drawn faults.", show_default=False
    ),
]
Seed = Annotated[
    int | None,
    typer.Option(
        "--seed", metavar="N", min=0, help="Play this seed; with --explore, begin at it.", show_default=False
    ),
]
Kept = Annotated[
    Path | None,
    typer.Option("--scenario", metavar="FILE", help="Play a schedule kept by --save.", show_default=False),
]
Save = Annotated[
    Path | None,
    typer.Option(
        "--save", metavar="FILE", help="Keep the smallest schedule that breaks the same.", show_default=False
    ),
]
Workers = Annotated[
    int | None,
    typer.Option(
        "--workers",
        metavar="N",
        min=1,
        help="Processes for --explore; default: one per core.",
        show_default=False,
    ),
]
Recorded = Annotated[
    Path | None,
    typer.Option(
        "--journal", metavar="FILE", help="A state folder, or a copy of its journal.db.", show_default=False
    ),
]


def simulate(
    explore: Explore = None,
    seed: Seed = None,
    scenario: Kept = None,
    journal: Recorded = None,
    save: Save = None,
    workers: Workers = None,
    json: Json = False,
) -> None:
    """Break a virtual cluster under the production controller, or replay a journal.

    --explore draws clusters, jobs and faults from seeds and checks every invariant after every event. --seed plays
    one of them again; if it breaks something, it is made as small as possible and its story told. --journal feeds
    recorded events to the controller and compares all changes and commands, byte for byte. Exits with 1 when
    something broke or differs.
    """
    from myriad.cli.errors import CommandError, Exit

    _check(explore, seed, scenario, journal, save, workers)
    if journal is not None:
        ok = _replay(journal, json)
    elif explore is not None:
        ok = _explore(explore, seed or 0, workers, json)
    elif scenario is not None:
        from myriad.cli.explored import read_scenario

        ok = _play(read_scenario(scenario), save, json)
    elif seed is not None:
        from myriad.simulator.draw import draw

        ok = _play(draw(seed), save, json)
    else:
        raise CommandError(
            "say what to simulate: --explore N, --seed N, --scenario or --journal FILE", Exit.USAGE
        )
    if not ok:
        raise typer.Exit(Exit.FAILED)


def _check(
    explore: int | None,
    seed: int | None,
    scenario: Path | None,
    journal: Path | None,
    save: Path | None,
    workers: int | None,
) -> None:
    """Options that contradict each other."""
    from myriad.cli.errors import CommandError, Exit

    given = {"--explore": explore, "--scenario": scenario, "--journal": journal}
    modes = [name for name, value in given.items() if value is not None]
    if seed is not None and "--explore" not in modes:
        modes.append("--seed")
    if len(modes) > 1:
        raise CommandError(f"{' and '.join(modes)} exclude each other: give one of them", Exit.USAGE)
    if save is not None and modes not in (["--seed"], ["--scenario"]):
        raise CommandError("--save goes with --seed or --scenario", Exit.USAGE)
    if workers is not None and explore is None:
        raise CommandError("--workers goes with --explore", Exit.USAGE)


def _replay(journal: Path, json: bool) -> bool:
    from myriad.cli.output import document
    from myriad.cli.replayed import as_document, replayed, tell

    found = replayed(journal)
    if json:
        document(as_document(found))
    else:
        tell(found)
    return found.difference is None


def _explore(count: int, first: int, workers: int | None, json: bool) -> bool:
    import os

    from myriad.cli import explored
    from myriad.cli.output import document, say
    from myriad.simulator.draw import draw

    tally = explored.explore(count, first, workers or len(os.sched_getaffinity(0)))
    if json:
        document(explored.tally_document(tally))
        return not tally.broken
    explored.tell_tally(tally, first)
    if tally.broken:
        say()
        _play(draw(tally.broken[0].seed), None, json=False)
    return not tally.broken


def _play(scenario: object, save: Path | None, json: bool) -> bool:
    from myriad.cli import explored
    from myriad.cli.output import document
    from myriad.simulator.scenario import Scenario

    assert isinstance(scenario, Scenario)
    found, smallest = explored.play_one(scenario, save)
    if json:
        document(explored.one_document(found, smallest))
    else:
        explored.tell_one(found, scenario, smallest, save)
    return not found.broken
