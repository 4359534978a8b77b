"""The configuration of `builtin:tiny`: a Qwen3-shaped model of about one million parameters."""

from __future__ import annotations

from typing import Any

BUILTIN_TINY = "builtin:tiny"


def tiny_config(vocab_size: int) -> dict[str, Any]:
    """A `model.config` mapping: 918,912 parameters at a vocabulary of 1,024 (tied embedding and head)."""
    return {
        "model_type": "qwen3",
        "vocab_size": vocab_size,
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    }
