"""Packed sequences: each document is computed as if it were alone, in the model and on the mesh."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from training_harness import Cluster, Generation, tiny_job

from myriad.spec.job import JobSpec, LayoutSpec, ModelSpec
from myriad.storage.datasets.builder import build
from myriad.storage.datasets.loader import Loader, TokenDataset
from myriad.training.device import Device
from myriad.training.mesh import Mesh, axis_sizes, coordinates_of
from myriad.training.model import Decoder, Documents, token_loss
from myriad.training.parallelize import build_model

SPEC = ModelSpec(layers=2, dim=32, heads=4, kv_heads=2, ffn_dim=64, vocab_size=264, dtype="float64")
S, SEED = 32, 11  # of the jobs of the harness


def model_of(spec: ModelSpec, seed: int) -> Decoder:
    sizes = axis_sizes(LayoutSpec())
    return build_model(spec, Mesh(sizes, coordinates_of(0, sizes), None), Device(torch.device("cpu")), seed)


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    """Documents of 2 to 50 tokens, packed into sequences of 32."""
    draw = np.random.default_rng(5)
    lines = [
        json.dumps({"text": bytes(draw.integers(97, 123, n, np.uint8)).decode()}) for n in [*range(1, 50)] * 3
    ]
    (tmp_path / "text.jsonl").write_text("\n".join(lines))
    build([tmp_path / "text.jsonl"], tmp_path / "packed", pack=S)
    return tmp_path / "packed"


def test_documents_of_a_sequence_are_computed_as_if_alone() -> None:
    model = model_of(SPEC, 3)
    tokens = torch.from_numpy(np.random.default_rng(1).integers(0, 264, (2, 16)))
    documents = torch.tensor([[0] * 5 + [1] * 8 + [-1] * 3, [0] * 1 + [1] * 1 + [2] * 14])
    together, across = model(tokens, documents=documents), model(tokens)
    differs = False
    for row, cuts in enumerate(([0, 5, 13, 16], [0, 1, 2, 16])):
        for first, end in itertools.pairwise(cuts):
            alone = model(tokens[row : row + 1, first:end])[0]
            assert torch.allclose(together[row, first:end], alone, rtol=1e-9, atol=1e-12)
            differs |= not torch.allclose(across[row, first:end], alone, rtol=1e-6)
    assert differs  # negative control: without the documents they do see each other


def test_positions_begin_anew_and_nobody_sees_another_document() -> None:
    found = Documents.of(torch.tensor([[4, 4, 4, 7, 7, -1]]))
    assert found.positions_BT.tolist() == [[0, 1, 2, 0, 1, 0]]
    want = [[1, 0, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0], [1, 1, 1, 0, 0, 0]]
    want += [[0, 0, 0, 1, 0, 0], [0, 0, 0, 1, 1, 0], [0, 0, 0, 0, 0, 1]]
    assert found.visible_B1TT.int().tolist() == [[want]]


def packed_job(data: Path, **layout: Any) -> JobSpec:
    job = tiny_job(data, steps=8, snapshot_every_steps=1000, **layout)
    assert job.data is not None
    return job.model_copy(update={"data": job.data.model_copy(update={"packing": "documents"})})


def loss_one_by_one(data: Path, job: JobSpec) -> float:
    """The mean loss of the job's first batch, each document through the model alone."""
    assert job.model is not None and job.data is not None
    model, total, count = model_of(job.model, job.seed), 0.0, 0
    with TokenDataset(data, S, packed=True) as dataset:
        assert dataset.packing is not None
        batch = Loader(dataset, job.seed, job.data.global_batch, 0, 1).next()
        stream = np.fromfile(f"{data}.bin", np.uint16).astype(np.int64)
        for sequence in batch.sample_ids:
            for first, places in dataset.packing.pieces(sequence):
                document = torch.from_numpy(stream[first : first + places + 1]).unsqueeze(0)
                with torch.no_grad():
                    total += token_loss(model(document[:, :-1]), document[:, 1:]).item()
                count += places
    return total / count


def losses(run: Generation) -> dict[int, float]:
    assert set(run.codes()) == {0}, run.describe()
    return {step: float.fromhex(loss) for step, loss in run.losses().items()}


def assert_documents_alone(run: Generation, data: Path, job: JobSpec) -> None:
    assert losses(run)[1] == pytest.approx(loss_one_by_one(data, job), rel=1e-9)


def assert_equal(one: Generation, many: Generation) -> None:
    assert losses(one) == pytest.approx(losses(many), rel=1e-9)
    assert one.norms() == pytest.approx(many.norms(), rel=1e-9)


def test_two_ranks_compute_each_document_alone(cluster: Cluster, packed: Path) -> None:
    one = cluster.run(packed_job(packed))
    assert_documents_alone(one, packed, packed_job(packed))
    for layout in ({"tp": 2}, {"pp": 2, "microbatches": 2}):
        assert_equal(one, cluster.run(packed_job(packed, **layout)))
    without = packed_job(packed)
    assert without.data is not None
    across = without.model_copy(update={"data": without.data.model_copy(update={"packing": "none"})})
    with pytest.raises(AssertionError):  # negative control: the windows of the plain stream cross documents
        assert_documents_alone(cluster.run(across), packed, without)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        {"dp_replicate": 2, "tp": 2, "microbatches": 2},
        {"dp_shard": 2, "tp": 2},
        {"tp": 2, "pp": 2, "microbatches": 2},
        {"dp_shard": 2, "pp": 2, "microbatches": 2, "schedule": "gpipe"},
    ],
    ids=str,
)
def test_four_ranks_compute_each_document_alone(
    layout: dict[str, Any], cluster: Cluster, packed: Path
) -> None:
    many = cluster.run(packed_job(packed, **layout))
    assert_documents_alone(many, packed, packed_job(packed))
    assert_equal(cluster.run(packed_job(packed)), many)
