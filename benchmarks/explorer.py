"""How fast the explorer plays schedules, and how its event heap compares with SimPy on the same toy model.

    python -m benchmarks.explorer [--seeds 300] [--passes 5] [--publish]

One core. First the explorer over fixed seeds: schedules and controller events a second, every invariant checked, and
which share of the time the controller and the checks take. Then a toy model, once on the heap with callbacks and once
in SimPy with generator processes, as its documentation writes them (no monitoring, no resources, nothing shared): agents
that beat, a server that answers, drawn delays, a deadline for each answer. Both draw the same numbers and must count
the same; runs alternate, medians are compared.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from importlib.metadata import version
from statistics import median
from typing import Any

from benchmarks.harness import Aim, arguments, conclude, machine, say, table
from myriad.control.controller import Controller
from myriad.simulator.checks import Checks
from myriad.simulator.draw import draw
from myriad.simulator.explore import run
from myriad.simulator.heap import Heap

AGENTS, BEAT_S, DELAY_S, DEADLINE_S, END_S = 100, 0.5, 0.05, 0.25, 200.0


@dataclass(slots=True)
class Counts:
    """What the toy model comes to."""

    served: int = 0
    answered: int = 0
    missed: int = 0


def delays(source: random.Random) -> tuple[float, float, float]:
    """Of a beat's way to the server, of the answer's way back, and until the next beat."""
    return source.expovariate(1 / DELAY_S), source.expovariate(1 / DELAY_S), BEAT_S * source.random()


def on_heap(seed: int) -> Counts:
    """The toy model with callbacks on the explorer's heap."""
    heap, counts = Heap(), Counts()

    class Agent:
        def __init__(self, number: int) -> None:
            self.source = random.Random(seed * AGENTS + number)
            self.asked = 0
            self.waiting = False
            self.pause_s = 0.0
            heap.after(0.0, self.beat)

        def beat(self) -> None:
            there_s, back_s, self.pause_s = delays(self.source)
            self.asked += 1
            self.waiting = True
            asked = self.asked

            def served() -> None:
                counts.served += 1
                heap.after(back_s, lambda: self.over(asked, answered=True))

            heap.after(there_s, served)
            heap.after(DEADLINE_S, lambda: self.over(asked, answered=False))

        def over(self, asked: int, answered: bool) -> None:
            if not self.waiting or asked != self.asked:
                return
            self.waiting = False
            if answered:
                counts.answered += 1
            else:
                counts.missed += 1
            heap.after(self.pause_s, self.beat)

    for number in range(AGENTS):
        Agent(number)
    while heap.step(END_S):
        pass
    return counts


def in_simpy(seed: int) -> Counts:
    """The toy model with SimPy's generator processes."""
    import simpy

    environment, counts = simpy.Environment(), Counts()

    def server(answer: Any, there_s: float, back_s: float) -> Generator[Any, Any, None]:
        yield environment.timeout(there_s)
        counts.served += 1
        yield environment.timeout(back_s)
        answer.succeed()

    def agent(number: int) -> Generator[Any, Any, None]:
        source = random.Random(seed * AGENTS + number)
        while True:
            there_s, back_s, pause_s = delays(source)
            answer = environment.event()
            environment.process(server(answer, there_s, back_s))
            found = yield answer | environment.timeout(DEADLINE_S)
            if answer in found:
                counts.answered += 1
            else:
                counts.missed += 1
            yield environment.timeout(pause_s)

    for number in range(AGENTS):
        environment.process(agent(number))
    environment.run(until=END_S)
    return counts


def timed(do: Callable[[], Any]) -> tuple[float, Any]:
    began = time.perf_counter()
    found = do()
    return time.perf_counter() - began, found


def compare(passes: int) -> tuple[list[float], list[float], int]:
    """Seconds of each pass on the heap and in SimPy, alternating, and the beats of one pass."""
    ours, theirs = [], []
    beats = 0
    for number in range(passes + 1):  # the first warms up
        our_s, mine = timed(lambda number=number: on_heap(number))  # type: ignore[misc]
        their_s, other = timed(lambda number=number: in_simpy(number))  # type: ignore[misc]
        assert mine == other, f"the two models differ: {mine} and {other}"
        beats = mine.answered + mine.missed
        if number:
            ours.append(our_s)
            theirs.append(their_s)
    return ours, theirs, beats


