"""Doing what a scenario says: one function per kind of fault, each on whatever is there to be hit."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TypeVar

from myriad.simulator.agent import VirtualAgent
from myriad.simulator.cluster import VirtualCluster, VirtualNode
from myriad.simulator.controller import CrashPoint
from myriad.simulator.scenario import Fault, Kind

T = TypeVar("T")

_CRASH_POINTS = {
    Kind.CRASH_IN_WRITE: CrashPoint.IN_WRITE,
    Kind.CRASH_AFTER_WRITE: CrashPoint.AFTER_WRITE,
    Kind.CRASH_IN_COMMANDS: CrashPoint.IN_COMMANDS,
}


def play(cluster: VirtualCluster) -> None:
    """Put all jobs and faults of the cluster's scenario on its clock."""
    scenario = cluster.scenario
    for number, plan in enumerate(scenario.jobs, 1):
        cluster.heap.at(plan.at, partial(cluster.people.submit, number, plan))
    for fault in scenario.faults:
        cluster.heap.at(fault.at, partial(do, cluster, fault))


def do(cluster: VirtualCluster, fault: Fault) -> None:
    """One fault, now."""
    cluster.note(f"FAULT {fault.line()}", "controller", *cluster.nodes)
    family = {"controller": _controller, "node": _node, "process": _process, "link": _link, "people": _people}
    for take in family.values():
        if take(cluster, fault):
            return
    assert fault.kind in (Kind.STORAGE_ERROR, Kind.STORAGE_SLOW), fault
    until = cluster.heap.now + fault.seconds
    if fault.kind is Kind.STORAGE_ERROR:
        cluster.storage.fails_until = until
    else:
        cluster.storage.slow_until = until


def _pick(things: Sequence[T], index: int) -> T | None:
    return things[index % len(things)] if things else None


def _agents(cluster: VirtualCluster) -> list[VirtualAgent]:
    return [node.agent for node in cluster.nodes.values() if node.agent is not None]


def _controller(cluster: VirtualCluster, fault: Fault) -> bool:
    controller = cluster.controller
    match fault.kind:
        case Kind.CRASH_CONTROLLER:
            controller.downtime_s = fault.seconds
            controller.die(torn_share=fault.index / 1000)
        case Kind.CRASH_IN_WRITE | Kind.CRASH_AFTER_WRITE | Kind.CRASH_IN_COMMANDS:
            controller.downtime_s = fault.seconds
            controller.crash_point = _CRASH_POINTS[fault.kind]
        case Kind.PAUSE_CONTROLLER:
            controller.stop(cluster.heap.now + fault.seconds)
        case Kind.JOURNAL_ERROR:
            controller.downtime_s = fault.seconds
            controller.disk.refuses = True
        case Kind.CLOCK_JUMP:
            controller.wall_offset_s += fault.seconds
        case _:
            return False
    return True


def _node(cluster: VirtualCluster, fault: Fault) -> bool:
    node = _pick(list(cluster.nodes.values()), fault.index)
    agent = _pick(_agents(cluster), fault.index)
    match fault.kind:
        case Kind.KILL_NODE if node is not None:
            node.dark_until = cluster.heap.now + fault.seconds
            if node.agent is not None:
                node.agent.die()
        case Kind.KILL_AGENT:
            if agent is not None:
                agent.die()
        case Kind.PAUSE_AGENT | Kind.PAUSE_NODE:
            if agent is not None:
                cluster.stop_agent(agent, fault.seconds, workers=fault.kind is Kind.PAUSE_NODE)
        case Kind.KILL_STORE:
            if agent is not None:
                agent.kill_store()
        case Kind.KILL_TEMPLATE:
            if agent is not None:
                agent.kill_template()
        case _:
            return False
    return True


def _process(cluster: VirtualCluster, fault: Fault) -> bool:
    worker = _pick(cluster.living_workers(), fault.index)
    match fault.kind:
        case Kind.KILL_WORKER:
            if worker is not None:
                worker.end(-9)
        case Kind.FAIL_WORKER:
            if worker is not None:
                worker.fail("RuntimeError")
        case Kind.PAUSE_WORKER:
            if worker is not None:
                cluster.harm_worker(worker, fault.seconds)
        case _:
            return False
    return True


def _link(cluster: VirtualCluster, fault: Fault) -> bool:
    node = _pick(list(cluster.nodes.values()), fault.index)
    assert node is not None
    until = cluster.heap.now + fault.seconds
    match fault.kind:
        case Kind.CUT:
            _break_off(node)
        case Kind.PARTITION:
            node.link.part(until)
            cluster.controller.watch()
        case Kind.LOSE:
            connection = node.agent.connection if node.agent is not None else None
            if connection is not None:
                connection.losing = True
                cluster.heap.at(until, connection.break_off)
                cluster.controller.watch()
        case Kind.SLOW_LINK:
            node.link.slow_until = max(node.link.slow_until, until)
        case _:
            return False
    return True


def _break_off(node: VirtualNode) -> None:
    if node.agent is not None and node.agent.connection is not None:
        node.agent.connection.break_off()


def _people(cluster: VirtualCluster, fault: Fault) -> bool:
    people = cluster.people
    node = list(cluster.nodes)[fault.index % len(cluster.nodes)]
    match fault.kind:
        case Kind.DRAIN:
            people.drain(node)
        case Kind.UNDRAIN:
            people.undrain(_pick(people.out_of_service(), fault.index) or node)
        case Kind.CANCEL:
            people.cancel(fault.index)
        case Kind.DOWN | Kind.DOWN_CANCEL:
            cluster.controller.downtime_s = fault.seconds
            people.down(cancel_jobs=fault.kind is Kind.DOWN_CANCEL)
        case Kind.RESUBMIT:
            name = _pick(list(people.plans), fault.index)
            if name is not None:
                people.ask_for(name)
        case Kind.INJECT:
            people.inject(fault.index)
        case _:
            return False
    return True
