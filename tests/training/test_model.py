"""The decoder and its initial values, in one process."""

from __future__ import annotations

import pytest
import torch

from myriad.spec import arithmetic
from myriad.spec.job import LayoutSpec, ModelSpec
from myriad.training.device import Device
from myriad.training.mesh import Mesh, axis_sizes, coordinates_of
from myriad.training.model import Decoder, StageSpan, rotary_angles, rotate, token_loss
from myriad.training.parallelize import build_model, initial_value

SPEC = ModelSpec(layers=4, dim=32, heads=4, kv_heads=2, ffn_dim=64, vocab_size=264, dtype="float64")
CPU = Device(torch.device("cpu"))


def model_of(spec: ModelSpec = SPEC, stage: int = 0, stages: int = 1, seed: int = 3) -> Decoder:
    sizes = axis_sizes(LayoutSpec(pp=stages, microbatches=stages))
    return build_model(spec, Mesh(sizes, coordinates_of(stage, sizes), None), CPU, seed)


def test_parameter_count_is_the_arithmetics() -> None:
    assert sum(p.numel() for p in model_of().parameters()) == arithmetic.parameters(SPEC)


def test_a_token_sees_no_later_one() -> None:
    model, tokens = model_of(), torch.arange(16).reshape(1, 16)
    changed = tokens.clone()
    changed[0, 10:] = 5
    before, after = model(tokens), model(changed)
    assert torch.equal(before[0, :10], after[0, :10])
    assert not torch.allclose(before[0, 10:], after[0, 10:])


def test_stages_in_a_row_are_the_whole_model() -> None:
    tokens = torch.arange(32).reshape(2, 16)
    x = tokens
    names: list[str] = []
    for stage in range(2):
        part = model_of(stage=stage, stages=2)
        x = part(x)
        names += [name for name, _ in part.named_parameters()]
    whole = model_of()
    assert torch.equal(x, whole(tokens))
    assert sorted(names) == sorted(name for name, _ in whole.named_parameters())


def test_attention_scores_depend_on_distance_alone() -> None:
    q, k = torch.randn(8, dtype=torch.float64), torch.randn(8, dtype=torch.float64)
    cos, sin = rotary_angles(torch.arange(20), 8, 10000.0, q)
    turned_q, turned_k = rotate(q.expand(20, 8), cos, sin), rotate(k.expand(20, 8), cos, sin)
    scores = turned_q @ turned_k.T
    assert torch.allclose(scores[5, 3], scores[17, 15]) and not torch.allclose(scores[5, 3], scores[6, 3])


def test_grouped_queries_equal_repeated_keys_and_values() -> None:
    """With every group of query heads given its own copy of the shared keys, nothing changes."""
    grouped, full = model_of(), model_of(SPEC.model_copy(update={"kv_heads": 4}))
    with torch.no_grad():
        for name, parameter in full.named_parameters():
            source = grouped.get_parameter(name).detach()
            if "attention.key" in name or "attention.value" in name:
                source = source.view(2, 8, 32).repeat_interleave(2, dim=0).reshape(32, 32)
            parameter.copy_(source)
    tokens = torch.arange(16).reshape(1, 16)
    assert torch.allclose(grouped(tokens), full(tokens), rtol=1e-12)


def test_loss_is_the_sum_over_tokens_that_count() -> None:
    logits = torch.randn(2, 5, 7, dtype=torch.float64)
    labels = torch.randint(0, 7, (2, 5))
    labels[0, 3] = labels[1, 0] = -100
    want = -sum(
        logits[b, t].log_softmax(-1)[labels[b, t]].item()
        for b in range(2)
        for t in range(5)
        if labels[b, t] >= 0
    )
    assert token_loss(logits, labels).item() == pytest.approx(want, rel=1e-12)


def test_initial_values_depend_on_seed_and_name_only() -> None:
    shape = torch.Size((64, 64))
    first = initial_value("layers.0.attention.query.weight", shape, 4, seed=1)
    assert torch.equal(first, initial_value("layers.0.attention.query.weight", shape, 4, seed=1))
    assert not torch.equal(first, initial_value("layers.1.attention.query.weight", shape, 4, seed=1))
    assert not torch.equal(first, initial_value("layers.0.attention.query.weight", shape, 4, seed=2))
    assert first.std().item() == pytest.approx(0.02, rel=0.05)
    residual = initial_value("layers.0.attention.output.weight", shape, 8, seed=1)
    assert residual.std().item() == pytest.approx(0.02 / 4, rel=0.05)
    assert torch.equal(initial_value("norm.weight", torch.Size((8,)), 4, seed=1), torch.ones(8))


def test_spans_cover_the_layers() -> None:
    spans = [StageSpan.of(6, stage, 3) for stage in range(3)]
    assert [(s.first, s.last, s.embedding, s.head) for s in spans] == [
        (0, 2, True, False),
        (2, 4, False, False),
        (4, 6, False, True),
    ]
