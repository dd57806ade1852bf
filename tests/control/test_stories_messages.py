"""Messages are lost, repeated and late; the controller dies. Nothing depends on any one of them."""

from __future__ import annotations

import msgspec
import pytest
from world import World

from myriad.cluster.state import NodeState
from myriad.control import limits
from myriad.control.events import MemberReported
from myriad.control.status import JobStatus
from myriad.planner.intervals import FIRST
from myriad.spec.messages import (
    Commit,
    Forget,
    MemberStatus,
    Prepare,
    ShardSet,
    StartStore,
    StartWorkers,
    StopWorkers,
    WorkerExit,
)


def lose_the_inbox(world: World, node: str) -> None:
    """The connection breaks with everything that was on its way, and comes back."""
    assert world.agents[node].inbox, "nothing is on its way"
    world.reconnect(node)


# ---------------------------------------------------------------- lost


def test_a_lost_prepare_and_store_are_asked_for_again() -> None:
    world = World()
    job = world.submit(nodes=2, torch=True)
    lose_the_inbox(world, "n0")
    lose_the_inbox(world, "n1")
    world.run()
    assert len(world.sent(StartStore, "n0")) == 2 and len(world.sent(Prepare, "n1")) == 2
    assert world.job(job).status is JobStatus.RUNNING


def test_a_lost_start_is_asked_for_again_word_for_word() -> None:
    world = World()
    job = world.submit(nodes=2, torch=True)
    world.agents["n1"].frozen = True
    world.run()
    lose_the_inbox(world, "n1")
    first, second = world.sent(StartWorkers, "n1")
    assert msgspec.json.encode(first) == msgspec.json.encode(second)
    world.agents["n1"].frozen = False
    world.run()
    assert world.job(job).status is JobStatus.RUNNING


def test_a_lost_stop_is_asked_for_again() -> None:
    world = World()
    job = world.start(nodes=2)
    world.exit(job, 0, -9)
    world.agents["n1"].frozen = True
    world.run()
    lose_the_inbox(world, "n1")
    assert world.sent(StopWorkers, "n1")[0] == world.sent(StopWorkers, "n1")[1]
    world.agents["n1"].frozen = False
    world.run()
    assert world.job(job).status is JobStatus.RUNNING and world.job(job).generation == 2


def test_a_lost_commit_is_sent_again() -> None:
    world = World()
    job = world.start(nodes=2, torch=True)
    world.agents["n0"].frozen = True
    world.save(job, 10)
    world.agents["n0"].report()
    world.run()
    assert world.job(job).durable_step == 10
    lose_the_inbox(world, "n0")
    commit = Commit(job=job, generation=1, step=10, intervals=FIRST)
    assert world.sent(Commit, "n0") == [commit] * 2
    world.agents["n0"].frozen = False
    world.run()
    assert not world.agents["n0"].members[job].shards, "it knows"


def test_a_lost_report_rides_on_the_next_hello() -> None:
    world = World()
    job = world.start(nodes=1)
    agent = world.agents["n0"]
    agent.exit(job, 0, 0)
    agent.exit(job, 1, 0)
    assert len(agent.outbox) == 2
    world.reconnect("n0")
    world.run()
    assert world.job(job).status is JobStatus.SUCCEEDED


def test_a_lost_forget_is_sent_again() -> None:
    world = World()
    job = world.start(nodes=1)
    world.finish(job)
    world.run(until=lambda: world.job(job).status is JobStatus.SUCCEEDED)
    lose_the_inbox(world, "n0")
    world.run()
    assert world.agents["n0"].members == {} and len(world.sent(Forget, "n0")) == 2


def test_what_still_runs_of_an_ended_job_is_killed() -> None:
    """A partition outlives the job: the node comes back with workers nobody wants."""
    world = World()
    status = MemberStatus(job="j99", generation=3, version=1, state="started", pids={0: 1})
    world.handle(MemberReported(node="n0", incarnation="n0.1", member=status))
    messages = [c.message for c in world.journal[-1].commands]  # type: ignore[union-attr]
    assert messages == [StopWorkers(job="j99", generation=3, keep=False), Forget(job="j99")]


# ---------------------------------------------------------------- repeated, late, foreign


def test_every_report_may_come_twice_and_late() -> None:
    world = World()
    job = world.start(nodes=2, torch=True)
    world.save(job, 10)
    world.exit(job, 0, -9)
    world.run()
    reports = [e.event for e in world.journal if isinstance(e.event, MemberReported)]
    before = list(world.state.records())
    for event in (*reports, *reversed(reports)):
        world.handle(event)
        assert not world.journal[-1].changes, event
    assert list(world.state.records()) == before


def test_another_lifes_report_is_ignored() -> None:
    world = World()
    job = world.start(nodes=1)
    bad = WorkerExit(rank=0, pid=1, code=1, at_s=1.0)
    status = MemberStatus(job=job, generation=1, version=99, state="exited", exits=(bad,))
    world.handle(MemberReported(node="n0", incarnation="n0.0", member=status))
    assert not world.journal[-1].changes and not world.journal[-1].commands


