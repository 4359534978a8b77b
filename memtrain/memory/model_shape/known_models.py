"""Shapes of well-known models, for planning where the hub cannot be asked: facts of their config.json."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from memtrain.memory.model_shape.mixtures import MIXTURES
from memtrain.memory.model_shape.more_models import MORE_SHAPES


def known_config(model_id: str) -> Mapping[str, Any] | None:
    """Shape keys in the config.json of a hub id; None for a model that is not in the table."""
    name = model_id.rsplit("/", 1)[-1].lower()
    for beginning in _BEGINNINGS:
        name = name.removeprefix(beginning)
    for ending in ("", *_COPIES, *_ENDINGS):
        name = name.removesuffix(ending)
        for same in (name, name.removeprefix("meta-")):
            if same in _SHAPES:
                return _SHAPES[same]
    return None


def known_name(path: str) -> str | None:
    """The longest name of a model in the table that a folder's name begins with (`/x/Qwen1.5-14B-Chat-v3.0`);
    None where there is none."""
    folder = path.rstrip("/").rsplit("/", 1)[-1].lower().replace("_", "-").removeprefix("meta-")
    names = [name for name in _SHAPES if re.match(rf"{re.escape(name)}(?![a-z0-9.])", folder)]
    return max(names, key=len, default=None)


def known_models() -> tuple[str, ...]:
    """Names of the models in the table, without their owner and variant."""
    return tuple(_SHAPES)


_COPIES = ("-bnb-4bit", "-unsloth", "-gptq", "-awq", "-hf", "-chat", "-chat-v1.0", "-v1.0", "-distill")
"""Endings of copies of a model by others."""

_ENDINGS = ("-base", "-instruct-v0.3", "-v0.3", "-instruct-2507", "-instruct", "-it", "-pt", "-inst")
"""Endings of the names of one shape's variants."""


_BEGINNINGS = ("skywork-reward-v2-",)
"""Beginnings of the names of one shape's reward models."""


def _llama(
    width: int, mlp: int, layers: int, heads: int, *, tied: bool = False, positions: int = 131072
) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": width,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": 64 if width == 2048 else 128,
        "tie_word_embeddings": tied,
        "max_position_embeddings": positions,
        "rope_theta": 500_000.0,
        # Llama 3.1 and 3.3 start from 8,192 tokens by 8, the small ones of 3.2 by 32.
        "rope_scaling": _llama3_scaling(32.0 if tied else 8.0) if positions > 8192 else None,
    }


def _llama3_scaling(factor: float) -> dict[str, Any]:
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


def _qwen3(width: int, mlp: int, layers: int, heads: int, *, tied: bool = False) -> dict[str, Any]:
    return {
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": width,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "tie_word_embeddings": tied,
        "max_position_embeddings": 40960,
    }


def _qwen25(
    width: int, mlp: int, layers: int, heads: int, kv: int, vocab: int, *, tied: bool = False
) -> dict[str, Any]:
    return {
        "model_type": "qwen2",
        "vocab_size": vocab,
        "hidden_size": width,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "tie_word_embeddings": tied,
        "max_position_embeddings": 32768,
    }


def _gemma3(
    width: int, mlp: int, layers: int, heads: int, kv: int, window: int, positions: int, vocab: int
) -> dict[str, Any]:
    return {
        "model_type": "gemma3_text",
        "vocab_size": vocab,
        "hidden_size": width,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "head_dim": 256,
        "sliding_window": window,
        "tie_word_embeddings": True,
        "max_position_embeddings": positions,
    }


# Source: the config.json that each model is published with. Their totals are held against the published
# numbers of parameters by tests/memory/model_shape/test_known_models.py.
_SHAPES: dict[str, Mapping[str, Any]] = {**MORE_SHAPES, **MIXTURES} | {
    "qwen3-0.6b": _qwen3(1024, 3072, 28, 16, tied=True),
    "qwen3-1.7b": _qwen3(2048, 6144, 28, 16, tied=True),
    "qwen3-4b": _qwen3(2560, 9728, 36, 32, tied=True),
    "qwen3-8b": _qwen3(4096, 12288, 36, 32),
    "qwen3-14b": _qwen3(5120, 17408, 40, 40),
    "qwen3-32b": _qwen3(5120, 25600, 64, 64),
    "qwen2.5-0.5b": _qwen25(896, 4864, 24, 14, 2, 151936, tied=True),
    "qwen2.5-1.5b": _qwen25(1536, 8960, 28, 12, 2, 151936, tied=True),
    "qwen2.5-3b": _qwen25(2048, 11008, 36, 16, 2, 151936, tied=True),
    "qwen2.5-7b": _qwen25(3584, 18944, 28, 28, 4, 152064),
    "llama-3.2-1b": _llama(2048, 8192, 16, 32, tied=True),
    "llama-3.2-3b": _llama(3072, 8192, 28, 24, tied=True),
    "llama-3.1-8b": _llama(4096, 14336, 32, 32),
    "meta-llama-3-8b": _llama(4096, 14336, 32, 32, positions=8192),
    "llama-3.1-70b": _llama(8192, 28672, 80, 64),
    "llama-3.3-70b": _llama(8192, 28672, 80, 64),
    "mistral-7b": {
        "model_type": "mistral",
        "vocab_size": 32768,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "sliding_window": None,
        "max_position_embeddings": 32768,
    },
    "gemma-3-270m": _gemma3(640, 2048, 18, 4, 1, 512, 32768, 262144),
    "gemma-3-1b": _gemma3(1152, 6912, 26, 4, 1, 512, 32768, 262144),
    "gemma-3-4b": _gemma3(2560, 10240, 34, 8, 4, 1024, 131072, 262208),
    "gemma-3-12b": _gemma3(3840, 15360, 48, 16, 8, 1024, 131072, 262208),
    "smollm3-3b": {
        "model_type": "smollm3",
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 11008,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "tie_word_embeddings": True,
        "max_position_embeddings": 65536,
    },
}
