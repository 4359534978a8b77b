"""Families of models, and activations, that Liger has kernels for.

Source: liger-kernel 0.8.5, transformers/monkey_patch.py, MODEL_TYPE_TO_APPLY_LIGER_FN; held against the
installed package by tests/trainers/model/loading/test_liger.py.
"""

from __future__ import annotations

LIGER_FAMILIES = frozenset(
    [
        "deepseek_v2",
        "deepseek_v3",
        "deepseek_v4",
        "exaone4",
        "falcon_h1",
        "gemma",
        "gemma2",
        "gemma3",
        "gemma3_text",
        "gemma4",
        "gemma4_text",
        "glm4",
        "glm4v",
        "glm4v_moe",
        "gpt_oss",
        "granite",
        "hunyuan_v1_dense",
        "hunyuan_v1_moe",
        "internvl",
        "llama",
        "llama4",
        "llama4_text",
        "llava",
        "ministral",
        "mistral",
        "mixtral",
        "mllama",
        "mllama_text_model",
        "muse_glimmer",
        "nemotron",
        "olmo2",
        "olmo3",
        "paligemma",
        "phi3",
        "pixtral",
        "qwen2",
        "qwen2_5_vl",
        "qwen2_5_vl_text",
        "qwen2_vl",
        "qwen2_vl_text",
        "qwen3",
        "qwen3_5",
        "qwen3_5_moe",
        "qwen3_5_moe_text",
        "qwen3_5_text",
        "qwen3_moe",
        "qwen3_next",
        "qwen3_vl",
        "qwen3_vl_moe",
        "qwen3_vl_moe_text",
        "qwen3_vl_text",
        "smollm3",
        "smolvlm",
    ]
)
"""`model_type` of each."""

LIGER_ACTIVATIONS = ("silu", "swish", "gelu_pytorch_tanh", "relu2")
"""Activations that the kernels compute, whatever a model's configuration says (swiglu.py, geglu.py); the MLP
of nemotron stays as it is."""
