"""A checkpoint of one layout and world size continues on another as if nothing had changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from training_harness import Cluster, Generation, tiny_job

from myriad.spec.job import JobSpec
from myriad.storage.durable.checkpoint import load
from myriad.storage.durable.huggingface import export_folder, import_folder
from myriad.storage.durable.manifest import (
    MODEL_KEY,
    SEQUENCE_LENGTH_KEY,
    checkpoint_path,
    list_checkpoints,
    read_manifest,
    write_manifest,
)

STEPS, SAVED = 7, 4
RELATIVE = 1e-9
Layout = dict[str, Any]
PROGRAM = str(Path(__file__).parent / "programs" / "odd_loop.py")


def job(data: Path, global_batch: int, layout: Layout) -> JobSpec:
    return tiny_job(
        data,
        dtype="float64",
        steps=STEPS,
        every_steps=SAVED,
        snapshot_every_steps=1000,
        global_batch=global_batch,
        **layout,
    )


def assert_continues(unbroken: Generation, resumed: Generation) -> None:
    """The steps after the save, and only they, with the losses of the run that never stopped."""
    want = {step: loss for step, loss in unbroken.losses().items() if step > SAVED}
    assert want.keys() == resumed.losses().keys() == set(range(SAVED + 1, STEPS + 1))
    for step, loss in want.items():
        got = float.fromhex(resumed.losses()[step])
        assert got == pytest.approx(float.fromhex(loss), rel=RELATIVE), f"loss of step {step}"


def assert_reshards(cluster: Cluster, data: Path, batch: int, before: Layout, after: Layout) -> None:
    unbroken = cluster.run(job(data, batch, before))
    resumed = cluster.run(job(data, batch, after), step=SAVED, durable_generation=unbroken.number)
    assert_continues(unbroken, resumed)


QUICK: list[tuple[int, Layout, Layout]] = [
    (8, {}, {"tp": 2}),
    (8, {"dp_shard": 2}, {"pp": 2, "microbatches": 2}),
]
# Batch size (what the data-parallel degrees must divide), saved on, continued on. All worlds from 1 to 8.
ROWS: list[tuple[int, Layout, Layout]] = [
    (8, {"dp_shard": 4, "tp": 2}, {}),
    (8, {}, {"pp": 2, "dp_shard": 2, "tp": 2, "microbatches": 2}),
    (8, {"pp": 4, "microbatches": 4}, {"dp_replicate": 2, "dp_shard": 2}),
    (12, {"dp_shard": 3, "tp": 2}, {"pp": 2, "dp_replicate": 2, "microbatches": 3}),
    (35, {"dp_shard": 5}, {"dp_shard": 7}),
    (12, {"dp_replicate": 3}, {"dp_replicate": 2, "tp": 2}),
]


@pytest.mark.parametrize(("batch", "before", "after"), QUICK, ids=str)
def test_two_layouts(batch: int, before: Layout, after: Layout, cluster: Cluster, data: Path) -> None:
    assert_reshards(cluster, data, batch, before, after)


@pytest.mark.slow
@pytest.mark.parametrize(("batch", "before", "after"), ROWS, ids=str)
def test_many_layouts(batch: int, before: Layout, after: Layout, cluster: Cluster, data: Path) -> None:
    assert_reshards(cluster, data, batch, before, after)


def test_the_checkpoint_of_a_sharded_job_can_be_exported(
    cluster: Cluster, data: Path, tmp_path: Path
) -> None:
    spec = job(data, 8, {"dp_shard": 2})
    cluster.run(spec)
    newest = list_checkpoints(cluster.job_dir / "checkpoints")[0]
    export_folder(newest, tmp_path / "hf")
    path = import_folder(tmp_path / "hf", tmp_path / "back")
    assert spec.model is not None and spec.data is not None
    want = {MODEL_KEY: spec.model.model_dump(mode="json"), SEQUENCE_LENGTH_KEY: spec.data.sequence_length}
    assert read_manifest(path).meta == read_manifest(newest.path).meta == want
    name, shape = "model.layers.3.attention.query.weight", (32, 32)
    trained, back = torch.zeros(shape).double(), torch.ones(shape).double()
    load(newest.path.parent, newest.step, newest.generation, {name: trained})
    load(path.parent, 0, 0, {name: back})
    assert torch.equal(trained, back)


def test_what_is_not_as_saved_is_noticed(cluster: Cluster, data: Path) -> None:
    """Negative control: one sample skipped breaks the curve, one flipped bit is refused by every rank."""
    unbroken = cluster.run(job(data, 8, {"dp_shard": 2}))
    path = checkpoint_path(cluster.job_dir / "checkpoints", SAVED, unbroken.number)
    good = read_manifest(path)
    write_manifest(path, msgspec.structs.replace(good, position=good.position + 1))
    skipped = cluster.run(job(data, 8, {}), step=SAVED, durable_generation=unbroken.number)
    with pytest.raises(AssertionError, match=f"loss of step {SAVED + 1}"):
        assert_continues(unbroken, skipped)
    write_manifest(path, good)
    file = path / "__1_0.distcp"
    held = bytearray(file.read_bytes())
    held[len(held) // 2] ^= 1
    file.write_bytes(held)
    refused = cluster.start(job(data, 8, {"tp": 2}), step=SAVED, durable_generation=unbroken.number).wait()
    assert refused.codes() == [1, 1]
    for worker in refused.workers.values():
        assert worker.failure is not None and worker.failure.error_class == "CheckpointCorrupt"
        assert "__1_0.distcp fails its checksum" in worker.failure.message


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 2)])
def test_a_loop_of_odd_parameters(before: int, after: int, cluster: Cluster) -> None:
    """Tied embeddings, a parameter that never had a gradient, an empty group, ranks without a row of a shard."""
    unbroken = cluster.start_command([PROGRAM, str(STEPS), str(SAVED)], before).wait()
    assert set(unbroken.codes()) == {0}, unbroken.describe()
    resumed = cluster.start_command(
        [PROGRAM, str(STEPS), str(SAVED)], after, step=SAVED, durable_generation=unbroken.number
    ).wait()
    assert set(resumed.codes()) == {0}, resumed.describe()
    assert_continues(unbroken, resumed)
