"""The time of a step's arithmetic, and the pipeline's bubble around it.

Method: FLOPs of each stage over the speed of a matrix product; the ideal schedule then takes
``(m + p - 1) / m`` times the slowest stage (GPipe, Huang et al. 2019, section 2; 1F1B is the same), and what
that leaves a stage idle is bubble, exactly as the ledger measures it. Emulated nodes share one machine's
cores: when more ranks could run than there are cores, everything stretches until the cores are never idle,
step = total work / cores. Trade-off: a bound. Norms, softmax, the optimizer and small matrices run below
the speed of a large product, so a tiny model takes two to three times as long.
"""

from __future__ import annotations

from dataclasses import dataclass

from myriad.planner.subject import Subject
from myriad.spec.arithmetic import (
    Attention,
    attention_flops_per_token,
    attention_parameters,
    ffn_parameters,
)

# The attention that is executed: a causal kernel skips the masked half.
EXECUTED: Attention = "causal"


@dataclass(frozen=True, slots=True)
class ComputeTime:
    """Seconds of one step, averaged over the ranks: arithmetic, and idle by the pipeline's schedule."""

    compute_s: float
    pipeline_bubble_s: float


def compute_time(subject: Subject) -> ComputeTime:
    """The arithmetic of one step on the subject's machine."""
    layout, probe = subject.layout, subject.probe
    ranks_per_stage = layout.dp * layout.tp
    flops = [stage_flops(subject, stage) for stage in range(layout.pp)]
    work_s = [
        stage / ranks_per_stage / subject.flops_per_s for stage in flops
    ]  # of one rank, alone on a core
    ideal_s = max(work_s) * (layout.microbatches + layout.pp - 1) / layout.microbatches
    stretch = 1.0
    if probe.emulated:
        stretch = max(1.0, sum(work_s) * ranks_per_stage / probe.cores / ideal_s)
    mean_s = sum(work_s) / layout.pp
    return ComputeTime(stretch * mean_s, stretch * (ideal_s - mean_s))


def stage_flops(subject: Subject, stage: int) -> float:
    """Model FLOPs of one stage in one step, over the whole global batch. They sum to ``step_flops``."""
    model, layout, data = subject.model, subject.layout, subject.data
    layers = model.layers // layout.pp
    matrices = layers * (attention_parameters(model) + ffn_parameters(model))
    if stage == layout.pp - 1:
        matrices += model.vocab_size * model.dim
    attention = attention_flops_per_token(model, data.sequence_length, EXECUTED) / layout.pp
    return data.global_batch * data.sequence_length * (6 * matrices + attention)
