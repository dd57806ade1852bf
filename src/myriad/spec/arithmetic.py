"""Model arithmetic: parameters, floating-point operations and bytes, from the model's numbers alone.

Symbols: b sequences, s tokens a sequence, h dim, a heads, k key-value heads, d head dim, f ffn dim, L layers,
V vocabulary, t tensor-parallel degree. The counts of parameters are exact (Llama 3 405B: 405,853,388,800).
FLOPs are *model* FLOPs, the work the mathematics asks for: a multiply-add is two, recomputation counts
nothing, and so do norms, softmax and the optimizer (under 1 % from h = 1,024 up). Attention has two
conventions in the literature, which differ by 1.55x for a 7B model at 64k tokens, so every caller names one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from myriad.spec.job import DataSpec, LayoutSpec, ModelSpec

# "full" counts all s x s scores (PaLM, Megatron, nanoGPT); "causal" half of them, as a causal kernel does.
Attention = Literal["causal", "full"]

# Bytes of one number in the dtype the layers compute in.
COMPUTE_BYTES = {"float32": 4, "float64": 8, "bfloat16": 2}
# Bytes of one number as parameter, gradient and optimizer moment: with bfloat16 these stay float32.
STATE_BYTES = {"float32": 4, "float64": 8, "bfloat16": 4}


def attention_parameters(model: ModelSpec) -> int:
    """Of one layer: queries h*a*d, keys and values 2*h*k*d, output a*d*h."""
    return 2 * model.dim * model.head_dim * (model.heads + model.kv_heads)


def ffn_parameters(model: ModelSpec) -> int:
    """Of one layer, SwiGLU: gate, up and down, 3*h*f."""
    return 3 * model.dim * model.ffn_dim


def parameters(model: ModelSpec) -> int:
    """L*(attention + ffn + 2h) + 2*V*h + h: the layers, embedding and output (untied), the last norm."""
    layer = attention_parameters(model) + ffn_parameters(model) + 2 * model.dim
    return model.layers * layer + 2 * model.vocab_size * model.dim + model.dim


def matmul_parameters(model: ModelSpec) -> int:
    """Parameters that multiply every token: all but the norms and the embedding, which is a look-up."""
    layer = attention_parameters(model) + ffn_parameters(model)
    return model.layers * layer + model.vocab_size * model.dim


def attention_flops_per_token(model: ModelSpec, sequence_length: int, attention: Attention) -> int:
    """Forward and backward of the scores and their product with the values, which hold no parameters.

    Forward per layer and sequence: 2*s^2*a*d for the scores and as much for the product; the backward pass
    costs twice the forward: 12*L*s*a*d a token (Korthikanti et al. 2022, eq. 7; PaLM, appendix B), half of it
    if causal.
    """
    full = 12 * model.layers * sequence_length * model.heads * model.head_dim
    return full if attention == "full" else full // 2


def flops_per_token(model: ModelSpec, sequence_length: int, attention: Attention) -> int:
    """6 x matmul parameters + attention: 2 FLOPs a multiply-add forward, and 4 backward."""
    return 6 * matmul_parameters(model) + attention_flops_per_token(model, sequence_length, attention)


def step_flops(model: ModelSpec, data: DataSpec, attention: Attention) -> int:
    """Model FLOPs of one optimizer step over the whole global batch (all ranks together)."""
    tokens = data.global_batch * data.sequence_length
    return tokens * flops_per_token(model, data.sequence_length, attention)


def mfu(flops: float, seconds: float, accelerators: int, peak_flops: float) -> float:
    """Model FLOPs utilisation: the share of the accelerators' peak (FLOP/s each) that ``flops`` used."""
    assert seconds > 0 and accelerators > 0 and peak_flops > 0
    return flops / (seconds * accelerators * peak_flops)


