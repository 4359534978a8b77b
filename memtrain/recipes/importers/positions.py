"""Scaled rotary positions of another tool's configuration: `model.rope_scaling`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast, get_args

from memtrain.recipes.importers.tool import ToolReading
from memtrain.recipes.sections.model import RopeScaling

KINDS = cast(tuple[str, ...], get_args(RopeScaling.model_fields["rope_type"].annotation))
"""Kinds of scaling that a recipe names."""


def scale_positions(reading: ToolReading, key: str, given: object) -> None:
    """Set `model.rope_scaling` from the mapping of transformers' configurations, or say what is to be set.

    A kind by itself has a factor that the tool computes from the model's own length, which is not known here.
    """
    if given in (None, "", {}, "none"):
        return
    if not isinstance(given, Mapping):
        reading.lose(key, _by_hand(str(given)))
        return
    named = dict(cast(Mapping[str, Any], given))
    kind = str(named.pop("rope_type", None) or named.pop("type", None) or "")
    named.pop("type", None)
    unknown = sorted(name for name in named if name not in RopeScaling.model_fields)
    if kind not in KINDS or "factor" not in named or unknown:
        also = f"; it has no {', '.join(unknown)}" if unknown else ""
        reading.lose(key, f"{_by_hand(kind, named.get('factor', 'F'))}{also}")
        return
    reading.set_recipe("model.rope_scaling", {"rope_type": kind, **named})


def _by_hand(kind: str, factor: object = "F") -> str:
    if kind not in KINDS:
        return f"`model.rope_scaling` takes {', '.join(KINDS)}; write others into the model's config.json"
    by_length = ", where F is the longest row over the model's max_position_embeddings, rounded up"
    return f"set `model.rope_scaling: {{rope_type: {kind}, factor: {factor}}}`{by_length * (factor == 'F')}"
