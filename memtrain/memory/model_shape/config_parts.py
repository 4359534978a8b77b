"""Parts of a decoder's layers that follow from its config.json: linear maps, experts, sliding windows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from memtrain.memory.model_shape.families import FULL_EVERY, Family
from memtrain.memory.model_shape.layer_parts import Experts, Linear


def linears_of(
    family: Family, config: Mapping[str, Any], width: int, query: int, kv: int, mlp: int
) -> tuple[Linear, ...]:
    """Linear maps of a dense layer, in order of use."""
    all_biased = family.bias == "config" and bool(config.get("attention_bias", False))
    qkv_biased = all_biased or family.bias == "qkv"
    mlp_biased = bool(config.get("mlp_bias", False))
    if family.fused:
        return (
            Linear("qkv_proj", width, query + 2 * kv),
            Linear("o_proj", query, width),
            Linear("gate_up_proj", width, 2 * mlp),
            Linear("down_proj", mlp, width),
        )
    return (
        Linear("q_proj", width, query, qkv_biased),
        Linear("k_proj", width, kv, qkv_biased),
        Linear("v_proj", width, kv, qkv_biased),
        Linear("o_proj", query, width, all_biased),
        Linear("gate_proj", width, mlp, mlp_biased),
        Linear("up_proj", width, mlp, mlp_biased),
        Linear("down_proj", mlp, width, mlp_biased),
    )


CLAMPED_EXPERTS = ("gpt_oss",)
"""Model types whose experts clamp gate and up.

Source: transformers 5.23, modeling_gpt_oss.py, `_apply_gate`."""


def experts_of(config: Mapping[str, Any]) -> Experts | None:
    """The mixture of experts of a layer; None where there is none."""
    count = config.get("num_experts") or config.get("num_local_experts") or config.get("n_routed_experts")
    if not count or int(count) < 2:
        return None
    width = config.get("moe_intermediate_size") or config.get("intermediate_size") or 0
    is_clamped = config.get("model_type") in CLAMPED_EXPERTS
    return Experts(int(count), int(config.get("num_experts_per_tok") or 2), int(width), is_clamped)


def num_expert_layers_of(config: Mapping[str, Any], num_layers: int) -> int:
    """Layers whose MLP is a mixture of experts."""
    dense: Any = config.get("mlp_only_layers") or ()
    step, first = int(config.get("decoder_sparse_step") or 1), int(config.get("first_k_dense_replace") or 0)
    return sum(1 for layer in range(first, num_layers) if layer not in dense and (layer + 1) % step == 0)


def window_of(
    model_type: str, family: Family, config: Mapping[str, Any], num_layers: int
) -> tuple[int | None, int]:
    """(sliding window, layers that it concerns)."""
    window = config.get("sliding_window")
    if window is None or config.get("use_sliding_window") is False:
        return None, 0
    types = config.get("layer_types")
    if types is not None:
        count = sum(1 for kind in types if kind == "sliding_attention")
    elif family.sliding == "types":
        count = num_layers - num_layers // FULL_EVERY[model_type]
    else:
        count = num_layers if family.sliding == "all" else 0
    return (int(window), count) if count else (None, 0)
