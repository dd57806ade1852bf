"""The report of a job as the API serves it: its records and step reports, set beside the plan and a reference run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from myriad.control.accounting import JobRecords
from myriad.control.records import ClusterRecord, JobRecord, NodeRecord, SpecRecord
from myriad.operations.exactly_once import Expected
from myriad.planner import Plan, Probe, plan
from myriad.runtime.files import read_json
from myriad.runtime.paths import StateDir
from myriad.runtime.store import StateReader
from myriad.server.report import Beside, build_report
from myriad.server.views import Moment, allocations, generations
from myriad.spec.cluster import ClusterSpec
from myriad.spec.job import DataSpec, JobSpec


def job_report(state: StateDir, at: Moment, job: JobRecord, reference: JobRecord | None) -> dict[str, Any]:
    """The report; with ``reference``, that job's losses beside the job's own."""
    records = read_job(at.reader, job)
    planned = predicted(state, at.reader, records)
    beside = Beside(
        predicted=None
        if planned is None
        else {cause.value: amount for cause, amount in planned.ledger.items()},
        peak_flops_per_s=None if planned is None else planned.peak_flops_per_s,
        reference_losses=None if reference is None else _losses(at, reference),
        expected_samples=expected_samples(records.spec),
    )
    return build_report(records, list(at.reader.step_reports(job.id)), at.now_s, beside)


def read_job(reader: StateReader, job: JobRecord) -> JobRecords:
    """All the controller's records of one job, as they stand in the journal's file."""
    spec = reader.record(SpecRecord, job.id)
    assert spec is not None, f"{job.id} has no specification"
    return JobRecords(
        job=job,
        spec=spec.spec,
        allocations=allocations(reader, job.id),
        generations=generations(reader, job),
        nodes=reader.records(NodeRecord),
    )


def predicted(state: StateDir, reader: StateReader, records: JobRecords) -> Plan | None:
    """What the planner says of the job on the nodes it got first; None for a command or without a probe."""
    measured, cluster = read_json(state.probe_file), reader.record(ClusterRecord, "cluster")
    if measured is None or cluster is None or records.spec.get("model") is None:
        return None
    return plan(
        JobSpec.model_validate(records.spec),
        ClusterSpec.model_validate(cluster.spec),
        Probe(**measured),
        records.generations[0].nodes if records.generations else None,
    )


def expected_samples(spec: Mapping[str, Any]) -> Expected | None:
    """The sample ids of each step by the dataset's own order; None for a command, or when the dataset is gone or
    behind a URL: the address and the credentials of that are the job's."""
    from myriad.storage.datasets.index import DatasetError
    from myriad.storage.datasets.loader import open_mixture

    if spec.get("data") is None:
        return None
    data, place = DataSpec.model_validate(spec["data"]), Path(spec.get("workdir") or ".")
    if data.remote:
        return None
    try:
        parts = [(place / part.path, part.weight) for part in data.parts]
        with open_mixture(parts, data.sequence_length, data.packing == "documents") as mixture:
            order = mixture.order(int(spec["seed"]))
    except (DatasetError, OSError):
        return None

    def of_step(step: int) -> list[int]:
        positions = np.arange((step - 1) * data.global_batch, step * data.global_batch, dtype=np.int64)
        return mixture.numbered(*order.samples_at(positions))

    return of_step


def _losses(at: Moment, job: JobRecord) -> list[str | None]:
    report = build_report(read_job(at.reader, job), list(at.reader.step_reports(job.id)), at.now_s)
    losses: list[str | None] = report["losses"]
    return losses
