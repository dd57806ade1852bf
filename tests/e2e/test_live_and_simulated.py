"""One scenario, lived twice: by real processes under ``myriad up``, and by the virtual cluster on virtual time.

Eight ranks on four of six nodes lose a worker, a node and an agent; the seed draws the order, the victims and the
steps. Both controllers must have taken the same jobs and nodes through the same states and given the same
commands. What is physical is left out: times, pids, ports, incarnations, paths, hosts. So is what depends on which
of two messages of different senders comes first:

* Sequences are compared per job and per node, since messages of different nodes race; there is no one total order.
* Of the symptoms of one failure any may come first (the engine sees the agent's end, the peers' workers fail, the
  connection closes): a job's states that differ in the reason only count as the last of them, and the farewell to
  an agent that is dead already, which is sent while its connection looks open, does not count.

Each fault hits a few steps after a save and long before the next one, so that no restart depends on whether a save
was just in time: a command takes seconds on a loaded machine, and a job 0.1 s for a step, so the victim is stopped
(SIGSTOP) until its end comes, and the other ranks wait for it. The virtual fault hits after the very step that the
job had really reached.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import random
import signal
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
from commandline import cluster_up

from myriad.control.commands import InjectFault, StartAgent
from myriad.control.events import DownRequested, InjectRequested
from myriad.control.journal import Entry, read_row
from myriad.control.records import GenerationRecord, JobRecord, MemberRecord, NodeRecord
from myriad.control.status import JobStatus
from myriad.runtime.store import JournalFile, StateReader
from myriad.simulator.cluster import VirtualCluster, cluster_spec
from myriad.simulator.faults import play
from myriad.simulator.people import job_spec
from myriad.simulator.scenario import JobPlan, Scenario
from myriad.spec.messages import Refused
from recovery import Fault, Site, dataset

SEED = int(os.environ.get("MYRIAD_SEED", "1"))
NODES, ACCELERATORS, RANKS = 4, 2, 8
SNAPSHOT_EVERY, SAVE_EVERY, STEPS = 25, 50, 100
JOB = "j1"
PLAN = JobPlan(
    at=5.0,  # when every node has joined
    nodes=NODES,
    spares=1,
    steps=STEPS,
    snapshot_every=SNAPSHOT_EVERY,
    save_every=SAVE_EVERY,
    peer_every=SNAPSHOT_EVERY,
)
VIRTUAL_DEADLINE_S = 1000.0

Story = dict[str, list[str]]  # of each job and node, in order


@pytest.mark.slow
def test_live_and_simulated_yield_the_same_states_and_commands(tmp_path: Path) -> None:
    draw = random.Random(SEED)
    scenario = Scenario(seed=SEED, nodes=NODES + 2, accelerators=ACCELERATORS, leaves=2, jobs=(PLAN,))
    faults = drawn(draw)
    live, reached = lived(tmp_path, scenario, faults)
    said = f"seed {SEED}: {faults}, hit after steps {reached}"
    for fault, step in zip(faults, reached, strict=True):
        assert 0 < step % SNAPSHOT_EVERY, f"{said}: {fault} fell on a save, this machine is too slow"
    assert not (found := difference(live, simulated(scenario, faults, reached))), f"{said}\n{found}"
    # The comparison sees a fault that is missing, and another victim of the same fault.
    assert difference(live, simulated(scenario, faults[:-1], reached[:-1]))
    for number, fault in enumerate(faults):
        others = [*faults[:number], elsewhere(fault), *faults[number + 1 :]]
        assert difference(live, simulated(scenario, others, reached)), f"{others} looks like {faults}"


def drawn(draw: random.Random) -> list[Fault]:
    """One of each kind in drawn order, 1 to 3 steps after each of the first three saves."""
    kinds = draw.sample(("kill-worker", "kill-node", "kill-agent"), 3)
    faults = []
    for save, kind in enumerate(kinds, 1):
        step = save * SNAPSHOT_EVERY + draw.randint(1, 3)
        if kind == "kill-worker":
            faults.append(Fault(kind, step, rank=draw.randrange(RANKS)))
        else:
            faults.append(Fault(kind, step, node=draw.randrange(NODES)))
    return faults


def elsewhere(fault: Fault) -> Fault:
    if fault.rank is not None:
        return dataclasses.replace(fault, rank=(fault.rank + 1) % RANKS)
    assert fault.node is not None
    return dataclasses.replace(fault, node=(fault.node + 1) % NODES)


# ---------------------------------------------------------------- live


def lived(folder: Path, scenario: Scenario, faults: Sequence[Fault]) -> tuple[Story, list[int]]:
    """The real run's story, and the step at which each fault has hit."""
    with cluster_up(folder, cluster_spec(scenario)) as state:
        site = Site(folder, state)
        assert site.submit(real_job(dataset(folder))) == JOB
        for generation, fault in enumerate(faults, 1):
            until_step(site, generation, fault.step)
            stop(site, fault)
            site.harm(JOB, fault)
        assert site.until_end(JOB).status is JobStatus.SUCCEEDED, site.job(JOB)
        with StateReader(site.dir) as reader:
            reports = list(reader.step_reports(JOB))
    steps = [max(r.step for r in reports if r.generation == n) for n in range(1, len(faults) + 1)]
    with JournalFile(state) as journal:
        return told(map(read_row, journal.rows())), steps


def real_job(data: Path) -> dict[str, Any]:
    """The virtual job on real data, with a batch that makes its steps take a tenth of a second on two cores."""
    spec = job_spec("job-1", PLAN, ACCELERATORS)
    spec["model"] |= {"vocab_size": 258, "dim": 64, "ffn_dim": 128}
    spec["data"] |= {"path": str(data), "sequence_length": 64, "global_batch": 2 * RANKS}
    return spec


