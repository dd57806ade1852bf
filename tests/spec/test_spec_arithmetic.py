"""Model arithmetic against published counts, and the ledger's closed list of causes."""

from __future__ import annotations

import pytest

from myriad.spec import arithmetic
from myriad.spec.causes import Cause
from myriad.spec.job import DataSpec, LayoutSpec, ModelSpec

LLAMA_3_405B = ModelSpec(layers=126, dim=16384, heads=128, kv_heads=8, ffn_dim=53248, vocab_size=128256)
LLAMA_3_8B = ModelSpec(layers=32, dim=4096, heads=32, kv_heads=8, ffn_dim=14336, vocab_size=128256)
LLAMA_3_70B = ModelSpec(layers=80, dim=8192, heads=64, kv_heads=8, ffn_dim=28672, vocab_size=128256)
GPT_SHAPE = ModelSpec(layers=4, dim=256, heads=8, kv_heads=8, ffn_dim=1024, vocab_size=512)


@pytest.mark.parametrize(
    ("model", "count"),
    [(LLAMA_3_8B, 8_030_261_248), (LLAMA_3_70B, 70_553_706_496), (LLAMA_3_405B, 405_853_388_800)],
)
def test_parameters_as_published(model: ModelSpec, count: int) -> None:
    assert arithmetic.parameters(model) == count


def test_flops_of_llama_3_405b_under_both_conventions() -> None:
    # The published 3.8e25 FLOPs for 15.6e12 tokens are 6ND (Llama 3 paper, 3.2).
    six = 6 * arithmetic.matmul_parameters(LLAMA_3_405B)
    assert six * 15.6e12 == pytest.approx(3.8e25, rel=0.01)
    full = arithmetic.flops_per_token(LLAMA_3_405B, 8192, "full")
    causal = arithmetic.flops_per_token(LLAMA_3_405B, 8192, "causal")
    assert full - six == 12 * 126 * 8192 * 16384
    assert 2 * (causal - six) == full - six


def test_step_flops_agree_with_the_form_of_korthikanti() -> None:
    """72*B*L*s*h^2*(1 + s/(6h) + V/(12hL)) holds for multi-head attention and an ffn of 8h^2 parameters."""
    model = GPT_SHAPE.model_copy(update={"ffn_dim": 8 * 256 // 3 + 1})  # 3*h*f next to 8*h^2
    data = DataSpec(path="x", sequence_length=128, global_batch=4)
    b, s, h, layers, v = 4, 128, 256, 4, 512
    want = 72 * b * layers * s * h**2 * (1 + s / (6 * h) + v / (12 * h * layers))
    assert arithmetic.step_flops(model, data, "full") == pytest.approx(want, rel=1e-3)


def test_mfu() -> None:
    # Llama 3 405B, 16,384 H100, 8k tokens, 16M tokens a step: 41 % MFU is about 400 TFLOP/s each (table 4).
    assert arithmetic.mfu(16384 * 400e12, 1.0, 16384, 989e12) == pytest.approx(0.404, abs=1e-3)


@pytest.mark.parametrize(
    "layout",
    [
        LayoutSpec(),
        LayoutSpec(pp=2, microbatches=2),
        LayoutSpec(pp=4, dp_shard=2, tp=2, microbatches=4),
    ],
)
def test_the_stages_hold_the_whole_model_once(layout: LayoutSpec) -> None:
    matrices_and_norms = sum(
        arithmetic.rank_parameters(GPT_SHAPE, layout, stage) for stage in range(layout.pp)
    )
    norms = (2 * GPT_SHAPE.layers + 1) * GPT_SHAPE.dim
    assert (matrices_and_norms - norms) * layout.tp + norms == arithmetic.parameters(GPT_SHAPE)


@pytest.mark.parametrize(("schedule", "held"), [("1f1b", [4, 3, 2, 1]), ("gpipe", [6, 6, 6, 6])])
def test_microbatches_in_flight(schedule: str, held: list[int]) -> None:
    layout = LayoutSpec.model_validate({"pp": 4, "microbatches": 6, "schedule": schedule})
    assert [arithmetic.microbatches_in_flight(layout, stage) for stage in range(4)] == held


def test_bytes_of_one_rank_by_hand() -> None:
    model = ModelSpec(layers=1, dim=8, heads=2, kv_heads=1, ffn_dim=16, vocab_size=32)
    data = DataSpec(path="x", sequence_length=4, global_batch=2)
    held = arithmetic.rank_bytes(model, LayoutSpec(), data, 0)
    count = (2 * 8 * 8 + 2 * 8 * 4) + 3 * 8 * 16 + 2 * 8 + 2 * 32 * 8 + 8
    assert held.parameters == held.gradients == 4 * count and held.optimizer == 8 * count
    # 8 tokens of one layer: norms 32 + 2, log-sum-exp 2, heads 40, ffn 64, gathered inputs 16; of the head:
    # 17 + 8 and 3 V.
    assert held.activations == 8 * 4 * (34 + 2 + 40 + 64 + 16) + 8 * 4 * (17 + 8 + 3 * 32)
    assert held.total == 16 * count + held.activations
    assert arithmetic.checkpoint_bytes(model) == 12 * count


@pytest.mark.parametrize(("dtype", "saved"), [("float32", 5_531_648), ("bfloat16", 3_696_640)])
def test_activations_of_a_layer_as_autograd_saves_them(dtype: str, saved: int) -> None:
    """``saved``: distinct storages seen by saved_tensors_hooks on the built-in decoder, three layers less
    one, halved.

    For bfloat16 the narrow copies of the layer's matrices are taken off. What the formula leaves out are
    rotary angles.
    """
    model = ModelSpec(layers=1, dim=256, heads=8, kv_heads=2, ffn_dim=640, vocab_size=512).model_copy(
        update={"dtype": dtype}
    )
    assert arithmetic.layer_activation_bytes(model, LayoutSpec(), 256) == pytest.approx(saved, rel=5e-3)


def test_sharding_divides_state_and_bfloat16_keeps_it_in_float32() -> None:
    data = DataSpec(path="x", sequence_length=64, global_batch=4)
    whole = arithmetic.rank_bytes(GPT_SHAPE, LayoutSpec(), data, 0)
    shard = arithmetic.rank_bytes(GPT_SHAPE, LayoutSpec(dp_shard=4), data, 0)
    assert shard.optimizer == whole.optimizer / 4 and shard.activations == whole.activations / 4
    half = arithmetic.rank_bytes(GPT_SHAPE.model_copy(update={"dtype": "bfloat16"}), LayoutSpec(), data, 0)
    copies = 2 * arithmetic.matmul_parameters(GPT_SHAPE)
    assert half.parameters == whole.parameters and half.activations - copies < whole.activations


def test_causes_are_closed_and_explained() -> None:
    inside = (
        "compute, activation_recompute, exposed_communication, pipeline_bubble, data_wait, checkpoint_wait, "
        "straggler_wait, evaluation, startup, detection, recovery, lost_work, spare_idle, node_down, other, "
        "running_unattributed"
    )
    outside = (
        "idle_no_demand, idle_blocked_quota, idle_blocked_fragmentation, idle_blocked_reservation, spare, "
        "draining, repair"
    )
    assert ", ".join(cause for cause in Cause if cause.in_allocation) == inside
    assert ", ".join(cause for cause in Cause if not cause.in_allocation) == outside
    assert all(cause.meaning for cause in Cause)
