"""The shape of a model for planning: by formula where its family is known, else counted in its modules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from memtrain.memory.model_shape.shape import ModelShape, has_formula, shape_of


def shape_for(config: Mapping[str, Any], where: str = "", head: Literal["lm", "score"] = "lm") -> ModelShape:
    """The shape that a config.json (as a mapping) describes. torch is loaded for unknown families only.

    Raises: RecipeError when the numbers of a decoder are missing.
    """
    if has_formula(config):
        return shape_of(config, where, head)
    from memtrain.trainers.model.loading.module_shapes import counted_shape

    return counted_shape(config, where, head)