# ---------------------------------------------------------------- checkpoints


def shard(rank: int, step: int) -> ShardSet:
    return ShardSet(rank=rank, step=step, seconds=0.1, files=())


def test_a_checkpoint_needs_every_rank() -> None:
    world = World()
    job = world.start(nodes=2, torch=True)
    for rank in range(3):
        world.save(job, 10, ranks=[rank])
        world.run()
        assert world.job(job).durable_step is None and not world.sent(Commit)
    world.save(job, 10, ranks=[3])
    world.run()
    assert (world.job(job).durable_step, world.job(job).durable_generation) == (10, 1)
    assert {node: len(world.sent(Commit, node)) for node in ("n0", "n1")} == {"n0": 1, "n1": 1}


def test_a_dead_rank_is_still_a_rank() -> None:
    """Found by a random history: the shards of those that are left are not a checkpoint."""
    world = World()
    job = world.start(nodes=2, torch=True)
    world.exit(job, 1, -9)
    world.save(job, 10, ranks=[2, 3])
    status = MemberStatus(
        job=job,
        generation=1,
        version=50,
        state="started",
        pids={0: 101},
        exits=(WorkerExit(rank=1, pid=1, code=-9, at_s=1.0),),
        shards=(shard(0, 10),),
    )
    world.handle(MemberReported(node="n0", incarnation="n0.1", member=status))
    world.run()
    assert world.job(job).generation == 2 and world.job(job).durable_step is None
    assert not world.sent(Commit)


def test_shards_of_an_older_generation_never_count() -> None:
    """Found by a random history: one node saved step 10 before the failure, the other one after it."""
    world = World()
    job = world.start(nodes=2, torch=True)
    world.save(job, 10, ranks=[0, 1])
    world.run()
    world.exit(job, 3, -9)
    world.run()
    assert world.job(job).generation == 2
    world.save(job, 10, ranks=[2, 3])
    world.run()
    assert world.job(job).durable_step is None and not world.sent(Commit)
    stale = MemberStatus(
        job=job,
        generation=1,
        version=99,
        state="started",
        pids={2: 1, 3: 2},
        shards=(shard(2, 20), shard(3, 20)),
    )
    world.handle(MemberReported(node="n1", incarnation="n1.1", member=stale))
    assert world.job(job).durable_step is None
    world.save(job, 10, ranks=[0, 1])
    world.run()
    assert (world.job(job).durable_step, world.job(job).durable_generation) == (10, 2)


# ---------------------------------------------------------------- the controller dies


@pytest.mark.parametrize("torch", [False, True], ids=["command", "model"])
def test_a_restart_after_any_event_changes_nothing(torch: bool) -> None:
    """A life with a killed worker and a lost node, the controller killed after each of its events in turn."""

    def life(killed_after: int | None) -> World:
        world = World(nodes=3)

        def go(until: object = None) -> None:
            for _ in range(10_000):
                if killed_after is not None and len(world.journal) >= killed_after and not restarted:
                    restarted.append(True)
                    world.restart_controller()
                if not world._step():
                    return

        restarted: list[bool] = []
        job = world.submit(nodes=2, spares=1, torch=torch)
        go()
        world.exit(job, 0, -9)
        go()
        world.agent_dies(world.allocation(job).nodes[1])
        go()
        world.finish(job)
        go()
        return world

    whole = life(None)
    want = summary(whole)
    assert want[0] == ("SUCCEEDED", 3, 2)
    for moment in range(5, len(whole.journal) + 1):
        assert summary(life(moment)) == want, f"killed after event {moment}"


def summary(world: World) -> tuple[object, ...]:
    """What may not depend on when the controller was killed."""
    job = world.job("j1")
    generations = [world.generation("j1", n) for n in range(1, job.generation + 1)]
    return (
        (str(job.status), job.generation, job.restarts),
        [(g.nodes, g.cause, g.replacement, g.restore_step, g.tiers) for g in generations],
        {name: agent.started for name, agent in world.agents.items()},
        {name: (world.node(name).state, world.node(name).job) for name in world.agents},
    )


def test_the_deadlines_of_those_who_were_to_answer_count_from_the_return() -> None:
    world = World()
    job = world.start(nodes=2)
    world.exit(job, 0, -9)
    world.agents["n1"].frozen = True
    world.run()
    assert world.job(job).stage == "fence"
    world.now += 3600
    world.restart_controller()
    assert (world.job(job).stage_deadline_s or 0) >= world.now + limits.FENCE_DEADLINE_S - 1
    world.agents["n1"].frozen = False
    world.run()
    assert world.node("n1").state is NodeState.BUSY and world.job(job).status is JobStatus.RUNNING
