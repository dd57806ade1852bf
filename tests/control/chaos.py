"""Random histories for the virtual cluster, each named by a seed.

A history draws one action at a time: a delivery out of turn, the end of a worker, a broken connection, a lost
node, a repeated message, an operator's whim, a killed controller, time. ``heal`` then stops the faults and
lets everything come to its end. About 10 ms for 200 actions.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import msgspec
from virtual_agent import VirtualAgent
from world import World

from myriad.cluster.state import NodeState
from myriad.control.controller import Controller
from myriad.control.events import MemberReported, NodeSilent
from myriad.control.records import JobRecord, NodeRecord
from myriad.control.state import State
from myriad.control.status import JobStatus

JOBS_MAX = 6
# Restarts stop at a budget and each takes a few deadlines; more than this means that a job goes in circles.
DEADLINES_MAX = 400


class Chaos:
    """One random history of ``steps`` actions."""

    def __init__(self, seed: int, steps: int) -> None:
        self.random = random.Random(seed)
        self.steps = steps
        self.world = World(nodes=self.random.randint(2, 6), leaves=self.random.randint(1, 2), boot=False)
        self.weights: list[tuple[float, Callable[[], None]]] = [
            (60, self.work),
            (8, self.operate),
            (self.random.choice((0, 8)), self.end_worker),
            (self.random.choice((0, 8)), self.save),
            (self.random.choice((0, 4)), self.break_connection),
            (self.random.choice((0, 2)), self.lose_node),
            (self.random.choice((0, 2)), self.freeze),
            (self.random.choice((0, 6)), self.repeat),
            (self.random.choice((0, 1)), self.restart),
            (2, self.wait),
        ]

    def run(self) -> World:
        actions = [action for _, action in self.weights]
        weights = [weight for weight, _ in self.weights]
        for action in self.random.choices(actions, weights, k=self.steps):
            action()
        return self.world

    # ------------------------------------------------------------ actions

    def _some_agent(self, fits: Callable[[VirtualAgent], object]) -> VirtualAgent | None:
        fitting = [agent for agent in self.world.agents.values() if agent.alive and fits(agent)]
        return self.random.choice(fitting) if fitting else None

    def work(self) -> None:
        """One thing that an agent has to do, in no order but that of its connection."""
        agent = self._some_agent(lambda a: not a.frozen and (a.outbox or a.inbox or a.todo))
        if agent is None:
            return
        kinds = [queue for queue in (agent.outbox, agent.inbox, agent.todo) if queue]
        queue = self.random.choice(kinds)
        if queue is agent.outbox:
            agent.report()
        elif queue is agent.inbox:
            agent.receive(agent.inbox.popleft())
        else:
            index = self.random.randrange(len(agent.todo))
            todo = agent.todo[index]
            del agent.todo[index]
            todo()

    def operate(self) -> None:
        world, draw = self.world, self.random
        node = draw.choice(list(world.state.table(NodeRecord)))
        match draw.randrange(5):
            case 0 | 1 if world.submissions < JOBS_MAX:
                limit: dict[str, Any] = {"time_limit": draw.choice((5, 50))} if draw.random() < 0.2 else {}
                world.submit(
                    nodes=draw.randint(1, 3), spares=draw.randint(0, 1), torch=draw.random() < 0.5, **limit
                )
            case 2 if world.state.live and draw.random() < 0.5:
                world.cancel(draw.choice(list(world.state.live)))
            case 3:
                world.drain(node)
            case _:
                world.undrain(node)

    def end_worker(self) -> None:
        agent = self._some_agent(lambda a: a.workers())
        if agent is not None:
            job, rank = self.random.choice(agent.workers())
            code = self.random.choice((0, 0, 0, 3, -9))
            step = self.random.choice((None, 5))
            agent.exit(
                job, rank, code, step, self.random.choice(("", "ValueError", "PeerLost")) if code > 0 else ""
            )

    def save(self) -> None:
        agent = self._some_agent(lambda a: a.workers())
        if agent is not None:
            job, rank = self.random.choice(agent.workers())
            record = self.world.generation(job, agent.members[job].generation)
            ranks = [r for j, r in agent.workers() if j == job] if self.random.random() < 0.7 else [rank]
            for each in ranks:
                agent.save(job, each, (record.restore_step or 0) // 10 * 10 + 10)

    def break_connection(self) -> None:
        agent = self._some_agent(lambda a: a.incarnation)
        if agent is None:
            return
        if agent.linked:
            agent.cut()
        if self.random.random() < 0.7:
            agent.todo.appendleft(agent.redial)

    def lose_node(self) -> None:
        agent = self._some_agent(lambda a: True)
        if agent is None:
            return
        if self.random.random() < 0.6:
            self.world.agent_dies(agent.node)
        elif self.random.random() < 0.5:
            self.world.goes_silent(agent.node)
        else:
            beats = self.random.randint(3, 8)
            event = NodeSilent(node=agent.node, incarnation=agent.incarnation, beats=beats, silent_s=2.0)
            self.world.handle(event)

    def freeze(self) -> None:
        agent = self._some_agent(lambda a: True)
        if agent is not None:
            agent.frozen = not agent.frozen

    def repeat(self) -> None:
        """An old report arrives once more."""
        reports = [e.event for e in self.world.journal if isinstance(e.event, MemberReported)]
        if reports:
            self.world.handle(self.random.choice(reports[-50:]))

    def restart(self) -> None:
        self.world.restart_controller()

    def wait(self) -> None:
        if self.random.random() < 0.5:
            self.world.pass_time(self.random.choice((0.1, 1.0, 30.0)))
        elif (due := self.world.controller.next_deadline()) is not None:
            self.world.pass_time(max(0.0, due - self.world.now))


def heal(world: World) -> None:
    """No more faults: everybody works, answers and dials; time passes until nothing is in motion."""
    for agent in list(world.agents.values()):
        agent.frozen = False
        if agent.alive and not agent.linked:
            agent.todo.appendleft(agent.redial)
    world.run()
    for _ in range(DEADLINES_MAX):
        moving = [world.job(j) for j in world.state.live if world.job(j).status is not JobStatus.PENDING]
        if not moving:
            return
        for job in moving:
            if world.job(job.id).status is JobStatus.RUNNING:
                finish_what_runs(world, job.id)
        world.run()
        due = world.controller.next_deadline()
        if due is not None:
            world.pass_time(max(0.0, due - world.now))
    raise AssertionError(f"jobs go in circles: {moving}")


def finish_what_runs(world: World, job: str) -> None:
    """The workers that are left exit with 0."""
    for agent in list(world.agents.values()):
        for name, rank in agent.workers() if agent.alive else ():
            if name == job:
                agent.exit(job, rank, 0)


def everything_back(world: World) -> None:
    """The operator puts every node back into service, and what waited runs to its end."""
    for node, record in world.state.table(NodeRecord).items():
        if record.state in (NodeState.DOWN, NodeState.DRAINED, NodeState.DRAINING):
            world.undrain(node)
    world.run()
    heal(world)


def replays(world: World) -> None:
    """The journal's events in a fresh controller: the same bytes; the fold of its changes: the same state."""
    fresh = Controller()
    encode = msgspec.json.encode
    for entry in world.journal:
        commands = fresh.handle(entry.event, entry.now)
        assert encode(fresh.changes) == encode(list(entry.changes)), entry.event
        assert encode(commands) == encode(list(entry.commands)), entry.event
    for folded in (State(c for entry in world.journal for c in entry.changes), world.disk.load()):
        assert list(folded.records()) == list(world.state.records())
        assert list(folded.live) == list(world.state.live)
        assert folded.requests == world.state.requests
        for job in folded.table(JobRecord):
            assert list(folded.members(job).items()) == list(world.state.members(job).items())
        assert folded.cluster.counters == world.state.cluster.counters
        assert list(folded.cluster.nodes) == list(world.state.cluster.nodes)