@dataclass(frozen=True)
class Pass:
    """One pass over the seeds."""

    seconds: float
    events: int
    callbacks: int


def explore(seeds: int) -> Pass:
    began = time.perf_counter()
    events = callbacks = 0
    for seed in range(seeds):
        found = run(draw(seed))
        assert not found.broken, (seed, found.broken)
        events, callbacks = events + found.events, callbacks + found.callbacks
    return Pass(time.perf_counter() - began, events, callbacks)


def shares(seeds: int) -> dict[str, float]:
    """Which part of the time the controller and the invariants take, timed around their calls in a pass of its own."""
    spent = {"controller": 0.0, "invariants": 0.0}

    def watch(owner: Any, name: str, part: str) -> Callable[[], None]:
        original = getattr(owner, name)

        def watched(*args: Any) -> Any:
            began = time.perf_counter()
            try:
                return original(*args)
            finally:
                spent[part] += time.perf_counter() - began

        setattr(owner, name, watched)
        return lambda: setattr(owner, name, original)

    undo = [watch(Controller, "handle", "controller"), watch(Checks, "after", "invariants")]
    try:
        whole = explore(seeds).seconds
    finally:
        for put_back in undo:
            put_back()
    return {part: seconds / whole for part, seconds in spent.items()}


def main() -> int:
    """Measure, print, and end with the aims."""
    parser = arguments("explorer", "Schedules of faults a second, and the event heap against SimPy.")
    parser.add_argument("--seeds", type=int, default=300)
    parser.add_argument("--passes", type=int, default=5)
    given = parser.parse_args()
    about = machine()
    say(about)
    explore(min(given.seeds, 50))  # warm up
    passes = [explore(given.seeds) for _ in range(given.passes)]
    rates = [given.seeds / each.seconds for each in passes]
    event_rates = [each.events / each.seconds for each in passes]
    parts = shares(given.seeds)
    ours, theirs, beats = compare(given.passes)
    ratios = [mine / other for mine, other in zip(ours, theirs, strict=True)]
    low_high = "{:.1f} to {:.1f}"
    table(
        ("one core", "median", "range"),
        [
            ("schedules/s", f"{median(rates):.1f}", low_high.format(min(rates), max(rates))),
            (
                "controller events/s",
                f"{median(event_rates):.0f}",
                f"{min(event_rates):.0f} to {max(event_rates):.0f}",
            ),
            ("toy model on the heap, beats/s", f"{beats / median(ours):.0f}", ""),
            ("toy model in SimPy, beats/s", f"{beats / median(theirs):.0f}", ""),
            (
                "time on the heap / in SimPy",
                f"{median(ratios):.2f}",
                f"{min(ratios):.2f} to {max(ratios):.2f}",
            ),
        ],
    )
    findings = [
        (
            f"explorer: {given.seeds} seeds, {passes[0].events:,} controller events, {passes[0].callbacks:,} callbacks; "
            f"{', '.join(f'{rate:.1f}' for rate in rates)} schedules/s; {median(event_rates):,.0f} controller events/s"
        ),
        (
            f"of that time the controller takes {parts['controller']:.0%} and the invariants after every event "
            f"{parts['invariants']:.0%}; the rest is the virtual cluster, the replay of each journal and the journal itself"
        ),
        (
            f"toy model: {AGENTS} agents, {beats:,} beats with an answer or a deadline each; on the heap "
            f"{', '.join(f'{seconds:.2f}' for seconds in ours)} s, in SimPy {', '.join(f'{seconds:.2f}' for seconds in theirs)} s; "
            f"the same counts. SimPy {version('simpy')} starts one process a request, as its documentation does"
        ),
    ]
    for line in findings:
        say(line)
    aims = [
        Aim("schedules_per_s", ">= 3.4", median(rates), "300 seeds in 90 s"),
        Aim("controller_events_per_s", ">= 1000", median(event_rates)),
        Aim("toy_model_time_ratio_to_simpy", "<= 1", median(ratios)),
    ]
    command = f"python -m benchmarks.explorer --seeds {given.seeds} --passes {given.passes}"
    return conclude("explorer", aims, command, {"machine": about, "findings": findings}, given.publish)


if __name__ == "__main__":
    raise SystemExit(main())
