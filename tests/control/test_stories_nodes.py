"""Operators drain and undrain; agents come, go, wake up from the dead and start anew."""

from __future__ import annotations

import pytest
from world import World

from myriad.cluster.state import NodeState
from myriad.control import limits
from myriad.control.commands import StartAgent
from myriad.control.events import NodeSilent
from myriad.control.status import JobStatus, Reason
from myriad.spec.messages import Refused, Shutdown, StartWorkers

# ---------------------------------------------------------------- drain


def test_a_free_node_drains_at_once_and_is_not_used() -> None:
    world = World(nodes=2)
    world.drain("n0", "fan is loud")
    assert world.node("n0").state is NodeState.DRAINED and world.node("n0").reason == "fan is loud"
    job = world.submit(nodes=2)
    world.run()
    assert world.job(job).status is JobStatus.PENDING and "1 drained" in world.job(job).detail
    world.undrain("n0")
    world.run()
    assert world.job(job).status is JobStatus.RUNNING


@pytest.mark.parametrize("node", ["n0", "n2"], ids=["busy", "spare"])
def test_a_node_in_use_leaves_with_its_job(node: str) -> None:
    world = World()
    job = world.start(nodes=2, spares=1)
    before = world.job(job)
    world.drain(node)
    assert world.node(node).state is NodeState.DRAINING and world.job(job) == before
    assert world.node(node).reason == "drained by an operator"
    world.finish(job)
    world.run()
    assert world.node(node).state is NodeState.DRAINED and world.node(node).job is None


@pytest.mark.parametrize(("node", "back"), [("n0", NodeState.BUSY), ("n2", NodeState.SPARE)])
def test_undrain_before_it_has_left(node: str, back: NodeState) -> None:
    world = World()
    world.start(nodes=2, spares=1)
    world.drain(node)
    world.undrain(node)
    assert world.node(node).state is back and world.node(node).reason == ""


def test_a_draining_spare_takes_over_from_nobody() -> None:
    world = World()
    job = world.start(nodes=2, spares=1)
    world.drain("n2")
    world.agent_dies("n0")
    world.run()
    assert world.allocation(job).nodes == ("n3", "n1")


def test_a_draining_node_that_fails_twice_leaves_and_does_not_become_a_spare() -> None:
    world = World()
    job = world.start(nodes=1, spares=1)
    world.drain("n0")
    for _ in range(2):
        world.exit(job, 0, 3)
        world.run()
    assert world.allocation(job).nodes == ("n1",) and world.allocation(job).spares == ()
    assert world.node("n0").state is NodeState.DRAINED


def test_a_node_that_is_down_stays_down_until_it_is_asked_back() -> None:
    world = World()
    world.agent_dies("n0")
    assert world.node("n0").state is NodeState.DOWN
    world.drain("n0", "send it away")
    world.run()
    assert world.node("n0").reason == "send it away"
    world.undrain("n0")
    assert world.journal[-1].commands == (StartAgent(node="n0", fenced="n0.1"),)
    world.run()
    assert world.node("n0").state is NodeState.FREE and world.node("n0").incarnation == "n0.2"


# ---------------------------------------------------------------- silence


def test_silence_is_a_suspicion_while_the_connection_is_open() -> None:
    world = World()

    def silent(beats: int) -> None:
        world.handle(NodeSilent(node="n0", incarnation="n0.1", beats=beats, silent_s=beats / 2))

    silent(limits.SUSPECT_BEATS)
    assert world.node("n0").suspect and world.node("n0").state is NodeState.FREE
    world.reconnect("n0")
    assert not world.node("n0").suspect
    silent(limits.DEAD_BEATS)
    assert world.node("n0").state is NodeState.DOWN and world.node("n0").reason == "no heartbeat for 4.0 s"


def test_silence_and_a_closed_connection_are_a_verdict() -> None:
    world = World()
    world.goes_silent("n0", beats=limits.SUSPECT_BEATS)
    assert world.node("n0").state is NodeState.DOWN


def test_a_short_break_of_the_connection_changes_nothing() -> None:
    world = World()
    job = world.start(nodes=2)
    before = world.job(job)
    world.agents["n0"].cut()
    world.run()
    world.reconnect("n0")
    world.run()
    assert world.job(job) == before and world.agents["n0"].workers() == [(job, 0), (job, 1)]


