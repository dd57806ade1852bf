"""A job that loses workers ends exactly as the job that lost none: bit for bit."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
from training_harness import Cluster, Generation, Held, tiny_job

from myriad.spec.job import JobSpec
from myriad.storage.durable.manifest import list_checkpoints
from myriad.storage.memory.snapshot import SEALS, open_snapshot
from sealed import write_snapshot

STEPS = 12
KILL_AFTER = 7


def job(data: Path, dtype: str = "float32", **layout: Any) -> JobSpec:
    return tiny_job(data, dtype=dtype, steps=STEPS, every_steps=5, **layout)


def final_sha256(cluster: Cluster) -> str:
    result = msgspec.json.decode((cluster.job_dir / "result.json").read_bytes())
    assert result["steps"] == STEPS
    return str(result["final_sha256"])


def break_at(cluster: Cluster, spec: JobSpec, rank: int, saved: int = 0) -> Generation:
    """Run until ``rank`` has reported KILL_AFTER steps, and all have told of ``saved`` durable checkpoints; kill it, and
    let the others notice."""
    broken = cluster.start(spec)
    while len(broken.workers[rank].reports) < KILL_AFTER or any(
        len(worker.shards) < saved for worker in broken.workers.values()
    ):
        assert broken.workers[rank].code is None, broken.describe()
        broken.poll(1.0)
    broken.kill(rank)
    broken.wait()
    assert broken.workers[rank].code == -9
    return broken


def newest_common(generation: Generation) -> int:
    """The newest step whose snapshot every rank has handed over."""
    held = [set(worker.snapshots) for worker in generation.workers.values()]
    return max(set.intersection(*held))


LAYOUTS: list[dict[str, Any]] = [
    {},
    {"dp_replicate": 2},
    {"dp_shard": 2},
    {"pp": 2, "microbatches": 2},
]
BIG: list[dict[str, Any]] = [
    {"tp": 2},
    {"dp_replicate": 4},
    {"dp_shard": 2, "tp": 2, "pp": 2, "microbatches": 2},
]


def assert_restart_equals_unbroken(cluster: Cluster, spec: JobSpec) -> None:
    unbroken = cluster.run(spec)
    want = final_sha256(cluster)
    (cluster.job_dir / "result.json").unlink()
    broken = break_at(cluster, spec, rank=spec.layout.world - 1)
    step = newest_common(broken)
    assert step >= KILL_AFTER - 1, "the last step's report may have come without its snapshot"
    again = cluster.run(spec, restore=broken, step=step)
    assert set(again.losses()) == set(range(step + 1, STEPS + 1))
    assert broken.losses() | again.losses() == unbroken.losses()
    for number, ids in unbroken.samples().items():
        executed = again if number > step else broken
        assert executed.samples()[number] == ids
    assert final_sha256(cluster) == want


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_from_memory(layout: dict[str, Any], cluster: Cluster, data: Path) -> None:
    assert_restart_equals_unbroken(cluster, job(data, **layout))


@pytest.mark.slow
@pytest.mark.parametrize("layout", BIG, ids=str)
def test_from_memory_on_more_ranks(layout: dict[str, Any], cluster: Cluster, data: Path) -> None:
    assert_restart_equals_unbroken(cluster, job(data, **layout))


@pytest.mark.parametrize("layout", [{"dp_replicate": 2}, {"dp_shard": 2}], ids=str)
def test_from_durable(layout: dict[str, Any], cluster: Cluster, data: Path) -> None:
    spec = job(data, **layout)
    unbroken = cluster.run(spec)
    want = final_sha256(cluster)
    broken = break_at(cluster, spec, rank=0, saved=1)
    assert broken.workers[1].shards[0].shards.step == 5
    again = cluster.run(spec, step=5, durable_generation=broken.number)
    assert again.losses() == {n: loss for n, loss in unbroken.losses().items() if n > 5}
    assert final_sha256(cluster) == want


def test_memory_and_durable_hold_the_same_bytes(cluster: Cluster, data: Path) -> None:
    """Survivors may load their snapshot of step 5 while a newcomer reads the checkpoint of step 5."""
    spec = job(data, dp_shard=2)
    first = cluster.run(spec)
    assert first.workers[0].snapshots[5].durable and not first.workers[0].snapshots[6].durable
    from_memory = cluster.run(spec, restore=first, step=5)
    want = final_sha256(cluster)
    from_storage = cluster.run(spec, step=5, durable_generation=first.number)
    assert from_memory.losses() == from_storage.losses()
    assert final_sha256(cluster) == want


def test_marker_comes_only_after_the_commit(cluster: Cluster, data: Path) -> None:
    spec = job(data, dp_replicate=2, keep=2)
    uncommitted = cluster.start(spec, commit=False)
    while not all(len(w.shards) == 3 for w in uncommitted.workers.values()):
        uncommitted.poll(1.0)
    found = list_checkpoints(cluster.job_dir / "checkpoints")
    assert {each.step for each in found} == {5, 10, 12}
    assert not any(each.committed for each in found)
    uncommitted.close()
    cluster.run(spec)
    found = list_checkpoints(cluster.job_dir / "checkpoints")
    assert [(each.generation, each.step, each.committed) for each in found] == [(2, 12, True), (2, 10, True)]


def tampered(held: Held, change: str) -> Held:
    """The snapshot again with one flipped bit of a weight, or with one sample skipped; sealed anew."""
    with open_snapshot(held.fd, held.crc32) as snapshot:
        entries: dict[str, tuple[str, tuple[int, ...], Any]] = {
            name: (entry.dtype, entry.shape, bytearray(snapshot.view(name)))
            for name, entry in snapshot.entries.items()
        }
        position = snapshot.position
    if change == "bit":
        entries["model.layers.0.attention.query.weight"][2][0] ^= 1
    else:
        position += 1
    fd, size, crc32 = write_snapshot(entries, held.step, {}, position=position)
    os.close(held.fd)
    return Held(held.step, fd, size, crc32, held.durable)


@pytest.mark.parametrize("change", ["bit", "sample"])
def test_one_changed_bit_or_sample_is_noticed(change: str, cluster: Cluster, data: Path) -> None:
    """Negative control of everything above."""
    spec = job(data, dp_replicate=2)
    unbroken = cluster.run(spec)
    want = final_sha256(cluster)
    for worker in unbroken.workers.values():
        worker.snapshots[6] = tampered(worker.snapshots[6], change)
    again = cluster.run(spec, restore=unbroken, step=6)
    assert final_sha256(cluster) != want
    assert again.losses() != {n: loss for n, loss in unbroken.losses().items() if n > 6}


def damaged(held: Held) -> Held:
    """The snapshot with one flipped bit and no new checksum, sealed."""
    changed = bytearray(os.pread(held.fd, held.size, 0))
    changed[held.size // 2] ^= 1
    fd = os.memfd_create("damaged", os.MFD_ALLOW_SEALING)
    os.write(fd, changed)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
    os.close(held.fd)
    return Held(held.step, fd, held.size, held.crc32, held.durable)


def test_a_damaged_snapshot_is_refused(cluster: Cluster, data: Path) -> None:
    first = cluster.run(job(data))
    with pytest.raises(OSError) as refused:
        os.pwrite(first.workers[0].snapshots[6].fd, b"x", 100)
    assert refused.value.errno == errno.EPERM, "a snapshot is sealed"
    first.workers[0].snapshots[6] = damaged(first.workers[0].snapshots[6])
    again = cluster.start(job(data), restore=first, step=6).wait()
    assert again.codes() == [1]
    failure = again.workers[0].failure
    assert failure is not None and failure.error_class == "SnapshotCorrupt"
    assert "fails its checksum" in failure.message


def test_a_damaged_snapshot_of_a_durable_step_is_read_from_storage(cluster: Cluster, data: Path) -> None:
    first = cluster.run(job(data, dp_shard=2))
    want = final_sha256(cluster)
    first.workers[1].snapshots[5] = damaged(first.workers[1].snapshots[5])
    cluster.run(job(data, dp_shard=2), restore=first, step=5, durable_generation=first.number)
    assert final_sha256(cluster) == want
    assert "loading step 5 from storage instead" in cluster.log(1).read_text()


@pytest.mark.parametrize("layout", [{"tp": 2}, {"pp": 2, "microbatches": 2}, {}], ids=str)
def test_a_checkpoint_loads_into_another_layout(layout: dict[str, Any], cluster: Cluster, data: Path) -> None:
    """With no step left to do, the final hash is that of the loaded state: the same in every layout."""
    first = cluster.run(job(data, dp_shard=2))
    want = final_sha256(cluster)
    (cluster.job_dir / "result.json").unlink()
    again = cluster.run(job(data, **layout), step=STEPS, durable_generation=first.number)
    assert final_sha256(cluster) == want
    assert again.losses() == {}


def test_a_committed_checkpoint_without_marker_gets_it_when_used(cluster: Cluster, data: Path) -> None:
    first = cluster.run(job(data))
    marker = cluster.job_dir / "checkpoints" / f"step-5.gen-{first.number}" / "COMMITTED"
    marker.unlink()
    cluster.run(job(data), step=5, durable_generation=first.number)
    assert marker.exists()


def test_a_commit_whose_marker_was_never_written(cluster: Cluster, data: Path) -> None:
    """Rank 0 dies after the commit of step 5 was journaled, before it hears: memory still has the same step."""
    spec = job(data, dp_replicate=2)
    unbroken = cluster.run(spec)
    broken = cluster.start(spec, commit=False)
    while not all(5 in worker.snapshots and worker.shards for worker in broken.workers.values()):
        broken.poll(1.0)
    broken.kill(0)
    broken.wait()
    marker = cluster.job_dir / "checkpoints" / f"step-5.gen-{broken.number}" / "COMMITTED"
    assert marker.parent.exists() and not marker.exists()
    again = cluster.start(spec, restore=broken, step=5, durable_generation=broken.number)
    while "restore" not in again.workers[0].phases:
        assert again.workers[0].code is None, again.describe()
        again.poll(1.0)
    assert marker.exists(), "the marker is there before the first step"
    again.wait()
    assert set(again.codes()) == {0}, again.describe()
    assert again.losses() == {n: loss for n, loss in unbroken.losses().items() if n > 5}
