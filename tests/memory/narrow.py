"""A Llama of width 8 and two layers, whose weights can be counted by hand."""

from typing import Any

NARROW: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
}