def until_step(site: Site, generation: int, step: int) -> None:
    def reached() -> bool:
        with StateReader(site.dir) as reader:
            return any(r.generation == generation and r.step >= step for r in reader.last_reports(JOB))

    site.until(JOB, reached, f"step {step} of generation {generation}")


def stop(site: Site, fault: Fault) -> None:
    """Hold the job where it is: one rank of those that the fault is about to kill stands still."""
    rank = (fault.node or 0) * ACCELERATORS if fault.rank is None else fault.rank
    with StateReader(site.dir) as reader:
        statuses = [m.status for m in reader.records(MemberRecord).values() if m.job == JOB]
    (pid,) = (status.pids[rank] for status in statuses if status is not None and rank in status.pids)
    os.kill(pid, signal.SIGSTOP)


# ---------------------------------------------------------------- simulated


def simulated(scenario: Scenario, faults: Sequence[Fault], steps: Sequence[int]) -> Story:
    """The story of the same scenario in the virtual cluster; each fault hits after its step."""
    cluster = VirtualCluster(scenario)
    play(cluster)
    for generation, (fault, step) in enumerate(zip(faults, steps, strict=True), 1):

        def reached(generation: int = generation, step: int = step) -> bool:
            ranks = [w for w in cluster.living_workers() if w.generation == generation]
            return len(ranks) == RANKS and all(w.step >= step for w in ranks)

        run_until(cluster, reached, f"step {step} of generation {generation}")
        target = f"{JOB}/{fault.rank}" if fault.node is None else placement(cluster)[fault.node]
        cluster.controller.post(InjectRequested(kind=fault.kind, target=target))  # type: ignore[arg-type]
    run_until(cluster, lambda: cluster.state.job(JOB).status.final, "the job's end")
    cluster.controller.post(DownRequested(cancel_jobs=True))
    run_until(cluster, lambda: not cluster.controller.alive, "the cluster is down")
    cluster.controller.disk.open()
    return told(map(read_row, cluster.controller.disk.rows))


def placement(cluster: VirtualCluster) -> Sequence[str]:
    return cluster.state.allocation(JOB).nodes


def run_until(cluster: VirtualCluster, done: Callable[[], bool], what: str) -> None:
    while not done():
        assert cluster.heap.step(VIRTUAL_DEADLINE_S), f"never came in the virtual cluster: {what}"


# ---------------------------------------------------------------- comparing


def told(entries: Iterable[Entry]) -> Story:
    """What happened to each job and node, and what was asked of each node, without what is physical."""
    states: dict[str, list[str]] = defaultdict(list)
    commands: dict[str, list[str]] = defaultdict(list)
    restores: dict[tuple[str, int], int | None] = {}
    for entry in entries:
        for change in entry.changes:
            match change:
                case GenerationRecord():
                    restores[change.job, change.generation] = change.restore_step
                    if change.culprit_node:
                        add(states[f"states of {change.job}"], blamed(change))
                case JobRecord():
                    restored = restores.get((change.id, change.generation))
                    add_job(states[f"states of {change.id}"], change, restored)
                case NodeRecord():
                    add(states[f"states of {change.name}"], f"{change.state} for {change.job}")
                case _:
                    pass
        for command in entry.commands:
            match command:
                case StartAgent():
                    commands[f"commands to {command.node}"].append("StartAgent")
                case InjectFault():
                    commands["harm"].append(f"{command.kind} {command.target}")
                case _ if not isinstance(command.message, Refused):
                    commands[f"commands to {command.node}"].append(asked(command.message))
    return {**states, **commands}


def add(lines: list[str], line: str) -> None:
    if not lines or lines[-1] != line:
        lines.append(line)


def add_job(lines: list[str], job: JobRecord, restored: int | None) -> None:
    """The job's next state, in the place of the last one if only the symptom is another one."""
    status = (
        f"{job.status} {job.stage} generation {job.generation} from {restored} durable {job.durable_step}"
    )
    if lines and job.stage == "fence" and lines[-1].startswith(f"{status}: "):
        lines.pop()
    add(lines, f"{status}: {job.reason}")


def blamed(ended: GenerationRecord) -> str:
    """What the controller found that a generation died of."""
    rank = "" if ended.culprit_rank is None else f" rank {ended.culprit_rank}"
    return f"generation {ended.generation} ended by {ended.culprit_node}{rank}, replaced: {ended.replacement}"


TOLD = (
    "job",
    "generation",
    "torch",
    "restarts",
    "world_size",
    "node_rank",
    "restore_step",
    "restore_generation",
    "durable_step",
    "durable_generation",
    "grace_s",
    "keep",
    "step",
)


def asked(message: Any) -> str:
    """A command in words: its kind, and what of it is no address."""
    facts = [f"{name}={getattr(message, name)}" for name in TOLD if hasattr(message, name)]
    facts += [f"rank {plan.rank}: {plan.tier}" for plan in getattr(message, "ranks", ())]
    return f"{type(message).__name__}({', '.join(facts)})"


def difference(live: Story, virtual: Story) -> str:
    """What differs, with a few lines around it; empty when nothing does."""
    parts: list[str] = []
    for name in sorted(live.keys() | virtual.keys()):
        parts += difflib.unified_diff(
            live.get(name, []), virtual.get(name, []), f"live: {name}", f"simulated: {name}", lineterm=""
        )
    return "\n".join(parts)
