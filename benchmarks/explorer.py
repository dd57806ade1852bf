"""How fast the explorer plays schedules, and how its event heap compares with SimPy on the same toy model.

    python -m benchmarks.explorer [--seeds 300] [--passes 5] [--publish]

One core. First the explorer over fixed seeds: schedules and controller events a second, every invariant
checked, and which share of the time each part takes. Then a toy model: agents that beat, a server that
answers, drawn delays, a deadline for each answer. It runs with callbacks on the heap, and in SimPy twice:

* with generator processes, as its documentation writes them: no monitoring, no resources, and a request is a
  process that its agent waits for beside a timeout (an answer event of its own would cost a tenth more);
* with callbacks on its timeouts, which its guide to events names too: the heap's model line for line, and so
  the kernels alone. That is the fastest SimPy found here, and not how people write it.

All draw the same numbers and must come to the same counts at the same moments. Runs alternate, each pass has
a seed of its own, ratios are of two runs of one pass, and medians are given.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from statistics import median
from typing import Any

import simpy

import myriad.simulator.explore
from benchmarks.harness import Aim, arguments, conclude, machine, say, table
from myriad.control.controller import Controller
from myriad.simulator.checks import Checks
from myriad.simulator.draw import draw
from myriad.simulator.explore import run
from myriad.simulator.heap import Heap

AGENTS, BEAT_S, DELAY_S, DEADLINE_S, END_S = 100, 0.5, 0.05, 0.25, 200.0
WARM_UP_SEEDS = 50

# ---------------------------------------------------------------- the toy model


@dataclass(slots=True)
class Counts:
    """What the toy model comes to.

    ``moments_s`` adds up when each beat was over, in that order: two runs that agree on it to the last bit
    have lived through the same history.
    """

    served: int = 0
    answered: int = 0
    missed: int = 0
    moments_s: float = 0.0

    @property
    def beats(self) -> int:
        return self.answered + self.missed

    def over(self, now: float, answered: bool) -> None:
        self.moments_s += now
        if answered:
            self.answered += 1
        else:
            self.missed += 1


def delays(source: random.Random) -> tuple[float, float, float]:
    """Of a beat's way to the server, of the answer's way back, and until the next beat."""
    return source.expovariate(1 / DELAY_S), source.expovariate(1 / DELAY_S), BEAT_S * source.random()


def on_heap(seed: int) -> tuple[Heap, Counts]:
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
            counts.over(heap.now, answered)
            heap.after(self.pause_s, self.beat)

    for number in range(AGENTS):
        Agent(number)
    return heap, counts


def generators(seed: int) -> tuple[simpy.Environment, Counts]:
    """The toy model with SimPy's generator processes."""
    environment, counts = simpy.Environment(), Counts()

    def request(there_s: float, back_s: float) -> Generator[simpy.Event, Any, None]:
        yield environment.timeout(there_s)
        counts.served += 1
        yield environment.timeout(back_s)

    def agent(number: int) -> Generator[simpy.Event, Any, None]:
        source = random.Random(seed * AGENTS + number)
        while True:
            there_s, back_s, pause_s = delays(source)
            answer = environment.process(request(there_s, back_s))
            yield answer | environment.timeout(DEADLINE_S)
            counts.over(environment.now, answered=answer.processed)
            yield environment.timeout(pause_s)

    for number in range(AGENTS):
        environment.process(agent(number))
    return environment, counts


def callbacks(seed: int) -> tuple[simpy.Environment, Counts]:
    """The toy model with callbacks on SimPy's timeouts: ``on_heap`` on the other kernel."""
    environment, counts = simpy.Environment(), Counts()

    def after(delay_s: float, do: Callable[[simpy.Event], None]) -> None:
        environment.timeout(delay_s).callbacks.append(do)

    class Agent:
        def __init__(self, number: int) -> None:
            self.source = random.Random(seed * AGENTS + number)
            self.asked = 0
            self.waiting = False
            self.pause_s = 0.0
            after(0.0, self.beat)

        def beat(self, _: simpy.Event) -> None:
            there_s, back_s, self.pause_s = delays(self.source)
            self.asked += 1
            self.waiting = True
            asked = self.asked

            def served(_: simpy.Event) -> None:
                counts.served += 1
                after(back_s, lambda _: self.over(asked, answered=True))

            after(there_s, served)
            after(DEADLINE_S, lambda _: self.over(asked, answered=False))

        def over(self, asked: int, answered: bool) -> None:
            if not self.waiting or asked != self.asked:
                return
            self.waiting = False
            counts.over(environment.now, answered)
            after(self.pause_s, self.beat)

    for number in range(AGENTS):
        Agent(number)
    return environment, counts


