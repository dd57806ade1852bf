"""What the built-in model is called in Hugging Face's Llama layout: names, shapes and ``config.json``.

Method: a table of names, and a configuration that maps one to one onto ``ModelSpec``. Both sides keep weights as
(out, in) and turn the pair (x[i], x[i + K/2]) of a head by the rotary angle, so no row is permuted; the logits of
``transformers`` agree to 1e-5. What a Llama may ask for beyond the built-in model (biases, scaled positions) is
refused by name. Trade-off: tied embeddings are read as two equal matrices, which train apart from then on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from myriad.spec.errors import sentence
from myriad.spec.job import ModelSpec
from myriad.storage.durable.manifest import CheckpointError

_DEFAULT_POSITIONS = 2048  # of LlamaConfig, where nobody says how long sequences were
# What differs from these is beyond the built-in model.
_SUPPORTED = {
    "model_type": "llama",
    "attention_bias": False,
    "mlp_bias": False,
    "hidden_act": "silu",
}
_KEYS = {
    "num_hidden_layers": "layers",
    "hidden_size": "dim",
    "num_attention_heads": "heads",
    "num_key_value_heads": "kv_heads",
    "intermediate_size": "ffn_dim",
    "vocab_size": "vocab_size",
    "rms_norm_eps": "norm_eps",
}


@dataclass(frozen=True)
class Weight:
    """One parameter: its name here and there, and its shape in both."""

    ours: str
    theirs: str
    shape: tuple[int, ...]


def weights(spec: ModelSpec) -> Iterator[Weight]:
    """All parameters of the model, in the order of use."""
    dim, keys = spec.dim, spec.kv_heads * spec.head_dim
    yield Weight("embedding.weight", "model.embed_tokens.weight", (spec.vocab_size, dim))
    for layer in range(spec.layers):
        for ours, theirs, shape in (
            ("attention_norm", "input_layernorm", (dim,)),
            ("attention.query", "self_attn.q_proj", (dim, dim)),
            ("attention.key", "self_attn.k_proj", (keys, dim)),
            ("attention.value", "self_attn.v_proj", (keys, dim)),
            ("attention.output", "self_attn.o_proj", (dim, dim)),
            ("feed_forward_norm", "post_attention_layernorm", (dim,)),
            ("feed_forward.gate", "mlp.gate_proj", (spec.ffn_dim, dim)),
            ("feed_forward.up", "mlp.up_proj", (spec.ffn_dim, dim)),
            ("feed_forward.down", "mlp.down_proj", (dim, spec.ffn_dim)),
        ):
            yield Weight(f"layers.{layer}.{ours}.weight", f"model.layers.{layer}.{theirs}.weight", shape)
    yield Weight("norm.weight", "model.norm.weight", (dim,))
    yield Weight("head.weight", "lm_head.weight", (spec.vocab_size, dim))


def config(spec: ModelSpec, dtype: str, sequence_length: int | None) -> dict[str, Any]:
    """``config.json`` of a folder whose weights are of ``dtype``."""
    return {
        "architectures": ["LlamaForCausalLM"],
        **_SUPPORTED,
        **{theirs: getattr(spec, ours) for theirs, ours in _KEYS.items()},
        "head_dim": spec.head_dim,
        "rope_theta": spec.rope_theta,
        "max_position_embeddings": sequence_length or _DEFAULT_POSITIONS,
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
    }


def model_spec(found: Mapping[str, Any], where: str) -> ModelSpec:
    """The model a ``config.json`` describes. CheckpointError where the built-in model cannot be that."""
    for key, want in _SUPPORTED.items():
        if (value := found.get(key, want)) != want:
            raise CheckpointError(
                f"{where} has {key} {value!r}, and the built-in model has {want!r}; import a plain Llama"
            )
    rope = found.get("rope_parameters") or found.get("rope_scaling") or {}
    if (kind := rope.get("rope_type", rope.get("type", "default"))) != "default":
        raise CheckpointError(
            f"{where} scales rotary positions ({kind!r}), which the built-in model does not"
        )
    if missing := [key for key in _KEYS if key not in found]:
        raise CheckpointError(f"{where} has no {missing[0]}: it is no configuration of a Llama")
    dtype = found.get("dtype", found.get("torch_dtype"))
    values = {ours: found[theirs] for theirs, ours in _KEYS.items()}
    values["rope_theta"] = rope.get("rope_theta", found.get("rope_theta", 10000.0))
    values["dtype"] = dtype if dtype in ("float64", "bfloat16") else "float32"
    try:
        spec = ModelSpec.model_validate(values)
    except ValidationError as error:
        raise CheckpointError(sentence(error, ModelSpec, where)) from None
    if found.get("head_dim", spec.head_dim) != spec.head_dim:
        raise CheckpointError(
            f"{where} has head_dim {found['head_dim']}, and the built-in model has hidden_size over heads"
        )
    return spec
