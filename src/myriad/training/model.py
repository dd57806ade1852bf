"""The built-in decoder: RMSNorm, rotary positions, grouped-query attention, SwiGLU. It knows no ranks.

Method: plain PyTorch modules. A pipeline stage is the same class with fewer layers and without the
embedding or the head, and keeps the global layer numbers in its parameter names, so a parameter has one
name in every layout. Parallelism is applied from outside (``tensor_parallel``, ``sharding``): attention
reads the head count from its inputs, so it runs unchanged on a slice of the heads. Rotary angles are
recomputed in each forward instead of being kept in a buffer: the model has no state but its parameters.

Sequences may hold several documents (``documents``): then attention stays within each, and positions are counted
from its beginning, so each document is computed as if it were alone. See :class:`Documents`.

Trade-off: no key/value cache and no dropout; this is a training model. At dim 128 on one CPU core it
reaches about a third of the core's matrix-multiply rate.

Shapes: B sequences, T positions (of this rank where the sequence is split), D model width, H query
heads, G key/value heads, K head width, F feed-forward width, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from myriad.spec.job import ModelSpec


@dataclass(frozen=True)
class StageSpan:
    """The part of the model one pipeline stage holds: layers ``first`` to ``last`` (exclusive)."""

    first: int
    last: int
    embedding: bool
    head: bool

    @classmethod
    def of(cls, layers: int, stage: int, stages: int) -> StageSpan:
        """Equal contiguous spans; the first stage also embeds, the last one also has the head."""
        assert layers % stages == 0, (layers, stages)
        each = layers // stages
        return cls(stage * each, (stage + 1) * each, stage == 0, stage == stages - 1)


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension, in at least float32 (Zhang and Sennrich, 2019)."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(dim))

    def forward(self, x_BTD: Tensor) -> Tensor:
        return F.rms_norm(x_BTD, self.weight.shape, self.weight, self.eps)


@dataclass(frozen=True)
class Documents:
    """What attention must know of sequences that hold several documents; made once a forward pass.

    ``visible_B1TT``: whether a position (row) sees another (column): the same document, and not later.
    ``positions_BT``: places from the beginning of the own document, for the rotary angles.

    Trade-off: the mask is explicit, B x T x T booleans, which scaled_dot_product_attention takes on every device. At
    T = 2048 it is 4 MiB a sequence; kernels that skip what is masked (FlexAttention's block mask, the cumulative
    lengths of variable-length attention) are made from the same numbers, here and in ``Attention`` alone.
    """

    visible_B1TT: Tensor
    positions_BT: Tensor

    @classmethod
    def of(cls, documents_BT: Tensor) -> Documents:
        """From a number for each position; a document is a run of equal numbers."""
        place_T = torch.arange(documents_BT.shape[-1], device=documents_BT.device)
        begins_BT = torch.ones_like(documents_BT, dtype=torch.bool)
        begins_BT[:, 1:] = documents_BT[:, 1:] != documents_BT[:, :-1]
        first_BT = torch.where(begins_BT, place_T, 0).cummax(dim=-1).values
        same_BTT = first_BT.unsqueeze(-1) == first_BT.unsqueeze(-2)
        visible_BTT = same_BTT & (place_T.unsqueeze(-1) >= place_T)
        return cls(visible_BTT.unsqueeze(1), place_T - first_BT)


class Attention(nn.Module):
    """Causal self-attention with ``heads`` query heads sharing ``kv_heads`` keys and values."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.head_width = spec.dim // spec.heads
        self.rope_theta = spec.rope_theta
        self.query = nn.Linear(spec.dim, spec.heads * self.head_width, bias=False)
        self.key = nn.Linear(spec.dim, spec.kv_heads * self.head_width, bias=False)
        self.value = nn.Linear(spec.dim, spec.kv_heads * self.head_width, bias=False)
        self.output = nn.Linear(spec.heads * self.head_width, spec.dim, bias=False)

    def forward(self, x_BTD: Tensor, documents: Documents | None = None) -> Tensor:
        q_BHTK = self._heads(self.query(x_BTD))
        k_BGTK = self._heads(self.key(x_BTD))
        v_BGTK = self._heads(self.value(x_BTD))
        if documents is None:
            positions = torch.arange(q_BHTK.shape[-2], device=q_BHTK.device)  # (T,)
        else:
            positions = documents.positions_BT.unsqueeze(1)  # (B, 1, T): the same for every head
        cos_TK, sin_TK = rotary_angles(positions, self.head_width, self.rope_theta, q_BHTK)
        groups = q_BHTK.shape[1] // k_BGTK.shape[1]
        a_BHTK = F.scaled_dot_product_attention(
            rotate(q_BHTK, cos_TK, sin_TK),
            rotate(k_BGTK, cos_TK, sin_TK).repeat_interleave(groups, dim=1),
            v_BGTK.repeat_interleave(groups, dim=1),
            attn_mask=None if documents is None else documents.visible_B1TT,
            is_causal=documents is None,
        )
        projected: Tensor = self.output(a_BHTK.transpose(1, 2).flatten(-2))
        return projected

    def _heads(self, x: Tensor) -> Tensor:
        """(B, T, heads * K) -> (B, heads, T, K); the number of heads is whatever this rank has."""
        return x.view(*x.shape[:-1], -1, self.head_width).transpose(1, 2)