def test_a_zombie_is_refused_and_its_words_are_ignored() -> None:
    world = World()
    job = world.start(nodes=2, spares=1)
    world.goes_silent("n0")
    world.run()
    assert world.job(job).status is JobStatus.RUNNING and world.allocation(job).nodes == ("n2", "n1")
    zombie = world.agents["n0"]
    assert zombie.alive and zombie.members[job].generation == 1, "it still runs the old generation"
    before = world.job(job)
    zombie.dial()
    refusal = world.journal[-1].commands[0].message  # type: ignore[union-attr]
    assert refusal == Refused(reason="it was declared dead")
    world.run()
    assert not zombie.alive and world.job(job) == before
    assert world.node("n0").state is NodeState.DOWN


def test_a_zombie_makes_room_for_the_agent_that_was_asked_for() -> None:
    world = World()
    world.goes_silent("n0")
    world.undrain("n0")
    world.run()
    assert world.agents["n0"].incarnation == "n0.1", "the engine starts none beside a living one"
    world.agents["n0"].dial()
    world.run()
    assert world.node("n0").state is NodeState.FREE and world.node("n0").incarnation == "n0.2"


def test_an_unasked_agent_is_sent_away() -> None:
    world = World()
    world.agent_dies("n0")
    world._execute(StartAgent(node="n0"))
    world.run()
    assert world.sent(Refused, "n0") == [Refused(reason="node n0 is down; undrain it first")]
    assert world.node("n0").state is NodeState.DOWN


def test_a_second_life_of_an_agent_is_the_loss_of_the_first() -> None:
    """Killed while the controller was away: nobody saw it die."""
    world = World()
    job = world.start(nodes=2)
    world.restart_controller(dial=False)
    world.agents["n1"].die()
    world.agents["n0"].dial()
    world._execute(StartAgent(node="n1"))
    world.run()
    assert world.generation(job, 1).culprit_node == "n1"
    assert world.job(job).status is JobStatus.RUNNING and world.job(job).generation == 2
    assert world.node("n1").incarnation == "n1.2" and world.node("n1").job == job
    assert [m.generation for m in world.sent(StartWorkers, "n1")] == [1, 2]


def test_a_drained_node_stays_so_over_a_second_life_and_over_down() -> None:
    world = World()
    world.drain("n0")
    world.restart_controller(dial=False)
    world.agents["n0"].die()
    world._execute(StartAgent(node="n0"))
    for node in ("n1", "n2", "n3", "n4"):
        world.reconnect(node)
    world.run()
    assert world.node("n0").state is NodeState.DRAINED
    world.down()
    world.run()
    assert not any(agent.alive for agent in world.agents.values())
    world.restart_controller()
    world.run()
    assert world.node("n0").state is NodeState.DOWN and world.node("n0").reason == "drained by an operator"
    assert world.node("n1").state is NodeState.FREE


# ---------------------------------------------------------------- down


def test_down_leaves_jobs_alone() -> None:
    world = World(nodes=3)
    job = world.start(nodes=2)
    waiting = world.submit(nodes=2)
    world.down()
    world.run()
    assert world.job(job).status is JobStatus.RUNNING and world.job(waiting).status is JobStatus.PENDING
    assert [a.node for a in world.agents.values() if a.alive] == ["n0", "n1"], "agents without a job exit"
    world.restart_controller()
    world.run()
    assert world.job(job).status is JobStatus.RUNNING and world.job(job).generation == 1
    assert world.node("n2").state is NodeState.FREE
    world.finish(job)
    world.run()
    assert world.job(waiting).status is JobStatus.RUNNING


def test_an_agent_that_was_not_connected_at_the_time_is_told_when_it_dials() -> None:
    world = World(nodes=2)
    world.agents["n0"].cut()
    world.down()
    world.reconnect("n0")
    world.run()
    assert not any(agent.alive for agent in world.agents.values())


def test_down_can_take_the_jobs_along() -> None:
    world = World(nodes=3)
    job = world.start(nodes=2)
    waiting = world.submit(nodes=3)
    world.down(cancel_jobs=True)
    assert world.job(waiting).reason is Reason.CANCELLED
    assert world.sent(Shutdown, "n2") and not world.sent(Shutdown, "n0")
    world.run()
    assert world.job(job).status is JobStatus.CANCELLED
    assert not any(agent.alive for agent in world.agents.values())
