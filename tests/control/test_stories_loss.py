"""A node is lost: at every stage of a job's life, in every role, with and without somebody to take over."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
from world import World

from myriad.cluster.state import NodeState
from myriad.control import limits
from myriad.control.status import JobStatus, Reason
from myriad.spec.messages import Forget, StartStore, StartWorkers, StopWorkers

When = Callable[[World, str], None]


def in_store(world: World, job: str) -> None:
    assert world.job(job).stage == "store"


def in_workers(world: World, job: str) -> None:
    world.run(until=lambda: world.job(job).stage == "workers")


def running(world: World, job: str) -> None:
    world.run()
    assert world.job(job).status is JobStatus.RUNNING


def in_fence(world: World, job: str) -> None:
    """A worker of the second node was killed; the fence is out."""
    running(world, job)
    world.exit(job, 3, -9)
    world.run(until=lambda: world.job(job).stage == "fence")


def in_second_store(world: World, job: str) -> None:
    in_fence(world, job)
    world.run(until=lambda: world.job(job).generation == 2)
    assert world.job(job).status is JobStatus.RECOVERING


def in_second_workers(world: World, job: str) -> None:
    in_fence(world, job)
    world.run(until=lambda: world.job(job).generation == 2 and world.job(job).stage == "workers")
    assert world.job(job).status is JobStatus.RECOVERING


STAGES = [in_store, in_workers, running, in_fence, in_second_store, in_second_workers]


@pytest.mark.parametrize("torch", [False, True], ids=["command", "model"])
@pytest.mark.parametrize("node", ["n0", "n1"])
@pytest.mark.parametrize("when", STAGES, ids=lambda when: when.__name__)
def test_a_lost_node_is_replaced_by_the_spare(when: When, node: str, torch: bool) -> None:
    world = World()
    job = world.submit(nodes=2, spares=1, torch=torch)
    when(world, job)
    generation = world.job(job).generation
    before = world.job(job).status
    world.agent_dies(node)
    assert world.job(job).status is JobStatus.RECOVERING, before
    world.run()
    after = world.job(job)
    assert after.status is JobStatus.RUNNING
    assert after.generation == generation + 1 and after.restarts == generation
    other = "n1" if node == "n0" else "n0"
    assert world.allocation(job).nodes == (("n2", other) if node == "n0" else (other, "n2"))
    assert world.allocation(job).spares == () and world.allocation(job).lost == (node,)
    assert after.lead == other, "the store is on the lowest surviving rank's node"
    ended = world.generation(job, generation)
    assert ended.culprit_node == node and ended.replacement == {node: "n2"}
    assert ended.cause == f"node {node} was lost (its agent died)"
    assert ended.verdict_s is not None and ended.ended_s is not None and ended.verdict_s <= ended.ended_s
    assert world.node(node).state is NodeState.DOWN and not world.node(node).expected
    assert {m.generation for m in world.sent(StartWorkers, "n2")} == {generation + 1}
    world.finish(job)
    world.run()
    assert world.job(job).reason is Reason.COMPLETED and world.job(job).exit_code == 0


def test_nothing_is_started_again_before_the_fence_is_whole() -> None:
    world = World()
    job = world.start(nodes=2, spares=1)
    world.agents["n1"].frozen = True
    world.exit(job, 0, -9)
    world.run()
    assert world.job(job).stage == "fence" and world.job(job).generation == 1
    assert [m.generation for m in world.sent(StopWorkers, "n1")] == [1]
    assert [m.generation for m in world.sent(StartStore, "n0")] == [1, 2], "only the store may come early"
    assert {m.generation for m in world.sent(StartWorkers)} == {1}
    world.agents["n1"].frozen = False
    world.run()
    assert world.job(job).status is JobStatus.RUNNING and world.job(job).generation == 2


def test_the_leads_node_is_lost_during_the_fence() -> None:
    world = World()
    job = world.start(nodes=3, spares=1)
    world.agents["n2"].frozen = True
    world.exit(job, 2, -9)
    world.run()
    assert world.job(job).lead == "n0" and world.job(job).stage == "fence"
    world.agent_dies("n0")
    assert world.job(job).lead == "n1"
    world.agents["n2"].frozen = False
    world.run()
    assert world.job(job).status is JobStatus.RUNNING and world.job(job).lead == "n1"
    assert world.allocation(job).nodes == ("n3", "n1", "n2")
    assert world.generation(job, 1).culprit_node == "n0", "a lost node explains everything after it"


def test_a_node_that_does_not_confirm_the_fence_is_taken_out() -> None:
    world = World()
    job = world.start(nodes=2, spares=1)
    world.exit(job, 0, -9)
    world.agents["n1"].frozen = True
    world.run()
    world.tick(limits.FENCE_DEADLINE_S + 1)
    assert world.node("n1").state is NodeState.DOWN
    assert world.node("n1").reason == f"it did not confirm the end of its workers for job {job}"
    assert world.job(job).status is JobStatus.RUNNING and world.allocation(job).nodes == ("n0", "n2")


def test_the_new_lead_gets_its_own_time_when_the_old_one_was_late() -> None:
    """Found by a random history: a lead asked at the deadline was itself declared down at once."""
    world = World()
    world.agents["n0"].frozen = True
    job = world.submit(nodes=2)
    world.tick(limits.STORE_DEADLINE_S + limits.FENCE_DEADLINE_S + 1)
    assert world.node("n0").state is NodeState.DOWN
    assert world.node("n1").state is NodeState.BUSY
    assert world.job(job).status is JobStatus.RUNNING


def test_a_store_that_does_not_come_up_is_named() -> None:
    world = World()
    job = world.submit(nodes=2, torch=True)
    stuck = world.agents["n0"]
    world.run(until=lambda: stuck.todo)
    stuck.todo.clear()  # the template never answers
    world.run()
    assert world.job(job).stage == "store"
    world.tick(limits.STORE_DEADLINE_S + 1)
    assert world.generation(job, 1).cause == "n0 did not start a store within 180 s"
    assert world.job(job).status is JobStatus.RUNNING and world.job(job).generation == 2


def test_workers_that_never_finish_a_first_step_are_named() -> None:
    world = World()
    job = world.submit(nodes=2, torch=True)
    world.run(until=lambda: world.agents["n1"].workers())
    world.agents["n1"].todo.clear()
    world.run()
    assert world.job(job).status is JobStatus.STARTING
    world.tick(limits.START_DEADLINE_S + 1)
    assert world.generation(job, 1).cause == "n1 did not finish a first step within 600 s"
    assert world.job(job).status is JobStatus.RUNNING


def test_a_lost_spare_changes_nothing_for_the_job() -> None:
    world = World()
    job = world.start(nodes=2, spares=1)
    before = world.job(job)
    world.agent_dies("n2")
    world.run()
    assert world.job(job) == before
    assert world.allocation(job).spares == () and world.allocation(job).lost == ("n2",)
    world.agent_dies("n0")  # and a free node does what the spare would have done
    world.run()
    assert world.allocation(job).nodes == ("n3", "n1")


@dataclass(frozen=True)
class Preference:
    name: str
    lost: str
    drained: tuple[str, ...]
    want: str


# 8 nodes in two leaves of four; the job holds n0..n2 and the spares n3 and n4 of the other leaf.
PREFERENCES = [
    Preference("the spare in its leaf", "n1", (), "n3"),
    Preference("a spare in another leaf before a free node", "n1", ("n3",), "n4"),
    Preference("a free node when no spare is left", "n1", ("n3", "n4"), "n5"),
    Preference("never a drained node", "n1", ("n3", "n4", "n5"), "n6"),
]


@pytest.mark.parametrize("story", PREFERENCES, ids=lambda story: story.name)
def test_who_takes_over(story: Preference) -> None:
    world = World(nodes=8, leaves=2)
    job = world.start(nodes=3, spares=2)
    assert world.allocation(job).nodes == ("n0", "n1", "n2") and world.allocation(job).spares == ("n3", "n4")
    for node in story.drained:
        world.drain(node)
    world.agent_dies(story.lost)
    world.run()
    assert world.allocation(job).nodes == ("n0", story.want, "n2")
    assert world.job(job).status is JobStatus.RUNNING


def test_two_nodes_at_once() -> None:
    world = World(nodes=6)
    job = world.start(nodes=3, spares=1)
    world.goes_silent("n0")
    world.goes_silent("n2")
    world.run()
    assert world.job(job).status is JobStatus.RUNNING
    assert world.allocation(job).nodes == ("n3", "n1", "n4") and set(world.allocation(job).lost) == {
        "n0",
        "n2",
    }


def test_without_anybody_the_job_waits_and_says_so_and_resumes_from_its_checkpoint() -> None:
    world = World(nodes=2)
    job = world.start(nodes=2, torch=True)
    world.save(job, 10)
    world.run()
    assert (world.job(job).durable_step, world.job(job).durable_generation) == (10, 1)
    world.agent_dies("n1")
    world.run()
    waiting = world.job(job)
    assert waiting.status is JobStatus.PENDING and waiting.reason is Reason.NODE_DEFICIT
    assert waiting.detail == "needs 2 nodes but only 1 of 2 is free (1 down); 1 more node needed"
    assert world.allocation(job).released_s is not None
    assert world.node("n0").state is NodeState.FREE, "it holds nothing while it waits"
    assert world.sent(Forget, "n0")
    world.undrain("n1")
    world.run()
    resumed = world.job(job)
    assert resumed.status is JobStatus.RUNNING and resumed.generation == 3, "2 was given to a store already"
    assert world.allocation(job).number == 2
    begun = world.generation(job)
    assert begun.restore_step == 10 and begun.restore_generation == 1 and set(begun.tiers) == {"durable"}
    starts = [m for m in world.sent(StartWorkers) if m.generation == 3]
    assert {(m.restore_step, m.restore_generation) for m in starts} == {(10, 1)}
    assert world.generation(job, 1).cause == "node n1 was lost (its agent died)"


def test_survivors_restore_from_memory_and_the_newcomer_from_storage() -> None:
    world = World(nodes=3)
    job = world.start(nodes=2, torch=True)
    world.save(job, 10)
    world.run()
    world.agent_dies("n1")
    world.run()
    assert world.generation(job, 2).tiers == ("memory", "memory", "durable", "durable")
    assert world.job(job).detail == "running on 2 nodes, 4 workers"


def test_lost_while_stopping() -> None:
    world = World()
    job = world.start(nodes=2)
    world.agents["n1"].frozen = True
    world.cancel(job)
    world.run()
    assert world.job(job).status is JobStatus.STOPPING
    world.agent_dies("n1")
    assert world.job(job).status is JobStatus.CANCELLED, "nothing of it can be left"
    assert world.node("n0").state is NodeState.FREE and world.node("n1").state is NodeState.DOWN


def test_a_lost_node_rejoins_before_the_fence_is_over() -> None:
    """Found by a random history: a new agent on a lost node does not count as a survivor."""
    world = World(nodes=3)
    job = world.start(nodes=3)
    world.agents["n2"].frozen = True
    world.agent_dies("n1")
    world.undrain("n1")
    world.run()
    assert world.node("n1").state is NodeState.FREE and world.job(job).stage == "fence"
    assert world.sent(StartWorkers, "n1")[1:] == []
    world.agents["n2"].frozen = False
    world.run()
    assert world.job(job).status is JobStatus.RUNNING, "it takes its own place again"
    assert world.allocation(job).nodes == ("n0", "n1", "n2") and world.allocation(job).lost == ()
    assert world.node("n1").job == job


def test_a_lost_node_rejoins_and_goes_to_another_job_before_the_fence_is_over() -> None:
    world = World(nodes=3)
    job = world.start(nodes=2, spares=1)
    waiting = world.submit(nodes=1)
    world.agents["n1"].frozen = True
    world.agent_dies("n0")
    world.undrain("n0")
    world.run(until=lambda: world.job(waiting).status is JobStatus.RUNNING)
    assert world.allocation(waiting).nodes == ("n0",) and world.job(job).stage == "fence"
    world.agents["n1"].frozen = False
    world.run()
    assert world.allocation(job).nodes == ("n2", "n1") and world.job(job).status is JobStatus.RUNNING
    world.finish(job)
    world.run()
    assert world.node("n0").job == waiting and world.job(waiting).status is JobStatus.RUNNING
