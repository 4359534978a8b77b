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


EVERY_EXPERT = ("llama4_text", "llama4")
"""Model types whose tokens go through every expert, weighted by zero where the router did not choose it.
Source: transformers 5.23, modeling_llama4.py, Llama4TextMoe (`hidden_states.repeat`)."""

CLAMPED_EXPERTS = ("gpt_oss",)
"""Model types whose experts clamp gate and up.

Source: transformers 5.23, modeling_gpt_oss.py, `_apply_gate`."""


FLOAT32_ROUTED = frozenset(
    (
        "afmoe",
        "deepseek_v2",
        "deepseek_v3",
        "dots1",
        "glm4_moe",
        "glm4_moe_lite",
        "hunyuan_v1_moe",
        "minimax_m2",
        "mixtral",
    )
)
"""Model types whose routers weight the experts' outputs in float32: they are multiplied and summed in it.

Source: transformers 5.23, seen in a bfloat16 pass of each (tests/memory/model_shape/test_mixtures.py)."""


def head_dim_of(config: Mapping[str, Any]) -> int | None:
    """Numbers of a head's query and key; None where the configuration does not say.

    Latent attention has a part with positions and one without. Its values are padded to as many.
    Source: arXiv:2405.04434, section 2.1.3.
    """
    parts = config.get("qk_nope_head_dim"), config.get("qk_rope_head_dim")
    if all(parts):
        return sum(int(part or 0) for part in parts)
    if config.get("head_dim"):
        return int(config["head_dim"])
    width, heads = config.get("hidden_size"), config.get("num_attention_heads")
    return int(width) // int(heads) if width and heads else None


def experts_of(config: Mapping[str, Any]) -> Experts | None:
    """The mixture of experts of a layer; None where there is none."""
    count = config.get("num_experts") or config.get("num_local_experts") or config.get("n_routed_experts")
    if not count or int(count) < 2:
        return None
    width = config.get("moe_intermediate_size") or config.get("intermediate_size") or 0
    kind = config.get("model_type")
    chosen = count if kind in EVERY_EXPERT else config.get("num_experts_per_tok") or 2
    return Experts(
        int(count),
        int(chosen),
        int(width),
        is_clamped=kind in CLAMPED_EXPERTS,
        weights_in_float32=kind in FLOAT32_ROUTED,
    )


def num_expert_layers_of(config: Mapping[str, Any], num_layers: int) -> int:
    """Layers whose MLP is a mixture of experts."""
    return sum(has_experts_at(config, layer) for layer in range(num_layers))


def has_experts_at(config: Mapping[str, Any], layer: int) -> bool:
    """Whether the MLP of a layer of a mixture is its experts, and not a dense one."""
    dense: Any = config.get("mlp_only_layers") or ()
    step, first = int(config.get("decoder_sparse_step") or 1), int(config.get("first_k_dense_replace") or 0)
    return layer >= first and layer not in dense and (layer + 1) % step == 0


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
