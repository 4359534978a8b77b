"""Shapes of mixtures of experts that people train: facts of their config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def _mixture(
    kind: str, vocab: int, width: int, mlp: int, layers: int, heads: int, kv: int, positions: int, **more: Any
) -> dict[str, Any]:
    return {
        "model_type": kind,
        "vocab_size": vocab,
        "hidden_size": width,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "max_position_embeddings": positions,
        "tie_word_embeddings": False,
        **more,
    }


def _qwen3(
    width: int, mlp: int, layers: int, heads: int, kv: int, expert_mlp: int, experts: int
) -> dict[str, Any]:
    return _mixture(
        "qwen3_moe",
        151936,
        width,
        mlp,
        layers,
        heads,
        kv,
        40960,
        head_dim=128,
        moe_intermediate_size=expert_mlp,
        num_experts=experts,
        num_experts_per_tok=8,
    )


def _gpt_oss(layers: int, experts: int) -> dict[str, Any]:
    return _mixture(
        "gpt_oss",
        201088,
        2880,
        2880,
        layers,
        64,
        8,
        131072,
        head_dim=64,
        sliding_window=128,
        num_local_experts=experts,
        num_experts_per_tok=4,
    )


_LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
"""Sizes of DeepSeek's latent attention."""

_QWEN3_30B = _qwen3(2048, 6144, 48, 32, 4, 768, 128)
_MIXTRAL = {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None}
_MIXTRAL_8X7B = _mixture("mixtral", 32000, 4096, 14336, 32, 32, 8, 32768, **_MIXTRAL)
_DEEPSEEK_V3 = _mixture(
    "deepseek_v3",
    129280,
    7168,
    18432,
    61,
    128,
    128,
    163840,
    q_lora_rank=1536,
    moe_intermediate_size=2048,
    n_shared_experts=1,
    n_routed_experts=256,
    num_experts_per_tok=8,
    first_k_dense_replace=3,
    **_LATENT,
)
_DEEPSEEK_V2_LITE = _mixture(
    "deepseek_v2",
    102400,
    2048,
    10944,
    27,
    16,
    16,
    163840,
    q_lora_rank=None,
    moe_intermediate_size=1408,
    n_shared_experts=2,
    n_routed_experts=64,
    num_experts_per_tok=6,
    first_k_dense_replace=1,
    **_LATENT,
)
_GLM_4_5_AIR = _mixture(
    "glm4_moe",
    151552,
    4096,
    10944,
    46,
    96,
    8,
    131072,
    head_dim=128,
    attention_bias=True,
    moe_intermediate_size=1408,
    n_shared_experts=1,
    n_routed_experts=128,
    num_experts_per_tok=8,
    first_k_dense_replace=1,
    use_qk_norm=False,
)

_MOONLIGHT = _mixture(
    "deepseek_v3",
    163840,
    2048,
    11264,
    27,
    16,
    16,
    8192,
    q_lora_rank=None,
    moe_intermediate_size=1408,
    n_shared_experts=2,
    n_routed_experts=64,
    num_experts_per_tok=6,
    first_k_dense_replace=1,
    **_LATENT,
)
_KIMI_K2 = _DEEPSEEK_V3 | {
    "vocab_size": 163840,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "max_position_embeddings": 131072,
    "n_routed_experts": 384,
    "first_k_dense_replace": 1,
}
_GLM_4_5 = _GLM_4_5_AIR | {
    "hidden_size": 5120,
    "intermediate_size": 12288,
    "num_hidden_layers": 92,
    "moe_intermediate_size": 1536,
    "n_routed_experts": 160,
    "first_k_dense_replace": 3,
    "use_qk_norm": True,
}


def _qwen2(width: int, mlp: int, layers: int, heads: int, kv: int, **more: Any) -> dict[str, Any]:
    return _mixture("qwen2_moe", 151936, width, mlp, layers, heads, kv, 32768, **more)


MIXTURES: Mapping[str, Mapping[str, Any]] = {
    "qwen3-30b-a3b": _QWEN3_30B,
    "qwen3-30b-a3b-thinking-2507": _QWEN3_30B,
    "qwen3-coder-30b-a3b": _QWEN3_30B,
    "qwen3-235b-a22b": _qwen3(4096, 12288, 94, 64, 4, 1536, 128),
    "qwen3-coder-480b-a35b": _qwen3(6144, 8192, 62, 96, 8, 2560, 160),
    "gpt-oss-20b": _gpt_oss(24, 32),
    "gpt-oss-120b": _gpt_oss(36, 128),
    "mixtral-8x7b": _MIXTRAL_8X7B,
    "mixtral-8x7b-v0.1": _MIXTRAL_8X7B,
    "mixtral-8x7b-instruct-v0.1": _MIXTRAL_8X7B,
    "mixtral-8x22b-v0.1": _mixture("mixtral", 32768, 6144, 16384, 56, 48, 8, 65536, **_MIXTRAL),
    "deepseek-v3": _DEEPSEEK_V3,
    "deepseek-r1": _DEEPSEEK_V3,
    "deepseek-v2-lite": _DEEPSEEK_V2_LITE,
    "deepseek-coder-v2-lite": _DEEPSEEK_V2_LITE,
    "deepseek-v3.1": _DEEPSEEK_V3,
    "moonlight-16b-a3b": _MOONLIGHT,
    "kimi-k2": _KIMI_K2,
    "glm-4.5-air": _GLM_4_5_AIR,
    "glm-4.5": _GLM_4_5,
    "glm-4.6": _GLM_4_5,
    "qwen1.5-moe-a2.7b": _qwen2(
        2048,
        5632,
        24,
        16,
        16,
        moe_intermediate_size=1408,
        shared_expert_intermediate_size=5632,
        num_experts=60,
        num_experts_per_tok=4,
    ),
    "qwen2-57b-a14b": _qwen2(
        3584,
        18944,
        28,
        28,
        4,
        moe_intermediate_size=2560,
        shared_expert_intermediate_size=20480,
        num_experts=64,
        num_experts_per_tok=8,
    ),
    "olmoe-1b-7b-0924": _mixture(
        "olmoe", 50304, 2048, 1024, 16, 16, 16, 4096, num_experts=64, num_experts_per_tok=8
    ),
}
"""Shapes by name, without owner and variant. Published gpt-oss weights are MXFP4: their copies in bfloat16
are trained."""
