"""A job's records and step reports become one report: a scripted life of 3 nodes, one lost, one spare used."""

from __future__ import annotations

import json
import math
from typing import Any

import msgspec
import pytest

from myriad.cluster.state import NodeState
from myriad.control.accounting import JobRecords
from myriad.control.records import AllocationRecord, GenerationRecord, JobRecord, NodeRecord
from myriad.control.status import Reason
from myriad.server.ledger_table import ledger_rows, ledger_text
from myriad.server.report import Beside, build_report
from myriad.spec.messages import StepReport

GRANT_S = 1000.0  # the controller's clock is no one's zero
STEP_S = 0.5
BATCH = 4
FAILED_STEP, RESTORE_STEP, LAST_STEP = 9, 5, 16


def loss(step: int) -> float:
    return 4.0 / step


def reports_of(generation: int, steps: range, node_ranks: int = 4) -> list[StepReport]:
    found = []
    for step in steps:
        for rank in range(node_ranks):
            reporting = rank == node_ranks - 1
            first = BATCH * (step - 1)
            found.append(
                StepReport(
                    job="j1",
                    generation=generation,
                    rank=rank,
                    step=step,
                    wall_s=STEP_S,
                    compute_s=0.35,
                    communication_s=0.05,
                    data_s=0.06,
                    checkpoint_s=0.03,
                    loss=loss(step) if reporting else None,
                    tokens=4096 if reporting else 0,
                    flops=1e9 if reporting else 0.0,
                    samples=tuple(range(first + rank, first + rank + 1)),
                )
            )
    return found


def node(name: str, state: NodeState = NodeState.BUSY, since_s: float = GRANT_S) -> NodeRecord:
    return NodeRecord(
        name=name,
        type="small",
        accelerators=2,
        leaf="l0",
        rack="r0",
        power_feed="p0",
        state=state,
        since_s=since_s,
        job="j1",
    )


def at(seconds: float) -> float:
    return GRANT_S + seconds


FIRST = GenerationRecord(
    job="j1",
    generation=1,
    allocation=1,
    nodes=("a", "b"),
    begun_s=at(0),
    fenced_s=at(0.1),
    store_s=at(0.2),
    forked_s=at(0.5),
    rendezvous_s=at(0.9),
    restored_s=at(1.0),
    first_step_s=at(1.5),
    failed_s=at(5.8),  # in mid-step 10
    verdict_s=at(6.8),
    ended_s=at(6.9),
    cause="node_failed",
    culprit_node="b",
    replacement={"b": "c"},
    tiers=("none",) * 4,
)
SECOND = GenerationRecord(
    job="j1",
    generation=2,
    allocation=1,
    nodes=("a", "c"),
    begun_s=at(6.8),
    fenced_s=at(7.0),
    store_s=at(7.1),
    forked_s=at(7.3),
    rendezvous_s=at(7.7),
    restored_s=at(8.0),
    first_step_s=at(8.5),
    ended_s=at(13.6),
    restore_step=RESTORE_STEP,
    restore_generation=1,
    tiers=("memory", "memory", "durable", "durable"),
)
JOB = JobRecord(
    id="j1",
    name="train",
    reason=Reason.COMPLETED,
    detail="",
    submitted_s=at(-1),
    changed_s=at(14),
    generation=2,
    world_size=4,
    granted_s=at(0),
    ended_s=at(14),
    exit_code=0,
    restarts=1,
)
ALLOCATION = AllocationRecord(
    job="j1", nodes=("a", "c"), spares=(), lost=("b",), granted_s=at(0), released_s=at(14)
)
SPEC: dict[str, Any] = {
    "nodes": 2,
    "spares": 1,
    "model": {"layers": 2},
    "layout": {"pp": 1, "dp_replicate": 1, "dp_shard": 4, "tp": 1, "microbatches": 1},
    "data": {"global_batch": BATCH},
}
LIFE = JobRecords(
    job=JOB,
    spec=SPEC,
    allocations=(ALLOCATION,),
    generations=(FIRST, SECOND),
    nodes={"a": node("a"), "b": node("b", NodeState.DOWN, at(6.8)), "c": node("c")},
)
STEPS = reports_of(1, range(1, FAILED_STEP + 1)) + reports_of(2, range(RESTORE_STEP + 1, LAST_STEP + 1))


def changed(life: JobRecords, **fields: Any) -> JobRecords:
    own = {name: getattr(life, name) for name in JobRecords.__dataclass_fields__}
    return JobRecords(**{**own, **fields})


