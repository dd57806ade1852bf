"""What an agent does about its orders, as stories on the pure class: what happens, then what the hands have to do."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from myriad.agent import orders as orders_module
from myriad.agent.member import Member, Process
from myriad.agent.orders import ABSENT_DEADLINE_S, Orders
from myriad.planner.intervals import FIRST
from myriad.spec.messages import (
    Accepted,
    Commit,
    ControllerMessage,
    Failure,
    Forget,
    Holding,
    Intervals,
    MemberStatus,
    Prepare,
    RankPlan,
    Refused,
    ShardSet,
    Shutdown,
    StartStore,
    StartWorkers,
    StopWorkers,
)

JOB = "j1"


class Recorder:
    """Hands that write down what they are asked to do; two workers a start, which run at once."""

    def __init__(self) -> None:
        self.orders = Orders(self)
        self.done: list[str] = []
        self.told: list[MemberStatus] = []

    def tell(self, status: MemberStatus) -> None:
        self.told.append(status)
        exits = "".join(f" {e.rank}:{e.code}" for e in status.exits)
        held = f" holds {len(status.holdings)}" if status.holdings else ""
        error = f" ({status.error})" if status.error else ""
        self.done.append(f"tell {status.generation} {status.state}{exits}{held}{error}")

    def fence(self, member: Member, generation: int, grace_s: float) -> None:
        for process in member.older(generation):
            process.doomed = True
        self.done.append(f"fence {generation}" + (f" in {grace_s:g} s" if grace_s else ""))

    def prepare(self) -> None:
        self.done.append("prepare")

    def start_store(self, member: Member, order: StartStore) -> None:
        self.done.append(f"store {order.generation}")
        if order.torch:
            key = f"{order.job}/{order.generation}/store"
            member.processes[key] = Process(key, order.generation, None, pid=99)
        else:
            self.orders.store_is_up(member, 1234)

    def start_workers(self, member: Member, order: StartWorkers) -> None:
        assert member.holdings == () and member.state == "started"
        self.done.append(f"workers {order.generation}")
        for plan in order.ranks:
            key = f"{order.job}/{order.generation}/{plan.rank}"
            member.processes[key] = Process(key, order.generation, plan.rank, pid=100 + plan.rank)

    def committed(self, job: str, step: int, intervals: Intervals, processes: list[Process]) -> None:
        self.done.append(f"committed {step} to {len(processes)}")

    def holdings(self, job: str) -> tuple[Holding, ...]:
        forgotten = f"forget {job}" in self.done
        return () if forgotten else (Holding(0, 5, 1),)

    def forget(self, job: str) -> None:
        self.done.append(f"forget {job}")

    def leave(self, why: str) -> None:
        self.done.append(f"leave: {why}")

    @property
    def member(self) -> Member:
        return self.orders.members[JOB]

    def process(self, rank: int | None) -> Process:
        (found,) = (p for p in self.member.processes.values() if p.rank == rank)
        return found


Happening = Callable[[Recorder], None]
Story = list[tuple[Happening, list[str]]]


# ---------------------------------------------------------------- what can happen


def comes(message: ControllerMessage) -> Happening:
    return lambda hands: hands.orders.receive(message)


def store(generation: int, torch: bool = True) -> Happening:
    return comes(StartStore(job=JOB, generation=generation, torch=torch))


def workers(generation: int) -> Happening:
    order = StartWorkers(
        job=JOB,
        job_name="test",
        generation=generation,
        restarts=0,
        world_size=2,
        node_rank=0,
        ranks=(RankPlan(rank=0, local_rank=0), RankPlan(rank=1, local_rank=1)),
        store_host="127.0.0.1",
        store_port=1234,
        job_dir="/jobs/j1",
        spec={},
        intervals=FIRST,
    )
    return comes(order)


def stop(generation: int, keep: bool = True, grace_s: float = 0.0) -> Happening:
    return comes(StopWorkers(job=JOB, generation=generation, keep=keep, grace_s=grace_s))


def gone(generation: int) -> Happening:
    """A fence is complete: all it was for has ended."""

    def happen(hands: Recorder) -> None:
        for process in hands.member.older(generation):
            hands.orders.ended(hands.member, process, -9, 1.0)
        hands.orders.fenced(hands.member, generation)

    return happen


def store_is_up(hands: Recorder) -> None:
    hands.orders.store_is_up(hands.member, 1234)


def ends(rank: int | None, code: int, now_s: float = 1.0) -> Happening:
    return lambda hands: hands.orders.ended(hands.member, hands.process(rank), code, now_s)


def saves(rank: int, step: int) -> Happening:
    shards = ShardSet(rank=rank, step=step, seconds=0.1, files=())
    return lambda hands: hands.orders.shards_saved(hands.member, shards)


def forks(rank: int) -> Happening:
    return lambda hands: hands.orders.phase_passed(hands.member, rank, "fork", 1.0)


def is_abandoned(away_since_s: float | None, now_s: float) -> Happening:
    """Write down which ranks are to be killed."""

    def happen(hands: Recorder) -> None:
        killed = hands.orders.abandoned(away_since_s, now_s)
        hands.done += [f"kill {process.rank}" for process in killed]

    return happen


RUNS: Story = [(workers(1), ["fence 0"]), (gone(0), ["workers 1", "tell 1 started"])]
LEAVES = "leave: the cluster goes down"

STORIES: dict[str, Story] = {
    "a start waits for the fence of what is older": [
        *RUNS,
        (workers(2), ["fence 1"]),
        (gone(1), ["workers 2", "tell 2 started"]),
    ],
    "a store, then the workers of its generation, without a second fence": [
        (store(1), ["fence 0"]),
        (gone(0), ["tell 1 preparing holds 1", "store 1"]),
        (store_is_up, ["tell 1 store holds 1"]),
        (workers(1), ["workers 1", "tell 1 started"]),
    ],
    "a reserved port is there at once": [
        (store(1, torch=False), ["fence 0"]),
        (gone(0), ["tell 1 preparing holds 1", "store 1", "tell 1 store holds 1"]),
    ],
    "a repeated order is answered": [
        *RUNS,
        (workers(1), ["tell 1 started"]),
        (store(1), ["tell 1 started"]),
    ],
    "a repeated order is not answered while something newer is on its way": [
        *RUNS,
        (workers(2), ["fence 1"]),
        (workers(1), []),
        (gone(1), ["workers 2", "tell 2 started"]),
    ],
    "a repeated stop fences once more": [
        *RUNS,
        (stop(1), ["fence 1"]),
        (gone(1), ["tell 1 stopped holds 1"]),
        (stop(1), ["fence 1"]),
        (gone(1), ["tell 1 stopped holds 1"]),
    ],
    "an older order is answered and harms nobody": [
        (workers(3), ["fence 2"]),
        (gone(2), ["workers 3", "tell 3 started"]),
        (workers(2), ["tell 3 started"]),
        (store(1), ["tell 3 started"]),
        (stop(2), ["tell 3 started"]),
    ],
    "a start after a stop of the same generation comes too late": [
        (stop(2), ["fence 2"]),
        (gone(2), ["tell 2 stopped holds 1"]),
        (workers(2), ["tell 2 stopped holds 1"]),
    ],
    "a wider fence while one is on its way": [
        *RUNS,
        (workers(2), ["fence 1"]),
        (stop(4), ["fence 4"]),
        (gone(1), []),
        (gone(4), ["tell 4 stopped holds 1"]),
    ],
    "a narrower order does not take the place of the one that waits": [
        *RUNS,
        (stop(4), ["fence 4"]),
        (workers(3), []),
        (stop(2), []),
        (gone(4), ["tell 4 stopped holds 1"]),
    ],
    "a stop takes the place of a start of its generation that waits": [
        (workers(2), ["fence 1"]),
        (stop(2), ["fence 2"]),
        (gone(1), []),
        (gone(2), ["tell 2 stopped holds 1"]),
    ],
    "a fence that nobody waits for any more": [
        (workers(1), ["fence 0"]),
        (stop(1), ["fence 1"]),
        (gone(1), ["tell 1 stopped holds 1"]),
        (gone(0), []),
    ],
    "a stop keeps the exits of the same generation": [
        *RUNS,
        (ends(1, 7), ["tell 1 started 1:7"]),
        (stop(1, grace_s=2), ["fence 1 in 2 s"]),
        (gone(1), ["tell 1 stopped 1:7 holds 1"]),
    ],
    "a stop of a newer generation drops them": [
        *RUNS,
        (ends(1, 7), ["tell 1 started 1:7"]),
        (stop(2), ["fence 2"]),
        (gone(2), ["tell 2 stopped holds 1"]),
    ],
    "a stop for good drops the snapshots": [
        *RUNS,
        (stop(1, keep=False), ["fence 1"]),
        (gone(1), ["forget j1", "tell 1 stopped"]),
    ],
    "all ranks have exited": [
        *RUNS,
        (ends(0, 0), ["tell 1 started 0:0"]),
        (ends(1, 0), ["tell 1 exited 0:0 1:0"]),
    ],
    "the store dies": [
        (store(1), ["fence 0"]),
        (gone(0), ["tell 1 preparing holds 1", "store 1"]),
        (ends(None, -9), ["tell 1 preparing holds 1 (its rendezvous store died)"]),
    ],
    "a phase is told once all ranks have passed it": [
        *RUNS,
        (forks(0), []),
        (forks(1), ["tell 1 started"]),
        (forks(1), []),
    ],
    "a checkpoint is told once all ranks have saved it, and committed to all of them": [
        *RUNS,
        (saves(1, 10), []),
        (saves(0, 10), ["tell 1 started"]),
        (comes(Commit(job=JOB, generation=1, step=10, intervals=FIRST)), ["committed 10 to 2"]),
    ],
    "a commit of another generation or job is for the keeper alone": [
        *RUNS,
        (comes(Commit(job=JOB, generation=2, step=10, intervals=FIRST)), ["committed 10 to 0"]),
        (comes(Commit(job="j2", generation=1, step=20, intervals=FIRST)), ["committed 20 to 0"]),
    ],
    "a job is forgotten": [
        (stop(1), ["fence 1"]),
        (gone(1), ["tell 1 stopped holds 1"]),
        (comes(Forget(job=JOB)), ["forget j1"]),
        (lambda hands: hands.done.extend(hands.orders.members), []),
        (comes(Forget(job="j2")), ["forget j2"]),
    ],
    "a busy job loses its snapshots but is not forgotten": [
        *RUNS,
        (comes(Forget(job=JOB)), ["forget j1"]),
        (lambda hands: hands.done.extend(hands.orders.members), [JOB]),
        (stop(1), ["fence 1"]),
        (comes(Forget(job=JOB)), ["forget j1"]),
        (gone(1), ["tell 1 stopped"]),
    ],
    "an idle agent leaves at once": [(comes(Shutdown()), [LEAVES])],
    "a shutdown waits until all is stopped": [
        *RUNS,
        (comes(Shutdown()), []),
        (comes(Forget(job="j2")), ["forget j2"]),
        (stop(1), ["fence 1"]),
        (gone(1), ["tell 1 stopped holds 1", LEAVES]),
    ],
    "a shutdown waits until the last job is forgotten": [
        *RUNS,
        (comes(Shutdown()), []),
        (ends(0, 0), ["tell 1 started 0:0"]),
        (ends(1, 0), ["tell 1 exited 0:0 1:0"]),
        (comes(Forget(job=JOB)), ["forget j1", LEAVES]),
    ],
    "an agent that is refused leaves, whatever runs": [
        *RUNS,
        (comes(Refused(reason="declared dead")), ["leave: refused: declared dead"]),
    ],
    "only a job with torch needs the template": [
        (comes(Prepare(job=JOB, torch=False)), []),
        (comes(Prepare(job=JOB, torch=True)), ["prepare"]),
        (comes(Accepted(heartbeat_s=0.5)), []),
    ],
    "the rest of a broken job is killed when no controller has come back": [
        *RUNS,
        (ends(1, 7, now_s=100.0), ["tell 1 started 1:7"]),
        (is_abandoned(50.0, 99.0 + ABSENT_DEADLINE_S), []),
        (is_abandoned(101.0, 100.0 + ABSENT_DEADLINE_S), []),
        (is_abandoned(None, 1e6), []),
        (is_abandoned(100.0, 100.0 + ABSENT_DEADLINE_S), ["kill 0"]),
    ],
    "a job that works is never abandoned": [
        *RUNS,
        (ends(1, 0, now_s=100.0), ["tell 1 started 1:0"]),
        (is_abandoned(100.0, 1e6), []),
    ],
}


def play(story: Story) -> None:
    hands = Recorder()
    for number, (happen, want) in enumerate(story):
        before = len(hands.done)
        happen(hands)
        assert hands.done[before:] == want, f"step {number}"
    versions = [status.version for status in hands.told]
    assert versions == sorted(set(versions)), "a status is newer than the one before"


@pytest.mark.parametrize("name", STORIES)
def test_story(name: str) -> None:
    play(STORIES[name])


def test_a_commit_drops_the_shards_from_the_status() -> None:
    hands = Recorder()
    for happen in (workers(1), gone(0), saves(0, 10), saves(1, 10)):
        happen(hands)
    assert [shards.step for shards in hands.told[-1].shards] == [10, 10]
    comes(Commit(job=JOB, generation=1, step=10, intervals=FIRST))(hands)
    (status,) = hands.orders.statuses()
    assert status.shards == ()


def test_a_failure_is_part_of_the_exit() -> None:
    hands = Recorder()
    for happen in (workers(1), gone(0)):
        happen(hands)
    failure = Failure(error_class="ValueError", message="no such token", step=4)
    hands.orders.failing(hands.member, hands.process(1), failure)
    ends(1, 1)(hands)
    (found,) = hands.told[-1].exits
    assert (found.error_class, found.message, found.step, found.pid) == (
        "ValueError",
        "no such token",
        4,
        101,
    )


def test_a_hello_says_nothing_of_a_job_that_has_no_generation_yet() -> None:
    hands = Recorder()
    workers(1)(hands)
    assert hands.orders.statuses() == ()
    gone(0)(hands)
    assert [status.generation for status in hands.orders.statuses()] == [1]


# ---------------------------------------------------------------- planted bugs


def every_fence_is_wide_enough(patch: pytest.MonkeyPatch) -> None:
    original = Orders.fenced
    patch.setattr(Orders, "fenced", lambda self, member, generation: original(self, member, 99))


def exits_are_forgotten(patch: pytest.MonkeyPatch) -> None:
    original = Orders.fenced

    def fenced(self: Orders, member: Member, generation: int) -> None:
        member.exits = []
        original(self, member, generation)

    patch.setattr(Orders, "fenced", fenced)


def leaves_at_once(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Member, "busy", False)


def never_leaves(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Orders, "_leave_if_idle", lambda self: None)


def kills_impatiently(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(orders_module, "ABSENT_DEADLINE_S", 0.0)


BUGS: dict[Callable[[pytest.MonkeyPatch], None], str] = {
    every_fence_is_wide_enough: "a wider fence while one is on its way",
    exits_are_forgotten: "a stop keeps the exits of the same generation",
    leaves_at_once: "a shutdown waits until all is stopped",
    never_leaves: "a shutdown waits until the last job is forgotten",
    kills_impatiently: "the rest of a broken job is killed when no controller has come back",
}


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_its_story_catches_a_planted_bug(
    bug: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    bug(monkeypatch)
    with pytest.raises(AssertionError, match="step"):
        play(STORIES[BUGS[bug]])