class FeedForward(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x)) (Shazeer, 2020)."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.gate = nn.Linear(spec.dim, spec.ffn_dim, bias=False)
        self.up = nn.Linear(spec.dim, spec.ffn_dim, bias=False)
        self.down = nn.Linear(spec.ffn_dim, spec.dim, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        out_BTD: Tensor = self.down(F.silu(self.gate(x_BTD)) * self.up(x_BTD))
        return out_BTD


class Block(nn.Module):
    """One layer: attention and feed-forward, each behind a norm and added to the residual stream."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(spec.dim, spec.norm_eps)
        self.attention = Attention(spec)
        self.feed_forward_norm = RMSNorm(spec.dim, spec.norm_eps)
        self.feed_forward = FeedForward(spec)

    def forward(self, x_BTD: Tensor, documents: Documents | None = None) -> Tensor:
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), documents=documents)
        out_BTD: Tensor = x_BTD + self.feed_forward(self.feed_forward_norm(x_BTD))
        return out_BTD


class Decoder(nn.Module):
    """The whole model, or the span of it that one pipeline stage holds.

    Input: token ids (B, T) with the embedding, else the residual stream (B, T, D); ``documents`` (B, T), over all
    positions on every rank, numbers the document of each where sequences hold several.
    Output: logits (B, T, V) with the head, else the residual stream (B, T, D).
    """

    def __init__(self, spec: ModelSpec, span: StageSpan) -> None:
        super().__init__()
        self.embedding = nn.Embedding(spec.vocab_size, spec.dim) if span.embedding else None
        self.layers = nn.ModuleDict({str(n): Block(spec) for n in range(span.first, span.last)})
        self.norm = RMSNorm(spec.dim, spec.norm_eps) if span.head else None
        self.head = nn.Linear(spec.dim, spec.vocab_size, bias=False) if span.head else None

    def forward(self, inputs: Tensor, documents: Tensor | None = None) -> Tensor:
        each = None if documents is None else Documents.of(documents)
        x_BTD = inputs if self.embedding is None else self.embedding(inputs)
        for layer in self.layers.values():
            x_BTD = layer(x_BTD, documents=each)
        if self.norm is None or self.head is None:
            return x_BTD
        logits_BTV: Tensor = self.head(self.norm(x_BTD))
        return logits_BTV


def rotary_angles(positions: Tensor, width: int, theta: float, like: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every (position, frequency): two (..., T, K/2) for (..., T), in at least float32.

    Su et al., 2021: position t turns the pair (x[i], x[i + K/2]) by t * theta^(-2i/K).
    """
    dtype = torch.promote_types(like.dtype, torch.float32)
    frequency = theta ** (-torch.arange(0, width, 2, dtype=dtype, device=like.device) / width)
    angle_TK = positions.to(dtype).unsqueeze(-1) * frequency
    return angle_TK.cos(), angle_TK.sin()


def rotate(x: Tensor, cos_TK: Tensor, sin_TK: Tensor) -> Tensor:
    """Turn each pair of (B, heads, T, K) by its position's angle, (T, K/2) or (B, 1, T, K/2); the dtype is kept."""
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat((first * cos_TK - second * sin_TK, first * sin_TK + second * cos_TK), dim=-1)
    return turned.to(x.dtype)


def token_loss(logits_BTV: Tensor, labels_BT: Tensor) -> Tensor:
    """The *sum* of the cross entropies (nats) of all tokens that are not masked (label -100).

    The sum, because only the whole mesh knows how many tokens count: the division happens once, after
    the reduction, by the global number (see ``step``).
    """
    logits = logits_BTV.flatten(0, 1)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits, labels_BT.flatten(), ignore_index=-100, reduction="sum")
