"""What a job will need and where its accelerator-seconds will go, before it runs.

Method: model arithmetic for parameters, memory and FLOPs; one probe of the machine for speeds; the cost of
collectives on the fabric. The result holds the ledger's lines that can be predicted, in accelerator-seconds
of the whole job without failures; every other line is None, not predicted, never a guess. Trade-off: a
bound on the step time rather than a fit (see ``compute`` and ``communication`` for what it leaves out). A
plan of an 8-rank job takes 0.2 ms, one of 16,384 ranks 60 ms.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from myriad.fabric import Fabric
from myriad.planner import communication, compute, intervals, memory
from myriad.planner.memory import RankMemory
from myriad.planner.probe import Probe
from myriad.planner.subject import Subject, subject_of
from myriad.spec.arithmetic import Attention, checkpoint_bytes, mfu, parameters, rank_bytes, step_flops
from myriad.spec.causes import Cause
from myriad.spec.cluster import ClusterSpec
from myriad.spec.failures import DAY_S, PUBLISHED_RATE
from myriad.spec.job import JobSpec
from myriad.spec.messages import Intervals, SaveCosts


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of one step, averaged over the ranks. None: not predicted."""

    compute_s: float
    pipeline_bubble_s: float
    exposed_communication_s: float | None

    @property
    def total_s(self) -> float:
        """What is predicted of a step: a lower bound when communication is not."""
        return self.compute_s + self.pipeline_bubble_s + (self.exposed_communication_s or 0.0)


@dataclass(frozen=True, slots=True)
class Plan:
    """The prediction for one job. ``refusals`` are the reasons why it cannot work; empty when it can."""

    job: str
    node_type: str
    node_count: int
    workers_per_node: int
    world: int
    parameters: int
    steps: int
    tokens_per_step: int
    flops_per_step: Mapping[Attention, int]
    memory: RankMemory
    checkpoint_bytes: int
    step: StepTime
    mfu_bound: Mapping[Attention, float]
    peak_flops_per_s: float  # of one accelerator
    saves: intervals.Choice
    checkpoint_wait_s: float | None  # of the whole job
    startup_s: float | None
    ledger: Mapping[Cause, float | None]  # accelerator-seconds
    refusals: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def tokens_per_s(self) -> float:
        return self.tokens_per_step / self.step.total_s

    @property
    def wall_time_s(self) -> float:
        """From the grant of the nodes to the last step, of what is predicted."""
        return self.steps * self.step.total_s + (self.checkpoint_wait_s or 0.0) + (self.startup_s or 0.0)


def plan(job: JobSpec, cluster: ClusterSpec, probe: Probe, nodes: Sequence[str] | None = None) -> Plan:
    """Predict a model job on a cluster. ``nodes`` is its placement in rank order, where there is one already.

    SpecError when the job has no model or can never run on the cluster as written.
    """
    subject = subject_of(job, cluster, probe, nodes)
    rank = memory.rank_memory(subject)
    too_big = memory.refusal(rank, subject)
    step = _step_time(subject, cluster)
    costs = save_costs(subject, step.total_s)
    choice = chosen_intervals(subject, costs)
    waits, startup = checkpoint_wait_s(subject, costs, choice.intervals), startup_s(subject)
    flops: dict[Attention, int] = {
        "causal": step_flops(subject.model, subject.data, "causal"),
        "full": step_flops(subject.model, subject.data, "full"),
    }
    peak = subject.flops_per_s
    return Plan(
        job=job.name,
        node_type=subject.type_name,
        node_count=subject.node_count,
        workers_per_node=subject.workers_per_node,
        world=subject.world,
        parameters=parameters(subject.model),
        steps=subject.optimizer.steps,
        tokens_per_step=subject.data.global_batch * subject.data.sequence_length,
        flops_per_step=flops,
        memory=rank,
        checkpoint_bytes=checkpoint_bytes(subject.model),
        step=step,
        mfu_bound={kind: mfu(count, step.total_s, subject.world, peak) for kind, count in flops.items()},
        peak_flops_per_s=peak,
        saves=choice,
        checkpoint_wait_s=waits,
        startup_s=startup,
        ledger=_ledger(subject, step, waits, startup),
        refusals=() if too_big is None else (too_big,),
        notes=_notes(subject),
    )


