"""The controller's part in how often a job saves: it counts failures and node-days, hears what saves cost, decides.

What has failed is counted when a generation is judged, how long nodes have run whenever something is decided. What
saves cost comes with each durable checkpoint, from the slowest rank. A decision travels with the commit and takes
effect when all ranks meet at the next durable checkpoint; a new generation starts with the latest one.

Failures of processes are counted for each job, since they are mostly its own; those of nodes for the whole cluster.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from myriad.cluster.state import NodeState
from myriad.control.copies import copy_plan
from myriad.control.records import HazardRecord, IntervalRecord, JobRecord
from myriad.control.turn import Turn
from myriad.operations.hazard import observe, rate_per_node_day
from myriad.planner.intervals import Exposure, SaveTier, choose, exposures, first
from myriad.spec.cluster import NodeType
from myriad.spec.failures import DAY_S, PUBLISHED_RATE, FailureClass
from myriad.spec.messages import Intervals, SaveCosts, ShardSet


def begin_counting(turn: Turn, job: JobRecord) -> None:
    """The job has got its nodes: from now on they can fail it."""
    turn.put(msgspec.structs.replace(_record(turn, job), counted_s=turn.now))


def count(turn: Turn, job: JobRecord, failed: FailureClass | None = None) -> None:
    """Count the time that the job's nodes have run since the last time, and a failure that has ended it."""
    record, hazard = _record(turn, job), _hazard(turn)
    since_s = 0.0 if record.counted_s is None else max(0.0, turn.now - record.counted_s)
    days = since_s * len(turn.state.allocation(job.id).nodes) / DAY_S

    def seen(of: FailureClass) -> int:
        return int(failed is of)

    process = observe(record.process, turn.now, days, seen(FailureClass.PROCESS))
    turn.put(msgspec.structs.replace(record, process=process, counted_s=turn.now))
    turn.put(
        HazardRecord(
            node=observe(hazard.node, turn.now, days, seen(FailureClass.NODE)),
            domain=observe(hazard.domain, turn.now, days, seen(FailureClass.DOMAIN)),
        )
    )


def end_counting(turn: Turn, job: JobRecord) -> None:
    """The job gives its nodes back."""
    count(turn, job)
    turn.put(msgspec.structs.replace(_record(turn, job), counted_s=None))


def forget_absence(turn: Turn) -> None:
    """The controller was away, and the clock may have jumped meanwhile: that time is not counted."""
    for name in turn.state.live:
        record = turn.state.get(IntervalRecord, name)
        if record is not None and record.counted_s is not None:
            turn.put(msgspec.structs.replace(record, counted_s=turn.now))


def take_costs(turn: Turn, job: JobRecord, shards: Sequence[ShardSet]) -> None:
    """A durable checkpoint was written: what the slowest rank has measured, or else what was known before."""
    costs = [shard.costs for shard in shards if shard.costs is not None]
    if not costs:
        return
    record = _record(turn, job)
    before = record.costs or costs[0]
    worst = SaveCosts(
        step_s=max(each.step_s for each in costs) or before.step_s,
        memory_s=max(each.memory_s for each in costs) or before.memory_s,
        peer_s=max(each.peer_s for each in costs) or before.peer_s,
        durable_s=max(each.durable_s for each in costs) or before.durable_s,
        intervals=costs[0].intervals,
        fixed=costs[0].fixed,
    )
    busy_s = max(shard.seconds for shard in shards)
    turn.put(msgspec.structs.replace(record, costs=worst, busy_s=busy_s))


def decide(turn: Turn, job: JobRecord) -> Intervals:
    """How often the job is to save from now on."""
    count(turn, job)
    record, checkpoint = _record(turn, job), turn.state.spec(job.id).checkpoint
    current = record.intervals or first(checkpoint)
    choice = choose(checkpoint, record.costs, record.busy_s, _exposures(turn, job), current)
    turn.put(msgspec.structs.replace(record, intervals=choice.intervals, why=dict(choice.why)))
    return choice.intervals


def decided(turn: Turn, job: JobRecord) -> Intervals:
    """The last decision."""
    found = _record(turn, job).intervals
    assert found is not None, f"{job.id} was started without intervals"
    return found


def _exposures(turn: Turn, job: JobRecord) -> dict[SaveTier, Exposure]:
    """What each tier is the nearest to survive."""
    nodes = len(turn.state.allocation(job.id).nodes)
    hazard = _hazard(turn)
    per_s = {
        each: nodes / DAY_S * rate_per_node_day(evidence, PUBLISHED_RATE[each])
        for each, evidence in (
            (FailureClass.PROCESS, _record(turn, job).process),
            (FailureClass.NODE, hazard.node),
            (FailureClass.DOMAIN, hazard.domain),
        )
    }
    return exposures(per_s, survives_node=_has_copies(turn, job) and _has_spare(turn, job))


def _has_copies(turn: Turn, job: JobRecord) -> bool:
    nodes = turn.state.allocation(job.id).nodes
    first_node = turn.state.node(nodes[0])
    node_type = NodeType.model_validate(turn.cluster.spec["node_types"][first_node.type])
    spec = turn.state.spec(job.id)
    per_node = spec.workers_per_node or first_node.accelerators
    return not copy_plan(spec, node_type, nodes, turn.fabric.leaf_of, per_node).off


def _has_spare(turn: Turn, job: JobRecord) -> bool:
    allocation = turn.state.allocation(job.id)
    node_type = turn.state.node(allocation.nodes[0]).type
    free = turn.state.cluster.by_state(node_type).get(NodeState.FREE)
    return bool(allocation.spares) or (free is not None and free.nodes > 0)


def _record(turn: Turn, job: JobRecord) -> IntervalRecord:
    return turn.state.get(IntervalRecord, job.id) or IntervalRecord(job=job.id)


def _hazard(turn: Turn) -> HazardRecord:
    return turn.state.get(HazardRecord, HazardRecord().key) or HazardRecord()