Kernel = Heap | simpy.Environment
HEAP, SIMPY, SIMPY_CALLBACKS = "on the heap", "in SimPy", "in SimPy with callbacks"
MODELS: dict[str, Callable[[int], tuple[Kernel, Counts]]] = {
    HEAP: on_heap,
    SIMPY: generators,
    SIMPY_CALLBACKS: callbacks,
}


def play(kernel: Kernel) -> None:
    """To the end of the model's time, as each kernel's own callers do it."""
    if isinstance(kernel, Heap):
        while kernel.step(END_S):
            pass
    else:
        kernel.run(until=END_S)


def kernel_events(seed: int) -> dict[str, int]:
    """How many events each kernel takes off its queue for one pass; not timed."""
    found = {}
    for name, model in MODELS.items():
        kernel, _ = model(seed)
        if isinstance(kernel, Heap):
            play(kernel)
            found[name] = kernel.ran
        else:
            found[name] = 0
            while kernel.peek() < END_S:
                kernel.step()
                found[name] += 1
    assert found[HEAP] == found[SIMPY_CALLBACKS], f"one model on two kernels, and other numbers: {found}"
    return found


@dataclass(frozen=True)
class Comparison:
    """Seconds of each pass by the model's name, and the beats of each pass."""

    seconds: dict[str, list[float]]
    beats: list[int]

    def ratios(self, other: str) -> list[float]:
        """Time on the heap over time on ``other``, pass by pass."""
        both = zip(self.seconds[HEAP], self.seconds[other], strict=True)
        return [ours / theirs for ours, theirs in both]

    def rates(self, name: str) -> list[float]:
        """Beats a second."""
        return [beats / s for beats, s in zip(self.beats, self.seconds[name], strict=True)]


def compare(passes: int) -> Comparison:
    """Every model in turn, ``passes`` times after a warm-up. AssertionError if two differ in their counts."""
    seconds: dict[str, list[float]] = {name: [] for name in MODELS}
    beats = []
    for seed in range(passes + 1):
        found = []
        for name, model in MODELS.items():
            gc.collect()  # nobody pays for the garbage of the run before
            began = time.perf_counter()
            kernel, counts = model(seed)
            play(kernel)
            took_s = time.perf_counter() - began
            found.append(counts)
            if seed:  # the first warms up
                seconds[name].append(took_s)
        assert all(each == found[0] for each in found), f"the models differ: {found}"
        if seed:
            beats.append(found[0].beats)
    return Comparison(seconds, beats)


# ---------------------------------------------------------------- the explorer


@dataclass(frozen=True)
class Pass:
    """One pass over the seeds."""

    seconds: float
    events: int
    callbacks: int


def explore(seeds: int) -> Pass:
    """AssertionError if an invariant breaks: the time of a schedule that was cut short says nothing."""
    gc.collect()
    began = time.perf_counter()
    events = ran = 0
    for seed in range(seeds):
        found = run(draw(seed))
        assert not found.broken, (seed, found.broken)
        events, ran = events + found.events, ran + found.callbacks
    return Pass(time.perf_counter() - began, events, ran)


def shares(seeds: int) -> dict[str, float]:
    """Which part of the time goes where, timed around calls in a pass of its own.

    A call inside another part belongs to that part: the controller that a replay drives is the end's.
    """
    spent = {"controller": 0.0, "invariants": 0.0, "end": 0.0}
    inside = False

    def watch(owner: Any, name: str, part: str) -> Callable[[], None]:
        original = getattr(owner, name)

        def watched(*args: Any) -> Any:
            nonlocal inside
            if inside:
                return original(*args)
            inside, began = True, time.perf_counter()
            try:
                return original(*args)
            finally:
                spent[part] += time.perf_counter() - began
                inside = False

        setattr(owner, name, watched)
        return lambda: setattr(owner, name, original)

    undo = [
        watch(Controller, "handle", "controller"),
        watch(Checks, "before", "invariants"),
        watch(Checks, "after", "invariants"),
        watch(myriad.simulator.explore, "final", "end"),
    ]
    try:
        whole = explore(seeds).seconds
    finally:
        for put_back in undo:
            put_back()
    return {part: seconds / whole for part, seconds in spent.items()}


