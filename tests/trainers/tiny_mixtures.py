"""Tiny mixtures of experts that are saved as on the hub: a matrix for each expert."""

from pathlib import Path

import torch


def save_mixture(folder: Path, seed: int = 0, **config: object) -> Path:
    """A mixture of Qwen3's shape with random weights; `config` changes its shape. Returns `folder`."""
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    shape: dict[str, object] = {
        "vocab_size": 128,
        "hidden_size": 32,
        "intermediate_size": 48,
        "moe_intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_experts": 5,
        "num_experts_per_tok": 2,
    }
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(Qwen3MoeConfig(**(shape | config)))
    model.save_pretrained(folder)
    return folder
