"""How often a job saves: decided with each checkpoint and each start, from what was measured and what has failed."""

from __future__ import annotations

import msgspec
from world import World

from myriad.control.records import HazardRecord, IntervalRecord
from myriad.planner.intervals import FIRST
from myriad.spec.messages import Commit, Intervals, SaveCosts, StartWorkers

DAY_S = 86400.0
COSTS = SaveCosts(step_s=1.0, memory_s=0.1, peer_s=0.2, durable_s=5.0, intervals=FIRST)


def record(world: World, job: str) -> IntervalRecord:
    return world.state.table(IntervalRecord)[job]


def hazard(world: World) -> HazardRecord:
    return world.state.table(HazardRecord)["cluster"]


def durable(world: World, job: str) -> int:
    found = record(world, job).intervals
    assert found is not None
    return found.durable


def test_a_commit_carries_what_follows_from_the_costs() -> None:
    world = World()
    job = world.start(nodes=2, torch=True)
    assert world.sent(StartWorkers, "n0")[0].intervals == FIRST
    world.save(job, 10)
    world.run()
    assert world.sent(Commit, "n0")[-1].intervals == FIRST, "nothing was measured"
    slower = msgspec.structs.replace(COSTS, durable_s=20.0)
    world.save(job, 20, [0, 1, 2], COSTS)
    world.save(job, 20, [3], slower)
    world.run()
    found = world.sent(Commit, "n0")[-1].intervals
    assert found == record(world, job).intervals == world.sent(Commit, "n1")[-1].intervals
    assert found.durable > FIRST.durable and "costs 20 s" in record(world, job).why["durable"]


def test_a_start_goes_by_the_last_decision_however_often_it_is_sent() -> None:
    world = World()
    job = world.start(nodes=2, torch=True)
    world.save(job, 10, costs=COSTS)
    world.run()
    decided = record(world, job).intervals
    world.exit(job, 0, -9)
    world.run(lambda: world.job(job).generation == 2)
    world.agents["n1"].frozen = True
    world.run()
    assert decided is not None and decided != FIRST
    assert world.generation(job).intervals == world.sent(StartWorkers, "n0")[-1].intervals
    assert world.sent(StartWorkers, "n0")[-1].intervals.peer == decided.peer, "no node has failed"
    world.tick(1.0)
    world.reconnect("n1")
    world.agents["n1"].frozen = False
    world.run()
    assert world.sent(StartWorkers, "n1")[-1].intervals == world.generation(job).intervals


def test_failures_shorten_the_interval_of_the_tier_that_survives_them() -> None:
    world = World(nodes=6)
    job = world.start(nodes=2, spares=2, torch=True, checkpoint={"peer_every_steps": "auto"})
    world.pass_time(DAY_S)
    world.save(job, 10, costs=COSTS)
    world.run()
    calm = record(world, job).intervals
    assert calm is not None
    for number in range(3):
        world.pass_time(3600.0)
        world.exit(job, 0, -9, step=11 + number)
        world.run()
    processes = record(world, job).intervals
    assert processes is not None
    assert processes.memory < calm.memory and processes.peer == calm.peer, (calm, processes)
    assert record(world, job).process.failures > 2 and hazard(world).node.failures == 0
    world.pass_time(3600.0)
    world.agent_dies(world.allocation(job).nodes[0])
    world.run()
    nodes = record(world, job).intervals
    assert nodes is not None and nodes.peer < processes.peer, (processes, nodes)
    assert hazard(world).node.failures == 1 and hazard(world).domain.failures == 0


def test_two_nodes_at_once_are_a_domain() -> None:
    world = World(nodes=6)
    job = world.start(nodes=3, spares=2, torch=True)
    first, second, _ = world.allocation(job).nodes
    world.agents[world.allocation(job).nodes[2]].frozen = True  # the fence is not done yet
    world.agent_dies(first)
    world.agent_dies(second)
    world.agents[world.allocation(job).nodes[2]].frozen = False
    world.run()
    assert (hazard(world).node.failures, hazard(world).domain.failures) == (0, 1)


def test_without_a_spare_storage_is_what_a_lost_node_comes_back_from() -> None:
    for nodes, words in ((3, "of several nodes"), (2, "of a node or of several nodes")):
        world = World(nodes=nodes)
        job = world.start(nodes=2, torch=True)
        world.save(job, 10, costs=COSTS)
        world.run()
        assert words in record(world, job).why["durable"], record(world, job).why


def test_the_time_of_a_controller_that_is_away_is_not_counted() -> None:
    world = World()
    job = world.start(nodes=2, torch=True)
    world.tick(3600.0)
    world.save(job, 10)
    world.run()
    before = record(world, job).process.node_days
    world.tick(30 * DAY_S)
    world.restart_controller()
    world.run()
    world.save(job, 20)
    world.run()
    assert record(world, job).process.node_days <= before + 0.01


def test_what_the_job_says_stays() -> None:
    world = World()
    fixed = {"every_steps": 50, "snapshot_every_steps": 2, "peer_every_steps": 0}
    job = world.start(nodes=2, torch=True, checkpoint=fixed)
    world.save(job, 50, costs=COSTS)
    world.run()
    assert world.sent(Commit, "n0")[-1].intervals == Intervals(memory=2, peer=0, durable=50)
