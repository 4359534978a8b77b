"""Rotary positions scaled by the recipe: the configuration that a model has with `model.rope_scaling`."""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil
from typing import Any, cast

from memtrain.errors import RecipeError
from memtrain.memory.model_shape.config_names import canonical
from memtrain.recipes.sections.model import RopeScaling

PATH = "model.rope_scaling"
OF_EVERY_KIND = ("rope_theta", "partial_rotary_factor")
"""Numbers of the rotary positions themselves, which any scaling leaves as they are."""


def scaled(config: Mapping[str, Any], scaling: RopeScaling | None) -> dict[str, Any]:
    """`config` (a config.json, or `config.to_dict()`) with `scaling` in place of its own.

    Keys of a scaling of the same kind that the recipe leaves out stay (`low_freq_factor` of Llama 3.1). The
    longest row that the model is made for grows by the factor.

    Raises: RecipeError for a model without rotary positions, or with several kinds of them.
    """
    if scaling is None:
        return dict(config)
    own = rope_of(config)
    most = canonical(config).get("max_position_embeddings")
    if own is None or not isinstance(most, int):
        why = "its layers turn positions by their kind, or it is made of several models"
        raise RecipeError(
            f"the {config.get('model_type')} model has no single kind of rotary positions to scale: {why}",
            PATH,
            "remove it, and write the scaling into the config.json of a copy of the model",
        )
    given = scaling.model_dump(exclude_none=True)
    is_same = own.get("rope_type") == scaling.rope_type
    kept = own if is_same else {name: own[name] for name in OF_EVERY_KIND if name in own}
    section: dict[str, Any] = {"original_max_position_embeddings": most} | kept | given
    before = float(own.get("factor") or 1.0) if is_same else 1.0
    longest = max(most, ceil(most * scaling.factor / before))
    if scaling.rope_type == "dynamic":
        # Dynamic NTK counts from the model's own length, which it reads here.
        longest = most
    rest = {name: value for name, value in config.items() if name != "rope_scaling"}
    return rest | {"rope_parameters": section, "max_position_embeddings": longest}


def rope_of(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """The section of a configuration that says how positions are turned, with `rope_type` and `rope_theta`.

    None where there is none, several, or one in a part of the configuration.
    """
    known = canonical(config)
    section: object = known.get("rope_parameters") or known.get("rope_scaling") or {}
    theta = known.get("rope_theta")
    if isinstance(config.get("text_config"), Mapping) or not isinstance(section, Mapping):
        return None
    own = dict(cast(Mapping[str, Any], section))
    if any(isinstance(one, Mapping) for one in own.values()):
        return None
    if not own and theta is None and known.get("model_type") not in ROTARY:
        return None
    own |= {} if theta is None or "rope_theta" in own else {"rope_theta": theta}
    own["rope_type"] = str(own.get("rope_type") or own.pop("type", None) or "default")
    return own


ROTARY = ("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "smollm3", "olmo2", "phi3")
"""Model types with rotary positions whose configurations may leave theta to its default."""


def suggested(config: Mapping[str, Any], longest: int) -> str | None:
    """The recipe's words for rows of `longest` tokens beyond a model's own length; None: none are known.

    A scaling of the model's own goes on, with a larger factor; others get YaRN (arXiv:2309.00071).
    """
    own, most = rope_of(config), canonical(config).get("max_position_embeddings")
    if own is None or not isinstance(most, int):
        return None
    factor = ceil(longest / most)
    if own["rope_type"] in ("llama3", "yarn", "linear") and own.get("factor"):
        return f"{{rope_type: {own['rope_type']}, factor: {factor * float(own['factor']):g}}}"
    return f"{{rope_type: yarn, factor: {factor}}}" if own["rope_type"] == "default" else None