def save_costs(subject: Subject, step_s: float) -> SaveCosts | None:
    """What a save of each kind stops training for; None without a storage rate, 0 for what is not predicted.

    A durable checkpoint is written at the shared rate of the storage. A snapshot copies a rank's state; emulated
    ranks take turns on the cores. What a copy in a peer's memory costs beyond its snapshot is not predicted.
    """
    probe = subject.probe
    if probe.storage_write_bytes_per_s is None:
        return None
    snapshot_s = 0.0
    if probe.memory_copy_bytes_per_s is not None:
        needs = [rank_bytes(subject.model, subject.layout, subject.data, s) for s in range(subject.layout.pp)]
        largest = max(memory.snapshot_bytes(need) for need in needs)
        turns = max(1.0, subject.world / probe.cores) if probe.emulated else 1.0
        snapshot_s = turns * largest / probe.memory_copy_bytes_per_s
    durable_s = checkpoint_bytes(subject.model) / probe.storage_write_bytes_per_s
    return SaveCosts(step_s, snapshot_s, snapshot_s, durable_s, intervals.first(subject.checkpoint))


def chosen_intervals(subject: Subject, costs: SaveCosts | None) -> intervals.Choice:
    """How often the job will save if failures come as often as in published fleets, and every node has a spare."""
    per_s = {each: subject.node_count * rate / DAY_S for each, rate in PUBLISHED_RATE.items()}
    survives_node = subject.node_count > 1 and subject.checkpoint.peer_every_steps != 0
    exposed = intervals.exposures(per_s, survives_node)
    return intervals.choose(subject.checkpoint, costs, 0.0, exposed, intervals.first(subject.checkpoint))


def checkpoint_wait_s(subject: Subject, costs: SaveCosts | None, every: Intervals) -> float | None:
    """Seconds the whole job stands still for durable checkpoints (one at the end) and snapshots."""
    if costs is None:
        return None
    steps = subject.optimizer.steps
    return -(-steps // every.durable) * costs.durable_s + steps // every.memory * costs.memory_s


def startup_s(subject: Subject) -> float | None:
    """Seconds from the grant of the nodes until every worker runs; None when a fork was not measured.

    A template forks its node's workers one after the other; emulated nodes take turns on the cores.
    """
    probe = subject.probe
    if probe.fork_s is None:
        return None
    turns = -(-subject.node_count // probe.cores) if probe.emulated else 1
    return turns * (probe.template_s + subject.workers_per_node * probe.fork_s)


def _step_time(subject: Subject, cluster: ClusterSpec) -> StepTime:
    arithmetic = compute.compute_time(subject)
    exposed_s = None
    if subject.nodes:
        exposed_s = communication.communication_s(subject, Fabric.from_spec(cluster))
    return StepTime(arithmetic.compute_s, arithmetic.pipeline_bubble_s, exposed_s)


def _ledger(
    subject: Subject, step: StepTime, waits_s: float | None, startup: float | None
) -> dict[Cause, float | None]:
    """Every cause of the ledger: accelerator-seconds of the whole job, or None."""
    steps = subject.optimizer.steps
    seconds: dict[Cause, float | None] = dict.fromkeys(Cause)
    seconds[Cause.COMPUTE] = steps * step.compute_s
    seconds[Cause.PIPELINE_BUBBLE] = steps * step.pipeline_bubble_s
    if step.exposed_communication_s is not None:
        seconds[Cause.EXPOSED_COMMUNICATION] = steps * step.exposed_communication_s
    seconds[Cause.CHECKPOINT_WAIT] = waits_s
    seconds[Cause.STARTUP] = startup
    return {cause: None if value is None else value * subject.world for cause, value in seconds.items()}


def _notes(subject: Subject) -> tuple[str, ...]:
    """What a reader must know to use the figures."""
    probe = subject.probe
    notes = ["the step time is a bound: arithmetic at the speed of a large matrix product"]
    if probe.emulated and subject.world > probe.cores:
        notes.append(f"{subject.world} emulated accelerators share {probe.cores} cores of one machine")
    if not subject.nodes:
        notes.append(
            f"communication is not predicted: the cluster has fewer than {subject.node_count} nodes of type "
            f"{subject.type_name}"
        )
    if probe.storage_write_bytes_per_s is not None and probe.memory_copy_bytes_per_s is None:
        notes.append("checkpoint_wait leaves out snapshots: the speed of a memory copy was not measured")
    return tuple(notes)