# ---------------------------------------------------------------- words and figures


def row(name: str, values: Sequence[float], digits: int = 0) -> tuple[str, str, str]:
    low, high = min(values), max(values)
    return name, f"{median(values):.{digits}f}", f"{low:.{digits}f} to {high:.{digits}f}"


def words_of_explorer(seeds: int, passes: Sequence[Pass], parts: dict[str, float]) -> list[str]:
    """The explorer's figures as sentences for the page."""
    rates = ", ".join(f"{seeds / each.seconds:.1f}" for each in passes)
    event_rate = median(each.events / each.seconds for each in passes)
    counted = f"{seeds} seeds, {passes[0].events:,} controller events, {passes[0].callbacks:,} callbacks"
    return [
        f"explorer: {counted}; {rates} schedules/s; {event_rate:,.0f} controller events/s",
        (
            f"of that time the controller takes {parts['controller']:.0%}, the invariants after every event "
            f"{parts['invariants']:.0%}, and the checks at the end of a schedule, the replay of its journal "
            f"among them, {parts['end']:.0%}; the rest is the virtual cluster and its journal"
        ),
    ]


def words_of_models(found: Comparison) -> list[str]:
    """The toy model's figures as sentences for the page."""
    took = "; ".join(
        f"{name} {', '.join(f'{s:.2f}' for s in seconds)} s" for name, seconds in found.seconds.items()
    )
    taken = kernel_events(seed=1)
    ratios = {name: median(found.ratios(name)) for name in (SIMPY, SIMPY_CALLBACKS)}
    faster = [name for name, ratio in ratios.items() if ratio > 1]
    return [
        (
            f"toy model: {AGENTS} agents, {median(found.beats):,.0f} beats with an answer or a deadline "
            f"each; {took}; the same counts at the same moments"
        ),
        (
            f"SimPy {version('simpy')} takes {taken[SIMPY]:,} events off its queue with a generator process "
            f"for each agent and request, and {taken[SIMPY_CALLBACKS]:,} with callbacks, as the heap does; "
            f"the heap takes {ratios[SIMPY]:.2f} and {ratios[SIMPY_CALLBACKS]:.2f} of its time"
            + (f"; it is faster than the heap {' and '.join(faster)}" if faster else "")
        ),
    ]


def main() -> int:
    """Measure, print, and end with the aims."""
    parser = arguments("explorer", "Schedules of faults a second, and the event heap against SimPy.")
    parser.add_argument("--seeds", type=int, default=300)
    parser.add_argument("--passes", type=int, default=5)
    given = parser.parse_args()
    about = machine()
    say(about)
    explore(min(given.seeds, WARM_UP_SEEDS))
    passes = [explore(given.seeds) for _ in range(given.passes)]
    assert len({(each.events, each.callbacks) for each in passes}) == 1, "a seed must play the same each time"
    parts = shares(given.seeds)
    found = compare(given.passes)
    rates = [given.seeds / each.seconds for each in passes]
    event_rates = [each.events / each.seconds for each in passes]
    plain, bare = found.ratios(SIMPY), found.ratios(SIMPY_CALLBACKS)
    rows = [row("schedules/s", rates, 1), row("controller events/s", event_rates)]
    rows += [row(f"toy model {name}, beats/s", found.rates(name)) for name in MODELS]
    rows += [row("time on the heap / in SimPy", plain, 2), row("the same, SimPy with callbacks", bare, 2)]
    table(("one core", "median", "range"), rows)
    findings = words_of_explorer(given.seeds, passes, parts) + words_of_models(found)
    for line in findings:
        say(line)
    aims = [
        Aim("schedules_per_s", ">= 3.4", median(rates), "300 seeds in 90 s"),
        Aim("controller_events_per_s", ">= 1000", median(event_rates)),
        Aim("toy_model_time_ratio_to_simpy", "<= 1", median(plain)),
        Aim("toy_model_time_ratio_to_simpy_callbacks", "<= 1", median(bare)),
    ]
    command = f"python -m benchmarks.explorer --seeds {given.seeds} --passes {given.passes}"
    return conclude("explorer", aims, command, {"machine": about, "findings": findings}, given.publish)


if __name__ == "__main__":
    raise SystemExit(main())
