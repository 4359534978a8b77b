"""The names that model families give the numbers of their config.json, and the one name used here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

# Source: `attribute_map` and the signatures of configuration_*.py of transformers 5.23.
OTHER_NAMES: Mapping[str, tuple[str, ...]] = {
    "hidden_size": ("n_embd", "n_embed", "d_model", "embed_dim", "emb_dim"),
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers", "decoder_layers"),
    "num_attention_heads": ("n_head", "n_heads", "num_heads", "decoder_attention_heads", "attention_heads"),
    "num_key_value_heads": ("num_kv_heads", "n_head_kv", "multi_query_group_num"),
    "intermediate_size": ("n_inner", "ffn_dim", "ffn_hidden_size", "d_ff", "decoder_ffn_dim"),
    "max_position_embeddings": ("n_positions", "max_seq_len", "n_ctx", "max_sequence_length"),
    "attention_dropout": ("attn_pdrop", "attention_probs_dropout_prob"),
    "final_logit_softcapping": ("logits_soft_cap", "output_logit_soft_cap"),
    "hidden_dropout": ("resid_pdrop", "residual_dropout", "hidden_dropout_prob", "dropout", "resid_dropout"),
}
"""Other names of a number, the one to take first first."""

INSIDE: Mapping[str, str] = {"attn_config": "attn_pdrop", "ffn_config": "ffn_hidden_size"}
"""Sections of a configuration in which a number may stand."""


def canonical(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration with each number also under the name used here; present keys stay."""
    found = dict(config)
    for section, key in INSIDE.items():
        inner = config.get(section)
        if isinstance(inner, Mapping) and key in inner:
            found.setdefault(key, cast(Mapping[str, Any], inner)[key])
    for name, others in OTHER_NAMES.items():
        if found.get(name) is None:
            values = [found[other] for other in others if found.get(other) is not None]
            if values:
                found[name] = values[0]
    return found