def test_the_ledger_of_a_lost_node() -> None:
    report = build_report(LIFE, STEPS, now_s=at(50))
    assert report["wall_time_s"] == pytest.approx(14) and report["accelerators"] == 6
    found = report["ledger"]
    assert math.fsum(found.values()) == pytest.approx(14 * 6, rel=1e-9)
    kept = RESTORE_STEP + (LAST_STEP - RESTORE_STEP)
    want = {
        "compute": 4 * 0.35 * kept,
        "exposed_communication": 4 * 0.05 * kept,
        "data_wait": 4 * 0.06 * kept,
        "checkpoint_wait": 4 * 0.03 * kept,
        "startup": 4 * 1.0,
        "lost_work": 4 * (4.8 - RESTORE_STEP * STEP_S),
        "detection": 2 * 1.0,
        "recovery": 4 * 1.2,
        "spare_idle": 2 * 6.8,
        "node_down": 2 * (14 - 5.8),
        "other": 4 * (0.01 * kept + 0.1 + 0.4),
    }
    assert {cause: seconds for cause, seconds in found.items() if seconds > 1e-9} == pytest.approx(want)
    assert report["effective_accelerators"] == pytest.approx(want["compute"] / 14)
    assert report["largest_loss"]["cause"] == "node_down"


def test_a_finished_step_is_a_later_sign_of_life_than_an_old_heartbeat() -> None:
    """Step 9 ends 5.5 s after the grant; the last heartbeat was heard at 4.6 s, in mid-step 8."""
    late = changed(LIFE, generations=(msgspec.structs.replace(FIRST, failed_s=at(4.6)), SECOND))
    found = build_report(late, STEPS, now_s=at(50))["ledger"]
    assert found["lost_work"] == pytest.approx(4 * (FAILED_STEP - RESTORE_STEP) * STEP_S)
    assert found["detection"] == pytest.approx(2 * (6.8 - 5.5))
    unheard = [r for r in STEPS if r.generation == 2 or r.step < FAILED_STEP - 1]  # ends at 4.5 s
    assert build_report(late, unheard, now_s=at(50))["ledger"]["detection"] == pytest.approx(2 * (6.8 - 4.6))


def test_the_recovery_is_told_by_phase() -> None:
    (recovery,) = build_report(LIFE, STEPS, now_s=at(50))["recoveries"]
    assert recovery.pop("seconds") == pytest.approx(
        {"detection": 1.0, "fencing": 0.2, "start": 0.3, "rendezvous": 0.4, "restore": 0.3, "first_step": 0.5}
    )
    assert recovery.pop("downtime_s") == pytest.approx(2.7)
    assert recovery == {
        "generation": 1,
        "cause": "node_failed",
        "culprit_node": "b",
        "culprit_rank": None,
        "replacement": {"b": "c"},
        "failed_step": FAILED_STEP,
        "restore_step": RESTORE_STEP,
        "tiers": ["memory", "memory", "durable", "durable"],
        "tier_counts": {"durable": 2, "memory": 2},
        "lost_steps": FAILED_STEP - RESTORE_STEP,
        "queued_s": 0.0,
    }


def test_losses_count_the_last_execution_only() -> None:
    wrong_before = [
        msgspec.structs.replace(r, loss=r.loss + 1)
        if r.loss and r.generation == 1 and r.step > RESTORE_STEP
        else r
        for r in STEPS
    ]
    report = build_report(LIFE, wrong_before, now_s=at(50))
    assert report["losses"] == [loss(step).hex() for step in range(1, LAST_STEP + 1)]
    assert report["redone_steps"] == FAILED_STEP - RESTORE_STEP
    assert report["redone_losses_equal"] is False
    assert build_report(LIFE, STEPS, now_s=at(50))["redone_losses_equal"] is True
    assert "reference_losses" not in report


def test_the_reference_is_compared_bit_for_bit() -> None:
    truth = [loss(step).hex() for step in range(1, LAST_STEP + 1)]
    report = build_report(LIFE, STEPS, at(50), Beside(reference_losses=truth))
    assert report["reference_losses"] == truth and report["losses_equal_reference"] is True
    flipped = [*truth[:-1], math.nextafter(loss(LAST_STEP), 1.0).hex()]
    assert (
        build_report(LIFE, STEPS, at(50), Beside(reference_losses=flipped))["losses_equal_reference"] is False
    )


def test_a_loss_nobody_reported_is_a_gap_and_not_a_shift() -> None:
    unheard = [r for r in STEPS if not (r.step == 3 and r.rank == 3)]
    found = build_report(LIFE, unheard, at(50))["losses"]
    assert found[2] is None and found[3] == loss(4).hex() and len(found) == LAST_STEP


@pytest.mark.parametrize(
    ("story", "change", "want"),
    [
        ("as it was", lambda r: r, True),
        (
            "one sample skipped after the recovery",
            lambda r: (
                msgspec.structs.replace(r, samples=tuple(s + 1 for s in r.samples))
                if r.generation == 2
                else r
            ),
            False,
        ),
        (
            "one sample twice",
            lambda r: msgspec.structs.replace(r, samples=(0,)) if (r.step, r.rank) == (12, 2) else r,
            False,
        ),
        ("no samples reported", lambda r: msgspec.structs.replace(r, samples=()), None),
    ],
)
def test_samples_seen_once(story: str, change: Any, want: bool | None) -> None:
    def truth(step: int) -> list[int]:
        return list(range(BATCH * (step - 1), BATCH * step))

    report = build_report(LIFE, [change(r) for r in STEPS], at(50), Beside(expected_samples=truth))
    assert report["sample_ids_seen_once"] is want, story


