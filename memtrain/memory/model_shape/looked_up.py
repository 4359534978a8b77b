"""A configuration looked up in the table of families: its text part, its family, and what is uncertain."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from memtrain.memory.model_shape.families import FAMILIES, PASSED, Family
from memtrain.memory.model_shape.layer_parts import Counts
from memtrain.memory.model_shape.length_rules import own_layers


def looked_up(config: Mapping[str, Any], counts: Counts | None) -> tuple[Mapping[str, Any], Family, str]:
    """(the text part of a config, its family, its uncertain points)."""
    notes: list[str] = []
    if isinstance(config.get("text_config"), Mapping):
        if counts is None:
            notes.append("only the text part of the model is counted")
        config = config["text_config"]
    model_type = str(config.get("model_type", ""))
    family = FAMILIES.get(model_type)
    is_passed = counts is not None and (own_layers(config) or model_type in PASSED)
    if family is None and is_passed:
        notes.append(f"model type '{model_type}' is not in the table: weights are counted")
    elif family is None:
        part = "counted" if counts is None else "weights are counted, activations are assumed to be"
        notes.append(f"model type '{model_type}' is not in the table: {part} like a Llama of its sizes")
    return config, family or Family(), "; ".join(notes)