@dataclass(frozen=True)
class RankBytes:
    """Bytes one rank needs at the peak of a step."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer + self.activations


def rank_parameters(model: ModelSpec, layout: LayoutSpec, stage: int) -> int:
    """Parameters of one tensor-parallel rank of a pipeline stage, before dp_shard divides them.

    Matrices are split by tp; norms are held whole by each rank.
    """
    assert 0 <= stage < layout.pp
    norms = 2 * model.dim * model.layers // layout.pp
    embedding = model.vocab_size * model.dim // layout.tp if stage == 0 else 0
    last_norm = model.dim if stage == layout.pp - 1 else 0
    return _rank_matmul_parameters(model, layout, stage) + embedding + norms + last_norm


def _rank_matmul_parameters(model: ModelSpec, layout: LayoutSpec, stage: int) -> int:
    layers = model.layers // layout.pp
    matrices = layers * (attention_parameters(model) + ffn_parameters(model))
    if stage == layout.pp - 1:
        matrices += model.vocab_size * model.dim
    return matrices // layout.tp


def microbatches_in_flight(layout: LayoutSpec, stage: int) -> int:
    """Microbatches whose activations a stage holds: all with gpipe, the stages still ahead with 1f1b."""
    if layout.pp == 1:
        return 1
    return layout.microbatches if layout.schedule == "gpipe" else min(layout.microbatches, layout.pp - stage)


def layer_activation_bytes(model: ModelSpec, layout: LayoutSpec, tokens: int) -> int:
    """What one layer keeps for the backward pass of a microbatch of that many tokens, on one rank.

    No recomputation, no dropout, attention in one fused call. Split by tp, in the width of the residual
    stream: input and normalised input of both norms 4h + 2, log-sum-exp of the scores a; in the width of the
    matrix products: queries, keys and values repeated to all heads, and the attention output before and after
    it is laid out for its matrix 5*a*d, and gate, its silu, up and their product 4f. Whole on each rank: the
    gathered inputs of attention and ffn 2h, or 5h where autocast narrows them anew for each of the five
    matrices they meet. The general form is Korthikanti et al. 2022, eq. 1 to 4; these terms are those of the
    built-in decoder in eager PyTorch 2.13 on CPU, where they agree with the tensors autograd saves to 0.5 %
    (rotary angles are left out). Fused norms on an accelerator keep up to 2h less.
    """
    narrow, wide = COMPUTE_BYTES[model.dtype], STATE_BYTES[model.dtype]
    split = wide * (4 * model.dim + 2 + model.heads)
    split += narrow * (5 * model.heads * model.head_dim + 4 * model.ffn_dim)
    gathered = 5 if narrow < wide else 2
    return tokens * (split // layout.tp + narrow * gathered * model.dim)


def head_activation_bytes(model: ModelSpec, layout: LayoutSpec, tokens: int) -> int:
    """What the last stage keeps beyond its layers, for a microbatch of that many tokens.

    The last norm as in a layer, and, while the loss is taken, the logits as computed, as widened, and their
    gradient.
    """
    narrow, wide = COMPUTE_BYTES[model.dtype], STATE_BYTES[model.dtype]
    split = wide * (2 * model.dim + 1) + (narrow + 2 * wide) * model.vocab_size
    return tokens * (split // layout.tp + narrow * model.dim)


def rank_bytes(model: ModelSpec, layout: LayoutSpec, data: DataSpec, stage: int) -> RankBytes:
    """Bytes on one rank of a pipeline stage: state split by dp_shard, activations of what is in flight.

    Optimizer: two AdamW moments. With bfloat16 the activations include one narrow copy of the matrices, which
    autograd holds from the forward to the backward pass.
    """
    state = -(-rank_parameters(model, layout, stage) // layout.dp_shard) * STATE_BYTES[model.dtype]
    tokens = data.global_batch * data.sequence_length // (layout.dp * layout.microbatches)
    layers = model.layers // layout.pp
    activations = (
        layers * layer_activation_bytes(model, layout, tokens) * microbatches_in_flight(layout, stage)
    )
    if stage == layout.pp - 1:
        activations += head_activation_bytes(model, layout, tokens)
    if COMPUTE_BYTES[model.dtype] < STATE_BYTES[model.dtype]:
        activations += COMPUTE_BYTES[model.dtype] * _rank_matmul_parameters(model, layout, stage)
    return RankBytes(parameters=state, gradients=state, optimizer=2 * state, activations=activations)


def checkpoint_bytes(model: ModelSpec) -> int:
    """Bytes of one durable checkpoint of the whole job: parameters and the two moments."""
    return 3 * parameters(model) * STATE_BYTES[model.dtype]