def test_mfu_is_flops_over_wall_accelerators_and_peak() -> None:
    report = build_report(LIFE, STEPS, at(50), Beside(peak_flops_per_s=1e9))
    assert report["mfu"] == pytest.approx(LAST_STEP * 1e9 / (14 * 6 * 1e9))
    assert build_report(LIFE, STEPS, at(50))["mfu"] is None


def test_a_running_job_is_reported_up_to_now() -> None:
    life = changed(
        LIFE,
        allocations=(msgspec.structs.replace(ALLOCATION, released_s=None),),
        generations=(FIRST, msgspec.structs.replace(SECOND, ended_s=None)),
    )
    report = build_report(life, STEPS, now_s=at(14))
    assert report["wall_time_s"] == pytest.approx(14)
    assert math.fsum(report["ledger"].values()) == pytest.approx(84)


def test_a_requeued_job_has_two_allocations() -> None:
    first = AllocationRecord(
        job="j1", nodes=("a",), spares=(), lost=("b",), granted_s=at(0), released_s=at(7)
    )
    second = AllocationRecord(
        job="j1", number=2, nodes=("a", "c"), spares=(), lost=(), granted_s=at(20), released_s=at(30)
    )
    again = msgspec.structs.replace(
        SECOND,
        allocation=2,
        begun_s=at(20),
        fenced_s=at(20),
        forked_s=at(21),
        rendezvous_s=at(22),
        restored_s=at(23),
        first_step_s=at(23.5),
        ended_s=at(29),
    )
    life = changed(LIFE, allocations=(first, second), generations=(FIRST, again))
    report = build_report(life, STEPS, at(50))
    assert report["wall_time_s"] == pytest.approx(17) and report["accelerators"] == 4
    assert math.fsum(report["ledger"].values()) == pytest.approx(17 * 4)
    assert report["ledger"]["startup"] == pytest.approx(4 * 1.0 + 4 * 3.0)
    assert report["ledger"]["lost_work"] == pytest.approx(4 * (4.8 - RESTORE_STEP * STEP_S))
    assert report["recoveries"][0]["queued_s"] == pytest.approx(13.2)


def test_a_command_reports_no_steps() -> None:
    spec = {"nodes": 2, "spares": 1, "command": ["true"], "model": None, "data": None}
    report = build_report(changed(LIFE, spec=spec), [], at(50))
    assert report["losses"] == [] and report["sample_ids_seen_once"] is None
    assert report["effective_accelerators"] is None and report["mfu"] is None
    assert report["ledger"]["running_unattributed"] == pytest.approx(4 * (5.8 - 0.5) + 4 * (13.6 - 7.3))
    assert "compute" not in report["ledger"]
    assert math.fsum(report["ledger"].values()) == pytest.approx(84)


def test_a_spare_that_died_idle_is_down_from_then() -> None:
    life = changed(
        LIFE,
        allocations=(msgspec.structs.replace(ALLOCATION, nodes=("a", "b"), lost=("c",)),),
        generations=(msgspec.structs.replace(FIRST, failed_s=None, verdict_s=None, ended_s=at(14)),),
        nodes={"a": node("a"), "b": node("b"), "c": node("c", NodeState.DOWN, at(3))},
    )
    report = build_report(life, reports_of(1, range(1, 17)), at(50))
    assert report["ledger"]["spare_idle"] == pytest.approx(6) and report["ledger"][
        "node_down"
    ] == pytest.approx(22)


def test_a_pending_job_has_an_empty_report() -> None:
    pending = msgspec.structs.replace(JOB, reason=Reason.RESOURCES, granted_s=None, ended_s=None)
    report = build_report(changed(LIFE, job=pending, allocations=(), generations=()), [], at(50))
    assert report["wall_time_s"] == 0 and report["accelerators"] == 0
    assert report["ledger"] == {} and report["recoveries"] == [] and report["timeline"] == []


def test_the_report_is_json_and_complete() -> None:
    report = build_report(LIFE, STEPS, at(50), Beside(predicted={"compute": 20.0, "data_wait": None}))
    assert json.loads(json.dumps(report, allow_nan=False)) == report
    for key in ("losses", "sample_ids_seen_once", "recoveries", "ledger", "wall_time_s", "accelerators"):
        assert key in report
    events = [event["event"] for event in report["timeline"]]
    assert (
        events[0] == "granted"
        and events[-1] == "released"
        and events.index("failed") < events.index("verdict")
    )
    ends = [e["at_s"] for e in report["executions"]]
    assert ends[0] == pytest.approx(1.5) and ends[-1] == pytest.approx(13.5)


def test_one_table_for_predicted_and_measured() -> None:
    rows = ledger_rows(
        {"compute": 20.0, "data_wait": None}, {"compute": 22.4, "data_wait": 3.8, "other": 0.0}
    )
    assert rows == [("compute", 20.0, 22.4), ("data_wait", None, 3.8), ("other", None, 0.0)]
    text = ledger_text(rows)
    assert "not predicted" in text and "22.40" in text and "85.5 %" in text
    assert "not measured" in ledger_text(ledger_rows({"startup": 3.0}, None))
    with pytest.raises(AssertionError, match="not causes"):
        ledger_rows({"computing": 1.0}, None)
