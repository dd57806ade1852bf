"""Masked tokens weigh nothing, wherever they lie: the loss is the mean over the tokens of the whole mesh."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from training_harness import Cluster, tiny_job

from myriad.storage.datasets.loader import Batch
from myriad.training.device import Device
from myriad.training.mesh import Mesh, axis_sizes, coordinates_of
from myriad.training.model import Decoder, token_loss
from myriad.training.optimizer import ShardedAdamW
from myriad.training.parallelize import build_model
from myriad.training.step import EmptyBatch, Stepper

PROGRAM = str(Path(__file__).parent / "programs" / "masked.py")


def one_process(data: Path) -> tuple[Decoder, Stepper]:
    job = tiny_job(data, microbatches=2)
    assert job.model is not None and job.optimizer is not None
    sizes = axis_sizes(job.layout)
    mesh, device = Mesh(sizes, coordinates_of(0, sizes), None), Device(torch.device("cpu"))
    model = build_model(job.model, mesh, device, 1)
    optimizer = ShardedAdamW(list(model.named_parameters()), job.optimizer)
    return model, Stepper(job, model, optimizer, mesh, device)


def test_loss_is_the_mean_over_unmasked_tokens(data: Path) -> None:
    model, stepper = one_process(data)
    tokens = np.random.default_rng(0).integers(0, 264, (8, 32))
    labels = np.roll(tokens, -1, axis=1)
    labels[:5] = -100
    want = token_loss(model(torch.from_numpy(tokens)), torch.from_numpy(labels)).item() / (3 * 32)
    result = stepper.run(1, Batch(tokens, labels, (), 0))
    assert result.loss == pytest.approx(want, rel=1e-12) and result.tokens == 3 * 32


def test_a_batch_without_labels_is_refused(data: Path) -> None:
    _, stepper = one_process(data)
    tokens = np.zeros((8, 32), np.int64)
    with pytest.raises(EmptyBatch, match="every label of this batch is masked"):
        stepper.run(1, Batch(tokens, np.full_like(tokens, -100), (), 0))


@pytest.mark.slow
def test_unequal_numbers_of_masked_tokens(cluster: Cluster) -> None:
    """One rank has 4 tokens that count and the other 64; a mean of the ranks' means would be far off."""
    curves = {}
    for layout, world in (("tp 1", 1), ("dp_replicate 2", 2), ("dp_shard 2", 2), ("pp 2", 2)):
        cluster.log(0).unlink(missing_ok=True)
        run = cluster.start_command([PROGRAM, layout], world).wait()
        assert set(run.codes()) == {0}, run.describe()
        lines = [line.split() for line in cluster.log(0).read_text().splitlines()]
        curves[layout] = [float.fromhex(number) for line in lines for number in line]
    for layout, curve in curves.items():
        assert len(curve) == 6
        assert curve == pytest.approx(curves["tp 1"], rel=1e-9), layout
