"""A configuration looked up in the table of families: its text part, its family, and what is uncertain."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from memtrain.memory.model_shape.families import FAMILIES, Family
from memtrain.memory.model_shape.layer_parts import Counts


def looked_up(config: Mapping[str, Any], counts: Counts | None) -> tuple[Mapping[str, Any], Family, str]:
    """(the text part of a config, its family, its uncertain points)."""
    notes: list[str] = []
    if isinstance(config.get("text_config"), Mapping):
        if counts is None:
            notes.append("only the text part of the model is counted")
        config = config["text_config"]
    model_type = str(config.get("model_type", ""))
    family = FAMILIES.get(model_type)
    if family is None and counts is not None:
        notes.append(f"model type '{model_type}' is not in the table: weights are counted")
    elif family is None:
        notes.append(f"model type '{model_type}' is not in the table: counted like a Llama of its sizes")
    return config, family or Family(), "; ".join(notes)
