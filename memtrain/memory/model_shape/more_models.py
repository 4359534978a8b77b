"""Shapes of more models that people train, older models too: facts of their config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def _shape(
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


_TIED = {"tie_word_embeddings": True}
_NO_WINDOW = {"sliding_window": None}

_LLAMA_7B = _shape("llama", 32000, 4096, 11008, 32, 32, 32, 4096)
_LLAMA_13B = _shape("llama", 32000, 5120, 13824, 40, 40, 40, 4096)
_MISTRAL_7B = _shape("mistral", 32000, 4096, 14336, 32, 32, 8, 32768, **_NO_WINDOW)
_LLAMA_3_8B = _shape("llama", 128256, 4096, 14336, 32, 32, 8, 131072, head_dim=128)
_QWEN25_7B = _shape("qwen2", 152064, 3584, 18944, 28, 28, 4, 131072)
_QWEN25_14B = _shape("qwen2", 152064, 5120, 13824, 48, 40, 8, 131072)
_QWEN25_32B = _shape("qwen2", 152064, 5120, 27648, 64, 40, 8, 131072)
_QWEN2_72B = _shape("qwen2", 152064, 8192, 29568, 80, 64, 8, 32768)
_QWEN2_05B = _shape("qwen2", 151936, 896, 4864, 24, 14, 2, 131072, **_TIED)
_QWEN2_15B = _shape("qwen2", 151936, 1536, 8960, 28, 12, 2, 131072, **_TIED)
_PHI_3 = _shape("phi3", 32064, 3072, 8192, 32, 32, 32, 131072, **_NO_WINDOW)

# Source: the config.json that each model is published with. Their totals are held against the published
# numbers of parameters by tests/memory/model_shape/test_known_models.py.
MORE_SHAPES: Mapping[str, dict[str, Any]] = {
    "llama-7b": _LLAMA_7B,
    "llama-2-7b": _LLAMA_7B,
    "vicuna-7b-v1.5": _LLAMA_7B,
    "vicuna-13b-v1.5": _LLAMA_13B,
    "codellama-7b": _shape("llama", 32016, 4096, 11008, 32, 32, 32, 16384),
    "llama-13b": _LLAMA_13B,
    "llama-2-13b": _LLAMA_13B,
    "llama-30b": _shape("llama", 32000, 6656, 17920, 60, 52, 52, 2048),
    "llama-65b": _shape("llama", 32000, 8192, 22016, 80, 64, 64, 2048),
    "llama-2-70b": _shape("llama", 32000, 8192, 28672, 80, 64, 8, 4096),
    "llama-3-8b": _LLAMA_3_8B | {"max_position_embeddings": 8192},
    "llama-3-70b": _shape("llama", 128256, 8192, 28672, 80, 64, 8, 8192),
    "meta-llama-3-70b": _shape("llama", 128256, 8192, 28672, 80, 64, 8, 8192),
    "codellama-34b": _shape("llama", 32000, 8192, 22016, 48, 64, 8, 16384),
    "tinyllama-1.1b": _shape("llama", 32000, 2048, 5632, 22, 32, 4, 2048),
    "solar-10.7b": _shape("llama", 32000, 4096, 14336, 48, 32, 8, 4096),
    "yi-6b": _shape("llama", 64000, 4096, 11008, 32, 32, 4, 4096),
    "yi-34b": _shape("llama", 64000, 7168, 20480, 60, 56, 8, 4096),
    "deepseek-llm-7b": _shape("llama", 102400, 4096, 11008, 30, 32, 32, 4096),
    "deepseek-coder-6.7b": _shape("llama", 32256, 4096, 11008, 32, 32, 32, 16384),
    "deepseek-r1-distill-llama-8b": _LLAMA_3_8B,
    "smollm2-135m": _shape("llama", 49152, 576, 1536, 30, 9, 3, 8192, **_TIED),
    "smollm2-360m": _shape("llama", 49152, 960, 2560, 32, 15, 5, 8192, **_TIED),
    "smollm2-1.7b": _shape("llama", 49152, 2048, 8192, 24, 32, 32, 8192, **_TIED),
    "mistral-7b-v0.1": _MISTRAL_7B,
    "mistral-7b-v0.2": _MISTRAL_7B,
    "mistral-7b-instruct-v0.1": _MISTRAL_7B,
    "mistral-7b-instruct-v0.2": _MISTRAL_7B,
    "zephyr-7b-beta": _MISTRAL_7B,
    "zephyr-7b-sft-full": _MISTRAL_7B,
    "mistral-nemo-instruct-2407": _shape(
        "mistral", 131072, 5120, 14336, 40, 32, 8, 131072, head_dim=128, **_NO_WINDOW
    ),
    "mistral-small-24b-2501": _shape(
        "mistral", 131072, 5120, 32768, 40, 32, 8, 32768, head_dim=128, **_NO_WINDOW
    ),
    "qwen1.5-0.5b": _shape("qwen2", 151936, 1024, 2816, 24, 16, 16, 32768, **_TIED),
    "qwen1.5-1.8b": _shape("qwen2", 151936, 2048, 5504, 24, 16, 16, 32768),
    "qwen1.5-4b": _shape("qwen2", 151936, 2560, 6912, 40, 20, 20, 32768),
    "qwen1.5-7b": _shape("qwen2", 151936, 4096, 11008, 32, 32, 32, 32768),
    "qwen1.5-14b": _shape("qwen2", 152064, 5120, 13696, 40, 40, 40, 32768),
    "qwen1.5-32b": _shape("qwen2", 152064, 5120, 27392, 64, 40, 8, 32768),
    "qwen1.5-72b": _shape("qwen2", 152064, 8192, 24576, 80, 64, 64, 32768),
    "qwen2-0.5b": _QWEN2_05B,
    "qwen2-1.5b": _QWEN2_15B,
    "qwen2-7b": _QWEN25_7B,
    "qwen2-72b": _QWEN2_72B,
    "qwen2.5-14b": _QWEN25_14B,
    "qwen2.5-32b": _QWEN25_32B,
    "qwen2.5-72b": _QWEN2_72B,
    "qwen2.5-math-1.5b": _QWEN2_15B,
    "qwen2.5-math-7b": _QWEN25_7B,
    "qwen2.5-coder-0.5b": _QWEN2_05B,
    "qwen2.5-coder-1.5b": _QWEN2_15B,
    "qwen2.5-coder-7b": _QWEN25_7B,
    "qwen2.5-coder-14b": _QWEN25_14B,
    "qwen2.5-coder-32b": _QWEN25_32B,
    "deepseek-r1-distill-qwen-1.5b": _QWEN2_15B | {"tie_word_embeddings": False},
    "deepseek-r1-distill-qwen-7b": _QWEN25_7B,
    "deepseek-r1-distill-qwen-14b": _QWEN25_14B,
    "deepseek-r1-distill-qwen-32b": _QWEN25_32B,
    "gemma-2b": _shape("gemma", 256000, 2048, 16384, 18, 8, 1, 8192, head_dim=256, **_TIED),
    "gemma-7b": _shape("gemma", 256000, 3072, 24576, 28, 16, 16, 8192, head_dim=256, **_TIED),
    "gemma-2-2b": _shape("gemma2", 256000, 2304, 9216, 26, 8, 4, 8192, head_dim=256, **_TIED),
    "gemma-2-9b": _shape("gemma2", 256000, 3584, 14336, 42, 16, 8, 8192, head_dim=256, **_TIED),
    "gemma-2-27b": _shape("gemma2", 256000, 4608, 36864, 46, 32, 16, 8192, head_dim=128, **_TIED),
    "phi-3-mini-4k": _PHI_3,
    "phi-3-mini-128k": _PHI_3,
    "phi-3.5-mini": _PHI_3,
    "phi-3-medium-4k": _shape("phi3", 32064, 5120, 17920, 40, 40, 10, 4096, **_NO_WINDOW),
    "phi-4": _shape("phi3", 100352, 5120, 17920, 40, 40, 10, 16384, **_NO_WINDOW),
}
"""Shapes by name, without owner and variant."""
