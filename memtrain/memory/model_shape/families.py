"""Behaviour of well-known model families that their config.json does not say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class Family:
    """Properties of a model type's code that its config does not give."""

    qk_norm: Literal["none", "head", "whole"] = "none"
    """Norms on queries and keys: none, one scale for all heads, or one over the whole width."""
    num_wide_norms: int = 2
    """RMS norms of the model's width in a layer."""
    bias: Literal["none", "config", "qkv"] = "config"
    """Biases of the attention: never, `attention_bias` of the config, or always on q, k and v."""
    fused: bool = False
    """q, k and v are one linear map, gate and up another."""
    norms_in_float: bool = False
    """The norm multiplies by its scale in float32 (others round first)."""
    norms_after: bool = False
    """The MLP's output goes through a norm before it is added."""
    scales_outputs: bool = False
    """Outputs of attention and MLP are multiplied by a number before they are added."""
    rotary_in_float: bool = False
    """Tables of rotary positions are float32 whatever the layers are."""
    has_fused: bool = False
    """Norms, rotary positions and MLPs have a form in few kernels (trainers/model/kernels)."""
    sliding: Literal["none", "all", "types"] = "none"
    """Layers that a `sliding_window` concerns when `layer_types` does not say."""
    num_rotary: int = 1
    """Tables of rotary positions: one, or one for each kind of attention layer."""
    defaults: Mapping[str, Any] | None = None
    """Values that transformers fills in for keys a config.json leaves out."""


def _defaults(vocab: int, width: int, mlp: int, layers: int, heads: int, **more: Any) -> dict[str, Any]:
    return {
        "vocab_size": vocab,
        "hidden_size": width,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
    } | more


# Source: configuration_*.py and modeling_*.py of transformers 5.23; held by
# tests/memory/model_shape/test_shape.py.
_QWEN = _defaults(151936, 4096, 22016, 32, 32, num_key_value_heads=32)
_OLMO = _defaults(50304, 4096, 11008, 32, 32)
_GEMMA = {"head_dim": 256, "tie_word_embeddings": True}
_CAPPED = {"final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0} | _GEMMA
_GEMMA2 = _defaults(256000, 2304, 9216, 26, 8, num_key_value_heads=4, sliding_window=4096, **_CAPPED)
_GEMMA3 = _defaults(262208, 2304, 9216, 26, 8, num_key_value_heads=4, sliding_window=4096, **_GEMMA)
_MISTRAL = _defaults(32000, 4096, 14336, 32, 32, num_key_value_heads=8, sliding_window=4096)
_MOE = {"moe_intermediate_size": 768, "num_local_experts": 128, "num_experts_per_tok": 8}
FAMILIES: dict[str, Family] = {
    "llama": Family(has_fused=True, defaults=_defaults(32000, 4096, 11008, 32, 32)),
    "mistral": Family(has_fused=True, bias="none", sliding="all", defaults=_MISTRAL),
    "mixtral": Family(
        has_fused=True,
        bias="none",
        sliding="all",
        defaults=_MISTRAL | {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None},
    ),
    "qwen2": Family(has_fused=True, bias="qkv", defaults=_QWEN),
    "qwen3": Family(has_fused=True, qk_norm="head", defaults=_QWEN | {"head_dim": 128}),
    "qwen3_moe": Family(
        has_fused=True,
        qk_norm="head",
        defaults=_defaults(151936, 2048, 6144, 24, 32, num_key_value_heads=4, **_MOE),
    ),
    "smollm3": Family(
        has_fused=True,
        defaults=_defaults(128256, 2048, 11008, 36, 16, num_key_value_heads=4, tie_word_embeddings=True),
    ),
    "phi3": Family(bias="none", fused=True, sliding="all", defaults=_defaults(32064, 3072, 8192, 32, 32)),
    "granite": Family(has_fused=True, scales_outputs=True, defaults=_defaults(32000, 4096, 11008, 32, 32)),
    "olmo2": Family(
        qk_norm="whole", norms_in_float=True, norms_after=True, rotary_in_float=True, defaults=_OLMO
    ),
    "olmo3": Family(
        qk_norm="whole",
        norms_in_float=True,
        norms_after=True,
        rotary_in_float=True,
        sliding="types",
        defaults=_OLMO | {"sliding_window": 4096},
    ),
    "gemma": Family(
        norms_in_float=True,
        defaults=_defaults(256000, 3072, 24576, 28, 16, num_key_value_heads=16, **_GEMMA),
    ),
    "gemma2": Family(
        num_wide_norms=4, norms_in_float=True, norms_after=True, sliding="types", defaults=_GEMMA2
    ),
    "gemma3_text": Family(
        qk_norm="head",
        num_wide_norms=4,
        norms_in_float=True,
        norms_after=True,
        sliding="types",
        num_rotary=2,
        defaults=_GEMMA3,
    ),
}
FULL_EVERY = {"gemma2": 2, "gemma3_text": 6, "olmo3": 4}
"""Every n-th layer attends to everything where `layer_types` is not written."""
ATTENTIONS_PER_LAYER = {"diffllama": 2}
"""Attentions in a layer, each with keys and values of its own that the native sampler keeps."""
